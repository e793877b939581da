"""The ways in which models can learn on so many GPUs, with seconds and memory, and lower bounds of them. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from penstock.graph.sharding import Axes
from penstock.runtime.plan.cost import Cost
from penstock.runtime.plan.gpus import Gpu
from penstock.runtime.plan.islands import Island
from penstock.runtime.plan.layouts import micro_tokens, trainer_meshes
from penstock.runtime.plan.memory import Memory, beside_memory, trainer_memory
from penstock.runtime.plan.once import Once
from penstock.runtime.plan.parallel import Parallel
from penstock.runtime.plan.ranked import Ranked
from penstock.runtime.plan.roles import Models
from penstock.runtime.plan.training import Kept, Packed, Trainer, packed
from penstock.runtime.plan.ways import Training
from penstock.runtime.plan.workload import Workload

SHARED_OUT = ("products", "attention", "elementwise", "logits")
"""Parts of a step that n GPUs do in no less than an nth of one GPU's time."""
COPIED = ("optimizer", "dp", "fsdp")
"""Parts of a step that depend on how weights are sharded and copied, beside the bubble that they make longer."""


@dataclass(frozen=True)
class TrainingSide:
    """`models`: there are so many copies and further passes of the policy. `pin` is the trainer's mesh, if it is given.
    Which models lie beside the policy is said in each question."""

    work: Workload
    models: Models = field(default_factory=Models)
    pin: Axes | None = None
    _once: Once = field(default_factory=Once, compare=False, repr=False)

    def trainers(self, island: Island, gpus: int, beside: Models) -> Ranked[Training]:
        """All that fit, the fastest first, with the models that lie beside the policy."""
        return self._once(("train", island, gpus, beside), lambda: self._trainers(island, gpus, beside))

    def readers(self, island: Island, gpus: int, models: Models, pin: Axes | None = None) -> tuple[Training, ...]:
        """Ways to run models on GPUs of their own, the fastest first: those that no other one beats both in passes and
        in steps."""
        return self._once(("read", island, gpus, models, pin), lambda: self._readers(island, gpus, models, pin))

    def train_least(self, gpu: Gpu, beside: Models) -> float:
        """GPU-seconds of an update that no trainer of this kind goes below."""
        steps, passed = self._least(gpu)
        own = steps + self.models.rereads * passed
        return own + self.read_least(gpu, beside) + self.learn_least(gpu, beside)

    def read_least(self, gpu: Gpu, models: Models) -> float:
        """GPU-seconds of models' passes that no layout of this kind goes below."""
        return (models.frozen + models.critics) * self._least(gpu)[1]

    def learn_least(self, gpu: Gpu, models: Models) -> float:
        """The same of critics' steps."""
        return models.critics * self._least(gpu)[0]

    def candidates(self, island: Island, gpus: int, pin: Axes | None = None) -> Iterator[Trainer]:
        """All ways to train on `gpus` GPUs, whether they fit or not."""
        work = self.work
        for mesh in trainer_meshes(work.shape, island, gpus):
            if pin is not None and mesh.axes != pin:
                continue
            for zero3 in (False, True) if mesh.fsdp > 1 else (False,):
                for tokens in micro_tokens(work.context, work.micro_tokens):
                    yield Trainer(work.shape, island.gpu, mesh, micro_tokens=tokens, zero3=zero3)

    def _trainers(self, island: Island, gpus: int, beside: Models) -> Ranked[Training]:
        """By how the data is shared out and the layers are cut, which bounds what shards and copies add to it."""
        alike: dict[tuple[int, ...], list[Trainer]] = {}
        for trainer in self.candidates(island, gpus, self.pin):
            mesh = trainer.mesh
            alike.setdefault((mesh.data, mesh.tp, mesh.pp, trainer.micro_tokens), []).append(trainer)
        kept: Kept = {}

        def bound(first: Trainer) -> float:
            steps = first.steps(self._parts, self.work.epochs, kept).parts
            alone = Cost({name: seconds for name, seconds in steps.items() if name not in COPIED})
            copies = self.models.followed and first.followed().seconds * self.models.followed
            return (self._training(first, alone, Memory({}), beside).seconds - copies) * (1 - 1e-9)

        # The first one of each is not sharded over micro-batches, which would make its bubble longer.
        return Ranked([(bound(some[0]), partial(self._fitting, some, kept, beside)) for some in alike.values()])

    def _fitting(self, trainers: Sequence[Trainer], kept: Kept, beside: Models) -> Iterator[tuple[float, Training]]:
        """Those that fit, with their seconds."""
        for trainer in trainers:
            memory = trainer_memory(trainer, self.models.copies)
            if beside.count:
                memory = memory + beside_memory(trainer, beside)
            if memory.bytes <= trainer.gpu.memory_bytes:
                steps = trainer.steps(self._parts, self.work.epochs, kept)
                yield (found := self._training(trainer, steps, memory, beside)).seconds, found

    def _training(self, trainer: Trainer, steps: Cost, memory: Memory, beside: Models) -> Training:
        """`steps` are those of the policy, and of each critic that is on the same GPUs."""
        models = self.models
        passed = trainer.passed(self._whole) if beside.count or models.rereads else Cost()
        own = steps + passed * models.rereads if models.rereads else steps
        own = own + trainer.followed() * models.followed if models.followed else own
        if not beside.count:
            return Training(trainer, own, Cost(), Cost(), memory)
        return Training(trainer, own, passed * beside.count, steps * beside.critics, memory)

    def _readers(self, island: Island, gpus: int, models: Models, pin: Axes | None) -> tuple[Training, ...]:
        found: list[Training] = []
        for trainer in self.candidates(island, gpus, pin):
            # A pass that keeps nothing: no gradients, no moments, and no inputs of layers for a backward pass.
            passing = trainer if models.critics else replace(trainer, frozen=True, offload=True)
            memory = trainer_memory(passing)
            if models.count > 1:
                learner = min(1, models.critics)
                memory = memory + beside_memory(passing, Models(models.frozen - 1 + learner, models.critics - learner))
            if memory.bytes <= island.gpu.memory_bytes:
                learns = passing.steps(self._parts, self.work.epochs) * models.critics if models.critics else Cost()
                found.append(Training(passing, Cost(), passing.passed(self._whole) * models.count, learns, memory))
        best: list[Training] = []
        for each in sorted(found, key=lambda each: each.seconds):
            if not any(_beats(other, each) for other in best):
                best.append(each)
        return tuple(best)

    @cached_property
    def _whole(self) -> Packed:
        return packed(self.work.sequence_tokens)[0]

    @cached_property
    def _parts(self) -> tuple[Packed, ...]:
        """Of each minibatch."""
        return packed(self.work.sequence_tokens, self.work.minibatches)

    def _least(self, gpu: Gpu) -> tuple[float, float]:
        """GPU-seconds of an update's steps and of one pass that no layout of this kind goes below."""

        def least() -> tuple[float, float]:
            work = self.work
            everything = int(work.sequence_tokens.sum())
            alone = Trainer(work.shape, gpu, Parallel(), micro_tokens=everything)
            costs = alone.step(work.sequence_tokens) * work.epochs, alone.passed(self._whole)
            steps, passed = (sum(cost.parts[part] for part in SHARED_OUT) for cost in costs)
            return steps, passed

        return self._once(("least", id(gpu)), least)


def _beats(one: Training, other: Training) -> bool:
    """Whether it is no slower in passes nor in steps."""
    return one.reads.seconds <= other.reads.seconds and one.learns.seconds <= other.learns.seconds
