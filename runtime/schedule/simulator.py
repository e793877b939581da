"""The schedule on a virtual clock: the real scheduler, answered after given durations and with given verdicts.

What it leaves out: time spent between an answer and the next command. So a real run differs from its simulation by
durations and by the runtime's own cost.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isclose
from statistics import fmean

from penstock.runtime.record.timeline import Bar, Kind
from penstock.runtime.schedule.durations import Durations
from penstock.runtime.schedule.events import (
    Arrived,
    Begin,
    Command,
    Done,
    Event,
    Finish,
    Fire,
    Save,
    Saved,
    Send,
    Swap,
    Swapped,
)
from penstock.runtime.schedule.scheduler import Scheduler
from penstock.runtime.schedule.tables import Rules, Tables
from penstock.runtime.schedule.verdicts import Verdicts

Observer = Callable[[float, Event, list[Command]], None]
"""Told the time, an event and the commands that followed it."""


@dataclass
class Simulation:
    """What happened. Times are seconds from the start.

    bars: work that took time, and every update. ends: when each update was over. wall_s: the end of the last one.
    lags: how many groups were consumed at each difference of update and version. queue: for each update, the
    finished groups that lay ready when it began, its own batch included.
    busy, idle: seconds of each replica with something in work, and without by cause; they add up to the wall time.
    dropped: how many groups filters have dropped.
    """

    bars: list[Bar] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    lags: Counter[int] = field(default_factory=Counter)
    queue: list[int] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    idle: dict[str, dict[str, float]] = field(default_factory=dict)
    dropped: int = 0
    events: int = 0
    max_lag: int = 0

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
    def lag_mean(self) -> float:
        return fmean(self.lags.elements()) if self.lags else 0.0


def simulate(
    tables: Tables,
    rules: Rules,
    durations: Durations,
    live: Mapping[tuple[str, str], int] | None = None,
    observe: Observer | None = None,
    verdicts: Verdicts | None = None,
) -> Simulation:
    """Run all updates on a virtual clock. Deterministic.

    Raises ValueError for durations and verdicts that do not fit the graph, and for a run that would fail since its
    filters drop too much.
    """
    verdicts = verdicts or Verdicts()
    durations.check(tables)
    verdicts.check(tables)
    return _Clock(tables, rules, durations, verdicts, live).run(observe)


class _Clock:
    """A heap of answers by the time at which they come; equal times in the order in which they were asked for."""

    def __init__(
        self,
        tables: Tables,
        rules: Rules,
        durations: Durations,
        verdicts: Verdicts,
        live: Mapping[tuple[str, str], int] | None,
    ) -> None:
        self.tables, self.durations, self.verdicts = tables, durations, verdicts
        self.scheduler = Scheduler(tables, rules, live=live)
        self.now = 0.0
        self.result = Simulation(max_lag=tables.max_lag)
        self.result.busy = dict.fromkeys(tables.replicas, 0.0)
        self.result.idle = {replica: {} for replica in tables.replicas}
        self._answers: list[tuple[float, int, Event]] = []
        self._versions: dict[int, int] = {}
        self._asked = 0

    def run(self, observe: Observer | None) -> Simulation:
        event: Event = Begin()
        while True:
            update = self.scheduler.update
            commands = self.scheduler.handle(event)
            self.result.events += 1
            if observe is not None:
                observe(self.now, event, commands)
            if self.scheduler.update > update:
                self.result.ends.append(self.now)
            for command in commands:
                self._do(command)
            if self.scheduler.finished:
                self.result.wall_s, self.result.dropped = self.now, self.scheduler.ledger.fates["dropped"]
                return self.result
            time, _, event = heapq.heappop(self._answers)
            if time > self.now:
                self._account(time)

    def _account(self, time: float) -> None:
        """Let the clock go on, and add the time that passes to what each replica is doing."""
        seconds, self.now = time - self.now, time
        for replica, load in self.scheduler.load.items():
            if load:
                self.result.busy[replica] += seconds
            else:
                idle, cause = self.result.idle[replica], self.scheduler.cause(replica)
                idle[cause] = idle.get(cause, 0.0) + seconds

    def _do(self, command: Command) -> None:
        match command:
            case Fire():
                self._fire(command)
            case Send(channel, version, _, replica):
                self._take(self.durations.wire, "send", f"{channel}/{_number(replica)}", channel, version)
                self._answer(self.durations.wire, replica, lambda rank: Arrived(channel, version, replica, rank))
            case Swap(channel, version, replica):
                self._take(self.durations.swap, "swap", f"{channel}/{_number(replica)}", "swap", version)
                self._answer(self.durations.swap, replica, lambda rank: Swapped(channel, version, replica, rank))
            case Save(update, replica):
                self._answer(0.0, replica, lambda rank: Saved(update, replica, rank))
            case Finish("failed", error):
                raise ValueError(f"simulation: {error}")

    def _fire(self, command: Fire) -> None:
        firing, replica = command.firing, command.replica
        step = self.tables.steps.get(firing.node)
        seconds = self.durations.publish if step is None else self.durations.of(firing)
        version: int | None = firing.index
        kind: Kind = "publish" if step is None else "update" if step.per_update else "group"
        if step is not None and not step.per_update:
            channels = (*(channel for channel, _ in step.weights), *step.fixed)
            lives = [self.scheduler.live(channel, replica) for channel in channels]
            version = min(lives, default=None)
            kind = "source" if step.source else "group"
            if version is not None:
                self._versions[firing.index] = min(version, self._versions.get(firing.index, version))
        if step is not None and step.groups and step.per_update:
            self._consume(firing.index, command.groups)
        self._take(seconds, kind, replica, firing.node, firing.index, version)
        dropped = step is not None and step.filters and self.verdicts.dropped(firing)
        again = step is not None and step.answers and self.verdicts.goes_on(firing)
        self._answer(seconds, replica, lambda rank: Done(firing, replica, rank, dropped, again))

    def _consume(self, update: int, groups: tuple[int, ...]) -> None:
        """The first step of an update that takes its groups: note how old they are, and how many are waiting."""
        if len(self.result.queue) <= update - self.scheduler.rules.start:
            self.result.queue.append(sum(group.finished for group in self.scheduler.ledger.groups.values()))
            self.result.lags.update(update - self._versions.pop(g) for g in groups if g in self._versions)

    def _take(self, seconds: float, kind: Kind, lane: str, name: str, index: int, version: int | None = None) -> None:
        if seconds > 0 or kind == "update":
            self.result.bars.append(Bar(lane, name, index, self.now, self.now + seconds, kind, version))

    def _answer(self, seconds: float, replica: str, event: Callable[[int], Event]) -> None:
        for rank in range(len(self.tables.replicas[replica].ranks)):
            self._asked += 1
            heapq.heappush(self._answers, (self.now + seconds, self._asked, event(rank)))


def _number(replica: str) -> str:
    return replica.rpartition("/")[2]
