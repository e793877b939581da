"""The printers of a schedule. Pure.

- `gantt_text`: text for a terminal, one row per track, or the number of bars at once where a lane has many.
- `gantt_svg`: a picture, which needs no script and no font file, and follows the reader's light or dark theme.
- `chrome_trace`: the JSON that https://ui.perfetto.dev and chrome://tracing open. A pool is a process there, each track
  of a replica a thread: events of one thread must not overlap.

All print the lanes of `timeline`; `Drawing` has what the pictures have in common. `metrics.schedule_figure` prints the
same for papers, and `report.schedule_data` for a page that zooms.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

from penstock.runtime.record.timeline import Bar, Lane, boundaries, lanes, names, span

COLORS = ("#4C78A8", "#F2A541", "#5BA05B", "#B279A2", "#59B3AE", "#E4655F", "#9C8465", "#8A8FD8")
"""By order of appearance in the legend; told apart by the colour-blind for the first four."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Seconds from `start` to `end`; ticks are seconds after `start`, labels their texts with the unit."""

    start: float
    end: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def fraction(self, time: float) -> float:
        """Where a time lies, 0 at the start and 1 at the end."""
        return (time - self.start) / self.seconds


class Drawing:
    """A schedule as every printer of it sees it: its lanes, a colour for each name in the order of the legend, and when
    each update ended."""

    def __init__(self, bars: Sequence[Bar]) -> None:
        self.bars = bars
        self.lanes = lanes(bars)
        self.colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names(bars))}
        self.ends = boundaries(bars)
        self.longest_name = max((len(lane.name) for lane in self.lanes), default=0)

    def axis(self, num_ticks: int) -> Axis:
        return make_axis(*span(self.bars), num_ticks)

    def cramped(self, width: float, char: float, margin: float) -> set[str]:
        """The names of bars of which some have no room for their whole label: `width` is that of a second, `char` of a
        character, and `margin` what is beside a label."""
        return {bar.name for bar in self.bars if bar.seconds * width < len(bar.label) * char + margin}

    def shade(self, bar: Bar, share: float = 0.28) -> str:
        """The colour of a bar: lighter by `share` if it worked with an odd version."""
        color = self.colors[bar.name]
        return lighter(color, share) if (bar.version or 0) % 2 else color


def round_step(span: float, num_steps: float) -> float:
    """1, 2, 5 or 10 times a power of ten, so that about `num_steps` of it make up the span."""
    rough = span / num_steps
    power = 10.0 ** floor(log10(rough))
    return next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999)


def make_axis(start: float, end: float, num_ticks: int) -> Axis:
    """An axis with about `num_ticks` round ticks."""
    seconds = max(end - start, 1e-9)
    step = round_step(seconds, max(num_ticks, 1))
    ticks = [i * step for i in range(ceil(seconds / step + 1e-9)) if i * step <= seconds]
    unit, name = (1.0, "s") if seconds >= 2 else (1e3, "ms") if seconds >= 2e-3 else (1e6, "µs")
    labels = [f"{tick * unit:.10g} {name}" for tick in ticks]
    return Axis(start, start + seconds, tuple(ticks), tuple(labels))


def rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def lighter(color: str, share: float) -> str:
    """The colour mixed with `share` of white."""
    return "#" + "".join(f"{round(c + (255 - c) * share):02X}" for c in rgb(color))


def ink(color: str) -> str:
    """Black or white, whichever can be read on a colour (relative luminance of WCAG, without its gamma)."""
    red, green, blue = rgb(color)
    return "#16191D" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 135 else "#FFFFFF"


MAX_TRACKS = 4
"""A lane with more tracks is drawn as the number of its bars at once."""
HEIGHTS = " ▁▂▃▄▅▆▇█"
STYLES = (("├", "─", "┤"), ("┣", "━", "┫"), ("╞", "═", "╡"), ("╟", "┄", "╢"), ("┝", "╍", "┥"), ("┠", "┈", "┨"))
"""Begin, body and end of a bar, by its name's place in the legend, for output without colours."""
MARK = "┊"


@dataclass
class _Cell:
    char: str = " "
    paint: str = ""


def gantt_text(bars: Sequence[Bar], width: int = 100, color: bool = False) -> str:
    """The schedule as lines of `width` columns: lanes, an axis, updates' ends, a legend.

    With `color` bars are painted by their names with ANSI escapes and shaded by version; without, each name has a
    line style of its own. A column counts a bar if the bar covers its middle.
    """
    if not bars:
        return "nothing happened"
    drawing = Drawing(bars)
    gutter = drawing.longest_name + 2
    columns = max(width - gutter - 1, 10)
    axis = drawing.axis(columns // 14)
    ends = [(update, _column(axis, time, columns)) for update, time in drawing.ends]
    cramped = drawing.cramped(columns / axis.seconds, 1, 4)
    painter = _paint_color(drawing, cramped) if color else _paint_plain(list(drawing.colors), cramped)
    lines = [" " * gutter + _axis_line(axis, columns), " " * gutter + _version_line(ends, columns)]
    for lane in drawing.lanes:
        front = _ansi(drawing.colors[lane.tracks[-1][0].name]) if color else ""
        for number, cells in enumerate(_lane(lane, axis, columns, painter, front)):
            for _, column in ends:  # the ends of updates run through the idle cells
                if column < len(cells) and cells[column].char == " " and not cells[column].paint:
                    cells[column] = _Cell(MARK, "\x1b[2m" if color else "")
            lines.append((lane.name if not number else "").ljust(gutter) + _render(cells))
    return "\n".join(line.rstrip() for line in [*lines, "", *_legend(drawing, color, width)])


_Painter = Callable[[list[_Cell], Bar, int, int], None]


def _lane(lane: Lane, axis: Axis, columns: int, paint: _Painter, front: str) -> list[list[_Cell]]:
    if len(lane.tracks) > MAX_TRACKS:
        return [_occupancy(lane, axis, columns, front)]
    rows = []
    for track in lane.tracks:
        cells = [_Cell() for _ in range(columns)]
        for bar in track:
            first, last = _column(axis, bar.start, columns), _column(axis, bar.end, columns)
            if last > first or bar.seconds > 0:
                paint(cells, bar, first, max(last, first + 1))
        rows.append(cells)
    return rows


def _column(axis: Axis, time: float, columns: int) -> int:
    return min(round(axis.fraction(time) * columns), columns)


def _occupancy(lane: Lane, axis: Axis, columns: int, front: str) -> list[_Cell]:
    """How many bars there are at once, as eighths of the most there ever are."""
    counts = [0.0] * columns
    for bar in (bar for track in lane.tracks for bar in track):
        low, high = axis.fraction(bar.start) * columns, axis.fraction(bar.end) * columns
        for column in range(int(low), min(int(high) + 1, columns)):
            counts[column] += max(0.0, min(high, column + 1) - max(low, column))
    most = len(lane.tracks)
    heights = [HEIGHTS[min(8, round(count / most * 8)) or int(count > 0.05)] for count in counts]
    return [_Cell(height, front if height != " " else "") for height in heights]


def _paint_plain(legend: Sequence[str], cramped: Set[str]) -> _Painter:
    def paint(cells: list[_Cell], bar: Bar, first: int, last: int) -> None:
        begin, body, end = STYLES[legend.index(bar.name) % len(STYLES)]
        text = body * (last - first)
        text = begin + text[1:-1] + end if last - first > 1 else text.replace(body, "│")
        label = str(bar.index) if bar.name in cramped else f" {bar.label} "
        label = label if len(label) <= last - first - 2 else ""
        at = (last - first - len(label)) // 2
        text = text[:at] + label + text[at + len(label) :]
        for column, char in zip(range(first, min(last, len(cells))), text, strict=False):
            cells[column].char = char

    return paint


def _paint_color(drawing: Drawing, cramped: Set[str]) -> _Painter:
    def paint(cells: list[_Cell], bar: Bar, first: int, last: int) -> None:
        shade = drawing.shade(bar, 0.25)
        label = f"▏{bar.index if bar.name in cramped else bar.label}"
        label = (label if len(label) <= last - first else "▏").ljust(last - first)
        for column, char in zip(range(first, min(last, len(cells))), label, strict=False):
            cells[column] = _Cell(char, _ansi(ink(shade), shade))

    return paint


def _ansi(front: str, ground: str = "") -> str:
    codes = [38, 2, *rgb(front), *((48, 2, *rgb(ground)) if ground else ())]
    return f"\x1b[{';'.join(map(str, codes))}m"


def _render(cells: Sequence[_Cell]) -> str:
    text, paint = [], ""
    for cell in cells:
        if cell.paint != paint:
            text.append(("\x1b[0m" if paint else "") + cell.paint)
            paint = cell.paint
        text.append(cell.char)
    return "".join(text) + ("\x1b[0m" if paint else "")


def _axis_line(axis: Axis, columns: int) -> str:
    line = [" "] * columns
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        at = _column(axis, axis.start + tick, columns)
        if at + len(label) < columns:
            line[at : at + len(label) + 1] = "╷" + label
    return "".join(line)


def _version_line(ends: Sequence[tuple[int, int]], columns: int) -> str:
    """ "v1" where update 0 ended; only those that have room."""
    line, free = [" "] * columns, 0
    for update, column in ends:
        label = f"{MARK}v{update + 1}"
        if free <= column <= columns - len(label):
            line[column : column + len(label)] = label
            free = column + len(label) + 1
    return "".join(line)


def _legend(drawing: Drawing, color: bool, width: int) -> list[str]:
    items = []
    for i, (name, painted) in enumerate(drawing.colors.items()):
        plain = f"{''.join(STYLES[i % len(STYLES)])} {name}"
        items.append((f"{_ansi(ink(painted), painted)} {name} \x1b[0m" if color else plain, len(name) + 4))
    end = f"{MARK} end of an update"
    lines, room = [""], width
    for text, columns in [*items, (end, len(end))]:
        if columns > room and lines[-1]:
            lines.append("")
            room = width
        lines[-1] += text + "  "
        room -= columns + 2
    many = [f"{lane.name} up to {len(lane.tracks)}" for lane in drawing.lanes if len(lane.tracks) > MAX_TRACKS]
    return [*lines, f"▁▄█ firings at once: {', '.join(many)}"] if many else lines


CHAR = 6.3
"""Width of a character of a label, in pixels: an upper estimate for the fonts asked for."""
TRACK, THIN, GAP, HEAD, EDGE = 22.0, 5.0, 10.0, 76.0, 16.0
"""Pixels: a track with labels, the thinnest track, the gap between lanes, what is above the lanes, the margin."""
LANE = 132.0
"""Pixels that a lane may take before its tracks get thinner."""

STYLE = """
.gantt text{font:11px ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#3A4048}
.gantt .back{fill:#FFFFFF}.gantt .band{fill:#F4F6F8}.gantt .grid{stroke:#E2E6EA}
.gantt .end{stroke:#6B7480;stroke-dasharray:2 3}.gantt .title{font-size:14px;font-weight:600;fill:#16191D}
.gantt .lane{font-weight:600}.gantt .faint{fill:#7A838D}.gantt .label{font-size:10.5px}
@media (prefers-color-scheme:dark){.gantt .back{fill:#15181C}.gantt .band{fill:#1D2126}.gantt .grid{stroke:#2C3238}
.gantt .end{stroke:#8A939D}.gantt text{fill:#C9D1D9}.gantt .title{fill:#F0F3F6}.gantt .faint{fill:#8A939D}}
"""
"""Of this picture alone: in a notebook it stands among others."""


def gantt_svg(bars: Sequence[Bar], title: str = "", width: int = 1200) -> str:
    """The schedule as one SVG document, `width` pixels wide."""
    drawing = Drawing(bars)
    left = EDGE + 14 + CHAR * drawing.longest_name
    axis = drawing.axis(int((width - left) // 110))
    scale = (width - left - EDGE) / axis.seconds
    bands: list[str] = []
    body: list[str] = []
    top = HEAD
    cramped = drawing.cramped(scale, CHAR, 8)
    for number, lane in enumerate(drawing.lanes):
        height = max(min(TRACK * len(lane.tracks), LANE), THIN * len(lane.tracks))
        if number % 2 == 0:
            bands.append(_rect(0, top - GAP / 2, width, height + GAP, "band"))
        body.append(_text(EDGE, top + height / 2 + 4, lane.name, "lane"))
        step = height / len(lane.tracks)
        for track, items in enumerate(lane.tracks):
            for bar in items:
                x, w = left + (bar.start - axis.start) * scale, max(bar.seconds * scale, 0.75)
                label = str(bar.index) if bar.name in cramped else bar.label
                body.append(_bar(bar, label, drawing.shade(bar), x, top + track * step, w, step))
        top += height + GAP
    bottom = top + 4
    grid = _grid(axis, scale, left, bottom, width)
    ends = _ends([(u, left + (t - axis.start) * scale) for u, t in drawing.ends], bottom)
    head = [_text(EDGE, 24, title, "title"), *_svg_legend(drawing.colors, 44)]
    parts = [_rect(0, 0, width, bottom + 8, "back"), *head, *bands, *grid, *ends, *body]
    size = f'width="{width}" height="{bottom + 8:.0f}" viewBox="0 0 {width} {bottom + 8:.0f}"'
    fits = 'class="gantt" style="max-width:100%;height:auto"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {fits} {size}><style>{STYLE}</style>{"".join(parts)}</svg>\n'


def _bar(bar: Bar, label: str, shade: str, x: float, y: float, w: float, step: float) -> str:
    inset = min(1.0, step / 8)
    space = min(0.6, w / 4)
    box = f'x="{x:.2f}" y="{y + inset:.2f}" width="{w - space:.2f}" height="{step - 2 * inset:.2f}"'
    rect = f'<rect {box} rx="{min(3.0, step / 4, w / 3):.1f}" fill="{shade}"/>'
    text = ""
    if step >= 13 and len(label) * CHAR + 4 <= w:
        place = f'x="{x + (w - space) / 2:.2f}" y="{y + step / 2 + 3.8:.2f}" text-anchor="middle"'
        text = f'<text {place} class="label" style="fill:{ink(shade)}">{escape(label)}</text>'
    version = f"\nweights of version {bar.version}" if bar.version is not None else ""
    detail = f"\n{bar.detail}" if bar.detail else ""
    tooltip = f"{bar.label} on {bar.lane}\n{bar.seconds * 1e3:.4g} ms{version}{detail}"
    return f"<g><title>{escape(tooltip)}</title>{rect}{text}</g>"


def _grid(axis: Axis, scale: float, left: float, bottom: float, width: float) -> list[str]:
    parts = []
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        x = left + tick * scale
        parts.append(f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="{HEAD - 8:.0f}" y2="{bottom:.0f}"/>')
        if x + len(label) * CHAR <= width:
            parts.append(_text(x, HEAD - 12, label, "faint"))
    return parts


def _ends(ends: Sequence[tuple[int, float]], bottom: float) -> list[str]:
    """A dashed line where a version was made, and its number where there is room."""
    parts, free = [], 0.0
    for update, x in ends:
        parts.append(f'<line class="end" x1="{x:.2f}" x2="{x:.2f}" y1="{HEAD - 8:.0f}" y2="{bottom:.0f}"/>')
        label = f"v{update + 1}"
        if x - len(label) * CHAR >= free:
            parts.append(f'<text x="{x - 3:.2f}" y="{bottom:.0f}" text-anchor="end" class="faint">{label}</text>')
            free = x + 4
    return parts


def _svg_legend(palette: dict[str, str], y: float) -> list[str]:
    parts, x = [], EDGE
    for name, color in palette.items():
        parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="11" height="11" rx="2.5" fill="{color}"/>')
        parts.append(_text(x + 16, y, name, ""))
        x += 16 + len(name) * CHAR + 20
    parts.append(f'<line class="end" x1="{x + 5:.1f}" x2="{x + 5:.1f}" y1="{y - 10:.1f}" y2="{y + 3:.1f}"/>')
    parts.append(_text(x + 14, y, "an update ends and makes version v1, v2, …  (odd versions are lighter)", "faint"))
    return parts


def _rect(x: float, y: float, w: float, h: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>' if text else ""


TRACKS = 1000
"""Thread numbers of one replica."""


def chrome_trace(bars: Sequence[Bar], title: str = "penstock") -> dict[str, Any]:
    """The trace as a JSON-able value. Times start at 0, in microseconds as the format wants them."""
    origin = span(bars)[0]
    events: list[dict[str, Any]] = []
    pools: dict[str, int] = {}
    for place, lane in enumerate(lanes(bars)):
        if lane.pool not in pools:
            pools[lane.pool] = pid = len(pools) + 1
            events += _named("process", pid, 0, lane.pool, pid)
        pid = pools[lane.pool]
        for number, track in enumerate(lane.tracks):
            tid = place * TRACKS + number
            name = lane.name if len(lane.tracks) == 1 else f"{lane.name} · {number}"
            events += _named("thread", pid, tid, name, tid)
            events += [_complete(bar, pid, tid, origin) for bar in track]
    for update, end in boundaries(bars):
        instant = {"ph": "i", "s": "g", "name": f"version {update + 1}", "cat": "version"}
        events.append({**instant, "ts": _us(end - origin), "pid": 1, "tid": 0})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}


def _named(what: str, pid: int, tid: int, name: str, order: int) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {**place, "name": f"{what}_name", "args": {"name": name}},
        {**place, "name": f"{what}_sort_index", "args": {"sort_index": order}},
    ]


def _complete(bar: Bar, pid: int, tid: int, origin: float) -> dict[str, Any]:
    facts: dict[str, Any] = {"index": bar.index}
    if bar.version is not None:
        facts["version"] = bar.version
    if bar.detail:
        facts["detail"] = bar.detail
    event = {"ph": "X", "name": bar.label, "cat": bar.kind, "pid": pid, "tid": tid, "args": facts}
    return {**event, "ts": _us(bar.start - origin), "dur": _us(bar.seconds)}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
