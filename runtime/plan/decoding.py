"""Seconds of a generator: prefill, a decoding step, and a batch of responses by continuous batching. Pure.

The batch is simulated over the length of each response, event by event: between two events (a response ends, another
takes its slot) a replica decodes the same rows, and its step only grows with their context. So the tail, in which few
rows are left, costs what it costs; a mean length would hide it.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.plan.cost import Cost
from penstock.runtime.plan.gpus import BYTES, Gpu, Precision
from penstock.runtime.plan.lengths import IntArray
from penstock.runtime.plan.links import reduce_s, send_s
from penstock.runtime.plan.parallel import Parallel
from penstock.runtime.plan.shape import Shape
from penstock.runtime.plan.work import (
    attention_flops,
    cache_bytes,
    decode_attention_flops,
    elementwise_bytes,
    product_flops,
    touched,
)

KERNELS, EXPERT_KERNELS = 10, 6
"""Launches of a layer in a decoding step: two norms, queries to values, rotary embedding and cache, attention, its
output, gate and up, activation, down, and the residual; beside them routing and permutations."""
LOGIT_PASSES = 3
"""How often sampling reads or writes the logits in float32."""


@dataclass(frozen=True)
class Rollout:
    """A batch of responses on some replicas. `ends` are the seconds at which each is finished, in their order.

    `work_s` is what each replica was busy, `tokens` what they have made, `slot_s` the seconds of all slots in use: by
    slots and wall time, the occupancy.
    """

    seconds: float
    ends: NDArray[np.float64]
    work_s: tuple[float, ...]
    tokens: int
    slot_s: float

    def occupancy(self, slots: int) -> float:
        """The share of the slots of all replicas that was in use, from start to end."""
        return self.slot_s / (self.seconds * slots * len(self.work_s)) if self.seconds else 0.0


@dataclass(frozen=True)
class Generator:
    """A replica that decodes on `mesh.tp * mesh.pp` GPUs, at most `slots` rows at once. Weights are in `precision`, the
    cache in `cache`. `overhead_s` is what the engine adds to each step on its host."""

    shape: Shape
    gpu: Gpu
    mesh: Parallel
    slots: int
    precision: Precision = "bf16"
    cache: Precision = "bf16"
    overhead_s: float = 0.0

    def prefill_s(self, tokens: float, squares: float) -> float:
        """Prompts of `tokens` in all, whose squared lengths sum to `squares`; the products bound it, or the weights."""
        if not tokens:
            return 0.0
        shape, gpu, mesh = self.shape, self.gpu, self.mesh
        products = product_flops(shape) * tokens / mesh.tp / gpu.flops(self.precision)
        attention = attention_flops(shape, squares) / mesh.tp / gpu.attention_flops
        elements = elementwise_bytes(shape) * tokens / mesh.tp / gpu.bandwidth
        # Stages work on different prompts at once, so that a token costs its share of one stage's time.
        return (products + attention + elements + self._reduced_s(tokens)) / mesh.pp

    def step(self, rows: float, context: float) -> Cost:
        """One token for each of `rows` rows, which have `context` tokens in the cache between them. A roofline: the
        larger of the bytes over the bandwidth and the FLOPs over the rate, then what nothing hides.

        A pipeline's stages each have rows / pp at a time; the step is over when all stages have had all rows.
        """
        shape, gpu, mesh = self.shape, self.gpu, self.mesh
        at_once = rows / mesh.pp
        used = shape.dense_parameters - (0 if shape.tied else shape.vocab * shape.hidden)
        weights = (used + shape.expert_parameters * touched(shape, at_once)) * BYTES[self.precision] / mesh.tp
        reading = weights / gpu.bandwidth
        cached = context * cache_bytes(shape, BYTES[self.cache], mesh.tp) / gpu.bandwidth
        products = product_flops(shape) * rows / mesh.tp / gpu.flops(self.precision)
        attention = decode_attention_flops(shape, context) / mesh.tp / gpu.attention_flops
        logits = rows * shape.vocab * 4 * LOGIT_PASSES / mesh.tp / gpu.bandwidth
        launches = (shape.layers * KERNELS + shape.moe_layers * EXPERT_KERNELS) * gpu.launch_s
        hops = mesh.pp * send_s(gpu, at_once * shape.hidden * 2, mesh.tp) if mesh.pp > 1 else 0.0
        return Cost(
            {
                "weights": max(reading, products / mesh.pp),
                "cache": max(cached, attention) / mesh.pp,
                "logits": logits,
                "tp": self._reduced_s(at_once),
                "launches": launches,
                "pp": hops,
                "engine": self.overhead_s,
            }
        )

    def rollout(
        self,
        responses: IntArray,
        prompt_tokens: int,
        samples: int = 1,
        replicas: int = 1,
        lines: dict[int, tuple[float, float]] | None = None,
    ) -> Rollout:
        """All responses, in order, each given to the replica with the free slot that is first in time. A prompt is
        computed once for its `samples`, on the replica that gets the first of them. `lines` is what `Slots` keeps, from
        another rollout of this generator."""
        return _Queue(self, responses, prompt_tokens, samples, replicas, {} if lines is None else lines).run()

    def stream_s(self, responses: IntArray, prompt_tokens: int, samples: int = 1, replicas: int = 1) -> float:
        """Seconds of one batch among others that follow without a pause: of three in a row, the last one's share."""
        two = self.rollout(np.tile(responses, 2), prompt_tokens, samples, replicas).seconds
        three = self.rollout(np.tile(responses, 3), prompt_tokens, samples, replicas).seconds
        return three - two

    def _reduced_s(self, tokens: float) -> float:
        """Two all-reduces of the activations in each layer, and one of the logits' maxima, which is left out."""
        return 2 * self.shape.layers * reduce_s(self.gpu, tokens * self.shape.hidden * 2, self.mesh.tp)


class Slots:
    """One replica's rows in work, from one event to the next: a response ends, or another takes its slot.

    `now` is the end of the last step in seconds, `work` what of them was busy, `slot_s` the seconds of slots in use.
    """

    def __init__(self, generator: Generator, lines: dict[int, tuple[float, float]]) -> None:
        """`lines` is shared by replicas that are alike: seconds of a step by rows, empty at first."""
        self.generator = generator
        self.now = self.work = self.slot_s = 0.0
        self._lines = lines
        self._steps = self._context = 0
        self._rows: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        """Rows in work."""
        return len(self._rows)

    @property
    def free(self) -> int:
        return self.generator.slots - len(self._rows)

    @property
    def due(self) -> float:
        """When the next row ends; infinity if none is in work."""
        return self.now + self._until()[1] if self._rows else inf

    def take(self, row: int, length: int, prompt: int, prefill_s: float) -> None:
        """A response of `length` tokens takes a slot, once its prompt is computed: 0 s for a prompt that is there."""
        self.now += prefill_s
        self.work += prefill_s
        heapq.heappush(self._rows, (self._steps + length, row, prompt + length))
        self._context += prompt

    def fill(self, rows: Sequence[tuple[int, int]], prompt: int, prefill_s: float) -> None:
        """Responses with their lengths take slots that are all free, once their prompts are computed."""
        self._rows = [(self._steps + length, row, prompt + length) for row, length in rows]
        heapq.heapify(self._rows)
        self._context = prompt * len(rows)
        self.now += prefill_s
        self.work += prefill_s

    def advance(self) -> list[int]:
        """On to the next end of rows; those that have ended, in order."""
        self._go(*self._until())
        ended = []
        while self._rows and self._rows[0][0] == self._steps:
            _, row, held = heapq.heappop(self._rows)
            self._context -= held
            ended.append(row)
        return ended

    def drain(self) -> tuple[IntArray, NDArray[np.float64]]:
        """On to the end of all rows, none of which is followed by another: [rows]: which, and when, in this order."""
        rows = np.array(sorted(self._rows), np.int64).reshape(-1, 3)
        self._rows.clear()
        ends, numbers, held = rows.T
        alive = np.arange(len(rows), 0, -1)
        steps = np.diff(ends, prepend=self._steps)
        grown = alive * steps
        context = self._context + np.cumsum(grown - held) - (grown - held)
        fixed, slope = np.array([self._line(int(count)) for count in alive]).reshape(-1, 2).T
        seconds = steps * (fixed + slope * (context + alive * (steps - 1) / 2))
        times: NDArray[np.float64] = self.now + np.cumsum(seconds)
        total = float(seconds.sum())
        self.now += total
        self.work += total
        self.slot_s += float((seconds * alive).sum())
        self._steps, self._context = int(ends.max(initial=self._steps)), 0
        return numbers, times

    def reach(self, time: float) -> None:
        """On to the end of the step that is in work at `time`, before which none of the rows ends: what comes at
        `time` takes its slot between two steps."""
        if not self._rows:
            self.now = max(self.now, time)
        elif time > self.now:
            fixed, slope = self._line(len(self._rows))
            # The root of n * (fixed + slope * (context + rows * (n - 1) / 2)) = time - now, the seconds of n steps.
            square = slope * len(self._rows) / 2
            linear = fixed + slope * self._context - square
            passed = time - self.now
            steps = 2 * passed / (linear + sqrt(linear * linear + 4 * square * passed))
            last = self._rows[0][0] - self._steps
            self._go(*self._taking(min(last, max(1, ceil(steps - 1e-9)))))

    def _until(self) -> tuple[int, float]:
        """Steps and seconds to the next end of a row."""
        return self._taking(self._rows[0][0] - self._steps)

    def _taking(self, steps: int) -> tuple[int, float]:
        """So many steps with the rows in work, and their seconds. A step's cost is linear in the context while the same
        side of the roofline bounds it, so the middle step's is the mean."""
        fixed, slope = self._line(len(self._rows))
        return steps, steps * (fixed + slope * (self._context + len(self._rows) * (steps - 1) / 2))

    def _line(self, rows: int) -> tuple[float, float]:
        """Seconds of a step with so many rows and an empty cache, and per token in the cache."""
        if rows not in self._lines:
            fixed = self.generator.step(rows, 0).seconds
            self._lines[rows] = fixed, (self.generator.step(rows, 1e6).seconds - fixed) / 1e6
        return self._lines[rows]

    def _go(self, steps: int, seconds: float) -> None:
        rows = len(self._rows)
        self._steps += steps
        self.now += seconds
        self.work += seconds
        self.slot_s += seconds * rows
        self._context += steps * rows


class _Queue:
    """Responses that wait, and replicas by the time of their next event. Deterministic."""

    def __init__(
        self,
        generator: Generator,
        responses: IntArray,
        prompt_tokens: int,
        samples: int,
        replicas: int,
        lines: dict[int, tuple[float, float]],
    ) -> None:
        self.generator, self.prompt, self.samples = generator, prompt_tokens, samples
        self.prefill_s = generator.prefill_s(prompt_tokens, prompt_tokens**2)
        self.lengths: Sequence[int] = responses.tolist()
        self.replicas = [Slots(generator, lines) for _ in range(replicas)]
        self.ends = np.zeros(len(self.lengths))
        self.next = 0

    def run(self) -> Rollout:
        """Fill the slots of all replicas evenly, then go from event to event while responses wait for slots."""
        count = len(self.replicas)
        self.next = min(len(self.lengths), count * self.generator.slots)
        for number, replica in enumerate(self.replicas):
            rows = range(number, self.next, count)
            brings = sum(row % self.samples == 0 for row in rows)
            replica.fill([(row, self.lengths[row]) for row in rows], self.prompt, brings * self.prefill_s)
        events = [(replica.due, number) for number, replica in enumerate(self.replicas)]
        heapq.heapify(events)
        while self.next < len(self.lengths):
            _, number = events[0]
            replica = self.replicas[number]
            for row in replica.advance():
                self.ends[row] = replica.now
            while replica.free and self.next < len(self.lengths):
                self._take(replica)
            heapq.heapreplace(events, (replica.due, number))
        for replica in self.replicas:
            ended, times = replica.drain()
            self.ends[ended] = times
        work = tuple(replica.work for replica in self.replicas)
        slot_s = sum(replica.slot_s for replica in self.replicas)
        return Rollout(float(self.ends.max(initial=0.0)), self.ends, work, sum(self.lengths), slot_s)

    def _take(self, replica: Slots) -> None:
        """The next response that waits gets a slot; the first of its group brings the prompt."""
        if self.next < len(self.lengths):
            prefill_s = self.prefill_s if self.next % self.samples == 0 else 0.0
            replica.take(self.next, self.lengths[self.next], self.prompt, prefill_s)
            self.next += 1
