"""A world for the scheduler: ranks that answer in any order, fail, drop groups and are stopped, under the checker."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from msgspec import structs

from penstock.graph.ir import Firing, Graph
from penstock.runtime.cluster.placement import Plan
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import (
    Arrived,
    Begin,
    Command,
    Commit,
    Done,
    Event,
    Failed,
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
from penstock.runtime.schedule.transitions import end_updates

from .books import Lineage
from .invariants import Checker
from .random_graphs import random_graph, random_plan

Live = Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class Setting:
    """What is run, and how its ranks behave.

    `fails`, `drops` and `again` map nodes to probabilities; a group's verdict is the same in every life. Answers that
    name something in `slow` (a node, a replica or a channel) come late.
    """

    graph: Graph
    plan: Plan
    rules: Rules
    fails: Mapping[str, float]
    drops: Mapping[str, float]
    slow: frozenset[str] = frozenset()
    again: Mapping[str, float] = field(default_factory=dict)


class World:
    """One scheduler with its ranks. `heard` are the events so far, `told` the commands that followed each."""

    def __init__(
        self,
        setting: Setting,
        cut: Mapping[str, Any] | None = None,
        lineage: Lineage | None = None,
        live: Live | None = None,
    ) -> None:
        self.setting, self.cut, self.live, self.lineage = setting, cut, live, lineage
        self.tables = Tables(setting.graph, setting.plan)
        rules = replace(setting.rules, start=cut["update"] if cut else setting.rules.start)
        self.scheduler = Scheduler(self.tables, rules, cut, live, cut or {})
        self.checker = Checker(setting.graph, setting.plan, setting.rules, lineage, live)
        self.pending: list[Event] = []
        self.heard: list[Event] = []
        self.told: list[list[Command]] = []
        self.finish: Finish | None = None
        self.commit: Commit | None = None

    def feed(self, event: Event) -> list[Command]:
        """Give the scheduler an event; what its commands ask of ranks becomes `pending` answers."""
        commands = list(self.scheduler.handle(event))
        self.heard.append(event)
        self.told.append(commands)
        self.checker.see(event, commands)
        self._settled(event)
        for command in commands:
            match command:
                case Finish():
                    self.finish = command
                case Commit():
                    self.commit = command
                case Fire() | Publish() | Send() | Swap() | Save():
                    ranks = range(len(self.tables.replicas[command.replica].ranks))
                    self.pending += [_answer(command, rank) for rank in ranks]
        return commands

    def _settled(self, event: Event) -> None:
        """After some events the scheduler looks at a part of what there is: a look at everything finds nothing more."""
        state = self.scheduler
        if not state.finished:
            before, state.out = (state.update, state.batch, state.ledger.next), []
            end_updates(state)
            state.say_freed()
            state._dispatch()
            assert not state.out, f"{event} left to be done: {state.out}"
            assert (state.update, state.batch, state.ledger.next) == before, f"{event} left an update or groups"

    def step(self, index: int = 0) -> list[Command]:
        """Let the rank at `index` of the pending ones answer."""
        event = self.pending.pop(index)
        if isinstance(event, Done):
            drops, again = (shares.get(event.firing.node, 0) for shares in (self.setting.drops, self.setting.again))
            verdicts = Random(f"{event.firing}")
            event = structs.replace(event, dropped=verdicts.random() < drops, again=verdicts.random() < again)
        return self.feed(event)

    def find(self, node: str, index: int, turn: int = 0) -> int:
        """Which of the pending answers says that a firing is done; its first rank's."""
        firing = Firing(node, index, turn)
        return next(i for i, event in enumerate(self.pending) if isinstance(event, Done) and event.firing == firing)

    def drop(self, index: int) -> list[Command]:
        """Let the rank at `index` drop its group."""
        event = self.pending.pop(index)
        assert isinstance(event, Done)
        return self.feed(structs.replace(event, dropped=True))

    def random_answer(self, rng: Random) -> list[Command]:
        """Let any rank answer; it may fail, or drop its group."""
        quick = [i for i, event in enumerate(self.pending) if not self.setting.slow & _names(event)]
        hurry = quick and rng.random() < 0.97
        index = rng.choice(quick) if hurry else rng.randrange(len(self.pending))
        event = self.pending[index]
        if isinstance(event, Done) and rng.random() < self.setting.fails.get(event.firing.node, 0):
            return self.fail(index)
        return self.step(index)

    def fail(self, index: int) -> list[Command]:
        """Let the rank at `index` say that its firing raised."""
        event = self.pending.pop(index)
        assert isinstance(event, Done)
        return self.feed(Failed(event.firing, event.replica, event.rank, f"{event.firing} raised"))

    def run(self, rng: Random, steps: int = 10**6) -> None:
        """Answers in random order until the end, or for so many steps."""
        if not self.heard:
            self.feed(Begin())
        while self.finish is None and steps:
            self.random_answer(rng)
            steps -= 1

    def resumed(self) -> "World":
        """A new world from the last committed cut, through JSON, or as this one was begun if there is none."""
        if self.commit is None:
            return World(self.setting, self.cut, self.lineage)
        return World(self.setting, json.loads(self.commit.state), self.checker.committed)


def _answer(command: Fire | Publish | Send | Swap | Save, rank: int) -> Event:
    match command:
        case Fire(firing, replica):
            return Done(firing, replica, rank)
        case Publish(channel, version, replica):
            return Published(channel, version, replica, rank)
        case Send(channel, version, _, replica):
            return Arrived(channel, version, replica, rank)
        case Swap(channel, version, replica):
            return Swapped(channel, version, replica, rank)
        case Save(update, replica):
            return Saved(update, replica, rank)


def _names(event: Event) -> set[str]:
    names = {getattr(event, name, "") for name in ("replica", "channel")}
    return names | {event.firing.node} if isinstance(event, Done) else names


def random_setting(rng: Random) -> Setting:
    """Any graph, plan and rules the scheduler must cope with."""
    pinned = rng.random() < 0.35
    lags = [rng.choice([0, 1, 2, 4])] if pinned else [0, 1, 2, 3, 4]
    graph = random_graph(rng, lags, pinned)
    firing = [n for n in graph.nodes if n.fires and n.clock == "group"]
    fails = {n.name: rng.choice([0.05, 0.2]) for n in firing if not n.stateful and rng.random() < 0.3}
    filters = {n.name for n in firing if n.construct == "keep"}
    drops = {n.name: 0.3 for n in firing if n.name in filters or rng.random() < 0.15}
    exact = pinned or any(n.construct == "delay" for n in graph.nodes)
    rules = Rules(
        batch=rng.randint(1, 4),
        end=rng.randint(1, 9),
        versions="pinned" if pinned else "free",
        retries=rng.choice([0, 50]) if pinned else rng.choice([0, 1, 3]),
        on_failure="stop" if exact else rng.choice(["stop", "replace", "replace"]),
        drops=rng.choice([1, 2, 4, 16, 16, 16, 16, 16]),
        failures=rng.choice([1, 2, 4, 16, 16, 16]),
    )
    plan = random_plan(rng, graph)
    names = [*(n.name for n in graph.nodes), *(r.name for r in plan.replicas), "policy>generator", "critic>trainer"]
    slow = frozenset(rng.sample(names, rng.choice([0, 0, 1, 2])))
    again = {n.name: rng.choice([0.0, 0.5, 0.9, 1.0]) for n in firing if n.turns}
    return Setting(graph, plan, rules, fails if rng.random() < 0.5 else {}, {} if pinned else drops, slow, again)
