"""Simulations based on a run: its prediction, other lags and numbers of generators, and the verdict in one line.

Pure. The simulator executes the run's own scheduler on a virtual clock, with the durations measured in the run.

- `fit` takes durations and verdicts (of filters, and on further turns) from a stage. A firing that the run did has the
  same duration and verdict; any other firing draws from those of its node.
- `predict` simulates the stage itself. The prediction differs from the run by what the simulator leaves out: the
  latency of commands and answers, and the slowdown of work by other work on the same machine.
- `what_if` simulates other lags and numbers of generators. A replica with fewer groups at once decodes each of them
  faster: `crowding` fits by how much. If the run's data do not show it, no such effect is assumed.
- `bound` is a lower bound on the period of any schedule. `verdict` sums up the run in one line: what bounds it, what
  another lag or number of generators would gain, how far off the prediction is.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import fmean, median

from penstock.graph import check
from penstock.graph.analysis import Bound, period_bound
from penstock.graph.ir import Firing, Graph
from penstock.runtime.cluster.placement import Plan, served
from penstock.runtime.record.timeline import pool_of
from penstock.runtime.report.follow import NS, Follow, Followed, Work, streams
from penstock.runtime.report.run_history import StageHistory
from penstock.runtime.schedule.compile import NodeStep, Rules, Tables
from penstock.runtime.schedule.events import Command, Event
from penstock.runtime.schedule.simulator import Durations, Spans, Verdicts, draw, simulate

# About how many events of a stage are simulated; of a longer run only the first updates are predicted.
MOST_EVENTS = 60_000

# Kinds of work that move weights, with the simulator's names for them.
SYNC = {"publish": "publish", "send": "wire", "swap": "swap"}


@dataclass(frozen=True)
class Empirical:
    """Seconds of a run's firings, by name (with the turn) and index. Other firings draw from `pool` by a key."""

    seconds: dict[tuple[str, int], float]
    pool: tuple[float, ...]

    @staticmethod
    def of(seconds: dict[tuple[str, int], float], first: int) -> "Empirical":
        """Make it from measured seconds. Other firings draw from those with an index of at least `first`; from all of
        them if there are none."""
        usual = [took for (_, index), took in seconds.items() if index >= first]
        return Empirical(seconds, tuple(usual or seconds.values()))

    def __call__(self, node: str, index: int) -> float:
        found = self.seconds.get((node, index))
        return self.pool[int(draw(f"{node}/{index}") * len(self.pool))] if found is None else found


@dataclass(frozen=True)
class RecordedVerdicts(Verdicts):
    """The verdicts of a run. `known` are the firings that have one; other firings draw by the shares."""

    known: frozenset[Firing] = frozenset()
    dropping: frozenset[Firing] = frozenset()
    going_on: frozenset[Firing] = frozenset()

    def dropped(self, firing: Firing) -> bool:
        return firing in self.dropping if firing in self.known else super().dropped(firing)

    def goes_on(self, firing: Firing) -> bool:
        return firing in self.going_on if firing in self.known else super().goes_on(firing)


@dataclass(frozen=True)
class Fit:
    """A training stage as input of the simulator: durations, verdicts, and by node the mean seconds of a group (all of
    its turns) or update."""

    durations: Durations
    verdicts: Verdicts
    means: dict[str, float]


@dataclass(frozen=True)
class Prediction:
    """The first `updates` of a stage, simulated, on the report's clock. Seconds per update: predicted, measured for the
    same updates (`compared_s`), and measured for the whole stage."""

    fit: Fit
    followed: Followed
    updates: int
    predicted_s: float
    compared_s: float
    measured_s: float

    @property
    def error(self) -> float | None:
        """The relative error of the prediction; positive if it is larger than the measured period."""
        return self.predicted_s / self.compared_s - 1 if self.compared_s else None


def fit(stage: StageHistory) -> Fit | None:
    """Fit durations and verdicts to a stage. None unless every node that was due has fired at least once."""
    spent = firings(stage.followed.work)
    nodes: dict[str, Empirical] = {}
    means: dict[str, float] = {}
    for step in stage.tables.steps.values():
        own = {key: took for key, took in spent.items() if key[0].partition(".")[0] == step.name}
        first = first_usual(stage, step)
        if own:
            nodes[step.name] = Empirical.of(own, first)
            # The mean leaves out the slower firings that warm a process up.
            usual = {key: took for key, took in own.items() if key[1] >= first} or own
            means[step.name] = sum(usual.values()) / len({index for _, index in usual})
        elif step.every > 1 or step.off_path:
            nodes[step.name] = Empirical({}, (0.0,))  # was not due
        elif not (step.source or step.filters):
            return None
    parts = {name: _median_s(stage.followed.work, kind) for kind, name in SYNC.items()}
    sync = sum(parts.values())
    means |= {node.name: sync for node in stage.origin.graph.nodes if node.construct == "broadcast"}
    means |= {node.name: 0.0 for node in stage.origin.graph.nodes if node.fires and node.name not in means}
    durations = Durations(dict(nodes), parts["publish"], parts["wire"], parts["swap"])
    return Fit(durations, _verdicts(stage), means)


def first_usual(stage: StageHistory, step: NodeStep) -> int:
    """The index of a step's first firing within the measured period: earlier updates fill the pipeline, and warm
    processes up."""
    update = stage.origin.rules.start + _skipped(len(stage.followed.ends), stage.tables.max_lag + 1)
    return update if step.per_update else update * stage.origin.rules.batch


def firings(work: Iterable[Work]) -> dict[tuple[str, int], float]:
    """Seconds of each completed firing, from its first rank's start to its last rank's end. A firing that has paused
    has the sum of its segments."""
    found: dict[tuple[str, int], float] = {}
    for firing, own in last_attempts(work).items():
        spans: dict[int, tuple[int, int]] = {}
        for (segment, _), item in own.items():
            start, end = spans.get(segment, (item.start, item.end))
            spans[segment] = (min(start, item.start), max(end, item.end))
        found[firing] = sum(end - start for start, end in spans.values()) / NS
    return found


def last_attempts(work: Iterable[Work]) -> dict[tuple[str, int], dict[tuple[int, int], Work]]:
    """By name (with the turn) and index of each completed firing, its work by segment and rank. A firing that was
    repeated, as after the loss of a replica, has its last attempt."""
    found: defaultdict[tuple[str, int], dict[tuple[int, int], Work]] = defaultdict(dict)
    for item in sorted(work, key=lambda item: item.start):
        if item.kind in ("group", "update") and item.outcome in ("", "dropped"):
            own = found[named(item.name, item.turn), item.index]
            # A rank runs each segment once, so this is another attempt.
            if (item.segment, item.rank) in own:
                own.clear()
            own[item.segment, item.rank] = item
    return found


def named(node: str, turn: int) -> str:
    """A node's name, with the number of the turn after turn 0: the key of `Duration` functions."""
    return f"{node}.{turn}" if turn else node


def _median_s(work: Iterable[Work], kind: str) -> float:
    """Median seconds of one part of the completed syncs. Each takes as long as its slowest rank."""
    found: dict[tuple[str, int], int] = {}
    for item in work:
        if item.kind == kind and not item.outcome:
            key = (item.lane + item.name, item.index)
            found[key] = max(found.get(key, 0), item.end - item.start)
    return median(found.values()) / NS if found else 0.0


def _verdicts(stage: StageHistory) -> Verdicts:
    """The verdicts of the run, and its shares for other firings."""
    done = [Firing(w.name, w.index, w.turn) for w in stage.followed.work if w.kind == "group" and w.rank == 0]
    counts = Counter(firing.node for firing in done)

    def shares(names: Iterable[str], chosen: set[Firing]) -> dict[str, float]:
        return {name: sum(f.node == name for f in chosen) / counts[name] for name in names if counts[name]}

    dropped, again, steps = stage.followed.dropped, stage.followed.again, stage.tables.steps.values()
    drops = shares((step.name for step in steps if step.filters), dropped)
    goes_on = shares((step.name for step in steps if step.answers), again)
    return RecordedVerdicts(drops, goes_on, 0, frozenset(done), frozenset(dropped), frozenset(again))


def predict(stage: StageHistory) -> Prediction | None:
    """Simulate the stage for as many updates as the run has done, or as can be simulated quickly. None if it has done
    none, or cannot be fitted."""
    ends, fitted = _ends(stage), fit(stage)
    if not ends or fitted is None:
        return None
    updates, origin = quick_updates(stage), stage.origin
    rules = replace(origin.rules, end=min(origin.rules.end, origin.rules.start + updates))
    tables = Tables(origin.graph, served(origin.graph, origin.plan))
    follow = Follow(tables, streams(origin.graph), origin.live)

    def observe(time: float, event: Event, commands: list[Command]) -> None:
        follow.step(stage.begin + round(time * NS), event, commands)

    found = simulate(tables, rules, fitted.durations, origin.live, observe, fitted.verdicts, origin.saved)
    followed = follow.close(stage.begin + round(found.wall_s * NS))
    begin, filling = stage.begin / NS, stage.tables.max_lag + 1
    predicted, compared = period(0.0, found.ends, filling), period(begin, ends[:updates], filling)
    return Prediction(fitted, followed, updates, predicted, compared, period(begin, ends, filling))


def _ends(stage: StageHistory) -> list[float]:
    """Seconds on the report's clock at which the stage's updates were over."""
    return [end / NS for _, end in sorted(stage.followed.ends.items())]


def quick_updates(stage: StageHistory) -> int:
    """How many of the stage's updates are simulated: all of them if the run is short."""
    return min(len(stage.followed.ends), max(16, MOST_EVENTS // _events_per_update(stage)))


def _events_per_update(stage: StageHistory) -> int:
    """A rough number: one for each group and per-group node, one more per group, and 8 for the update and its sync."""
    return stage.origin.rules.batch * (stage.tables.num_group_steps + 1) + 8


def period(begin: float, ends: Sequence[float], filling: int) -> float:
    """Seconds per update of the updates that were over at `ends` (seconds, at least one). The first `filling` updates,
    which fill the pipeline, are left out; at most half of all updates are."""
    skip = _skipped(len(ends), filling)
    first = ends[skip - 1] if skip else begin
    return (ends[-1] - first) / (len(ends) - skip)


def _skipped(updates: int, filling: int) -> int:
    """How many updates are left out at the start: `filling`, but at most half of all."""
    return min(filling, updates // 2)


def bound(graph: Graph, plan: Plan, means: dict[str, float], publish: float, rules: Rules) -> Bound:
    """The period that no schedule with these durations can beat, and its cause. `means` are seconds by node, `publish`
    the seconds of a snapshot of the weights."""
    capacity = {pool.name: sum(r.capacity for r in pool.replicas) for pool in served(graph, plan).pools}
    held = {name: pool.name for pool in plan.pools for name in pool.holds}
    pools = {node.name: held[node.name] for node in graph.nodes if node.name in held}
    found = period_bound(graph, means, rules.batch, capacity, pools)
    # Add the snapshots to the work of a pool that publishes: `graph.analysis` does not know of them.
    work: dict[str, float] = defaultdict(float)
    for node in graph.nodes:
        if node.fires and node.clock == "update":
            work[pools[node.name]] += means[node.name] / node.every
    for node in graph.nodes:
        if node.construct == "broadcast" and graph.producer(node.inputs[0].ref.node):
            # Only the versions that a node reads are published.
            read = [each.every for each in graph.nodes if any(item.ref.node == node.name for item in each.inputs)]
            work[held[node.inputs[0].ref.node]] += publish / max(node.every, min(read, default=1))
    return max([found, *(Bound(seconds, pool=pool) for pool, seconds in work.items())], key=lambda b: b.seconds)


# About how many events all simulations of a table have: two seconds on a slow core.
EVENTS = 24_000
MOST_UPDATES, LEAST_UPDATES = 60, 16
# Updates at the start of each simulation in which the pipeline fills, the same for every lag.
FILLING = 6


@dataclass(frozen=True)
class Case:
    """The result for a lag and a number of generator replicas. `period_s` is None if the rules do not allow them."""

    lag: int
    replicas: int
    period_s: float | None
    lag_mean: float = 0.0
    busy: dict[str, float] | None = None


@dataclass(frozen=True)
class WhatIfTable:
    """The cases, the run's own lag and number of replicas, and for how many updates each case was simulated. `pool` is
    the generators' pool. `measured_s` is the run's own period over as many updates, None if it has done fewer.
    `crowding` is the share of a group's time that is proportional to the number of groups on its replica (see
    `Crowding`). `complete` is False if time ran out."""

    pool: str
    lag: int
    replicas: int
    updates: int
    crowding: float
    complete: bool
    cases: tuple[Case, ...]
    measured_s: float | None = None

    @property
    def crowded(self) -> bool:
        """True if the run shows by how much groups slow each other down. If not, cases with more groups at once, such
        as a larger lag, look too fast."""
        return self.crowding >= 0.005

    def case(self, lag: int, replicas: int) -> Case | None:
        return next((c for c in self.cases if (c.lag, c.replicas) == (lag, replicas)), None)


def what_if(stage: StageHistory, fitted: Fit, out_of_time: Callable[[], bool]) -> WhatIfTable | None:
    """Simulate the table of a training stage. None for a program without a pool that samples with lagged weights."""
    pool = generators(stage.tables)
    if pool is None or not stage.followed.ends:
        return None
    graph, plan, rules = stage.origin.graph, stage.origin.plan, stage.origin.rules
    now = (stage.tables.max_lag, len(stage.tables.by_pool[pool]))
    lags = sorted({*range(5), now[0], now[0] + 1})
    sizes = sorted({max(1, now[1] // 2), now[1], now[1] + 1, 2 * now[1], 3 if now[1] == 1 else now[1]})
    wanted = [(lag, size) for size in sizes for lag in lags]
    # The run itself first, then its neighbours: time may run out.
    wanted.sort(key=lambda case: (case[1] != now[1], abs(case[1] - now[1]), case[0] != now[0], abs(case[0] - now[0])))
    # The same number of updates for every case, so that the fill of the pipeline is the same share of each.
    updates = min(MOST_UPDATES, max(LEAST_UPDATES, EVENTS // (_events_per_update(stage) * len(wanted))))
    crowd = crowding(group_work(stage, pool))
    durations = with_crowding(stage, fitted.durations, pool, crowd)
    cases: list[Case] = []
    limits = replace(rules, start=0, end=updates, drops=10_000)
    for lag, size in wanted:
        if out_of_time():
            break
        other, grown = with_lag(graph, now[0], lag), with_replicas(plan, pool, size)
        try:
            # If the lag is too small for the period at which weights are sent, some update would wait for ever.
            if check(other):
                raise ValueError
            tables = Tables(other, served(other, grown))
            found = simulate(tables, limits, durations, verdicts=fitted.verdicts)
        except ValueError:
            # The lag or the plan is refused, or filters drop too many groups.
            cases.append(Case(lag, size, None))
            continue
        busy: defaultdict[str, list[float]] = defaultdict(list)
        for replica, seconds in found.busy.items():
            busy[pool_of(replica)].append(seconds / found.wall_s if found.wall_s else 0.0)
        shares = {name: sum(values) / len(values) for name, values in busy.items()}
        cases.append(Case(lag, size, period(0.0, found.ends, FILLING), found.lag_mean, shares))
    cases.sort(key=lambda case: (case.replicas, case.lag))
    ends = _ends(stage)
    measured_s = period(stage.begin / NS, ends[:updates], FILLING) if len(ends) >= updates else None
    return WhatIfTable(pool, *now, updates, crowd.share, len(cases) == len(wanted), tuple(cases), measured_s)


def generators(tables: Tables) -> str | None:
    """The pool of the first per-group node that reads lagged weights."""
    return next((s.pool for s in tables.steps.values() if s.weights and not s.per_update), None)


def with_lag(graph: Graph, now: int, lag: int) -> Graph:
    """The graph with `lag` on the broadcasts whose lag is `now`."""
    return graph.at_lag(lag, {n.name for n in graph.nodes if n.construct == "broadcast" and n.lag == now})


def with_replicas(plan: Plan, name: str, size: int | None = None, capacity: int | None = None) -> Plan:
    """The plan with `size` replicas of a pool, all like its first one, each with room for `capacity` firings; None
    keeps the plan's numbers."""
    pool = next(pool for pool in plan.pools if pool.name == name)
    first, replicas = pool.replicas[0], pool.replicas
    if size is not None:
        replicas = tuple(replace(first, name=f"{name}/{i}") for i in range(size))
    replicas = tuple(replace(replica, capacity=capacity or replica.capacity) for replica in replicas)
    return Plan(tuple(replace(p, replicas=replicas) if p is pool else p for p in plan.pools))


# With fewer firings, `crowding` is not fitted.
LEAST_FIRINGS = 16


@dataclass(frozen=True)
class Crowding:
    """How firings of a pool slow each other down. `share` of a firing's seconds, from 0 to 1, is proportional to the
    number of firings in work on its replica; `mean` is the mean of that number in the run."""

    share: float
    mean: float

    def pace(self, count: int) -> float:
        """The speed of each firing with `count` firings in work, relative to the run's mean. A count of 0 is taken as
        1."""
        return 1 / (1 - self.share + self.share * max(count, 1) / self.mean)


def group_work(stage: StageHistory, pool: str) -> list[Work]:
    """The completed per-group firings of a pool, on the first rank of each replica."""
    done = (w for w in stage.followed.work if w.kind == "group" and not w.outcome and w.end > w.start)
    return [w for w in done if w.rank == 0 and stage.tables.pool_of[w.lane] == pool]


def crowding(work: Sequence[Work]) -> Crowding:
    """Fit how firings of a replica slow each other down.

    A firing's seconds are fitted to a + b n by least squares, where n is the mean number of firings in work on its
    replica meanwhile. The share is b n / (a + b n) at the mean of n; 0 if n does not vary enough.
    """
    seconds = [(item.end - item.start, total) for item, total in _integrals(work, float)]
    pairs = [(total / took, float(took)) for took, total in seconds]
    if len(pairs) < LEAST_FIRINGS:
        return Crowding(0.0, 1.0)
    mean_n, mean_s = fmean(n for n, _ in pairs), fmean(s for _, s in pairs)
    # A slope fitted to nearly equal numbers would be noise.
    spread = fmean((n - mean_n) ** 2 for n, _ in pairs)
    if spread < (0.1 * mean_n) ** 2:
        return Crowding(0.0, mean_n)
    slope = fmean((n - mean_n) * (s - mean_s) for n, s in pairs) / spread
    return Crowding(min(max(slope * mean_n / mean_s, 0.0), 1.0), mean_n)


def _integrals(work: Sequence[Work], value: Callable[[int], float]) -> list[tuple[Work, float]]:
    """Each firing with the integral, over its time, of a function of the number of firings in work on its replica."""
    by_replica: defaultdict[str, list[Work]] = defaultdict(list)
    for item in work:
        by_replica[item.lane].append(item)
    found: list[tuple[Work, float]] = []
    for items in by_replica.values():
        edges = sorted([(item.start, 1) for item in items] + [(item.end, -1) for item in items])
        # The integral from the first start to each time.
        total: dict[int, float] = {edges[0][0]: 0.0}
        now, count = edges[0][0], 0
        for time, change in edges:
            if time > now:
                total[time] = total[now] + value(count) * (time - now)
                now = time
            count += change
        found += [(item, total[item.end] - total[item.start]) for item in items]
    return found


def with_crowding(stage: StageHistory, durations: Durations, pool: str, crowd: Crowding) -> Durations:
    """The durations, where those of a pool's per-group nodes depend on how many firings a replica has in work.

    A firing with the same other firings in work as in the run takes as long as it did there. Without crowding the
    durations are returned unchanged.
    """
    if not crowd.share:
        return durations
    works: dict[str, dict[tuple[str, int], float]] = {}
    done = group_work(stage, pool)
    last = {id(item) for own in last_attempts(done).values() for item in own.values()}
    # Attempts that were repeated crowd their replica, and are no part of what a firing takes.
    for item, work in _integrals(done, crowd.pace):
        if id(item) in last:
            own, key = works.setdefault(item.name, {}), (named(item.name, item.turn), item.index)
            own[key] = own.get(key, 0.0) + work / NS
    steps = stage.tables.steps
    shared = SharedPace({n: Empirical.of(own, first_usual(stage, steps[n])) for n, own in works.items()}, crowd)
    return replace(durations, nodes={**durations.nodes, **dict.fromkeys(works, shared)})


@dataclass(frozen=True)
class SharedPace:
    """The duration of nodes whose firings slow each other down on a replica (`schedule.simulator.Batching`).

    work: by node, the seconds that its firings take at the run's mean pace.
    """

    work: Mapping[str, Empirical]
    crowding: Crowding

    def engine(self) -> "PacedReplica":
        return PacedReplica(self)


@dataclass
class PacedReplica:
    """One replica of `SharedPace` (`schedule.simulator.SimulatedEngine`): all firings in work have the same pace.

    `left`: the seconds at the mean pace that each firing has left at `now`.
    """

    shared: SharedPace
    left: dict[Firing, float] = field(default_factory=dict)
    now: float = 0.0
    spans: Spans = field(default_factory=Spans)

    def begin(self, firing: Firing, now: float) -> None:
        self._advance(now)
        self.left[firing] = self.shared.work[firing.node](named(firing.node, firing.turn), firing.index)

    @property
    def due(self) -> float:
        if not self.left:
            return inf
        return self.now + min(self.left.values()) / self.shared.crowding.pace(len(self.left))

    def finish(self) -> Sequence[Firing]:
        least = min(self.left.values())
        over = [firing for firing, left in self.left.items() if left <= least]
        self._advance(self.due)
        for firing in over:
            del self.left[firing]
        return over

    def _advance(self, now: float) -> None:
        done = (now - self.now) * self.shared.crowding.pace(len(self.left))
        self.left = {firing: max(left - done, 0.0) for firing, left in self.left.items()}
        self.now = now


# A bound below this share of the period does not explain the period: then firings queue for each other.
CLOSE = 0.75
# The least gain that is reported, and the difference up to which two periods count as equal.
GAIN, SAME = 0.01, 0.005


def verdict(
    graph: Graph, bound: Bound | None, period_s: float | None, error: float | None, table: WhatIfTable | None,
    busy: Mapping[str, float],
) -> str:  # fmt: skip
    """Sum up the run in one line. `busy` is the share of training during which each pool was busy."""
    if not period_s or bound is None:
        return "No update could be followed, so nothing can be said of what bounds this run."
    parts = [_bounds(graph, bound, period_s, busy)]
    if table is not None:
        parts += _gains(table, bound, period_s)
    if error is not None:
        parts.append(f"prediction error {_percent(abs(error))}")
    return "; ".join(parts) + "."


def role(graph: Graph, pool: str) -> str:
    """A pool in words: "training" or "generation" if it does that and has the usual name, else its name."""
    per_update = any(n.pool == pool and n.clock == "update" and n.outputs for n in graph.nodes if n.fires)
    made = {graph.producer(argument.name) for argument in graph.carried}
    if per_update and any(n.name in made for n in graph.nodes if n.pool == pool):
        return "training" if pool == "trainer" else f"pool {pool}"
    weighted = {n.name for n in graph.nodes if n.construct == "broadcast"}
    samples = any(n.pool == pool and n.clock == "group" and any(i.ref.node in weighted for i in n.inputs)
                  for n in graph.nodes if n.fires)  # fmt: skip
    return "generation" if samples and pool == "generator" else f"pool {pool}"


def cycle_nodes(graph: Graph, bound: Bound) -> list[str]:
    """The nodes of a bounding cycle that fire."""
    return [name for name in bound.cycle if name in graph and graph[name].fires]


def _bounds(graph: Graph, bound: Bound, period_s: float, busy: Mapping[str, float]) -> str:
    if bound.seconds < CLOSE * period_s:
        pool = max(busy, key=lambda name: busy[name], default="")
        most = f", the busiest of them {role(graph, pool)} ({_percent(busy[pool])})" if pool else ""
        return f"No pool and no cycle alone bounds this run{most}"
    if bound.pool:
        name = role(graph, bound.pool)
        return f"{name[:1].upper()}{name[1:]} bounds this run"
    names = " → ".join(cycle_nodes(graph, bound))
    return f"The cycle {names} bounds this run" + (f", {bound.span} updates at a time" if bound.span > 1 else "")


def bounded(bound: Bound, table: WhatIfTable, replicas: int) -> bool:
    """True if the bound of the run is one of the table's cases with that many generator replicas, too: the work of a
    pool has nothing to do with the lag, and only that of the generators with their number."""
    if bound.pool != table.pool:
        return bool(bound.pool)
    # Where groups slow each other down, the lag changes how many a generator has at once.
    return replicas == table.replicas and not table.crowded


def _gains(table: WhatIfTable, bound: Bound, measured_s: float) -> list[str]:
    """What another lag, and another number of generators, would gain; nothing if no other was simulated.

    The table may be of the run's first updates, which may have taken less than others, and the bound is of the whole
    run. So no case is taken to be further below the run's own than the bound, if it has that bound, is below the run.
    """
    said: list[str] = []
    run = table.case(table.lag, table.replicas)
    least_s = bound.seconds / measured_s * (run.period_s or 0.0) if run is not None else 0.0
    own = [
        replace(c, period_s=max(c.period_s, least_s)) if c.period_s and bounded(bound, table, c.replicas) else c
        for c in table.cases
    ]
    for name, fixed in (("lag", "replicas"), ("replicas", "lag")):
        cases = [c for c in own if c.period_s and getattr(c, fixed) == getattr(table, fixed)]
        if run is None or not run.period_s or len(cases) < 2:
            continue
        least = min(c.period_s or 0.0 for c in cases)
        # Of the cases that equal the best, the one with the least lag or the fewest generators.
        value, period_s = min(
            (getattr(c, name), c.period_s) for c in cases if (c.period_s or 0.0) <= least * (1 + SAME)
        )
        gain = run.period_s / (period_s or run.period_s) - 1
        if value != getattr(table, name) and gain >= GAIN:
            generators = "1 generator" if value == 1 else f"{value} generators"
            up_to = "up to " if name == "lag" and value > table.lag and not table.crowded else ""
            said.append(f"{f'lag {value}' if name == 'lag' else generators} would gain {up_to}{_percent(gain)}")
        elif name == "lag":
            smaller = [c.lag for c in cases if c.lag < table.lag and (c.period_s or 0) <= run.period_s * (1 + SAME)]
            said.append(f"lag {min(smaller)} would do as well" if smaller else "another lag would gain nothing")
    return said


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0095 else f"{100 * share:.1f} %" if share >= 0.0005 else "under 0.1 %"
