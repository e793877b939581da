"""The ways in which each role can be run on so many GPUs, with seconds and memory, and lower bounds of them. Pure.

All of it is cached: a search asks for the same sizes and rollouts again and again. Shapes of arrays are said in
`workload`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import Any, TypeVar

import numpy as np

from penstock.graph.sharding import Axes
from penstock.runtime.plan.cost import Cost
from penstock.runtime.plan.decoding import Generator
from penstock.runtime.plan.gpus import Gpu, Precision
from penstock.runtime.plan.islands import Island
from penstock.runtime.plan.layouts import generator_meshes, micro_tokens, slot_counts, trainer_meshes
from penstock.runtime.plan.memory import Memory, generator_memory, slots_that_fit, trainer_memory
from penstock.runtime.plan.parallel import Parallel
from penstock.runtime.plan.training import Trainer
from penstock.runtime.plan.work import weights_per_rank
from penstock.runtime.plan.workload import Workload

SHARED_OUT = ("products", "attention", "elementwise", "logits")
"""Parts of a step that n GPUs do in no less than an nth of one GPU's time."""
T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """A way to train: seconds of an update's steps, of the frozen model's pass if it lies beside, and the memory of a
    rank, with the frozen model's weights if they do."""

    trainer: Trainer
    steps: Cost
    reads: Cost
    memory: Memory

    @cached_property
    def seconds(self) -> float:
        return self.steps.seconds + self.reads.seconds


@dataclass(frozen=True)
class Generating:
    """A way to decode on `replicas` copies of a mesh. Seconds of a batch: `steady` with slots that never run dry, and
    `least`, a lower bound of a batch by itself."""

    generator: Generator
    replicas: int
    memory: Memory
    steady: float
    least: float

    @property
    def gpus(self) -> int:
        return self.replicas * self.generator.mesh.ranks


@dataclass(frozen=True)
class Sides:
    """What a search asks. `slots` is the most rows of a generator's replica; `pins` are meshes that are given, by role
    ("trainer", "generator", "reader")."""

    work: Workload
    lag: int
    slots: int = 256
    pins: Mapping[str, Axes] = field(default_factory=dict)
    _kept: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    def trainers(self, island: Island, gpus: int, reads: bool) -> list[Training]:
        """All that fit, the fastest first. `reads`: the frozen model lies on the same GPUs."""
        return self._once(("train", island, gpus, reads), lambda: self._trainers(island, gpus, reads))

    def generators(self, island: Island, gpus: int) -> list[Generating]:
        """All on GPUs of their own, with as many slots as fit or fewer."""
        return self._once(("generate", island, gpus), lambda: list(self.decoders(island, gpus, 2, None)))

    def reader(self, island: Island, gpus: int) -> Training | None:
        """The fastest pass of the frozen model on GPUs of its own."""
        return self._once(("read", island, gpus), lambda: self._reader(island, gpus))

    def rollout(self, found: Generating) -> float:
        """Seconds of a batch by itself, simulated over its lengths, the tail included."""
        work, generator = self.work, found.generator
        given = work.response_tokens, work.prompt_tokens, work.samples, found.replicas
        key = ("rollout", _key(generator), generator.slots, found.replicas)
        return self._once(key, lambda: generator.rollout(*given).seconds)

    def train_least(self, gpu: Gpu, reads: bool) -> float:
        """GPU-seconds of an update that no trainer of this kind goes below."""
        return self._once(("least", id(gpu), reads), lambda: self._train_least(gpu, reads))

    def read_least(self, gpu: Gpu) -> float:
        """GPU-seconds of the frozen model's pass that no layout of this kind goes below."""
        return self.train_least(gpu, True) - self.train_least(gpu, False)

    def generate_least(self, island: Island) -> tuple[float, float]:
        """GPU-seconds of a batch, and seconds of its longest response, that no generator here goes below."""
        return self._once(("decode", island), lambda: self._generate_least(island))

    def decode_least(self, island: Island, gpus: int) -> tuple[float, float]:
        """`steady` and `least` that no generator on so many GPUs goes below, whatever lies beside it."""
        return self._once(("fastest", island, gpus), lambda: self._decode_least(island, gpus))

    def decoders(self, island: Island, gpus: int, arenas: int, beside: Memory | None) -> Iterator[Generating]:
        """All ways to decode on `gpus` GPUs, with `beside` on each of them, too."""
        work = self.work
        for base in self.bases(island):
            replicas, rest = divmod(gpus, base.mesh.ranks)
            if rest or not 1 <= replicas <= work.responses:
                continue
            fit = min(self.slots, slots_that_fit(base, self.context, arenas, beside))
            for slots in slot_counts(fit, ceil(work.responses * (self.lag + 1) / replicas)):
                generator = replace(base, slots=slots)
                memory = generator_memory(generator, self.context, arenas=arenas)
                yield Generating(generator, replicas, memory, *self._decode_s(generator, replicas))

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

    def _trainers(self, island: Island, gpus: int, reads: bool) -> list[Training]:
        work, found = self.work, []
        for trainer in self.candidates(island, gpus):
            memory = trainer_memory(trainer)
            if reads:
                memory = memory + frozen_memory(trainer)
            if memory.bytes <= island.gpu.memory_bytes:
                passed = trainer.logprobs(work.sequence_tokens) if reads else Cost()
                steps = trainer.update(work.sequence_tokens, work.epochs, work.minibatches)
                found.append(Training(trainer, steps, passed, memory))
        return sorted(found, key=lambda each: each.seconds)

    def _reader(self, island: Island, gpus: int) -> Training | None:
        found = []
        for trainer in self.candidates(island, gpus, "reader"):
            # A pass that keeps nothing: no gradients, no moments, and no inputs of layers for a backward pass.
            passing = replace(trainer, frozen=True, offload=True)
            memory = trainer_memory(passing)
            if memory.bytes <= island.gpu.memory_bytes:
                found.append(Training(passing, Cost(), passing.logprobs(self.work.sequence_tokens), memory))
        return min(found, key=lambda each: each.seconds, default=None)

    def _bases(self, island: Island) -> list[Generator]:
        shape, gpu, pin = self.work.shape, island.gpu, self.pins.get("generator")
        precisions: tuple[Precision, ...] = ("bf16", "fp8") if gpu.tflops.fp8 else ("bf16",)
        meshes = [m for m in generator_meshes(shape, island) if pin is None or m.axes == pin]
        return [Generator(shape, gpu, mesh, 1, precision) for precision in precisions for mesh in meshes]

    def _decode_s(self, generator: Generator, replicas: int) -> tuple[float, float]:
        """`steady` and `least` of a generator. A step costs what its rows do, which falls per row with their number,
        and what their contexts do, which sum to the same whoever decodes beside whom."""
        work, (tokens, contexts, longest, last) = self.work, self._totals
        slope, prefill = self._slope(generator), self._prefill(generator)
        always = slope * contexts + work.prompts * prefill
        flying = min(generator.slots, ceil((self.lag + 1) * work.responses / replicas))
        alone = min(generator.slots, ceil(work.responses / replicas))
        steady, least = ((tokens * self._fixed(generator, n) / n + always) / replicas for n in (flying, alone))
        return steady, max(least, longest * self._fixed(generator, 1) + slope * last)

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
        return float(lengths.sum()), float(seen.sum()), int(lengths.max()), float(seen.max())

    def _train_least(self, gpu: Gpu, reads: bool) -> float:
        work = self.work
        everything = int(work.sequence_tokens.sum())
        alone = Trainer(work.shape, gpu, Parallel(), micro_tokens=everything)
        costs = [alone.step(work.sequence_tokens) * work.epochs]
        costs += [alone.logprobs(work.sequence_tokens)] if reads else []
        return sum(cost.parts[part] for cost in costs for part in SHARED_OUT)

    def _decode_least(self, island: Island, gpus: int) -> tuple[float, float]:
        found = [(each.steady, each.least) for each in self.decoders(island, gpus, 1, None)]
        return min((f[0] for f in found), default=inf), min((f[1] for f in found), default=inf)

    def _generate_least(self, island: Island) -> tuple[float, float]:
        found = []
        for base in self.bases(island):
            fit = min(self.slots, slots_that_fit(base, self.context, arenas=1))
            if fit:
                seconds, _ = self._decode_s(replace(base, slots=fit), 1)
                longest = self._totals[2] * self._fixed(base, 1) + self._slope(base) * self._totals[3]
                found.append((seconds * base.mesh.ranks, longest))
        return min((f[0] for f in found), default=inf), min((f[1] for f in found), default=inf)

    def _once(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        made: T = self._kept[key]
        return made


def _key(generator: Generator) -> object:
    """What a step's seconds depend on. A GPU is known by its identity, which lives as long as its island."""
    return (id(generator.gpu), generator.mesh, generator.precision)


def frozen_memory(trainer: Trainer) -> Memory:
    """Of a second model that is cut as the trainer's and never changes."""
    mesh = trainer.mesh
    held = weights_per_rank(trainer.shape, mesh.tp, mesh.pp, mesh.ep, mesh.fsdp if trainer.zero3 else 1)
    return Memory({"frozen model": 2 * held})
