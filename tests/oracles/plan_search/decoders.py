"""Ways to decode as columns of arrays, so that a search looks at all of them at once. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.runtime.plan.collectives import SAFE
from penstock.runtime.plan.workload import BoolArray, FloatArray, IntArray


class Block(NamedTuple):
    """[ways] each. `base` is the number of a mesh and precision, `share` the bytes of weights of each rank, `narrow`
    whether a precision has less than 16 bits. Seconds are as in `ways.Generating`. Those with the same `alike` have the
    same rollout."""

    base: IntArray
    replicas: IntArray
    slots: IntArray
    gpus: IntArray
    share: FloatArray
    narrow: IntArray
    alike: IntArray
    steady: FloatArray
    least: FloatArray
    others: FloatArray


class Fastest(NamedTuple):
    """[sizes] each: the least of any way on so many GPUs. Where there is none, `steady` is infinite."""

    steady: FloatArray
    rollout: FloatArray
    others: FloatArray
    share: FloatArray


@dataclass(eq=False)
class Decoders:
    """Ways by GPUs, which are those numbers of `sizes` that `place` says. `rollouts` are lower bounds of each batch by
    itself, and the seconds themselves where they are `known`; `learnt` counts how often more of them have become so."""

    sizes: IntArray
    place: IntArray
    block: Block
    rollouts: FloatArray
    known: BoolArray
    learnt: int = 0

    @staticmethod
    def of(sizes: Sequence[int], blocks: Sequence[Block], known: Mapping[int, float]) -> "Decoders":
        """`known` are rollouts by `alike`."""
        none: Any = np.zeros(0, np.int64)
        blocks = blocks or [Block(*(none for _ in Block._fields))]
        columns: list[Any] = [np.concatenate(column) for column in zip(*blocks, strict=True)]
        order = columns[Block._fields.index("gpus")].argsort(kind="stable")
        return _with(sizes, _picked(columns, order), known)

    def only(self, gpus: int, known: Mapping[int, float]) -> "Decoders":
        """Those on so many GPUs."""
        here = np.flatnonzero(self.block.gpus == gpus)
        return _with((gpus,), _picked(self.block, here), known)

    def __len__(self) -> int:
        return len(self.rollouts)

    def learn(self, alike: int, seconds: float) -> None:
        """What a rollout takes."""
        same = self.block.alike == alike
        self.rollouts[same], self.known[same] = seconds, True
        self.learnt += 1

    def on(self, sizes: Sequence[int]) -> IntArray:
        """The ways on these numbers of GPUs."""
        asked = np.zeros(len(self.sizes), bool)
        asked[np.searchsorted(self.sizes, sizes)] = True
        return np.flatnonzero(asked[self.place])

    def fastest(self, *, fewer: bool) -> Fastest:
        """On each number of GPUs, or with `fewer` on any smaller one, too."""

        def least(column: FloatArray) -> FloatArray:
            found = np.full(len(self.sizes), np.inf)
            np.minimum.at(found, self.place, column)
            return np.minimum.accumulate(found) if fewer else found

        steady = least(self.block.steady)
        others = (least(c) for c in (self.block.least * SAFE, self.block.others, self.block.share))
        return Fastest(steady, *(np.where(np.isfinite(steady), column, 0.0) for column in others))


def _picked(columns: Iterable[Any], ways: IntArray) -> Block:
    return Block(*(column[ways] for column in columns))


def _with(sizes: Sequence[int], block: Block, known: Mapping[int, float]) -> Decoders:
    seconds = np.array([known.get(alike, -1.0) for alike in block.alike.tolist()], np.float64)
    counts = np.array(sizes, np.int64)
    rollouts = np.where(seconds < 0, block.least * SAFE, seconds)
    return Decoders(counts, np.searchsorted(counts, block.gpus), block, rollouts, seconds >= 0)
