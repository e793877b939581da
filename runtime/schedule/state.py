"""The scheduler's state, and the few operations on it that every rule uses.

`admission` and `transitions` read and change this state; they have none of their own. `Ledger` has the outcome of each
prompt group, the order in which groups are consumed, and the number of groups before each.

Invariants:
- each ordinal below `next` has exactly one outcome: pending, consumed, dropped or failed; all but pending are final;
- groups are consumed in ordinal order, `batch` at a time, lost (dropped or failed) ones skipped; with `order="ready"`
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
    """The turns of a group in a bounded cycle: the turn that is due or in work, and the replica that holds each
    output so far."""

    turn: int = 0
    made: dict[Firing, str] = field(default_factory=dict)


@dataclass(slots=True)
class GroupState:
    """A pending group.

    made: the steps that are done, each with the replica that holds its output.
    readers: for each of them, how many readers are still to come.
    working: how many firings are in work on the group. finished: every step is done.
    turns: the outputs of its turns so far, for each step that begins a bounded cycle. paused: by step, the segment that
    comes next, and the replica that holds the output so far. again: a value of the group is lost, so the group begins
    again when nothing is in work on it.
    place, deadlines: with `order="ready"`, once the group has read weights: how many groups stood before it then, and
    by step the last update for which the weights that it began with are new enough.
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

    groups: the pending groups, by ordinal. leaving: lost groups with firings still in work. finished: how many pending
    groups are finished. lost: the lost ordinals above the last consumed one. outcomes: how many groups have each final
    outcome. retried: how many firings failed and were tried again. next: the ordinal of the group to open next.
    earlier: how many groups earlier updates consumed whose ordinals are not in this ledger. Example: an evaluation of
    version 30 has its own ordinals from 0, and its first update is 30.
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
        # `take` visits each ordinal once: those below `_walked` are lost, taken, or wait in `_kept` for a batch.
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
        """The group of this ordinal, pending or leaving."""
        return self.groups.get(ordinal) or self.leaving[ordinal]

    def before(self, ordinal: int) -> int:
        """How many groups before `ordinal` are not known to be lost. `ordinal` is past the last consumed group."""
        # Of lost ordinals below the last consumed one only the number is kept.
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
        """Note that every step of a group is done."""
        group.finished = True
        self.finished += 1

    def take(self, batch: int) -> tuple[int, ...] | None:
        """Take the next `batch` ordinals that are not lost, in order; None until all of them are finished."""
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
        """Undo `take` of the groups that were taken last."""
        self._kept.extendleft(reversed(ordinals))

    def take_ready(
        self,
        count: int,
        batch: int,
        update: int,
        deadline: Callable[[GroupState], int],
        before: tuple[int, ...],
    ) -> tuple[int, ...] | None:
        """Take `count` finished ordinals for `update`, which has taken the groups `before`: those with the earliest
        deadlines. None if too few are finished, or if a group that is left could then miss its deadline. So of the
        groups left, those with a deadline up to update + k fit into k batches and the free places of this update.

        A deadline is the last update that may consume a group. If any order meets all deadlines, earliest deadline
        first does.
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
        """Give the groups of a taken batch the final outcome "consumed"; return them."""
        self.outcomes["consumed"] += len(ordinals)
        self.finished -= len(ordinals)
        groups = [self.groups.pop(g) for g in ordinals]
        # Lost ordinals above a pending group stay listed: `before` of that group must not subtract them.
        del self.lost[: bisect_left(self.lost, min(max(ordinals), self.first))]
        return groups

    def to_json(self) -> dict[str, Any]:
        """All that a resume needs. Groups that were taken and not consumed are pending in it."""
        return {
            "earlier": self.earlier,
            "next": self.next,
            "lost": list(self.lost),
            "fates": dict(self.outcomes),
            # Left out while 0: in a replay it must equal the states that versions wrote which did not count retries.
            **({"retried": self.retried} if self.retried else {}),
            "groups": [
                [group.ordinal, {}, {}] if group.again else [group.ordinal, dict(group.made), dict(group.readers)]
                for group in self.groups.values()  # a group that begins again has no outputs
            ],
            **({"reading": reading} if (reading := self._reading()) else {}),
        }

    def _reading(self) -> dict[str, dict[str, Any]]:
        """By ordinal, what a resume needs of the groups that have read weights, in order "ready". Firings in work are
        left out: they begin again."""
        found = {}
        for group in self.groups.values():
            made = {name: last for name, last in group.deadlines.items() if name in group.made and not group.again}
            if made:
                found[str(group.ordinal)] = {"place": group.place, "deadlines": made}
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """The inverse of `to_json`, on a new ledger."""
        self.earlier, self.next = saved["earlier"], saved["next"]
        self.lost, self.outcomes = list(saved["lost"]), dict(saved["fates"])
        self.retried = saved.get("retried", 0)
        for ordinal, made, readers in saved["groups"]:
            self.groups[ordinal] = GroupState(ordinal, dict(made), dict(readers))
        for name, read in saved.get("reading", {}).items():
            group = self.groups[int(name)]
            group.place, group.deadlines = read["place"], dict(read["deadlines"])
        self._walked = self.first


class UnawaitedError(ValueError):
    """An answer that was not asked for, or came twice: a peer's fault. The state has not changed."""


class State:
    """The state of one run of one graph.

    ready: for each step a heap of the ordinals that have all its inputs; it may contain lost ones.
    load: how many firings are in work on each replica, sources not counted. queues: the replicas of each pool by free
    capacity. channels: the state of each weight channel.
    running: the firings in work, each with its replica.
    update: the update that is due or in work. taken: the groups that it has taken so far, in the order of taking: its
    whole batch at once, unless a step accumulates.
    lacking: groups that steps of this update were given, and of which a replica has lost a value since. unread: the
    steps that could not read such a value, each with its error; they wait. remaking: taken groups that are made again
    while the update goes on.
    done: the steps on the critical path that are done for this update. parts: for accumulating steps that are not done,
    how many parts are. off_path: for each step off the critical path, the update that it fires at next.
    between: the outputs of this update's steps for each other, each with its replica.
    verdicts: for each firing in work, what some rank has reported: "failed", "dropped", "again", "paused"; of an update
    "done", "unread".
    tries: how often a firing has failed so far. raised: the error of the last failure.
    drops, failures: since the last update, the groups that filters dropped, and the per-group firings that failed, each
    try counted.
    checkpoint: the checkpoint that is due or being copied; a final one until it is written. copying: the ranks that
    must still copy their parts. saving: the state that is being copied or written, as JSON. writing: the checkpoint
    that all ranks have copied and some still write. complete: the state of the newest complete checkpoint (see
    `Scheduler`). spoiled: a part of the checkpoint in progress is lost.
    failing: the error with which the run fails once the checkpoint in progress is written; "" if the run goes on.
    answers: for each command, the ranks that have not answered, keyed by the `answer` of rank 0.
    absent: the absent replicas. present: the others, by pool. lives: how often each was lost. losses: how many were
    lost since the last update.
    touched: replicas that joined or left, or whose load or weights changed, since `idle_causes.States` looked.
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
        # A group that begins again needs the version that it had; the present replicas may have newer ones.
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
        # The commands of `out` that ranks answer, each with its answer.
        self.asked: list[tuple[Answer, Question]] = []
        # For each step, an ordinal below which it is done or in work for all groups; for `first_unfired`.
        self.passed = dict.fromkeys(tables.steps, 0)
        self._freed: dict[str, list[Firing]] = defaultdict(list)

    # Asking and answering ---------------------------------------------------------------------------------

    def ask(self, command: Question) -> None:
        """Issue a command that every rank of its replica will answer."""
        key = answer(command)
        self.answers[key] = set(range(len(self.tables.replicas[command.replica].ranks)))
        self.asked.append((key, command))
        self.out.append(command)

    def answered(self, event: Answer) -> bool:
        """Note an answer of one rank or several. True when all ranks have answered. Raises UnawaitedError if no answer
        is awaited from one of them."""
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
        """Start a firing of `step`. Sources take no capacity: they read ahead while the replica does other work."""
        self.running[firing] = replica
        if not step.source:
            self.weigh(replica, 1)
        self.ask(Fire(firing, replica, groups, update))

    def weigh(self, replica: str, firings: int) -> None:
        """Note that `firings` more are in work on a replica; fewer if negative."""
        self.load[replica] += firings
        self.touched.add(replica)
        self.queues[self.tables.pool_of[replica]].load(replica, firings)

    def count_present(self, replica: str) -> None:
        """Note that a replica has joined or was lost."""
        self.touched.add(replica)
        pool = self.tables.pool_of[replica]
        self.present[pool] = tuple(r for r in self.tables.by_pool[pool] if r.name not in self.absent)

    def sort(self, replica: str) -> None:
        """Note that the live weights of a replica have changed, or are about to: it accepts other firings now."""
        self.touched.add(replica)
        receivers = [channel.receivers[replica] for channel in self.channels.values() if replica in channel.receivers]
        kind = tuple((receiver.live, receiver.swapping) for receiver in receivers)
        self.queues[self.tables.pool_of[replica]].move(replica, kind)

    def free(self, firing: Firing, replica: str) -> None:
        """Note that the outputs of a firing have no reader left; `say_freed` issues the command."""
        self._freed[replica].append(firing)

    def say_freed(self) -> None:
        # Before the commands that follow from the event: else a retry would be freed with the try that failed.
        for replica, firings in self._freed.items():
            self.out.append(Free(tuple(firings), replica))
        self._freed.clear()

    def fail(self, error: str) -> None:
        """End the run after a failure that leaves the ranks able to work: a checkpoint that is being written is
        completed first."""
        if self.writing is None:
            self.finish("failed", error)
        else:
            self.failing = error

    def finish(self, status: str, error: str = "") -> None:
        """End the run."""
        self.finished = True
        self.say_freed()
        self.out.append(Finish(status, error))

    # Queries ----------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """True if no new work may begin."""
        return self.finished or bool(self.failing)

    @property
    def held(self) -> bool:
        """True while state is being copied for a checkpoint, or the final checkpoint is being written."""
        return bool(self.copying) or (self.writing is not None and self.writing.final)

    @property
    def stopping(self) -> bool:
        """True if the run ends with the next checkpoint."""
        return self.checkpoint is not None and self.checkpoint.final

    @property
    def whole(self) -> bool:
        """True if the current update has its whole batch, and all of it is finished."""
        return len(self.taken) == self.rules.batch and not self.remaking

    def room(self, replica: Replica) -> int:
        return replica.capacity - self.load[replica.name]

    def live(self, channel: str, replica: str) -> int:
        return self.channels[channel].receivers[replica].live

    def has_fixed(self, step: NodeStep, replica: str) -> bool:
        """True if `replica` has the never-changing weights that `step` reads, as the run found them."""
        return all(self.live(channel, replica) >= self.rules.start for channel in step.fixed)

    def version(self, carried: str) -> int:
        """How many updates are over for a carried value; the run's start for a value that never changes."""
        maker = self.tables.makers.get(carried)
        return self.rules.start if maker is None else self.update + (maker in self.done)

    def over(self, name: str) -> bool:
        """True if a step on the critical path is done for the current update, or takes no part in it."""
        return name in self.done or self.tables.steps[name].due(self.update) > self.update

    def next_update(self, step: NodeStep) -> int:
        """The update that a per-update step fires at next, or is firing at."""
        return self.off_path[step.name] if step.off_path else step.due(self.update + (step.name in self.done))

    def num_parts(self, step: NodeStep) -> int:
        """How many times a step fires for one update."""
        return self.rules.batch // step.accumulate if step.accumulate else 1

    def donates(self, carried: str, version: int) -> bool:
        """True if this version's memory is reused for the next one, from the first firing that does so to the last."""
        first, last = self.tables.first_takers[carried], self.tables.makers[carried]
        begun = first in self.done and last not in self.done and version == self.update
        return begun or self.finishing(first, version) or self.finishing(last, version)

    def finishing(self, name: str, update: int) -> bool:
        """True if the last part of a per-update step is in work for `update`."""
        return Firing(name, update, segment=self.num_parts(self.tables.steps[name]) - 1) in self.running

    def firing(self, step: NodeStep, ordinal: int) -> Firing:
        """The firing of a per-group step that is in work for a pending group, or that comes next."""
        group = self.ledger.groups[ordinal]
        if step.name in group.paused:
            return group.paused[step.name][0]
        turns = group.turns.get(step.partner if step.answers else step.name)
        return Firing(step.name, ordinal, turns.turn if turns else 0)

    def place(self, ordinal: int) -> int:
        """How many groups before a pending one are not known to be lost. With `order="ready"` the number is fixed once
        the group has read weights: a lower one would name an earlier update, although others may have overtaken it."""
        place = self.ledger.groups[ordinal].place
        return self.ledger.before(ordinal) if place is None else place

    def deadline(self, group: GroupState) -> int:
        """The last update that may consume a group: the earliest of its steps' deadlines once all have read weights,
        before that the update of its place."""
        if len(group.deadlines) < self.tables.num_weighted:
            # An overtaken group that begins again after a resume is for the update that is due.
            return max(self.update, self.place(group.ordinal) // self.rules.batch)
        return min(group.deadlines.values(), default=self.rules.end)

    def slot(self, ordinal: int) -> int:
        """The update that a group is for, as far as is known: groups before it may still be dropped."""
        return self.ledger.before(ordinal) // self.rules.batch

    def begun(self) -> bool:
        """True if a step of the current update is in work or done. False between two parts of a step: nothing that a
        checkpoint has is changed yet, and a resumed run begins with the first part."""
        return bool(self.done) or any(f.node in self.tables.critical for f in self.running)

    def committed(self) -> bool:
        """True if the last part of a step of the current update is in work, or a step is done. A checkpoint that is
        asked for now is the one before the next update."""
        # Not a loop over `running`: that may be thousands of firings, at each event.
        return bool(self.done) or any(self.finishing(name, self.update) for name in self.tables.critical)

    @property
    def lacks_groups(self) -> bool:
        """True if the current update is committed, and lost groups must be made again for it. All that waits for the
        update's end, such as a checkpoint, waits for them. It is false between the parts of a step: then a checkpoint
        waits only for the part in work."""
        return self.tables.takes_groups and not self.whole and self.committed()

    def first_unfired(self, step: NodeStep) -> int:
        """The lowest ordinal for which `step` is neither done nor in work; the next one to open if there is none. A
        group that takes turns counts until its last turn is done."""
        name, ordinal = step.name, max(self.passed[step.name], self.ledger.first)
        while ordinal < self.ledger.next:
            group = self.ledger.groups.get(ordinal)
            waits = group is not None and name not in group.made
            if waits and (step.turns or self.firing(step, ordinal) not in self.running):
                break
            ordinal += 1
        self.passed[name] = ordinal
        return ordinal
