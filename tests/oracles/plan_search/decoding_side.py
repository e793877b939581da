"""The ways in which a batch can be decoded on so many GPUs, with seconds and memory, and lower bounds of them. Pure.

Shapes of arrays are said in `workload` and `decoders`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from penstock.graph.protocols import Axes
from penstock.runtime.cluster.gpus import Precision
from penstock.runtime.plan.decode_cost import Generator, rollout_s
from penstock.runtime.plan.memory import Memory, generator_memory, row_bytes
from penstock.runtime.plan.workload import Workload
from tests.oracles.plan_search.blocks import Blocks
from tests.oracles.plan_search.decoders import Decoders, Fastest
from tests.oracles.plan_search.islands import Island
from tests.oracles.plan_search.layouts import generator_meshes
from tests.oracles.plan_search.once import Once
from tests.oracles.plan_search.ways import Generating

OWN, SHARED = 2, 1
"""Arenas for weights: on GPUs of its own a generator receives the next ones while it decodes."""


@dataclass(frozen=True)
class DecodingSide:
    """`slots` is the most rows of a replica; `pin` is a mesh that is given."""

    work: Workload
    lag: int
    slots: int = 256
    pin: Axes | None = None
    _once: Once = field(default_factory=Once, compare=False, repr=False)

    def own(self, island: Island) -> Decoders:
        """All ways on GPUs of their own, on each number of GPUs that a pool may have here."""
        return self._once(("own", island), lambda: self._decoders(island, island.sizes, OWN, None))

    def beside(self, island: Island, gpus: int, memory: Memory) -> Decoders:
        """All ways on so many GPUs that take turns with a trainer, with what else lies on each of them."""
        return self._decoders(island, (gpus,), SHARED, memory)

    def turns(self, island: Island, gpus: int) -> Decoders:
        """The same with nothing else on them: more of each than there is beside any trainer."""
        turns = self._turns(island)
        if gpus not in turns:
            turns[gpus] = self._together(island).only(gpus, self._rollouts(island))
        return turns[gpus]

    def fastest(self, island: Island, *, shared: bool) -> Fastest:
        """What no way goes below: on each number of GPUs with whatever lies beside it, or on so many of its own or
        fewer."""
        return self._once(("fastest", island, shared), lambda: self._fastest(island, shared))

    def way(self, island: Island, decoders: Decoders, number: int, arenas: int) -> Generating:
        """One of them, with its memory."""
        of = decoders.block
        base, slots, replicas, alike = (int(column[number]) for column in (of.base, of.slots, of.replicas, of.alike))
        held = partial(self._held, self.bases(island)[base], slots, arenas)
        generator, memory = self._once((island, base, "held", slots, arenas), held)
        steady, least, others = (float(column[number]) for column in (of.steady, of.least, of.others))
        return Generating(generator, replicas, memory, steady, least, others, alike)

    def ways(self, island: Island, gpus: int, arenas: int, memory: Memory | None) -> Iterator[Generating]:
        """All on `gpus` GPUs, with `memory` on each of them, too."""
        found = self._decoders(island, (gpus,), arenas, memory)
        return (self.way(island, found, number, arenas) for number in range(len(found)))

    def rollout(self, island: Island, found: Generating) -> float:
        """Seconds of a batch by itself, simulated over its lengths, the tail included."""
        known = self._rollouts(island)
        if found.alike not in known:
            known[found.alike] = rollout_s(self.work, found.generator, found.replicas)
            self.own(island).learn(found.alike, known[found.alike])
            if found.gpus in (turns := self._turns(island)):
                turns[found.gpus].learn(found.alike, known[found.alike])
        return known[found.alike]

    def bases(self, island: Island) -> list[Generator]:
        """A generator of one slot for each mesh and precision."""
        return self._once(("bases", island), lambda: self._bases(island))

    @cached_property
    def context(self) -> float:
        """Tokens that a slot in use holds."""
        return self.work.prompt_tokens + float(np.mean(self.work.response_tokens))

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self.work, self.lag, self.slots)

    def _rollouts(self, island: Island) -> dict[int, float]:
        """Those that are known, by `Decoders.alike`."""
        return self._once(("rollouts", island), dict[int, float])

    def _turns(self, island: Island) -> dict[int, Decoders]:
        """Those of `turns`, by GPUs."""
        return self._once(("turns", island), dict[int, Decoders])

    def _together(self, island: Island) -> Decoders:
        """Those of `turns` on any number of GPUs."""
        return self._once(("together", island), lambda: self._decoders(island, island.sizes, SHARED, None))

    def _decoders(self, island: Island, sizes: Sequence[int], arenas: int, memory: Memory | None) -> Decoders:
        blocks = []
        for number in range(len(self.bases(island))):
            if fit := self._fit(island, number, arenas, memory):
                block = partial(self._blocks.of, island, number, self.bases(island)[number], sizes, fit)
                blocks.append(self._once((island, number, "block", sizes, fit), block))
        return Decoders.of(sizes, blocks, self._rollouts(island))

    def _fit(self, island: Island, number: int, arenas: int, memory: Memory | None) -> int:
        """How many slots a generator has beside what else is there; 0 if not even its weights fit."""
        base = self.bases(island)[number]
        key = (island, number, "row", arenas)
        empty, each = self._once(key, lambda: row_bytes(base, self.context, arenas))
        others = 0.0 if memory is None else memory.bytes - memory.parts.get("reserved", 0.0)  # a GPU reserves once
        return min(self.slots, max(0, int((base.gpu.memory_bytes - empty - others) // each)))

    def _held(self, base: Generator, slots: int, arenas: int) -> tuple[Generator, Memory]:
        """A generator with so many slots, and its memory."""
        generator = replace(base, slots=slots)
        return generator, generator_memory(generator, self.context, arenas=arenas)

    def _bases(self, island: Island) -> list[Generator]:
        shape, gpu = self.work.shape, island.gpu
        precisions: tuple[Precision, ...] = ("bf16", "fp8") if gpu.tflops.fp8 else ("bf16",)
        meshes = [m for m in generator_meshes(shape, island) if self.pin in (None, m.axes)]
        return [Generator(shape, gpu, mesh, 1, precision) for precision in precisions for mesh in meshes]

    def _fastest(self, island: Island, shared: bool) -> Fastest:
        return self._together(island).fastest(fewer=False) if shared else self.own(island).fastest(fewer=True)
