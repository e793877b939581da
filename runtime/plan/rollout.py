"""A batch of responses by continuous batching, simulated over the length of each response, event by event. Pure.

So the tail, in which few rows are left, costs what it costs; a mean length would hide it.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from penstock.runtime.plan.lengths import FloatArray, IntArray
from penstock.runtime.plan.slots import Lines, Slots, tails


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
