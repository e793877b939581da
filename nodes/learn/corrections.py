"""Weights that correct for tokens sampled with another policy than the one that is meant. None has a gradient.

Shapes: P response tokens of N responses; `sequence_P` (int64) says which response each token belongs to. `target_P` are
the log-probabilities of the policy that is meant (nats), `behaviour_P` those of the policy μ that sampled.
"""

from typing import Literal

import torch
from torch import Tensor

from penstock.nodes.learn.segments import segment_sum

Level = Literal["token", "sequence"]
Bound = Literal["truncate", "mask"]


def importance_weights(
    target_P: Tensor,
    behaviour_P: Tensor,
    sequence_P: Tensor,
    *,
    level: Level,
    bound: Bound,
    cap: float,
    floor: float = 0.0,
) -> Tensor:
    """The weight w = π / μ of each token, bounded.

    On `level` "token" w is the token's own ratio, on "sequence" the product of the ratios of its response, the same
    for all its tokens. `bound` "truncate" moves w into [floor, cap]; "mask" makes it 0 outside.

    Truncated by token: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025);
    masked by token, both sides: IcePop (Ling team, arXiv 2510.18855); by sequence, both ways: Liu et al., "When Speed
    Kills Stability" (2025), section 4.2.
    """
    log_weights_P = (target_P - behaviour_P).detach()
    if level == "sequence":
        log_weights_P = segment_sum(log_weights_P, sequence_P)[sequence_P]
    weights_P = log_weights_P.exp()
    if bound == "truncate":
        return weights_P.clamp(floor, cap)
    return weights_P.masked_fill((weights_P < floor) | (weights_P > cap), 0.0)


def effective_sample_size(weights_N: Tensor) -> Tensor:
    """(Σ w)² / Σ w², a scalar between 0 and N (Kish, "Survey Sampling", 1965); 0 if all weights are 0.

    N equal weights count as N samples, a single large one as 1.
    """
    # of the largest weight, so that no square overflows
    shares_N = weights_N / weights_N.max().clamp(min=torch.finfo(weights_N.dtype).tiny)
    return shares_N.sum().square() / shares_N.square().sum().clamp(min=torch.finfo(weights_N.dtype).tiny)
