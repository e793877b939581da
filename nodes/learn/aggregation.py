"""How the losses of tokens become the loss of an update: Σ weight · loss over all micro-batches, then one division.

Shapes: P response tokens of a micro-batch, N responses of the whole update. `lengths_P` is the length of the response
that a token belongs to, `lengths_N` those of all responses, in tokens.
"""

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(lengths_P: Tensor, *, aggregation: Aggregation) -> Tensor:
    """The weight of each token's loss in the sum, float32 [P]; see `normaliser` for the division that follows."""
    if aggregation == "sequence_mean":
        return 1.0 / lengths_P
    return torch.ones_like(lengths_P, dtype=torch.float32)


def normaliser(lengths_N: Tensor, *, aggregation: Aggregation, max_tokens: int | None = None) -> float:
    """What the weighted sum of an update is divided by.

    "token_mean": all tokens count alike (DAPO, arXiv 2503.14476, equation 12). "sequence_mean": the mean over
    responses of the mean over their tokens (GRPO, arXiv 2402.03300, equation 3). "constant": N · `max_tokens`, the
    longest response that can be, so that no token's weight depends on a length (Dr. GRPO, arXiv 2503.20783,
    section 3.2).
    """
    if aggregation == "token_mean":
        return float(lengths_N.sum())
    if aggregation == "sequence_mean":
        return float(len(lengths_N))
    if max_tokens is None:
        raise ValueError('normaliser: given aggregation="constant" without max_tokens, needed the longest length')
    return float(len(lengths_N) * max_tokens)
