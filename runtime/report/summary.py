"""A run's report as a value: its history, the figures of its main stage, and the simulator's results. Pure.

`make_report` makes it, within the time that the caller allows. Each figure is computed once, when it is first read:
`report.page` draws them, `figures` are the same facts as JSON. If there are several training stages (a resumed run),
rank accounts and lags cover all of them; node times and the what-if table are of the stage with the most updates.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import isfinite
from statistics import median
from typing import Any

from penstock.graph.analysis import Bound
from penstock.graph.ir import Graph
from penstock.graph.show import clock
from penstock.graph.types import BY_LAG, LONGEST_LAG
from penstock.runtime.cluster.placement import decodes, samples_of
from penstock.runtime.report.follow import NS, RankId, Work
from penstock.runtime.report.run_history import Facts, StageHistory
from penstock.runtime.report.what_if import Prediction, WhatIfTable, bound, cycle_nodes, predict, verdict, what_if

# Kinds of work that move weights, with their names in the report.
SYNC_PARTS = {"publish": "pause", "send": "wire", "swap": "apply"}


@dataclass(frozen=True)
class NodeTime:
    """A node of the graph: how often it fired, its median seconds, the share of training during which a rank of its
    pool had it in work (the mean over ranks), and whether it is part of what bounds the run."""

    node: str
    pool: str
    clock: str
    firings: int
    median_s: float | None
    share: float
    bounds: bool


@dataclass(frozen=True)
class Report:
    """`stage` is the training stage with the most updates, None if the run began none; `prediction` is its prediction.
    `predictions` has those of all training stages that can be fitted, in order. `bound` is a lower bound on the period
    of any schedule."""

    facts: Facts
    stage: StageHistory | None
    prediction: Prediction | None
    predictions: tuple[Prediction, ...]
    bound: Bound | None
    table: WhatIfTable | None
    verdict: str

    @property
    def graph(self) -> Graph:
        return self.stage.origin.graph if self.stage is not None else self.facts.config.graph

    @cached_property
    def occupancy(self) -> dict[str, float]:
        """For each pool that works on several firings at once, the share of its slots in use while it was busy, from 0
        to 1. A group in decoding has a slot for each of its samples; a response that has ended counts until its group
        is done."""
        if (stage := self.stage) is None:
            return {}
        graph, found = stage.origin.graph, dict[str, float]()
        streaming = {node.name: node for node in graph.nodes if node.stream and node.clock == "group"}
        rows = {name: samples_of(graph, node) if decodes(graph, node) else 0 for name, node in streaming.items()}
        for pool, replicas in stage.tables.by_pool.items():
            # All ranks of a replica have the same firings: look at the first one.
            lanes = [(replica.name, 0) for replica in replicas]
            work = [w for w in stage.followed.work if w.rank_id in lanes and w.name in streaming]
            # In a pool that does not decode, a slot is a firing that it may have in work.
            slots = self.facts.config.flags.slots if any(rows[w.name] for w in work) else replicas[0].capacity
            by_lane = [[w for w in work if w.rank_id == lane] for lane in lanes]
            if busy := sum(slot_time([(w, 1) for w in items], 1) for items in by_lane):
                used = sum(slot_time([(w, rows[w.name] or 1) for w in items], slots) for items in by_lane)
                found[pool] = used / (busy * slots)
        return found

    @cached_property
    def nodes(self) -> list[NodeTime]:
        """The nodes that fire, in program order."""
        if (stage := self.stage) is None:
            return []
        found, marked = self.bound, set(cycle_nodes(self.graph, self.bound)) if self.bound else set()
        wall = max(stage.end - stage.begin, 1)
        by_node: defaultdict[str, list[Work]] = defaultdict(list)
        for item in stage.followed.work:
            if item.kind in ("group", "update"):
                by_node[item.name].append(item)
        times = []
        for node in self.graph.nodes:
            if not node.fires:
                continue
            pool, work = stage.tables.steps[node.name].pool, by_node[node.name]
            lanes = {w.rank_id for w in work}
            ranks = sum(len(replica.ranks) for replica in stage.tables.by_pool[pool])
            in_work = sum(slot_time([(w, 1) for w in work if w.rank_id == lane], 1) for lane in lanes)
            bounds = node.name in marked or (found is not None and found.pool == pool and bool(work))
            middle = median((w.end - w.start) / NS for w in work) if work else None
            num = sum(w.rank == 0 for w in work)
            times.append(NodeTime(node.name, pool, clock(node), num, middle, in_work / (wall * ranks), bounds))
        return times

    @cached_property
    def syncs(self) -> list[dict[str, Any]]:
        """For each channel and part of a sync: how many there were, their median and largest seconds."""
        found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for work in (work for stage in self.facts.training for work in stage.followed.work):
            if work.kind in SYNC_PARTS and not work.outcome:
                found[work.name, work.kind].append((work.end - work.start) / NS)
        return [
            {"channel": channel, "part": SYNC_PARTS[kind], "syncs": len(s), "median_s": median(s), "max_s": max(s)}
            for (channel, kind), s in sorted(found.items())
        ]

    @cached_property
    def lags(self) -> dict[int, int]:
        """The number of groups by lag: how many updates old the weights were that they began with, over all lives. A
        group that a resume took again counts once."""
        found: dict[int, int] = {}
        for stage in self.facts.training:
            found |= stage.followed.lags
        return dict(sorted(Counter(found.values()).items()))

    @cached_property
    def tokens(self) -> tuple[dict[int, float], dict[int, float]]:
        """The number of fresh tokens by lag, and by version, of the weights that sampled them, if the updates report
        them (`tokens_lag_K`). Updates count a lag of `LONGEST_LAG` and more as one: those tokens have no version here,
        unless the run cannot have a longer one."""
        longer = self.stage is not None and self.stage.tables.max_lag > LONGEST_LAG
        by_lag, by_version = defaultdict[int, float](float), defaultdict[int, float](float)
        for row in self.facts.rows:
            for name, value in row.items():
                lag = name.removeprefix(BY_LAG)
                if lag != name and lag.isdigit() and isinstance(value, int | float) and isfinite(value):
                    by_lag[int(lag)] += value
                    if not (longer and int(lag) == LONGEST_LAG):
                        by_version[row["update"] - int(lag)] += value
        return dict(sorted(by_lag.items())), dict(sorted(by_version.items()))


def slot_time(work: Iterable[tuple[Work, int]], slots: int) -> int:
    """The integral over time of the slots in use on one replica, in nanoseconds. `work` has each firing with its number
    of rows. Rows beyond `slots` wait."""
    total, now, held = 0, 0, 0
    for time, change in sorted(edge for item, rows in work for edge in ((item.start, rows), (item.end, -rows))):
        total += min(held, slots) * (time - now)
        now, held = time, held + change
    return total


def make_report(facts: Facts, out_of_time: Callable[[], bool]) -> Report:
    """Make the report of a run. Once `out_of_time()` is true, no further case of the what-if table is simulated."""
    pairs = [(stage, predict(stage)) for stage in facts.training]
    stage, prediction = max(pairs, key=lambda pair: len(pair[0].followed.ends), default=(None, None))
    least, table = None, None
    if stage is not None and prediction is not None:
        origin, fitted = stage.origin, prediction.fit
        least = bound(origin.graph, origin.plan, fitted.means, fitted.durations.publish, origin.rules)
        # The run reached its period, so the bound cannot be larger: its means may include slower, earlier firings.
        least = replace(least, seconds=min(least.seconds, prediction.measured_s))
        table = what_if(stage, fitted, out_of_time)
    measured, error = (prediction.measured_s, prediction.error) if prediction else (None, None)
    busy = {pool: shares.get("busy", 0.0) for pool, shares in facts.pool_shares.items()}
    line = verdict(stage.origin.graph if stage else facts.config.graph, least, measured, error, table, busy)
    return Report(facts, stage, prediction, tuple(p for _, p in pairs if p), least, table, line)


def figures(report: Report) -> dict[str, Any]:
    """The facts on the page, as JSON."""
    facts, prediction = report.facts, report.prediction
    by_lag, by_version = report.tokens
    table = asdict(report.table) if report.table else None
    if table is not None:
        del table["measured_s"]
    return {
        "folder": facts.folder,
        "program": facts.config.graph.name,
        "status": facts.summary["status"] if facts.summary else None,
        "error": facts.error,
        "updates": facts.updates,
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
        "nodes": [asdict(node) for node in report.nodes],
        "ranks": [
            {"rank": rank_name(lane, facts.whole_ns), "wall_ns": sum(account.values()),
             "training_ns": facts.training_ns.get(lane, {}), "whole_ns": account}
            for lane, account in facts.whole_ns.items()
        ],
        "pools": facts.pool_shares,
        "occupancy": report.occupancy,
        "syncs": report.syncs,
        "lags": {str(lag): count for lag, count in report.lags.items()},
        "lag_bound": report.stage.tables.max_lag if report.stage else None,
        "tokens_by_lag": {str(lag): count for lag, count in by_lag.items()},
        "tokens_by_version": {str(version): count for version, count in by_version.items()},
        "what_if": table,
    }  # fmt: skip


def rank_name(lane: RankId, known: Iterable[RankId]) -> str:
    """A rank's name on the page: its replica, with its number if the replica has several ranks."""
    replica, rank = lane
    return f"{replica} rank {rank}" if sum(other == replica for other, _ in known) > 1 else replica
