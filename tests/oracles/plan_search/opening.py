"""What of a plan is decided, step by step: what a search has open. Pure."""

from dataclasses import dataclass

from penstock.runtime.plan.collectives import Cost
from penstock.runtime.plan.sync_cost import switch_cost
from penstock.runtime.plan.workload import FloatArray, IntArray
from tests.oracles.plan_search.decoders import Decoders
from tests.oracles.plan_search.found import Split, tie
from tests.oracles.plan_search.ways import Generating, Training

Groups = tuple[tuple[str, ...], ...]
"""Pools that share GPUs."""


@dataclass(frozen=True)
class Room:
    """GPUs of the trainer, and of some groups of pools: `apart` are those that are to have GPUs of their own, too. The
    generator's may be undecided."""

    split: Split
    apart: Groups = ()

    @property
    def alone(self) -> Split | None:
        """The split of all plans that follow, if they have one."""
        return None if self.apart else self.split.decided


@dataclass(frozen=True)
class Trained:
    """GPUs of all but the generator, and with them a trainer, the `index`th of its list."""

    split: Split
    readings: tuple[Training, ...]
    train: Training
    index: int = 0

    @property
    def alone(self) -> Split | None:
        return self.split.decided


@dataclass(frozen=True)
class Ways:
    """A trainer with each of some generators: those of `decoders` whose numbers are in `order`, by their bounds.
    `learnt` is how much was known of their rollouts. `offloads`: the trainer's moments are on the host while they
    decode."""

    trained: Trained
    decoders: Decoders
    order: IntArray
    bounds: FloatArray
    learnt: int
    offloads: bool = False

    @property
    def alone(self) -> Split | None:
        return self.trained.alone

    @property
    def first(self) -> int:
        """The number of the most promising generator."""
        return int(self.order[0])

    @property
    def tie(self) -> tuple[int, ...]:
        """As `found.tie` has it."""
        block, split, first = self.decoders.block, self.trained.split, self.order[0]
        own = 0 if split.shared else int(block.gpus[first]) - split.generator
        return int(block.narrow[first]), split.gpus + own

    @property
    def switch(self) -> Cost:
        return moved(self.trained.split, self.trained.train, self.offloads)


@dataclass(frozen=True)
class Pair:
    """All but the sync. With GPUs of its own the trainer is the `index`th of its list, and the others follow."""

    split: Split
    readings: tuple[Training, ...]
    train: Training
    decode: Generating
    rollout_s: float
    index: int = 0
    offloads: bool = False

    @property
    def alone(self) -> Split:
        return self.split

    @property
    def tie(self) -> tuple[int, ...]:
        return tie(self.decode, self.split)

    @property
    def switch(self) -> Cost:
        return moved(self.split, self.train, self.offloads)


Part = Room | Trained | Ways | Pair


def moved(split: Split, train: Training, offloads: bool) -> Cost:
    """A trainer's moments to the host and back, if they leave."""
    parts = train.memory.parts
    moments = parts["moments"] + parts.get("critic moments", 0.0) if offloads else 0.0
    return switch_cost(split.islands[0].gpu, moments, moments)
