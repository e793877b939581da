"""What the simulator makes of a run: its prediction, other lags and numbers of generators, and the verdict in one line.

Pure. The simulator runs the run's own scheduler on a virtual clock, with the durations that the run had.

- `fit` takes durations and verdicts (of filters, of further turns) from a stage. A firing that the run did takes as
  long and decides as it did there; any other one draws from those of its node.
- `predict` simulates the stage itself. The prediction differs from the run by what the simulator leaves out: how long
  commands and answers are on their way, and that work on one machine slows other work down.
- `what_if` simulates other lags and numbers of generators. A replica that has fewer groups at once decodes each of them
  faster: `crowding` fits by how much. Where the run does not tell, nothing is assumed.
- `bound` is the least period of any schedule, and `verdict` the run in one line: what bounds it, what another lag or
  another number of generators would gain, how far the prediction is off.
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

# Events of a simulated stage, about: a longer run is predicted for its first updates only.
MOST_EVENTS = 60_000

# Kinds of work that move weights, with the simulator's names for them.
SYNC = {"publish": "publish", "send": "wire", "swap": "swap"}


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
class RecordedVerdicts(Verdicts):
    """The verdicts that a run came to. `known` are the firings that it has one for; others draw by the shares."""

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


@dataclass(frozen=True)
class Prediction:
    """The simulated stage on the report's clock: the first `updates` of it. Seconds per update as they were predicted,
    as they were measured for the same updates, and for all of the stage."""

    fit: Fit
    followed: Followed
    updates: int
    predicted_s: float
    compared_s: float
    measured_s: float

    @property
    def error(self) -> float | None:
        """By how much the prediction is larger than what was measured, as a share of it."""
        return self.predicted_s / self.compared_s - 1 if self.compared_s else None


def fit(stage: StageHistory) -> Fit | None:
    """None where the stage has not done every node that was due at least once."""
    spent = firings(stage.followed.work)
    nodes: dict[str, Empirical] = {}
    means: dict[str, float] = {}
    for step in stage.tables.steps.values():
        own = {key: took for key, took in spent.items() if key[0].partition(".")[0] == step.name}
        first = first_usual(stage, step)
        if own:
            nodes[step.name] = Empirical.of(own, first)
            # Firings that warm a process up would make a mean that no later one has.
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
    """The index of a step's first firing that the period counts: updates before it fill the pipeline, and warm
    everything up."""
    update = stage.origin.rules.start + _skipped(len(stage.followed.ends), stage.tables.max_lag + 1)
    return update if step.per_update else update * stage.origin.rules.batch


def firings(work: Iterable[Work]) -> dict[tuple[str, int], float]:
    """Seconds of each firing that was done, from its first rank's start to its last rank's end; of one that has paused,
    those of its segments; of one that was done again, as after the loss of a replica, the last time."""
    attempts: defaultdict[tuple[str, int], dict[tuple[int, int], Work]] = defaultdict(dict)
    for item in sorted(work, key=lambda item: item.start):
        if item.kind in ("group", "update") and item.outcome in ("", "dropped"):
            own = attempts[named(item.name, item.turn), item.index]
            # A rank does a segment once.
            if (item.segment, item.rank) in own:
                own.clear()
            own[item.segment, item.rank] = item
    found: dict[tuple[str, int], float] = {}
    for firing, own in attempts.items():
        spans: dict[int, tuple[int, int]] = {}
        for (segment, _), item in own.items():
            start, end = spans.get(segment, (item.start, item.end))
            spans[segment] = (min(start, item.start), max(end, item.end))
        found[firing] = sum(end - start for start, end in spans.values()) / NS
    return found


def named(node: str, turn: int) -> str:
    """A node's name with the number of the turn after the first one, as durations are asked for."""
    return f"{node}.{turn}" if turn else node


def _median_s(work: Iterable[Work], kind: str) -> float:
    """Median seconds of one part of the syncs that were answered, each as long as its slowest rank."""
    found: dict[tuple[str, int], int] = {}
    for item in work:
        if item.kind == kind and not item.outcome:
            key = (item.lane + item.name, item.index)
            found[key] = max(found.get(key, 0), item.end - item.start)
    return median(found.values()) / NS if found else 0.0


def _verdicts(stage: StageHistory) -> Verdicts:
    """Those of the run; of other firings the shares that it had."""
    done = [Firing(w.name, w.index, w.turn) for w in stage.followed.work if w.kind == "group" and w.rank == 0]
    counts = Counter(firing.node for firing in done)

    def shares(names: Iterable[str], chosen: set[Firing]) -> dict[str, float]:
        return {name: sum(f.node == name for f in chosen) / counts[name] for name in names if counts[name]}

    dropped, again, steps = stage.followed.dropped, stage.followed.again, stage.tables.steps.values()
    drops = shares((step.name for step in steps if step.filters), dropped)
    goes_on = shares((step.name for step in steps if step.answers), again)
    return RecordedVerdicts(drops, goes_on, 0, frozenset(done), frozenset(dropped), frozenset(again))


def predict(stage: StageHistory) -> Prediction | None:
    """The stage on a virtual clock, for as many updates as the run has done or as are quickly simulated; None if it
    has done none, or cannot be fitted."""
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
    """How many of the stage's updates are simulated: all of a short run."""
    return min(len(stage.followed.ends), max(16, MOST_EVENTS // _events_per_update(stage)))


def _events_per_update(stage: StageHistory) -> int:
    """About: a few for each group and node, and those of the update and its sync."""
    return stage.origin.rules.batch * (stage.tables.num_group_steps + 1) + 8


def period(begin: float, ends: Sequence[float], filling: int) -> float:
    """Seconds per update of the updates that were over at `ends` (one at least, seconds). The first `filling` of them
    fill the pipeline; they are left out if there are as many others."""
    skip = _skipped(len(ends), filling)
    first = ends[skip - 1] if skip else begin
    return (ends[-1] - first) / (len(ends) - skip)


def _skipped(updates: int, filling: int) -> int:
    """Of so many updates, how many are left out at the start: `filling`, if there are as many others."""
    return min(filling, updates // 2)


def bound(graph: Graph, plan: Plan, means: dict[str, float], publish: float, rules: Rules) -> Bound:
    """The period that no schedule can beat with these durations, and its cause. `means` are seconds by node, `publish`
    those of a snapshot of the weights."""
    capacity = {pool.name: sum(r.capacity for r in pool.replicas) for pool in served(graph, plan).pools}
    held = {name: pool.name for pool in plan.pools for name in pool.holds}
    pools = {node.name: held[node.name] for node in graph.nodes if node.name in held}
    found = period_bound(graph, means, rules.batch, capacity, pools)
    # A pool that publishes makes the snapshots besides its updates, which `graph.analysis` does not know of.
    work: dict[str, float] = defaultdict(float)
    for node in graph.nodes:
        if node.fires and node.clock == "update":
            work[pools[node.name]] += means[node.name] / node.every
    for node in graph.nodes:
        if node.construct == "broadcast" and graph.producer(node.inputs[0].ref.node):
            work[held[node.inputs[0].ref.node]] += publish / node.every
    return max([found, *(Bound(seconds, pool=pool) for pool, seconds in work.items())], key=lambda b: b.seconds)


# Events of all simulations of a table, about: two seconds on a slow core.
EVENTS = 24_000
MOST_UPDATES, LEAST_UPDATES = 60, 16
# Updates at the start of each simulation in which the pipeline fills, the same for every lag.
FILLING = 6


@dataclass(frozen=True)
class Case:
    """A lag and a number of generator replicas, and what comes of it: None where the rules do not allow it."""

    lag: int
    replicas: int
    period_s: float | None
    lag_mean: float = 0.0
    busy: dict[str, float] | None = None


@dataclass(frozen=True)
class WhatIfTable:
    """The cases, the lag and replicas of the run itself, and how many updates each was simulated for. `pool` has the
    generators; `measured_s` is the run's own period over as many updates, None where it has not done so many;
    `crowding` is by how much of itself a group's time grows with the groups beside it (see `crowding`); `complete` is
    False where time ran out."""

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
        """Whether the run tells by how much groups slow each other down. Where it does not, more of them at once, as a
        larger lag admits, look too fast."""
        return self.crowding >= 0.005

    def case(self, lag: int, replicas: int) -> Case | None:
        return next((c for c in self.cases if (c.lag, c.replicas) == (lag, replicas)), None)


def what_if(stage: StageHistory, fitted: Fit, out_of_time: Callable[[], bool]) -> WhatIfTable | None:
    """The table of a training stage; None for a program without a pool that samples with lagged weights."""
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
    # As many updates for every case: the filling of the pipeline is then the same share of each.
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
            # With too small a lag for how seldom weights are sent, some update would wait for ever.
            if check(other):
                raise ValueError
            tables = Tables(other, served(other, grown))
            found = simulate(tables, limits, durations, verdicts=fitted.verdicts)
        except ValueError:
            # Such a lag or plan is refused, or filters drop too much.
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
    """The graph with another lag on the broadcasts that have the largest one."""
    return graph.at_lag(lag, {n.name for n in graph.nodes if n.construct == "broadcast" and n.lag == now})


def with_replicas(plan: Plan, name: str, size: int | None = None, capacity: int | None = None) -> Plan:
    """The plan with `size` replicas of a pool, all like its first one, each of which may have `capacity` firings in
    work at once; None is as many as in the plan."""
    pool = next(pool for pool in plan.pools if pool.name == name)
    first, replicas = pool.replicas[0], pool.replicas
    if size is not None:
        replicas = tuple(replace(first, name=f"{name}/{i}") for i in range(size))
    replicas = tuple(replace(replica, capacity=capacity or replica.capacity) for replica in replicas)
    return Plan(tuple(replace(p, replicas=replicas) if p is pool else p for p in plan.pools))


# Below so many firings, nothing is fitted.
LEAST_FIRINGS = 16


@dataclass(frozen=True)
class Crowding:
    """How firings of a pool slow each other down: `share` of a firing's seconds, from 0 to 1, is proportional to the
    number of firings that its replica has in work; `mean` is that number in the run."""

    share: float
    mean: float

    def pace(self, count: int) -> float:
        """Seconds of the run's mean pace that pass in one second with so many firings in work; with none, for which
        there is no pace, as with one."""
        return 1 / (1 - self.share + self.share * max(count, 1) / self.mean)


def group_work(stage: StageHistory, pool: str) -> list[Work]:
    """The per-group firings that a pool has done, as the first rank of each replica did them."""
    done = (w for w in stage.followed.work if w.kind == "group" and not w.outcome and w.end > w.start)
    return [w for w in done if w.rank == 0 and stage.tables.pool_of[w.lane] == pool]


def crowding(work: Sequence[Work]) -> Crowding:
    """How much of a firing's time is due to the firings beside it on its replica.

    A firing's seconds are fitted to a + b n by least squares, n being the mean number of firings that its replica had
    in work meanwhile; the share is b n / (a + b n) at the mean of n. 0 where n does not vary enough to tell.
    """
    seconds = [(item.end - item.start, total) for item, total in _integrals(work, float)]
    pairs = [(total / took, float(took)) for took, total in seconds]
    if len(pairs) < LEAST_FIRINGS:
        return Crowding(0.0, 1.0)
    mean_n, mean_s = fmean(n for n, _ in pairs), fmean(s for _, s in pairs)
    # A slope through numbers that hardly differ would be noise.
    spread = fmean((n - mean_n) ** 2 for n, _ in pairs)
    if spread < (0.1 * mean_n) ** 2:
        return Crowding(0.0, mean_n)
    slope = fmean((n - mean_n) * (s - mean_s) for n, s in pairs) / spread
    return Crowding(min(max(slope * mean_n / mean_s, 0.0), 1.0), mean_n)


def _integrals(work: Sequence[Work], value: Callable[[int], float]) -> list[tuple[Work, float]]:
    """Each firing with the integral, over its time, of a function of the number in work on its replica."""
    by_replica: defaultdict[str, list[Work]] = defaultdict(list)
    for item in work:
        by_replica[item.lane].append(item)
    found: list[tuple[Work, float]] = []
    for items in by_replica.values():
        edges = sorted([(item.start, 1) for item in items] + [(item.end, -1) for item in items])
        # By time, the integral from the first one on.
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
    """The durations, with those of a pool's per-group nodes depending on how many firings a replica has in work.

    A firing with the same others in work as in the run takes as long as it did there. Without crowding the durations
    are returned as they are.
    """
    if not crowd.share:
        return durations
    works: dict[str, dict[tuple[str, int], float]] = {}
    for item, work in _integrals(group_work(stage, pool), crowd.pace):
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
    """One replica of `SharedPace` (`schedule.simulator.SimulatedEngine`): all firings in work go on at the same pace.

    `left` are the seconds at the mean pace that each of them has left at `now`.
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


# A bound that is a smaller share of the period does not explain it: then firings queue for each other.
CLOSE = 0.75
# A gain worth a word, and two periods that are as good as each other.
GAIN, SAME = 0.01, 0.005


def verdict(
    graph: Graph, bound: Bound | None, period_s: float | None, error: float | None, table: WhatIfTable | None,
    busy: Mapping[str, float],
) -> str:  # fmt: skip
    """`busy` is the share of training that each pool was busy."""
    if not period_s or bound is None:
        return "No update could be followed, so nothing can be said of what bounds this run."
    parts = [_bounds(graph, bound, period_s, busy)]
    if table is not None:
        parts += _gains(table)
    if error is not None:
        parts.append(f"prediction error {_percent(abs(error))}")
    return "; ".join(parts) + "."


def role(graph: Graph, pool: str) -> str:
    """A pool in words: "training" or "generation" where it does that and has the usual name, else its name."""
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


def _gains(table: WhatIfTable) -> list[str]:
    """What another lag, and another number of generators, would gain; nothing where no other was simulated."""
    said: list[str] = []
    run = table.case(table.lag, table.replicas)
    for name, fixed in (("lag", "replicas"), ("replicas", "lag")):
        cases = [c for c in table.cases if c.period_s and getattr(c, fixed) == getattr(table, fixed)]
        if run is None or not run.period_s or len(cases) < 2:
            continue
        least = min(c.period_s or 0.0 for c in cases)
        # The least lag, or the fewest generators, of those that are as good as the best.
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
