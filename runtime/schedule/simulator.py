"""The schedule on a virtual clock: the real scheduler, answered after given durations and with given verdicts.

A duration may depend on what else is in work on a replica (`durations.Batching`): then the replica is an engine, asked
when something next happens in it, and again whenever something begins there.

What it leaves out: time spent between an answer and the next command. So a real run differs from its simulation by
durations and by the runtime's own cost.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import fields
from math import inf
from typing import Any, NamedTuple

from penstock.graph.ir import Firing
from penstock.runtime.collection import uncollected
from penstock.runtime.record.timeline import Bar, Kind
from penstock.runtime.schedule.account import Account
from penstock.runtime.schedule.durations import Durations, Engine, Spans
from penstock.runtime.schedule.events import (
    Arrived,
    Begin,
    Command,
    Done,
    Event,
    Finish,
    Fire,
    Publish,
    Published,
    Save,
    Saved,
    Send,
    Swap,
    Swapped,
)
from penstock.runtime.schedule.scheduler import Scheduler
from penstock.runtime.schedule.simulation import Simulation
from penstock.runtime.schedule.tables import Rules, Step, Tables
from penstock.runtime.schedule.verdicts import Verdicts

Observer = Callable[[float, Event, list[Command]], None]
"""Told the time, an event and the commands that followed it."""


def simulate(
    tables: Tables,
    rules: Rules,
    durations: Durations,
    live: Mapping[tuple[str, str], int] | None = None,
    observe: Observer | None = None,
    verdicts: Verdicts | None = None,
    cut: Mapping[str, Any] | None = None,
) -> Simulation:
    """Run all updates on a virtual clock, those after `cut` if it is given. Deterministic.

    Raises ValueError for durations and verdicts that do not fit the graph, and for a run that would fail since its
    filters drop too much.
    """
    verdicts = verdicts or Verdicts()
    durations.check(tables)
    verdicts.check(tables)
    with uncollected():
        return _Clock(tables, rules, durations, verdicts, live, cut).run(observe)


class _Begun(NamedTuple):
    """A firing in work on an engine."""

    start: float
    kind: Kind
    version: int | None


class _Alarm:
    """Something is due in an engine, unless something has begun there since."""

    __slots__ = ("node", "replica")

    def __init__(self, node: str, replica: str) -> None:
        self.node, self.replica = node, replica


class _Clock:
    """A heap of answers by the time at which they come; equal times in the order in which they were asked for."""

    def __init__(
        self,
        tables: Tables,
        rules: Rules,
        durations: Durations,
        verdicts: Verdicts,
        live: Mapping[tuple[str, str], int] | None,
        cut: Mapping[str, Any] | None,
    ) -> None:
        self.tables, self.durations, self.verdicts = tables, durations, verdicts
        self.scheduler = Scheduler(tables, rules, cut, live)
        self.account = Account(self.scheduler)
        self.now = 0.0
        self.result = Simulation(max_lag=tables.max_lag)
        self._answers: list[tuple[float, int, Event | _Alarm]] = []
        self._versions: dict[int, int] = {}
        self._asked = 0
        # Nodes of one duration share its engines, under the name of the first of them.
        self._owners = {id(duration): name for name, duration in reversed(list(durations.nodes.items()))}
        self._engines: dict[tuple[str, str], Engine] = {}
        self._alarms: dict[tuple[str, str], _Alarm] = {}
        self._begun: dict[Firing, _Begun] = {}

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
            if isinstance(event, Done | Published | Swapped):
                self.account.note(event.replica)
            for command in commands:
                self._do(command)
            if self.scheduler.finished:
                return self._over()
            event = self._next()
            if self.now > self.account.now:
                self.account.let(self.now)

    def _next(self) -> Event:
        """The next answer; what happens within engines before it needs no scheduler."""
        while True:
            self.now, _, due = heapq.heappop(self._answers)
            if not isinstance(due, _Alarm):
                return due
            if self._alarms[due.node, due.replica] is due:
                engine = self._engines[due.node, due.replica]
                for firing in engine.finish():
                    begun = self._begun.pop(firing)
                    self._bar(due.replica, firing.node, firing.index, begun.start, self.now, begun.kind, begun.version)
                    self._done(firing, due.replica, 0.0)
                self._watch(due.node, due.replica, engine)

    def _over(self) -> Simulation:
        self.account.close()
        result = self.result
        result.wall_s, result.dropped = self.now, self.scheduler.ledger.fates["dropped"]
        result.busy, result.idle, result.depths = self.account.busy, self.account.idle, self.account.depths
        for node in dict.fromkeys(node for node, _ in self._engines):
            found = [engine.spans for (name, _), engine in self._engines.items() if name == node]
            result.spans[node] = Spans(
                *([value for spans in found for value in getattr(spans, each.name)] for each in fields(Spans))
            )
        return result

    def _do(self, command: Command) -> None:
        match command:
            case Fire():
                self._fire(command)
                self.account.note(command.replica)
            case Publish(channel, version, replica):
                seconds = self.durations.publish
                self._take(seconds, "publish", replica, channel, version, version)
                self._answer(seconds, replica, lambda rank: Published(channel, version, replica, rank))
                self.account.note(replica)
            case Send(channel, version, _, replica):
                self._take(self.durations.wire, "send", f"{channel}/{replica.rpartition('/')[2]}", channel, version)
                self._answer(self.durations.wire, replica, lambda rank: Arrived(channel, version, replica, rank))
            case Swap(channel, version, replica):
                self._take(self.durations.swap, "swap", f"{channel}/{replica.rpartition('/')[2]}", "swap", version)
                self._answer(self.durations.swap, replica, lambda rank: Swapped(channel, version, replica, rank))
            case Save(update, replica):
                self._answer(0.0, replica, lambda rank: Saved(update, replica, rank))
            case Finish("failed", error):
                raise ValueError(f"simulation: {error}")

    def _fire(self, command: Fire) -> None:
        firing, replica = command.firing, command.replica
        step = self.tables.steps[firing.node]
        seconds = self.durations.of(firing)
        version: int | None = firing.index
        kind: Kind = "update" if step.per_update else "source" if step.source else "group"
        if not step.per_update:
            version = self._version(step, firing.index, replica)
        elif step.groups:
            self._consume(firing.index, command.groups)
        if isinstance(seconds, int | float):
            self._take(seconds, kind, replica, firing.node, firing.index, version)
            self._done(firing, replica, seconds)
        else:
            self._begun[firing] = _Begun(self.now, kind, version)
            name = self._owners[id(seconds)]
            if (engine := self._engines.get((name, replica))) is None:
                engine = self._engines[name, replica] = seconds.engine()
            engine.begin(firing, self.now)
            self._watch(name, replica, engine)

    def _version(self, step: Step, ordinal: int, replica: str) -> int | None:
        """The oldest live weights that a per-group step reads; noted as what its group is made with."""
        channels = (*(channel for channel, _ in step.weights), *step.fixed)
        version = min((self.scheduler.live(channel, replica) for channel in channels), default=None)
        if version is not None:
            self._versions[ordinal] = min(version, self._versions.get(ordinal, version))
        return version

    def _consume(self, update: int, groups: tuple[int, ...]) -> None:
        """The first step of an update that takes its groups: note how old they are, and how many are waiting."""
        if len(self.result.queue) <= update - self.scheduler.rules.start:
            self.result.queue.append(self.scheduler.ledger.finished)
            self.result.lags.update(update - self._versions.pop(g) for g in groups if g in self._versions)

    def _watch(self, node: str, replica: str, engine: Engine) -> None:
        """Be called when something is due in an engine."""
        alarm = self._alarms[node, replica] = _Alarm(node, replica)
        if engine.due < inf:
            self._asked += 1
            heapq.heappush(self._answers, (engine.due, self._asked, alarm))

    def _done(self, firing: Firing, replica: str, seconds: float) -> None:
        step = self.tables.steps[firing.node]
        dropped = step.filters and self.verdicts.dropped(firing)
        again = step.answers and self.verdicts.goes_on(firing)
        self._answer(seconds, replica, lambda rank: Done(firing, replica, rank, dropped, again))

    def _take(self, seconds: float, kind: Kind, lane: str, name: str, index: int, version: int | None = None) -> None:
        if seconds > 0 or kind == "update":
            self._bar(lane, name, index, self.now, self.now + seconds, kind, version)

    def _bar(self, lane: str, name: str, index: int, start: float, end: float, kind: Kind, version: int | None) -> None:
        self.result.bars.append(Bar(lane, name, index, start, end, kind, version))

    def _answer(self, seconds: float, replica: str, event: Callable[[int], Event]) -> None:
        for rank in range(len(self.tables.replicas[replica].ranks)):
            self._asked += 1
            heapq.heappush(self._answers, (self.now + seconds, self._asked, event(rank)))
