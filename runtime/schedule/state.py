"""What the scheduler knows of a run, and the few moves that every rule is made of.

`admission` and `transitions` read this state and move it; they own none of their own.

Which prompt group has which fate, in what order groups are consumed, and how many stand before one.

Invariants:
- each ordinal below `next` has exactly one fate: pending, consumed, dropped or failed; all but pending are final;
- groups are consumed in ordinal order, `batch` by `batch`, lost (dropped, failed) ones skipped;
- `before(g)` counts the ordinals below g that are not known to be lost.
"""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.graph.ir import Firing
from penstock.runtime.cluster.placement import Replica
from penstock.runtime.schedule.channel import Line, Way
from penstock.runtime.schedule.compile import NodeStep, Rules, Tables
from penstock.runtime.schedule.events import Checkpoint, Command, Finish, Fire, Free


@dataclass(slots=True)
class Talk:
    """A group's way through a bounded cycle: the turn that is due or in work, and where what was made is."""

    turn: int = 0
    made: dict[Firing, str] = field(default_factory=dict)


@dataclass(slots=True)
class GroupState:
    """A pending group: the steps done with the replica that holds each output, and the readers still to come.

    `working` firings are in work on it; `finished` when it has been through every step. `talks`: for each step that
    begins a bounded cycle, what its turns have made so far.
    """

    ordinal: int
    made: dict[str, str] = field(default_factory=dict)
    readers: dict[str, int] = field(default_factory=dict)
    working: int = 0
    finished: bool = False
    talks: dict[str, "Talk"] = field(default_factory=dict)


class Ledger:
    """`finished` counts the pending groups that are finished. `lost` holds the lost ordinals above the last consumed
    one: all below that are final, and only counted. `retried` counts the firings that failed and were tried again.

    `earlier` groups were consumed by updates whose ordinals are none of this ledger's: an evaluation of version 30 has
    its own ordinals from 0, and its update is the one after 30.
    """

    def __init__(self, earlier: int = 0) -> None:
        self.earlier = earlier
        self.groups: dict[int, GroupState] = {}
        self.leaving: dict[int, GroupState] = {}
        self.lost: list[int] = []
        self.fates = {"consumed": 0, "dropped": 0, "failed": 0}
        self.retried = 0
        self.finished = 0
        self.next = 0
        self._walked = 0
        self._line: deque[int] = deque()

    @property
    def first(self) -> int:
        """The lowest pending ordinal; `next` if none is pending."""
        return next(iter(self.groups), self.next)

    def open(self) -> GroupState:
        """The group of the next ordinal."""
        group = self.groups[self.next] = GroupState(self.next)
        self.next += 1
        return group

    def find(self, ordinal: int) -> GroupState:
        """A group in work: pending, or leaving."""
        return self.groups.get(ordinal) or self.leaving[ordinal]

    def before(self, ordinal: int) -> int:
        """How many groups not known to be lost stand before `ordinal`, which is past the last consumed group."""
        settled = self.fates["dropped"] + self.fates["failed"] - len(self.lost)
        return self.earlier + ordinal - settled - bisect_left(self.lost, ordinal)

    def lose(self, ordinal: int, fate: str) -> GroupState:
        """Give a group its final fate "dropped" or "failed". It is `leaving` while firings are in work on it."""
        insort(self.lost, ordinal)
        self.fates[fate] += 1
        group = self.groups.pop(ordinal)
        self.finished -= group.finished
        if group.working:
            self.leaving[ordinal] = group
        return group

    def finish(self, group: GroupState) -> None:
        """It has been through every step."""
        group.finished = True
        self.finished += 1

    def take(self, batch: int) -> tuple[int, ...] | None:
        """The next `batch` kept ordinals, in order, once all of them are finished."""
        while self._walked < self.next and len(self._line) < batch:
            group = self.groups.get(self._walked)
            if group is not None and not group.finished:
                break
            if group is not None:
                self._line.append(self._walked)
            self._walked += 1
        if len(self._line) < batch:
            return None
        return tuple(self._line.popleft() for _ in range(batch))

    def consume(self, ordinals: tuple[int, ...]) -> list[GroupState]:
        """Give the groups of a batch that was taken their final fate."""
        self.fates["consumed"] += len(ordinals)
        self.finished -= len(ordinals)
        del self.lost[: bisect_left(self.lost, ordinals[-1])]
        return [self.groups.pop(g) for g in ordinals]

    def to_json(self) -> dict[str, Any]:
        """All that a resume needs; a batch that was taken and not consumed is pending in it."""
        return {
            "earlier": self.earlier,
            "next": self.next,
            "lost": list(self.lost),
            "fates": dict(self.fates),
            **({"retried": self.retried} if self.retried else {}),  # logs of versions that did not count replay, too
            "groups": [[g.ordinal, dict(g.made), dict(g.readers)] for g in self.groups.values()],
        }

    def restore(self, cut: Mapping[str, Any]) -> None:
        """The inverse of `to_json`, on a new ledger."""
        self.earlier = cut["earlier"]
        self.next, self.lost, self.fates = cut["next"], list(cut["lost"]), dict(cut["fates"])
        self.retried = cut.get("retried", 0)
        for ordinal, made, readers in cut["groups"]:
            self.groups[ordinal] = GroupState(ordinal, dict(made), dict(readers))
        self._walked = self.first


Key = tuple[Any, ...]
"""What a rank was asked: ("fire", firing, replica), ("save", update, replica), or with "publish", "send" or "swap"
("publish", channel, version, replica)."""


class UnawaitedError(ValueError):
    """An answer that was not asked for, or came twice: a peer's fault. Nothing has changed."""


class State:
    """The state of one run of one graph.

    ready: for each step the ordinals that have all its inputs, as a heap; may hold lost ones.
    load: firings in work on each replica, sources not counted; `lines` has the replicas of each pool by their room.
    running: what is in work, and where.
    updates_done: for each per-update step the update that it is next to fire at; `update` is the one in work, on
    `batch`. Steps that trail have a pace of their own, the others move on together.
    between: the values that steps of this update made for later ones, and where they are.
    failed, dropped, again: firings in work that failed, whose verdict was to drop their group, or which asked for
    another turn, on some rank. drops, failures: groups that filters have dropped, and per-group firings that have
    failed, each try counted, since the last update. raised: what the last one raised. complete: the cut of the newest
    complete checkpoint.
    """

    def __init__(self, tables: Tables, rules: Rules, live: Mapping[tuple[str, str], int]) -> None:
        self.tables, self.rules = tables, rules
        self.ledger = Ledger(earlier=rules.start * rules.batch)
        self.ready: dict[str, list[int]] = {s: [] for s in tables.steps}
        self.load = dict.fromkeys(tables.replicas, 0)
        self.lines = {pool: Line(replicas) for pool, replicas in tables.by_pool.items()}
        self.updates_done = {s.name: rules.start for s in tables.steps.values() if s.per_update and not s.trails}
        self.trailing = {s.name: s.due(rules.start) for s in tables.steps.values() if s.trails}
        self.drops = self.failures = 0
        self.raised = ""
        self.update = rules.start
        self.batch: tuple[int, ...] | None = None
        self.between: dict[Firing, str] = {}
        self.running: dict[Firing, str] = {}
        self.failed: set[Firing] = set()
        self.dropped: set[Firing] = set()
        self.again: set[Firing] = set()
        self.tries: dict[Firing, int] = {}
        self.ways = {
            name: Way(channel.replicas, {replica: version for (n, replica), version in live.items() if n == name})
            for name, channel in tables.channels.items()
        }
        for replica in tables.replicas:
            self.sort(replica)
        self.cutting: Checkpoint | None = None
        self.saving = ""
        self.complete: Mapping[str, Any] | None = None
        self.finished = False
        self.answers: dict[Key, set[int]] = {}
        self.out: list[Command] = []
        self._freed: dict[str, list[Firing]] = defaultdict(list)
        self._passed = dict.fromkeys(tables.steps, 0)

    # Asking and answering ---------------------------------------------------------------------------------

    def ask(self, command: Command, key: Key, replica: str) -> None:
        """Say a command that every rank of `replica` will answer."""
        self.answers[key] = set(range(len(self.tables.replicas[replica].ranks)))
        self.out.append(command)

    def answered(self, key: Key, rank: int) -> bool:
        """Note a rank's answer; true when it was the last one awaited. Raises ValueError if nobody awaits it."""
        ranks = self.answers.get(key)
        if ranks is None or rank not in ranks:
            raise UnawaitedError(f"scheduler: an answer that nobody awaits: {key}, rank {rank}")
        ranks.remove(rank)
        if ranks:
            return False
        del self.answers[key]
        return True

    def fire(
        self, firing: Firing, replica: str, groups: tuple[int, ...] = (), *, free: bool = False, update: int = 0
    ) -> None:
        """Start a firing; one that is `free` of charge takes no room."""
        self.running[firing] = replica
        if not free:
            self.weigh(replica, 1)
        self.ask(Fire(firing, replica, groups, update), ("fire", firing, replica), replica)

    def weigh(self, replica: str, firings: int) -> None:
        """So many firings more are in work on a replica."""
        self.load[replica] += firings
        self.lines[self.tables.pool_of[replica]].load(replica, firings)

    def sort(self, replica: str) -> None:
        """The live weights of a replica have changed, or are about to: so has what it may work on."""
        ways = [way.receivers[replica] for way in self.ways.values() if replica in way.receivers]
        kind = tuple((receiver.live, receiver.swapping) for receiver in ways)
        self.lines[self.tables.pool_of[replica]].move(replica, kind)

    def free(self, firing: Firing, replica: str) -> None:
        """The outputs of a firing have no reader left; said by `say_freed`."""
        self._freed[replica].append(firing)

    def say_freed(self) -> None:
        """Say what is freed, ahead of what follows from the event: a retry must not be freed with its failed try."""
        for replica, firings in self._freed.items():
            self.out.append(Free(tuple(firings), replica))
        self._freed.clear()

    def finish(self, status: str, error: str = "") -> None:
        self.finished = True
        self.say_freed()
        self.out.append(Finish(status, error))

    # Looking ----------------------------------------------------------------------------------------------

    @property
    def pinned(self) -> bool:
        return self.rules.versions == "pinned"

    @property
    def stopping(self) -> bool:
        """Will the run end with the next cut?"""
        return self.cutting is not None and self.cutting.final

    @property
    def total(self) -> int:
        """How many groups are consumed by the end."""
        return self.rules.end * self.rules.batch

    def room(self, replica: Replica) -> int:
        return replica.capacity - self.load[replica.name]

    def live(self, channel: str, replica: str) -> int:
        return self.ways[channel].receivers[replica].live

    def has_fixed(self, step: NodeStep, replica: str) -> bool:
        """Are the values that never change, and that `step` reads over channels, there as the run found them?"""
        return all(self.live(channel, replica) >= self.rules.start for channel in step.fixed)

    def version(self, carried: str) -> int:
        """How many updates have been applied to a carried value; one that never changes is as the run found it."""
        maker = self.tables.makers.get(carried)
        return self.rules.start if maker is None else self.updates_done[maker]

    def over(self, name: str) -> bool:
        """Is a per-update step done with the current update, or does it not take part in it?"""
        return self.updates_done[name] > self.update or self.tables.steps[name].due(self.update) > self.update

    def next_update(self, step: NodeStep) -> int:
        """The update that a per-update step is next to fire at."""
        return self.trailing[step.name] if step.trails else step.due(self.updates_done[step.name])

    def firing(self, step: NodeStep, ordinal: int) -> Firing:
        """The next firing of a per-group step for a pending group, or the one in work."""
        talk = self.ledger.groups[ordinal].talks.get(step.partner if step.answers else step.name)
        return Firing(step.name, ordinal, talk.turn if talk else 0)

    def slot(self, ordinal: int) -> int:
        """The update that a group is for, as far as can be known: groups before it may still be dropped."""
        return self.ledger.before(ordinal) // self.rules.batch

    def begun(self) -> bool:
        """Has the current update fired any of its steps?"""
        done = any(count > self.update for count in self.updates_done.values())
        return done or any(f.node in self.updates_done for f in self.running)

    def first_unfired(self, step: NodeStep) -> int:
        """The lowest ordinal that has not been through `step` nor is in work there."""
        name, ordinal = step.name, max(self._passed[step.name], self.ledger.first)
        while ordinal < self.ledger.next:
            group = self.ledger.groups.get(ordinal)
            waits = group is not None and name not in group.made
            if waits and (step.turns or Firing(name, ordinal) not in self.running):
                break
            ordinal += 1
        self._passed[name] = ordinal
        return ordinal

    def unfire(self, firing: Firing) -> None:
        """A per-group firing failed and will be tried again."""
        self._passed[firing.node] = min(self._passed[firing.node], firing.index)

    def idle(self, step: NodeStep) -> bool:
        """Is no firing of `step` in work?"""
        return not any(f.node == step.name for f in self.running)
