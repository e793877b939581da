"""Learning from the best and the worst of the samples to each prompt.

Shapes: N responses (the chosen, then the rejected), G pairs.
"""

from collections.abc import Hashable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from penstock.graph import node, requires
from penstock.graph.deferred import shape_of
from penstock.graph.requires import Call
from penstock.graph.types import AnyPolicy, Logprobs, Metrics, Rewards, Rollouts
from penstock.nodes.learn.batching import check_shape, group_rows, of_its_rows
from penstock.nodes.learn.logprobs import packed_logprobs
from penstock.nodes.learn.optimizer import Schedule, UpdateOptions, update_options
from penstock.nodes.open_model import reads_tokens
from penstock.nodes.option_checks import positive
from penstock.nodes.policy import language_policy
from penstock.nodes.reward_model import best_and_worst, dpo_loss, learn_pairs


def pairs(call: Call) -> None:
    """Requirement of pairs of a best and a worst response: several responses to a prompt."""
    if call.samples("rewards") == 1:
        given = "rewards of samples=1, one response to a prompt"
        needed = "2 or more responses to a prompt: the best and the worst make a pair (option samples)"
        raise call.lack(given, needed, code="too-few-samples")


@reads_tokens
@requires(of_its_rows, pairs, positive("beta"))
@node(pool="trainer", clock="update")
@update_options()
def dpo_update(
    policy: AnyPolicy,
    rollouts: Rollouts,
    rewards: Rewards,
    reference: Logprobs,
    *,
    beta: float = 0.1,
    lr: float | Schedule = 1e-4,
    **options: Unpack[UpdateOptions],
) -> tuple[AnyPolicy, Metrics]:
    """One AdamW step on the DPO loss of each prompt's best and worst response, averaged over the pairs.

    DPO (Rafailov et al. 2023, arXiv 2305.18290), equation 7 and the gradient below it. A prefix that
    responses continue is a part of their prompt. Prompts whose rewards are all equal make no pair. Metrics: `pairs`,
    their number; and if there are any, `loss`, `margin`, the mean of log π/π_ref (chosen) − log π/π_ref (rejected), in
    nats, and `preferred`, the share with a margin above 0. Raises ValueError for numbers of another shape than the
    rollouts', and if no prompt has two responses.
    """
    check_shape("dpo_update: given rewards", shape_of(rewards, "values_N") or [], rollouts, each="response")
    check_shape("dpo_update: given reference", shape_of(reference, "logprobs_NT") or [], rollouts, each="token")
    learner = language_policy(policy)
    alike: Sequence[Hashable] = rollouts.groups
    if rollouts.prefix_lengths_N is not None:
        # Responses after different prefixes answer different texts.
        after_N = rollouts.prefixes_N.masked_fill(rollouts.prefix_lengths_N == 0, -1)
        alike = list(zip(alike, after_N.tolist(), strict=True))
    group_N = group_rows(alike)
    if len(group_N) and int(group_N.max()) == len(group_N) - 1:  # each has its own
        needed = "2 or more to one of them: the best and the worst make a pair"
        raise ValueError(f"dpo_update: given {len(group_N)} responses to as many prompts, needed {needed}")
    best_G, worst_G, weight_G = best_and_worst(rewards.values_N.cpu(), group_N)
    rows_N = torch.cat([best_G[weight_G > 0], worst_G[weight_G > 0]])
    pairs = len(rows_N) // 2
    items = learner.pack(rollouts.take(rows_N), options["micro_tokens"]) if pairs else []
    reference_NT = reference.take(rows_N).logprobs_NT.to(learner.device)
    reference_N = torch.zeros(len(rows_N), device=learner.device)
    for packed in items:
        reference_N.index_add_(0, packed.sequence_P, reference_NT[packed.sequence_P, packed.step_P])

    def loss(chosen_G: Tensor, rejected_G: Tensor) -> Tensor:
        return dpo_loss(chosen_G, rejected_G, *reference_N.chunk(2), beta=beta)

    sums_N, metrics = learn_pairs(learner, items, pairs, packed_logprobs, loss, options, lr)
    chosen_G, rejected_G = (sums_N - reference_N).chunk(2)
    figures = {"pairs": float(pairs), "tokens": float(sum(len(packed.targets_P) for packed in items)), **metrics}
    if pairs:
        figures |= {
            "margin": float((chosen_G - rejected_G).mean()),
            "preferred": float((chosen_G > rejected_G).double().mean()),
        }
    return policy, figures
