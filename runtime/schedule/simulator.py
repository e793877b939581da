"""The schedule on a virtual clock: the real scheduler, answered after given durations and with given verdicts.

A duration may depend on what else is in work on a replica (`Batching`). Then the replica is a `SimulatedEngine`, which
is asked for its next event, again whenever a firing begins there.

The time between an answer and the next command is left out. So a real run differs from its simulation by durations and
by the runtime's own cost.

In this file: `Durations` (how long things take), `Verdicts` (what filters and environments decide), `Simulation` (the
result), and `simulate`.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from math import exp, inf, isclose
from statistics import NormalDist, fmean
from typing import Any, Protocol

from msgspec import structs

from penstock.graph.ir import Firing
from penstock.runtime.collection import uncollected
from penstock.runtime.record.timeline import Bar, Kind, Utilisation, excerpt
from penstock.runtime.record.trace_formats import gantt_svg
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import (
    Begin,
    Command,
    Done,
    Event,
    Finish,
    Fire,
    Publish,
    Published,
    Question,
    Save,
    Send,
    Swap,
    Swapped,
    answer,
)
from penstock.runtime.schedule.idle_causes import cause
from penstock.runtime.schedule.scheduler import Scheduler


class SimulatedEngine(Protocol):
    """One replica's firings of one node, whose speed depends on all firings in work there. Times are on the simulator's
    clock and never go back."""

    def begin(self, firing: Firing, now: float) -> None:
        """Begin a firing."""

    @property
    def due(self) -> float:
        """The time of the next event here if nothing else begins; infinity if nothing is in work."""

    def finish(self) -> Sequence[Firing]:
        """Process the event that is due; return the firings that it ends, if any."""

    @property
    def spans(self) -> "Spans":
        """The pieces of work in the firings so far."""


class Batching(Protocol):
    """A duration that is not known when a firing begins."""

    def engine(self) -> SimulatedEngine:
        """Make the engine of a replica without work."""


@dataclass(frozen=True)
class Spans:
    """Pieces of work within firings: the seconds at which each began and ended, and the firing's index."""

    begins: Sequence[float] = ()
    ends: Sequence[float] = ()
    indices: Sequence[int] = ()


# Seconds; or a pure function that returns them, of the node's name (with the turn's number after turn 0: "speak.1") and
# the firing's index (ordinal or update); or a `Batching` for replicas that work on several firings at once.
Duration = float | Callable[[str, int], float] | Batching


def draw(key: str) -> float:
    """A number between 0 and 1 that depends only on the key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64


@dataclass(frozen=True, slots=True)
class LognormalSeconds:
    """A long-tailed duration with a given mean, in seconds, and sigma of its logarithm. Keyed by seed, node, index."""

    mean: float
    sigma: float
    seed: int = 0

    def __call__(self, node: str, index: int) -> float:
        uniform = draw(f"{self.seed}/{node}/{index}")
        return self.mean * exp(self.sigma * NormalDist().inv_cdf(uniform) - self.sigma**2 / 2)


@dataclass(frozen=True)
class Durations:
    """Seconds of each node, and of the three parts of a sync. Sources and filters take no time unless they are given.

    publish: the snapshot, on the sender. wire: the transfer to one replica, during other work. swap: between steps.
    segments: by node, the seconds after which a firing pauses; without an entry it never does.
    steps: by node, the seconds that only the last part of an accumulating update takes (the optimizer step). The rest
    of the node's seconds is divided equally among the parts.
    """

    nodes: Mapping[str, Duration] = field(default_factory=dict)
    publish: float = 0.0
    wire: float = 0.0
    swap: float = 0.0
    segments: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)

    def of(self, firing: Firing) -> float | Batching:
        given = self.nodes.get(firing.node, 0.0)
        if not callable(given):
            return given
        turn = f".{firing.turn}" if firing.turn else ""
        return given(firing.node + turn, firing.index)

    def of_part(self, firing: Firing, parts: int) -> float | Batching:
        """The duration of one of several parts of an update."""
        whole = self.of(firing)
        if not isinstance(whole, int | float):
            return whole
        once = min(self.steps.get(firing.node, 0.0), whole)
        return (whole - once) / parts + once * (firing.segment == parts - 1)

    def check(self, tables: Tables) -> None:
        """Raises ValueError for a node without a duration, for an unknown node, and for negative seconds."""
        instant = [s.name for s in tables.steps.values() if s.source or s.filters]
        missing = [name for name in tables.steps if name not in (*instant, *self.nodes)]
        unknown = [name for name in self.nodes if name not in tables.steps]
        if missing or unknown:
            given, needed = ", ".join(self.nodes) or "none", ", ".join(s for s in tables.steps)
            raise ValueError(
                f"durations: given {given}; needed one for each node of {needed} (sources and filters may be left out)"
            )
        parts = {"publish": self.publish, "wire": self.wire, "swap": self.swap}
        times = parts | {name: value for name, value in self.nodes.items() if isinstance(value, int | float)}
        if negative := [f"{name}={value}" for name, value in times.items() if value < 0]:
            raise ValueError(f"durations: given {', '.join(negative)}; needed seconds, 0 or more")


@dataclass
class Simulation:
    """The result. Times are seconds from the start.

    bars: work that took time, and every update. ends: when each update was over. wall_s: the end of the last one.
    lags: how many groups were consumed at each difference of update and version.
    busy, idle: for each replica, the seconds with a firing in work, and by cause the seconds without; together the wall
    time.
    depths: for each node that takes groups, the seconds by the number of groups that waited for it.
    spans: for each node whose firings share an engine, the pieces of work within them.
    dropped: how many groups filters have dropped.
    """

    bars: list[Bar] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    lags: Counter[int] = field(default_factory=Counter)
    busy: dict[str, float] = field(default_factory=dict)
    idle: dict[str, dict[str, float]] = field(default_factory=dict)
    depths: dict[str, dict[int, float]] = field(default_factory=dict)
    spans: dict[str, Spans] = field(default_factory=dict)
    dropped: int = 0
    max_lag: int = 0

    def _repr_html_(self) -> str:
        """The schedule as a picture, for notebooks."""
        return gantt_svg(excerpt(self.bars))

    @property
    def period_s(self) -> float:
        """Seconds per update: those of the cycle if there is one, else the mean over all updates, pipeline fill
        included."""
        cycle = self.cycle_s
        return self.wall_s / max(len(self.ends), 1) if cycle is None else cycle

    @property
    def cycle_s(self) -> float | None:
        """Exact seconds per update once the pipeline is full: the length of the cycle that the schedule repeats,
        divided by the updates in it. None if the schedule does not repeat, or the run is too short to tell.

        The last updates are left out: nothing is generated during them.
        """
        last = len(self.ends) - 1 - (self.max_lag + 1)
        steady = self.ends[max(last // 2, 0) : max(last + 1, 0)]
        # With a lag, updates come in bursts of up to lag + 1: two bursts must be seen.
        enough = len(steady) >= 2 * (self.max_lag + 1) + 2
        for updates in range(1, len(steady) // 2 if enough else 0):
            steps = [later - earlier for earlier, later in zip(steady, steady[updates:], strict=False)]
            if all(isclose(step, steps[0], rel_tol=1e-9) for step in steps):
                return steps[0] / updates
        return None

    @property
    def steady(self) -> tuple[int, int] | None:
        """The first and the last update of the steady state, between the fill of the pipeline and the last updates,
        during which nothing is generated. It spans a multiple of lag + 1 updates, which may come all at once. None if
        the run is too short to have any."""
        cycle = self.max_lag + 1
        cycles = (len(self.ends) - 1 - 2 * cycle) // cycle
        return (cycle, cycle + cycles * cycle) if cycles > 0 else None

    @property
    def steady_s(self) -> float:
        """Seconds per update in the steady state, the figure to use where durations vary; `period_s` if there is no
        steady state."""
        if self.steady is None:
            return self.period_s
        first, last = self.steady
        return (self.ends[last] - self.ends[first]) / (last - first)

    @property
    def lag_mean(self) -> float:
        return fmean(self.lags.elements()) if self.lags else 0.0


@dataclass(frozen=True)
class Verdicts:
    """Shares from 0 to 1, by node. Keyed by seed, node, ordinal and turn: the same whatever the schedule.

    drops: the share of groups that a filter (`keep`) drops; 0 if it is not named.
    again: the share of turns after which the answering node asks for another; 1 if it is not named. The bound on the
    number of turns always holds.
    """

    drops: Mapping[str, float] = field(default_factory=dict)
    again: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def dropped(self, firing: Firing) -> bool:
        """True if the firing drops its group."""
        return draw(f"{self.seed}/drops/{firing}") < self.drops.get(firing.node, 0.0)

    def goes_on(self, firing: Firing) -> bool:
        """True if the firing asks for another turn."""
        return draw(f"{self.seed}/again/{firing}") < self.again.get(firing.node, 1.0)

    def check(self, tables: Tables) -> None:
        """Raises ValueError for a node that makes no such decision, and for a value that is not a share."""
        filters = [s.name for s in tables.steps.values() if s.filters]
        answers = [s.name for s in tables.steps.values() if s.answers]
        for kind, shares, able in (("drops", self.drops, filters), ("again", self.again, answers)):
            if unknown := [name for name in shares if name not in able]:
                needed = f"names of {', '.join(able)}" if able else "none, since no node of the graph decides it"
                raise ValueError(f"{kind}: given {', '.join(unknown)}; needed {needed}")
            if wrong := [f"{name}={share}" for name, share in shares.items() if not 0 <= share <= 1]:
                raise ValueError(f"{kind}: given {', '.join(wrong)}; needed shares from 0 to 1")


# Called with the time, an event and the commands that followed it.
Observer = Callable[[float, Event, list[Command]], None]


def simulate(
    tables: Tables,
    rules: Rules,
    durations: Durations,
    live: Mapping[tuple[str, str], int] | None = None,
    observe: Observer | None = None,
    verdicts: Verdicts | None = None,
    saved: Mapping[str, Any] | None = None,
) -> Simulation:
    """Run all updates on a virtual clock; if `saved`, the state of a checkpoint, is given, only those after it.
    Deterministic.

    Raises ValueError for durations and verdicts that do not fit the graph, and for a run that fails because its filters
    drop too many groups.
    """
    verdicts = verdicts or Verdicts()
    durations.check(tables)
    verdicts.check(tables)
    with uncollected():
        return _Clock(Scheduler(tables, rules, saved, live), durations, verdicts).run(observe)


# (node, replica): something is due in the engine of this node on this replica.
Alarm = tuple[str, str]


class _Clock:
    """Runs a scheduler, and accounts for the time of its replicas and queues. `_answers` is a heap of answers and
    alarms by time; equal times in the order in which they were asked for."""

    def __init__(self, scheduler: Scheduler, durations: Durations, verdicts: Verdicts) -> None:
        self.tables, self.durations, self.verdicts = scheduler.tables, durations, verdicts
        self.scheduler = scheduler
        self.now = 0.0
        steps = {s.name: s for s in self.tables.steps.values() if not s.source and (not s.per_update or s.groups)}
        self.result = Simulation(max_lag=scheduler.tables.max_lag, depths={name: {} for name in steps})
        self._replicas = Utilisation(self.tables.replicas, 0.0)
        self._queues = [(depths, steps[name]) for name, depths in self.result.depths.items()]
        self._answers: list[tuple[float, int, Event | Alarm]] = []
        self._versions: dict[int, int] = {}
        self._asked = 0
        # Nodes of one duration share its engines, under the name of the first of them.
        self._owners = {id(duration): name for name, duration in reversed(list(durations.nodes.items()))}
        self._engines: dict[Alarm, SimulatedEngine] = {}
        self._alarms: dict[Alarm, int] = {}
        self._begun: dict[Firing, tuple[Fire, Bar]] = {}

    def run(self, observe: Observer | None) -> Simulation:
        event: Event = Begin()
        for replica in self.tables.replicas:
            self._note(replica)
        while True:
            update = self.scheduler.update
            commands = self.scheduler.handle(event)
            if observe is not None:
                observe(self.now, event, commands)
            if self.scheduler.update > update:
                self.result.ends.append(self.now)
            if isinstance(event, Done | Published | Swapped):
                self._note(event.replica)
            for command in commands:
                self._do(command)
            if self.scheduler.finished:
                return self._over()
            event = self._next()
            if self.now > self._replicas.now:
                self._pass()

    def _pass(self) -> None:
        """Account for the time until now, during which no replica's state and no queue changed."""
        seconds = self.now - self._replicas.now
        self._replicas.let(self.now, partial(cause, self.scheduler))
        kept = self.scheduler.ledger.finished - len(self.scheduler.taken)
        for depths, step in self._queues:
            waiting = kept if step.per_update else len(self.scheduler.ready[step.name])
            depths[waiting] = depths.get(waiting, 0.0) + seconds

    def _note(self, replica: str) -> None:
        """Note that a firing began or ended on a replica, or that weights went live there."""
        if self.scheduler.load[replica]:
            self._replicas.change(replica, "busy")
        else:
            # Idle replicas of a pool share one cause if they have weights of the same channels.
            channels = [c.receivers[replica] for c in self.scheduler.channels.values() if replica in c.receivers]
            had = tuple(receiver.live < 0 for receiver in channels)
            self._replicas.change(replica, (self.tables.pool_of[replica], had))

    def _next(self) -> Event:
        """The next answer. Events within engines before it do not concern the scheduler."""
        while True:
            self.now, asked, due = heapq.heappop(self._answers)
            if not isinstance(due, tuple):
                return due
            # If a firing has begun in the engine since, a later alarm replaces this one.
            if self._alarms[due] == asked:
                for firing in self._engines[due].finish():
                    command, bar = self._begun.pop(firing)
                    bar.end = self.now
                    self._answer(command, bar)
                self._watch(due)

    def _over(self) -> Simulation:
        result = self.result
        result.wall_s, result.dropped = self.now, self.scheduler.ledger.outcomes["dropped"]
        result.idle = self._replicas.take()
        result.busy = {replica: states.pop("busy", 0.0) for replica, states in result.idle.items()}
        for node in dict.fromkeys(node for node, _ in self._engines):
            found = [engine.spans for (name, _), engine in self._engines.items() if name == node]
            result.spans[node] = Spans(
                *([value for spans in found for value in getattr(spans, each.name)] for each in fields(Spans))
            )
        return result

    def _do(self, command: Command) -> None:
        durations = self.durations
        match command:
            case Fire():
                self._fire(command)
            case Publish(channel, version, replica):
                self._answer(command, self._bar(durations.publish, replica, channel, version, "publish", version))
            case Send(channel, version, _, replica):
                lane = f"{channel}/{replica.rpartition('/')[2]}"
                self._answer(command, self._bar(durations.wire, lane, channel, version, "send"))
            case Swap(channel, version, replica):
                lane = f"{channel}/{replica.rpartition('/')[2]}"
                self._answer(command, self._bar(durations.swap, lane, "swap", version, "swap"))
            case Save(update, replica):
                self._answer(command, self._bar(0.0, replica, "save", update, "save"))
            case Finish("failed", error):
                raise ValueError(f"simulation: {error}")
        if isinstance(command, Fire | Publish):
            self._note(command.replica)

    def _fire(self, command: Fire) -> None:
        firing, replica = command.firing, command.replica
        step = self.tables.steps[firing.node]
        parts = self.scheduler.num_parts(step)
        seconds = self.durations.of(firing) if parts == 1 else self.durations.of_part(firing, parts)
        version: int | None = firing.index
        kind: Kind = "update" if step.per_update else "source" if step.source else "group"
        if not step.per_update:
            # The oldest live weights that this firing reads. The oldest over all its firings are the group's version.
            channels = (*(channel for channel, _ in step.weights), *step.fixed)
            version = min((self.scheduler.live(channel, replica) for channel in channels), default=None)
            if version is not None:
                self._versions[firing.index] = min(version, self._versions.get(firing.index, version))
        elif step.groups:
            # If several steps take the groups of an update, the first one pops their versions: each group counts once.
            known = [self._versions.pop(g) for g in command.groups if g in self._versions]
            self.result.lags.update(firing.index - made_with for made_with in known)
        if isinstance(seconds, int | float):
            piece = self.durations.segments.get(firing.node, inf)
            left = seconds if step.per_update else seconds - (firing.segment and firing.segment * piece)
            bar = self._bar(min(left, piece), replica, firing.node, firing.index, kind, version)
            self._answer(command, bar, paused=firing.segment < parts - 1 if step.accumulate else left > piece)
        else:
            self._begun[firing] = command, self._bar(inf, replica, firing.node, firing.index, kind, version)
            engine = self._owners[id(seconds)], replica
            if engine not in self._engines:
                self._engines[engine] = seconds.engine()
            self._engines[engine].begin(firing, self.now)
            self._watch(engine)

    def _watch(self, engine: Alarm) -> None:
        """Set the alarm of an engine."""
        self._asked += 1
        self._alarms[engine] = self._asked
        if self._engines[engine].due < inf:
            heapq.heappush(self._answers, (self._engines[engine].due, self._asked, engine))

    def _bar(self, seconds: float, lane: str, name: str, index: int, kind: Kind, version: int | None = None) -> Bar:
        return Bar(lane, name, index, self.now, self.now + seconds, kind, version)

    def _answer(self, command: Question, bar: Bar, *, paused: bool = False) -> None:
        """Queue the answers of all ranks to a command for the end of its bar."""
        if bar.kind == "update" or bar.end > bar.start:
            self.result.bars.append(bar)
        dropped = again = False
        if isinstance(command, Fire) and not paused:
            step = self.tables.steps[command.firing.node]
            dropped = step.filters and self.verdicts.dropped(command.firing)
            again = step.answers and self.verdicts.goes_on(command.firing)
        for rank in range(len(self.tables.replicas[command.replica].ranks)):
            event = answer(command, rank)
            if dropped or again or paused:
                event = structs.replace(event, dropped=dropped, again=again, paused=paused)
            self._asked += 1
            heapq.heappush(self._answers, (bar.end, self._asked, event))
