"""What a schedule on a virtual clock was: its bars, its ends, and how long an update takes in it. Pure."""

from collections import Counter
from dataclasses import dataclass, field
from math import isclose
from statistics import fmean

from penstock.runtime.record.svg import gantt_svg
from penstock.runtime.record.timeline import Bar, excerpt
from penstock.runtime.schedule.durations import Spans


@dataclass
class Simulation:
    """What happened. Times are seconds from the start.

    bars: work that took time, and every update. ends: when each update was over. wall_s: the end of the last one.
    lags: how many groups were consumed at each difference of update and version. queue: for each update, the
    finished groups that lay ready when it began, its own batch included.
    busy, idle: seconds of each replica with something in work, and without by cause; they add up to the wall time.
    depths: for each node but sources the seconds in which so many groups waited for it.
    spans: of each node whose firings share an engine, what they were made of.
    dropped: how many groups filters have dropped.
    """

    bars: list[Bar] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    lags: Counter[int] = field(default_factory=Counter)
    queue: list[int] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    idle: dict[str, dict[str, float]] = field(default_factory=dict)
    depths: dict[str, dict[int, float]] = field(default_factory=dict)
    spans: dict[str, Spans] = field(default_factory=dict)
    dropped: int = 0
    events: int = 0
    max_lag: int = 0

    def _repr_html_(self) -> str:
        """The schedule as a picture, for notebooks."""
        return gantt_svg(excerpt(self.bars))

    @property
    def period_s(self) -> float:
        """Seconds per update: of the cycle if there is one, else the mean of all updates, the filling included."""
        cycle = self.cycle_s
        return self.wall_s / max(len(self.ends), 1) if cycle is None else cycle

    @property
    def cycle_s(self) -> float | None:
        """Seconds per update once the pipeline is full: the length of the cycle that the schedule repeats over the
        updates in it, exactly. None of a schedule that does not repeat itself, or of a run too short to tell.

        The last updates, which have no generation beside them, are left out.
        """
        last = len(self.ends) - 1 - (self.max_lag + 1)
        steady = self.ends[max(last // 2, 0) : max(last + 1, 0)]
        # At a lag, updates come in bursts of up to lag + 1: two of them must be seen.
        enough = len(steady) >= 2 * (self.max_lag + 1) + 2
        for updates in range(1, len(steady) // 2 if enough else 0):
            steps = [later - earlier for earlier, later in zip(steady, steady[updates:], strict=False)]
            if all(isclose(step, steps[0], rel_tol=1e-9) for step in steps):
                return steps[0] / updates
        return None

    @property
    def steady(self) -> tuple[int, int] | None:
        """The first and the last update of those between the filling of the pipeline and its end, which has no
        generation beside it: a multiple of as many as a cycle spans, which may come all at once. None of a run too
        short to have any."""
        cycle = self.max_lag + 1
        cycles = (len(self.ends) - 1 - 2 * cycle) // cycle
        return (cycle, cycle + cycles * cycle) if cycles > 0 else None

    @property
    def steady_s(self) -> float:
        """Seconds per update of the steady ones; where durations vary, the figure to go by. `period_s` without any."""
        if self.steady is None:
            return self.period_s
        first, last = self.steady
        return (self.ends[last] - self.ends[first]) / (last - first)

    @property
    def lag_mean(self) -> float:
        return fmean(self.lags.elements()) if self.lags else 0.0
