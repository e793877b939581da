"""Who holds which part of which tensor. Pure, no torch.

A layout says, for each logical tensor, which boxes of it each rank holds: described by a mesh and a placement, or
listed. Equal boxes on several ranks are replicas. Fused parameters are several logical tensors; empty boxes are
normal. Ranks of a source and of a destination are counted apart, each from 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.runtime.tensor.box import Box, Boxes, Holding
from penstock.runtime.tensor.mesh import Placement, whole

__all__ = ["ITEMSIZE", "Box", "Boxes", "Copy", "Layout", "LayoutError", "TensorLayout"]

ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4,
    "int64": 8, "float64": 8,
}  # fmt: skip
"""Bytes of an element of each dtype that travels."""

Signature = tuple[tuple[int, ...], str, Holding]


class LayoutError(ValueError):
    """Layouts that cannot be turned into each other; the message lists every tensor at fault."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One logical tensor: `shape` and `dtype` of the whole, and who holds what of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    held: Holding

    def held_by(self, rank: int) -> tuple[Box, ...]:
        """The non-empty boxes of one rank."""
        return self.held.of(rank, self.shape)

    def faults(self) -> list[str]:
        """What is wrong with this tensor's layout by itself."""
        unknown = [] if self.dtype in ITEMSIZE else [f"dtype {self.dtype!r} (known: {', '.join(ITEMSIZE)})"]
        return unknown + self.held.faults(self.shape)


@dataclass(frozen=True)
class Layout:
    """The logical tensors that a group of ranks holds between them. Names are unique.

    `hosts` names the host of each rank, or is empty: ranks of one host send to each other first.
    """

    tensors: tuple[TensorLayout, ...]
    hosts: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, TensorLayout]:
        return {t.name: t for t in self.tensors}

    @cached_property
    def ranks(self) -> int:
        """The number of ranks, those that hold nothing included."""
        distinct = {id(t.held): t.held for t in self.tensors}
        return max([len(self.hosts), *(held.ranks for held in distinct.values())])

    @cached_property
    def signatures(self) -> tuple[tuple[Signature, ...], tuple[int, ...]]:
        """The distinct (shape, dtype, holding), in order of appearance, and for each tensor the index of its own.
        Tensors of one signature have the same boxes: what holds for one holds for all.
        """
        places: dict[Signature, int] = {}
        # Hashing a holding costs more than all the rest here, and tensors share them.
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
        """Each signature once, and the tensors as [name, index of the signature]."""
        signatures, indices = self.signatures
        return {
            "hosts": list(self.hosts),
            "signatures": [[list(shape), dtype, held.to_json()] for shape, dtype, held in signatures],
            "tensors": [[t.name, index] for t, index in zip(self.tensors, indices, strict=True)],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Layout":
        signatures = [(tuple(shape), dtype, _holding(held)) for shape, dtype, held in data["signatures"]]
        tensors = tuple(TensorLayout(name, *signatures[index]) for name, index in data["tensors"])
        return Layout(tensors, tuple(data["hosts"]))


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements `box` of a logical tensor, from a source rank to a destination rank."""

    tensor: str
    source: int
    destination: int
    box: Box


def _holding(data: Any) -> Holding:
    return Placement.from_json(data) if isinstance(data, dict) else Boxes.from_json(data)
