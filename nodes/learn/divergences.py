"""How far one policy is from another, token by token. Nothing here sums or averages over tokens.

Shapes: P response tokens, V words of the vocabulary. `logprobs_P` are those of the policy π, `reference_P` those of the
other policy, for the sampled tokens (nats).
"""

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs_P: Tensor, reference_P: Tensor, *, estimator: Estimator) -> Tensor:
    """KL(π ‖ π_ref) from tokens sampled with π, by an estimator of Schulman, "Approximating KL divergence" (2020).

    With q = π_ref / π: k1 = −log q, unbiased; k2 = (log q)² / 2, biased; k3 = q − 1 − log q, unbiased, never negative.
    As a term of a loss each does something else, since its gradient does not follow the sampling: the mean gradient of
    k1 is zero, that of k2 is the gradient of KL(π ‖ π_ref), and that of k3 is the gradient of KL(π_ref ‖ π).
    """
    log_q_P = reference_P - logprobs_P
    if estimator == "k1":
        return -log_q_P
    if estimator == "k2":
        return log_q_P.square() / 2
    return torch.exp(log_q_P) - log_q_P - 1


def reverse_kl(logprobs_PV: Tensor, teacher_PV: Tensor) -> Tensor:
    """Σ_v π(v) · (log π(v) − log π_T(v)) of each token [P], with a gradient through all of π.

    The token-level reverse KL of on-policy distillation: GKD (Agarwal et al. 2023, arXiv 2306.13649), section 3.
    Both are log-probabilities over the whole vocabulary, finite.
    """
    return (logprobs_PV.exp() * (logprobs_PV - teacher_PV)).sum(-1)
