"""One update of a policy: rollouts in, the next version out, with the figures that say whether it went well.

Sums first, the normaliser last: each micro-batch adds the gradient of its sum of token losses, and the total is
divided once. Equal rollouts make equal weights, to the bit for the same number of threads.

Shapes: N responses, T tokens of a response, S of prompt and response, P response tokens of a micro-batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.graph import node
from penstock.graph.types import Advantages, Logprobs, Metrics, Policy, Reference, Rollouts
from penstock.nodes.data import Demonstrations
from penstock.nodes.learn.losses import aipo_loss, grpo_loss, ratio, sft_loss
from penstock.nodes.learn.packing import Packed
from penstock.nodes.policy import LanguagePolicy, Step, language_model, language_policy


@node(pool="trainer", clock="update")
def aipo_update(
    policy: Policy,
    rollouts: Rollouts,
    advantage: Advantages,
    *,
    rho: float = 4.0,
    lr: float = 1e-4,
    clip_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    micro_tokens: int | None = None,
) -> tuple[Policy, Metrics]:
    """One AdamW step on the AIPO loss, averaged over response tokens (LlamaRL, arXiv 2505.24034, section 6).

    `rho` bounds each token's importance ratio π / μ from above, `clip_norm` the gradient's 2-norm.
    """

    def loss(logprobs_P: Tensor, sampled: _Sampled) -> Tensor:
        return aipo_loss(logprobs_P, sampled.behaviour_P, sampled.advantages_P, rho=rho)

    def clipped(ratio_P: Tensor, sampled: _Sampled) -> Tensor:
        return ratio_P > rho

    batch = _Batch(language_policy(policy), rollouts, advantage, None, micro_tokens)
    figures = batch.backward(loss, clipped)
    step = Step(lr, clip_norm, betas, weight_decay)
    return policy, batch.apply(step, figures, normaliser=figures["tokens"])


@node(pool="trainer", clock="update")
def grpo_update(
    policy: Policy,
    rollouts: Rollouts,
    advantage: Advantages,
    reference: Logprobs | None = None,
    *,
    clip: float = 0.2,
    kl: float = 0.0,
    lr: float = 1e-4,
    clip_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    micro_tokens: int | None = None,
) -> tuple[Policy, Metrics]:
    """One AdamW step on GRPO's loss (DeepSeekMath, arXiv 2402.03300, equation 3).

    Token losses are averaged over each response, then over the responses; `clip` is PPO's ε. Where `reference` is
    given, `kl` times the divergence from that policy is added.
    """

    def loss(logprobs_P: Tensor, sampled: _Sampled) -> Tensor:
        behaviour_P, advantages_P, reference_P = sampled.behaviour_P, sampled.advantages_P, sampled.reference_P
        loss_P = grpo_loss(logprobs_P, behaviour_P, advantages_P, clip=clip, reference_P=reference_P, kl=kl)
        return loss_P / sampled.lengths_P

    def clipped(ratio_P: Tensor, sampled: _Sampled) -> Tensor:
        too_high_P = (sampled.advantages_P > 0) & (ratio_P > 1 + clip)
        return too_high_P | ((sampled.advantages_P < 0) & (ratio_P < 1 - clip))

    batch = _Batch(language_policy(policy), rollouts, advantage, reference, micro_tokens)
    figures = batch.backward(loss, clipped)
    step = Step(lr, clip_norm, betas, weight_decay)
    return policy, batch.apply(step, figures, normaliser=len(rollouts))


@node(pool="trainer", clock="update")
def sft_update(
    policy: Policy,
    demonstrations: Demonstrations,
    *,
    lr: float = 2e-3,
    warmup: int = 20,
    final: float = 0.0,
    clip_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.01,
    micro_tokens: int | None = None,
) -> tuple[Policy, Metrics]:
    """One AdamW step on the cross-entropy of the demonstrated responses, averaged over their tokens.

    The learning rate rises over `warmup` updates to `lr`, and falls along a cosine to `final` · `lr` at the run's end.
    """
    learner = language_policy(policy)

    def loss(packed: Packed, logprobs_P: Tensor, entropy_P: Tensor) -> tuple[Tensor, Tensor]:
        total = sft_loss(logprobs_P).sum()
        return total, total.detach()

    micro_batches, tokens = learner.pack_texts(demonstrations.texts, demonstrations.responses, micro_tokens)
    losses = learner.accumulate(micro_batches, loss)
    rate = lr * _schedule(learner.version, learner.updates, warmup, final)
    grad_norm = learner.apply(Step(rate, clip_norm, betas, weight_decay), normaliser=tokens)
    mean = float(torch.stack(losses).sum()) / tokens
    return policy, {"loss": mean, "lr": rate, "grad_norm": grad_norm, "tokens": float(tokens)}


@node(pool="reference")
def reference_logprobs(reference: Reference, rollouts: Rollouts, *, micro_tokens: int | None = None) -> Logprobs:
    """log π_ref of each sampled token, float32 [N, T]; zero past a response's end."""
    model = language_model(reference)
    micro_batches = model.pack(rollouts, micro_tokens)
    logprobs_NT = torch.zeros(rollouts.logprobs_NT.shape, device=model.device)
    for packed, logprobs_P in zip(micro_batches, model.logprobs(micro_batches), strict=True):
        logprobs_NT[packed.sequence_P, packed.step_P] = logprobs_P
    return Logprobs(logprobs_NT.to(rollouts.logprobs_NT.device))


def _schedule(update: int, updates: int, warmup: int, final: float) -> float:
    """The share of the highest learning rate: a line up, then half a cosine down to `final`."""
    rise = min(1.0, (update + 1) / (warmup + 1))
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, update / max(1, updates))))
    return rise * (final + (1 - final) * fall)


@dataclass(frozen=True)
class _Sampled:
    """What is known of each response token of a micro-batch. `lengths_P` is the length of the token's response."""

    behaviour_P: Tensor
    advantages_P: Tensor
    reference_P: Tensor | None
    lengths_P: Tensor
    versions_P: Tensor


_Loss = Callable[[Tensor, _Sampled], Tensor]
"""(log π, what was sampled) → each token's loss; likewise (ratio, what was sampled) → was its ratio clipped?"""


class _Batch:
    """The rollouts of one update on their way through the learner."""

    def __init__(
        self,
        learner: LanguagePolicy,
        rollouts: Rollouts,
        advantage: Advantages,
        reference: Logprobs | None,
        micro_tokens: int | None,
    ) -> None:
        device = learner.device
        self.learner, self.rollouts, self.micro_tokens = learner, rollouts, micro_tokens
        self.behaviour_NT = rollouts.logprobs_NT.to(device)
        self.versions_NT = rollouts.versions_NT.to(device)
        self.lengths_N = rollouts.response_lengths_N.to(device)
        self.advantages_N = advantage.values_N.to(device)
        self.reference_NT = None if reference is None else reference.logprobs_NT.to(device)

    def backward(self, loss: _Loss, clipped: _Loss) -> Metrics:
        """Add the gradient of the summed loss to the learner; the sums (and maxima) of the update's figures."""
        learner = self.learner

        def micro(packed: Packed, logprobs_P: Tensor, entropy_P: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            sampled = self._sampled(packed)
            total = loss(logprobs_P, sampled).sum()
            ratio_P = ratio(logprobs_P.detach(), sampled.behaviour_P)
            lag_P = (learner.version - sampled.versions_P).float()
            clipped_P = clipped(ratio_P, sampled).float()
            sums = torch.stack([total.detach(), ratio_P.sum(), clipped_P.sum(), lag_P.sum(), entropy_P.sum()])
            return total, (sums, torch.stack([ratio_P.max(), lag_P.max()]))

        found = learner.accumulate(learner.pack(self.rollouts, self.micro_tokens), micro)
        total, ratios, clips, lags, entropies = torch.stack([sums for sums, _ in found]).sum(0).tolist()
        ratio_max, lag_max = torch.stack([peaks for _, peaks in found]).amax(0).tolist()
        tokens = float(self.rollouts.response_lengths_N.sum())
        return {
            "loss": total,
            "ratio_mean": ratios / tokens,
            "ratio_max": ratio_max,
            "ratio_clipped": clips / tokens,
            "lag_mean": lags / tokens,
            "lag_max": lag_max,
            "entropy": entropies / tokens,
            "tokens": tokens,
        }

    def apply(self, step: Step, figures: Metrics, *, normaliser: float) -> Metrics:
        """Take the optimizer step on the sum's gradient divided by `normaliser`; the update's figures."""
        grad_norm = self.learner.apply(step, normaliser=normaliser)
        return {**figures, "loss": figures["loss"] / normaliser, "grad_norm": grad_norm}

    def _sampled(self, packed: Packed) -> _Sampled:
        place = packed.sequence_P, packed.step_P
        return _Sampled(
            behaviour_P=self.behaviour_NT[place],
            advantages_P=self.advantages_N[packed.sequence_P],
            reference_P=None if self.reference_NT is None else self.reference_NT[place],
            lengths_P=self.lengths_N[packed.sequence_P],
            versions_P=self.versions_NT[place],
        )
