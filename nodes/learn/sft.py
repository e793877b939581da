"""Imitation of demonstrations, which makes the base model that RL starts from."""

import torch
from torch import Tensor

from penstock.graph import node, requires
from penstock.graph.types import AnyPolicy, Metrics
from penstock.nodes.data import Demonstrations
from penstock.nodes.learn.losses import sft_loss
from penstock.nodes.learn.packing import Packed
from penstock.nodes.learn.schedules import cosine
from penstock.nodes.numbers import ADAMW, count, not_negative
from penstock.nodes.policy import Step, language_policy


@requires(count(0, "warmup"), not_negative("final"), *ADAMW)
@node(pool="trainer", clock="update")
def sft_update(
    policy: AnyPolicy,
    demonstrations: Demonstrations,
    *,
    lr: float = 2e-3,
    warmup: int = 20,
    final: float = 0.0,
    clip_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.01,
    micro_tokens: int | None = None,
) -> tuple[AnyPolicy, Metrics]:
    """One AdamW step on the cross-entropy of the demonstrated responses, averaged over their tokens.

    The learning rate rises over `warmup` updates to `lr`, and falls along a cosine to `final` · `lr` at the run's end.
    """
    learner = language_policy(policy)

    def loss(packed: Packed, logprobs_P: Tensor, entropy_P: Tensor) -> tuple[Tensor, Tensor]:
        total = sft_loss(logprobs_P).sum()
        return total, total.detach()

    micro_batches, tokens = learner.pack_texts(demonstrations.texts, demonstrations.responses, micro_tokens)
    losses = learner.accumulate(micro_batches, loss)
    rate = cosine(learner.version, learner.updates, peak=lr, warmup=warmup, final=final)
    grad_norm = learner.apply(Step(rate, clip_norm, betas, weight_decay), normaliser=tokens)
    mean = float(torch.stack(losses).sum()) / tokens
    return policy, {"loss": mean, "lr": rate, "grad_norm": grad_norm, "tokens": float(tokens)}
