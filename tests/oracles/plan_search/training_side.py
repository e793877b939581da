"""The ways in which the policy can learn on so many GPUs, with what lies beside it; and lower bounds of them. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf

from penstock.graph.protocols import Axes
from penstock.runtime.cluster.gpus import Gpu
from penstock.runtime.plan.collectives import SAFE, Cost
from penstock.runtime.plan.memory import Memory, beside_memory, trainer_memory
from penstock.runtime.plan.roles import Models
from penstock.runtime.plan.train_cost import Kept, Trainer
from penstock.runtime.plan.workload import FloatArray
from tests.oracles.plan_search.candidates import Alike, Candidates
from tests.oracles.plan_search.islands import Island
from tests.oracles.plan_search.once import Once
from tests.oracles.plan_search.ranked import Ranked
from tests.oracles.plan_search.ways import Training


@dataclass(frozen=True)
class TrainingSide:
    """`models`: there are so many copies and further passes of the policy. `pin` is the trainer's mesh, if it is given.
    Which models lie beside the policy is said in each question."""

    candidates: Candidates
    models: Models = field(default_factory=Models)
    pin: Axes | None = None
    _once: Once = field(default_factory=Once, compare=False, repr=False)

    def trainers(self, island: Island, gpus: int, beside: Models) -> Ranked[Training]:
        """All that fit, the fastest first, with the models that lie beside the policy."""
        return self._once(("train", island, gpus, beside), lambda: self._trainers(island, gpus, beside))

    def fastest(self, island: Island, beside: Models) -> FloatArray:
        """[sizes]: seconds of an update that no trainer on so many GPUs goes below: those of the fastest one, once
        `trainers` has been asked."""
        return self._once(("fastest", island, beside), lambda: self._least(island.gpu, beside) / island.counts)

    def _least(self, gpu: Gpu, beside: Models) -> float:
        """GPU-seconds of an update that no trainer of this kind goes below."""
        passed, steps = self.candidates.least(gpu)
        return (steps * (1 + beside.critics) + passed * (self.models.rereads + beside.count)) * SAFE

    def _trainers(self, island: Island, gpus: int, beside: Models) -> Ranked[Training]:
        """By how the data is shared out and the layers are cut, which bounds what shards and copies add to it."""
        kept: Kept = {}
        passes, learners = beside.count + self.models.rereads, 1 + beside.critics
        found = Ranked(
            [
                (sum(self.candidates.bounds(alike, passes, learners)), partial(self._fitting, alike, kept, beside))
                for alike in self.candidates.alike(island, gpus, self.pin)
            ]
        )
        first = found.at(0)
        self.fastest(island, beside)[island.sizes.index(gpus)] = first.seconds if first else inf
        return found

    def _fitting(self, alike: Alike, kept: Kept, beside: Models) -> Iterator[tuple[float, Training]]:
        """Those that fit, with their seconds."""
        for trainer in alike.all():
            memory = trainer_memory(trainer, self.models.copies)
            if beside.count:
                memory = memory + beside_memory(trainer, beside)
            if memory.bytes <= trainer.gpu.memory_bytes:
                found = self._training(trainer, kept, memory, beside)
                yield found.seconds, found

    def _training(self, trainer: Trainer, kept: Kept, memory: Memory, beside: Models) -> Training:
        """Steps are those of the policy, and of each critic that is on the same GPUs."""
        models, made = self.models, self.candidates
        steps = trainer.steps(made.parts, made.work.epochs, kept)
        passed = trainer.passed(made.whole) if beside.count or models.rereads else Cost()
        own = steps + passed * models.rereads if models.rereads else steps
        own = own + trainer.followed() * models.followed if models.followed else own
        if not beside.count:
            return Training(trainer, own, Cost(), Cost(), memory)
        return Training(trainer, own, passed * beside.count, steps * beside.critics, memory)
