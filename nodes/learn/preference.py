"""Learning from pairs of responses, one better than the other. Nothing here averages over pairs.

Shapes: N pairs (or responses, where pairs are chosen), G prompts. Log-probabilities are of whole responses, that is
`segment_sum` of their tokens' (nats).
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.nodes.learn.advantages import uniform_groups
from penstock.nodes.learn.segments import segment_lengths


def dpo_loss(
    chosen_N: Tensor, rejected_N: Tensor, reference_chosen_N: Tensor, reference_rejected_N: Tensor, *, beta: float
) -> Tensor:
    """−log σ(β · (log π(y_w)/π_ref(y_w) − log π(y_l)/π_ref(y_l))) of each pair.

    DPO (Rafailov et al. 2023, arXiv 2305.18290), equation 7. With pairs that the policy has just sampled and a judge
    has ordered, it is online DPO (Guo et al. 2024, arXiv 2402.04792), section 3.
    """
    margins_N = (chosen_N - reference_chosen_N) - (rejected_N - reference_rejected_N)
    return -logsigmoid(beta * margins_N)


def best_and_worst(rewards_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(row of each group's best response, row of its worst, weight of the pair), each [G].

    Among equals the first row is taken. The weight is 1, or 0 where all rewards of the group are equal: there is no
    preference then, and best and worst are the same row. `group_N` (int64) holds each of 0 to G − 1.
    """
    weight_G = (~uniform_groups(rewards_N, group_N)).to(rewards_N.dtype)
    return _first_by(-rewards_N, group_N), _first_by(rewards_N, group_N), weight_G


def bradley_terry_loss(chosen_N: Tensor, rejected_N: Tensor) -> Tensor:
    """−log σ(r(y_w) − r(y_l)) of each pair of scores, what a reward model learns by.

    InstructGPT (Ouyang et al. 2022, arXiv 2203.02155), equation 1; the same as DPO (arXiv 2305.18290), equation 2.
    """
    return -logsigmoid(chosen_N - rejected_N)


def bradley_terry_accuracy(chosen_N: Tensor, rejected_N: Tensor) -> Tensor:
    """1 where the chosen response has the higher score, 0 where it has the lower one, ½ where they are equal [N]."""
    return (1 + torch.sign(chosen_N - rejected_N).detach()) / 2


def _first_by(keys_N: Tensor, group_N: Tensor) -> Tensor:
    """The row of each group's lowest key, the first one among equals."""
    by_key_N = torch.argsort(keys_N, stable=True)
    by_group_N = by_key_N[torch.argsort(group_N[by_key_N], stable=True)]
    lengths_G = segment_lengths(group_N)
    return by_group_N[lengths_G.cumsum(0) - lengths_G]
