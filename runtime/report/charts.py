"""The charts of a report: small SVGs of curves and histograms, each with a label that describes it. Pure.

`chart_groups` makes the report's charts: learning, staleness and speed from the run's rows, and queue depths. `curves`
and `histogram` make one chart, which a template draws. Colours, lines and fonts are classes of the page's style, so
that charts follow its light and dark themes.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite, nan
from typing import Any

from penstock.graph.types import BY_LAG, COLUMNS, EPOCH, LONGEST_LAG
from penstock.runtime.record.metrics import NO_NUMBERS, Row, columns
from penstock.runtime.record.trace_formats import round_step
from penstock.runtime.report.follow import NS
from penstock.runtime.report.run_history import Facts
from penstock.runtime.report.summary import Report

WIDTH, HEIGHT = 360.0, 168.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 10.0, 12.0, 24.0
# How many points a curve has at most; a longer one shows the minimum and maximum of each stretch.
MOST_POINTS = 320

# An x, and a y for each series; nan where there is none.
Point = tuple[float, ...]


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high`, drawn between `start` and `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        # A scale of one value has it in the middle.
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.stop - self.start)

    def ticks(self, about: int, least: float = 0.0) -> list[float]:
        """About `about` round numbers, at least `least` apart."""
        if self.high <= self.low:
            return [self.low]
        step = max(least, round_step(self.high - self.low, about))
        return [tick * step for tick in range(int(-(-self.low // step)), int(self.high // step) + 1)]


@dataclass(frozen=True)
class Figure:
    """A chart, which `templates/_chart.svg.j2` draws: its title, a description for screen readers, and its numbers. A
    curve is (series, points on the picture), a bar is (number, left edge, value).

    `points` and `frame` (left, right, least x, largest x) are for reading values off with the pointer or the keys.
    `whole`: x has only integer values, such as updates.
    """

    title: str
    said: str
    names: tuple[str, ...]
    x: str
    rows: Sequence[tuple[str, ...]]
    ys: Scale
    limit: tuple[float, str] | None
    xs: Scale | None = None
    curves: Sequence[tuple[int, list[tuple[float, float]]]] = ()
    points: str = ""
    frame: str = ""
    steps: bool = False
    whole: bool = False
    bars: Sequence[tuple[int, float, float]] = ()

    @property
    def every(self) -> int:
        """The bars whose number is a multiple of this are labelled, about a dozen of them."""
        return max(1, int(round_step(len(self.bars), 12)))


def curves(
    title: str,
    names: Sequence[str],
    points: Sequence[Point],
    x: str = "update",
    limit: tuple[float, str] | None = None,
    *,
    steps: bool = False,
) -> Figure:
    """A chart of one or more curves over one x. `limit` is a horizontal line with its label. `steps`: a value holds
    until the next point."""
    shown = thinned(points)
    values = [y for p in points for y in p[1:] if isfinite(y)]
    ys = _nice([*values, *([limit[0]] if limit else [])])
    xs = Scale(points[0][0], points[-1][0], LEFT, WIDTH - RIGHT)
    # The first series is drawn last, over the others.
    drawn = [
        (place - 1, [(xs.at(p[0]), ys.at(p[place])) for p in shown if isfinite(p[place])])
        for place in range(len(names), 0, -1)
    ]
    # A pointer cannot resolve more than six digits, and all digits would double the page's bytes.
    kept = [[float(f"{v:.6g}") if isfinite(v) else None for v in p] for p in shown]
    return Figure(
        title,
        "; ".join(_said(name, [p[i + 1] for p in points]) for i, name in enumerate(names)),
        tuple(names),
        x,
        [(number(p[0]), *(number(y) for y in p[1:])) for p in thinned(points, 40)],
        ys,
        limit,
        xs,
        drawn,
        json.dumps(kept),
        json.dumps([xs.start, xs.stop, xs.low, xs.high]),
        steps,
        whole=all(point[0] == int(point[0]) for point in points),
    )


def histogram(
    title: str, counts: Mapping[int, float], x: str, unit: str, limit: tuple[int, str] | None = None
) -> Figure:
    """A chart with a bar for each integer. `limit` marks the upper edge of a number, with a label."""
    low, high = min(counts), max([*counts, *([limit[0]] if limit else [])])
    # Numbers that do not occur have a place, too: gaps are information.
    room, total = (WIDTH - LEFT - RIGHT) / (high - low + 1), sum(counts.values())
    said = ", ".join(f"{x} {value}: {percent(count / total)}" for value, count in sorted(counts.items())[:12])
    rows = [(str(value), number(count)) for value, count in sorted(counts.items())]
    bars = [(value, LEFT + (value - low) * room, counts.get(value, 0.0)) for value in range(low, high + 1)]
    return Figure(title, said, (unit,), x, rows, _nice([0.0, max(counts.values())]), limit, bars=bars)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """The first and last points, and of each stretch between them the minimum and maximum of each series."""
    if len(points) <= most:
        return list(points)
    chosen: set[int] = {0, len(points) - 1}
    # Minimum and maximum, not every n-th point: readers look for single spikes.
    series = range(1, len(points[0]))
    stretches = max(1, most // 2 // max(1, len(series)))
    for place, one in product(range(stretches), series):
        part = range(place * len(points) // stretches, (place + 1) * len(points) // stretches)
        known = [(points[i][one], i) for i in part if isfinite(points[i][one])]
        if known:
            chosen |= {min(known)[1], max(known)[1]}
    return [points[i] for i in sorted(chosen)]


def number(value: float) -> str:
    """A number as text, with at most four significant digits."""
    if not isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    # An exponent without a leading zero saves space on an axis.
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e+")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.0995 else f"{100 * share:.0f} %"


def _said(name: str, values: Sequence[float]) -> str:
    known = [v for v in values if isfinite(v)]
    if not known:
        return f"{name}: no values"
    if len(known) == 1:
        return f"{name} {number(known[0])}"
    first, last, least, most = map(number, (known[0], known[-1], min(known), max(known)))
    return f"{name} from {first} to {last}, between {least} and {most}"


def _nice(values: Sequence[float]) -> Scale:
    """A scale with some margin, from 0 if the values are near 0."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    # A scale that begins above 0 makes small changes look large. A scale around a constant would show impossible
    # values, such as a share of 110 %.
    if low > 0 and (low < 0.6 * high or low == high):
        low = 0.0
    elif low == high < 0:
        high = 0.0
    air = (high - low) * 0.06 or 1.0
    while True:
        found = Scale(low if low == 0 else low - air, high if high == 0 > low else high + air, HEIGHT - BOTTOM, TOP)
        written = [number(round(tick, 12)) for tick in found.ticks(4)]
        # Ratios of 1.000001 and 1.000003 are both shown as 1: an axis must not repeat a label.
        if len(set(written)) == len(written) > 1:
            return found
        air *= 2


@dataclass(frozen=True)
class ChartGroup:
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


def chart_groups(report: Report) -> list[ChartGroup]:
    """The groups of charts that are not empty."""
    rows, points = report.facts.rows, accuracies(report.facts)
    accuracy = [curves("Accuracy on held-out problems", ["accuracy"], points, x="version")] if points else []
    # Leave out speeds that are always 0: those of a program that generates nothing, or sends no weights.
    speed = [(title, names) for title, names in SPEED if any(_shown(rows, name) for name in names)]
    found = [
        ChartGroup("learning", "Learning", "", [*accuracy, *_rows(rows, LEARNING)]),
        ChartGroup("further", "Further metrics", FURTHER, _further(report)),
        ChartGroup("staleness", "Staleness", STALENESS, _staleness(report)),
        ChartGroup("off-policy", "How far off policy", OFF_POLICY, _rows(rows, POLICY)),
        ChartGroup("queues", "Queues", QUEUES, _queues(report)),
        ChartGroup("speed", "Speed", "", _rows(rows, speed)),
    ]
    return [group for group in found if group.figures]


# Most charts of further metrics: a node may report a thousand.
MOST = 24
FURTHER = f"What nodes of the program report beside that, where it changed: the first {MOST}. metrics.jsonl has all."
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


def _further(report: Report) -> list[Figure]:
    """A chart of each metric that no other chart shows and that changed, in the order of the rows' columns."""
    rows, labels = report.facts.rows, {node.label for node in report.facts.config.graph.nodes}
    shown = {name for _, names in (*LEARNING, *POLICY, *SPEED) for name in names}
    # A row says of which update a node off the critical path reports, and `accuracies` draws those with a version.
    shown |= (
        COLUMNS | NO_NUMBERS | {EPOCH, "lag_mean", "lag_max", "accuracy_version"} | {f"{one}_update" for one in labels}
    )
    found: dict[str, list[str]] = {}
    for column in {name: None for row in rows for name in row}:
        # A metric's own name may have dots; without its node's label it is the shortest.
        name = min((column.removeprefix(f"{label}.") for label in labels), key=len, default=column) or column
        measured = name == "accuracy" and any(f"{column}_version" in row for row in rows)
        # Counts by lag are a histogram.
        if name not in shown and not name.startswith(BY_LAG) and not measured:
            found.setdefault(name, []).append(column)
    figures: list[Figure] = []
    for name, reported in found.items():
        own = [{column: row[column] for column in ("update", *reported) if column in row} for row in rows]
        if len({row[column] for column in reported for row in own if _known(row.get(column))}) > 1:
            figures += _rows(own, [(name, (name,))])
        if len(figures) == MOST:
            break
    return figures


def _shown(rows: Sequence[Row], name: str) -> bool:
    return any(row.get(column) for column in columns(rows, name) for row in rows)


def numbers(values: Iterable[Any]) -> list[float]:
    """The finite numbers among the values; a row has null for infinities and NaN."""
    return [float(value) for value in values if _known(value)]


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def _value(value: Any) -> float:
    return float(value) if _known(value) else nan


def accuracies(facts: Facts) -> list[tuple[float, float]]:
    """(version, accuracy) on held-out problems: before training, after it, and where a node reported the version that
    it measured (`accuracy_version`). An accuracy without a version is of other problems, such as training's."""
    points: dict[float, float] = {}
    measured = (facts.summary or {}).get("measured", ())
    # Older folders have one dict instead of a list.
    for row in [*facts.rows, *([measured] if isinstance(measured, dict) else measured)]:
        for name, value in row.items():
            at = row.get(f"{name}_version")
            if name.rpartition(".")[2] == "accuracy" and _known(value) and _known(at):
                points[float(at)] = float(value)
    ends = [update for stage in facts.training for update in stage.followed.ends]
    last = float(max(ends, default=-1) + 1)
    points |= {at: facts.accuracy[when] for at, when in ((0.0, "before"), (last, "after")) if when in facts.accuracy}
    return sorted(points.items())


def _staleness(report: Report) -> list[Figure]:
    figures = []
    limit = report.stage.tables.max_lag if report.stage else 0
    bound = (limit, f"bound: lag {limit}")
    by_lag, by_version = report.tokens
    if report.lags:
        figures.append(histogram("Lag of groups, at their start", report.lags, "lag", "groups", bound))
    if by_lag:
        more = f" ({LONGEST_LAG}: that and more)" if limit > LONGEST_LAG else ""
        figures.append(histogram(f"Lag of tokens{more}", by_lag, "lag", "tokens", bound))
    if by_version:
        figures.append(histogram("Tokens by version", by_version, "version", "tokens"))
    rows = report.facts.rows
    points = [(float(row["update"]), _value(row.get("lag_mean")), _value(row.get("lag_max"))) for row in rows]
    if any(isfinite(p[1]) for p in points):
        figures.append(curves("Lag of tokens by update", ["mean", "largest"], points, limit=(limit, f"bound {limit}")))
    return figures


def _queues(report: Report) -> list[Figure]:
    depths = [depth for stage in report.facts.training for depth in stage.depths]
    if len(depths) < 2:
        return []
    pools = list(depths[0].in_work)
    steps = [name for name in depths[0].ready if any(depth.ready.get(name) for depth in depths)]

    def series(title: str, names: Sequence[str], value: Callable[[Any, str], int]) -> Figure:
        points: list[Point] = [(d.time / NS, *(float(value(d, name)) for name in names)) for d in depths]
        return curves(title, names, points, x="seconds", steps=True)

    work = series("Firings in work, by pool", pools[:6], lambda d, name: d.in_work.get(name, 0))
    ready = [series("Groups that wait, by node", steps[:6], lambda d, name: d.ready.get(name, 0))] if steps else []
    finished = series("Finished groups that wait for their update", ["groups"], lambda d, _: d.finished)
    return [work, *ready, finished]
