"""What the simulator makes of a run: the same scheduler on a virtual clock, with the durations that the run had.

A firing that the run did takes as long as it did there, and decides as it did there (filters, turns); any other draws
from those of its node. So what a prediction and the run differ by is what the simulator leaves out: how long orders
and answers are on their way, and that work on one machine slows other work down.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from penstock.graph.ir import Firing, Graph
from penstock.graph.passes import Bound, period_bound
from penstock.runtime.plan.plan import Plan
from penstock.runtime.plan.simulated_places import served
from penstock.runtime.report.facts import Stage
from penstock.runtime.report.follow import NS, Follow, Followed, Work, streams
from penstock.runtime.schedule.durations import Durations, draw
from penstock.runtime.schedule.events import Command, Event
from penstock.runtime.schedule.simulation import Simulation
from penstock.runtime.schedule.simulator import simulate
from penstock.runtime.schedule.tables import Rules, Step, compile_tables
from penstock.runtime.schedule.verdicts import Verdicts

MOST_EVENTS = 60_000
"""Events of a simulated stage, about: a longer run is predicted for its first updates only."""

SYNC = {"publish": "publish", "send": "wire", "swap": "swap"}
"""Kinds of work that move weights, with the simulator's names for them."""


@dataclass(frozen=True)
class Empirical:
    """Seconds of the firings that a run did, by name (with the turn) and index; others draw from them by a key."""

    seconds: dict[tuple[str, int], float]
    pool: tuple[float, ...]

    @staticmethod
    def of(seconds: dict[tuple[str, int], float], first: int) -> "Empirical":
        """Others draw from the firings with an index of at least `first`; from all of them if there is none."""
        usual = [took for (_, index), took in seconds.items() if index >= first]
        return Empirical(seconds, tuple(usual or seconds.values()))

    def __call__(self, node: str, index: int) -> float:
        found = self.seconds.get((node, index))
        return self.pool[int(draw(f"{node}/{index}") * len(self.pool))] if found is None else found


@dataclass(frozen=True)
class Recorded(Verdicts):
    """The verdicts that a run came to; `known` are the firings that it has one for, others draw by the shares."""

    known: frozenset[Firing] = frozenset()
    dropping: frozenset[Firing] = frozenset()
    going_on: frozenset[Firing] = frozenset()

    def dropped(self, firing: Firing) -> bool:
        return firing in self.dropping if firing in self.known else super().dropped(firing)

    def goes_on(self, firing: Firing) -> bool:
        return firing in self.going_on if firing in self.known else super().goes_on(firing)


@dataclass(frozen=True)
class Fit:
    """A training stage as the simulator takes it: durations, verdicts, and the mean seconds by node of a group or
    update, all turns of it."""

    durations: Durations
    verdicts: Verdicts
    means: dict[str, float]
    medians: dict[str, float]


@dataclass(frozen=True)
class Prediction:
    """The simulated stage on the report's clock: the first `updates` of it. Seconds per update as they were predicted,
    as they were measured for the same updates, and for all of the stage."""

    followed: Followed
    simulation: Simulation
    updates: int
    predicted_s: float
    compared_s: float
    measured_s: float

    @property
    def error(self) -> float | None:
        """By how much the prediction is larger than what was measured, as a share of it."""
        return self.predicted_s / self.compared_s - 1 if self.compared_s else None


def fit(stage: Stage) -> Fit | None:
    """None where the stage has not done every node that was due at least once."""
    spent = firings(stage.followed.work)
    nodes: dict[str, Empirical] = {}
    means: dict[str, float] = {}
    medians: dict[str, float] = {}
    for step in stage.tables.steps.values():
        own = {key: took for key, took in spent.items() if key[0].partition(".")[0] == step.name}
        first = first_usual(stage, step)
        if own:
            nodes[step.name] = Empirical.of(own, first)
            usual = {key: took for key, took in own.items() if key[1] >= first} or own
            means[step.name] = sum(usual.values()) / len({index for _, index in usual})
            medians[step.name] = median(own.values())
        elif step.every > 1 or step.trails:
            nodes[step.name] = Empirical({}, (0.0,))  # was not due
        elif not (step.source or step.filters):
            return None
    parts = {name: _median_s(stage.followed.work, kind) for kind, name in SYNC.items()}
    sync = sum(parts.values())
    means |= {node.name: sync for node in stage.origin.graph.nodes if node.construct == "broadcast"}
    means |= {node.name: 0.0 for node in stage.origin.graph.nodes if node.fires and node.name not in means}
    return Fit(Durations(dict(nodes), **parts), _verdicts(stage), means, medians | parts)


def first_usual(stage: Stage, step: Step) -> int:
    """The index of a step's first firing that the period counts: updates before it fill the pipeline, and warm
    everything up."""
    update = stage.origin.rules.start + _skipped(len(stage.followed.ends), stage.tables.max_lag + 1)
    return update if step.per_update else update * stage.origin.rules.batch


def firings(work: Iterable[Work]) -> dict[tuple[str, int], float]:
    """Seconds of each firing that was done, from its first rank's start to its last rank's end."""
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    for item in work:
        if item.kind in ("group", "update") and item.outcome in ("", "dropped"):
            key = (named(item.node, item.turn), item.index)
            start, end = spans.get(key, (item.start, item.end))
            spans[key] = (min(start, item.start), max(end, item.end))
    return {key: (end - start) / NS for key, (start, end) in spans.items()}


def named(node: str, turn: int) -> str:
    """A node's name with the number of the turn after the first one, as durations are asked for."""
    return f"{node}.{turn}" if turn else node


def _median_s(work: Iterable[Work], kind: str) -> float:
    """Median seconds of the syncs' parts that were answered; the first of each, which finds arenas unmade, left out if
    there are others."""
    found: dict[tuple[str, int], int] = {}
    for item in work:
        if item.kind == kind and not item.outcome:
            key = (item.lane[0] + item.node, item.index)
            found[key] = max(found.get(key, 0), item.end - item.start)
    return median(found.values()) / NS if found else 0.0


def _verdicts(stage: Stage) -> Verdicts:
    """Those of the run; of other firings the shares that it had."""
    done = [Firing(w.node, w.index, w.turn) for w in stage.followed.work if w.kind == "group" and w.lane[1] == 0]
    steps = stage.tables.steps
    drops = _shares(done, [s.name for s in steps.values() if s.filters], stage.followed.dropped)
    again = _shares(done, [s.name for s in steps.values() if s.answers], stage.followed.again)
    dropping, going_on = frozenset(stage.followed.dropped), frozenset(stage.followed.again)
    return Recorded(drops, again, 0, frozenset(done), dropping, going_on)


def _shares(done: Sequence[Firing], names: Sequence[str], told: set[Firing]) -> dict[str, float]:
    counts = {name: sum(f.node == name for f in done) for name in names}
    return {name: sum(f.node == name for f in told) / count for name, count in counts.items() if count}


def predict(stage: Stage, fitted: Fit) -> Prediction | None:
    """The stage on a virtual clock, for as many updates as the run has done or as are quickly simulated; None if it
    has done none."""
    ends = [end / NS for _, end in sorted(stage.followed.ends.items())]
    if not ends:
        return None
    updates = quick_updates(stage)
    start = stage.origin.rules.start
    rules = replace(stage.origin.rules, end=min(stage.origin.rules.end, start + updates))
    tables = compile_tables(stage.origin.graph, served(stage.origin.graph, stage.origin.plan))
    follow = Follow(tables, streams(stage.origin.graph), stage.origin.live)

    def observe(time: float, event: Event, commands: list[Command]) -> None:
        follow.step(stage.begin + round(time * NS), event, commands)

    origin = stage.origin
    found = simulate(tables, rules, fitted.durations, origin.live, observe, fitted.verdicts, origin.cut)
    followed = follow.close(stage.begin + round(found.wall_s * NS))
    begin, filling = stage.begin / NS, stage.tables.max_lag + 1
    predicted, compared = period(0.0, found.ends, filling), period(begin, ends[:updates], filling)
    return Prediction(followed, found, updates, predicted, compared, period(begin, ends, filling))


def quick_updates(stage: Stage) -> int:
    """How many of the stage's updates are simulated: all of a short run."""
    per_update = stage.origin.rules.batch * (stage.tables.num_group_steps + 1) + 8
    return min(len(stage.followed.ends), max(16, MOST_EVENTS // per_update))


def period(begin: float, ends: Sequence[float], filling: int) -> float:
    """Seconds per update of at least one, the first `filling` left out if there are as many others."""
    skip = _skipped(len(ends), filling)
    first = ends[skip - 1] if skip else begin
    return (ends[-1] - first) / (len(ends) - skip)


def _skipped(updates: int, filling: int) -> int:
    return min(filling, updates // 2)


def bound(graph: Graph, plan: Plan, means: dict[str, float], publish: float, rules: Rules) -> Bound:
    """What no schedule can beat with these durations, and because of what. A pool that publishes has the snapshots as
    work of its own, which `graph.passes` does not know of."""
    capacity = {pool.name: sum(r.capacity for r in pool.replicas) for pool in served(graph, plan).pools}
    held = {name: pool.name for pool in plan.pools for name in pool.holds}
    pools = {node.name: held[node.name] for node in graph.nodes if node.name in held}
    found = period_bound(graph, means, rules.batch, capacity, pools)
    work: dict[str, float] = defaultdict(float)
    for node in graph.nodes:
        if node.fires and node.clock == "update":
            work[pools[node.name]] += means[node.name] / node.every
    for node in graph.nodes:
        if node.construct == "broadcast" and graph.producer(node.inputs[0].ref.node):
            work[held[node.inputs[0].ref.node]] += publish / node.every
    return max([found, *(Bound(seconds, pool=pool) for pool, seconds in work.items())], key=lambda b: b.seconds)
