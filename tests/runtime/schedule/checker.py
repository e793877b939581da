"""An independent checker of the scheduler: it keeps its own state from events and commands alone, and checks each
command against it.

It shares only the graph, the plan, the rules and the messages with the scheduler, and reads facts about nodes directly
from the graph. The numbers in its errors are those of the invariants in the docstring of `scheduler.py`.
"""

import json
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import gcd

from penstock.graph.ir import Firing, Graph
from penstock.runtime.cluster.placement import Plan, Replica
from penstock.runtime.record.typed_json import Cut, require_shape
from penstock.runtime.schedule.compile import Rules
from penstock.runtime.schedule.events import (
    Abort,
    Answer,
    Arrived,
    Checkpoint,
    Command,
    Commit,
    CommitTurn,
    Copied,
    Done,
    Event,
    Failed,
    Finish,
    Fire,
    Free,
    Publish,
    Published,
    Question,
    ReplicaJoined,
    ReplicaLost,
    Save,
    Saved,
    Send,
    Swap,
    Swapped,
    Unread,
    answer,
    first_answer,
)


@dataclass
class Facts:
    """Facts of the graph about one node or source. Of two nodes that take turns, `hears` is the first one, set on the
    second; `heard_by` is the second one, set on the first. `waits` are the per-group values needed before it starts;
    the first turn waits for those of both nodes. `weights` and `delays` are (channel or carried value, lag)."""

    name: str
    pool: str
    per_update: bool
    source: bool = False
    stateful: bool = False
    every: int = 1
    accumulate: int = 0
    turns: int = 0
    hears: str = ""
    heard_by: str = ""
    recalls: bool = False
    waits: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    updates: set[str] = field(default_factory=set)
    carried: set[str] = field(default_factory=set)
    weights: set[tuple[str, int]] = field(default_factory=set)
    fixed: set[str] = field(default_factory=set)
    delays: set[tuple[str, int]] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)
    makes: set[str] = field(default_factory=set)

    @property
    def off_path(self) -> bool:
        """True if no update waits for it."""
        return self.per_update and not (self.makes | self.readers | self.carried | self.groups | self.updates)

    def due(self, update: int) -> bool:
        return (update + 1) % self.every == 0


def read_facts(graph: Graph, plan: Plan) -> tuple[dict[str, Facts], dict[str, int]]:
    """Return the facts of each source and node by name, and for each channel the number of which its published versions
    are multiples."""
    pools = {name: pool.name for pool in plan.pools for name in pool.holds}
    facts = {a.name: Facts(a.name, pools[a.name], False, True) for a in graph.sources}
    every: dict[str, int] = {}
    changing = {carried for carried, ref in graph.results if ref.node in graph}
    calls = [n for n in graph.nodes if n.construct in ("call", "keep")]
    for n in calls:
        turns = n.turns or 0
        kind = n.clock == "update", False, n.stateful, n.every, n.accumulate
        facts[n.name] = Facts(n.name, pools[n.name], *kind, turns)
    backs = [(n.name, i.ref.node) for n in calls for i in n.inputs if i.back]
    for speaks, answers in [(a, b) for a, b in backs if a != b]:
        facts[speaks].heard_by, facts[answers].hears = answers, speaks
        facts[answers].recalls = (answers, answers) in backs
    for node in calls:
        mine = facts[node.name]
        for ref in [i.ref.node for i in node.inputs if not i.back and i.ref.node != mine.hears]:
            if ref in facts:
                (mine.updates if facts[ref].per_update else mine.groups).add(ref)
                facts[ref].readers.add(node.name)
            elif ref in graph:
                carried, lag = graph[ref].inputs[0].ref.node, graph[ref].lag or 0
                channel = f"{carried}>{mine.pool}"
                if graph[ref].construct == "delay":
                    mine.delays.add((carried, lag))
                    continue
                every[channel] = gcd(every.get(channel, 0), graph[ref].every)
                if carried in changing:
                    mine.weights.add((channel, lag))
                else:
                    mine.fixed.add(channel)
            elif ref in changing:
                mine.carried.add(ref)
    for one in facts.values():
        one.waits = one.groups | (facts[one.heard_by].groups if one.heard_by else set())
    for carried, maker in graph.results:
        if maker.node in facts:
            facts[maker.node].makes.add(carried)
    return facts, every


@dataclass
class Buffers:
    """The versions in a replica's live and second buffer."""

    live: int = -1
    staged: int = -1
    sending: bool = False
    swapping: bool = False
    coming: int = -1


class Fates(dict[int, str]):
    """The fate of each group that was started, and which groups are pending or lost: most events ask for these."""

    def __init__(self) -> None:
        self.pending: set[int] = set()
        self.lost: list[int] = []  # sorted

    def __setitem__(self, ordinal: int, fate: str) -> None:
        super().__setitem__(ordinal, fate)
        self.pending.discard(ordinal)
        if fate == "pending":
            self.pending.add(ordinal)
        elif fate in ("dropped", "failed") and ordinal not in self.lost:
            insort(self.lost, ordinal)


@dataclass
class Lineage:
    """What survives a crash: the state at a cut. `versions` by group, node, channel and turn. `places`: for order
    "ready", the number of groups before a group when it first read weights."""

    update: int = 0
    fates: Fates = field(default_factory=Fates)
    made: dict[int, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    values: dict[Firing, str] = field(default_factory=dict)
    versions: dict[tuple[int, str, str, int], int] = field(default_factory=dict)
    consumed: dict[int, int] = field(default_factory=dict)
    stateful: dict[str, int] = field(default_factory=dict)
    behind: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    places: dict[int, int] = field(default_factory=dict)


@dataclass
class Work:
    replica: str
    failed: bool = False
    dropped: bool = False
    again: bool = False
    paused: bool = False
    done: bool = False
    unread: bool = False

    def made(self, firing: Firing) -> Firing:
        """The name of its outputs: those of a paused firing belong to the next segment."""
        return firing._replace(segment=(firing.segment + 1) * self.paused)


class Running(dict[Firing, Work]):
    """The firings in progress, and how many there are of each node, and of each node on each group."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self.on: Counter[tuple[str, int]] = Counter()

    def __setitem__(self, firing: Firing, work: Work) -> None:
        self._count(firing, firing not in self)
        super().__setitem__(firing, work)

    def __delitem__(self, firing: Firing) -> None:
        super().__delitem__(firing)
        self._count(firing, -1)

    def _count(self, firing: Firing, by: int) -> None:
        self.of[firing.node] += by
        self.on[firing.node, firing.index] += by


@dataclass
class Talk:
    """The current turn of a group, and whether its first half is done."""

    turn: int = 0
    spoken: bool = False


class Checker:
    """Checks a scheduler: call `see` after each `handle`. `lineage` and `live` are the past given to the scheduler."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        rules: Rules,
        lineage: Lineage | None = None,
        live: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        self.plan, self.rules, self.pinned = plan, rules, rules.versions == "pinned"
        self.facts, self.every = read_facts(graph, plan)
        self.carried = {argument.name for argument in graph.carried}
        self.books = deepcopy(lineage) if lineage else Lineage(update=rules.start)
        self.start, self.resumed = self.books.update, lineage is not None
        self.earlier, self.total = rules.start * rules.batch, rules.end * rules.batch
        self.replicas: dict[str, Replica] = {r.name: r for r in plan.replicas}
        self.pool_of = {r.name: p.name for p in plan.pools for r in p.replicas}
        self.applied = {f.name: self.start for f in self.facts.values() if f.per_update and not f.off_path}
        self.takes_groups = any(f.groups for f in self.facts.values() if f.per_update)
        self.makers = {carried: f.name for f in self.facts.values() for carried in f.makes}
        self.talks: dict[tuple[str, int], Talk] = defaultdict(Talk)
        self.unsettled: dict[Firing, str] = {}
        self.segments: dict[tuple[str, int], Firing] = {}
        self.drops = self.failures = 0
        self.doomed = self.cutting = self.final = self.last = False
        self.outliving = False
        self.copying: set[tuple[str, int]] = set()
        self.running = Running()
        self.attempts: dict[Firing, int] = defaultdict(int)
        self.debris: set[tuple[Firing, str]] = set()
        self.awaited: dict[Answer, set[int]] = {}
        self.published: dict[str, int] = defaultdict(lambda: -1)
        # Groups that the update has taken so far, part by part; and the number of finished parts by accumulating node.
        self.taken: tuple[int, ...] = ()
        self.piece = gcd(*(f.accumulate for f in self.facts.values())) or rules.batch
        self.parts: dict[str, int] = defaultdict(int)
        self.cut: Lineage | None = None
        self.committed: Lineage | None = None
        self.finish: Finish | None = None
        self.absent: set[str] = set()
        self.again: set[int] = set()
        # Groups of the current update that lost a value after they were taken; and its nodes that could not read one.
        self.lacking: set[int] = set()
        self.unread: set[str] = set()
        self.bounds: dict[tuple[int, str, str, int], tuple[int]] = {}
        self.losses, self.spoiled = 0, False
        # True if a replica may return to an older version.
        self.history = self.pinned and rules.lost_replica == "replace"
        self.buffers: dict[str, dict[str, Buffers]] = {}
        for channel in self.every:
            pool = next(p for p in plan.pools if p.name == channel.split(">")[1])
            held = {r.name: (live or {}).get((channel, r.name), -1) for r in pool.replicas}
            self.buffers[channel] = {name: Buffers(version, version) for name, version in held.items()}

    def see(self, event: Event, commands: Iterable[Command]) -> None:
        """Record an event, then check the commands that followed it in order."""
        self._hear(event)
        for command in commands:
            assert self.finish is None, f"{command} after {self.finish}"
            if isinstance(command, Question):
                self._true(command.replica not in self.absent, 16, f"{command} of a replica that is not there")
                self._true(answer(command) not in self.awaited, 1, f"{command} asked twice")
                self.awaited[answer(command)] = set(range(len(self.replicas[command.replica].ranks)))
            allowed = not self.outliving or isinstance(command, Commit | Finish)
            self._true(allowed, 8, f"{command} after a failure")
            getattr(self, f"_{type(command).__name__.lower()}")(command)
        self.outliving = self.doomed
        if self.finish is None:
            self._quiet()
            self._take()

    def _true(self, holds: object, number: int, message: str) -> None:
        if not holds:
            raise AssertionError(f"invariant {number}: {message} [update {self.books.update}, {self.rules}]")

    # Events -----------------------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        match event:
            case Checkpoint(final):
                self.cutting, self.final = True, self.final or final
            case Copied(_, replica, rank) | Saved(_, replica, rank):
                self._copied(replica, rank)
            case Abort():
                self.doomed = True
            case ReplicaLost(replica):
                self._lose(replica)
            case ReplicaJoined(replica):
                self.absent.remove(replica)
                for channel in self._channels_to(replica):
                    self.buffers[channel][replica] = Buffers()
            case Done() | Failed():
                work, facts = self.running[event.firing], self.facts[event.firing.node]
                if isinstance(event, Done):
                    work.dropped |= event.dropped
                    work.again |= event.again
                    work.paused |= event.paused
                    work.done = True
                elif isinstance(event, Unread):
                    work.unread = True
                    self.unread.add(facts.name)
                else:
                    work.failed = True
                    spent = self.attempts[event.firing] >= self.rules.retries and self.rules.on_failure == "stop"
                    spent = spent and event.firing.index not in self.again
                    self.doomed |= facts.per_update or facts.stateful or spent
                if self._answered(event):
                    del self.running[event.firing]
                    (self._update_done if facts.per_update else self._group_done)(facts, event.firing, work)
                    self._make_again()
        if isinstance(event, Answer) and not isinstance(event, Done | Failed) and self._answered(event):
            match event:
                case Saved():
                    self._drop_spoiled()
                case Published(channel, version):
                    del self.running[Firing(channel, version)]
                    self.published[channel] = version
                case Arrived(channel, version, replica):
                    held = self.buffers[channel][replica]
                    held.sending, held.staged = False, version
                case Swapped(channel, version, replica):
                    held = self.buffers[channel][replica]
                    held.swapping, held.live = False, version
        self._end_updates()
        self._take()

    def _take(self) -> None:
        """Take an update's groups as soon as possible: with order "ready" the choice could differ later."""
        if self.takes_groups and self.books.update < self.rules.end:
            self._batch_ready()

    def _copied(self, replica: str, rank: int) -> None:
        """Record that a rank has copied its part; the last one ends the copying of the cut."""
        if (replica, rank) in self.copying:
            self.copying.remove((replica, rank))
            if not self.copying:
                self.last, self.cutting = self.final, self.final

    def _channels_to(self, replica: str) -> list[str]:
        return [channel for channel in self.every if channel.split(">")[1] == self.pool_of[replica]]

    def _lose(self, replica: str) -> None:
        """Drop all work and values of a replica; its groups begin again."""
        self.absent.add(replica)
        self.losses += 1
        fixed = {f.pool for f in self.facts.values() if f.per_update or f.stateful}
        elastic = [r for r, pool in self.pool_of.items() if pool not in fixed and not self._carries(pool)]
        self.doomed |= self.losses > 3 * len(elastic)
        for channel in self._channels_to(replica):
            del self.buffers[channel][replica]
        gone = [key for key in self.awaited if key.replica == replica]
        self.spoiled |= any(isinstance(key, Saved) for key in gone)
        for key in gone:
            del self.awaited[key]
        self.copying = {entry for entry in self.copying if entry[0] != replica}
        if self.cut is not None and not self.copying and self.spoiled:
            self.last, self.cutting = self.final, self.final
        hit = {f.index for f, work in self.running.items() if work.replica == replica}
        hit |= {v.index for v, r in self.books.values.items() if r == replica and self._needed(v)}
        for firing in [f for f, work in self.running.items() if work.replica == replica]:
            del self.running[firing]
        if any(
            self.facts[f.node].groups and self.facts[f.node].per_update for f in self.running if f.node in self.facts
        ) or any(count > self.books.update and self.facts[n].groups for n, count in self.applied.items()):
            kept = {g for g in hit & set(self.taken) if self._finished(g)}
            self.lacking |= kept
            hit -= kept
        elif hit & set(self.taken):
            self.taken = ()
        self._lose_groups(hit)
        self._drop_spoiled()

    def _lose_groups(self, ordinals: set[int]) -> None:
        versions = self.books.versions.items() if self.rules.order == "ready" else ()
        bounds = {key: (v,) for key, v in versions if self._begins(key[1], key[0]) is not None}
        for ordinal in ordinals:
            if self.books.fates[ordinal] == "pending":
                # A group that needs a version before this life's first cannot be made again, except by another resume.
                weighted = self.pinned and any(f.weights for f in self.facts.values())
                needed = max(0, self.before(ordinal) // self.rules.batch - self._max_lag())
                self.doomed |= weighted and needed < self.start
                self.again.add(ordinal)
                self.bounds |= {key: bound for key, bound in bounds.items() if key[0] == ordinal}
                self._begin_again(ordinal)

    def _finished(self, ordinal: int) -> bool:
        """True if all values of a group are made, and none was lost before it was read."""
        nodes = {n for n, f in self.facts.items() if not f.per_update}
        return ordinal not in self.again and set(self.books.made[ordinal]) == nodes

    def _make_again(self) -> None:
        """If a node of an update could not read its groups, give them back, or have them made again."""
        readers = {f.name for f in self.facts.values() if f.per_update and f.groups}
        if not self.unread or any(f.node in readers for f in self.running):
            return
        lost = self.lacking & set(self.taken)
        over = any(self.applied[name] > self.books.update for name in readers)
        self.doomed |= not lost or (over and not self.pinned)
        if self.doomed:
            return
        if not over:
            self.taken = ()
        self.lacking, self.unread = set(), set()
        self._lose_groups(lost)

    def _carries(self, pool: str) -> bool:
        return any(pool == p.name and name in self.carried for p in self.plan.pools for name in p.holds)

    def _begin_again(self, ordinal: int) -> None:
        """Discard all values of a lost group once no work on it is left."""
        if ordinal not in self.again or any(f.index == ordinal and not self._per_update(f) for f in self.running):
            return
        self.again.remove(ordinal)
        for value in [v for v in self.books.values if v.index == ordinal and not self._per_update(v)]:
            self.debris.add((value, self.books.values.pop(value)))
        self.books.made[ordinal] = {}
        for firing in [f for f in self.attempts if f.index == ordinal]:
            del self.attempts[firing]
        for held in (self.talks, self.segments):
            for key in [key for key in held if key[1] == ordinal]:
                del held[key]
        if self.rules.order != "ready":
            for version in [key for key in self.books.versions if key[0] == ordinal]:
                del self.books.versions[version]

    def _per_update(self, firing: Firing) -> bool:
        """True if it belongs to an update or a channel."""
        return firing.node not in self.facts or self.facts[firing.node].per_update

    def _drop_spoiled(self) -> None:
        """Discard a cut of which a part was lost; the checkpoint is due again."""
        if self.spoiled and not any(isinstance(key, Saved) for key in self.awaited):
            self.spoiled, self.cut, self.cutting, self.last = False, None, True, False

    def _answered(self, event: Answer) -> bool:
        """Record an answer; true if it was the last one awaited."""
        ranks = self.awaited[first_answer(event)]
        ranks.remove(event.rank)
        if not ranks:
            del self.awaited[first_answer(event)]
        return not ranks

    def _group_done(self, facts: Facts, firing: Firing, work: Work) -> None:
        alive = self.books.fates[firing.index] == "pending"
        if alive and firing.index in self.again:
            self.failures += work.failed
            self.doomed |= self.failures >= max(self._under_way(self.rules.failures), self.rules.retries + 1)
            self.debris.add((work.made(firing), work.replica))
            if not work.failed:
                self.segments.pop(firing[:2], None)
            self._begin_again(firing.index)
            return
        if work.failed:
            self.debris.add((work.made(firing), work.replica))
            self.attempts[firing] += 1
            self.failures += 1
            self.doomed |= self.failures >= max(self._under_way(self.rules.failures), self.rules.retries + 1)
            if alive and self.attempts[firing] > self.rules.retries and self.rules.on_failure == "replace":
                self.books.fates[firing.index] = "failed"
            return
        self.segments.pop(firing[:2], None)
        key, firing = firing[:2], work.made(firing)
        self.books.values[firing] = work.replica
        if work.paused:
            self.segments[key] = firing
        elif not facts.turns:
            self.books.made[firing.index][firing.node] = work.replica
        elif alive:
            # Half a turn is done. After the last turn, the outputs of both nodes become the group's values.
            talk = self.talks[facts.hears or facts.name, firing.index]
            if facts.heard_by:
                talk.spoken = True
            elif work.again and talk.turn + 1 < facts.turns:
                talk.turn, talk.spoken = talk.turn + 1, False
            else:
                for last in (firing._replace(node=facts.hears), firing):
                    self.books.made[firing.index][last.node] = self.books.values[last]
                    if talk.turn:
                        self.unsettled[last] = self.books.values[last]
        if alive and work.dropped:
            self.books.fates[firing.index] = "dropped"
            self.drops += 1
            self.doomed |= self.pinned or self.drops >= self._under_way(self.rules.drops)

    def _max_lag(self) -> int:
        return max((lag for facts in self.facts.values() for _, lag in facts.weights), default=0)

    def _under_way(self, batches: int) -> int:
        """The groups of this many batches, for each update that may be in progress."""
        return batches * self.rules.batch * (1 + self._max_lag())

    def _update_done(self, facts: Facts, firing: Firing, work: Work) -> None:
        self.doomed |= work.unread and work.done
        if work.failed or work.unread:
            return
        if firing.segment < self._last_part(facts.name):
            self.parts[facts.name] += 1
            return
        self.parts[facts.name], firing = 0, firing._replace(segment=0)
        if facts.readers or not facts.makes:
            self.books.values[firing] = work.replica
        if facts.off_path:
            self.books.behind[facts.name].append(firing.index)
        else:
            self.applied[firing.node] += 1

    def _end_updates(self) -> None:
        """End all updates whose due nodes are done, unless a version that is still needed would be lost."""
        while self.books.update < self.rules.end and not any(map(self._due, self.applied)):
            update = self.books.update
            if (self.cutting and not self._begun()) or (self.takes_groups and not self._batch_ready()):
                return
            makers = {channel: self.makers.get(channel.split(">")[0]) for channel in self.every}
            left = [channel for channel, maker in makers.items() if maker and not self.facts[maker].due(update)]
            if not all(map(self._spare, left)):
                return
            for ordinal in self.taken:
                self.books.fates[ordinal], self.books.consumed[ordinal] = "consumed", update
                self._versions_fit(ordinal, update)
            self.lacking = set()
            self.books.update, self.taken, self.drops, self.failures, self.losses = update + 1, (), 0, 0, 0
            self.applied = dict.fromkeys(self.applied, self.books.update)

    def _versions_fit(self, ordinal: int, update: int) -> None:
        for node, facts in self.facts.items():
            for channel, lag in () if facts.per_update else facts.weights:
                used = {v for (o, n, c, _), v in self.books.versions.items() if (o, n, c) == (ordinal, node, channel)}
                fits = used and update - lag <= min(used) <= max(used) <= update
                fits = fits and (not self.pinned or used == {max(0, update - lag)})
                self._true(fits, 3, f"group {ordinal} of update {update}: {node} used {used}, lag {lag}")

    # Derived state ----------------------------------------------------------------------------------------

    def before(self, ordinal: int) -> int:
        return self.earlier + ordinal - bisect_left(self.books.fates.lost, ordinal)

    def _pending(self) -> list[int]:
        return sorted(self.books.fates.pending)

    def _due(self, name: str) -> bool:
        """True if the node has still to fire at the current update."""
        return self.facts[name].due(self.books.update) and self.applied[name] == self.books.update

    def _batch_ready(self) -> bool:
        nodes = {n for n, f in self.facts.items() if not f.per_update}
        while len(self.taken) < self.rules.batch:
            kept = [g for g in self._pending() if g not in self.taken]
            if self.rules.order == "ready":
                kept = [g for g in sorted(kept, key=self._deadline) if set(self.books.made[g]) == nodes]
            taken = {*self.taken, *(kept := sorted(kept[: self.piece]))}
            there = len(kept) == self.piece and all(set(self.books.made[g]) == nodes for g in kept)
            if not there or (self.rules.order == "ready" and not self._in_time(taken)):
                return False
            self.taken += tuple(kept)
        return all(map(self._finished, self.taken))

    def _in_time(self, taken: set[int]) -> bool:
        """True if each group left over can be consumed by its deadline, some perhaps by this update."""
        room, batch = self.rules.batch - len(taken), self.rules.batch
        after, deadlines = (
            range(self.rules.end - self.books.update),
            [self._deadline(g) for g in self._pending() if g not in taken],
        )
        return all(sum(d <= self.books.update + k for d in deadlines) <= room + k * batch for k in after)

    def _last_part(self, name: str) -> int:
        """The number of a node's last part, if it takes its batch in parts."""
        accumulate = self.facts[name].accumulate
        return self.rules.batch // accumulate - 1 if accumulate else 0

    def _deadline(self, ordinal: int) -> int:
        weighted = {n: f for n, f in self.facts.items() if f.weights and not f.per_update}
        used = self.books.versions.items()
        begun = [n for n in weighted if self._begins(n, ordinal) is not None]
        if len(begun) < len(weighted):
            return self._place(ordinal) // self.rules.batch
        lasts = [v + lag for n in begun for c, lag in weighted[n].weights for k, v in used if k[:3] == (ordinal, n, c)]
        return min(lasts, default=self.rules.end)

    def _begins(self, name: str, ordinal: int) -> int | None:
        """The oldest version with which a group has begun a node, in this life or before its cut."""
        made, talk = name in self.books.made[ordinal], self.talks.get((self.facts[name].hears or name, ordinal))
        versions = [v for key, v in self.books.versions.items() if key[:2] == (ordinal, name)]
        tried = any(f.index == ordinal and f.node == name for f in self.attempts)
        begun = (
            made
            or self._working(name, ordinal)
            or tried
            or (name, ordinal) in self.segments  # it has paused
            or any(key[:2] == (ordinal, name) for key in self.bounds)
            or (talk is not None and (talk.turn or talk.spoken))
        )
        return min(versions) if begun and versions else None

    def _place(self, ordinal: int) -> int:
        return self.books.places.get(ordinal, self.before(ordinal))

    def _version(self, carried: str) -> int:
        return self.applied[self.makers[carried]] if carried in self.makers else self.start

    def _able(self, facts: Facts) -> tuple[Replica, ...]:
        """The replicas on which a node may run: only the first one for a stateful or per-update node."""
        replicas = next(p for p in self.plan.pools if p.name == facts.pool).replicas
        return replicas[: 1 if facts.stateful or facts.per_update else None]

    def _next(self, facts: Facts, books: Lineage | None = None) -> int:
        """The update at which a per-update node fires next."""
        first = self.applied.get(facts.name, self.rules.start)
        if facts.off_path and (fired := (books or self.books).behind[facts.name]):
            first = fired[-1] + 1
        return next(update for update in range(first, first + facts.every) if facts.due(update))

    def _to_come(self, facts: Facts, first: int) -> list[int]:
        """The updates at which a node may still fire; for a per-group node, those from `first` on."""
        if facts.per_update:
            first = self._next(facts)
        return [u for u in range(first, self.rules.end) if not facts.per_update or facts.due(u)]

    def _load(self, replica: str) -> int:
        counted = (f for f, w in self.running.items() if w.replica == replica)
        return sum(f.node not in self.facts or not self.facts[f.node].source for f in counted)

    def _working(self, name: str, ordinal: int | None = None) -> bool:
        """True if a firing of a node is in progress, on this group or on any."""
        return bool(self.running.of[name] if ordinal is None else self.running.on[name, ordinal])

    def _begun(self) -> bool:
        per_update = any(f.node in self.applied for f in self.running)
        return per_update or any(count > self.books.update for count in self.applied.values())

    def _short(self) -> bool:
        """True if an update that a cut must wait for lacks groups, which were lost with a replica. The update has begun
        a firing other than a part that is not the last."""
        begun = any(f.node in self.applied and f.segment == self._last_part(f.node) for f in self.running)
        begun = begun or any(count > self.books.update for count in self.applied.values())
        return self.takes_groups and begun and not self._batch_ready()

    def _moving(self) -> bool:
        """True if something is in progress during which no cut may be made."""
        publishing = any(f.node not in self.facts for f in self.running)
        return publishing or self._begun() or any(self.facts[f.node].stateful for f in self.running)

    def _spare(self, channel: str) -> bool:
        """True if the current version may be donated: held or future versions serve each reader to come."""
        update, held = self.books.update, self.buffers[channel]
        if self._working(channel):
            return False
        if self._goes_back(channel):
            return self.published[channel] >= update
        later = {v for v in range(update + 1, self.rules.end) if v % self.every[channel] == 0}
        for facts in self.facts.values():
            for lag in [lag for c, lag in facts.weights if c == channel]:
                if self.pinned and not facts.per_update:
                    if any(max(self.published[channel], a.staged) < update for a in held.values()):
                        return False
                    continue
                known = [
                    {held[r.name].live, held[r.name].staged, self.published[channel], *later}
                    for r in self._able(facts)
                    if r.name in held
                ] or [{self.published[channel], *later}]  # for a replica that is yet to join
                to_come = self._to_come(facts, update + 1)
                if not all(any(self._fits(v, u, lag) for have in known for v in have) for u in to_come):
                    return False
        return True

    def _fits(self, version: int, update: int, lag: int) -> bool:
        """True if a version is neither too old nor too new for an update. A resumed run has none before its first."""
        return max(update - lag, 0) <= version <= max(update, self.start)

    def _needed(self, value: Firing) -> bool:
        """True if a reader of the value is in progress or still to come."""
        facts, made = self.facts[value.node], self.books.made[value.index]
        if value.index in self.again and not facts.per_update:
            working = any(f.index == value.index and not self._per_update(f) for f in self.running)
            due = not value.segment or self.segments.get(value[:2]) == value
            return (working and due) or value in self.running
        if value.segment:
            due = self.segments.get(value[:2]) == value and self.books.fates[value.index] == "pending"
            return due or value in self.running
        if facts.per_update:
            return any(self.applied[r] <= value.index and self.facts[r].due(value.index) for r in facts.readers)
        alive = self.books.fates[value.index] == "pending"
        if value not in self.unsettled and any(last[:2] == value[:2] for last in self.unsettled):
            return False  # of an earlier turn, whose readers are done
        if facts.turns and (value in self.unsettled or value.node not in made):
            # A turn's outputs are read by its second half and by the first half of the next turn.
            speaks, answers = facts.hears or facts.name, facts.heard_by or facts.name
            if alive:
                talk = self.talks[speaks, value.index]
                return value.turn == talk.turn or (value.turn == talk.turn - 1 and (not talk.spoken or facts.recalls))
            readers = [value._replace(node=answers), value._replace(node=speaks, turn=value.turn + 1)]
            readers += [value._replace(turn=value.turn + 1)] if facts.recalls else []
            return any(reader in self.running for reader in readers)
        if alive and any(self.facts[r].per_update or r not in made for r in facts.readers):
            return True
        return any(self._working(r, value.index) for r in facts.readers if not self.facts[r].per_update)

    # Firings ----------------------------------------------------------------------------------------------

    def _fire(self, command: Fire) -> None:
        firing, replica = command.firing, command.replica
        facts = self.facts[firing.node]
        self._true(firing not in self.running, 1, f"{firing} is in work already")
        self._true((firing, replica) not in self.debris, 7, f"{firing} is tried again before its debris is freed")
        self._true(self.pool_of[replica] == facts.pool, 1, f"{firing} runs on {replica}")
        if not facts.per_update:
            self._fire_group(facts, command)
        else:
            if facts.off_path:
                fits = firing.index == self._next(facts) <= self.books.update and firing.index < self.rules.end
                self._true(fits and command.groups == (), 11, f"{command}: due at {self._next(facts)}")
                draining = self.pinned and not (self.copying or self.last)
                self._true(not self.cutting or self._begun() or draining, 4, f"{firing} starts while a cut is due")
            else:
                self._fire_update(facts, command)
            # Weights must be neither too old nor newer than the update.
            for channel, lag in facts.weights:
                held = self.buffers[channel][replica]
                fits = self._fits(held.live, firing.index, 0 if self.pinned else lag) and not held.swapping
                self._true(fits, 3, f"{firing} reads {held} of {channel}, lag {lag}")
            lacks = [c for c in facts.fixed if self.buffers[c][replica].live < self.start]
            self._true(not lacks, 3, f"{firing} lacks {lacks}")
        self._work(firing, replica)

    def _work(self, firing: Firing, replica: str) -> None:
        self.running[firing] = Work(replica)
        self._true(self._load(replica) <= self.replicas[replica].capacity, 2, f"{replica} is over its capacity")

    def _fire_group(self, facts: Facts, command: Fire) -> None:
        firing, ordinal, name = command.firing, command.firing.index, facts.name
        self._true(ordinal not in self.again, 16, f"{firing} before what is in work on its group has ended")
        if facts.source and ordinal not in self.books.fates:
            self.books.fates[ordinal] = "pending"
        fate = self.books.fates.get(ordinal)
        self._true(command.groups == (ordinal,) and fate == "pending", 1, f"{command} of a group {fate}")
        self._true(name not in self.books.made[ordinal], 1, f"{firing} is done already")
        self._true(not self._working(name, ordinal), 1, f"{firing} is in work in another segment")
        due = self.segments.get((name, ordinal))
        fits = due in (firing, None) and bool(due) == bool(firing.segment) and (not due or due in self.books.values)
        self._true(fits, 14, f"{firing} while {due} is due")
        self._true(not self.final or self.pinned or self._short(), 8, f"{firing} after a final checkpoint")
        for read in facts.groups:
            self._true(Firing(read, ordinal) in self.books.values, 7, f"{firing} reads {read}, not there")
        self._true(self.before(ordinal) < self.total, 6, f"{firing} is past the last update")
        self._true(not facts.stateful or self._in_order(facts, ordinal), 1, f"{firing} is out of order")
        self._take_turn(facts, firing)
        self._true(self._admitted(facts, ordinal, command.replica), 3, f"{firing} is not admissible")
        begun = self.rules.order == "ready" and self._begins(name, ordinal) is not None
        if facts.weights and self.rules.order == "ready":
            self.books.places.setdefault(ordinal, self.before(ordinal))
        for channel, _ in facts.weights:
            held, key = self.buffers[channel][command.replica], (ordinal, name, channel, firing.turn)
            before = self.books.versions.get(key, held.live)
            self.books.versions[key] = before if firing.segment else held.live
            # The deadline is set by the version of the first attempt, also after a loss.
            if begun:
                self.books.versions[key] = min(self.books.versions[key], before)
            if bound := self.bounds.get(key):
                self.books.versions[key] = min(self.books.versions[key], bound[0])
        slot = self.before(ordinal) // self.rules.batch if facts.delays else 0
        self._true(command.update == slot, 13, f"{command} is for update {slot}")

    def _take_turn(self, facts: Facts, firing: Firing) -> None:
        """Check that the halves of a group's turns come in order, and read values of the previous half and turn."""
        speaks, firing = facts.hears or facts.name, firing._replace(segment=0)
        talk = self.talks[speaks, firing.index] if facts.turns else Talk()
        fits = firing.turn == talk.turn < max(facts.turns, 1) and self._its_turn(facts, firing.index)
        self._true(fits, 12, f"{firing} while {talk} is due")
        if not facts.turns:
            return
        before = firing._replace(turn=firing.turn - 1)
        reads = [firing._replace(node=speaks), *([before] if facts.recalls and firing.turn else [])]
        if facts.heard_by:
            reads = [before, before._replace(node=facts.heard_by)] if firing.turn else []
        for read in reads:
            self._true(read in self.books.values, 7, f"{firing} reads {read}, which is not there")

    def _its_turn(self, facts: Facts, ordinal: int) -> bool:
        """True if this node's half of the group's turn is due."""
        return not facts.turns or self.talks[facts.hears or facts.name, ordinal].spoken == bool(facts.hears)

    def _in_order(self, facts: Facts, ordinal: int) -> bool:
        """True if a stateful node takes this group in order, one at a time. It pauses while a cut is due, except for
        pinned groups whose version a resumed run could not make again: these are finished before the cut."""
        needed = max(0, self.before(ordinal) // self.rules.batch - self._max_lag())
        perishing = self.pinned and needed < self.books.update and not (self.copying or self.last)
        ahead = [g for g in range(ordinal) if self.books.fates.get(g, "pending") == "pending"]
        newest, self.books.stateful[facts.name] = self.books.stateful.get(facts.name, -1), ordinal
        alone = not self._working(facts.name) and (perishing or not self.cutting or self._short())
        return alone and newest < ordinal and all(facts.name in self.books.made[g] for g in ahead)

    def _admitted(self, facts: Facts, ordinal: int, replica: str) -> bool:
        """True if the weights and delayed values of a group are new enough and, if pinned, exactly of its version."""
        before, batch = self._place(ordinal), self.rules.batch
        begun = self._begins(facts.name, ordinal) if self.rules.order == "ready" else None
        if replica in self.absent:
            return False
        if any(self.buffers[channel][replica].live < self.start for channel in facts.fixed):
            return False
        if any(self._version(carried) < before // batch - lag for carried, lag in facts.delays):
            return False
        for channel, lag in facts.weights:
            held = self.buffers[channel][replica]
            if held.live < 0 or before >= (held.live + lag + 1) * batch:
                return False
            if begun is not None and held.live < begun:
                return False
            if self.pinned and (held.live != max(0, before // batch - lag) or held.swapping):
                return False
        return True

    def _fire_update(self, facts: Facts, command: Fire) -> None:
        firing, update = command.firing, self.books.update
        fits = firing.index == update < self.rules.end and self._due(facts.name)
        self._true(fits, 4, f"{firing} while update {update} is in work")
        self._true(not self.cutting or self._begun(), 4, f"{firing} begins an update while a cut is due")
        whole, last = self._batch_ready(), firing.segment == self._last_part(facts.name)
        if facts.accumulate:
            fits = firing.segment == self.parts[facts.name] and not self._working(facts.name)
            self._true(fits, 15, f"{firing} after {self.parts[facts.name]} parts")
            part = self.taken[firing.segment * facts.accumulate :][: facts.accumulate]
            fits = len(part) == facts.accumulate and command.groups == part
            self._true(fits, 15, f"{firing} takes {command.groups}, next are {part}")
        elif facts.groups:
            fits = whole and command.groups == self.taken
            self._true(fits, 4, f"{firing} takes {command.groups}, next are {self.taken}")
        reads = [Firing(read, ordinal) for read in facts.groups for ordinal in command.groups]
        for read in [*reads, *(Firing(name, update) for name in facts.updates)]:
            self._true(read in self.books.values, 7, f"{firing} reads {read}, which is not there")
        for carried in facts.carried:
            self._true(self._version(carried) == update, 5, f"{firing} reads version {self._version(carried)}")
        # Nobody may still read the version that this update donates.
        for carried in facts.makes if last else ():
            for other in self.facts.values():
                waits = carried in other.carried and other is not facts and self._due(other.name)
                self._true(not waits, 5, f"{firing} donates {carried} before {other.name} has read it")
            for channel in [c for c in self.every if c.split(">")[0] == carried]:
                self._true(self._spare(channel), 5, f"{firing} donates a version of {channel} that is still needed")

    # Weights ----------------------------------------------------------------------------------------------

    def _publish(self, command: Publish) -> None:
        """Publishing occupies the sender, so it is recorded as a firing of the channel."""
        channel, version = command.channel, command.version
        carried, held = channel.split(">")[0], self.buffers[channel].values()
        self._true(version == self._version(carried), 5, f"{command}: another version is there")
        multiple = version % self.every[channel] == 0 or version == self.start
        self._true(multiple, 10, f"{command}, at every {self.every[channel]}. update")
        read = any(self._may_read(facts, channel, version) for facts in self.facts.values())
        self._true(read, 10, f"{command}, and nobody reads it")
        self._true(version > self.published[channel], 5, f"{command} again")
        maker = self.makers.get(carried)
        donated = maker and Firing(maker, version, segment=self._last_part(maker)) in self.running
        self._true(not donated, 5, f"{command} while it is being donated")
        unsent = any(a.sending or a.staged < self.published[channel] for a in held)
        self._true(not unsent or self._goes_back(channel), 5, f"{command} over a snapshot that is still to be sent")
        self._true(not self.copying, 5, f"{command} while the cut is being copied")
        self._work(Firing(channel, version), command.replica)

    def _goes_back(self, channel: str) -> bool:
        """True if replicas may get older versions of a channel than they have."""
        pool = channel.split(">")[1]
        fires = [f for f in self.facts.values() if f.pool == pool and not f.source]
        simple = not any(f.per_update or f.stateful for f in fires) and not self._carries(pool)
        return self.history and simple and any(c == channel for f in fires for c, _ in f.weights)

    def _may_read(self, facts: Facts, channel: str, version: int) -> bool:
        """True if a node may still fire with this version of the channel."""
        to_come, lags = self._to_come(facts, version), [lag for c, lag in facts.weights if c == channel]
        return bool(channel in facts.fixed and to_come) or any(
            self._fits(version, u, lag) for lag in lags for u in to_come
        )

    def _send(self, command: Send) -> None:
        held, newest = self.buffers[command.channel][command.replica], self.published[command.channel]
        if self._goes_back(command.channel):
            kept = max(self.start, self.books.update - self._max_lag()) <= command.version <= newest
            fits = kept and not held.sending and not held.swapping and command.version != held.live
            self._true(fits, 17, f"{command} with {held}, published {newest}")
            held.sending, held.coming, held.staged = True, command.version, held.live
            return
        free = held.staged == held.live and not held.sending and not held.swapping
        self._true(free, 5, f"{command}: the second buffer is taken")
        self._true(command.version == newest > held.staged, 5, f"{command}: version {newest} is published")
        held.sending = True

    def _swap(self, command: Swap) -> None:
        held = self.buffers[command.channel][command.replica]
        ready = command.version == held.staged and not held.sending and not held.swapping
        ready = ready and (held.staged > held.live or (self._goes_back(command.channel) and held.staged != held.live))
        self._true(ready, 5, f"{command} with {held}")
        for facts in [
            self.facts[f.node] for f, w in self.running.items() if w.replica == command.replica and f.node in self.facts
        ]:
            reads = any(channel == command.channel for channel, _ in facts.weights)
            self._true(not (reads and (self.pinned or facts.per_update)), 3, f"{command} under {facts.name}")
        held.swapping = True

    # Values -----------------------------------------------------------------------------------------------

    def _free(self, command: Free) -> None:
        for firing in command.firings:
            if (firing, command.replica) in self.debris:
                self.debris.remove((firing, command.replica))
                continue
            self._true(self.books.values.get(firing) == command.replica, 7, f"{firing} is freed, not held there")
            self._true(not self._needed(firing), 7, f"{firing} is freed before its last reader")
            del self.books.values[firing]

    def _committurn(self, command: CommitTurn) -> None:
        """Rename the last turn's values, which are the group's, to those of the first turn."""
        first, held = command.firing._replace(turn=0), self.unsettled.pop(command.firing, "nowhere")
        fits = held == command.replica == self.books.values.get(command.firing) and first not in self.books.values
        self._true(fits, 12, f"{command}: held by {held}")
        self.books.values[first] = self.books.values.pop(command.firing)

    # Cuts and the end -------------------------------------------------------------------------------------

    def _save(self, command: Save) -> None:
        self._true(not self._moving(), 4, f"{command}: something that moves state is in work")
        self._true(command.update == self.books.update, 4, f"{command}: update {self.books.update} is next")
        pending, needed = self._pending(), set()
        for value in [v for v, r in self.books.values.items() if r == command.replica and v.index in pending]:
            # A run that resumes here restarts a group's turns.
            made, readers = self.books.made[value.index], self.facts[value.node].readers
            if value.index in self.again:
                continue
            if value.node in made and any(self.facts[r].per_update or r not in made for r in readers):
                needed.add(value)
        self._true(set(command.firings) == needed, 7, f"{command}: needed {needed}")
        others = [k for k in self.awaited if isinstance(k, Saved) and k.update != command.update]
        self._true(not others, 4, f"{command}: {others} are being written")
        self.copying |= {(command.replica, rank) for rank in range(len(self.replicas[command.replica].ranks))}
        if self.cut is None:
            self.cut = deepcopy(self.books)
            self.cut.values = {}
            for ordinal in self.again:
                self.cut.made[ordinal] = {}
        self.cut.values.update(dict.fromkeys(command.firings, command.replica))

    def _commit(self, command: Commit) -> None:
        cut, told = self.cut, json.loads(command.state)
        assert cut is not None
        require_shape(told, Cut, "the cut")  # as a resume requires it
        self._true(not any(type(key).__name__ == "Saved" for key in self.awaited), 4, "a part is not written yet")
        made = {g: dict(m) for g, m in cut.made.items() if cut.fates.get(g) == "pending"}
        # An opened group may have no values yet if the pool of its source is lost.
        opened = {g: m for g, m, _ in told["groups"] if m or g in made}
        agrees = told["update"] == command.update == cut.update and opened == made
        counts = {fate: list(cut.fates.values()).count(fate) for fate in ("consumed", "dropped", "failed")}
        self._true(agrees and told["fates"] == counts, 4, f"the cut says {told}, known {cut}")
        cut.made = defaultdict(dict, made)
        weighted = {n for n, f in self.facts.items() if f.weights and not f.per_update}
        # Work in progress is repeated after a resume, perhaps with newer weights.
        cut.versions = {key: v for key, v in cut.versions.items() if key[0] not in made or key[1] in made[key[0]]}
        cut.places = {g: place for g, place in cut.places.items() if weighted & made.get(g, {}).keys()}
        behind = {n: self._next(f, cut) for n, f in self.facts.items() if f.off_path}
        self._true(told["trailing"] == behind, 11, f"the cut says {told['trailing']}, known {behind}")
        self.committed, self.cut = cut, None
        self._end_updates()

    def _finish(self, command: Finish) -> None:
        self.finish = command
        if command.status == "done":
            fates = list(self.books.fates.values())
            consumed = self.takes_groups * (self.total - self.earlier)
            self._true(self.books.update == self.rules.end, 8, f"done at update {self.books.update}")
            self._true("pending" not in fates and fates.count("consumed") == consumed, 4, f"at the end: {fates}")
            self._true(not self.awaited and not self.running, 8, f"done while {self.awaited} is awaited")
            self._true(not self.books.values and not self.debris, 7, f"never freed: {self.books.values}")
            for facts in [f for f in self.facts.values() if f.off_path]:
                due = [u for u in range(self.rules.start, self.rules.end) if facts.due(u)]
                fired = self.books.behind[facts.name]
                self._true(fired == due, 11, f"{facts.name} fired at {fired}, due at {due}")
        self._true(command.status != "failed" or self.doomed, 8, f"{command} without a cause")
        cut = self.committed is not None or self.resumed  # the previous life's cut may already be complete
        self._true(command.status != "stopped" or (self.final and cut), 8, "stopped without a cut")

    # After all commands of an event ------------------------------------------------------------------------

    def _quiet(self) -> None:
        """Check that there is no deadlock, that unneeded values are freed, and that nothing waits that may start."""
        pools = [{r.name for r in pool.replicas} for pool in self.plan.pools]
        stuck = not self.awaited and not any(own <= self.absent for own in pools)
        self._true(not stuck, 8, "nothing is in work: deadlock")
        if self.doomed:
            left = self.cut is not None and not self.copying
            self._true(left, 8, f"the run goes on; {self.drops} groups are dropped")
            return
        self._true(not self.unsettled, 12, f"not settled: {self.unsettled}")
        idle = [v for v in self.books.values if self._over(v)]
        self._true(not idle and not self.debris, 7, f"not freed: {idle} {self.debris}")
        for channel, buffers in self.buffers.items():
            for replica, held in buffers.items():
                waits = held.staged > held.live and not held.swapping and not self._reads_live(channel, replica)
                waits = waits and not self._goes_back(channel)
                self._true(not waits, 9, f"version {held.staged} could go live on {replica}")
        if self.cutting:
            waits = self.pinned or self.cut is not None or self._moving()
            self._true(waits, 9, "the cut could be written")
            return
        pending = self._pending()
        for facts in self.facts.values():
            if facts.accumulate:
                self._true(not self._could_accumulate(facts), 15, f"{facts.name} could take a part")
            if facts.off_path:
                self._true(not self._could_fire(facts), 9, f"{facts.name} could start")
            elif not facts.per_update and not self.pinned:
                for ordinal in pending:
                    self._true(not self._could_start(facts, ordinal), 9, f"{facts.name}[{ordinal}] could start")

    def _over(self, value: Firing) -> bool:
        """True if a value should have been freed."""
        if self._needed(value):
            return False
        if self.facts[value.node].per_update:
            return value.index < self.books.update or not self.facts[value.node].readers
        working = [f.node for f in self.running if f.index == value.index and f.node in self.facts]
        return self.books.fates[value.index] == "pending" or all(self.facts[n].per_update for n in working)

    def _reads_live(self, channel: str, replica: str) -> bool:
        """True if a node of this update, or a pinned group to come, reads the live version."""
        held = self.buffers[channel][replica]
        for facts in self.facts.values():
            for lag in [lag for c, lag in facts.weights if c == channel]:
                running = any(f.node == facts.name and w.replica == replica for f, w in self.running.items())
                if facts.per_update:
                    here = replica == self._able(facts)[0].name
                    if here and (running or held.staged > max(self._next(facts), self.start)):
                        return True
                elif self.pinned:
                    # A group between turns may start another one.
                    left = [g for g in range(self.total - self.earlier) if self._to_start(facts, g, bool(facts.turns))]
                    if running or any(max(0, self.before(g) // self.rules.batch - lag) <= held.live for g in left):
                        return True
        return False

    def _to_start(self, facts: Facts, ordinal: int, again: bool = False) -> bool:
        """True if a group has still to start on a node; with `again`, also if it is in progress there."""
        if self.books.fates.get(ordinal, "pending") != "pending" or facts.name in self.books.made.get(ordinal, ()):
            return False
        return again or not self._working(facts.name, ordinal)

    def _could_fire(self, facts: Facts) -> bool:
        """True if a node that no update waits for has room and the right versions."""
        update, replica = self._next(facts), self._able(facts)[0]
        if update > self.books.update or update >= self.rules.end or self._working(facts.name):
            return False
        if any(self.buffers[channel][replica.name].live < self.start for channel in facts.fixed):
            return False
        held = [(self.buffers[channel][replica.name], lag) for channel, lag in facts.weights]
        has = all(self._fits(a.live, update, lag) and not a.swapping for a, lag in held)
        return has and self._load(replica.name) < replica.capacity

    def _could_accumulate(self, facts: Facts) -> bool:
        """True if there is room, and the groups are there, for a part that is not the last."""
        part, replica = self.parts[facts.name], self._able(facts)[0]
        if part >= self._last_part(facts.name) or self.books.update >= self.rules.end or self._working(facts.name):
            return False
        fixed = all(self.buffers[channel][replica.name].live >= self.start for channel in facts.fixed)
        there = len(self.taken) >= (part + 1) * facts.accumulate
        return there and fixed and self._due(facts.name) and self._load(replica.name) < replica.capacity

    def _could_start(self, facts: Facts, ordinal: int) -> bool:
        """True if a group may start on a replica that does not leave it to others."""
        if not self._ready(facts, ordinal):
            return False
        able = [r for r in self._able(facts) if self._admitted(facts, ordinal, r.name)]
        if facts.source:
            return bool(able)
        return any(self._load(r.name) < r.capacity and not self._leaves(facts, r.name) for r in able)

    def _leaves(self, facts: Facts, replica: str) -> bool:
        """True if a replica has its share of a node's groups while others wait for weights in transit."""
        names = [r.name for r in self._able(facts) if r.name not in self.absent]
        held = [(self.buffers[channel][name].live, channel) for channel, _ in facts.weights for name in names]
        if not any(live < self.published[channel] for live, channel in held):
            return False
        groups = [g for g in self._pending() if self._ready(facts, g)]
        waiting = sum(any(self._admitted(facts, g, name) for name in names) for g in groups)
        return self._load(replica) * (len(names) - 1) >= waiting

    def _ready(self, facts: Facts, ordinal: int) -> bool:
        """True if a group has all inputs of a node, and has still to start there."""
        made = self.books.made[ordinal]
        if facts.name in made or not facts.waits <= made.keys() or not self._its_turn(facts, ordinal):
            return False
        if not self._to_start(facts, ordinal) or self.before(ordinal) >= self.total or ordinal in self.again:
            return False
        ahead = [g for g in self._pending() if g < ordinal] if facts.stateful else []
        return not (facts.stateful and self._working(facts.name)) and all(
            facts.name in self.books.made[g] for g in ahead
        )
