"""What another lag, or another number of generators, would have made of a run: a table of simulations. Pure.

Every firing takes as long as it did in the run. A replica that has fewer groups at once decodes each of them faster:
how much is fitted to the run (`crowding`), and where the run does not tell, nothing is assumed.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import fmean

from penstock.graph import check
from penstock.graph.ir import Firing, Graph
from penstock.runtime.plan.plan import Plan, Pool
from penstock.runtime.plan.simulated_places import served
from penstock.runtime.record.timeline import pool_of
from penstock.runtime.report.facts import Stage
from penstock.runtime.report.follow import NS, Work
from penstock.runtime.report.predicted import Empirical, Fit, first_usual, named, period
from penstock.runtime.schedule.durations import Durations, Spans
from penstock.runtime.schedule.simulator import simulate
from penstock.runtime.schedule.tables import Rules, Tables, compile_tables
from penstock.runtime.schedule.verdicts import Verdicts

EVENTS = 24_000
"""Events of all simulations of a table, about: two seconds on a slow core."""
MOST_UPDATES, LEAST_UPDATES = 60, 16
FILLING = 6
"""Updates at the start of each simulation in which the pipeline fills, the same for every lag."""


@dataclass(frozen=True)
class Case:
    """A lag and a number of generator replicas, and what comes of it: None where the rules do not allow it."""

    lag: int
    replicas: int
    period_s: float | None
    lag_mean: float = 0.0
    busy: dict[str, float] | None = None


@dataclass(frozen=True)
class Table:
    """The cases, the lag and replicas of the run itself, and how many updates each was simulated for. `pool` has the
    generators; `measured_s` is the run's own period over as many updates, None where it has not done so many;
    `crowding` is by how much of itself a group's time grows with the groups beside it (see `crowding`); `complete` is
    False where time ran out."""

    pool: str
    lag: int
    replicas: int
    updates: int
    measured_s: float | None
    crowding: float
    cases: tuple[Case, ...]
    complete: bool

    def case(self, lag: int, replicas: int) -> Case | None:
        return next((c for c in self.cases if (c.lag, c.replicas) == (lag, replicas)), None)


def what_if(stage: Stage, fitted: Fit, out_of_time: Callable[[], bool]) -> Table | None:
    """The table of a training stage; None for a program without a pool that samples with lagged weights."""
    pool = generators(stage.tables)
    if pool is None or not stage.followed.ends:
        return None
    graph, plan, rules = stage.origin.graph, stage.origin.plan, stage.origin.rules
    now = (stage.tables.max_lag, len(stage.tables.by_pool[pool]))
    lags = sorted({*range(5), now[0], now[0] + 1})
    sizes = sorted({max(1, now[1] // 2), now[1], now[1] + 1, 2 * now[1], 3 if now[1] == 1 else now[1]})
    wanted = [(lag, size) for size in sizes for lag in lags]
    wanted.sort(key=lambda case: (case[1] != now[1], abs(case[1] - now[1]), case[0] != now[0], abs(case[0] - now[0])))
    per_update = rules.batch * (stage.tables.num_group_steps + 1) + 8
    updates = min(MOST_UPDATES, max(LEAST_UPDATES, EVENTS // (per_update * len(wanted))))
    crowd = crowding(group_work(stage, pool))
    durations = with_crowding(stage, fitted.durations, pool, crowd)
    cases: list[Case] = []
    limits = replace(rules, start=0, end=updates, drops=10_000)
    for lag, size in wanted:
        if out_of_time():
            break
        other, grown = with_lag(graph, now[0], lag), with_replicas(plan, pool, size)
        cases.append(_case(other, grown, limits, durations, fitted.verdicts, (lag, size)))
    cases.sort(key=lambda case: (case.replicas, case.lag))
    return Table(pool, *now, updates, _measured_s(stage, updates), crowd.share, tuple(cases), len(cases) == len(wanted))


def _measured_s(stage: Stage, updates: int) -> float | None:
    ends = [end / NS for _, end in sorted(stage.followed.ends.items())]
    return period(stage.begin / NS, ends[:updates], FILLING) if len(ends) >= updates else None


def _case(
    graph: Graph, plan: Plan, rules: Rules, durations: Durations, verdicts: Verdicts, names: tuple[int, int]
) -> Case:
    if check(graph):  # with too small a lag for how seldom weights are sent, some update would wait for ever
        return Case(*names, None)
    try:
        tables = compile_tables(graph, served(graph, plan))
        found = simulate(tables, rules, durations, verdicts=verdicts)
    except ValueError:  # such a lag or plan is refused, or filters drop too much
        return Case(*names, None)
    busy: dict[str, list[float]] = {}
    for replica, seconds in found.busy.items():
        busy.setdefault(pool_of(replica), []).append(seconds / found.wall_s if found.wall_s else 0.0)
    shares = {pool: sum(values) / len(values) for pool, values in busy.items()}
    return Case(*names, period(0.0, found.ends, FILLING), found.lag_mean, shares)


def generators(tables: Tables) -> str | None:
    """The pool of the first per-group node that reads lagged weights."""
    return next((s.pool for s in tables.steps.values() if s.weights and not s.per_update), None)


def with_lag(graph: Graph, now: int, lag: int) -> Graph:
    """The graph with another lag on the broadcasts that have the largest one."""
    nodes = [replace(n, lag=lag) if n.construct == "broadcast" and n.lag == now else n for n in graph.nodes]
    return graph.replace(nodes=tuple(nodes))


def with_replicas(plan: Plan, name: str, size: int) -> Plan:
    """The plan with so many replicas of a pool, all like its first one."""

    def changed(pool: Pool) -> Pool:
        first = pool.replicas[0]
        return replace(pool, replicas=tuple(replace(first, name=f"{name}/{i}") for i in range(size)))

    return Plan(tuple(changed(pool) if pool.name == name else pool for pool in plan.pools))


def with_capacity(plan: Plan, name: str, capacity: int) -> Plan:
    """The plan whose replicas of a pool have so many firings in work at once."""

    def changed(pool: Pool) -> Pool:
        return replace(pool, replicas=tuple(replace(replica, capacity=capacity) for replica in pool.replicas))

    return Plan(tuple(changed(pool) if pool.name == name else pool for pool in plan.pools))


LEAST_FIRINGS = 16
"""Below so many firings, nothing is fitted."""


@dataclass(frozen=True)
class Crowding:
    """How firings of a pool slow each other down: `share` of a firing's seconds, from 0 to 1, is proportional to the
    number of firings that its replica has in work; `mean` is that number in the run."""

    share: float
    mean: float

    def pace(self, count: int) -> float:
        """Seconds of the run's mean pace that pass in one second with so many firings in work."""
        return 1 / (1 - self.share + self.share * count / self.mean)


def group_work(stage: Stage, pool: str) -> list[Work]:
    """The per-group firings that a pool has done, as the first rank of each replica did them."""
    done = (w for w in stage.followed.work if w.kind == "group" and not w.outcome and w.end > w.start)
    return [w for w in done if w.lane[1] == 0 and stage.tables.pool_of[w.lane[0]] == pool]


def crowding(work: Sequence[Work]) -> Crowding:
    """How much of a firing's time is due to the firings beside it on its replica.

    A firing's seconds are fitted to a + b n by least squares, n being the mean number of firings that its replica had
    in work meanwhile; the share is b n / (a + b n) at the mean of n. 0 where n does not vary enough to tell.
    """
    pairs: list[tuple[float, float]] = []
    for item, busy in _integrals(work, float):
        pairs.append((busy / (item.end - item.start), float(item.end - item.start)))
    if len(pairs) < LEAST_FIRINGS:
        return Crowding(0.0, 1.0)
    mean_n, mean_s = fmean(n for n, _ in pairs), fmean(s for _, s in pairs)
    spread = fmean((n - mean_n) ** 2 for n, _ in pairs)
    if spread < (0.1 * mean_n) ** 2:
        return Crowding(0.0, mean_n)
    slope = fmean((n - mean_n) * (s - mean_s) for n, s in pairs) / spread
    return Crowding(min(max(slope * mean_n / mean_s, 0.0), 1.0), mean_n)


def _integrals(work: Sequence[Work], value: Callable[[int], float]) -> list[tuple[Work, float]]:
    """Each firing with the integral, over its time, of a function of the number in work on its replica."""
    by_replica: dict[str, list[Work]] = {}
    for item in work:
        by_replica.setdefault(item.lane[0], []).append(item)
    found: list[tuple[Work, float]] = []
    for items in by_replica.values():
        times, sums = _integral(items, value)
        for item in items:
            begin, end = (sums[bisect_right(times, time) - 1] for time in (item.start, item.end))
            found.append((item, end - begin))
    return found


def _integral(items: Sequence[Work], value: Callable[[int], float]) -> tuple[list[int], list[float]]:
    """At each time at which a firing begins or ends, the integral until then of a function of the number in work."""
    edges = sorted([(item.start, 1) for item in items] + [(item.end, -1) for item in items])
    times, sums, count, total = [edges[0][0]], [0.0], 0, 0.0
    for time, change in edges:
        if time > times[-1]:
            total += value(count) * (time - times[-1])
            times.append(time)
            sums.append(total)
        count += change
    return times, sums


def with_crowding(stage: Stage, durations: Durations, pool: str, crowd: Crowding) -> Durations:
    """The durations with those of a pool's per-group nodes depending on how many firings a replica has in work.

    A firing that begins and ends beside the same others as in the run takes as long as it did there. Without crowding
    the durations are returned as they are.
    """
    if not crowd.share:
        return durations
    works: dict[str, dict[tuple[str, int], float]] = {}
    for item, work in _integrals(group_work(stage, pool), crowd.pace):
        works.setdefault(item.node, {})[named(item.node, item.turn), item.index] = work / NS
    steps = stage.tables.steps
    shared = SharedPace({n: Empirical.of(own, first_usual(stage, steps[n])) for n, own in works.items()}, crowd)
    return replace(durations, nodes={**durations.nodes, **dict.fromkeys(works, shared)})


@dataclass(frozen=True)
class SharedPace:
    """The duration of nodes whose firings slow each other down on a replica (`schedule.durations.Batching`).

    work: by node, the seconds that its firings take at the run's mean pace.
    """

    work: Mapping[str, Empirical]
    crowding: Crowding

    def engine(self) -> "PacedReplica":
        return PacedReplica(self)


@dataclass
class PacedReplica:
    """One replica of `SharedPace` (`schedule.durations.Engine`): all firings in work go on at the same pace.

    `left` are the seconds at the mean pace that each of them has left at `now`.
    """

    shared: SharedPace
    left: dict[Firing, float] = field(default_factory=dict)
    now: float = 0.0
    _begun: dict[Firing, float] = field(default_factory=dict)
    _spans: list[tuple[float, float, int]] = field(default_factory=list)

    def begin(self, firing: Firing, now: float) -> None:
        self._advance(now)
        self.left[firing] = self.shared.work[firing.node](named(firing.node, firing.turn), firing.index)
        self._begun[firing] = now

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
            self._spans.append((self._begun.pop(firing), self.now, firing.index))
        return over

    def _advance(self, now: float) -> None:
        done = (now - self.now) * self.shared.crowding.pace(len(self.left))
        self.left = {firing: max(left - done, 0.0) for firing, left in self.left.items()}
        self.now = now

    @property
    def spans(self) -> Spans:
        begins, ends, indices = zip(*self._spans, strict=True) if self._spans else ((), (), ())
        return Spans(begins, ends, indices)
