"""Books kept from events and commands alone: what is in work, what was made, which version is where.

They share nothing with the scheduler but the graph, the plan and the rules.
"""

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from penstock.graph.ir import Firing, Graph
from penstock.runtime.plan.plan import Plan, Replica
from penstock.runtime.schedule.events import Arrived, Checkpoint, Done, Event, Failed, Finish, Saved, Swapped
from penstock.runtime.schedule.tables import Rules

from .facts import Facts, read_facts


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
    failed: bool = False
    dropped: bool = False


class Books:
    """`lineage` and `live` are what the scheduler was told of its past."""

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
            held = {r.name: (live or {}).get((channel, r.name), -1) for r in pool.replicas}
            self.arenas[channel] = {name: Arenas(version, version) for name, version in held.items()}

    # What was heard ---------------------------------------------------------------------------------------

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
            case Checkpoint(final):
                self.cutting, self.final = True, self.final or final

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

    # What follows from the books --------------------------------------------------------------------------

    def before(self, ordinal: int) -> int:
        lost = sum(self.books.fates.get(g) in ("dropped", "failed") for g in range(ordinal))
        return self.earlier + ordinal - lost

    def _load(self, replica: str) -> int:
        counted = (f for f, w in self.running.items() if w.replica == replica)
        return sum(f.node not in self.facts or not self.facts[f.node].source for f in counted)

    def _begun(self) -> bool:
        per_update = any(f.node in self.applied for f in self.running)
        return per_update or any(count > self.books.update for count in self.applied.values())

    def _moving(self) -> bool:
        """Is anything in work that a cut must not fall into?"""
        publishing = any(f.node not in self.facts for f in self.running)
        return publishing or self._begun() or any(self.facts[f.node].stateful for f in self.running)

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

    def _to_read(self, value: Firing) -> bool:
        """Will a run that resumes here read it?"""
        return any(
            self.facts[r].per_update or r not in self.books.made[value.index] for r in self.facts[value.node].readers
        )

    def _over(self, value: Firing) -> bool:
        if self.facts[value.node].per_update:
            done = value.index < self.books.update or not self.facts[value.node].readers
            return done and not self._needed(value)
        lost = self.books.fates[value.index] != "pending"
        working = any(
            f.index == value.index and f.node in self.facts and not self.facts[f.node].per_update for f in self.running
        )
        return not self._needed(value) and not (lost and working)

    def _to_start(self, facts: Facts, ordinal: int) -> bool:
        if self.books.fates.get(ordinal, "pending") != "pending":
            return False
        return facts.name not in self.books.made[ordinal] and Firing(facts.name, ordinal) not in self.running

    def _true(self, holds: bool, number: int, message: str) -> None:
        """Raises AssertionError for a broken invariant."""
        if not holds:
            raise AssertionError(f"invariant {number}: {message} [update {self.books.update}, {self.rules}]")
