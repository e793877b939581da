"""Seconds of a generator: prefill, a decoding step, and a batch of responses, which `rollout` simulates. Pure.

One replica's rows in work, from one event to the next; and the tails of many replicas at once. Pure.

Between two events (a response ends, another takes its slot) a replica decodes the same rows, and its step only grows
with their context.

A batch of responses by continuous batching, simulated over the length of each response, event by event. Pure.

So the tail, in which few rows are left, costs what it costs; a mean length would hide it.

Seconds of a batch of which filters drop some groups, each replaced by the next one once it is known. Pure.

A group is known to be dropped when its longest response is done; only then may another one begin, which waits for slots
on the replica that has least to do. So with enough slots for all, a batch takes as long as the longest chain of groups
of which only the last one is kept. Which groups are dropped, and what takes their places, is `Workload.replacements`.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, sqrt
from typing import Any

import numpy as np

from penstock.runtime.cluster.gpus import BYTES, Gpu, Precision
from penstock.runtime.plan.collectives import Cost, reduce_s, send_s
from penstock.runtime.plan.model_shape import Parallel, Shape
from penstock.runtime.plan.train_cost import (
    attention_flops,
    cache_bytes,
    decode_attention_flops,
    elementwise_bytes,
    product_flops,
    touched,
)
from penstock.runtime.plan.workload import FloatArray, IntArray, Workload


@dataclass(frozen=True, eq=False)
class Lines:
    """[slots + 1], by rows: seconds of a step with an empty cache, and for each token in the cache. A step's cost is
    linear in the context while the same side of the roofline bounds it."""

    fixed: FloatArray
    slope: FloatArray

    @cached_property
    def pairs(self) -> list[tuple[float, float]]:
        """The same, for one number of rows at a time."""
        return list(zip(self.fixed.tolist(), self.slope.tolist(), strict=True))


class Slots:
    """One replica's rows in work, from one event to the next: a response ends, or another takes its slot.

    `now` is the end of the last step in seconds, `work` what of them was busy, `slot_s` the seconds of slots in use.
    """

    def __init__(self, slots: int, lines: Lines) -> None:
        self.slots = slots
        self.now = self.work = self.slot_s = 0.0
        self._lines = lines.pairs
        self._steps = self._context = 0
        self._rows: list[tuple[int, int, int]] = []
        self._due: float | None = inf

    def __len__(self) -> int:
        """Rows in work."""
        return len(self._rows)

    @property
    def free(self) -> int:
        return self.slots - len(self._rows)

    @property
    def due(self) -> float:
        """When the next row ends; infinity if none is in work."""
        if self._due is None:
            self._due = self.now + self._seconds(self._rows[0][0] - self._steps) if self._rows else inf
        return self._due

    def take(self, row: int, length: int, prompt: int, prefill_s: float) -> None:
        """A response of `length` tokens takes a slot, once its prompt is computed: 0 s for a prompt that is there."""
        self.now += prefill_s
        self.work += prefill_s
        heapq.heappush(self._rows, (self._steps + length, row, prompt + length))
        self._context += prompt
        self._due = None

    def fill(self, rows: Sequence[tuple[int, int]], prompt: int, prefill_s: float) -> None:
        """Responses with their lengths take slots that are all free, once their prompts are computed."""
        self._rows = [(self._steps + length, row, prompt + length) for row, length in rows]
        heapq.heapify(self._rows)
        self._context = prompt * len(rows)
        self.now += prefill_s
        self.work += prefill_s
        self._due = None

    def advance(self) -> list[int]:
        """On to the next end of rows; those that have ended, in order."""
        rows = self._rows
        steps = rows[0][0] - self._steps
        self._go(steps, self._seconds(steps))
        ended = []
        while rows and rows[0][0] == self._steps:
            _, row, held = heapq.heappop(rows)
            self._context -= held
            ended.append(row)
        return ended

    def reach(self, time: float) -> None:
        """On to the end of the step that is in work at `time`, before which none of the rows ends: what comes at
        `time` takes its slot between two steps."""
        if not self._rows:
            self.now = max(self.now, time)
        elif time > self.now:
            fixed, slope = self._lines[len(self._rows)]
            # The root of n * (fixed + slope * (context + rows * (n - 1) / 2)) = time - now, the seconds of n steps.
            square = slope * len(self._rows) / 2
            linear = fixed + slope * self._context - square
            passed = time - self.now
            count = 2 * passed / (linear + sqrt(linear * linear + 4 * square * passed))
            steps = min(self._rows[0][0] - self._steps, max(1, ceil(count - 1e-9)))
            self._go(steps, self._seconds(steps))

    def _seconds(self, steps: int) -> float:
        """Of so many steps with the rows in work: the middle step's cost is the mean."""
        rows = len(self._rows)
        fixed, slope = self._lines[rows]
        return steps * (fixed + slope * (self._context + rows * (steps - 1) / 2))

    def _go(self, steps: int, seconds: float) -> None:
        rows = len(self._rows)
        self._steps += steps
        self.now += seconds
        self.work += seconds
        self.slot_s += seconds * rows
        self._context += steps * rows
        self._due = None

    def left(self) -> tuple[list[tuple[int, int, int]], int]:
        """Of each row in work the steps that are left, itself, and the tokens that it will hold; and the tokens that
        all of them hold now."""
        return [(end - self._steps, row, held) for end, row, held in self._rows], self._context


def tails(lines: Lines, steps: IntArray, held: IntArray, context: IntArray) -> tuple[IntArray, FloatArray]:
    """How replicas go on until all of their rows have ended, none of which is followed by another one.

    steps: [replicas, rows], that each row has left: 0 where there is none. held: [replicas, rows], tokens that it will
    hold. context: [replicas], tokens that all rows hold now. Returns [replicas, rows] the rows in the order in which
    they end, and [replicas, rows] the seconds between the end before and each.
    """
    order = steps.argsort(axis=1, kind="stable")
    ends, freed = np.take_along_axis(steps, order, 1), np.take_along_axis(held, order, 1)
    alive = np.arange(steps.shape[1], 0, -1)
    passed = np.diff(ends, axis=1, prepend=0)
    changed = alive * passed - freed
    before = context[:, None] + changed.cumsum(axis=1) - changed
    seconds: FloatArray = passed * (lines.fixed[alive] + lines.slope[alive] * (before + alive * (passed - 1) / 2))
    return order, seconds


@dataclass(frozen=True)
class Rollout:
    """A batch of responses on some replicas. `ends` are the seconds at which each is finished, in their order.

    `work_s` is what each replica was busy, `tokens` what they have made, `slot_s` the seconds of all slots in use: by
    slots and wall time, the occupancy.
    """

    seconds: float
    ends: FloatArray
    work_s: tuple[float, ...]
    tokens: int
    slot_s: float

    def occupancy(self, slots: int) -> float:
        """The share of the slots of all replicas that was in use, from start to end."""
        return self.slot_s / (self.seconds * slots * len(self.work_s)) if self.seconds else 0.0


@dataclass(frozen=True, eq=False)
class Replicas:
    """`count` replicas that are alike, with `slots` rows at once each."""

    count: int
    slots: int
    lines: Lines


@dataclass(frozen=True, eq=False)
class Batch:
    """[responses]: how long each is. A prompt of `prompt` tokens takes `prefill_s`, once for `samples` responses that
    follow each other."""

    lengths: IntArray
    prompt: int
    samples: int
    prefill_s: float


def rollout(replicas: Replicas, batch: Batch) -> Rollout:
    """All responses, in order, each given to the replica with the free slot that is first in time; the first of its
    group brings the prompt."""
    if len(batch.lengths) <= replicas.count * replicas.slots:
        return _at_once(replicas, batch)
    return _Queue(replicas, batch).run()


def _at_once(replicas: Replicas, batch: Batch) -> Rollout:
    """With slots for all responses, which are dealt out in turn."""
    count, rows = replicas.count, -(-len(batch.lengths) // replicas.count)

    def dealt(values: IntArray) -> IntArray:
        """[replicas, rows]: 0 where there is none."""
        return np.concatenate([values, np.zeros(count * rows - len(values), np.int64)]).reshape(rows, count).T

    lengths = dealt(batch.lengths)
    held = np.where(lengths > 0, lengths + batch.prompt, 0)
    order, seconds = tails(replicas.lines, lengths, held, batch.prompt * (lengths > 0).sum(axis=1))
    first = dealt((np.arange(len(batch.lengths)) % batch.samples == 0).astype(np.int64))
    prefill_s = first.sum(axis=1) * batch.prefill_s
    times = prefill_s[:, None] + seconds.cumsum(axis=1)
    ends = np.empty(count * rows)
    ends[np.take_along_axis(np.arange(count * rows).reshape(rows, count).T, order, 1)] = times
    ends = ends[: len(batch.lengths)]
    slot_s = float((seconds * np.arange(rows, 0, -1)).sum())
    work = tuple((prefill_s + seconds.sum(axis=1)).tolist())
    return Rollout(float(ends.max(initial=0.0)), ends, work, int(batch.lengths.sum()), slot_s)


class _Queue:
    """Responses that wait, and replicas by the time of their next event. Deterministic."""

    def __init__(self, replicas: Replicas, batch: Batch) -> None:
        self.batch, self.lines = batch, replicas.lines
        self.lengths: list[int] = batch.lengths.tolist()
        self.replicas = [Slots(replicas.slots, replicas.lines) for _ in range(replicas.count)]
        self.ends = np.zeros(len(self.lengths))
        self.filled = replicas.count * replicas.slots

    def run(self) -> Rollout:
        """Fill the slots of all replicas evenly, then go from event to event while responses wait for slots."""
        batch, lengths, count, last = self.batch, self.lengths, len(self.replicas), len(self.lengths)
        for number, replica in enumerate(self.replicas):
            rows = range(number, self.filled, count)
            brings = sum(row % batch.samples == 0 for row in rows)
            replica.fill([(row, lengths[row]) for row in rows], batch.prompt, brings * batch.prefill_s)
        events = [(replica.due, number) for number, replica in enumerate(self.replicas)]
        heapq.heapify(events)
        following = self.filled
        while following < last:
            number = events[0][1]
            replica = self.replicas[number]
            ended = replica.advance()
            self.ends[ended] = replica.now
            for row in range(following, min(last, following + len(ended))):
                replica.take(row, lengths[row], batch.prompt, 0.0 if row % batch.samples else batch.prefill_s)
            following += len(ended)
            heapq.heapreplace(events, (replica.due, number))
        return self._drained()

    def _drained(self) -> Rollout:
        """On to the end of all rows."""
        found = [replica.left() for replica in self.replicas]
        size = max(len(rows) for rows, _ in found)
        padded = [[*rows, *[(0, -1, 0)] * (size - len(rows))] for rows, _ in found]
        steps, numbers, held = np.moveaxis(np.array(padded, np.int64), 2, 0)
        order, seconds = tails(self.lines, steps, held, np.array([context for _, context in found]))
        times = np.array([replica.now for replica in self.replicas])[:, None] + seconds.cumsum(axis=1)
        rows = np.take_along_axis(numbers, order, 1)
        self.ends[rows[rows >= 0]] = times[rows >= 0]
        work = np.array([replica.work for replica in self.replicas]) + seconds.sum(axis=1)
        slot_s = sum(replica.slot_s for replica in self.replicas)
        slot_s += float((seconds * np.arange(size, 0, -1)).sum())
        return Rollout(float(self.ends.max()), self.ends, tuple(work.tolist()), sum(self.lengths), slot_s)


KERNELS, EXPERT_KERNELS = 10, 6
"""Launches of a layer in a decoding step: two norms, queries to values, rotary embedding and cache, attention, its
output, gate and up, activation, down, and the residual; beside them routing and permutations."""
LOGIT_PASSES = 3
"""How often sampling reads or writes the logits in float32."""


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

    @property
    def bytes_each(self) -> float:
        """Of weights on each rank, all that travel to it."""
        return self.shape.parameters * BYTES[self.precision] / (self.mesh.tp * self.mesh.pp)

    def prefill_s(self, tokens: float, squares: float) -> float:
        """Prompts of `tokens` in all, whose squared lengths sum to `squares`; the products bound it, or the weights."""
        if not tokens:
            return 0.0
        shape, gpu, mesh = self.shape, self.gpu, self.mesh
        products = product_flops(shape) * tokens / mesh.tp / gpu.flops(self.precision)
        attention = attention_flops(shape, squares) / mesh.tp / gpu.attention_flops
        elements = elementwise_bytes(shape) * tokens / mesh.tp / gpu.bandwidth
        # Stages work on different prompts at once, so that a token costs its share of one stage's time.
        reduced: float = self._reduced_s(tokens)
        return (products + attention + elements + reduced) / mesh.pp

    def step(self, rows: float, context: float) -> Cost:
        """One token for each of `rows` rows, which have `context` tokens in the cache between them. A roofline: the
        larger of the bytes over the bandwidth and the FLOPs over the rate, then what nothing hides.

        A pipeline's stages each have rows / pp at a time; the step is over when all stages have had all rows.
        """
        return Cost({name: float(seconds) for name, seconds in self._step(rows, context).items()})

    @cached_property
    def lines(self) -> Lines:
        """Of a step with each number of rows."""
        rows = np.arange(self.slots + 1, dtype=np.float64)
        empty, million = (sum(self._step(rows, context).values()) for context in (0.0, 1e6))
        return Lines(empty, (million - empty) / 1e6)

    def rollout(self, responses: IntArray, prompt_tokens: int, samples: int = 1, replicas: int = 1) -> Rollout:
        """All responses, in order, on so many replicas. A prompt is computed once for its `samples`, on the replica
        that gets the first of them."""
        prefill_s = self.prefill_s(prompt_tokens, prompt_tokens**2)
        return rollout(Replicas(replicas, self.slots, self.lines), Batch(responses, prompt_tokens, samples, prefill_s))

    def stream_s(self, responses: IntArray, prompt_tokens: int, samples: int = 1, replicas: int = 1) -> float:
        """Seconds of one batch among others that follow without a pause: of three in a row, the last one's share."""
        two = self.rollout(np.tile(responses, 2), prompt_tokens, samples, replicas).seconds
        three = self.rollout(np.tile(responses, 3), prompt_tokens, samples, replicas).seconds
        return three - two

    def _step(self, rows: Any, context: float) -> dict[str, Any]:
        """Seconds by part, of a number of rows or of an array of them."""
        shape, gpu, mesh = self.shape, self.gpu, self.mesh
        at_once = rows / mesh.pp
        used = shape.dense_parameters - (0 if shape.tied else shape.vocab * shape.hidden)
        weights = (used + shape.expert_parameters * touched(shape, at_once)) * BYTES[self.precision] / mesh.tp
        cached = context * cache_bytes(shape, BYTES[self.cache], mesh.tp) / gpu.bandwidth
        products = product_flops(shape) * rows / mesh.tp / gpu.flops(self.precision)
        attention = decode_attention_flops(shape, context) / mesh.tp / gpu.attention_flops
        launches = (shape.layers * KERNELS + shape.moe_layers * EXPERT_KERNELS) * gpu.launch_s
        return {
            "weights": np.maximum(weights / gpu.bandwidth, products / mesh.pp),
            "cache": max(cached, attention) / mesh.pp,
            "logits": rows * shape.vocab * 4 * LOGIT_PASSES / mesh.tp / gpu.bandwidth,
            "tp": self._reduced_s(at_once),
            "launches": launches,
            "pp": mesh.pp * send_s(gpu, at_once * shape.hidden * 2, mesh.tp) if mesh.pp > 1 else 0.0,
            "engine": self.overhead_s,
        }

    def _reduced_s(self, tokens: Any) -> Any:
        """Two all-reduces of the activations in each layer, and one of the logits' maxima, which is left out."""
        return 2 * self.shape.layers * reduce_s(self.gpu, tokens * self.shape.hidden * 2, self.mesh.tp)


def rollout_s(work: Workload, generator: Generator, replicas: int) -> float:
    """Seconds of a batch by itself, simulated over its lengths, the tail included."""
    if work.kept < 1:
        return _Refilling(work, generator, replicas).run()
    return generator.rollout(work.response_tokens, work.prompt_tokens, work.rows, replicas).seconds


class _Refilling:
    """Replicas by the time of their next event, each with rows that wait in line for its slots. Deterministic."""

    def __init__(self, work: Workload, generator: Generator, replicas: int) -> None:
        self.work, self.lengths = work, work.response_tokens.tolist()
        self.prefill_s = generator.prefill_s(work.prompt_tokens, work.prompt_tokens**2)
        self.replicas = [Slots(generator.slots, generator.lines) for _ in range(replicas)]
        self.waiting: list[deque[int]] = [deque() for _ in range(replicas)]
        self.left = [work.rows] * work.drawn
        self.events: list[tuple[float, int]] = []

    def run(self) -> float:
        """Rows of the first groups are spread evenly, as in a rollout without a filter."""
        for row in range(self.work.prompts * self.work.rows):
            self.waiting[row % len(self.replicas)].append(row)
        for number in range(len(self.replicas)):
            self._fill(number)
        while self.events:
            due, number = heapq.heappop(self.events)
            replica = self.replicas[number]
            if due != replica.due:  # it has taken rows since, or has none
                continue
            next_groups = [group for row in replica.advance() if (group := self._after(row)) is not None]
            self._fill(number)
            for group in next_groups:
                self._begin(group, replica.now)
        return max(replica.now for replica in self.replicas)

    def _after(self, row: int) -> int | None:
        """The group that may begin, if this was the last response of one that is dropped."""
        group = row // self.work.rows
        self.left[group] -= 1
        return None if self.left[group] else self.work.replacements.get(group)

    def _begin(self, group: int, now: float) -> None:
        """On the replica that has least to do."""
        loads = [len(replica) + len(line) for replica, line in zip(self.replicas, self.waiting, strict=True)]
        number = loads.index(min(loads))
        self.waiting[number].extend(range(group * self.work.rows, (group + 1) * self.work.rows))
        self.replicas[number].reach(now)
        self._fill(number)

    def _fill(self, number: int) -> None:
        replica, line = self.replicas[number], self.waiting[number]
        while line and replica.free:
            row = line.popleft()
            prefill_s = 0.0 if row % self.work.rows else self.prefill_s
            replica.take(row, self.lengths[row], self.work.prompt_tokens, prefill_s)
        if len(replica):
            heapq.heappush(self.events, (replica.due, number))
