"""The critic: what it expects after each token, the advantages that follow, and how it learns.

Only tokens that the policy sampled count (version ≥ 0): what an environment wrote is part of the state, no action.

Shapes: N responses, T tokens of a response, P tokens that count, of all responses or of a micro-batch.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from penstock.graph import node, opens, requires
from penstock.graph.protocols import Carried
from penstock.graph.types import (
    AnyCritic,
    Context,
    Critic,
    Logprobs,
    Metrics,
    Returns,
    Rewards,
    Rollouts,
    TokenAdvantages,
    Values,
)
from penstock.nodes.base import open_scorer, require_scorer, run_spec
from penstock.nodes.learn.advantages import whiten
from penstock.nodes.learn.batch import per_response, per_token
from penstock.nodes.learn.behaviour import behaviour_logprobs
from penstock.nodes.learn.minibatches import optimizer_steps
from penstock.nodes.learn.packing import Packed, sampled_lengths, sampled_mask
from penstock.nodes.learn.schedules import Schedule
from penstock.nodes.learn.scores import packed_values
from penstock.nodes.learn.update import penalty
from penstock.nodes.learn.values import explained_variance, generalized_advantages, terminal_rewards, value_loss
from penstock.nodes.learner import Learner, Step
from penstock.nodes.model import Scorer
from penstock.nodes.numbers import ADAMW, bound, not_negative, share


class LanguageCritic(Learner[Scorer], Critic):
    """The policy's decoder with a head of its own, which gives one number for each token."""

    called: ClassVar[str] = "critic"

    @torch.no_grad()
    def values(self, micro_batches: Sequence[Packed]) -> list[Tensor]:
        """V before each target of each micro-batch, float32 [P], without a gradient."""
        return self.workers.map(packed_values, micro_batches)


@opens(run_spec, words=False)
@requires(require_scorer)
def make_critic(context: Context) -> Carried:
    """A critic on the decoder of `context.model`; its head is zero, so that it expects nothing before it learns."""
    return LanguageCritic(*open_scorer(context, "float32"), context)


def language_critic(critic: Critic) -> LanguageCritic:
    """The critic as this file makes it; raises TypeError for one that another maker made."""
    if not isinstance(critic, LanguageCritic):
        raise TypeError(f"critic: given a {type(critic).__name__}, needed a LanguageCritic")
    return critic


@node(pool="critic", clock="update")
def critic_values(critic: Critic, rollouts: Rollouts, *, micro_tokens: int | None = None) -> Values:
    """V(s_t) before each token of each response, float32 [N, T]; zero past the end."""
    model = language_critic(critic)
    micro_batches = model.pack(rollouts, micro_tokens)
    values_NT = torch.zeros(rollouts.versions_NT.shape, device=model.device)
    for packed, values_P in zip(micro_batches, model.values(micro_batches), strict=True):
        values_NT[packed.sequence_P, packed.step_P] = values_P
    return Values(values_NT.to(rollouts.versions_NT.device))


@requires(penalty, not_negative("kl"), share("gamma", "lam"))
@node(pool="critic", clock="update")
def gae(
    rewards: Rewards,
    values: Values,
    rollouts: Rollouts,
    reference: Logprobs | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl: float = 0.0,
    whitened: bool = True,
) -> tuple[TokenAdvantages, Returns, Metrics]:
    """Generalised advantages of all sampled tokens, and the returns that the critic learns (arXiv 1506.02438, eq. 16).

    The reward comes at a response's last sampled token. Where `reference` is given, each token costs
    `kl` · (log μ − log π_ref) on top (InstructGPT, arXiv 2203.02155, equation 2). `whitened` advantages have mean 0 and
    deviation 1 over the batch. Raises ValueError for values or rewards of another shape than the rollouts', and for
    rollouts without μ beside a `reference`.
    """
    per_token("gae: given values", values.values_NT, rollouts)
    per_response("gae: given rewards", rewards.values_N, rollouts)
    place = sampled_mask(rollouts).nonzero(as_tuple=True)
    sequence_P, _ = place
    rewards_P = terminal_rewards(rewards.values_N, sequence_P)
    if reference is not None:
        behaviour_NT = behaviour_logprobs(rollouts, "gae, with a reference")
        rewards_P = rewards_P - kl * (behaviour_NT[place] - reference.logprobs_NT[place])
    values_P = values.values_NT[place]
    advantages_P, returns_P = generalized_advantages(rewards_P, values_P, sequence_P, gamma=gamma, lam=lam)
    metrics = {
        "explained_variance": float(explained_variance(values_P, returns_P)),
        "value_mean": float(values_P.mean()),
        "return_mean": float(returns_P.mean()),
    }
    if whitened:
        advantages_P = whiten(advantages_P, torch.ones_like(advantages_P, dtype=torch.bool))
    advantages_NT, returns_NT = torch.zeros_like(values.values_NT), torch.zeros_like(values.values_NT)
    advantages_NT[place], returns_NT[place] = advantages_P, returns_P
    return TokenAdvantages(advantages_NT), Returns(returns_NT), metrics


@requires(bound("clip"), *ADAMW)
@node(pool="critic", clock="update")
def critic_update(
    critic: AnyCritic,
    rollouts: Rollouts,
    values: Values,
    returns: Returns,
    *,
    clip: float | None = 0.2,
    lr: float | Schedule = 1e-4,
    epochs: int = 1,
    minibatches: int = 1,
    clip_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    micro_tokens: int | None = None,
) -> tuple[AnyCritic, Metrics]:
    """`epochs` times `minibatches` AdamW steps on the clipped value loss, averaged over sampled tokens.

    `values` are the critic's own before the update, and `clip` is how far it may go from them (None: any way). Raises
    ValueError for values or returns of another shape than the rollouts'.
    """
    per_token("critic_update: given values", values.values_NT, rollouts)
    per_token("critic_update: given returns", returns.returns_NT, rollouts)
    learner = language_critic(critic)
    step = Step(learner.rate(lr), clip_norm, betas, weight_decay)
    shares = optimizer_steps(learner.context, learner.version, rollouts.ordinals, epochs, minibatches)
    losses, norms = [], []
    for number, (_, rows) in enumerate(shares, 1):
        part = rollouts.take(rows), values.take(rows), returns.take(rows)
        total, tokens = _backward(learner, *part, clip, micro_tokens)
        norms.append(learner.apply(step, normaliser=tokens, last=number == len(shares)))
        losses.append(total / tokens)
    figures = {"critic_loss": sum(losses) / len(losses), "critic_grad_norm": sum(norms) / len(norms)}
    return critic, {**figures, "critic_lr": learner.rate(lr)}


def _backward(
    learner: LanguageCritic,
    rollouts: Rollouts,
    values: Values,
    returns: Returns,
    clip: float | None,
    micro_tokens: int | None,
) -> tuple[float, int]:
    """Add the gradient of the summed value loss to the learner's; the sum, and the number of tokens."""
    old_NT, returns_NT = values.values_NT.to(learner.device), returns.returns_NT.to(learner.device)

    def loss(model: Scorer, packed: Packed) -> tuple[Tensor, Tensor]:
        place = (packed.sequence_P, packed.step_P)
        total = value_loss(packed_values(model, packed), old_NT[place], returns_NT[place], clip=clip).sum()
        return total, total.detach()

    tokens = int(sampled_lengths(rollouts).sum())
    sums = learner.backward(learner.pack(rollouts, micro_tokens), loss)
    return float(torch.stack(sums).sum()), tokens
