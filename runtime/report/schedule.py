"""A schedule as a page of its own: lanes that zoom and pan, with nothing to load. Pure but for templates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from penstock.runtime.record.timeline import Bar, boundaries, lanes, pool_of, span
from penstock.runtime.report.encode import Chart, Row, Strip, encode
from penstock.runtime.report.follow import NS, Work

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """A template of the page with its style and script in it, complete."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    style, script = (TEMPLATES / name for name in ("style.css", "page.js"))
    page = environment.get_template(template).render(style=style.read_text(), script=script.read_text(), **values)
    return page.encode(errors="backslashreplace").decode()  # a path in it may be no UTF-8


def schedule_html(bars: Sequence[Bar], title: str) -> str:
    """One self-contained HTML file that shows a schedule, real or simulated: a lane per replica, each bar's node,
    index, duration and version on hover and on keyboard focus, zoom by buttons, wheel and keys, light and dark.

    `bars` are what the simulator or a run's record has: times are seconds on any one clock, syncs may have lanes of
    their own ("policy>generator/0"), which are drawn in the lane of their replica.
    """
    begin, end = span(bars)
    rows: dict[str, Row] = {}
    for lane in lanes(bars):
        name = lane.name.rpartition(">")[2]
        row = rows.setdefault(name, Row(name, pool_of(name), Strip([])))
        row.real.work += [_work(bar, name, begin) for track in lane.tracks for bar in track]
    pools = list(dict.fromkeys(row.pool for row in rows.values()))
    ordered = sorted(rows.values(), key=lambda row: pools.index(row.pool))
    for row in ordered:
        row.real.swaps = sorted((w.end, w.index) for w in row.real.work if w.kind == "swap")
    ends = [(update, round((time - begin) * NS)) for update, time in boundaries(bars)]
    data, merged = encode(Chart(ordered, ends, end=round((end - begin) * NS)))
    return render("schedule.html.j2", title=title, data=data, merged=merged)


def _work(bar: Bar, lane: str, begin: float) -> Work:
    start, end = round((bar.start - begin) * NS), round((bar.end - begin) * NS)
    name = bar.name if bar.lane == lane else bar.lane.rpartition("/")[0]  # a channel's, on a lane of its own
    return Work((lane, 0), name, bar.index, 0, start, end, bar.kind, bar.version, (bar.detail, 0))
