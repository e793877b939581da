"""Losses of single tokens, as free functions of log-probabilities. Nothing here sums or averages.

Shapes: P response tokens of many responses, one after the other. `logprobs_P` are those of the policy that learns
(with a gradient), `behaviour_P` those of the policy that sampled (nats, no gradient), `advantages_P` each token's
advantage. The ratio of token t is r_t = π(y_t | x, y_<t) / μ(y_t | x, y_<t).
"""

import torch
from torch import Tensor


def ratio(logprobs_P: Tensor, behaviour_P: Tensor) -> Tensor:
    """r_t = π / μ for each token."""
    return torch.exp(logprobs_P - behaviour_P)


def aipo_loss(logprobs_P: Tensor, behaviour_P: Tensor, advantages_P: Tensor, *, rho: float) -> Tensor:
    """−sg(min(r_t, ρ)) · A · log π, so that the gradient of the sum is −Σ_t min(r_t, ρ) · A · ∇ log π.

    LlamaRL (Wu et al. 2025, arXiv 2505.24034), section 6. The weight is a constant (sg = stop gradient): through
    min(r_t, ρ) · A instead, the gradient would vanish wherever r_t > ρ.
    """
    weight_P = ratio(logprobs_P, behaviour_P).clamp(max=rho).detach()
    return -weight_P * advantages_P * logprobs_P


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
    ratio_P = ratio(logprobs_P, behaviour_P)
    clipped_P = ratio_P.clamp(1 - clip, 1 + clip)
    loss_P = -torch.minimum(ratio_P * advantages_P, clipped_P * advantages_P)
    return loss_P if reference_P is None else loss_P + kl * kl_to_reference(logprobs_P, reference_P)


def kl_to_reference(logprobs_P: Tensor, reference_P: Tensor) -> Tensor:
    """KL(π ‖ π_ref) of each token by the estimator k3 = q − log q − 1, q = π_ref / π, never negative.

    Schulman, "Approximating KL divergence" (2020); unbiased for tokens sampled with π.
    """
    log_q_P = reference_P - logprobs_P
    return torch.exp(log_q_P) - log_q_P - 1


def sft_loss(logprobs_P: Tensor) -> Tensor:
    """−log π: cross-entropy to the demonstration."""
    return -logprobs_P
