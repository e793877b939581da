"""What another lag, or another number of generators, would have made of a run: a table of simulations. Pure.

Every firing takes as long as it did in the run. A replica that has fewer groups at once decodes each of them faster:
how much, is fitted to the run (`crowding`), and where the run does not tell, nothing is assumed.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from penstock.graph import check
from penstock.graph.ir import Graph
from penstock.runtime.plan.plan import Plan, Pool
from penstock.runtime.plan.simulated_places import served
from penstock.runtime.record.timeline import pool_of
from penstock.runtime.report.facts import Stage
from penstock.runtime.report.follow import NS, Work
from penstock.runtime.report.predicted import Empirical, Fit, period
from penstock.runtime.schedule.durations import Durations
from penstock.runtime.schedule.simulator import simulate
from penstock.runtime.schedule.tables import Rules, Tables, compile_tables

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
    share = crowding([w for w in stage.followed.work if stage.tables.pool_of[w.lane[0]] == pool and w.lane[1] == 0])
    cases: list[Case] = []
    limits = replace(rules, start=0, end=updates, drops=10_000)
    for lag, size in wanted:
        if out_of_time():
            break
        other, grown = with_lag(graph, now[0], lag), with_replicas(plan, pool, size)
        faster = 1 - share + share * now[1] / size
        cases.append(_case(other, grown, limits, fitted, (pool, faster), (lag, size)))
    cases.sort(key=lambda case: (case.replicas, case.lag))
    return Table(pool, *now, updates, _measured_s(stage, updates), share, tuple(cases), len(cases) == len(wanted))


def _measured_s(stage: Stage, updates: int) -> float | None:
    ends = [end / NS for _, end in sorted(stage.followed.ends.items())]
    return period(stage.begin / NS, ends[:updates], FILLING) if len(ends) >= updates else None


def _case(
    graph: Graph, plan: Plan, rules: Rules, fitted: Fit, scaled: tuple[str, float], names: tuple[int, int]
) -> Case:
    if check(graph):  # with too small a lag for how seldom weights are sent, some update would wait for ever
        return Case(*names, None)
    try:
        tables = compile_tables(graph, served(graph, plan))
        found = simulate(tables, rules, _scaled(tables, fitted, *scaled), verdicts=fitted.verdicts)
    except ValueError:  # such a lag or plan is refused, or filters drop too much
        return Case(*names, None)
    busy: dict[str, list[float]] = {}
    for replica, seconds in found.busy.items():
        busy.setdefault(pool_of(replica), []).append(seconds / found.wall_s if found.wall_s else 0.0)
    shares = {pool: sum(values) / len(values) for pool, values in busy.items()}
    return Case(*names, period(0.0, found.ends, FILLING), found.lag_mean, shares)


def _scaled(tables: Tables, fitted: Fit, pool: str, factor: float) -> Durations:
    """The durations with those of a pool's per-group nodes multiplied."""
    names = {step.name for step in tables.group_steps[pool]}
    durations = fitted.durations.nodes
    nodes = {
        name: replace(took, scale=factor) if name in names and isinstance(took, Empirical) else took
        for name, took in durations.items()
    }
    return replace(fitted.durations, nodes=nodes)


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


LEAST_FIRINGS = 16
"""Below so many firings, nothing is fitted."""


def crowding(work: Sequence[Work]) -> float:
    """The share of a firing's time that is due to the firings beside it on its replica, from 0 to 1.

    A firing's seconds are fitted to a + b n by least squares, n being the mean number of firings that its replica had
    in work meanwhile; the share is b n / (a + b n) at the mean of n. 0 where n does not vary enough to tell.
    """
    pairs: list[tuple[float, float]] = []
    by_replica: dict[str, list[Work]] = {}
    for item in work:
        if item.kind == "group" and not item.outcome and item.end > item.start:
            by_replica.setdefault(item.lane[0], []).append(item)
    for items in by_replica.values():
        times, sums = _integral(items)
        for item in items:
            busy = sums[bisect_right(times, item.end) - 1] - sums[bisect_right(times, item.start) - 1]
            pairs.append((busy / (item.end - item.start), float(item.end - item.start)))
    if len(pairs) < LEAST_FIRINGS:
        return 0.0
    mean_n, mean_s = fmean(n for n, _ in pairs), fmean(s for _, s in pairs)
    spread = fmean((n - mean_n) ** 2 for n, _ in pairs)
    if spread < (0.1 * mean_n) ** 2:
        return 0.0
    slope = fmean((n - mean_n) * (s - mean_s) for n, s in pairs) / spread
    return min(max(slope * mean_n / mean_s, 0.0), 1.0)


def _integral(items: Sequence[Work]) -> tuple[list[int], list[float]]:
    """At each time at which a firing begins or ends, the integral of the number in work until then."""
    edges = sorted([(item.start, 1) for item in items] + [(item.end, -1) for item in items])
    times, sums, count, total = [edges[0][0]], [0.0], 0, 0.0
    for time, change in edges:
        if time > times[-1]:
            total += count * (time - times[-1])
            times.append(time)
            sums.append(total)
        count += change
    return times, sums
