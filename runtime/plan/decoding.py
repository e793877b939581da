"""Seconds of a generator: prefill, a decoding step, and a batch of responses by continuous batching. Pure.

The batch is simulated over the length of each response, event by event: between two events (a response ends, another
takes its slot) a replica decodes the same rows, and its step only grows with their context. So the tail, in which few
rows are left, costs what it costs; a mean length would hide it.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

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

    def rollout(self, responses: IntArray, prompt_tokens: int, samples: int = 1, replicas: int = 1) -> Rollout:
        """All responses, in order, each given to the replica with the free slot that is first in time. A prompt is
        computed once for its `samples`, on the replica that gets the first of them."""
        return _Queue(self, responses, prompt_tokens, samples, replicas).run()

    def stream_s(self, responses: IntArray, prompt_tokens: int, samples: int = 1, replicas: int = 1) -> float:
        """Seconds of one batch among others that follow without a pause: of three in a row, the last one's share."""
        two = self.rollout(np.tile(responses, 2), prompt_tokens, samples, replicas).seconds
        three = self.rollout(np.tile(responses, 3), prompt_tokens, samples, replicas).seconds
        return three - two

    def _reduced_s(self, tokens: float) -> float:
        """Two all-reduces of the activations in each layer, and one of the logits' maxima, which is left out."""
        return 2 * self.shape.layers * reduce_s(self.gpu, tokens * self.shape.hidden * 2, self.mesh.tp)


@dataclass
class _Replica:
    """Rows in work: when each ends, in steps of this replica, and their order; tokens in its cache."""

    now: float = 0.0
    steps: int = 0
    context: int = 0
    rows: list[tuple[int, int]] = field(default_factory=list)
    work: float = 0.0
    slot_s: float = 0.0


class _Queue:
    """Responses that wait, and replicas by the time of their next event. Deterministic."""

    def __init__(
        self, generator: Generator, responses: IntArray, prompt_tokens: int, samples: int, replicas: int
    ) -> None:
        self.generator, self.prompt, self.samples = generator, prompt_tokens, samples
        self.prefill_s = generator.prefill_s(prompt_tokens, prompt_tokens**2)
        self.lengths: Sequence[int] = responses.tolist()
        self.replicas = [_Replica() for _ in range(replicas)]
        self.ends = np.zeros(len(self.lengths))
        self.next = 0
        self._seconds: dict[int, tuple[float, float]] = {}

    def run(self) -> Rollout:
        """Fill the slots of all replicas evenly, then go from event to event."""
        for _ in range(self.generator.slots):
            for replica in self.replicas:
                self._take(replica)
        events = [(self._due(r), k) for k, r in enumerate(self.replicas) if r.rows]
        heapq.heapify(events)
        while events:
            _, number = heapq.heappop(events)
            replica = self.replicas[number]
            self._advance(replica)
            if replica.rows:
                heapq.heappush(events, (self._due(replica), number))
        work = tuple(replica.work for replica in self.replicas)
        slot_s = sum(replica.slot_s for replica in self.replicas)
        return Rollout(float(self.ends.max(initial=0.0)), self.ends, work, sum(self.lengths), slot_s)

    def _take(self, replica: _Replica) -> None:
        """The next response that waits gets a slot; the first of its group brings the prompt."""
        if self.next == len(self.lengths):
            return
        if self.next % self.samples == 0:
            replica.now += self.prefill_s
            replica.work += self.prefill_s
        heapq.heappush(replica.rows, (replica.steps + self.lengths[self.next], self.next))
        replica.context += self.prompt
        self.next += 1

    def _due(self, replica: _Replica) -> float:
        return replica.now + self._until(replica)[1]

    def _until(self, replica: _Replica) -> tuple[int, float]:
        """Steps and seconds to the next end of a row. A step's cost is linear in the context while the same side of
        the roofline bounds it, so the middle step's is the mean."""
        rows, count = len(replica.rows), replica.rows[0][0] - replica.steps
        fixed, slope = self._line(rows)
        return count, count * (fixed + slope * (replica.context + rows * (count - 1) / 2))

    def _line(self, rows: int) -> tuple[float, float]:
        """Seconds of a step with this many rows and an empty cache, and per token in the cache."""
        if rows not in self._seconds:
            fixed = self.generator.step(rows, 0).seconds
            self._seconds[rows] = fixed, (self.generator.step(rows, 1e6).seconds - fixed) / 1e6
        return self._seconds[rows]

    def _advance(self, replica: _Replica) -> None:
        """To the next end of rows; those that wait take their slots."""
        steps, seconds = self._until(replica)
        rows = len(replica.rows)
        replica.steps += steps
        replica.now += seconds
        replica.work += seconds
        replica.slot_s += seconds * rows
        replica.context += steps * rows
        while replica.rows and replica.rows[0][0] == replica.steps:
            _, number = heapq.heappop(replica.rows)
            self.ends[number] = replica.now
            replica.context -= self.prompt + self.lengths[number]
            self._take(replica)
