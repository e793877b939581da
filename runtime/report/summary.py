"""A run's report as a value: its history, the stage that the figures are of, what the simulator makes of it. Pure.

`make_report` makes it, within the time that the caller allows. `report.page` draws it; `figures` are the same facts as
JSON. Where there are several training stages (a resumed run), rank accounts and lags are of all of them, and node times
and the what-if table of the one with the most updates.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from math import isfinite
from statistics import median
from typing import Any, Literal

from penstock.graph.analysis import Bound
from penstock.graph.ir import Graph
from penstock.runtime.cluster.placement import decodes, samples_of
from penstock.runtime.record.timeline import pool_of
from penstock.runtime.report.follow import NS, RankId, Work
from penstock.runtime.report.run_history import Account, Facts, StageRecord, slot_time, union
from penstock.runtime.report.what_if import SYNC, Prediction, Table, bound, cycle_nodes, fit, predict, verdict, what_if


@dataclass(frozen=True)
class NodeTime:
    """A node of the graph: how often it was fired, its median seconds, the share of training in which a replica of its
    pool had it in work, and whether it is part of what bounds the run."""

    node: str
    pool: str
    clock: str
    firings: int
    median_s: float | None
    share: float
    bounds: bool


@dataclass(frozen=True)
class Report:
    """`stage` is the training stage with the most updates, None for a run that began none; `prediction` is of it.
    `predictions` are of all training stages, in their order; None for a stage that cannot be fitted. `bound` is the
    least period of any schedule."""

    facts: Facts
    stage: StageRecord | None
    prediction: Prediction | None
    predictions: tuple[Prediction | None, ...]
    bound: Bound | None
    table: Table | None
    verdict: str

    @property
    def graph(self) -> Graph:
        return self.stage.origin.graph if self.stage is not None else self.facts.config.graph


def make_report(facts: Facts, out_of_time: Callable[[], bool]) -> Report:
    """The report of a run. Once `out_of_time()` is true, no further case of the what-if table is simulated."""
    training = facts.training
    stage = max(training, key=lambda s: len(s.followed.ends), default=None)
    fits = [fit(s) for s in training]
    predictions = tuple(predict(s, f) if f is not None else None for s, f in zip(training, fits, strict=True))
    chosen = zip(training, fits, predictions, strict=True)
    fitted, prediction = next(((f, p) for s, f, p in chosen if s is stage), (None, None))
    found, table = None, None
    if stage is not None and fitted is not None and prediction is not None:
        origin = stage.origin
        found = bound(origin.graph, origin.plan, fitted.means, fitted.durations.publish, origin.rules)
        # What a run did can be done: means may be of firings before its period, which were slower.
        found = replace(found, seconds=min(found.seconds, prediction.measured_s))
        table = what_if(stage, fitted, out_of_time)
    measured, error = (prediction.measured_s, prediction.error) if prediction else (None, None)
    busy = {pool: shares.get("busy", 0.0) for pool, shares in pool_shares(facts).items()}
    line = verdict(stage.origin.graph if stage else facts.config.graph, found, measured, error, table, busy)
    return Report(facts, stage, prediction, predictions, found, table, line)


def rank_accounts(stages: Iterable[StageRecord]) -> dict[RankId, Account]:
    """Nanoseconds of each rank by state, over several stages."""
    total: dict[RankId, Counter[str]] = {}
    for stage in stages:
        for lane, account in stage.accounts.items():
            total.setdefault(lane, Counter()).update(account)
    return {lane: dict(account) for lane, account in total.items()}


def whole_accounts(facts: Facts) -> dict[RankId, Account]:
    """The same of the whole run. While processes start, all ranks are idle."""
    total = rank_accounts(facts.stages)
    starting = sum(life.starting for life in facts.lives)
    for account in total.values():
        account["starting"] = account.get("starting", 0) + starting
    return total


def pool_shares(facts: Facts) -> dict[str, dict[str, float]]:
    """Of each pool, the share of training by state: the mean over its ranks."""
    pools: dict[str, Counter[str]] = {}
    for (replica, _), account in rank_accounts(facts.training).items():
        pools.setdefault(pool_of(replica), Counter()).update(account)
    return {
        pool: {state: time / account.total() for state, time in account.items()}
        for pool, account in pools.items()
        if account.total()
    }


def occupancy(report: Report) -> dict[str, float]:
    """Of each pool that works on several firings at once: how full its slots were while it was busy, from 0 to 1. A
    group that is decoded has a slot for each of its samples; a response that has ended counts until its group is done.
    """
    stage, found = report.stage, dict[str, float]()
    if stage is None:
        return {}
    graph = stage.origin.graph
    streaming = {node.name: node for node in graph.nodes if node.stream and node.clock == "group"}
    rows = {name: samples_of(graph, node) if decodes(graph, node) else 0 for name, node in streaming.items()}
    for pool, replicas in stage.tables.by_pool.items():
        lanes = {(replica.name, 0) for replica in replicas}
        work = [w for w in stage.followed.work if w.rank_id in lanes and w.name in streaming]
        slots = report.facts.config.flags.slots if any(rows[w.name] for w in work) else replicas[0].capacity
        by_lane = [[w for w in work if w.rank_id == lane] for lane in lanes]
        busy = sum(map(union, by_lane))
        if busy:
            used = sum(slot_time([(w, rows[w.name] or 1) for w in items], slots) for items in by_lane)
            found[pool] = used / (busy * slots)
    return found


def node_times(report: Report) -> list[NodeTime]:
    """The nodes that fire, in program order."""
    stage = report.stage
    if stage is None:
        return []
    found, marked = report.bound, set(cycle_nodes(report.graph, report.bound)) if report.bound else set()
    wall = max(stage.end - stage.begin, 1)
    by_node: defaultdict[str, list[Work]] = defaultdict(list)
    for item in stage.followed.work:
        if item.kind in ("group", "update"):
            by_node[item.name].append(item)
    times = []
    for node in report.graph.nodes:
        if not node.fires:
            continue
        step = stage.tables.steps[node.name]
        work = by_node[node.name]
        lanes = {w.rank_id for w in work}
        ranks = sum(len(replica.ranks) for replica in stage.tables.by_pool[step.pool])
        share = sum(union(w for w in work if w.rank_id == lane) for lane in lanes) / (wall * ranks)
        bounds = node.name in marked or (found is not None and found.pool == step.pool and bool(work))
        clock = f"per {node.clock}" + (f", every {node.every}" if node.every > 1 else "")
        times.append(
            NodeTime(node.name, step.pool, clock, sum(w.rank == 0 for w in work),
                     median((w.end - w.start) / NS for w in work) if work else None, share, bounds)
        )  # fmt: skip
    return times


def sync_parts(stages: Iterable[StageRecord]) -> list[tuple[str, str, int, float, float]]:
    """Of each channel and part of a sync (pause, wire, apply): how many, median and largest seconds."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for stage in stages:
        for work in stage.followed.work:
            if work.kind in SYNC and not work.outcome:
                found[work.name, work.kind].append((work.end - work.start) / NS)
    names = {"publish": "pause", "send": "wire", "swap": "apply"}
    return [(channel, names[kind], len(s), median(s), max(s)) for (channel, kind), s in sorted(found.items())]


def lags(report: Report) -> Counter[int]:
    """Groups by how many updates the weights that they began with were old, over all lives."""
    return sum((stage.followed.lags for stage in report.facts.training), Counter[int]())


def tokens_by(facts: Facts, key: Literal["lag", "version"]) -> dict[int, float]:
    """Fresh tokens by the lag, or by the version, of the weights that they were sampled with, where the updates report
    them (`tokens_lag_K`)."""
    found: defaultdict[int, float] = defaultdict(float)
    for row in facts.rows:
        for name, value in row.items():
            lag = name.removeprefix("tokens_lag_")
            if lag != name and lag.isdigit() and isinstance(value, int | float) and isfinite(value):
                found[int(lag) if key == "lag" else row["update"] - int(lag)] += value
    return dict(sorted(found.items()))


def figures(report: Report) -> dict[str, Any]:
    """What the page shows, as JSON."""
    facts, prediction, table = report.facts, report.prediction, report.table
    training, whole = rank_accounts(facts.training), whole_accounts(facts)
    return {
        "folder": facts.folder,
        "program": facts.config.graph.name,
        "status": facts.summary["status"] if facts.summary else None,
        "updates": len({update for stage in facts.training for update in stage.followed.ends}),
        "verdict": report.verdict,
        "notes": facts.notes,
        "failures": facts.failures[0],
        "lives": len(facts.lives),
        "wall_ns": facts.end,
        "training_ns": sum(stage.end - stage.begin for stage in facts.training),
        "period_s": prediction.measured_s if prediction else None,
        "predicted_s": prediction.predicted_s if prediction else None,
        "model_error": prediction.error if prediction else None,
        "bound_s": report.bound.seconds if report.bound else None,
        "bound_cause": report.bound.cause if report.bound else None,
        "nodes": [asdict(node) for node in node_times(report)],
        "ranks": [
            {"rank": rank_name(lane, whole), "wall_ns": sum(account.values()), "training_ns": training.get(lane, {}),
             "whole_ns": account}
            for lane, account in whole.items()
        ],
        "pools": pool_shares(facts),
        "occupancy": occupancy(report),
        "syncs": [
            {"channel": channel, "part": part, "syncs": count, "median_s": middle, "max_s": most}
            for channel, part, count, middle, most in sync_parts(facts.training)
        ],
        "lags": {str(lag): count for lag, count in sorted(lags(report).items())},
        "lag_bound": report.stage.tables.max_lag if report.stage else None,
        "tokens_by_lag": {str(lag): count for lag, count in tokens_by(facts, "lag").items()},
        "tokens_by_version": {str(version): count for version, count in tokens_by(facts, "version").items()},
        "what_if": table and {
            "pool": table.pool, "lag": table.lag, "replicas": table.replicas, "updates": table.updates,
            "crowding": table.crowding, "complete": table.complete,
            "cases": [asdict(case) for case in table.cases],
        },
    }  # fmt: skip


def rank_name(lane: RankId, known: Iterable[RankId]) -> str:
    """A rank as the page names it: its replica, with its number where the replica has several."""
    replica, rank = lane
    return f"{replica} rank {rank}" if sum(other == replica for other, _ in known) > 1 else replica
