"""A witness of the scheduler: it keeps its own books from events and commands alone, and fails on a broken invariant.

It shares nothing with the scheduler but the graph, the plan and the rules. The numbers in the messages are those of
the list on top of `scheduler.py`.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from penstock.graph.ir import Firing, Graph, Node
from penstock.runtime.plan.plan import Plan, Replica
from penstock.runtime.schedule.events import (
    Arrived,
    Command,
    Commit,
    Done,
    Event,
    Failed,
    Finish,
    Fire,
    Free,
    Save,
    Saved,
    Send,
    Swap,
    Swapped,
)
from penstock.runtime.schedule.tables import Rules


@dataclass
class Facts:
    """What the graph says of one node (or source), read straight off it."""

    name: str
    pool: str
    per_update: bool
    source: bool
    stateful: bool
    groups: set[str] = field(default_factory=set)
    updates: set[str] = field(default_factory=set)
    carried: set[str] = field(default_factory=set)
    weights: set[tuple[str, int]] = field(default_factory=set)
    fixed: set[str] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)
    makes: set[str] = field(default_factory=set)


@dataclass
class Arenas:
    live: int = -1
    shadow: int = -1
    sending: bool = False
    swapping: bool = False


@dataclass
class Lineage:
    """What survives a crash: the books at a cut."""

    update: int = 0
    fates: dict[int, str] = field(default_factory=dict)
    made: dict[int, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    values: dict[Firing, str] = field(default_factory=dict)
    versions: dict[tuple[int, str, str], int] = field(default_factory=dict)
    consumed: dict[int, int] = field(default_factory=dict)
    stateful: dict[str, int] = field(default_factory=dict)


@dataclass
class Work:
    replica: str
    awaited: set[int]
    failed: bool = False
    dropped: bool = False


class Checker:
    """Call `see` after each `handle`; `lineage` and `live` are what the scheduler was told of its past."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        rules: Rules,
        lineage: Lineage | None = None,
        live: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        self.graph, self.plan, self.rules = graph, plan, rules
        self.facts = read_facts(graph, plan)
        self.books = deepcopy(lineage) if lineage else Lineage(update=rules.start)
        self.start = self.books.update
        self.earlier = rules.start * rules.batch
        self.total = rules.end * rules.batch
        self.replicas: dict[str, Replica] = {r.name: r for r in plan.replicas}
        self.pool_of = {r.name: p.name for p in plan.pools for r in p.replicas}
        self.applied = {f.name: self.books.update for f in self.facts.values() if f.per_update}
        self.running: dict[Firing, Work] = {}
        self.attempts: dict[Firing, int] = defaultdict(int)
        self.debris: set[tuple[Firing, str]] = set()
        self.awaited: dict[tuple[str, Any, str], set[int]] = {}
        self.published: dict[str, int] = {}
        self.batch: tuple[int, ...] | None = None
        self.cutting = self.final = False
        self.cut: Lineage | None = None
        self.committed: Lineage | None = None
        self.finish: Finish | None = None
        self.arenas: dict[str, dict[str, Arenas]] = {}
        for channel in {c for f in self.facts.values() for c in (*f.fixed, *(c for c, _ in f.weights))}:
            pool = next(p for p in plan.pools if p.name == channel.split(">")[1])
            self.arenas[channel] = {
                r.name: Arenas(*[(live or {}).get((channel, r.name), -1)] * 2) for r in pool.replicas
            }

    # What was heard ---------------------------------------------------------------------------------------

    def see(self, event: Event, commands: Iterable[Command]) -> None:
        """Note an event and judge the commands that followed it, in their order."""
        self._hear(event)
        for command in commands:
            assert self.finish is None, f"{command} after {self.finish}"
            getattr(self, f"_{type(command).__name__.lower()}")(command)
        if self.finish is None:
            self._quiet()

    def _hear(self, event: Event) -> None:
        match event:
            case Done(firing, replica, rank, dropped):
                self._answer(("fire", firing, replica), rank)
                self.running[firing].dropped |= dropped
                self._settle_work(firing)
            case Failed(firing, replica, rank):
                self._answer(("fire", firing, replica), rank)
                self.running[firing].failed = True
                self._settle_work(firing)
            case Arrived(channel, version, replica, rank):
                if self._answer(("send", (channel, version), replica), rank):
                    arenas = self.arenas[channel][replica]
                    arenas.sending, arenas.shadow = False, version
            case Swapped(channel, version, replica, rank):
                if self._answer(("swap", (channel, version), replica), rank):
                    arenas = self.arenas[channel][replica]
                    arenas.swapping, arenas.live = False, version
            case Saved(update, replica, rank):
                self._answer(("save", update, replica), rank)
        if type(event).__name__ == "Checkpoint":
            self.cutting, self.final = True, self.final or event.final  # type: ignore[union-attr]

    def _ask(self, key: tuple[str, Any, str]) -> None:
        self._true(key not in self.awaited, 1, f"{key} asked twice")
        self.awaited[key] = set(range(len(self.replicas[key[-1]].ranks)))

    def _answer(self, key: tuple[str, Any, str], rank: int) -> bool:
        self.awaited[key].remove(rank)
        if self.awaited[key]:
            return False
        del self.awaited[key]
        return True

    def _settle_work(self, firing: Firing) -> None:
        work = self.running[firing]
        if ("fire", firing, work.replica) in self.awaited:
            return
        del self.running[firing]
        facts = self.facts.get(firing.node)
        if facts is None:
            self.published[firing.node] = firing.index
        elif facts.per_update:
            self._update_done(facts, firing, work)
        else:
            self._group_done(firing, work)

    def _group_done(self, firing: Firing, work: Work) -> None:
        alive = self.books.fates[firing.index] == "pending"
        if not work.failed:
            self.books.made[firing.index][firing.node] = work.replica
            self.books.values[firing] = work.replica
            if alive and work.dropped:
                self.books.fates[firing.index] = "dropped"
            return
        self.debris.add((firing, work.replica))
        self.attempts[firing] += 1
        if alive and self.attempts[firing] > self.rules.retries and self.rules.on_failure == "replace":
            self.books.fates[firing.index] = "failed"

    def _update_done(self, facts: Facts, firing: Firing, work: Work) -> None:
        if work.failed:
            return
        self.applied[firing.node] += 1
        if facts.readers or not facts.makes:
            self.books.values[firing] = work.replica
        if all(count > self.books.update for count in self.applied.values()):
            for ordinal in self.batch or ():
                self._consumed(ordinal)
            self.books.update, self.batch = self.books.update + 1, None

    def _consumed(self, ordinal: int) -> None:
        update = self.books.update
        self.books.fates[ordinal] = "consumed"
        self.books.consumed[ordinal] = update
        for node, facts in self.facts.items():
            for channel, lag in () if facts.per_update else facts.weights:
                version = self.books.versions[ordinal, node, channel]
                fits = update - lag <= version <= update
                self._true(fits, 3, f"group {ordinal} of update {update}: {node} used version {version}, lag {lag}")
                if self.rules.versions == "pinned":
                    self._true(version == max(0, update - lag), 3, f"group {ordinal}: {version} for update {update}")

    # What was said ----------------------------------------------------------------------------------------

    def _fire(self, command: Fire) -> None:
        firing, replica = command.firing, command.replica
        facts = self.facts.get(firing.node)
        self._ask(("fire", firing, replica))
        self._true(firing not in self.running, 1, f"{firing} is in work already")
        self._true((firing, replica) not in self.debris, 7, f"{firing} is tried again before its debris is freed")
        if facts is None:
            self._publish(firing, replica)
        elif facts.per_update:
            self._update(facts, command)
        else:
            self._group(facts, command)
        self.running[firing] = Work(replica, set())
        self._true(self._load(replica) <= self.replicas[replica].capacity, 2, f"{replica} is over its capacity")

    def _load(self, replica: str) -> int:
        counted = (f for f, w in self.running.items() if w.replica == replica)
        return sum(f.node not in self.facts or not self.facts[f.node].source for f in counted)

    def _group(self, facts: Facts, command: Fire) -> None:
        ordinal, name = command.firing.index, facts.name
        if facts.source:
            self.books.fates.setdefault(ordinal, "pending")
        self._true(self.pool_of[command.replica] == facts.pool, 1, f"{command.firing} runs on {command.replica}")
        self._true(command.groups == (ordinal,), 1, f"{command.firing} is given the groups {command.groups}")
        self._true(self.books.fates.get(ordinal) == "pending", 1, f"{command.firing}: {self.books.fates.get(ordinal)}")
        self._true(name not in self.books.made[ordinal], 1, f"{command.firing} is done already")
        self._true(not (self.final and self.rules.versions == "free"), 8, f"{command.firing} after a final checkpoint")
        for read in facts.groups:
            self._true(Firing(read, ordinal) in self.books.values, 7, f"{command.firing} reads {read}, not there")
        self._true(self.before(ordinal) < self.total, 6, f"{command.firing} is past the last update")
        self._true(not facts.stateful or self._in_turn(facts, ordinal), 1, f"{command.firing} is out of turn")
        for channel, _ in facts.weights:
            self.books.versions[ordinal, name, channel] = self.arenas[channel][command.replica].live
        self._true(self._admitted(facts, ordinal, command.replica), 3, f"{command.firing} is not admissible")

    def _admitted(self, facts: Facts, ordinal: int, replica: str) -> bool:
        before, batch = self.before(ordinal), self.rules.batch
        if any(self.arenas[channel][replica].live < self.start for channel in facts.fixed):
            return False
        for channel, lag in facts.weights:
            arenas = self.arenas[channel][replica]
            if arenas.live < 0 or before >= (arenas.live + lag + 1) * batch:
                return False
            if self.rules.versions == "pinned" and (arenas.live != max(0, before // batch - lag) or arenas.swapping):
                return False
        return True

    def _in_turn(self, facts: Facts, ordinal: int) -> bool:
        """A node with state takes the groups one by one, in order, and rests while a cut is due, unless it must not.

        Pinned groups whose version the resumed run could not make again are finished before the cut.
        """
        lag = max((lag for f in self.facts.values() for _, lag in f.weights), default=0)
        pin = max(0, self.before(ordinal) // self.rules.batch - lag)
        perishing = self.rules.versions == "pinned" and pin < self.books.update and self.cut is None
        alone = not any(f.node == facts.name for f in self.running) and (perishing or not self.cutting)
        passed = all(
            facts.name in self.books.made[g] for g in range(ordinal) if self.books.fates.get(g, "pending") == "pending"
        )
        newest = self.books.stateful.get(facts.name, -1) < ordinal
        self.books.stateful[facts.name] = ordinal
        return alone and passed and newest

    def _update(self, facts: Facts, command: Fire) -> None:
        firing, update = command.firing, self.books.update
        fits = firing.index == update == self.applied[facts.name] and update < self.rules.end
        self._true(fits, 4, f"{firing} while update {update} is in work")
        self._true(self.pool_of[command.replica] == facts.pool, 1, f"{firing} runs on {command.replica}")
        self._true(not self.cutting or self._begun(), 4, f"{firing} begins an update while a cut is due")
        if facts.groups:
            self.batch = self._next_batch()
            self._true(command.groups == self.batch, 4, f"{firing} takes {command.groups}, next are {self.batch}")
            for ordinal in self.batch:
                for read in facts.groups:
                    self._true(Firing(read, ordinal) in self.books.values, 7, f"{firing} reads {read}[{ordinal}]")
        for read in facts.updates:
            self._true(Firing(read, update) in self.books.values, 7, f"{firing} reads {read}, which is not there")
        for channel, lag in facts.weights:
            live = self.arenas[channel][command.replica].live
            self._true(not self.arenas[channel][command.replica].swapping, 3, f"{firing} starts during a swap")
            fits = update - lag <= live <= update and (self.rules.versions == "free" or live == max(0, update - lag))
            self._true(fits, 3, f"{firing} reads version {live} of {channel}, lag {lag}")
        self._carried(facts, firing)

    def _begun(self) -> bool:
        per_update = any(f.node in self.applied for f in self.running)
        return per_update or any(count > self.books.update for count in self.applied.values())

    def _carried(self, facts: Facts, firing: Firing) -> None:
        """No one reads the version that this update donates, and this firing reads none that is being donated."""
        for carried in facts.makes:
            for other in self.facts.values():
                reads = carried in other.carried and other.name != facts.name
                done = self.applied.get(other.name, 0) > firing.index
                self._true(not reads or done, 5, f"{firing} donates {carried} before {other.name} has read it")
            publishing = any(f.node.startswith(f"{carried}>") for f in self.running)
            self._true(not publishing, 5, f"{firing} donates {carried} while it is being published")
        for carried in facts.carried:
            makers = [f.name for f in self.facts.values() if carried in f.makes]
            version = self.applied[makers[0]]
            self._true(version == firing.index, 5, f"{firing} reads version {version} of {carried}")

    def _next_batch(self) -> tuple[int, ...]:
        """The groups that the current update must take; all of them have been through every group node."""
        nodes = {n for n, f in self.facts.items() if not f.per_update}
        kept = sorted(g for g, fate in self.books.fates.items() if fate == "pending")[: self.rules.batch]
        late = [g for g in kept if set(self.books.made[g]) != nodes]
        self._true(
            not late and len(kept) == self.rules.batch, 4, f"update {self.books.update} lacks {late or 'groups'}"
        )
        return tuple(kept)

    def _publish(self, firing: Firing, replica: str) -> None:
        carried = firing.node.split(">")[0]
        maker = next((f.name for f in self.facts.values() if carried in f.makes), None)
        version = self.start if maker is None else self.applied[maker]
        self._true(firing.index == version, 5, f"{firing} is published while {carried} has version {version}")
        self._true(version > self.published.get(firing.node, -1), 5, f"{firing} is published again")
        donated = maker is not None and Firing(maker, version) in self.running
        self._true(not donated, 5, f"{firing} is published while it is being donated")
        unsent = any(
            a.sending or a.shadow < self.published.get(firing.node, -1) for a in self.arenas[firing.node].values()
        )
        self._true(not unsent, 5, f"{firing} is published over a snapshot that is still to be sent")
        self._true(self.cut is None, 5, f"{firing} is published while the cut is being written")

    def _send(self, command: Send) -> None:
        arenas = self.arenas[command.channel][command.replica]
        self._ask(("send", (command.channel, command.version), command.replica))
        free = arenas.shadow == arenas.live and not arenas.sending and not arenas.swapping
        self._true(free, 5, f"{command}: the shadow is taken")
        newest = self.published.get(command.channel, -1)
        self._true(command.version == newest > arenas.shadow, 5, f"{command}: version {newest} is published")
        arenas.sending = True

    def _swap(self, command: Swap) -> None:
        channel, replica = command.channel, command.replica
        arenas = self.arenas[channel][replica]
        self._ask(("swap", (channel, command.version), replica))
        ready = command.version == arenas.shadow > arenas.live and not arenas.sending and not arenas.swapping
        self._true(ready, 5, f"{command}: the shadow holds {arenas.shadow}, live is {arenas.live}")
        for firing, work in self.running.items():
            reads = channel in {c for c, _ in self.facts[firing.node].weights} if firing.node in self.facts else False
            fixed = self.rules.versions == "pinned" or (reads and self.facts[firing.node].per_update)
            self._true(not (reads and fixed and work.replica == replica), 3, f"{command} under {firing}")
        arenas.swapping = True

    def _free(self, command: Free) -> None:
        for firing in command.firings:
            if (firing, command.replica) in self.debris:
                self.debris.remove((firing, command.replica))
                continue
            self._true(self.books.values.get(firing) == command.replica, 7, f"{firing} is freed, not held there")
            self._true(not self._needed(firing), 7, f"{firing} is freed before its last reader")
            del self.books.values[firing]

    def _needed(self, value: Firing) -> bool:
        """Has a value a reader in work or still to come?"""
        facts = self.facts[value.node]
        if facts.per_update:
            return any(self.applied[r] <= value.index for r in facts.readers)
        if any(Firing(r, value.index) in self.running for r in facts.readers):
            return True
        if self.books.fates[value.index] != "pending":
            return False
        return any(self.facts[r].per_update or r not in self.books.made[value.index] for r in facts.readers)

    # Cuts and the end -------------------------------------------------------------------------------------

    def _save(self, command: Save) -> None:
        self._ask(("save", command.update, command.replica))
        self._true(not self._moving(), 4, f"{command}: something that moves state is in work")
        self._true(command.update == self.books.update, 4, f"{command}: update {self.books.update} is next")
        pending = {g for g, fate in self.books.fates.items() if fate == "pending"}
        needed = {
            f for f, r in self.books.values.items() if r == command.replica and f.index in pending and self._to_read(f)
        }
        self._true(set(command.firings) == needed, 7, f"{command}: needed {needed}")
        if self.cut is None:
            self.cut = deepcopy(replace(self.books))
            self.cut.values = {}
        self.cut.values.update(dict.fromkeys(command.firings, command.replica))

    def _moving(self) -> bool:
        """Is anything in work that a cut must not fall into?"""
        publishing = any(f.node not in self.facts for f in self.running)
        return publishing or self._begun() or any(self.facts[f.node].stateful for f in self.running)

    def _to_read(self, value: Firing) -> bool:
        """Will a run that resumes here read it?"""
        return any(
            self.facts[r].per_update or r not in self.books.made[value.index] for r in self.facts[value.node].readers
        )

    def _commit(self, command: Commit) -> None:
        assert self.cut is not None
        self._true(
            not any(key[0] == "save" for key in self.awaited), 4, "a cut is committed before all parts are written"
        )
        told = json.loads(command.cut)
        made = {g: dict(m) for g, m in self.cut.made.items() if self.cut.fates.get(g) == "pending"}
        agrees = told["update"] == command.update == self.cut.update
        self._true(agrees and {g: m for g, m, _ in told["groups"]} == made, 4, f"the cut says {told}, known {self.cut}")
        counts = {fate: list(self.cut.fates.values()).count(fate) for fate in ("consumed", "dropped", "failed")}
        self._true(told["fates"] == counts, 4, f"the cut says {told['fates']}, known {counts}")
        self.cut.made = defaultdict(dict, made)
        self.committed, self.cut, self.cutting = self.cut, None, False

    def _finish(self, command: Finish) -> None:
        self.finish = command
        if command.status == "done":
            fates = list(self.books.fates.values())
            self._true(self.books.update == self.rules.end, 8, f"done at update {self.books.update}")
            self._true(
                "pending" not in fates and fates.count("consumed") == self.total - self.earlier,
                4,
                f"fates at the end: {fates}",
            )
            self._true(not self.awaited and not self.running, 8, f"done while {self.awaited} is awaited")
            self._true(not self.books.values and not self.debris, 7, f"never freed: {self.books.values}")
        if command.status == "stopped":
            self._true(self.final and self.committed is not None, 8, "stopped without a cut")

    def _quiet(self) -> None:
        """After the commands: something is in work, what nobody reads is freed, and what may start has started."""
        self._true(bool(self.awaited), 8, "nothing is in work: deadlock")
        idle = [v for v in self.books.values if self._over(v)]
        self._true(not idle and not self.debris, 7, f"not freed: {idle} {self.debris}")
        for channel, arenas in self.arenas.items():
            for replica, held in arenas.items():
                waits = held.shadow > held.live and not held.swapping and not self._reads_live(channel, replica)
                self._true(not waits, 9, f"version {held.shadow} could go live on {replica}")
        if self.rules.versions == "pinned":
            return
        self._true(not self.cutting or self.cut is not None or self._moving(), 9, "the cut could be written")
        if self.cutting:
            return
        for facts in self.facts.values():
            if facts.per_update:
                continue
            for ordinal in [g for g, fate in self.books.fates.items() if fate == "pending"]:
                self._true(not self._could_start(facts, ordinal), 9, f"{facts.name}[{ordinal}] could start")

    def _reads_live(self, channel: str, replica: str) -> bool:
        """Does a step of this update read what is live, or a pinned group to come?"""
        arenas = self.arenas[channel][replica]
        for facts in self.facts.values():
            for lag in [lag for c, lag in facts.weights if c == channel]:
                running = any(f.node == facts.name and w.replica == replica for f, w in self.running.items())
                first = next(p for p in self.plan.pools if p.name == facts.pool).replicas[0].name
                if facts.per_update:
                    if replica == first and (running or arenas.shadow > self.applied[facts.name]):
                        return True
                elif self.rules.versions == "pinned":
                    to_come = (g for g in range(self.total - self.earlier) if self._to_start(facts, g))
                    pins = (self.before(g) // self.rules.batch - lag for g in to_come)
                    if running or any(max(0, pin) <= arenas.live for pin in pins):
                        return True
        return False

    def _to_start(self, facts: Facts, ordinal: int) -> bool:
        if self.books.fates.get(ordinal, "pending") != "pending":
            return False
        return facts.name not in self.books.made[ordinal] and Firing(facts.name, ordinal) not in self.running

    def _over(self, value: Firing) -> bool:
        if self.facts[value.node].per_update:
            done = value.index < self.books.update or not self.facts[value.node].readers
            return done and not self._needed(value)
        lost = self.books.fates[value.index] != "pending"
        working = any(
            f.index == value.index and f.node in self.facts and not self.facts[f.node].per_update for f in self.running
        )
        return not self._needed(value) and not (lost and working)

    def _could_start(self, facts: Facts, ordinal: int) -> bool:
        if facts.name in self.books.made[ordinal] or Firing(facts.name, ordinal) in self.running:
            return False
        if facts.groups - set(self.books.made[ordinal]) or self.before(ordinal) >= self.total:
            return False
        if facts.stateful and any(f.node == facts.name for f in self.running):
            return False
        if facts.stateful:
            ahead = (g for g, fate in self.books.fates.items() if g < ordinal and fate == "pending")
            if any(facts.name not in self.books.made[g] for g in ahead):
                return False
        replicas = next(p for p in self.plan.pools if p.name == facts.pool).replicas
        return any(
            (facts.source or self._load(r.name) < r.capacity) and self._admitted(facts, ordinal, r.name)
            for r in replicas[: 1 if facts.stateful else None]
        )

    def before(self, ordinal: int) -> int:
        lost = sum(self.books.fates.get(g) in ("dropped", "failed") for g in range(ordinal))
        return self.earlier + ordinal - lost

    def _true(self, holds: bool, number: int, message: str) -> None:
        if not holds:
            self._broken(number, message)

    def _broken(self, number: int, message: str) -> NoReturn:
        raise AssertionError(f"invariant {number}: {message} [update {self.books.update}, {self.rules}]")


def read_facts(graph: Graph, plan: Plan) -> dict[str, Facts]:
    """Each source and node, with its edges by kind."""
    facts = {a.name: Facts(a.name, plan.pool_of(a.name).name, False, True, False) for a in graph.sources}
    calls = [n for n in graph.nodes if n.construct == "call"]
    for node in calls:
        facts[node.name] = Facts(node.name, plan.pool_of(node.name).name, node.clock == "update", False, node.stateful)
    for node in calls:
        _read_inputs(graph, plan, node, facts)
    for carried, ref in graph.results:
        if ref.node in facts:
            facts[ref.node].makes.add(carried)
    return facts


def _read_inputs(graph: Graph, plan: Plan, node: Node, facts: dict[str, Facts]) -> None:
    changing = {carried for carried, ref in graph.results if ref.node in graph}
    mine = facts[node.name]
    for item in node.inputs:
        ref = item.ref.node
        if ref in facts:
            (mine.updates if facts[ref].per_update else mine.groups).add(ref)
            facts[ref].readers.add(node.name)
        elif ref in graph:
            channel = f"{graph[ref].inputs[0].ref.node}>{plan.pool_of(node.name).name}"
            if graph[ref].inputs[0].ref.node in changing:
                mine.weights.add((channel, graph[ref].lag or 0))
            else:
                mine.fixed.add(channel)
        elif ref in changing:
            mine.carried.add(ref)
