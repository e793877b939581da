"""Seconds of a batch of which filters drop some groups, each replaced by the next one once it is known. Pure.

A group is known to be dropped when its longest response is done; only then may another one begin, which waits for slots
on the replica that has least to do. So with enough slots for all, a batch takes as long as the longest chain of groups
of which only the last one is kept. Which groups are dropped, and what takes their places, is `Workload.replacements`.
"""

import heapq
from collections import deque

from penstock.runtime.plan.decoding import Generator
from penstock.runtime.plan.slots import Slots
from penstock.runtime.plan.workload import Workload


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
