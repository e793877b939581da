"""Learning from the best and the worst of the samples to each prompt.

The loss of a pair needs the log-probabilities of two whole responses, which may be in different micro-batches: they
are computed first, without a gradient, and then each token gets the weight that the loss's gradient gives it.

Shapes: N responses (the chosen, then the rejected), G pairs, P tokens of a micro-batch.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from penstock.graph import node, requires
from penstock.graph.requires import Call
from penstock.graph.types import AnyPolicy, Logprobs, Metrics, Rewards, Rollouts
from penstock.nodes.learn.batching import Packed, group_rows
from penstock.nodes.learn.optimizer import Schedule, UpdateOptions, update_options
from penstock.nodes.open_model import reads_tokens
from penstock.nodes.option_checks import positive
from penstock.nodes.policy import LanguagePolicy, language_policy
from penstock.nodes.reward_model import best_and_worst, dpo_loss


def pairs(call: Call) -> None:
    """What a best and a worst response require."""
    if call.samples("rewards") == 1:
        given = "rewards of samples=1, one response to a prompt"
        needed = "2 or more responses to a prompt: the best and the worst make a pair (option samples)"
        raise call.lack(given, needed, code="too-few-samples")


@reads_tokens
@requires(pairs, positive("beta"))
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

    DPO (Rafailov et al. 2023, arXiv 2305.18290), equation 7 and the gradient below it. Prompts whose rewards are all
    equal make no pair. Figures: `pairs`, how many there were; of them `margin`, the mean of
    log π/π_ref (chosen) − log π/π_ref (rejected), in nats, and `preferred`, the share with a margin above 0.
    """
    learner = language_policy(policy)
    rows_N = _pairs(rollouts.ordinals, rewards.values_N)
    pairs = len(rows_N) // 2
    figures = {"loss": 0.0, "pairs": float(pairs), "margin": 0.0, "preferred": 0.0, "tokens": 0.0}
    if pairs:
        chosen, others = rollouts.take(rows_N), reference.take(rows_N)
        figures |= _backward(learner, chosen, others.logprobs_NT.to(learner.device), beta, options["micro_tokens"])
    rate = learner.rate(lr)
    grad_norm = learner.apply(options, lr=rate, normaliser=max(1, pairs))
    return policy, {**figures, "grad_norm": grad_norm, "lr": rate}


def _pairs(ordinals: Sequence[int], rewards_N: Tensor) -> list[int]:
    """The rows of all chosen responses, then those of the rejected ones in the same order."""
    best_G, worst_G, weight_G = best_and_worst(rewards_N.cpu(), group_rows(ordinals))
    return [*best_G[weight_G > 0].tolist(), *worst_G[weight_G > 0].tolist()]


def _backward(
    learner: LanguagePolicy, rollouts: Rollouts, reference_NT: Tensor, beta: float, micro_tokens: int | None
) -> Metrics:
    """Add the gradient of the pairs' summed loss to the learner's."""
    micro_batches = learner.pack(rollouts, micro_tokens)
    ours_N, reference_N = (torch.zeros(len(rollouts), device=learner.device) for _ in range(2))
    for packed, logprobs_P in zip(micro_batches, learner.logprobs(micro_batches), strict=True):
        ours_N.index_add_(0, packed.sequence_P, logprobs_P)
        reference_N.index_add_(0, packed.sequence_P, reference_NT[packed.sequence_P, packed.step_P])
    # The loss's gradient by each response's log-probability is the weight of all its tokens.
    with torch.enable_grad():
        ours_N.requires_grad_()
        losses_G = dpo_loss(*ours_N.chunk(2), *reference_N.chunk(2), beta=beta)
        (weights_N,) = torch.autograd.grad(losses_G.sum(), ours_N)

    def loss(packed: Packed, logprobs_P: Tensor, entropy_P: Tensor) -> tuple[Tensor, None]:
        return (weights_N[packed.sequence_P] * logprobs_P).sum(), None

    learner.accumulate(micro_batches, loss)
    chosen_G, rejected_G = (ours_N.detach() - reference_N).chunk(2)
    return {
        "loss": float(losses_G.detach().mean()),
        "margin": float((chosen_G - rejected_G).mean()),
        "preferred": float((chosen_G > rejected_G).float().mean()),
        "tokens": float(sum(len(packed.targets_P) for packed in micro_batches)),
    }
