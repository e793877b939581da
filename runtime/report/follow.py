"""What ranks did and when, followed event by event: of a run's log, or of a simulation. Pure.

`Follow.step` takes an event and the commands that answered it, and `close` gives what came of it as `Followed`. Times
are whole nanoseconds on one clock, so that sums are exact. A command is sent to every rank of a replica, and each
answers. A rank does one thing after the other, except for a stream, which works on several firings at once. So work
that is no stream's began when it was asked for, or when the rank was done with what it had before.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

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

# Nanoseconds of a second.
NS = 1_000_000_000

# Kinds of work that keep a rank busy: firings, and the snapshot that a publication begins with.
IN_WORK = ("group", "update", "publish")

# What made work start, as a text in which # stands for the number: ("fake_score[#] was done", 12).
Cause = tuple[str, int]

# A rank: its replica and its number in it.
RankId = tuple[str, int]


# Why work started, of the event before: a node is put in, or a channel and a replica.
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
    """A bar of a report: what one rank did, in whole nanoseconds. Its `name` is a node's, or a channel's for what moves
    weights, and its `cause` what made it start.

    `version`: of the weights that were live when it began; of an update or a sync the one that it is about. `outcome`
    is "" for work that was done, "failed" (perhaps since its replica was lost), "dropped" (a filter's verdict), or
    "unanswered" where the log ends.
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
    """What came of it, in the order in which it ended.

    swaps: when which version went live on a rank. ends: when each update was over. lags: groups consumed by update
    less version. batches: the groups of each update. again: firings after which a group took another turn.
    """

    work: list[Work] = field(default_factory=list)
    swaps: defaultdict[RankId, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, int] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)
    batches: dict[int, int] = field(default_factory=dict)
    again: set[Firing] = field(default_factory=set)
    dropped: set[Firing] = field(default_factory=set)


def lanes(tables: Tables) -> list[RankId]:
    return [(name, rank) for name, replica in tables.replicas.items() for rank in range(len(replica.ranks))]


def streams(graph: Graph) -> frozenset[str]:
    """The nodes that work on several firings at once."""
    return frozenset(node.name for node in graph.nodes if node.stream)


class Follow:
    """`step` hears of an event and the commands that followed it, at a time. `in_work` counts each rank's firings."""

    def __init__(self, tables: Tables, streaming: Collection[str], live: Mapping[tuple[str, str], int]) -> None:
        self.tables, self.streaming = tables, streaming
        self.found = Followed()
        self.in_work = dict.fromkeys(lanes(tables), 0)
        self._live = dict(live)
        self._open: dict[Answer, Work] = {}
        self._free = dict.fromkeys(lanes(tables), 0)
        self._versions: dict[int, int] = {}
        # The update that was fired last, and how old what it took was, by group.
        self._counted: tuple[int, dict[int, int]] = (-1, {})

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
        """What is in work, but for weights and checkpoints on their way, in the order in which it was asked for."""
        return [work for work in self._open.values() if work.kind in IN_WORK]

    def forget(self) -> None:
        """Forget what is over: it grows with the run."""
        self.found = Followed()

    def close(self, time: int) -> Followed:
        """The log ends: what has no answer was in work until now, or waited behind what was."""
        for work in sorted(self._open.values(), key=lambda w: w.start):
            work.end, work.outcome = time, "unanswered"
            self._queued(work)
            self.found.work.append(work)
        self._open.clear()
        return self.found

    def _hear(self, time: int, event: Event) -> None:
        # A checkpoint keeps a rank from its work until the rank has copied it aside.
        if isinstance(event, ReplicaLost):
            for key in [key for key, work in self._open.items() if work.lane == event.replica]:
                lost = self._open.pop(key)
                lost.end, lost.outcome = time, "failed"
                self._queued(lost)
                self.found.work.append(lost)
            self.in_work.update({lane: 0 for lane in self.in_work if lane[0] == event.replica})
            return
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
            # A source's: it reads ahead, and keeps no rank busy. Or that of a part written beside other work.
            return
        work.end, work.outcome = time, outcome
        if work.kind in IN_WORK:
            self.in_work[work.rank_id] -= 1
        self._queued(work)
        self.found.work.append(work)
        step = self.tables.steps.get(work.name)
        part = isinstance(event, Done) and event.paused  # of an update, and not the last one
        if work.kind == "update" and step is not None and not step.off_path and not (outcome or part):
            self.found.ends[work.index] = max(time, self.found.ends.get(work.index, time))

    def _queued(self, work: Work) -> None:
        """Work that is no stream's waited for what its rank was doing before."""
        # A transfer runs beside the rank's work, in a thread of its own.
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
                self._versions[firing.index] = min(version, self._versions.get(firing.index, version))
        elif fire.groups:
            # Those of the parts before it are as many, each.
            taken = (firing.segment + 1) * len(fire.groups)
            self.found.batches[firing.index] = max(taken, self.found.batches.get(firing.index, 0))
            # Of several steps that take the groups of an update only the first one still finds their versions.
            known = {g: firing.index - self._versions.pop(g) for g in fire.groups if g in self._versions}
            # Groups that the update could not read are made again, and counted once.
            before, counted = self._counted
            counted = counted if before == firing.index else {}
            self.found.lags.subtract(counted[g] for g in known if g in counted)
            self.found.lags.update(known.values())
            self._counted = firing.index, counted | known
        kind: Kind = "update" if step.per_update else "group"
        self._ask(time, fire, kind, firing.node, firing.index, cause, version)

    def _ask(
        self, time: int, command: Question, kind: Kind, name: str, index: int, cause: Cause, version: int | None = None
    ) -> None:
        """Every rank is asked. The log has no event for the beginning of work: it begins now, unless the rank turns out
        to be busy. `version` is the index of what is no firing."""
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
            return f"{replica} was {'lost' if isinstance(event, ReplicaLost) else 'there again'}", 0
    return "the stage began" if isinstance(event, Begin) else "a checkpoint was due", 0
