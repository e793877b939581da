"""Named axes of ranks, and how a tensor lies on them: a description from which each rank's box follows. Pure, no torch.

    mesh = Mesh((("fsdp", 64), ("tp", 8)))
    Placement(mesh, (Split("tp", 0), Split("fsdp", 0)))      # a column-parallel weight under FSDP2

The splits are applied in order, each to what the one before has left: so FSDP2 over tensor parallelism splits over
"tp" first, and each part over "fsdp", where DTensor says (_StridedShard, Shard). An axis without a split holds
replicas.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.graph.sharding import Axes, described, num_ranks
from penstock.runtime.tensor.box import Box, Edges, IntArray


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes with distinct names. Raises ValueError for others, and sizes below 1."""

    axes: Axes

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) < len(names) or any(size < 1 for _, size in self.axes):
            raise ValueError(f"given a mesh of {self}, needed distinct names and sizes of at least 1")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return num_ranks(self.axes)

    def axis(self, name: str) -> int:
        """The position of an axis."""
        return [axis for axis, _ in self.axes].index(name)

    def extent(self, name: str) -> int:
        """The size of an axis; 1 for one that is not there."""
        return dict(self.axes).get(name, 1)

    def coordinates(self) -> IntArray:
        """[axis, rank]: the coordinate of each rank on each axis."""
        shape = tuple(size for _, size in self.axes)
        return np.indices(shape, np.int64).reshape(len(shape), self.size)

    def __str__(self) -> str:
        return described(self.axes)


@dataclass(frozen=True, slots=True)
class Split:
    """A dimension cut over an axis of n ranks as `torch.chunk` does: parts of the rounded-up length, the last ones
    short or empty.

    With `units` the dimension is that many indivisible ones, such as heads: they are dealt out as `chunk` would, and
    where there are fewer than ranks, each is on n / units neighbours.
    """

    axis: str
    dim: int
    units: int = 0

    def apply(self, start: IntArray, stop: IntArray, coordinate: IntArray, parts: int) -> tuple[IntArray, IntArray]:
        """The range that each coordinate has of its range start to stop."""
        length = stop - start
        if 0 < self.units < parts:
            unit = length // self.units
            first = start + coordinate * self.units // parts * unit
            return first, first + unit
        unit = length // self.units if self.units else np.ones_like(length)
        chunk = -(-(length // np.maximum(unit, 1)) // parts) * unit
        first = np.minimum(start + coordinate * chunk, stop)
        return first, np.minimum(first + chunk, stop)


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies on a mesh: cut by `splits`, in order. `only` keeps it to some coordinates of an axis, as
    (axis, coordinates): the stage of a pipeline that has it.
    """

    mesh: Mesh
    splits: tuple[Split, ...] = ()
    only: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def ranks(self) -> int:
        return self.mesh.size

    @property
    def disjoint(self) -> bool:
        return True

    def edges(self, shape: tuple[int, ...]) -> Edges:
        coordinates = self.mesh.coordinates()
        here = np.ones(self.mesh.size, np.bool_)
        for axis, kept in self.only:
            here &= np.isin(coordinates[self.mesh.axis(axis)], kept)
        coordinates = coordinates[:, here]
        start = np.zeros((coordinates.shape[1], len(shape)), np.int64)
        stop = start + np.array(shape, np.int64)
        for split in self.splits:
            along, dim, parts = coordinates[self.mesh.axis(split.axis)], split.dim, self.mesh.extent(split.axis)
            start[:, dim], stop[:, dim] = split.apply(start[:, dim], stop[:, dim], along, parts)
        return Edges(np.flatnonzero(here), start, stop)

    def of(self, rank: int, shape: tuple[int, ...]) -> tuple[Box, ...]:
        box = _boxes(self, shape).get(rank)
        return (box,) if box is not None and box.size else ()

    def faults(self, shape: tuple[int, ...]) -> list[str]:
        found = []
        axes = dict(self.mesh.axes)
        for axis, kept in self.only:
            if not set(kept) <= set(range(axes.get(axis, 0))):
                found.append(f"only at {kept} of axis {axis!r} of {self.mesh}")
        for index, split in enumerate(self.splits):
            if split.axis not in axes:
                found.append(f"split over axis {split.axis!r} of {self.mesh}")
            elif split.dim >= len(shape):
                found.append(f"split of dimension {split.dim} of shape {shape}")
            elif split.units:
                found += self._unit_faults(index, shape)
        return found

    def _unit_faults(self, index: int, shape: tuple[int, ...]) -> list[str]:
        split, parts = self.splits[index], self.mesh.extent(self.splits[index].axis)
        if shape[split.dim] % split.units:
            return [f"{split.units} units in dimension {split.dim} of shape {shape}"]
        if split.units < parts and parts % split.units:
            return [f"{split.units} units over {parts} ranks of {split.axis}: needed a multiple or a divisor"]
        if any(before.dim == split.dim for before in self.splits[:index]):
            return [f"{split.units} units in dimension {split.dim}, which is cut already"]
        return []

    def to_json(self) -> dict[str, Any]:
        return {
            "mesh": [[name, size] for name, size in self.mesh.axes],
            "splits": [[s.axis, s.dim, s.units] for s in self.splits],
            "only": [[axis, list(kept)] for axis, kept in self.only],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Placement":
        return Placement(
            Mesh(tuple((name, size) for name, size in data["mesh"])),
            tuple(Split(*split) for split in data["splits"]),
            tuple((axis, tuple(kept)) for axis, kept in data["only"]),
        )


@lru_cache(maxsize=256)
def _boxes(placement: Placement, shape: tuple[int, ...]) -> dict[int, Box]:
    """The box of each rank that has one: the same for all tensors of a signature."""
    edges = placement.edges(shape)
    rows = zip(edges.ranks.tolist(), edges.start.tolist(), edges.stop.tolist(), strict=True)
    return {rank: Box(tuple(start), tuple(stop)) for rank, start, stop in rows}


def whole(ranks: int) -> Placement:
    """All of a tensor on each of `ranks` ranks."""
    return Placement(Mesh((("replica", ranks),)))
