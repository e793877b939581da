"""One replica's rows in work, from one event to the next; and the tails of many replicas at once. Pure.

Between two events (a response ends, another takes its slot) a replica decodes the same rows, and its step only grows
with their context.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, sqrt

import numpy as np

from penstock.runtime.plan.lengths import FloatArray, IntArray


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
