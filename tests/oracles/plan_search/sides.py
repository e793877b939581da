"""The ways in which each role can be run: what a search asks, all of it kept, since it asks the same again and again.
Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from penstock.graph.protocols import Axes
from penstock.runtime.plan.roles import Models
from penstock.runtime.plan.workload import Workload
from tests.oracles.plan_search.candidates import Candidates
from tests.oracles.plan_search.decoding_side import DecodingSide
from tests.oracles.plan_search.reading_side import ReadingSide
from tests.oracles.plan_search.training_side import TrainingSide


@dataclass(frozen=True)
class Pins:
    """Meshes that are given; `beside` are those of pools with models beside the policy, which then have GPUs of their
    own."""

    trainer: Axes | None = None
    generator: Axes | None = None
    beside: Mapping[str, Axes] = field(default_factory=dict)


@dataclass(frozen=True)
class Sides:
    """`slots` is the most rows of a generator's replica; `models` are there beside the policy."""

    work: Workload
    lag: int
    slots: int = 256
    pins: Pins = field(default_factory=Pins)
    models: Models = field(default_factory=Models)

    @cached_property
    def candidates(self) -> Candidates:
        return Candidates(self.work)

    @cached_property
    def training(self) -> TrainingSide:
        return TrainingSide(self.candidates, self.models, self.pins.trainer)

    @cached_property
    def reading(self) -> ReadingSide:
        return ReadingSide(self.candidates)

    @cached_property
    def decoding(self) -> DecodingSide:
        return DecodingSide(self.work, self.lag, self.slots, self.pins.generator)

    def agreed(self, pools: Sequence[str]) -> bool:
        """Whether pools with one layout keep to the meshes that are given."""
        return len({self.pins.beside[pool] for pool in pools if pool in self.pins.beside}) <= 1

    def pin_of(self, pools: Sequence[str]) -> Axes | None:
        """The mesh that is given for pools with one layout."""
        return next((self.pins.beside[pool] for pool in pools if pool in self.pins.beside), None)
