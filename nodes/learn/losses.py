"""Losses of single tokens, as free functions of log-probabilities. Nothing here averages; `gspo_loss` is per response.

Shapes: P response tokens of N responses, one after the other; `sequence_P` (int64) says which response each belongs
to. `logprobs_P` are those of the policy that learns (with a gradient), `behaviour_P` those of the policy that sampled,
`old_P` those of the policy that a clip is centred on (nats, no gradient), `advantages_P` each token's advantage. The
ratio of token t is r_t = π(y_t | x, y_<t) / μ(y_t | x, y_<t), μ the policy that sampled; sg is a stop gradient.
"""

import torch
from torch import Tensor

from penstock.nodes.learn.divergences import kl_estimate
from penstock.nodes.learn.segments import segment_mean


def ratio(logprobs_P: Tensor, behaviour_P: Tensor) -> Tensor:
    """r_t = π / μ for each token."""
    return torch.exp(logprobs_P - behaviour_P)


def reinforce_loss(logprobs_P: Tensor, advantages_P: Tensor) -> Tensor:
    """−A · log π: Williams 1992, "Simple statistical gradient-following algorithms", for tokens sampled with π."""
    return -advantages_P * logprobs_P


def aipo_loss(logprobs_P: Tensor, behaviour_P: Tensor, advantages_P: Tensor, *, rho: float) -> Tensor:
    """−sg(min(r_t, ρ)) · A · log π, so that the gradient of the sum is −Σ_t min(r_t, ρ) · A · ∇ log π.

    LlamaRL (Wu et al. 2025, arXiv 2505.24034), section 6. The weight is a constant (sg = stop gradient): through
    min(r_t, ρ) · A instead, the gradient would vanish wherever r_t > ρ.
    """
    weight_P = ratio(logprobs_P, behaviour_P).clamp(max=rho).detach()
    return -weight_P * advantages_P * logprobs_P


def cispo_loss(
    logprobs_P: Tensor, behaviour_P: Tensor, advantages_P: Tensor, *, clip_high: float, clip_low: float = 1.0
) -> Tensor:
    """−sg(clip(r_t, 1 − ε_low, 1 + ε_high)) · A · log π: no token loses its gradient, whatever its ratio.

    CISPO (MiniMax-M1, arXiv 2506.13585), equations 4 and 5. The paper sets no lower bound, which is ε_low = 1.
    """
    weight_P = ratio(logprobs_P, behaviour_P).clamp(1 - clip_low, 1 + clip_high).detach()
    return -weight_P * advantages_P * logprobs_P


def ppo_loss(
    logprobs_P: Tensor,
    old_P: Tensor,
    advantages_P: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """−min(r_t · A, clip(r_t, 1 − ε_low, 1 + ε_high) · A), r_t = π / π_old.

    PPO (Schulman et al. 2017, arXiv 1707.06347), equation 7, with the two sides apart as in DAPO's clip-higher
    (arXiv 2503.14476), equation 10. `dual_clip`, c > 1, bounds the loss of tokens with A < 0 by −c · A (Ye et al. 2019,
    arXiv 1912.09729, the section on dual-clip PPO); ValueError for a smaller one.
    """
    loss_P = _clipped(ratio(logprobs_P, old_P.detach()), advantages_P, clip_low, clip_high)
    if dual_clip is None:
        return loss_P
    if dual_clip <= 1:
        raise ValueError(f"ppo_loss: given dual_clip={dual_clip}, needed a bound above 1")
    return torch.where(advantages_P < 0, torch.minimum(loss_P, -dual_clip * advantages_P), loss_P)


def grpo_loss(
    logprobs_P: Tensor,
    behaviour_P: Tensor,
    advantages_P: Tensor,
    *,
    clip: float,
    reference_P: Tensor | None = None,
    kl: float = 0.0,
) -> Tensor:
    """−min(r_t · A, clip(r_t, 1 − ε, 1 + ε) · A) + β · KL_t.

    PPO's clipped objective (Schulman et al. 2017, arXiv 1707.06347, equation 7) with a penalty to a reference policy
    as in GRPO (Shao et al. 2024, arXiv 2402.03300, equations 3 and 4).
    """
    loss_P = ppo_loss(logprobs_P, behaviour_P, advantages_P, clip_low=clip, clip_high=clip)
    return loss_P if reference_P is None else loss_P + kl * kl_to_reference(logprobs_P, reference_P)


def decoupled_ppo_loss(
    logprobs_P: Tensor,
    proximal_P: Tensor,
    behaviour_P: Tensor,
    advantages_P: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """sg(π_prox / μ) times `ppo_loss` with the clip centred on π_prox, a policy newer than the one that sampled.

    AReaL (Fu et al. 2025, arXiv 2505.24298), equation 5, after Hilton et al. 2021, arXiv 2110.00641.
    """
    weights_P = ratio(proximal_P, behaviour_P).detach()
    return weights_P * ppo_loss(logprobs_P, proximal_P, advantages_P, clip_low=clip_low, clip_high=clip_high)


def tis_loss(
    logprobs_P: Tensor,
    old_P: Tensor,
    behaviour_P: Tensor,
    advantages_P: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    cap: float,
) -> Tensor:
    """sg(min(π_old / μ, C)) · `ppo_loss`, π_old by the trainer and μ by the generator: `decoupled_ppo_loss` with a cap.

    Truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (2025). Other bounds, and weights of whole responses: multiply `ppo_loss` by `importance_weights`.
    """
    weights_P = ratio(old_P, behaviour_P).clamp(max=cap).detach()
    return weights_P * ppo_loss(logprobs_P, old_P, advantages_P, clip_low=clip_low, clip_high=clip_high)


def gspo_loss(
    logprobs_P: Tensor,
    behaviour_P: Tensor,
    advantages_N: Tensor,
    sequence_P: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """−min(s · A, clip(s, 1 − ε_low, 1 + ε_high) · A) of each response [N], s = exp(mean_t log r_t).

    GSPO (Zheng et al. 2025, arXiv 2507.18071), equations 5 and 7. A response without tokens has no gradient.
    """
    log_ratios_N = segment_mean(logprobs_P - behaviour_P.detach(), sequence_P, len(advantages_N))
    return _clipped(log_ratios_N.exp(), advantages_N, clip_low, clip_high)


def gspo_token_loss(
    logprobs_P: Tensor,
    behaviour_P: Tensor,
    advantages_P: Tensor,
    sequence_P: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """−min(s_t · A, clip(s_t, 1 − ε_low, 1 + ε_high) · A) of each token, s_t = sg(s) · π / sg(π).

    GSPO-token (arXiv 2507.18071), equations 13 and 14: the ratio of the response, the gradient of the token. Averaged
    over a response whose tokens share an advantage, it is `gspo_loss` in value and gradient.
    """
    log_ratios_P = segment_mean((logprobs_P - behaviour_P).detach(), sequence_P)[sequence_P]
    ratios_P = torch.exp(log_ratios_P + (logprobs_P - logprobs_P.detach()))
    return _clipped(ratios_P, advantages_P, clip_low, clip_high)


def kl_to_reference(logprobs_P: Tensor, reference_P: Tensor) -> Tensor:
    """KL(π ‖ π_ref) of each token by the estimator k3 = q − log q − 1, q = π_ref / π, never negative.

    Schulman, "Approximating KL divergence" (2020); unbiased for tokens sampled with π.
    """
    return kl_estimate(logprobs_P, reference_P, estimator="k3")


def sft_loss(logprobs_P: Tensor) -> Tensor:
    """−log π: cross-entropy to the demonstration."""
    return -logprobs_P


def _clipped(ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """−min(r · A, clip(r, 1 − ε_low, 1 + ε_high) · A)."""
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages)
