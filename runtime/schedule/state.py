"""What the scheduler knows of a run, and the few moves that every rule is made of.

`admission` and `transitions` read this state and move it; they own none of their own. `Ledger` has the outcome of each
prompt group, the order in which groups are consumed, and how many stand before one.

Invariants:
- each ordinal below `next` has exactly one outcome: pending, consumed, dropped or failed; all but pending are final;
- groups are consumed in ordinal order, `batch` by `batch`, lost (dropped, failed) ones skipped; with `order="ready"`
  as they finish, each at its deadline at the latest;
- `before(g)` counts the ordinals below g that are not known to be lost.
"""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any

from penstock.graph.ir import Firing
from penstock.runtime.cluster.placement import Replica
from penstock.runtime.schedule.channel import ChannelState, LeastLoadedQueue
from penstock.runtime.schedule.compile import NodeStep, Rules, Tables
from penstock.runtime.schedule.events import (
    Answer,
    Checkpoint,
    Command,
    Finish,
    Fire,
    Free,
    Question,
    answer,
    first_answer,
    ranks_of,
)


@dataclass(slots=True)
class TurnState:
    """A group in a bounded cycle: the turn that is due or in work, and the replica that holds each output so far."""

    turn: int = 0
    made: dict[Firing, str] = field(default_factory=dict)


@dataclass(slots=True)
class GroupState:
    """A pending group.

    made: the steps that it has been through, each with the replica that holds its output.
    readers: for each of them, how many readers are still to come.
    working: firings in work on the group. finished: it has been through every step.
    turns: what its turns have made so far, for each step that begins a bounded cycle. paused: by step, the segment that
    it goes on with, and the replica that holds what there is of it so far. again: a replica that held a value of it is
    lost: it begins again when nothing is in work on it.
    With `order="ready"`, once it has read weights: `place`, how many groups stood before it then, and by step the last
    update at which the weights that it began with are not too old.
    """

    ordinal: int
    made: dict[str, str] = field(default_factory=dict)
    readers: dict[str, int] = field(default_factory=dict)
    working: int = 0
    finished: bool = False
    turns: dict[str, TurnState] = field(default_factory=dict)
    paused: dict[str, tuple[Firing, str]] = field(default_factory=dict)
    again: bool = False
    place: int | None = None
    deadlines: dict[str, int] = field(default_factory=dict)


class Ledger:
    """The groups of a run and their outcomes.

    groups: the pending ones, by ordinal. leaving: lost ones with firings still in work. finished: how many pending
    groups are finished. lost: the lost ordinals above the last consumed one. outcomes: how many groups have each final
    outcome. retried: how many firings failed and were tried again. next: the ordinal of the group to open next.

    `earlier` groups were consumed by updates whose ordinals are none of this ledger's: an evaluation of version 30 has
    its own ordinals from 0, and its update is the one after 30.
    """

    def __init__(self, earlier: int = 0) -> None:
        self.earlier = earlier
        self.groups: dict[int, GroupState] = {}
        self.leaving: dict[int, GroupState] = {}
        self.lost: list[int] = []
        self.outcomes = {"consumed": 0, "dropped": 0, "failed": 0}
        self.retried = 0
        self.finished = 0
        self.next = 0
        # `take` goes through the ordinals once: those below `_walked` are lost, or in `_kept` until a batch has them.
        self._walked = 0
        self._kept: deque[int] = deque()

    @property
    def first(self) -> int:
        """The lowest pending ordinal; `next` if none is pending."""
        return next(iter(self.groups), self.next)

    def open(self) -> GroupState:
        """Open the group of the next ordinal."""
        group = self.groups[self.next] = GroupState(self.next)
        self.next += 1
        return group

    def find(self, ordinal: int) -> GroupState:
        """A group in work: pending, or leaving."""
        return self.groups.get(ordinal) or self.leaving[ordinal]

    def before(self, ordinal: int) -> int:
        """How many groups not known to be lost stand before `ordinal`, which is past the last consumed group."""
        # Lost ordinals below the last consumed one are in no list any more: only their number is known.
        passed = self.outcomes["dropped"] + self.outcomes["failed"] - len(self.lost)
        return self.earlier + ordinal - passed - bisect_left(self.lost, ordinal)

    def lose(self, ordinal: int, outcome: str) -> GroupState:
        """Give a group the final outcome "dropped" or "failed"."""
        insort(self.lost, ordinal)
        self.outcomes[outcome] += 1
        group = self.groups.pop(ordinal)
        self.finished -= group.finished
        if ordinal in self._kept:  # it had been finished before it began again
            self._kept.remove(ordinal)
        if group.working:
            self.leaving[ordinal] = group
        return group

    def finish(self, group: GroupState) -> None:
        """Note that a group has been through every step."""
        group.finished = True
        self.finished += 1

    def take(self, batch: int) -> tuple[int, ...] | None:
        """The next `batch` kept ordinals, in order, once all of them are finished."""
        while self._walked < self.next and len(self._kept) < batch:
            group = self.groups.get(self._walked)
            if group is not None and not group.finished:
                break
            if group is not None:
                self._kept.append(self._walked)
            self._walked += 1
        if len(self._kept) < batch or not all(self.groups[g].finished for g in islice(self._kept, batch)):
            return None
        return tuple(self._kept.popleft() for _ in range(batch))

    def give_back(self, ordinals: tuple[int, ...]) -> None:
        """The inverse of `take`, of the groups that were taken last."""
        self._kept.extendleft(reversed(ordinals))

    def take_ready(
        self,
        count: int,
        batch: int,
        update: int,
        deadline: Callable[[GroupState], int],
        before: tuple[int, ...],
    ) -> tuple[int, ...] | None:
        """`count` finished ordinals for `update`, beside those that it took `before`: those of the earliest deadlines,
        once all that is left can still be consumed in time. So of groups with a deadline up to update + k there are at
        most k batches, and what this one has room for yet.

        A deadline is the last update that may consume a group. Earliest deadline first is in time if any order is.
        """
        if self.finished - len(before) < count:
            return None
        order = sorted((deadline(group), ordinal) for ordinal, group in self.groups.items() if ordinal not in before)
        taken = [ordinal for _, ordinal in order if self.groups[ordinal].finished][:count]
        left = [last for last, ordinal in order if ordinal not in taken]
        full = len(before) + count
        if any(last < update + (full + place) // batch for place, last in enumerate(left)):
            return None
        return tuple(sorted(taken))

    def consume(self, ordinals: tuple[int, ...]) -> list[GroupState]:
        """Give the groups of a batch that was taken their final outcome."""
        self.outcomes["consumed"] += len(ordinals)
        self.finished -= len(ordinals)
        groups = [self.groups.pop(g) for g in ordinals]
        # Those below a pending group are counted for it.
        del self.lost[: bisect_left(self.lost, min(max(ordinals), self.first))]
        return groups

    def to_json(self) -> dict[str, Any]:
        """All that a resume needs; a batch that was taken and not consumed is pending in it."""
        return {
            "earlier": self.earlier,
            "next": self.next,
            "lost": list(self.lost),
            "fates": dict(self.outcomes),
            # Left out while it is 0: the states of versions that did not count retries must compare equal in a replay.
            **({"retried": self.retried} if self.retried else {}),
            "groups": [_group_to_json(group) for group in self.groups.values()],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """The inverse of `to_json`, on a new ledger."""
        self.earlier, self.next = saved["earlier"], saved["next"]
        self.lost, self.outcomes = list(saved["lost"]), dict(saved["fates"])
        self.retried = saved.get("retried", 0)
        for ordinal, made, readers, *read in saved["groups"]:
            group = self.groups[ordinal] = GroupState(ordinal, dict(made), dict(readers))
            if read:
                group.place, group.deadlines = read[0]["place"], dict(read[0]["deadlines"])
        self._walked = self.first


def _group_to_json(group: GroupState) -> list[Any]:
    """What is made of a group that begins again is left out."""
    if group.again:
        return [group.ordinal, {}, {}]
    return [group.ordinal, dict(group.made), dict(group.readers), *_deadlines(group)]


def _deadlines(group: GroupState) -> list[dict[str, Any]]:
    """What a resume needs of a group that has read weights, in order "ready". What is in work begins again."""
    made = {name: last for name, last in group.deadlines.items() if name in group.made}
    return [{"place": group.place, "deadlines": made}] if made else []


class UnawaitedError(ValueError):
    """An answer that was not asked for, or came twice: a peer's fault. Nothing has changed."""


class State:
    """The state of one run of one graph.

    ready: for each step the ordinals that have all its inputs, as a heap; may hold lost ones.
    load: firings in work on each replica, sources not counted. queues: the replicas of each pool by their room.
    channels: the state of each weight channel.
    running: what is in work, and on which replica.
    lacking: groups that the update in work was given, and of which a value was lost with its replica since. unread: the
    steps of it that could not read such a value, with what they said; they wait. remaking: of the groups that it has
    taken, those that begin again while it goes on.
    update: the update that is due or in work. taken: the groups that it has so far, in the order in which they are
    finished and taken: its whole batch at once, unless a step accumulates.
    done: the steps on the critical path that this update is done with. parts: of those that accumulate and are not
    done, how many parts are. off_path: for each step off it, the update that
    it fires at next.
    between: the values that steps of this update made for later ones, and where they are.
    verdicts: of firings in work, what some rank has said: "failed", "dropped", "again", "paused"; of an update's
    "done", "unread".
    tries: how often a firing in work has failed. raised: what the last failure raised.
    drops, failures: groups that filters have dropped, and per-group firings that have failed, each try counted, since
    the last update.
    checkpoint: the one that is due or being copied aside; a final one until it is written. copying: the ranks that are
    still to copy their parts. saving: the state that is being copied or written, as JSON. writing: the checkpoint that
    all ranks have copied and some still write. complete: the state of the newest complete checkpoint (see `Scheduler`).
    failing: why the run will have failed when what is being written is whole; "" if it goes on.
    answers: the ranks that are still to answer what was asked, by the `answer` of the first one.
    absent: replicas that are not there. lives: how often each has been lost. present: those that are there, by pool.
    touched: replicas whose load or weights have changed, or that came or went, since `idle_causes.States` looked.
    losses: replicas that were lost since the last update. spoiled: a part of what is being saved is lost.
    """

    def __init__(
        self,
        tables: Tables,
        rules: Rules,
        live: Mapping[tuple[str, str], int],
        absent: Collection[str] = (),
        lives: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.tables, self.rules = tables, rules
        self.pinned = rules.versions == "pinned"
        self.absent, self.lives = set(absent), {**dict.fromkeys(tables.replicas, 0), **lives}
        self.present = dict(tables.by_pool)
        self.losses, self.spoiled = 0, False
        # A group that begins again needs the version that it had: others may have newer ones.
        history = self.pinned and rules.lost_replica == "replace"
        # How many groups are consumed by the end.
        self.total = rules.end * rules.batch
        self.ledger = Ledger(earlier=rules.start * rules.batch)
        self.ready: dict[str, list[int]] = {s: [] for s in tables.steps}
        self.load = dict.fromkeys(tables.replicas, 0)
        self.touched = set(tables.replicas)
        self.queues = {pool: LeastLoadedQueue(replicas) for pool, replicas in tables.by_pool.items()}
        self.update = rules.start
        self.taken: tuple[int, ...] = ()
        self.lacking: set[int] = set()
        self.unread: dict[str, str] = {}
        self.remaking: set[int] = set()
        self.done: set[str] = set()
        self.parts: dict[str, int] = {}
        self.off_path = {s.name: s.due(rules.start) for s in tables.steps.values() if s.off_path}
        self.between: dict[Firing, str] = {}
        self.running: dict[Firing, str] = {}
        self.verdicts: defaultdict[Firing, set[str]] = defaultdict(set)
        self.tries: dict[Firing, int] = {}
        self.drops = self.failures = 0
        self.raised = ""
        self.channels = {
            name: ChannelState(
                channel.replicas,
                {replica: v for (n, replica), v in live.items() if n == name},
                self.absent,
                history and bool(tables.weight_readers[name]) and not tables.fixed_pools[channel.pool],
            )
            for name, channel in tables.channels.items()
        }
        for replica in tables.replicas:
            if replica in self.absent:
                self.count_present(replica)
                self.queues[tables.pool_of[replica]].remove(replica)
            else:
                self.sort(replica)
        self.checkpoint: Checkpoint | None = None
        self.copying: set[tuple[str, int]] = set()
        self.saving = ""
        self.writing: Checkpoint | None = None
        self.failing = ""
        self.complete: Mapping[str, Any] | None = None
        self.finished = False
        self.answers: dict[Answer, set[int]] = {}
        self.out: list[Command] = []
        # Of these commands those that are answered, each with its answer.
        self.asked: list[tuple[Answer, Question]] = []
        # For each step, an ordinal below which all groups have been through it; for `first_unfired`.
        self.passed = dict.fromkeys(tables.steps, 0)
        self._freed: dict[str, list[Firing]] = defaultdict(list)

    # Asking and answering ---------------------------------------------------------------------------------

    def ask(self, command: Question) -> None:
        """Say a command that every rank of its replica will answer."""
        key = answer(command)
        self.answers[key] = set(range(len(self.tables.replicas[command.replica].ranks)))
        self.asked.append((key, command))
        self.out.append(command)

    def answered(self, event: Answer) -> bool:
        """Note the answer of a rank, or of several; true when no other is awaited. Raises UnawaitedError if it is not
        awaited of one of them."""
        key, said = first_answer(event), ranks_of(event)
        ranks = self.answers.get(key)
        if ranks is None or not ranks.issuperset(said):
            raise UnawaitedError(f"scheduler: an answer that nobody awaits: {event}")
        ranks.difference_update(said)
        if ranks:
            return False
        del self.answers[key]
        return True

    def fire(self, step: NodeStep, firing: Firing, replica: str, groups: tuple[int, ...] = (), update: int = 0) -> None:
        """Start a firing of `step`. Sources take no room: they read ahead, beside what a replica works on."""
        self.running[firing] = replica
        if not step.source:
            self.weigh(replica, 1)
        self.ask(Fire(firing, replica, groups, update))

    def weigh(self, replica: str, firings: int) -> None:
        """Note that `firings` more are in work on a replica; less if negative."""
        self.load[replica] += firings
        self.touched.add(replica)
        self.queues[self.tables.pool_of[replica]].load(replica, firings)

    def count_present(self, replica: str) -> None:
        """Note that a replica has become present, or absent."""
        self.touched.add(replica)
        pool = self.tables.pool_of[replica]
        self.present[pool] = tuple(r for r in self.tables.by_pool[pool] if r.name not in self.absent)

    def sort(self, replica: str) -> None:
        """Note that the live weights of a replica have changed, or are about to: so has what it may work on."""
        self.touched.add(replica)
        receivers = [channel.receivers[replica] for channel in self.channels.values() if replica in channel.receivers]
        kind = tuple((receiver.live, receiver.swapping) for receiver in receivers)
        self.queues[self.tables.pool_of[replica]].move(replica, kind)

    def free(self, firing: Firing, replica: str) -> None:
        """Note that the outputs of a firing have no reader left; `say_freed` says it."""
        self._freed[replica].append(firing)

    def say_freed(self) -> None:
        # Ahead of what follows from the event: a retry must not be freed with the try that failed.
        for replica, firings in self._freed.items():
            self.out.append(Free(tuple(firings), replica))
        self._freed.clear()

    def fail(self, error: str) -> None:
        """End the run by a failure that leaves the ranks at work: a checkpoint that is being written becomes whole
        first."""
        if self.writing is None:
            self.finish("failed", error)
        else:
            self.failing = error

    def finish(self, status: str, error: str = "") -> None:
        """End the run."""
        self.finished = True
        self.say_freed()
        self.out.append(Finish(status, error))

    # Looking ----------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Does nothing new begin any more?"""
        return self.finished or bool(self.failing)

    @property
    def held(self) -> bool:
        """Is state being copied for a checkpoint, or the last one written?"""
        return bool(self.copying) or (self.writing is not None and self.writing.final)

    @property
    def stopping(self) -> bool:
        """Will the run end with the next checkpoint?"""
        return self.checkpoint is not None and self.checkpoint.final

    @property
    def whole(self) -> bool:
        """Has the current update all of its groups, and are they finished?"""
        return len(self.taken) == self.rules.batch and not self.remaking

    def room(self, replica: Replica) -> int:
        return replica.capacity - self.load[replica.name]

    def live(self, channel: str, replica: str) -> int:
        return self.channels[channel].receivers[replica].live

    def has_fixed(self, step: NodeStep, replica: str) -> bool:
        """Are the values that never change, and that `step` reads over channels, there as the run found them?"""
        return all(self.live(channel, replica) >= self.rules.start for channel in step.fixed)

    def version(self, carried: str) -> int:
        """How many updates are over for a carried value; one that never changes is as the run found it."""
        maker = self.tables.makers.get(carried)
        return self.rules.start if maker is None else self.update + (maker in self.done)

    def over(self, name: str) -> bool:
        """Is a step on the critical path done with the current update, or does it not take part in it?"""
        return name in self.done or self.tables.steps[name].due(self.update) > self.update

    def next_update(self, step: NodeStep) -> int:
        """The update that a per-update step fires at next, or is firing at."""
        return self.off_path[step.name] if step.off_path else step.due(self.update + (step.name in self.done))

    def num_parts(self, step: NodeStep) -> int:
        """How often a per-update step fires for one update."""
        return self.rules.batch // step.accumulate if step.accumulate else 1

    def donates(self, carried: str, version: int) -> bool:
        """Is the firing in work that gives a version's memory to the next one?"""
        return self.finishing(self.tables.makers[carried], version)

    def finishing(self, name: str, update: int) -> bool:
        """Is the last part of a per-update step for an update in work?"""
        return Firing(name, update, segment=self.num_parts(self.tables.steps[name]) - 1) in self.running

    def firing(self, step: NodeStep, ordinal: int) -> Firing:
        """The next firing of a per-group step for a pending group, or the one in work."""
        group = self.ledger.groups[ordinal]
        if step.name in group.paused:
            return group.paused[step.name][0]
        turns = group.turns.get(step.partner if step.answers else step.name)
        return Firing(step.name, ordinal, turns.turn if turns else 0)

    def place(self, ordinal: int) -> int:
        """How many groups not known to be lost stand before a pending one. With `order="ready"` the number stays once
        the group has read weights: fewer would ask for an earlier update, while others may have overtaken it."""
        place = self.ledger.groups[ordinal].place
        return self.ledger.before(ordinal) if place is None else place

    def deadline(self, group: GroupState) -> int:
        """The last update that may consume a group: for the weights that it has read, if no others are to come."""
        if len(group.deadlines) < self.tables.num_weighted:
            # One that others have overtaken, and that begins again after a resume, is for the update that is due.
            return max(self.update, self.place(group.ordinal) // self.rules.batch)
        return min(group.deadlines.values(), default=self.rules.end)

    def slot(self, ordinal: int) -> int:
        """The update that a group is for, as far as can be known: groups before it may still be dropped."""
        return self.ledger.before(ordinal) // self.rules.batch

    def begun(self) -> bool:
        """Is the current update at one of its steps, or past one? Between two parts of a step it is not: nothing has
        changed yet that a checkpoint has, and a run that resumes begins with the first part."""
        return bool(self.done) or any(f.node in self.tables.critical for f in self.running)

    def bound(self) -> bool:
        """Is the current update at the last part of one of its steps, or past one? A checkpoint that is asked for now
        is the one before the next update."""
        # A look at all that is in work would cost too much at each event: that may be thousands of firings.
        return bool(self.done) or any(self.finishing(name, self.update) for name in self.tables.critical)

    @property
    def short(self) -> bool:
        """Has the current update begun, and lost groups that are to be made again for it? What waits for its end, such
        as a checkpoint, waits for them. It need not wait for more than the part in work of a step that accumulates."""
        return self.tables.takes_groups and not self.whole and self.bound()

    def first_unfired(self, step: NodeStep) -> int:
        """The lowest ordinal that has not been through `step` nor is in work there."""
        name, ordinal = step.name, max(self.passed[step.name], self.ledger.first)
        while ordinal < self.ledger.next:
            group = self.ledger.groups.get(ordinal)
            waits = group is not None and name not in group.made
            if waits and (step.turns or self.firing(step, ordinal) not in self.running):
                break
            ordinal += 1
        self.passed[name] = ordinal
        return ordinal
