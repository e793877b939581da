"""Who holds which part of which tensor, and the copies that turn one such layout into another. Pure, no torch.

A `Box` is a range per dimension. A layout lists, for each logical tensor, the boxes that ranks hold; equal boxes
on several ranks are replicas. Fused parameters are several logical tensors; empty boxes are normal. Ranks of a
source and of a destination are counted apart, each from 0.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4,
    "int64": 8, "float64": 8,
}  # fmt: skip
"""Bytes of an element of each dtype that travels."""


class LayoutError(ValueError):
    """Layouts that cannot be turned into each other; the message lists every tensor at fault."""


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
        return math.prod(self.shape)

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

    def slices(self, within: "Box") -> tuple[slice, ...]:
        """How to cut this box out of a tensor that holds the elements of `within`."""
        edges = zip(self.start, self.stop, within.start, strict=True)
        return tuple(slice(a - origin, b - origin) for a, b, origin in edges)

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One logical tensor: `shape` and `dtype` of the whole, and the box that each (rank, box) holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[tuple[int, Box], ...]

    def held_by(self, rank: int) -> tuple[Box, ...]:
        """The non-empty boxes of one rank."""
        return tuple(box for r, box in self.boxes if r == rank and box.size)


@dataclass(frozen=True)
class Layout:
    """The logical tensors that a group of ranks holds between them. Names are unique."""

    tensors: tuple[TensorLayout, ...]

    @cached_property
    def by_name(self) -> dict[str, TensorLayout]:
        return {t.name: t for t in self.tensors}

    @staticmethod
    def whole(tensors: Iterable[tuple[str, Sequence[int], str]], ranks: int = 1) -> "Layout":
        """Every rank holds all of every (name, shape, dtype)."""
        return Layout(
            tuple(
                TensorLayout(name, tuple(shape), dtype, tuple((r, Box.whole(shape)) for r in range(ranks)))
                for name, shape, dtype in tensors
            )
        )

    def replicated(self, ranks: int) -> "Layout":
        """The same tensors, each whole on every one of `ranks` ranks."""
        return Layout.whole(((t.name, t.shape, t.dtype) for t in self.tensors), ranks)

    def to_json(self) -> list[Any]:
        return [
            [t.name, list(t.shape), t.dtype, [[r, list(b.start), list(b.stop)] for r, b in t.boxes]]
            for t in self.tensors
        ]

    @staticmethod
    def from_json(data: Sequence[Any]) -> "Layout":
        return Layout(
            tuple(
                TensorLayout(name, tuple(shape), dtype, tuple((r, Box(tuple(a), tuple(b))) for r, a, b in boxes))
                for name, shape, dtype, boxes in data
            )
        )


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements `box` of a logical tensor, from a source rank to a destination rank."""

    tensor: str
    source: int
    destination: int
    box: Box


@dataclass(frozen=True)
class CopyPlan:
    """Every copy of one sync, in an order that both sides know. `nbytes` is what travels."""

    copies: tuple[Copy, ...]
    nbytes: int

    def sends(self, source: int) -> tuple[Copy, ...]:
        """What one source rank sends, in order."""
        return tuple(c for c in self.copies if c.source == source)

    def receives(self, destination: int) -> tuple[Copy, ...]:
        """What one destination rank receives, in order."""
        return tuple(c for c in self.copies if c.destination == destination)


def reshard(src: Layout, dst: Layout) -> CopyPlan:
    """The copies that fill every box of `dst` from the boxes of `src`: each element of each destination box is
    written exactly once, by the rank with the least to send so far among those that hold it.

    Raises `LayoutError` with every tensor that is missing on a side, differs in shape or dtype, or is not covered.
    A pure function of its arguments, so that each rank makes the same plan by itself.
    """
    faults = _faults(src, dst)
    load: dict[int, int] = {}
    copies: list[Copy] = []
    for wanted in dst.tensors:
        if wanted.name in faults:
            continue
        for rank, box in wanted.boxes:
            missing = _fill(src.by_name[wanted.name], rank, box, load, copies)
            if missing:
                text = f"{_listed(missing)} for rank {rank} is held by no source rank"
                faults.setdefault(wanted.name, []).append(text)
    if faults:
        lines = [f"  {name}: {fault}" for name in sorted(faults) for fault in faults[name]]
        raise LayoutError("\n".join(["no plan from source to destination:", *lines]))
    return CopyPlan(tuple(copies), sum(load.values()))


def _fill(held: TensorLayout, rank: int, box: Box, load: dict[int, int], copies: list[Copy]) -> list[Box]:
    """Append the copies that fill one destination box; what no source rank holds."""
    todo, missing = [box] if box.size else [], []
    while todo:
        piece = todo.pop()
        able = [(load.get(source, 0), source, piece & part) for source, part in held.boxes if (piece & part).size]
        if not able:
            missing.append(piece)
            continue
        _, source, common = min(able, key=lambda entry: entry[:2])
        copies.append(Copy(held.name, source, rank, common))
        load[source] = load.get(source, 0) + common.size * ITEMSIZE[held.dtype]
        todo.extend(reversed(piece.minus(common)))
    return missing


def _faults(src: Layout, dst: Layout) -> dict[str, list[str]]:
    """By tensor: what makes a plan impossible, but for coverage."""
    faults: dict[str, list[str]] = {}
    for side, layout in (("source", src), ("destination", dst)):
        times = Counter(t.name for t in layout.tensors)
        for t in layout.tensors:
            if times[t.name] > 1:
                faults.setdefault(t.name, []).append(f"{times[t.name]} times in the {side}")
            for fault in _own_faults(t):
                faults.setdefault(t.name, []).append(f"{fault} in the {side}")
    for name in src.by_name.keys() | dst.by_name.keys():
        a, b = src.by_name.get(name), dst.by_name.get(name)
        if a is None or b is None:
            faults.setdefault(name, []).append(f"only in the {'source' if b is None else 'destination'}")
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            given = f"{a.dtype} {a.shape} in the source, {b.dtype} {b.shape} in the destination"
            faults.setdefault(name, []).append(given)
    return faults


def _own_faults(t: TensorLayout) -> list[str]:
    """What is wrong with one tensor's layout by itself."""
    unknown = [] if t.dtype in ITEMSIZE else [f"dtype {t.dtype!r} (known: {', '.join(ITEMSIZE)})"]
    return unknown + [
        f"box {box} of rank {rank} outside shape {t.shape}" for rank, box in t.boxes if not _inside(box, t.shape)
    ]


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.start) == len(box.stop) == len(shape):
        return False
    return all(a >= 0 and b <= size for a, b, size in zip(box.start, box.stop, shape, strict=True))


def _listed(boxes: Sequence[Box], limit: int = 3) -> str:
    more = f" and {len(boxes) - limit} more" if len(boxes) > limit else ""
    return ", ".join(map(str, boxes[:limit])) + more
