"""What policies learn by: losses for `policy_update`, each a function of log π and of what was sampled.

    policy_update(policy, rollouts, advantage, loss=partial(gspo, clip_low=3e-4, clip_high=4e-4))

One of your own is such a function in your own file. What it cannot do without, `@requires(reads(…))` says, so that it
is told before a run starts. The maths is in `losses`, `corrections` and `divergences`; what is here chooses what each
formula reads, and says which tokens it clipped.

Shapes: P sampled tokens. r is a token's ratio π / μ, A its advantage, sg a stop gradient.
"""

import torch
from torch import Tensor

from penstock.graph import requires
from penstock.nodes.learn.corrections import Bound, Level, importance_weights
from penstock.nodes.learn.losses import (
    aipo_loss,
    cispo_loss,
    decoupled_ppo_loss,
    gspo_token_loss,
    ppo_loss,
    ratio,
    reinforce_loss,
    sft_loss,
    tis_loss,
)
from penstock.nodes.learn.sampled import Sampled, reads
from penstock.nodes.learn.segments import segment_mean
from penstock.nodes.numbers import above, bound, positive

LossAndClipped = tuple[Tensor, Tensor]


def reinforce(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    """−A · log π: on-policy, whatever policy sampled (Williams 1992)."""
    return reinforce_loss(logprobs_P, sampled.advantages_P)


def imitate(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    """−log π: cross-entropy to the responses, whatever their advantage; of demonstrations, or of one's own best."""
    return sft_loss(logprobs_P)


@requires(reads("behaviour"), positive("rho"))
def aipo(logprobs_P: Tensor, sampled: Sampled, *, rho: float = 4.0) -> LossAndClipped:
    """−sg(min(r, ρ)) · A · log π (LlamaRL, arXiv 2505.24034, section 6)."""
    loss_P = aipo_loss(logprobs_P, sampled.behaviour_P, sampled.advantages_P, rho=rho)
    return loss_P, ratio(logprobs_P.detach(), sampled.behaviour_P) > rho


@requires(reads("behaviour"), bound("clip_low", "clip_high"))
def cispo(logprobs_P: Tensor, sampled: Sampled, *, clip_high: float = 4.0, clip_low: float = 1.0) -> LossAndClipped:
    """−sg(clip(r, 1 − ε_low, 1 + ε_high)) · A · log π (MiniMax-M1, arXiv 2506.13585, equations 4 and 5)."""
    behaviour_P, advantages_P = sampled.behaviour_P, sampled.advantages_P
    loss_P = cispo_loss(logprobs_P, behaviour_P, advantages_P, clip_high=clip_high, clip_low=clip_low)
    return loss_P, _outside(ratio(logprobs_P.detach(), behaviour_P), 1 - clip_low, 1 + clip_high)


@requires(reads("behaviour"), bound("clip_low", "clip_high"), above(1, "dual_clip"))
def ppo(
    logprobs_P: Tensor,
    sampled: Sampled,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossAndClipped:
    """PPO's clip around μ (arXiv 1707.06347, equation 7), the two sides apart as in DAPO (arXiv 2503.14476)."""
    behaviour_P, advantages_P = sampled.behaviour_P, sampled.advantages_P
    loss_P = ppo_loss(
        logprobs_P, behaviour_P, advantages_P, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    ratio_P = ratio(logprobs_P.detach(), behaviour_P)
    clipped_P = _beyond(ratio_P, advantages_P, clip_low, clip_high)
    return loss_P, clipped_P if dual_clip is None else clipped_P | ((advantages_P < 0) & (ratio_P > dual_clip))


@requires(reads("behaviour"), bound("clip_low", "clip_high"))
def gspo(logprobs_P: Tensor, sampled: Sampled, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossAndClipped:
    """PPO's clip with the geometric mean of a response's ratios (GSPO, arXiv 2507.18071, equations 13 and 14).

    The paper's objective with `average="sequence_mean"`. The defaults are the paper's, section 5.1.
    """
    behaviour_P, advantages_P, sequence_P = sampled.behaviour_P, sampled.advantages_P, sampled.sequence_P
    loss_P = gspo_token_loss(logprobs_P, behaviour_P, advantages_P, sequence_P, clip_low=clip_low, clip_high=clip_high)
    ratio_P = segment_mean(logprobs_P.detach() - behaviour_P, sequence_P).exp()[sequence_P]
    return loss_P, _beyond(ratio_P, advantages_P, clip_low, clip_high)


@requires(reads("behaviour", "proximal"), bound("clip_low", "clip_high"))
def decoupled_ppo(
    logprobs_P: Tensor, sampled: Sampled, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> LossAndClipped:
    """sg(π_old / μ) times PPO's clip around π_old (AReaL, arXiv 2505.24298, equation 5). Needs `proximal`."""
    proximal_P, behaviour_P, advantages_P = sampled.proximal_P, sampled.behaviour_P, sampled.advantages_P
    loss_P = decoupled_ppo_loss(
        logprobs_P, proximal_P, behaviour_P, advantages_P, clip_low=clip_low, clip_high=clip_high
    )
    return loss_P, _beyond(ratio(logprobs_P.detach(), proximal_P), advantages_P, clip_low, clip_high)


@requires(reads("behaviour", "proximal"), bound("clip_low", "clip_high"), positive("cap"))
def tis(
    logprobs_P: Tensor, sampled: Sampled, *, cap: float = 2.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> LossAndClipped:
    """sg(min(π_old / μ, C)) times PPO's clip around π_old: truncated importance sampling (Yao et al. 2025).

    Needs `proximal`. What counts as clipped is either: a weight above C, or a ratio beyond PPO's bounds.
    """
    proximal_P, behaviour_P, advantages_P = sampled.proximal_P, sampled.behaviour_P, sampled.advantages_P
    loss_P = tis_loss(
        logprobs_P, proximal_P, behaviour_P, advantages_P, clip_low=clip_low, clip_high=clip_high, cap=cap
    )
    beyond_P = _beyond(ratio(logprobs_P.detach(), proximal_P), advantages_P, clip_low, clip_high)
    return loss_P, beyond_P | (ratio(proximal_P, behaviour_P) > cap)


@requires(reads("behaviour"), positive("cap"), bound("floor"))
def importance_weighted(
    logprobs_P: Tensor,
    sampled: Sampled,
    *,
    level: Level = "sequence",
    bound: Bound = "truncate",
    cap: float = 2.0,
    floor: float = 0.0,
) -> LossAndClipped:
    """−w · A · log π, w = π / μ of the token or of its response, truncated or masked (see `importance_weights`)."""
    behaviour_P, sequence_P = sampled.behaviour_P, sampled.sequence_P
    free_P = importance_weights(logprobs_P, behaviour_P, sequence_P, level=level, bound="truncate", cap=float("inf"))
    weights_P = importance_weights(logprobs_P, behaviour_P, sequence_P, level=level, bound=bound, cap=cap, floor=floor)
    return weights_P * reinforce_loss(logprobs_P, sampled.advantages_P), _outside(free_P, floor, cap)


def _beyond(ratio_P: Tensor, advantages_P: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where PPO's minimum takes the clipped side, so that a token has no gradient."""
    high_P = (advantages_P > 0) & (ratio_P > 1 + clip_high)
    return high_P | ((advantages_P < 0) & (ratio_P < 1 - clip_low))


def _outside(weights_P: Tensor, low: float, high: float) -> Tensor:
    return torch.logical_or(weights_P < low, weights_P > high)
