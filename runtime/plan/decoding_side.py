"""The ways in which a batch can be decoded on so many GPUs, with seconds and memory, and lower bounds of them. Pure.

Shapes of arrays are said in `workload`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, inf

import numpy as np

from penstock.graph.sharding import Axes
from penstock.runtime.plan.decoding import Generator
from penstock.runtime.plan.gpus import Precision
from penstock.runtime.plan.islands import Island
from penstock.runtime.plan.layouts import generator_meshes, slot_counts
from penstock.runtime.plan.memory import Memory, generator_memory, slots_that_fit
from penstock.runtime.plan.once import Once
from penstock.runtime.plan.refilling import rollout_s
from penstock.runtime.plan.ways import Generating
from penstock.runtime.plan.workload import Workload


@dataclass(frozen=True)
class DecodingSide:
    """`slots` is the most rows of a replica; `pin` is a mesh that is given."""

    work: Workload
    lag: int
    slots: int = 256
    pin: Axes | None = None
    _once: Once = field(default_factory=Once, compare=False, repr=False)

    def generators(self, island: Island, gpus: int) -> list[Generating]:
        """All on GPUs of their own, with as many slots as fit or fewer."""
        return self._once(("generate", island, gpus), lambda: list(self.decoders(island, gpus, 2, None)))

    def rollout(self, found: Generating) -> float:
        """Seconds of a batch by itself, simulated over its lengths, the tail included."""
        work, generator, key = self.work, found.generator, self._rollout_key(found)
        lines = self._once((_key(generator), "lines"), dict[int, tuple[float, float]])
        return self._once(key, lambda: rollout_s(work, generator, found.replicas, lines))

    def rollout_least(self, found: Generating) -> float:
        """What the rollout does not go below: itself once it has been simulated."""
        return self._once.known(self._rollout_key(found), found.least * (1 - 1e-9))

    def total_least(self, island: Island) -> tuple[float, float, float]:
        """GPU-seconds of a batch, seconds of its longest response, and GPU-seconds that it adds to another one, that no
        generator here goes below."""
        return self._once(("decode", island), lambda: self._total_least(island))

    def least(self, island: Island, gpus: int) -> tuple[float, float, float]:
        """`steady`, `least` and `others` that no generator on so many GPUs goes below, whatever lies beside it."""
        return self._once(("fastest", island, gpus), lambda: self._least(island, gpus))

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

    def bases(self, island: Island) -> list[Generator]:
        """A generator of one slot for each mesh and precision."""
        return self._once(("bases", island), lambda: self._bases(island))

    @cached_property
    def context(self) -> float:
        """Tokens that a slot in use holds."""
        return self.work.prompt_tokens + float(np.mean(self.work.response_tokens))

    def _rollout_key(self, found: Generating) -> object:
        """Slots that are never in use change nothing; with filters any replica may have more rows than its share."""
        share = ceil(self.work.responses / found.replicas) if self.work.kept == 1 else inf
        rows = min(found.generator.slots, share)
        return "rollout", _key(found.generator), rows, found.replicas

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

    def _bases(self, island: Island) -> list[Generator]:
        shape, gpu = self.work.shape, island.gpu
        precisions: tuple[Precision, ...] = ("bf16", "fp8") if gpu.tflops.fp8 else ("bf16",)
        meshes = [m for m in generator_meshes(shape, island) if self.pin in (None, m.axes)]
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

    def _least(self, island: Island, gpus: int) -> tuple[float, float, float]:
        found = [(each.steady, each.least, each.others) for each in self.decoders(island, gpus, 1, None)]
        return _lowest(found)

    def _total_least(self, island: Island) -> tuple[float, float, float]:
        found = []
        for base in self.bases(island):
            if fit := self._fit(base, 1, None):
                seconds, _, _ = self._decode_s(replace(base, slots=fit), 1)
                longest = self._totals[2] * self._fixed(base, 1) + self._slope(base) * self._totals[3]
                always = self._slope(base) * self._totals[1] + self.work.drawn * self._prefill(base)
                found.append((seconds * base.mesh.ranks, longest, always * base.mesh.ranks))
        return _lowest(found)


def _lowest(found: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Of each column; infinity without any."""
    if not found:
        return inf, inf, inf
    first, second, third = (min(column) for column in zip(*found, strict=True))
    return first, second, third


def _key(generator: Generator) -> object:
    """What a step's seconds depend on. A GPU is known by its identity, which lives as long as its island."""
    return (id(generator.gpu), generator.mesh, generator.precision)
