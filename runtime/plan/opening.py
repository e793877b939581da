"""What of a plan is decided, step by step: what a search has open. Pure."""

from dataclasses import dataclass

from penstock.runtime.plan.cost import Cost
from penstock.runtime.plan.found import Split, tie
from penstock.runtime.plan.islands import Island
from penstock.runtime.plan.syncing import switch_cost
from penstock.runtime.plan.ways import Generating, Training

Groups = tuple[tuple[str, ...], ...]
"""Pools that share GPUs."""


@dataclass(frozen=True)
class Row:
    """Splits that differ in the generator's GPUs: the `index`th size of its island, and all smaller ones. `apart` are
    groups of pools that are to have GPUs of their own, still to be chosen."""

    trainer: Island
    gpus: int
    generator: Island
    index: int
    apart: Groups = ()

    @property
    def split(self) -> Split:
        return Split(False, (self.trainer, self.generator), self.gpus, self.generator.sizes[self.index])


@dataclass(frozen=True)
class Room:
    """A split of which no layout is decided. `apart` are groups of pools that are to have GPUs of their own, too.
    `decoded`: its bound is by the generators that there are on so many GPUs."""

    split: Split
    apart: Groups = ()
    decoded: bool = False


@dataclass(frozen=True)
class Trained:
    """A split with a trainer, the `index`th of its list."""

    split: Split
    readings: tuple[Training, ...]
    train: Training
    index: int = 0


@dataclass(frozen=True)
class Pair:
    """All but the sync, and the rollout while it is None. With GPUs of its own the trainer is the `index`th of its
    list, and the others follow."""

    split: Split
    readings: tuple[Training, ...]
    train: Training
    decode: Generating
    rollout_s: float | None = None
    index: int = 0
    offloads: bool = False

    @property
    def tie(self) -> tuple[int, ...]:
        return tie(self.decode, self.split)

    @property
    def switch(self) -> Cost:
        """The trainer's moments to the host and back."""
        parts = self.train.memory.parts
        moments = parts["moments"] + parts.get("critic moments", 0.0) if self.offloads else 0.0
        return switch_cost(self.split.islands[0].gpu, moments, moments)
