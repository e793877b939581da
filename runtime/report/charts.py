"""Small charts as SVG: curves over updates or time, and histograms, each with a label that says what it shows. Pure.

Colours, lines and fonts are classes of the page's style, so that charts follow its light and dark themes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, product
from math import floor, isfinite, log10

WIDTH, HEIGHT = 360.0, 168.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 12.0, 24.0
MOST_POINTS = 320
"""Points of a curve; a longer one shows the least and the largest of each stretch."""

Point = tuple[float, ...]
"""An x, and a y for each series; nan where there is none."""


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
        parts += _limit(ys.at(limit[0], HEIGHT - BOTTOM, TOP), limit[1])
    for series in reversed(range(len(names))):
        parts += _curve([(p[0], p[series + 1]) for p in shown], xs, ys, series, steps)
    said = "; ".join(_said(name, [p[i + 1] for p in points]) for i, name in enumerate(names))
    rows = [(number(p[0]), *(number(y) for y in p[1:])) for p in thinned(points, 40)]
    kept = [[_short(v) if isfinite(v) else None for v in p] for p in shown]
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


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _said(name: str, values: Sequence[float]) -> str:
    known = [v for v in values if isfinite(v)]
    if not known:
        return f"{name}: no values"
    if len(known) == 1:
        return f"{name} {number(known[0])}"
    return (
        f"{name} from {number(known[0])} to {number(known[-1])}, between {number(min(known))} and {number(max(known))}"
    )


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
    rough = span / about
    power = 10.0 ** floor(log10(rough))
    step = max(least, next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999))
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


def _limit(y: float, label: str) -> list[str]:
    line = f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return [line, _text(WIDTH - RIGHT - 2, y - 4 if y > TOP + 8 else y + 13, label, "end", "limit-label")]


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
