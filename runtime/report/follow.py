"""The work of each rank, derived event by event from a run's log or from a simulation. Pure.

`Follow.step` takes an event and the commands that followed it, and `close` returns the result as `Followed`; groups
that a checkpoint has read the `versions` that it is given. Times are integer nanoseconds on one clock, so that sums are
exact. A command is sent to every rank of a replica, and each answers. A rank does one thing after the other, except in
a stream, which works on several firings at once. So work outside a stream began when it was commanded, or when the rank
was done with its work before.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from msgspec import structs

from penstock.graph.ir import Firing, Graph
from penstock.runtime.record.timeline import Bar, Kind
from penstock.runtime.schedule.compile import Tables
from penstock.runtime.schedule.events import (
    Answer,
    Arrived,
    Begin,
    Command,
    Copied,
    Done,
    Event,
    Failed,
    Fire,
    Publish,
    Published,
    Question,
    ReplicaJoined,
    ReplicaLost,
    Save,
    Send,
    Swap,
    Swapped,
    Unread,
    answer,
    each,
    first_answer,
)

# Nanoseconds per second.
NS = 1_000_000_000

# Kinds of work that keep a rank busy: firings, and the snapshot at the beginning of a publication.
IN_WORK = ("group", "update", "publish")

# Why work started, as a text in which # stands for the number: ("fake_score[#] was done", 12).
Cause = tuple[str, int]

# A rank: its replica and its number in it.
RankId = tuple[str, int]


# The text of `Cause` by the event before; a node is inserted, or a channel and a replica.
CAUSES: Mapping[type[Event], str] = {
    Done: "{}[#] was done",
    Failed: "{}[#] had failed",
    Unread: "{}[#] could not read a value",
    Published: "version # of {} was published",
    Arrived: "version # had arrived on {1}",
    Swapped: "version # went live on {1}",
}


@dataclass(slots=True)
class Work(Bar):
    """A bar of a report: the work of one rank, in integer nanoseconds. `name` is that of a node, of a channel for work
    that moves weights, or "checkpoint". `cause` is why the work started.

    `version`: for a group, the oldest weights read that were live when it began; for an update or a sync, its own
    version. `outcome` is "" for work that was done, "failed" (perhaps because its replica was lost), "dropped" (by a
    filter), or "unanswered" at the end of the log.
    """

    start: int
    end: int
    rank: int = 0
    turn: int = 0
    segment: int = 0
    cause: Cause = ("", 0)
    outcome: str = ""

    @property
    def rank_id(self) -> RankId:
        return self.lane, self.rank


@dataclass
class Followed:
    """The result.

    work: all work, in the order in which it ended. swaps: (time, version) of each swap on a rank. ends: the time at
    which each update was over. versions: by group and node, the oldest weights that it read. lags: of each consumed
    group, its update minus the oldest version. batches: how many groups each update took. again: firings that asked for
    another turn. dropped: firings that dropped their group.
    """

    work: list[Work] = field(default_factory=list)
    swaps: defaultdict[RankId, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, int] = field(default_factory=dict)
    versions: dict[int, dict[str, int]] = field(default_factory=dict)
    lags: dict[int, int] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)
    again: set[Firing] = field(default_factory=set)
    dropped: set[Firing] = field(default_factory=set)


def lanes(tables: Tables) -> list[RankId]:
    return [(name, rank) for name, replica in tables.replicas.items() for rank in range(len(replica.ranks))]


def streams(graph: Graph) -> frozenset[str]:
    """The nodes that work on several firings at once."""
    return frozenset(node.name for node in graph.nodes if node.stream)


class Follow:
    """`step` takes an event, its time and the commands that followed. `in_work` counts each rank's firings and
    snapshots."""

    def __init__(
        self,
        tables: Tables,
        streaming: Collection[str],
        live: Mapping[tuple[str, str], int],
        versions: Mapping[int, dict[str, int]] = MappingProxyType({}),
    ) -> None:
        self.tables, self.streaming = tables, streaming
        self.found = Followed(versions=dict(versions))
        self.in_work = dict.fromkeys(lanes(tables), 0)
        self._live = dict(live)
        self._open: dict[Answer, Work] = {}
        self._free = dict.fromkeys(lanes(tables), 0)

    def step(self, time: int, event: Event, commands: Sequence[Command]) -> None:
        for said in each(event):
            self._hear(time, said)
        cause = cause_of(event)
        for command in commands:
            match command:
                case Fire():
                    self._fire(time, command, cause)
                case Publish(channel, version):
                    self._ask(time, command, "publish", channel, version, cause)
                case Send(channel, version):
                    self._ask(time, command, "send", channel, version, cause)
                case Swap(channel, version):
                    self._ask(time, command, "swap", channel, version, cause)
                case Save(update):
                    self._ask(time, command, "save", "checkpoint", update, cause)

    @property
    def firings(self) -> list[Work]:
        """The firings and snapshots in work, in the order in which they were commanded."""
        return [work for work in self._open.values() if work.kind in IN_WORK]

    def forget(self) -> None:
        """Forget finished work, which grows with the run."""
        self.found = Followed()

    def close(self, time: int) -> Followed:
        """End the log at `time`: work without an answer was in work until then, or waited behind other work."""
        for work in sorted(self._open.values(), key=lambda w: w.start):
            work.end, work.outcome = time, "unanswered"
            self._queued(work)
            self.found.work.append(work)
        self._open.clear()
        return self.found

    def _hear(self, time: int, event: Event) -> None:
        if isinstance(event, ReplicaLost):
            for key in [key for key, work in self._open.items() if work.lane == event.replica]:
                lost = self._open.pop(key)
                lost.end, lost.outcome = time, "failed"
                self._queued(lost)
                self.found.work.append(lost)
            self.in_work.update({lane: 0 for lane in self.in_work if lane[0] == event.replica})
            return
        # `Copied` ends a save as `Saved` does: a checkpoint blocks a rank only until the rank has copied its part.
        if not isinstance(event, Answer | Copied):
            return
        outcome = "failed" if isinstance(event, Failed) else ""
        if isinstance(event, Done):
            if event.again:
                self.found.again.add(event.firing)
            if event.dropped:
                self.found.dropped.add(event.firing)
                outcome = "dropped"
        elif isinstance(event, Swapped):
            self._live[event.channel, event.replica] = event.version
            self.found.swaps[event.replica, event.rank].append((time, event.version))
        work = self._open.pop(structs.replace(first_answer(event), rank=event.rank), None)
        if work is None:
            # A source, which reads ahead and keeps no rank busy; or `Saved` for a part written in the background.
            return
        work.end, work.outcome = time, outcome
        if work.kind in IN_WORK:
            self.in_work[work.rank_id] -= 1
        self._queued(work)
        self.found.work.append(work)
        step = self.tables.steps.get(work.name)
        part = isinstance(event, Done) and event.paused  # a part of an update that is not the last
        if work.kind == "update" and step is not None and not step.off_path and not (outcome or part):
            self.found.ends[work.index] = max(time, self.found.ends.get(work.index, time))

    def _queued(self, work: Work) -> None:
        """Move the start of work outside a stream to the end of the rank's work before."""
        # A transfer runs in its own thread, in parallel with the rank's work.
        if work.kind != "send" and work.name not in self.streaming:
            work.start = max(work.start, min(self._free[work.rank_id], work.end))
            self._free[work.rank_id] = work.end

    def _fire(self, time: int, fire: Fire, cause: Cause) -> None:
        firing, step = fire.firing, self.tables.steps[fire.firing.node]
        if step.source:
            return
        version: int | None = firing.index
        if not step.per_update:
            # The oldest weights that it reads.
            channels = (*(channel for channel, _ in step.weights), *step.fixed)
            version = min((self._live.get((channel, fire.replica), 0) for channel in channels), default=None)
            if version is not None and step.weights:
                read = self.found.versions.setdefault(firing.index, {})
                # A group that begins again has nothing of its first attempt.
                begins = not (firing.turn or firing.segment)
                read[step.name] = version if begins else min(version, read.get(step.name, version))
        elif fire.groups:
            # Each part before this one has the same number of groups.
            taken = (firing.segment + 1) * len(fire.groups)
            self.found.batches[firing.index] = max(taken, self.found.batches.get(firing.index, 0))
            for group in fire.groups:
                oldest = min(self.found.versions.get(group, {}).values(), default=None)
                if oldest is not None:
                    self.found.lags[group] = firing.index - oldest
        kind: Kind = "update" if step.per_update else "group"
        self._ask(time, fire, kind, firing.node, firing.index, cause, version)

    def _ask(
        self, time: int, command: Question, kind: Kind, name: str, index: int, cause: Cause, version: int | None = None
    ) -> None:
        """Note a command to all ranks of a replica. The log has no event for the beginning of work: it begins now,
        unless the rank turns out to be busy. `version` is used for a firing only; any other command has `index`."""
        at = (command.replica, name, index, time, time, kind, version if isinstance(command, Fire) else index)
        turn, segment = command.firing[2:] if isinstance(command, Fire) else (0, 0)
        for rank in range(len(self.tables.replicas[command.replica].ranks)):
            work = Work(*at, rank=rank, turn=turn, segment=segment, cause=cause)
            self._open[answer(command, rank)] = work
            self.in_work[work.rank_id] += kind in IN_WORK


def cause_of(event: Event) -> Cause:
    match event:
        case Done() | Failed():
            return CAUSES[type(event)].format(event.firing.node), event.firing.index
        case Published() | Arrived() | Swapped():
            return CAUSES[type(event)].format(event.channel, event.replica), event.version
        case ReplicaLost(replica) | ReplicaJoined(replica):
            return f"{replica} was {'lost' if isinstance(event, ReplicaLost) else 'back'}", 0
    return "the stage began" if isinstance(event, Begin) else "a checkpoint was due", 0
