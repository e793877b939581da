"""Which rank holds which region of which tensor. Pure, no torch.

A `Layout` says, for each logical tensor, which regions each rank holds: described by a mesh and a placement, or listed.
Equal regions on several ranks are replicas. Fused parameters are several logical tensors; empty regions are normal.
Ranks of a source and of a destination are numbered separately, each from 0.

    mesh = Mesh((("fsdp", 64), ("tp", 8)))
    Placement(mesh, (Split("tp", 0), Split("fsdp", 0)))      # a column-parallel weight under FSDP2

The splits are applied in order, each to the result of the one before: FSDP2 over tensor parallelism splits over "tp"
first, and each part over "fsdp"; DTensor calls this (_StridedShard, Shard). An axis without a split holds replicas.
`sharded` makes the layout of a model on a mesh from data that come with the model: a table of rules for tensor
parallelism, and the stages of a pipeline.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from operator import sub
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.graph.protocols import (
    EXPERT,
    FSDP,
    STAGE,
    TENSOR,
    Axes,
    Rule,
    described,
    expert_of,
    num_ranks,
    place_of_expert,
    rule_of,
)

__all__ = [
    "ITEMSIZE",
    "Copy",
    "Layout",
    "LayoutError",
    "ListedRegions",
    "Region",
    "TensorLayout",
]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """The elements with start[d] <= index[d] < stop[d] for every dimension d. Without dimensions: the one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> "Region":
        return Region((0,) * len(shape), tuple(shape))

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

    def __and__(self, other: "Region") -> "Region":
        """The elements in both. The regions must have the same number of dimensions."""
        return Region(tuple(map(max, self.start, other.start)), tuple(map(min, self.stop, other.stop)))

    def minus(self, other: "Region") -> tuple["Region", ...]:
        """The elements not in `other`, as disjoint non-empty regions."""
        common = self & other
        if not common.size:
            return (self,) if self.size else ()
        pieces = []
        start, stop = list(self.start), list(self.stop)
        # Cut slabs off, one dimension after the other, until only the common part is left.
        for d in range(len(start)):
            pieces.append(Region(tuple(start), (*stop[:d], common.start[d], *stop[d + 1 :])))
            pieces.append(Region((*start[:d], common.stop[d], *start[d + 1 :]), tuple(stop)))
            start[d], stop[d] = common.start[d], common.stop[d]
        return tuple(piece for piece in pieces if piece.size)

    def cut(self, parts: int) -> tuple["Region", ...]:
        """The region as `parts` slabs of nearly equal size, along the first dimension that is long enough; the region
        itself if none is.
        """
        # The first one: slabs of an outer dimension are whole runs of memory.
        dim = next((d for d, extent in enumerate(self.shape) if extent >= parts), None)
        if dim is None:
            return (self,)
        edges = [self.start[dim] + self.shape[dim] * k // parts for k in range(parts + 1)]
        return tuple(
            Region((*self.start[:dim], a, *self.start[dim + 1 :]), (*self.stop[:dim], b, *self.stop[dim + 1 :]))
            for a, b in itertools.pairwise(edges)
        )

    def parted(self, dim: int, count: int) -> tuple["Region", "Region"]:
        """The first `count` indices along dimension `dim`, which has more, and the rest."""
        edge = self.start[dim] + count
        return (
            Region(self.start, (*self.stop[:dim], edge, *self.stop[dim + 1 :])),
            Region((*self.start[:dim], edge, *self.start[dim + 1 :]), self.stop),
        )

    def slices(self, within: "Region") -> tuple[slice, ...]:
        """The slices that cut this region out of a tensor that holds the elements of `within`."""
        edges = zip(self.start, self.stop, within.start, strict=True)
        return tuple(slice(a - origin, b - origin) for a, b, origin in edges)

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


class RankRegions(NamedTuple):
    """Regions as arrays [N], [N, D], [N, D]: region i is start[i] to stop[i], on rank ranks[i]. Some are empty."""

    ranks: IntArray
    start: IntArray
    stop: IntArray


class Holding(Protocol):
    """Which rank holds which region of a tensor; hashable. `ListedRegions` lists it, `Placement` describes it."""

    @property
    def ranks(self) -> int:
        """The number of ranks, including those that hold nothing."""

    @property
    def disjoint(self) -> bool:
        """True if any two regions are known to be equal or without common elements."""

    def edges(self, shape: tuple[int, ...]) -> RankRegions:
        """Every region of a tensor of this shape."""

    def of(self, rank: int, shape: tuple[int, ...]) -> tuple[Region, ...]:
        """The non-empty regions of one rank."""

    def faults(self, shape: tuple[int, ...]) -> list[str]:
        """Why it is impossible for a tensor of this shape; [] if it is possible."""


@dataclass(frozen=True, slots=True)
class ListedRegions:
    """(rank, region) pairs, for a holding that no mesh describes. Regions may overlap, repeat and be empty."""

    regions: tuple[tuple[int, Region], ...]

    @property
    def ranks(self) -> int:
        return max((rank + 1 for rank, _ in self.regions), default=0)

    @property
    def disjoint(self) -> bool:
        return False

    def edges(self, shape: tuple[int, ...]) -> RankRegions:
        ranks = np.array([rank for rank, _ in self.regions], np.int64)
        start = np.array([region.start for _, region in self.regions], np.int64)
        stop = np.array([region.stop for _, region in self.regions], np.int64)
        return RankRegions(ranks, start.reshape(len(ranks), len(shape)), stop.reshape(len(ranks), len(shape)))

    def of(self, rank: int, shape: tuple[int, ...]) -> tuple[Region, ...]:
        return tuple(region for r, region in self.regions if r == rank and region.size)

    def faults(self, shape: tuple[int, ...]) -> list[str]:
        whole = Region.whole(shape)
        return [
            f"region {region} of rank {rank} outside shape {shape}"
            for rank, region in self.regions
            if not len(region.start) == len(region.stop) == len(shape)
            # If the hull of region and tensor is larger than the tensor, the region is partly outside.
            or Region(tuple(map(min, region.start, whole.start)), tuple(map(max, region.stop, whole.stop))) != whole
        ]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes with distinct names. Raises ValueError for equal names, and for sizes below 1."""

    axes: Axes

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) < len(names) or any(size < 1 for _, size in self.axes):
            raise ValueError(f"given a mesh of {self}, needed distinct names and sizes of at least 1")

    @classmethod
    def of(cls, axes: Axes | None, ranks: int = 1) -> "Mesh":
        """The mesh of a replica; without axes, `ranks` ranks that each hold everything."""
        return cls((("replica", ranks),) if axes is None else tuple((name, size) for name, size in axes))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return num_ranks(self.axes)

    def axis(self, name: str) -> int:
        """The position of an axis."""
        return [axis for axis, _ in self.axes].index(name)

    def extent(self, name: str) -> int:
        """The size of an axis; 1 if there is none. For several joined by "+", the product."""
        axes = dict(self.axes)
        return prod(axes.get(each, 1) for each in name.split("+"))

    def coordinates(self) -> IntArray:
        """[axis, rank]: the coordinate of each rank on each axis."""
        shape = tuple(size for _, size in self.axes)
        return np.indices(shape, np.int64).reshape(len(shape), self.size)

    def along(self, name: str, coordinates: IntArray) -> IntArray:
        """[rank]: the places of ranks with these coordinates on an axis, or several joined by "+", outermost first."""
        found = np.zeros(coordinates.shape[1], np.int64)
        for each in name.split("+"):
            found = found * self.extent(each) + coordinates[self.axis(each)]
        return found

    def __str__(self) -> str:
        return described(self.axes)


@dataclass(frozen=True, slots=True)
class Split:
    """A dimension split over an axis of n ranks as by `torch.chunk`: the length of a part is rounded up, and the last
    ones are short or empty. Several axes that split as one are joined by "+", outermost first.

    With `units`, the dimension consists of that many indivisible units, such as heads, which are split as by `chunk`.
    If there are fewer units than ranks, each unit is on n / units neighbouring ranks.
    """

    axis: str
    dim: int
    units: int = 0

    def apply(self, start: IntArray, stop: IntArray, coordinate: IntArray, parts: int) -> tuple[IntArray, IntArray]:
        """The part of the range start to stop that each coordinate gets."""
        length = stop - start
        if 0 < self.units < parts:
            unit = length // self.units
            # Fewer heads than ranks: neighbours hold the same one, as vLLM and Megatron replicate key-value heads.
            first = start + coordinate * self.units // parts * unit
            return first, first + unit
        unit = length // self.units if self.units else np.ones_like(length)
        # Rounded up, as torch.chunk does: the last ranks get less, or nothing.
        chunk = -(-(length // np.maximum(unit, 1)) // parts) * unit
        first = np.minimum(start + coordinate * chunk, stop)
        return first, np.minimum(first + chunk, stop)


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies on a mesh: split by `splits`, in order. `only` has pairs (axis, coordinates): only ranks at
    these coordinates hold it, such as those of its pipeline stage.
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

    def edges(self, shape: tuple[int, ...]) -> RankRegions:
        coordinates = self.mesh.coordinates()
        here = np.ones(self.mesh.size, np.bool_)
        for axis, kept in self.only:
            here &= np.isin(coordinates[self.mesh.axis(axis)], kept)
        coordinates = coordinates[:, here]
        start = np.zeros((coordinates.shape[1], len(shape)), np.int64)
        stop = start + np.array(shape, np.int64)
        for split in self.splits:
            along, dim, parts = self.mesh.along(split.axis, coordinates), split.dim, self.mesh.extent(split.axis)
            start[:, dim], stop[:, dim] = split.apply(start[:, dim], stop[:, dim], along, parts)
        return RankRegions(np.flatnonzero(here), start, stop)

    def of(self, rank: int, shape: tuple[int, ...]) -> tuple[Region, ...]:
        region = _regions(self, shape).get(rank)
        return (region,) if region is not None and region.size else ()

    def faults(self, shape: tuple[int, ...]) -> list[str]:
        found = []
        axes = dict(self.mesh.axes)
        for axis, kept in self.only:
            if not set(kept) <= set(range(axes.get(axis, 0))):
                found.append(f"only at {kept} of axis {axis!r} of {self.mesh}")
        for index, split in enumerate(self.splits):
            if not axes.keys() >= set(split.axis.split("+")):
                found.append(f"split over axis {split.axis!r} of {self.mesh}")
            elif split.dim >= len(shape):
                found.append(f"split of dimension {split.dim} of shape {shape}")
            elif split.units:
                length, parts = shape[split.dim], self.mesh.extent(split.axis)
                # Units are never split: attention needs whole heads.
                if length % split.units:
                    found.append(f"{split.units} units in dimension {split.dim} of shape {shape}")
                elif split.units < parts and parts % split.units:
                    found.append(
                        f"{split.units} units over {parts} ranks of {split.axis}: needed a multiple or a divisor"
                    )
                elif any(before.dim == split.dim for before in self.splits[:index]):
                    found.append(f"{split.units} units in dimension {split.dim}, which is cut already")
        return found

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
def _regions(placement: Placement, shape: tuple[int, ...]) -> dict[int, Region]:
    """The region of each rank that has one; equal for all tensors of a signature."""
    edges = placement.edges(shape)
    rows = zip(edges.ranks.tolist(), edges.start.tolist(), edges.stop.tolist(), strict=True)
    return {rank: Region(tuple(start), tuple(stop)) for rank, start, stop in rows}


def whole(ranks: int) -> Placement:
    """A whole tensor on each of `ranks` ranks."""
    return Placement(Mesh((("replica", ranks),)))


# Bytes of an element of each dtype that can be sent.
ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4,
    "int64": 8, "float64": 8,
}  # fmt: skip

Signature = tuple[tuple[int, ...], str, Holding]


class LayoutError(ValueError):
    """A layout is impossible, or cannot be turned into another one. The message lists every tensor at fault."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One logical tensor: `shape` and `dtype` of the whole, and which rank holds which region."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    held: Holding

    def held_by(self, rank: int) -> tuple[Region, ...]:
        """The non-empty regions of one rank."""
        return self.held.of(rank, self.shape)

    def faults(self) -> list[str]:
        """What is wrong with this tensor's layout by itself."""
        unknown = [] if self.dtype in ITEMSIZE else [f"dtype {self.dtype!r} (known: {', '.join(ITEMSIZE)})"]
        return unknown + self.held.faults(self.shape)


@dataclass(frozen=True)
class Layout:
    """The logical tensors that a group of ranks holds together. Names are unique.

    `hosts` names the host of each rank, or is empty; ranks prefer senders on their own host.
    """

    tensors: tuple[TensorLayout, ...]
    hosts: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, TensorLayout]:
        return {t.name: t for t in self.tensors}

    @cached_property
    def ranks(self) -> int:
        """The number of ranks, including those that hold nothing."""
        # By identity: thousands of tensors may share a holding.
        distinct = {id(t.held): t.held for t in self.tensors}
        return max([len(self.hosts), *(held.ranks for held in distinct.values())])

    @cached_property
    def signatures(self) -> tuple[tuple[Signature, ...], tuple[int, ...]]:
        """The distinct (shape, dtype, holding), in order of appearance, and the index of each tensor's.
        Tensors of one signature have the same regions, so work on one is valid for all.
        """
        places: dict[Signature, int] = {}
        # Hashing a holding costs more than everything else here, and tensors share holdings.
        seen: dict[tuple[tuple[int, ...], str, int], int] = {}
        indices = []
        for t in self.tensors:
            key = t.shape, t.dtype, id(t.held)
            if key not in seen:
                seen[key] = places.setdefault((t.shape, t.dtype, t.held), len(places))
            indices.append(seen[key])
        return tuple(places), tuple(indices)

    @staticmethod
    def whole(tensors: Iterable[tuple[str, Sequence[int], str]], ranks: int = 1) -> "Layout":
        """Every rank holds all of every (name, shape, dtype)."""
        held = whole(ranks)
        return Layout(tuple(TensorLayout(name, tuple(shape), dtype, held) for name, shape, dtype in tensors))

    def replicated(self, ranks: int) -> "Layout":
        """The same tensors, each whole on every one of `ranks` ranks."""
        return Layout.whole(((t.name, t.shape, t.dtype) for t in self.tensors), ranks)

    def to_json(self) -> dict[str, Any]:
        """Each signature once, and the tensors as [name, index of the signature]. Only for placements."""
        # Thousands of tensors have a dozen signatures, so the text is little longer than the list of names.
        signatures, indices = self.signatures
        placed = [(shape, dtype, held) for shape, dtype, held in signatures if isinstance(held, Placement)]
        if len(placed) < len(signatures):
            raise TypeError("layout: given listed regions to write as JSON, needed placements on a mesh")
        return {
            "hosts": list(self.hosts),
            "signatures": [[list(shape), dtype, held.to_json()] for shape, dtype, held in placed],
            "tensors": [[t.name, index] for t, index in zip(self.tensors, indices, strict=True)],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Layout":
        signatures = [(tuple(shape), dtype, Placement.from_json(held)) for shape, dtype, held in data["signatures"]]
        tensors = tuple(TensorLayout(name, *signatures[index]) for name, index in data["tensors"])
        return Layout(tensors, tuple(data["hosts"]))


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements `region` of a logical tensor, from a source rank to a destination rank."""

    tensor: str
    source: int
    destination: int
    region: Region


def sharded(
    tensors: Iterable[tuple[str, Sequence[int], str]],
    mesh: Mesh,
    rules: Mapping[str, Rule] | None = None,
    stages: Mapping[str, Sequence[int]] | None = None,
    hosts: Sequence[str] = (),
    experts: int = 0,
    sharding_axes: Sequence[str] = (FSDP, EXPERT),
) -> Layout:
    """The layout of every (name, shape, dtype) on a mesh whose axes are named as in `graph.protocols`, in any order.

    `rules` are for `rule_of`; `stages` has the stages that hold a tensor. Each of a layer's `experts` is at one place
    of the axis "ep". The `sharding_axes` together split dimension 0, outermost axis first; for tensors of experts,
    without "ep". Raises `LayoutError` with every tensor without a rule or stage that the mesh needs, and every expert
    that "ep" cannot place.
    """
    axes = dict(mesh.axes)
    if EXPERT in axes and experts % axes[EXPERT]:
        raise LayoutError(f"no layout on {mesh}: given {experts} experts, needed a multiple of {axes[EXPERT]}")
    faults: list[str] = []
    placements: dict[Placement, Placement] = {}
    layouts = []
    for name, shape, dtype in tensors:
        splits: tuple[Split, ...] = ()
        only: tuple[tuple[str, tuple[int, ...]], ...] = ()
        if TENSOR in axes:
            try:
                rule = rule_of(name, rules or {})
                splits = () if rule is None else (Split(TENSOR, *rule),)
            except LookupError as error:
                faults.append(f"  {error.args[0]}")
        expert = expert_of(name) if EXPERT in axes else None
        # Last: FSDP2 shards the result of tensor parallelism.
        over = [axis for axis in sharding_axes if axis in axes and (expert is None or axis != EXPERT)]
        if len(shape) and over:
            splits = (*splits, Split("+".join(sorted(over, key=mesh.axis)), 0))
        if expert is not None and not experts > expert:
            faults.append(f"  {name}: given {experts} experts")
        elif expert is not None:
            only = ((EXPERT, (place_of_expert(expert, experts, axes[EXPERT]),)),)
        if STAGE in axes:
            if stages is None or name not in stages:
                faults.append(f"  {name}: no stage")
            else:
                only = (*only, (STAGE, tuple(stages[name])))
        placement = Placement(mesh, splits, only)
        # Share one object for equal placements: `signatures` compares by identity.
        layouts.append(TensorLayout(name, tuple(shape), dtype, placements.setdefault(placement, placement)))
    if faults:
        raise LayoutError("\n".join([f"no layout on {mesh}:", *faults]))
    return Layout(tuple(layouts), tuple(hosts))
