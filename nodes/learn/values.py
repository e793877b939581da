"""What a critic is for: advantages of tokens from its values, and the loss it learns by.

Shapes: P response tokens of N responses, laid end to end; `sequence_P` (int64) says which response each token belongs
to. `values_P` is V(s_t), what the critic expects before token t; the state after a response's last token is worth 0.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.nodes.learn.segments import segment_lengths


def last_tokens(sequence_P: Tensor) -> Tensor:
    """Whether a token is the last one of its response, bool [P]."""
    return torch.cat([sequence_P[1:] != sequence_P[:-1], sequence_P.new_ones(1, dtype=torch.bool)])


def terminal_rewards(rewards_N: Tensor, sequence_P: Tensor) -> Tensor:
    """Each response's reward at its last token, 0 at the others [P]."""
    return rewards_N[sequence_P].masked_fill(~last_tokens(sequence_P), 0.0)


def discounted_sums(values_P: Tensor, sequence_P: Tensor, *, discount: float) -> Tensor:
    """Σ_{l ≥ 0} discount^l · x_{t+l} within each response [P]."""
    sums_P, reach, longest = values_P, 1, int(segment_lengths(sequence_P).max())
    # each row holds its next `reach` terms, so the row `reach` further on holds the ones after
    while reach < longest:
        further_P = sums_P[reach:].masked_fill(sequence_P[reach:] != sequence_P[:-reach], 0.0)
        sums_P = sums_P + discount**reach * pad(further_P, (0, reach))
        reach *= 2
    return sums_P


def generalized_advantages(
    rewards_P: Tensor, values_P: Tensor, sequence_P: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(A, returns) of each token, without a gradient: A_t = Σ_l (γλ)^l · δ_{t+l}, δ_t = r_t + γ · V_{t+1} − V_t.

    GAE (Schulman et al. 2015, arXiv 1506.02438), equation 16. The returns, A + V, are what the critic learns.
    """
    values_P = values_P.detach()
    next_P = values_P.roll(-1).masked_fill(last_tokens(sequence_P), 0.0)
    deltas_P = rewards_P + gamma * next_P - values_P
    advantages_P = discounted_sums(deltas_P, sequence_P, discount=gamma * lam)
    return advantages_P, advantages_P + values_P


def value_loss(values_P: Tensor, old_P: Tensor, returns_P: Tensor, *, clip: float | None = None) -> Tensor:
    """½ · max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²) of each token; ½ · (V − R)² without `clip`.

    The clipped value loss of OpenAI Baselines' PPO, described by Engstrom et al. 2020, arXiv 2005.12729, section 3. The
    larger of the two: the smaller one would let the critic run away from R at no cost.
    """
    errors_P = (values_P - returns_P).square()
    if clip is not None:
        old_P = old_P.detach()
        clipped_P = values_P.clamp(old_P - clip, old_P + clip)
        errors_P = torch.maximum(errors_P, (clipped_P - returns_P).square())
    return errors_P / 2


def explained_variance(values_P: Tensor, returns_P: Tensor) -> Tensor:
    """1 − Var(R − V) / Var(R), a scalar: 1 for a critic that knows all, 0 for a constant one, below 0 for a worse one.

    0 where the returns do not differ.
    """
    variance = returns_P.var(correction=0)
    unexplained = (returns_P - values_P).var(correction=0)
    return torch.where(variance > 0, 1 - unexplained / variance.clamp(min=torch.finfo(variance.dtype).tiny), 0.0)
