"""All ways to decode with one mesh and precision, with their seconds. Pure.

Shapes of arrays are said in `workload` and `decoders`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.runtime.plan.decode_cost import Generator
from penstock.runtime.plan.workload import FloatArray, IntArray, Workload
from tests.oracles.plan_search.decoders import Block
from tests.oracles.plan_search.islands import Island
from tests.oracles.plan_search.layouts import slot_counts


@dataclass(frozen=True)
class Blocks:
    """`slots` is the most rows of a replica."""

    work: Workload
    lag: int
    slots: int

    def of(self, island: Island, number: int, base: Generator, sizes: Sequence[int], fit: int) -> Block:
        """On each number of GPUs that copies of the base fill, with each number of slots that may be of use, up to the
        `fit` that there is memory for. `number` is the base's among those of the island."""
        work = self.work
        gpus = np.array([size for size in sizes if size % base.mesh.ranks == 0], np.int64)
        gpus = gpus[gpus <= work.responses * base.mesh.ranks]
        counts = np.array(slot_counts(fit, work.responses * (self.lag + 1)), np.int64)
        useful = -(-work.responses * (self.lag + 1) // (gpus // base.mesh.ranks))
        row, column = np.nonzero(np.concatenate([[0], counts[:-1]]) < useful[:, None])
        replicas, slots = gpus[row] // base.mesh.ranks, counts[column]
        rows = np.minimum(slots, self._share(replicas)) if work.kept == 1 else slots
        return Block(
            base=np.full(len(row), number),
            replicas=replicas,
            slots=slots,
            gpus=gpus[row],
            share=np.full(len(row), base.bytes_each),
            narrow=np.full(len(row), int(base.precision != "bf16")),
            alike=(number * (island.gpus + 1) + replicas) * (self.slots + 1) + rows,
            **self._seconds(replace(base, slots=fit), replicas, slots),
        )

    def _seconds(self, base: Generator, replicas: IntArray, slots: IntArray) -> dict[str, FloatArray]:
        """`steady`, `least` and `others`. A step costs what its rows do, which falls per row with their number, and
        what their contexts do, which sum to the same whoever decodes beside whom."""
        work, (tokens, contexts, longest, last) = self.work, self._totals
        fixed, slope = base.lines.fixed, float(base.lines.slope[1])
        always = slope * contexts + work.drawn * base.prefill_s(work.prompt_tokens, work.prompt_tokens**2)
        flying = np.minimum(slots, -(-(self.lag + 1) * work.responses // replicas))
        alone = np.minimum(slots, self._share(replicas))
        one, most = fixed[1], fixed[flying]
        least = (tokens * fixed[alone] / alone + always) / replicas
        return {
            "steady": (tokens * most / flying + always) / replicas,
            "least": np.maximum(least, longest * one + slope * last),
            "others": (tokens * (most - one) / np.maximum(1, flying - 1) + always) / replicas,
        }

    def _share(self, replicas: IntArray | int) -> IntArray:
        """Responses of a replica."""
        return np.asarray(-(-self.work.responses // replicas))

    @cached_property
    def _totals(self) -> tuple[float, float, int, float]:
        """Of all responses: tokens, and the tokens that each of them saw; the same of the longest one."""
        lengths = self.work.response_tokens.astype(np.float64)
        seen = lengths * self.work.prompt_tokens + lengths * (lengths - 1) / 2
        return float(lengths.sum()), float(seen.sum()), self.work.longest, float(seen.max())
