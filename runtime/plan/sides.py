"""The ways in which each role can be run on so many GPUs, with seconds and memory, and lower bounds of them. Pure.

All of it is cached: a search asks for the same sizes and rollouts again and again. Shapes of arrays are said in
`workload`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, inf
from typing import Any, TypeVar

import numpy as np

from penstock.graph.sharding import Axes
from penstock.runtime.plan.cost import Cost
from penstock.runtime.plan.decoding import Generator
from penstock.runtime.plan.gpus import Gpu, Precision
from penstock.runtime.plan.islands import Island
from penstock.runtime.plan.layouts import generator_meshes, micro_tokens, slot_counts, trainer_meshes
from penstock.runtime.plan.memory import Memory, beside_memory, generator_memory, slots_that_fit, trainer_memory
from penstock.runtime.plan.parallel import Parallel
from penstock.runtime.plan.ranked import Ranked
from penstock.runtime.plan.refilling import rollout_s
from penstock.runtime.plan.roles import Models
from penstock.runtime.plan.training import Kept, Packed, Trainer, packed
from penstock.runtime.plan.ways import Generating, Training
from penstock.runtime.plan.workload import Workload

SHARED_OUT = ("products", "attention", "elementwise", "logits")
"""Parts of a step that n GPUs do in no less than an nth of one GPU's time."""
COPIED = ("optimizer", "dp", "fsdp")
"""Parts of a step that depend on how weights are sharded and copied, beside the bubble that they make longer."""
T = TypeVar("T")


@dataclass(frozen=True)
class Sides:
    """What a search asks. `slots` is the most rows of a generator's replica; `pins` are meshes that are given, by role
    ("trainer", "generator", "reader"); `models` are there beside the policy."""

    work: Workload
    lag: int
    slots: int = 256
    pins: Mapping[str, Axes] = field(default_factory=dict)
    models: Models = field(default_factory=Models)
    _kept: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    def trainers(self, island: Island, gpus: int, reads: bool) -> Ranked[Training]:
        """All that fit, the fastest first. `reads`: models beside the policy are on the same GPUs."""
        return self._once(("train", island, gpus, reads), lambda: self._trainers(island, gpus, reads))

    def generators(self, island: Island, gpus: int) -> list[Generating]:
        """All on GPUs of their own, with as many slots as fit or fewer."""
        return self._once(("generate", island, gpus), lambda: list(self.decoders(island, gpus, 2, None)))

    def reader(self, island: Island, gpus: int) -> Training | None:
        """The fastest that models beside the policy are on GPUs of their own."""
        return self._once(("read", island, gpus), lambda: self._reader(island, gpus))

    def rollout(self, found: Generating) -> float:
        """Seconds of a batch by itself, simulated over its lengths, the tail included."""
        work, generator, key = self.work, found.generator, self._rollout_key(found)
        lines = self._once((_key(generator), "lines"), dict[int, tuple[float, float]])
        return self._once(key, lambda: rollout_s(work, generator, found.replicas, lines))

    def rollout_least(self, found: Generating) -> float:
        """What the rollout does not go below: itself once it has been simulated."""
        known: float = self._kept.get(self._rollout_key(found), found.least * (1 - 1e-9))
        return known

    def _rollout_key(self, found: Generating) -> object:
        """Slots that are never in use change nothing; with filters any replica may have more rows than its share."""
        share = ceil(self.work.responses / found.replicas) if self.work.kept == 1 else inf
        rows = min(found.generator.slots, share)
        return "rollout", _key(found.generator), rows, found.replicas

    def train_least(self, gpu: Gpu, reads: bool) -> float:
        """GPU-seconds of an update that no trainer of this kind goes below."""
        steps, passed = self._least(gpu)
        own = steps + self.models.rereads * passed
        return own + self.read_least(gpu) + self.learn_least(gpu) if reads else own

    def read_least(self, gpu: Gpu) -> float:
        """GPU-seconds of the passes of models beside the policy that no layout of this kind goes below."""
        return (self.models.frozen + self.models.critics) * self._least(gpu)[1]

    def learn_least(self, gpu: Gpu) -> float:
        """The same of critics' steps."""
        return self.models.critics * self._least(gpu)[0]

    def generate_least(self, island: Island) -> tuple[float, float, float]:
        """GPU-seconds of a batch, seconds of its longest response, and GPU-seconds that it adds to another one, that no
        generator here goes below."""
        return self._once(("decode", island), lambda: self._generate_least(island))

    def decode_least(self, island: Island, gpus: int) -> tuple[float, float, float]:
        """`steady`, `least` and `others` that no generator on so many GPUs goes below, whatever lies beside it."""
        return self._once(("fastest", island, gpus), lambda: self._decode_least(island, gpus))

    def decoders(self, island: Island, gpus: int, arenas: int, beside: Memory | None) -> Iterator[Generating]:
        """All ways to decode on `gpus` GPUs, with `beside` on each of them, too."""
        for base in self.bases(island):
            replicas, rest = divmod(gpus, base.mesh.ranks)
            if rest or not 1 <= replicas <= self.work.responses:
                continue
            useful = ceil(self.work.responses * (self.lag + 1) / replicas)
            counts = tuple(slot_counts(self._fit(base, arenas, beside), useful))
            given = base, replicas, arenas, counts
            yield from self._once((_key(base), *given[1:]), partial(self._ways, *given))

    def _ways(self, base: Generator, replicas: int, arenas: int, counts: Sequence[int]) -> list[Generating]:
        """One for each number of slots."""
        found = [self._held(base, slots, arenas) for slots in counts]
        return [Generating(each, replicas, memory, *self._decode_s(each, replicas)) for each, memory in found]

    def _fit(self, base: Generator, arenas: int, beside: Memory | None) -> int:
        """Slots of a generator."""

        def fit() -> int:
            return min(self.slots, slots_that_fit(base, self.context, arenas, beside))

        return fit() if beside else self._once((_key(base), "fit", arenas), fit)

    def _held(self, base: Generator, slots: int, arenas: int) -> tuple[Generator, Memory]:
        """A generator with so many slots, and its memory."""

        def held() -> tuple[Generator, Memory]:
            generator = replace(base, slots=slots)
            return generator, generator_memory(generator, self.context, arenas=arenas)

        return self._once((_key(base), "held", slots, arenas), held)

    @cached_property
    def _whole(self) -> Packed:
        return packed(self.work.sequence_tokens)[0]

    @cached_property
    def _parts(self) -> tuple[Packed, ...]:
        """Of each minibatch."""
        return packed(self.work.sequence_tokens, self.work.minibatches)

    def bases(self, island: Island) -> list[Generator]:
        """A generator of one slot for each mesh and precision."""
        return self._once(("bases", island), lambda: self._bases(island))

    @cached_property
    def context(self) -> float:
        """Tokens that a slot in use holds."""
        return self.work.prompt_tokens + float(np.mean(self.work.response_tokens))

    def candidates(self, island: Island, gpus: int, role: str = "trainer") -> Iterator[Trainer]:
        """All ways to train on `gpus` GPUs, whether they fit or not."""
        work, pin = self.work, self.pins.get(role)
        for mesh in trainer_meshes(work.shape, island, gpus):
            if pin is not None and mesh.axes != pin:
                continue
            for zero3 in (False, True) if mesh.fsdp > 1 else (False,):
                for tokens in micro_tokens(work.context, work.micro_tokens):
                    yield Trainer(work.shape, island.gpu, mesh, micro_tokens=tokens, zero3=zero3)

    def _trainers(self, island: Island, gpus: int, reads: bool) -> Ranked[Training]:
        """By how the data is shared out and the layers are cut, which bounds what shards and copies add to it."""
        alike: dict[tuple[int, ...], list[Trainer]] = {}
        for trainer in self.candidates(island, gpus):
            mesh = trainer.mesh
            alike.setdefault((mesh.data, mesh.tp, mesh.pp, trainer.micro_tokens), []).append(trainer)
        kept: Kept = {}

        def bound(first: Trainer) -> float:
            steps = first.steps(self._parts, self.work.epochs, kept).parts
            alone = Cost({name: seconds for name, seconds in steps.items() if name not in COPIED})
            copies = self.models.followed and first.followed().seconds * self.models.followed
            return (self._training(first, alone, Memory({}), reads).seconds - copies) * (1 - 1e-9)

        # The first one of each is not sharded over micro-batches, which would make its bubble longer.
        return Ranked([(bound(some[0]), partial(self._fitting, some, kept, reads)) for some in alike.values()])

    def _fitting(self, trainers: Sequence[Trainer], kept: Kept, reads: bool) -> Iterator[tuple[float, Training]]:
        """Those that fit, with their seconds."""
        for trainer in trainers:
            memory = trainer_memory(trainer, self.models.copies)
            if reads:
                memory = memory + beside_memory(trainer, self.models)
            if memory.bytes <= trainer.gpu.memory_bytes:
                steps = trainer.steps(self._parts, self.work.epochs, kept)
                yield (found := self._training(trainer, steps, memory, reads)).seconds, found

    def _training(self, trainer: Trainer, steps: Cost, memory: Memory, reads: bool) -> Training:
        """`steps` are those of the policy, and of each critic that is on the same GPUs."""
        models = self.models
        passed = trainer.passed(self._whole) if reads or models.rereads else Cost()
        own = steps + passed * models.rereads if models.rereads else steps
        own = own + trainer.followed() * models.followed if models.followed else own
        if not reads:
            return Training(trainer, own, Cost(), Cost(), memory)
        return Training(trainer, own, passed * (models.frozen + models.critics), steps * models.critics, memory)

    def _reader(self, island: Island, gpus: int) -> Training | None:
        found, models = [], self.models
        count = models.frozen + models.critics
        for trainer in self.candidates(island, gpus, "reader"):
            # A pass that keeps nothing: no gradients, no moments, and no inputs of layers for a backward pass.
            passing = trainer if models.critics else replace(trainer, frozen=True, offload=True)
            memory = trainer_memory(passing)
            if count > 1:
                learner = min(1, models.critics)
                more = replace(models, critics=models.critics - learner, frozen=models.frozen - 1 + learner)
                memory = memory + beside_memory(passing, more)
            if memory.bytes <= island.gpu.memory_bytes:
                learns = passing.steps(self._parts, self.work.epochs) * models.critics if models.critics else Cost()
                found.append(Training(passing, Cost(), passing.passed(self._whole) * count, learns, memory))
        return min(found, key=lambda each: each.seconds, default=None)

    def _bases(self, island: Island) -> list[Generator]:
        shape, gpu, pin = self.work.shape, island.gpu, self.pins.get("generator")
        precisions: tuple[Precision, ...] = ("bf16", "fp8") if gpu.tflops.fp8 else ("bf16",)
        meshes = [m for m in generator_meshes(shape, island) if pin is None or m.axes == pin]
        return [Generator(shape, gpu, mesh, 1, precision) for precision in precisions for mesh in meshes]

    def _decode_s(self, generator: Generator, replicas: int) -> tuple[float, float, float]:
        """`steady`, `least` and `others` of a generator. A step costs what its rows do, which falls per row with their
        number, and what their contexts do, which sum to the same whoever decodes beside whom."""
        work, (tokens, contexts, longest, last) = self.work, self._totals
        slope, prefill = self._slope(generator), self._prefill(generator)
        always = slope * contexts + work.drawn * prefill
        flying = min(generator.slots, ceil((self.lag + 1) * work.responses / replicas))
        alone = min(generator.slots, ceil(work.responses / replicas))
        one, most = self._fixed(generator, 1), self._fixed(generator, flying)
        steady = (tokens * most / flying + always) / replicas
        least = (tokens * self._fixed(generator, alone) / alone + always) / replicas
        another = (tokens * (most - one) / max(1, flying - 1) + always) / replicas
        return steady, max(least, longest * one + slope * last), another

    def _fixed(self, generator: Generator, rows: int) -> float:
        """Seconds of a step without context."""
        return self._once((_key(generator), rows), lambda: generator.step(rows, 0).seconds)

    def _prefill(self, generator: Generator) -> float:
        """Seconds of a prompt."""
        tokens = self.work.prompt_tokens
        return self._once((_key(generator), "prefill"), lambda: generator.prefill_s(tokens, tokens**2))

    def _slope(self, generator: Generator) -> float:
        """Seconds of a step per token of context."""
        key = (_key(generator), "slope")
        return self._once(key, lambda: (generator.step(1, 1e6).seconds - generator.step(1, 0).seconds) / 1e6)

    @cached_property
    def _totals(self) -> tuple[float, float, int, float]:
        """Of all responses: tokens, and the tokens that each of them saw; the same of the longest one."""
        lengths = self.work.response_tokens.astype(np.float64)
        seen = lengths * self.work.prompt_tokens + lengths * (lengths - 1) / 2
        return float(lengths.sum()), float(seen.sum()), self.work.longest, float(seen.max())

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

    def _decode_least(self, island: Island, gpus: int) -> tuple[float, float, float]:
        found = [(each.steady, each.least, each.others) for each in self.decoders(island, gpus, 1, None)]
        return _lowest(found)

    def _generate_least(self, island: Island) -> tuple[float, float, float]:
        found = []
        for base in self.bases(island):
            if fit := self._fit(base, 1, None):
                seconds, _, _ = self._decode_s(replace(base, slots=fit), 1)
                longest = self._totals[2] * self._fixed(base, 1) + self._slope(base) * self._totals[3]
                always = self._slope(base) * self._totals[1] + self.work.drawn * self._prefill(base)
                found.append((seconds * base.mesh.ranks, longest, always * base.mesh.ranks))
        return _lowest(found)

    def _once(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        made: T = self._kept[key]
        return made


def _lowest(found: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Of each column; infinity without any."""
    if not found:
        return inf, inf, inf
    first, second, third = (min(column) for column in zip(*found, strict=True))
    return first, second, third


def _key(generator: Generator) -> object:
    """What a step's seconds depend on. A GPU is known by its identity, which lives as long as its island."""
    return (id(generator.gpu), generator.mesh, generator.precision)
