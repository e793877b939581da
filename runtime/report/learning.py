"""The charts of a report: what the run's rows say of learning, staleness and speed, and what lay in queues. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

from penstock.runtime.record.metrics import Row, columns
from penstock.runtime.report.charts import Figure, Point, curves, histogram
from penstock.runtime.report.facts import Facts
from penstock.runtime.report.follow import NS
from penstock.runtime.report.report import Report, lags, tokens_by_lag, tokens_by_version


@dataclass(frozen=True)
class Group:
    """Charts under one heading."""

    anchor: str
    title: str
    said: str
    figures: list[Figure]


LEARNING = (
    ("Reward", ("reward_mean",)),
    ("Loss", ("loss",)),
    ("Entropy, nats", ("entropy",)),
    ("Gradient norm, before clipping", ("grad_norm",)),
    ("Response length, tokens", ("response_length",)),
    ("Responses that ended by themselves", ("finished",)),
)
POLICY = (
    ("Importance ratio π / μ", ("ratio_mean", "ratio_max")),
    ("Share of tokens clipped", ("ratio_clipped",)),
    ("Mismatch at equal weights, nats", ("mismatch",)),
    ("Effective sample size, share of tokens", ("ess",)),
    ("KL(μ ‖ π), nats", ("kl",)),
    ("Tokens decoded on a stale cache, share", ("stale_cache",)),
)
SPEED = (
    ("Seconds per update", ("seconds", "update_s")),
    ("From publishing weights to live, seconds", ("sync_s",)),
    ("Tokens per second, generated and learnt from", ("generate_tokens_per_s", "train_tokens_per_s")),
)


def groups(report: Report) -> list[Group]:
    """The headings that have something to show."""
    rows, points = report.facts.rows, accuracies(report.facts)
    accuracy = [curves("Accuracy on held-out problems", ["accuracy"], points, x="version")] if points else []
    found = [
        Group("learning", "Learning", "", [*accuracy, *_rows(rows, LEARNING)]),
        Group("staleness", "Staleness", STALENESS, _staleness(report)),
        Group("off-policy", "How far off policy", OFF_POLICY, _rows(rows, POLICY)),
        Group("queues", "Queues", QUEUES, _queues(report)),
        Group("speed", "Speed", "", _rows(rows, SPEED)),
    ]
    return [group for group in found if group.figures]


STALENESS = (
    "By how many updates the weights were older than the policy that learnt: of a group, those that it began with; "
    "of a token, those that sampled it. The dashed line is the bound that the program set."
)
OFF_POLICY = "π is the policy that learns, μ the one that sampled. The ratios are those of all tokens learnt from."
QUEUES = (
    "Firings in work, groups that wait for a place or for weights, and finished groups that wait for their update. "
    "Slots of a generator that are empty while it is busy are occupancy, not idle time."
)


def _rows(rows: Sequence[Row], wanted: Iterable[tuple[str, Sequence[str]]]) -> list[Figure]:
    figures = []
    for title, names in wanted:
        present = [name for found in names for name in columns(rows, found) if any(_known(r.get(name)) for r in rows)]
        if present:
            points = [(float(row["update"]), *(_value(row.get(name)) for name in present)) for row in rows]
            figures.append(curves(title, present, points))
    return figures


def numbers(values: Iterable[Any]) -> list[float]:
    """Those that are numbers: a row has null for what JSON has no number for."""
    return [float(value) for value in values if _known(value)]


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def _value(value: Any) -> float:
    return float(value) if _known(value) else nan


def accuracies(facts: Facts) -> list[tuple[float, float]]:
    """(version, accuracy): before, after, and wherever a node that only measures reported it."""
    points: dict[float, float] = {}
    measured = (facts.summary or {}).get("measured", ())
    for row in [*facts.rows, *([measured] if isinstance(measured, dict) else measured)]:  # one, in older folders
        for name, value in row.items():
            at = row.get(f"{name.rpartition('.')[0] or 'measure'}_update", row.get("update"))
            if name.rpartition(".")[2] == "accuracy" and _known(value) and at is not None:
                points[float(at)] = float(value)
    ends = [update for stage in facts.training for update in stage.followed.ends]
    last = float(max(ends, default=-1) + 1)
    points |= {at: facts.accuracy[when] for at, when in ((0.0, "before"), (last, "after")) if when in facts.accuracy}
    return sorted(points.items())


def _staleness(report: Report) -> list[Figure]:
    figures = []
    limit = report.stage.tables.max_lag if report.stage else 0
    bound = (limit, f"bound: lag {limit}")
    if found := lags(report):
        figures.append(histogram("Lag of groups, at their start", sorted(found.items()), "lag", "groups", bound))
    if by_lag := tokens_by_lag(report.facts):
        figures.append(histogram("Lag of tokens", list(by_lag.items()), "lag", "tokens", bound))
    if by_version := tokens_by_version(report.facts):
        figures.append(histogram("Tokens by version", list(by_version.items()), "version", "tokens"))
    rows = report.facts.rows
    points = [(float(row["update"]), _value(row.get("lag_mean")), _value(row.get("lag_max"))) for row in rows]
    if any(isfinite(p[1]) for p in points):
        figures.append(curves("Lag of tokens by update", ["mean", "largest"], points, limit=(limit, f"bound {limit}")))
    return figures


def _queues(report: Report) -> list[Figure]:
    stages = report.facts.training
    depths = [depth for stage in stages for depth in stage.depths]
    if len(depths) < 2:
        return []
    figures = []
    pools = list(depths[0].in_work)
    steps = [name for name in depths[0].ready if any(depth.ready.get(name) for depth in depths)]

    def series(title: str, names: Sequence[str], value: Callable[[Any, str], int]) -> Figure:
        points: list[Point] = [(d.time / NS, *(float(value(d, name)) for name in names)) for d in depths]
        return curves(title, names, points, x="seconds", steps=True)

    figures.append(series("Firings in work, by pool", pools[:6], lambda d, name: d.in_work.get(name, 0)))
    if steps:
        figures.append(series("Groups that wait, by node", steps[:6], lambda d, name: d.ready.get(name, 0)))
    figures.append(series("Finished groups that wait for their update", ["groups"], lambda d, _: d.finished))
    return figures
