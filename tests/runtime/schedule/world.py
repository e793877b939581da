"""A scheduler with fake ranks that answer in any order, fail, drop groups and are stopped, under the checker."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from msgspec import structs

from penstock.graph.ir import Firing, Graph
from penstock.runtime.cluster.placement import Plan
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import (
    Answer,
    Begin,
    Checkpoint,
    Command,
    Commit,
    Copied,
    Done,
    Event,
    Failed,
    Finish,
    Fire,
    Free,
    Publish,
    Question,
    ReplicaJoined,
    ReplicaLost,
    Save,
    Saved,
    Unread,
    answer,
)
from penstock.runtime.schedule.idle_causes import States, cause
from penstock.runtime.schedule.scheduler import Scheduler
from penstock.runtime.schedule.transitions import end_updates

from .checker import Checker, Lineage
from .graphs import place


@dataclass(frozen=True)
class Setting:
    """What is run, and how its ranks behave.

    `fails`, `drops`, `again` and `pauses` map nodes to probabilities; a group's verdict is the same in every life.
    Answers that name something in `slow` (a node, replica or channel) come late. `loses` is the probability that a
    replica is lost instead of an answer, if the rules allow it; an update may then be unable to read its values.
    """

    graph: Graph
    plan: Plan
    rules: Rules
    fails: Mapping[str, float] = field(default_factory=dict)
    drops: Mapping[str, float] = field(default_factory=dict)
    slow: frozenset[str] = frozenset()
    again: Mapping[str, float] = field(default_factory=dict)
    pauses: Mapping[str, float] = field(default_factory=dict)
    loses: float = 0.0


class World:
    """One scheduler with its ranks. `heard` are the events so far, `told` the commands after each event, and `pending`
    the answers to come."""

    def __init__(
        self,
        setting: Setting,
        cut: Mapping[str, Any] | None = None,
        lineage: Lineage | None = None,
        live: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        self.setting, self.cut, self.live, self.lineage = setting, cut, live, lineage
        self.tables = Tables(setting.graph, setting.plan)
        rules = replace(setting.rules, start=cut["update"] if cut else setting.rules.start)
        self.scheduler = Scheduler(self.tables, rules, cut, live, cut or {})
        self.checker = Checker(setting.graph, setting.plan, setting.rules, lineage, live)
        self.pending: list[Answer | Copied] = []
        self.heard: list[Event] = []
        self.told: list[list[Command]] = []
        self.blind: set[Firing] = set()
        self.finish: Finish | None = None
        self.commit: Commit | None = None
        self.states, self.idle = States(self.scheduler), dict[str, str]()
        self.feed(Begin())

    def feed(self, event: Event) -> list[Command]:
        """Handle an event; the answers that its commands ask for become `pending`."""
        commands = list(self.scheduler.handle(event))
        self.idle |= self.states.changed()
        loads = self.scheduler.load.items()
        assert self.idle == {name: "busy" if load else cause(self.scheduler, name) for name, load in loads}
        self.heard.append(event)
        self.told.append(commands)
        self.checker.see(event, commands)
        self._settled(event)
        for command in commands:
            if isinstance(command, Finish):
                self.finish = command
            elif isinstance(command, Commit):
                self.commit = command
            elif isinstance(command, Question):
                ranks = range(len(self.tables.replicas[command.replica].ranks))
                for rank in ranks:
                    if isinstance(command, Save):
                        self.pending.append(Copied(command.update, command.replica, rank))
                    self.pending.append(answer(command, rank))
        return commands

    def _settled(self, event: Event) -> None:
        """After some events the scheduler looks at only a part of its state: a full pass must find nothing more."""
        state = self.scheduler
        if not state.ended:
            before, state.out = (state.update, state.taken, state.ledger.next), []
            end_updates(state)
            state.say_freed()
            state._dispatch()
            assert not state.out, f"{event} left to be done: {state.out}"
            assert (state.update, state.taken, state.ledger.next) == before, f"{event} left an update or groups"

    # What ranks do ----------------------------------------------------------------------------------------

    def step(self, event: Answer | Copied | None = None) -> list[Command]:
        """Let a rank answer (by default the first question), with the verdict of its group."""
        event = event or self.pending[0]
        self.pending.remove(event)
        # A rank that has written its part at once does not report the copy.
        if isinstance(event, Saved) and (copied := Copied(event.update, event.replica, event.rank)) in self.pending:
            self.pending.remove(copied)
        if isinstance(event, Done) and event.firing in self.blind:
            said = Unread(event.firing, event.replica, event.rank, f"{event.firing} could not read a value")
            if not any(isinstance(one, Done) and one.firing == event.firing for one in self.pending):
                self.blind.remove(event.firing)
            return self.feed(said)
        if isinstance(event, Done):
            told, own = (self.setting.drops, self.setting.again, self.setting.pauses), Random(f"{event.firing}")
            dropped, again, paused = (own.random() < shares.get(event.firing.node, 0) for shares in told)
            paused = paused and event.firing.segment < 3
            event = structs.replace(event, dropped=dropped and not paused, again=again and not paused, paused=paused)
        return self.feed(event)

    def at(self, node: str, index: int, turn: int = 0) -> Done:
        """The pending answer of a firing's first rank that it is done."""
        firing = Firing(node, index, turn)
        return next(event for event in self.pending if isinstance(event, Done) and event.firing == firing)

    @property
    def losable(self) -> list[str]:
        """The present replicas that may be lost."""
        if self.setting.rules.lost_replica == "stop":
            return []
        pools = [pool for pool, why in self.tables.fixed_pools.items() if not why]
        return [r.name for pool in pools for r in self.scheduler.present[pool]]

    def lose(self, replica: str) -> list[Command]:
        """A replica dies; its pending answers never come."""
        self.pending = [event for event in self.pending if event.replica != replica]
        return self.feed(ReplicaLost(replica, "killed"))

    def unreadable(self) -> list[Firing]:
        """The firings of updates that may find a value gone, and that no rank has answered yet."""
        if not self.scheduler.lacking:
            return []
        own, found = self.tables, []
        for firing, replica in self.scheduler.running.items():
            step, ranks = own.steps[firing.node], len(own.replicas[replica].ranks)
            left = sum(isinstance(event, Done) and event.firing == firing for event in self.pending)
            if step.per_update and step.groups and left == ranks:
                found.append(firing)
        return found

    def join(self, replica: str) -> list[Command]:
        return self.feed(ReplicaJoined(replica))

    def drop(self, event: Done) -> list[Command]:
        """Let a rank drop its group."""
        self.pending.remove(event)
        return self.feed(structs.replace(event, dropped=True))

    def fail(self, event: Done) -> list[Command]:
        """Let a rank say that its firing raised."""
        self.pending.remove(event)
        return self.feed(Failed(event.firing, event.replica, event.rank, f"{event.firing} raised"))

    def run(self, rng: Random, steps: int = 10**6) -> None:
        """Answer in random order to the end, or `steps` times; answers may be late, fail, or drop their groups."""
        while self.finish is None and steps:
            steps -= 1
            if self.losable and rng.random() < self.setting.loses:
                self.lose(rng.choice(self.losable))
                continue
            if (absent := sorted(self.scheduler.absent)) and (not self.pending or rng.random() < 0.1):
                self.join(rng.choice(absent))
                continue
            quick = [event for event in self.pending if not self.setting.slow & _names(event)]
            event = rng.choice(quick if quick and rng.random() < 0.97 else self.pending)
            if (firings := self.unreadable()) and rng.random() < 0.3:
                self.blind.add(rng.choice(firings))
            if isinstance(event, Done) and rng.random() < self.setting.fails.get(event.firing.node, 0):
                self.fail(event)
            else:
                self.step(event)

    def until(self, until: Callable[[Command], bool], but: Sequence[str] = ()) -> Command:
        """Answer in order, holding back answers that contain one of `but`, until a command; return it."""
        while True:
            event = next(event for event in self.pending if not any(name in str(event) for name in but))
            if found := [command for command in self.step(event) if until(command)]:
                return found[0]

    def until_fired(self, node: str, index: int, turn: int = 0, but: Sequence[str] = ()) -> Done:
        """Answer likewise until a firing is asked for; return its pending answer."""
        self.until(lambda command: isinstance(command, Fire) and command.firing == Firing(node, index, turn), but)
        return self.at(node, index, turn)

    def exhaust(self, but: str) -> None:
        """Answer in order until all pending answers contain `but`."""
        while others := [event for event in self.pending if but not in str(event)]:
            self.step(others[0])

    def end(self, status: str = "done", rng: Random | None = None) -> Finish:
        """Answer to the end, and check its status."""
        self.run(rng or Random(0))
        assert self.finish is not None
        assert self.finish.status == status, self.finish
        return self.finish

    def stop(self, but: Sequence[str] = ()) -> "World":
        """End the run by a final checkpoint, and return the one that resumes from it."""
        self.feed(Checkpoint(final=True))
        if self.commit is None:
            self.until(lambda command: isinstance(command, Commit), but)
        assert self.finish == Finish("stopped")
        return self.resumed()

    def resumed(self) -> "World":
        """Return a new world from the last committed cut, through JSON; without a cut, begin as this one did."""
        if self.commit is None:
            return World(self.setting, self.cut, self.lineage)
        return World(self.setting, json.loads(self.commit.state), self.checker.committed)

    # What was said ----------------------------------------------------------------------------------------

    def fired(self, node: str) -> list[Fire]:
        return [c for told in self.told for c in told if isinstance(c, Fire) and c.firing.node == node]

    def indices(self, node: str) -> list[int]:
        return [fire.firing.index for fire in self.fired(node)]

    def batches(self, node: str = "update") -> list[tuple[int, ...]]:
        return [fire.groups for fire in self.fired(node)]

    def published(self, channel: str) -> list[int]:
        """The versions that a channel was told to publish."""
        return [c.version for told in self.told for c in told if isinstance(c, Publish) and c.channel == channel]

    def versions(self, node: str = "generate") -> dict[int, int]:
        """The version with which each group was started."""
        return {ordinal: v for (ordinal, name, *_), v in self.checker.books.versions.items() if name == node}

    @property
    def outcomes(self) -> dict[str, int]:
        return self.scheduler.ledger.outcomes


def freed(told: Sequence[Command]) -> set[Firing]:
    return {firing for command in told if isinstance(command, Free) for firing in command.firings}


def _names(event: Event) -> set[str]:
    names = {getattr(event, name, "") for name in ("replica", "channel")}
    return names | {event.firing.node} if isinstance(event, Done) else names


def world(
    graph: Graph,
    rules: Rules,
    replicas: int = 1,
    capacity: int = 4,
    ranks: int = 1,
    **verdicts: Mapping[str, float],
) -> World:
    """A world with this many replicas of the generator and of the pool of an environment."""
    plan = place(graph, {"generator": replicas, "environment": replicas}, {"generator": capacity}, ranks)
    return World(Setting(graph, plan, rules, **verdicts))  # type: ignore[arg-type]
