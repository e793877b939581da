"""Arrays of whatever library the workers use, so that a graph needs none."""

from collections.abc import Sequence
from typing import Any, Protocol

Array = Any
"""A tensor of any library that has shapes, slices and arithmetic; torch in the workers."""


class Vector(Protocol):
    """One number per row, float [N], of any array library: arithmetic row by row, and what else the library has."""

    def __add__(self, other: "Vector | float", /) -> "Vector": ...
    def __sub__(self, other: "Vector | float", /) -> "Vector": ...
    def __mul__(self, other: "Vector | float", /) -> "Vector": ...
    def __truediv__(self, other: "Vector | float", /) -> "Vector": ...
    def __radd__(self, other: float, /) -> "Vector": ...
    def __rsub__(self, other: float, /) -> "Vector": ...
    def __rmul__(self, other: float, /) -> "Vector": ...
    def __rtruediv__(self, other: float, /) -> "Vector": ...
    def __neg__(self) -> "Vector": ...
    def __getattr__(self, name: str, /) -> Any: ...


def joined(values: Sequence[Any]) -> Any:
    """Arrays (first axis N) below each other, padded to a common width with zeros; or tuples after each other; or None
    where all are."""
    if all(value is None for value in values):
        return None
    if isinstance(values[0], tuple):
        return tuple(item for value in values for item in value)
    widths = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    out = values[0].new_zeros((sum(value.shape[0] for value in values), *widths))
    row = 0
    for value in values:
        box = (slice(row, row + value.shape[0]), *(slice(0, size) for size in value.shape[1:]))
        out[box] = value
        row += value.shape[0]
    return out
