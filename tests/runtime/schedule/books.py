"""Books kept from events and commands alone: what is in work, what was made, which version is where.

They share nothing with the scheduler but the graph, the plan and the rules.
"""

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from penstock.graph.ir import Firing, Graph
from penstock.runtime.cluster.placement import Plan, Replica
from penstock.runtime.schedule.compile import Rules
from penstock.runtime.schedule.events import Finish

from .facts import Facts, read_beats, read_facts


@dataclass
class Arenas:
    live: int = -1
    shadow: int = -1
    sending: bool = False
    swapping: bool = False


@dataclass
class Lineage:
    """What survives a crash: the books at a cut. `versions` by group, node, channel and turn."""

    update: int = 0
    fates: dict[int, str] = field(default_factory=dict)
    made: dict[int, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    values: dict[Firing, str] = field(default_factory=dict)
    versions: dict[tuple[int, str, str, int], int] = field(default_factory=dict)
    consumed: dict[int, int] = field(default_factory=dict)
    stateful: dict[str, int] = field(default_factory=dict)
    trailed: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class Work:
    replica: str
    failed: bool = False
    dropped: bool = False
    again: bool = False


@dataclass
class Talk:
    """The turn that a group is at, and whether its first half is done."""

    turn: int = 0
    spoken: bool = False


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
        self.beats = read_beats(graph, plan)
        self.applied = {f.name: self.books.update for f in self.facts.values() if f.per_update and not f.trails}
        self.takes_groups = any(f.groups for f in self.facts.values() if f.per_update)
        self.talks: dict[tuple[str, int], Talk] = defaultdict(Talk)
        self.unsettled: dict[Firing, str] = {}
        self.drops = self.failures = 0
        self.doomed = False
        self.running: dict[Firing, Work] = {}
        self.attempts: dict[Firing, int] = defaultdict(int)
        self.debris: set[tuple[Firing, str]] = set()
        self.awaited: dict[tuple[str, Any, str], set[int]] = {}
        self.published: dict[str, int] = {}
        self.batch: tuple[int, ...] | None = None
        self.cutting = self.final = False
        self.cut: Lineage | None = None
        self.committed: Lineage | None = None
        self.resumed = lineage is not None
        self.finish: Finish | None = None
        self.arenas: dict[str, dict[str, Arenas]] = {}
        for channel in {c for f in self.facts.values() for c in (*f.fixed, *(c for c, _ in f.weights))}:
            pool = next(p for p in plan.pools if p.name == channel.split(">")[1])
            held = {r.name: (live or {}).get((channel, r.name), -1) for r in pool.replicas}
            self.arenas[channel] = {name: Arenas(version, version) for name, version in held.items()}

    # What follows from the books --------------------------------------------------------------------------

    def before(self, ordinal: int) -> int:
        lost = sum(self.books.fates.get(g) in ("dropped", "failed") for g in range(ordinal))
        return self.earlier + ordinal - lost

    def _maker(self, channel: str) -> str | None:
        """The node that makes the next value of what a channel carries; None if it never changes."""
        carried = channel.split(">")[0]
        return next((f.name for f in self.facts.values() if carried in f.makes), None)

    def _version(self, channel: str) -> int:
        maker = self._maker(channel)
        return self.start if maker is None else self.applied[maker]

    def _replicas(self, facts: Facts) -> tuple[Replica, ...]:
        """Where a node may run: one with state, or per update, on the first replica only."""
        replicas = next(p for p in self.plan.pools if p.name == facts.pool).replicas
        return replicas[: 1 if facts.stateful or facts.per_update else None]

    def _next(self, facts: Facts, books: Lineage | None = None) -> int:
        """The update that a per-update node is next to fire at."""
        first = self.applied.get(facts.name, self.rules.start)
        if facts.trails and (fired := (books or self.books).trailed[facts.name]):
            first = fired[-1] + 1
        return next(update for update in range(first, first + facts.every) if facts.due(update))

    def _load(self, replica: str) -> int:
        counted = (f for f, w in self.running.items() if w.replica == replica)
        return sum(f.node not in self.facts or not self.facts[f.node].source for f in counted)

    def _working(self, name: str, ordinal: int | None = None) -> bool:
        """Is a firing of a node in work, on a group or at all?"""
        return any(f.node == name and ordinal in (None, f.index) for f in self.running)

    def _begun(self) -> bool:
        per_update = any(f.node in self.applied for f in self.running)
        return per_update or any(count > self.books.update for count in self.applied.values())

    def _moving(self) -> bool:
        """Is anything in work that a cut must not fall into?"""
        publishing = any(f.node not in self.facts for f in self.running)
        return publishing or self._begun() or any(self.facts[f.node].stateful for f in self.running)

    def _spare(self, channel: str) -> bool:
        """May the present version go: is each reader to come served by one that is held, or can still be published?"""
        update, held = self.books.update, self.arenas[channel]
        if self._working(channel):
            return False
        later = {v for v in range(update + 1, self.rules.end) if v % self.beats[channel] == 0}
        for facts in self.facts.values():
            for lag in [lag for c, lag in facts.weights if c == channel]:
                if self.rules.versions == "pinned" and not facts.per_update:
                    if any(max(self.published.get(channel, -1), a.shadow) < update for a in held.values()):
                        return False
                    continue
                first = self._next(facts) if facts.per_update else update + 1
                to_come = [u for u in range(first, self.rules.end) if not facts.per_update or facts.due(u)]
                known = [
                    {held[r.name].live, held[r.name].shadow, self.published.get(channel, -1), *later}
                    for r in self._replicas(facts)
                ]
                if not all(any(self._fits(v, u, lag) for have in known for v in have) for u in to_come):
                    return False
        return True

    def _fits(self, version: int, update: int, lag: int) -> bool:
        """Is a version old and new enough for an update? A resumed run has none older than its first."""
        return max(update - lag, 0) <= version <= max(update, self.start)

    def _needed(self, value: Firing) -> bool:
        """Has a value a reader in work or still to come?"""
        facts = self.facts[value.node]
        if facts.per_update:
            return any(self.applied[r] <= value.index and self.facts[r].due(value.index) for r in facts.readers)
        alive = self.books.fates[value.index] == "pending"
        if value not in self.unsettled and any(last[:2] == value[:2] for last in self.unsettled):
            return False  # of the turn before the last, which has recalled it
        if facts.turns and (value in self.unsettled or value.node not in self.books.made[value.index]):
            return self._needed_in_turns(facts, value, alive)
        if any(self._working(r, value.index) for r in facts.readers if not self.facts[r].per_update):
            return True
        return alive and any(self.facts[r].per_update or r not in self.books.made[value.index] for r in facts.readers)

    def _needed_in_turns(self, facts: Facts, value: Firing, alive: bool) -> bool:
        """What a turn has made is read by the next half, and by the next turn's first one."""
        speaks, answers = (facts.name, facts.heard_by) if facts.heard_by else (facts.hears, facts.name)
        if not alive:
            readers = [Firing(answers, value.index, value.turn), Firing(speaks, value.index, value.turn + 1)]
            readers += [value._replace(turn=value.turn + 1)] if facts.recalls else []
            return any(reader in self.running for reader in readers)
        talk = self.talks[speaks, value.index]
        return value.turn == talk.turn or (value.turn == talk.turn - 1 and (not talk.spoken or facts.recalls))

    def _to_read(self, value: Firing) -> bool:
        """Will a run that resumes here read it? It begins the turns of a group anew."""
        made = self.books.made[value.index]
        return value.node in made and any(
            self.facts[r].per_update or r not in made for r in self.facts[value.node].readers
        )

    def _true(self, holds: bool, number: int, message: str) -> None:
        """Raises AssertionError for a broken invariant."""
        if not holds:
            raise AssertionError(f"invariant {number}: {message} [update {self.books.update}, {self.rules}]")
