"""Advantages from rewards, as free functions. Rewards are data, so none of these needs a gradient.

Shapes: N responses, G prompts. `group_N` (int64) says which prompt each response answers, 0 to G − 1, each at least
once and in any order; `rewards_N` are floating point. Rows may as well be tokens: nothing here knows of responses.
"""

import torch
from torch import Tensor

from penstock.nodes.learn.segments import segment_lengths, segment_max, segment_mean


def consecutive_groups(num_rows: int, samples: int) -> Tensor:
    """`group_N` where the `samples` responses to a prompt are consecutive rows; ValueError unless they fill groups."""
    if num_rows % samples:
        raise ValueError(f"consecutive_groups: given {num_rows} rows, needed a multiple of samples={samples}")
    return torch.arange(num_rows) // samples


def uniform_groups(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """Whether all rewards of a group are equal (all right, all wrong, or a single one), bool [G]: nothing to learn.

    What dynamic sampling leaves out: DAPO (arXiv 2503.14476), equation 11. Compares the rewards, not their deviation,
    which rounding keeps from being zero.
    """
    return segment_max(rewards_N, group_N) == -segment_max(-rewards_N, group_N)


def group_mean_advantages(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """A = r − mean of the group; exactly 0 in a uniform group.

    LlamaRL (arXiv 2505.24034), section 6; Dr. GRPO (arXiv 2503.20783), section 3.2, which is GRPO without the division.
    """
    centred_N = rewards_N - segment_mean(rewards_N, group_N)[group_N]
    return centred_N.masked_fill(uniform_groups(rewards_N, group_N)[group_N], 0.0)


def grpo_advantages(rewards_N: Tensor, group_N: Tensor, *, correction: int = 0) -> Tensor:
    """A = (r − mean of the group) / deviation of the group; exactly 0 in a uniform group.

    GRPO (DeepSeekMath, arXiv 2402.03300), section 4.1.2, which does not say which deviation: `correction` 0 divides
    the squares by n (population), 1 by n − 1 (sample, what torch.std does unasked). No ε is added to it.
    """
    centred_N = group_mean_advantages(rewards_N, group_N)
    degrees_G = (segment_lengths(group_N) - correction).clamp(min=1)
    mean_square_N = segment_mean(centred_N.square(), group_N)[group_N]
    variance_N = mean_square_N * (segment_lengths(group_N) / degrees_G)[group_N]
    return (centred_N / variance_N.sqrt()).masked_fill(uniform_groups(rewards_N, group_N)[group_N], 0.0)


def rloo_advantages(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """A = r − mean of the group's other rewards, which is n / (n − 1) · (r − mean of the group).

    RLOO (Ahmadian et al. 2024, arXiv 2402.14740), the REINFORCE leave-one-out estimator. ValueError for a group of one.
    """
    lengths_G = segment_lengths(group_N)
    if int(lengths_G.min()) < 2:
        group = int(lengths_G.argmin())
        raise ValueError(f"rloo_advantages: given {int(lengths_G[group])} samples in group {group}, needed 2 or more")
    return group_mean_advantages(rewards_N, group_N) * (lengths_G / (lengths_G - 1))[group_N]


def reinforce_plus_plus_advantages(rewards_N: Tensor, group_N: Tensor | None = None) -> Tensor:
    """(A − mean) / deviation over all rows of the batch, A = r, or r − mean of the group where groups are given.

    REINFORCE++ and REINFORCE++ with baseline (Hu et al. 2025, arXiv 2501.03262), global advantage normalisation, with
    the population deviation. Where tokens bear a penalty, rows are tokens, r the reward less the penalties to come.
    """
    advantages_N = rewards_N if group_N is None else group_mean_advantages(rewards_N, group_N)
    return whiten(advantages_N, torch.ones_like(advantages_N, dtype=torch.bool))


def remax_advantages(rewards_N: Tensor, greedy_G: Tensor, group_N: Tensor) -> Tensor:
    """A = r − reward of the greedy response to the same prompt: ReMax (Li et al. 2023, arXiv 2310.10505), section 4."""
    return rewards_N - greedy_G[group_N]


def overlong_penalty(lengths_N: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """What is added to a reward: 0 up to `max_length` − `buffer` tokens, down a line to −1 at `max_length`, then −1.

    Soft overlong punishment: DAPO (arXiv 2503.14476), equation 13, L_max and L_cache. float32 [N].
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong_penalty: given buffer={buffer}, needed 1 to max_length={max_length}")
    return ((max_length - buffer - lengths_N) / buffer).clamp(-1.0, 0.0)


def whiten(values_P: Tensor, mask_P: Tensor) -> Tensor:
    """Values of mean 0 and population deviation 1 over the rows where `mask_P` (bool) holds; 0 elsewhere.

    All are 0 where the values do not differ.
    """
    kept_K = values_P[mask_P]
    white_K = grpo_advantages(kept_K, torch.zeros_like(kept_K, dtype=torch.long))
    return torch.zeros_like(values_P).masked_scatter(mask_P, white_K)
