"""The ways in which models beside the policy can run on GPUs of their own, and lower bounds of them. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import NamedTuple

from penstock.graph.protocols import Axes
from penstock.runtime.cluster.gpus import Gpu
from penstock.runtime.plan.collectives import SAFE, Cost
from penstock.runtime.plan.memory import beside_memory, trainer_memory
from penstock.runtime.plan.roles import Models
from penstock.runtime.plan.train_cost import Kept, Trainer
from penstock.runtime.plan.workload import FloatArray
from tests.oracles.plan_search.candidates import Alike, Candidates
from tests.oracles.plan_search.islands import Island
from tests.oracles.plan_search.once import Once
from tests.oracles.plan_search.ranked import Ranked
from tests.oracles.plan_search.ways import Training


class Fastest(NamedTuple):
    """[sizes] each: what models on so many GPUs of their own do not go below, in passes and in steps."""

    reads: FloatArray
    learns: FloatArray


@dataclass(frozen=True)
class ReadingSide:
    candidates: Candidates
    _once: Once = field(default_factory=Once, compare=False, repr=False)

    def readers(self, island: Island, gpus: int, models: Models, pin: Axes | None = None) -> tuple[Training, ...]:
        """Those that fit, the fastest first, and that no other one beats both in passes and in steps. `pin` is a mesh
        that is given."""
        return self._once(("read", island, gpus, models, pin), lambda: self._readers(island, gpus, models, pin))

    def fastest(self, island: Island, models: Models) -> Fastest:
        """Lower bounds whatever the mesh is, and the least seconds themselves once `readers` has been asked."""
        return self._once(("fastest", island, models), lambda: self._fastest(island, models))

    def least(self, gpu: Gpu, models: Models) -> tuple[float, float]:
        """GPU-seconds of models' passes and of critics' steps that no layout of this kind goes below."""
        passed, steps = self.candidates.least(gpu)
        return models.count * passed * SAFE, models.critics * steps * SAFE

    def _fastest(self, island: Island, models: Models) -> Fastest:
        reads, learns = self.least(island.gpu, models)
        return Fastest(reads / island.counts, learns / island.counts)

    def _readers(self, island: Island, gpus: int, models: Models, pin: Axes | None) -> tuple[Training, ...]:
        kept: Kept = {}
        best: list[Training] = []

        def unbeaten(alike: Alike, reads: float, learns: float) -> Iterator[tuple[float, Training]]:
            if not any(_beats(other, reads, learns) for other in best):
                yield from self._fitting(alike, kept, models)

        groups = []
        for alike in self.candidates.alike(island, gpus, pin):
            bounds = self.candidates.bounds(alike, models.count, models.critics)
            groups.append((sum(bounds), partial(unbeaten, alike, *bounds)))
        for each in Ranked(groups):
            if not any(_beats(other, each.reads.seconds, each.learns.seconds) for other in best):
                best.append(each)
        if pin is None:
            known, place = self.fastest(island, models), island.sizes.index(gpus)
            known.reads[place] = min((each.reads.seconds for each in best), default=inf)
            known.learns[place] = min((each.learns.seconds for each in best), default=inf)
        return tuple(best)

    def _fitting(self, alike: Alike, kept: Kept, models: Models) -> Iterator[tuple[float, Training]]:
        """Those that fit, with their seconds."""
        for trainer in alike.all():
            # A pass that keeps nothing: no gradients, no moments, and no inputs of layers for a backward pass.
            passing = trainer if models.critics else replace(trainer, frozen=True, offload=True)
            memory = trainer_memory(passing)
            if models.count > 1:
                learner = min(1, models.critics)
                memory = memory + beside_memory(passing, Models(models.frozen - 1 + learner, models.critics - learner))
            if memory.bytes <= trainer.gpu.memory_bytes:
                reads = passing.passed(self.candidates.whole) * models.count
                found = Training(passing, Cost(), reads, self._learns(passing, kept, models), memory)
                yield found.seconds, found

    def _learns(self, trainer: Trainer, kept: Kept, models: Models) -> Cost:
        if not models.critics:
            return Cost()
        return trainer.steps(self.candidates.parts, self.candidates.work.epochs, kept) * models.critics


def _beats(one: Training, reads: float, learns: float) -> bool:
    """Whether it is no slower in passes nor in steps."""
    return one.reads.seconds <= reads and one.learns.seconds <= learns
