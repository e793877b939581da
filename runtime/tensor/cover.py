"""Which ranks of a source can give which parts of a destination's boxes, for all tensors of one signature. Pure."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.runtime.tensor.box import Box, Holding, IntArray

_BLOCK = 1 << 20  # pairs of boxes compared by one call


class Regions(NamedTuple):
    """The distinct non-empty boxes of a holding, sorted, and the ranks that hold each: start and stop are [N, D]."""

    start: IntArray
    stop: IntArray
    ranks: Sequence[tuple[int, ...]]

    def box(self, index: int) -> Box:
        return Box(tuple(self.start[index].tolist()), tuple(self.stop[index].tolist()))

    @property
    def sizes(self) -> IntArray:
        """The elements of each, [N]."""
        sizes: IntArray = (self.stop - self.start).prod(1)
        return sizes


class Piece(NamedTuple):
    """Elements that all of `sources` hold and all of `destinations` need."""

    box: Box
    sources: tuple[int, ...]
    destinations: tuple[int, ...]


class Missing(NamedTuple):
    """Elements that all of `destinations` need and no source rank holds."""

    boxes: tuple[Box, ...]
    destinations: tuple[int, ...]


def cover(src: Holding, dst: Holding, shape: tuple[int, ...]) -> tuple[list[Piece], list[Missing]]:
    """The pieces that fill each box of `dst` exactly once, by destination box and then by place; what is missing."""
    held, wanted = atoms(src, shape), regions(dst, shape)
    to, by, start, stop = _overlaps(wanted, held)
    found = np.zeros(len(wanted.ranks), np.int64)
    np.add.at(found, to, (stop - start).prod(1))
    rows = zip(to.tolist(), by.tolist(), start.tolist(), stop.tolist(), strict=True)
    pieces = [Piece(Box(tuple(a), tuple(b)), held.ranks[s], wanted.ranks[d]) for d, s, a, b in rows]
    gaps = np.flatnonzero(found < wanted.sizes).tolist()
    return pieces, [Missing(_gaps(wanted.box(index), held), wanted.ranks[index]) for index in gaps]


def regions(holding: Holding, shape: tuple[int, ...]) -> Regions:
    edges = holding.edges(shape)
    some = (edges.start < edges.stop).all(1)
    ranks, rows = edges.ranks[some], np.concatenate((edges.start, edges.stop), 1)[some]
    order = np.lexsort((ranks, *rows.T[::-1]))
    ranks, rows = ranks[order], rows[order]
    first = np.ones(len(rows), np.bool_)
    first[1:] = (rows[1:] != rows[:-1]).any(1)
    bounds = [*np.flatnonzero(first).tolist(), len(rows)]
    listed = ranks.tolist()
    holders = [tuple(dict.fromkeys(listed[a:b])) for a, b in itertools.pairwise(bounds)]
    return Regions(rows[first, : len(shape)], rows[first, len(shape) :], holders)


def atoms(holding: Holding, shape: tuple[int, ...]) -> Regions:
    """The same elements as `regions`, no two of which have any in common: each with all ranks that hold it."""
    held = regions(holding, shape)
    return held if holding.disjoint else _made_disjoint(held)


def _overlaps(a: Regions, b: Regions) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Every pair of boxes with common elements: its indices in `a` and `b`, sorted, and the common start and stop."""
    found = []
    step = max(1, _BLOCK // max(1, len(b.ranks)))
    for base in range(0, max(1, len(a.ranks)), step):
        start = np.maximum(a.start[base : base + step, None], b.start)
        stop = np.minimum(a.stop[base : base + step, None], b.stop)
        i, j = np.nonzero((start < stop).all(2))
        found.append((i + base, j, start[i, j], stop[i, j]))
    i, j, start, stop = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return i, j, start, stop


def _made_disjoint(held: Regions) -> Regions:
    """The same elements as boxes without common ones, each with all ranks that hold it."""
    if len(_overlaps(held, held)[0]) == len(held.ranks):
        return held
    found: list[tuple[Box, tuple[int, ...]]] = []
    for index, ranks in enumerate(held.ranks):
        new, refined = [held.box(index)], []
        for atom, holders in found:
            common = atom & held.box(index)
            if common.size:
                refined.append((common, tuple(sorted({*holders, *ranks}))))
                new = [part for box in new for part in box.minus(common)]
            refined += [(part, holders) for part in atom.minus(common)]
        found = refined + [(box, ranks) for box in new]
    found.sort(key=lambda atom: (atom[0].start, atom[0].stop))
    shape = held.start.shape[1]
    start = np.array([box.start for box, _ in found], np.int64).reshape(len(found), shape)
    stop = np.array([box.stop for box, _ in found], np.int64).reshape(len(found), shape)
    return Regions(start, stop, [ranks for _, ranks in found])


def _gaps(box: Box, held: Regions) -> tuple[Box, ...]:
    rest = [box]
    for index in range(len(held.ranks)):
        rest = [part for piece in rest for part in piece.minus(held.box(index))]
    return tuple(rest)
