"""The numbers that a scorer gives: to each token of a response, or to the response as a whole, at its last token.

Shapes: N sequences, S their padded length, P predicted tokens of a micro-batch, D hidden width.
"""

from typing import Any

import torch
from torch import Tensor

from penstock.nodes.learn.packing import Packed
from penstock.nodes.model import Scorer
from penstock.nodes.sequence_model import SequenceModel


def packed_values(model: Scorer, packed: Packed) -> Tensor:
    """The number at the token before each target: V(s_t), where target t is the action. float32 [P]."""
    hidden_PD = model(packed.tokens_RW).flatten(0, 1)[packed.at_P]
    return model.values(hidden_PD)


def pack_ends(
    model: SequenceModel[Any], tokens_NS: Tensor, prompts_N: Tensor, responses_N: Tensor, max_tokens: int | None
) -> list[Packed]:
    """Micro-batches that hold whole sequences, with one target for each: what would follow its last token.

    `packed_values` of them are the sequences' scores, as `LlamaForSequenceClassification` pools them.
    """
    count, width = len(tokens_NS), int(responses_N.max()) + 1
    ends_NT = torch.arange(width) == responses_N.cpu()[:, None]
    padded_NS = torch.cat([tokens_NS, tokens_NS.new_zeros(count, 1)], dim=1).to(model.device)
    return model.pack_tokens(padded_NS, prompts_N, responses_N + 1, max_tokens, ends_NT)


@torch.no_grad()
def sequence_scores(model: SequenceModel[Scorer], micro_batches: list[Packed], num_sequences: int) -> Tensor:
    """The score of each sequence of `pack_ends`, float32 [N], without a gradient."""
    scores_N = torch.zeros(num_sequences, device=model.device)
    values = model.workers.map(packed_values, micro_batches)
    for packed, values_P in zip(micro_batches, values, strict=True):
        scores_N[packed.sequence_P] = values_P
    return scores_N
