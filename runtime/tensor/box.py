"""A box of elements: a range per dimension; and who holds which boxes of one tensor, listed. Pure, no torch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements with start[d] <= index[d] < stop[d] for every dimension d. No dimensions: the one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> "Box":
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(max(0, b - a) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """The number of elements."""
        size = 1
        for extent in map(sub, self.stop, self.start):
            if extent <= 0:
                return 0
            size *= extent
        return size

    def __and__(self, other: "Box") -> "Box":
        """The elements in both; boxes must have the same number of dimensions."""
        return Box(tuple(map(max, self.start, other.start)), tuple(map(min, self.stop, other.stop)))

    def minus(self, other: "Box") -> tuple["Box", ...]:
        """The elements not in `other`, as disjoint non-empty boxes."""
        common = self & other
        if not common.size:
            return (self,) if self.size else ()
        pieces = []
        start, stop = list(self.start), list(self.stop)
        for d in range(len(start)):
            pieces.append(Box(tuple(start), (*stop[:d], common.start[d], *stop[d + 1 :])))
            pieces.append(Box((*start[:d], common.stop[d], *start[d + 1 :]), tuple(stop)))
            start[d], stop[d] = common.start[d], common.stop[d]
        return tuple(piece for piece in pieces if piece.size)

    def cut(self, parts: int) -> tuple["Box", ...]:
        """The box as `parts` slabs of nearly equal size, along the first dimension that is long enough; the box itself
        if none is.
        """
        dim = next((d for d, extent in enumerate(self.shape) if extent >= parts), None)
        if dim is None:
            return (self,)
        edges = [self.start[dim] + self.shape[dim] * k // parts for k in range(parts + 1)]
        return tuple(
            Box((*self.start[:dim], a, *self.start[dim + 1 :]), (*self.stop[:dim], b, *self.stop[dim + 1 :]))
            for a, b in itertools.pairwise(edges)
        )

    def slices(self, within: "Box") -> tuple[slice, ...]:
        """How to cut this box out of a tensor that holds the elements of `within`."""
        edges = zip(self.start, self.stop, within.start, strict=True)
        return tuple(slice(a - origin, b - origin) for a, b, origin in edges)

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


class Edges(NamedTuple):
    """Boxes as arrays: box i, on rank ranks[i], is start[i] to stop[i]. [N], [N, D] and [N, D]. Some are empty."""

    ranks: IntArray
    start: IntArray
    stop: IntArray


class Holding(Protocol):
    """Who holds what of a tensor: a value, hashable. `Boxes` lists it, `mesh.Placement` describes it."""

    @property
    def ranks(self) -> int:
        """The number of ranks, those that hold nothing included."""

    @property
    def disjoint(self) -> bool:
        """Whether any two boxes are known to be equal or to have no element in common."""

    def edges(self, shape: tuple[int, ...]) -> Edges:
        """Every box of a tensor of this shape."""

    def of(self, rank: int, shape: tuple[int, ...]) -> tuple[Box, ...]:
        """The non-empty boxes of one rank."""

    def faults(self, shape: tuple[int, ...]) -> list[str]:
        """What makes it impossible for a tensor of this shape."""

    def to_json(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes one by one, as (rank, box) pairs: for what no mesh describes. They may overlap, repeat and be empty."""

    boxes: tuple[tuple[int, Box], ...]

    @property
    def ranks(self) -> int:
        return max((rank + 1 for rank, _ in self.boxes), default=0)

    @property
    def disjoint(self) -> bool:
        return False

    def edges(self, shape: tuple[int, ...]) -> Edges:
        ranks = np.array([rank for rank, _ in self.boxes], np.int64)
        start = np.array([box.start for _, box in self.boxes], np.int64)
        stop = np.array([box.stop for _, box in self.boxes], np.int64)
        return Edges(ranks, start.reshape(len(ranks), len(shape)), stop.reshape(len(ranks), len(shape)))

    def of(self, rank: int, shape: tuple[int, ...]) -> tuple[Box, ...]:
        return tuple(box for r, box in self.boxes if r == rank and box.size)

    def faults(self, shape: tuple[int, ...]) -> list[str]:
        wrong = [(rank, box) for rank, box in self.boxes if not _inside(box, shape)]
        return [f"box {box} of rank {rank} outside shape {shape}" for rank, box in wrong]

    def to_json(self) -> list[Any]:
        return [[rank, list(box.start), list(box.stop)] for rank, box in self.boxes]

    @staticmethod
    def from_json(data: Sequence[Any]) -> "Boxes":
        return Boxes(tuple((rank, Box(tuple(start), tuple(stop))) for rank, start, stop in data))


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.start) == len(box.stop) == len(shape):
        return False
    return all(a >= 0 and b <= size for a, b, size in zip(box.start, box.stop, shape, strict=True))
