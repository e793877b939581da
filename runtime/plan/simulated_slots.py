"""How full a generator's slots are, from the begins and ends of all rows. Pure.

Shape suffixes: N rows of all groups.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.schedule.durations import Spans
from penstock.runtime.schedule.simulation import Simulation

TAIL = 0.9
"""The tail of a batch begins when this share of its responses is done."""


@dataclass(frozen=True)
class Filling:
    """Shares of slots in use, from 0 to 1: over the steady updates, and in the tails of their batches, which take
    `tail_s` seconds each on average. A tail is from the end of nine tenths of a batch's responses to its last one."""

    slots: int
    occupancy: float
    tail_s: float
    tail_occupancy: float


def filling(spans: Spans, slots: int, drawn: Callable[[int], tuple[int, int]], result: Simulation) -> Filling:
    """`slots` are those of all replicas; `drawn` says which ordinals an update has, from one up to another."""
    used = _Used(spans)
    steady = result.steady
    begin, end = (result.ends[u] for u in steady) if steady else (0.0, result.wall_s)
    first, last = (steady[0] + 1, steady[1]) if steady else (0, len(result.ends) - 1)
    tails = [used.tail(*drawn(update)) for update in range(first, last + 1)]
    seconds = sum(stop - start for start, stop in tails)
    busy = sum(used.between(start, stop) for start, stop in tails)
    return Filling(
        slots,
        used.between(begin, end) / ((end - begin) * slots),
        seconds / len(tails),
        busy / (seconds * slots) if seconds else 1.0,
    )


class _Used:
    """Slot-seconds in use up to any time."""

    def __init__(self, spans: Spans) -> None:
        self.begins_N, self.ends_N = np.sort(np.array(spans.begins)), np.sort(np.array(spans.ends))
        self._until = {id(times_N): np.concatenate(([0.0], np.cumsum(times_N))) for times_N in self._both}
        order = np.argsort(np.array(spans.indices), kind="stable")
        self._indices_N, self._by_group_N = np.array(spans.indices)[order], np.array(spans.ends)[order]

    @property
    def _both(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self.begins_N, self.ends_N

    def between(self, start: float, stop: float) -> float:
        return self._before(stop) - self._before(start)

    def tail(self, first: int, last: int) -> tuple[float, float]:
        """When the tail of a batch of these ordinals, the last one excluded, begins and ends."""
        low, high = np.searchsorted(self._indices_N, [first, last])
        ends = np.sort(self._by_group_N[low:high])
        return float(ends[min(int(len(ends) * TAIL), len(ends) - 1)]), float(ends[-1])

    def _before(self, time: float) -> float:
        """Each row that began has been in work since, but for what it is over."""
        begun, ended = (self._sum(times_N, time) for times_N in self._both)
        return begun - ended

    def _sum(self, times_N: NDArray[np.float64], time: float) -> float:
        """Seconds since each of the times that are past."""
        count = int(np.searchsorted(times_N, time))
        return float(count * time - self._until[id(times_N)][count])
