"""Sums over rows that belong together: the tokens of a response, the responses to a prompt.

Shapes: P rows, S segments. `segment_P` (int64) says which segment each row belongs to, 0 to S − 1, in any order. S is
`num_segments`, or what the largest index needs if that is more. Values are floating point.
"""

import torch
from torch import Tensor


def segment_lengths(segment_P: Tensor, num_segments: int = 0) -> Tensor:
    """Rows of each segment, int64 [S]."""
    return torch.bincount(segment_P, minlength=num_segments)


def segment_sum(values_P: Tensor, segment_P: Tensor, num_segments: int = 0) -> Tensor:
    """Sum of each segment [S]; 0 where it has no row."""
    return _reduce(values_P, segment_P, num_segments, "sum")


def segment_mean(values_P: Tensor, segment_P: Tensor, num_segments: int = 0) -> Tensor:
    """Mean of each segment [S]; 0 where it has no row."""
    lengths_S = segment_lengths(segment_P, num_segments)
    return segment_sum(values_P, segment_P, num_segments) / lengths_S.clamp(min=1)


def segment_max(values_P: Tensor, segment_P: Tensor, num_segments: int = 0) -> Tensor:
    """Largest value of each segment [S]; −∞ where it has no row."""
    return _reduce(values_P, segment_P, num_segments, "max")


def _reduce(values_P: Tensor, segment_P: Tensor, num_segments: int, reduction: str) -> Tensor:
    # index_add_ adds in no fixed order on a GPU; sorted rows are added in theirs, so equal rows make equal bits
    order_P = torch.argsort(segment_P, stable=True)
    return torch.segment_reduce(values_P[order_P], reduction, lengths=segment_lengths(segment_P, num_segments))
