"""The charts of a report: small SVGs of curves and histograms, each with a label that says what it shows. Pure.

`groups` are the report's charts: what the run's rows say of learning, staleness and speed, and what lay in queues.
`curves` and `histogram` draw one. Colours, lines and fonts are classes of the page's style, so that charts follow its
light and dark themes.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, product
from math import isfinite, nan
from typing import Any

from penstock.runtime.record.metrics import Row, columns
from penstock.runtime.record.trace_formats import round_step
from penstock.runtime.report.follow import NS
from penstock.runtime.report.run_history import Facts
from penstock.runtime.report.summary import Report

WIDTH, HEIGHT = 360.0, 168.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 12.0, 24.0
# Points of a curve; a longer one shows the least and the largest of each stretch.
MOST_POINTS = 320

# An x, and a y for each series; nan where there is none.
Point = tuple[float, ...]


@dataclass(frozen=True)
class Figure:
    """A chart: its title, its SVG, what a reader of the page is told of it, and its numbers.

    `points` and `frame` (left, right, least x, largest x) are for reading values off with the pointer or the keys.
    """

    title: str
    svg: str
    said: str
    names: tuple[str, ...]
    points: str
    frame: str
    x: str
    rows: Sequence[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Scale:
    low: float
    high: float

    def at(self, value: float, start: float, end: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return start + share * (end - start)


def curves(
    title: str,
    names: Sequence[str],
    points: Sequence[Point],
    x: str = "update",
    limit: tuple[float, str] | None = None,
    *,
    steps: bool = False,
) -> Figure:
    """One or more curves over one x. `limit` is a line across with its label. `steps`: a value stays until the next."""
    shown = thinned(points)
    values = [y for p in points for y in p[1:] if isfinite(y)]
    ys = _nice([*values, *([limit[0]] if limit else [])])
    xs = Scale(points[0][0], points[-1][0])
    parts = _axes(ys, xs, whole=all(point[0] == int(point[0]) for point in points))
    if limit:
        y = ys.at(limit[0], HEIGHT - BOTTOM, TOP)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(WIDTH - RIGHT - 2, y - 4 if y > TOP + 8 else y + 13, limit[1], "end", "limit-label"))
    for series in reversed(range(len(names))):
        parts += _curve([(p[0], p[series + 1]) for p in shown], xs, ys, series, steps)
    said = "; ".join(_said(name, [p[i + 1] for p in points]) for i, name in enumerate(names))
    rows = [(number(p[0]), *(number(y) for y in p[1:])) for p in thinned(points, 40)]
    kept = [[float(f"{v:.6g}") if isfinite(v) else None for v in p] for p in shown]
    frame = json.dumps([LEFT, WIDTH - RIGHT, xs.low, xs.high])
    return Figure(title, _svg(parts, f"{title}: {said}"), said, tuple(names), json.dumps(kept), frame, x, rows)


def histogram(
    title: str, bars: Sequence[tuple[int, float]], x: str, unit: str, limit: tuple[int, str] | None = None
) -> Figure:
    """A bar for each whole number that occurs. `limit` marks the upper edge of a number, with a label."""
    counts = dict(bars)
    low, high = min(counts), max([*counts, *([limit[0]] if limit else [])])
    total, top = sum(counts.values()), max(counts.values())
    ys = _nice([0.0, top])
    slots = high - low + 1
    room = (WIDTH - LEFT - RIGHT) / slots
    parts = _axes(ys, None)
    every = -(-slots // 12)
    for place in range(slots):
        value, left = counts.get(low + place, 0.0), LEFT + place * room
        y = ys.at(value, HEIGHT - BOTTOM, TOP)
        width = min(room - 2, 56) if room > 4 else room
        if value:
            parts.append(
                f'<rect class="f0 dot" x="{left + (room - width) / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{HEIGHT - BOTTOM - y:.1f}"><title>{x} {low + place}: {number(value)} {unit}</title></rect>'
            )
        if place % every == 0:
            parts.append(_text(left + room / 2, HEIGHT - 9, str(low + place), "middle"))
        if value and room > 34:
            parts.append(
                _text(left + room / 2, y - 3 if y > TOP + 10 else y + 12, percent(value / total), "middle", "value")
            )
    if limit:
        edge = LEFT + (limit[0] - low + 1) * room - 1
        parts.append(f'<line class="limit" x1="{edge:.1f}" x2="{edge:.1f}" y1="{TOP - 6}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(_text(edge - 4, TOP + 2, limit[1], "end", "limit-label"))
    said = ", ".join(f"{x} {value}: {percent(count / total)}" for value, count in sorted(counts.items())[:12])
    rows = [(str(value), number(count)) for value, count in sorted(counts.items())]
    return Figure(title, _svg(parts, f"{title}: {said}", False), said, (unit,), "", "", x, rows)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """The first and last points, and in between those at which a series is least and largest in a stretch."""
    if len(points) <= most:
        return list(points)
    chosen: set[int] = {0, len(points) - 1}
    # The least and the largest, not every n-th point: a single spike is what a reader looks for.
    series = range(1, len(points[0]))
    stretches = max(1, most // 2 // max(1, len(series)))
    for place, one in product(range(stretches), series):
        part = range(place * len(points) // stretches, (place + 1) * len(points) // stretches)
        known = [(points[i][one], i) for i in part if isfinite(points[i][one])]
        if known:
            chosen |= {min(known)[1], max(known)[1]}
    return [points[i] for i in sorted(chosen)]


def number(value: float) -> str:
    """Four significant digits at most."""
    if not isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


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
    """A scale with some air, from 0 where that is near."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > 0 and low < 0.6 * high:
        low = 0.0
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(low if low == 0 else low - air, high + air)


def _ticks(low: float, high: float, about: int, least: float = 0.0) -> list[float]:
    """About so many round numbers, `least` apart or more."""
    span = high - low
    if span <= 0:
        return [low]
    step = max(least, round_step(span, about))
    first = -(-low // step)
    return [tick * step for tick in range(int(first), int(high // step) + 1)]


def _axes(ys: Scale, xs: Scale | None, *, whole: bool = False) -> list[str]:
    """`whole`: what is between two whole numbers of x means nothing, as of updates."""
    parts = []
    for tick in _ticks(ys.low, ys.high, 4):
        y = ys.at(tick, HEIGHT - BOTTOM, TOP)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 5, y + 3.5, number(round(tick, 12)), "end"))
    for tick in _ticks(xs.low, xs.high, 6, 1.0 if whole else 0.0) if xs else []:
        x = xs.at(tick, LEFT, WIDTH - RIGHT) if xs else 0.0
        anchor = "end" if x > WIDTH - RIGHT - 8 else "middle"
        parts.append(_text(x, HEIGHT - 9, number(round(tick, 12)), anchor))
    return parts


def _curve(points: Sequence[tuple[float, float]], xs: Scale, ys: Scale, series: int, steps: bool) -> list[str]:
    known = [(xs.at(x, LEFT, WIDTH - RIGHT), ys.at(y, HEIGHT - BOTTOM, TOP)) for x, y in points if isfinite(y)]
    parts = []
    if len(known) > 1:
        corners = [corner for (_, before), (x, y) in pairwise(known) for corner in ((x, before), (x, y))]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (known[:1] + corners if steps else known))
        parts.append(f'<polyline class="curve s{series}" points="{path}"/>')
    if len(known) <= 30 and not steps:
        parts += [f'<circle class="dot f{series}" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in known]
    return parts


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], label: str, readable: bool = True) -> str:
    cursor = f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="0" x2="0"/>' if readable else ""
    focus = ' tabindex="0"' if readable else ""
    return (
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{escape(label)}"{focus}>'
        f"{''.join(parts)}{cursor}</svg>"
    )


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
    """The headings that have something to show."""
    rows, points = report.facts.rows, accuracies(report.facts)
    accuracy = [curves("Accuracy on held-out problems", ["accuracy"], points, x="version")] if points else []
    found = [
        ChartGroup("learning", "Learning", "", [*accuracy, *_rows(rows, LEARNING)]),
        ChartGroup("staleness", "Staleness", STALENESS, _staleness(report)),
        ChartGroup("off-policy", "How far off policy", OFF_POLICY, _rows(rows, POLICY)),
        ChartGroup("queues", "Queues", QUEUES, _queues(report)),
        ChartGroup("speed", "Speed", "", _rows(rows, SPEED)),
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
    # Older folders have one dict instead of a list.
    for row in [*facts.rows, *([measured] if isinstance(measured, dict) else measured)]:
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
    by_lag, by_version = report.tokens
    if report.lags:
        figures.append(histogram("Lag of groups, at their start", list(report.lags.items()), "lag", "groups", bound))
    if by_lag:
        figures.append(histogram("Lag of tokens", list(by_lag.items()), "lag", "tokens", bound))
    if by_version:
        figures.append(histogram("Tokens by version", list(by_version.items()), "version", "tokens"))
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
