"""The printers of a schedule. Pure.

- `gantt_text`: text for a terminal, one row per track, or the number of simultaneous bars where a lane has many.
- `gantt_svg`: a picture, which needs no script and no font file, and follows the reader's light or dark theme.
- `chrome_trace`: the JSON that https://ui.perfetto.dev and chrome://tracing open.

All print the lanes of `timeline`. `Drawing` has what the pictures share: lanes, colours, ends of updates.
`metrics.schedule_figure` draws the same for papers, and `report.schedule_data` for a page that zooms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil, floor, log10
from typing import Any

from penstock.runtime.record.errors import visible
from penstock.runtime.record.timeline import Bar, Lane, boundaries, lanes, names, pool_of, span

# In the order of the legend. Colour-blind readers can tell the first four apart.
COLORS = ("#4C78A8", "#F2A541", "#5BA05B", "#B279A2", "#59B3AE", "#E4655F", "#9C8465", "#8A8FD8")


@dataclass(frozen=True, slots=True)
class Axis:
    """A time axis in seconds from `start` to `end`. Ticks are seconds after `start`; labels are their texts with the
    unit."""

    start: float
    end: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def fraction(self, time: float) -> float:
        """The position of a time, 0 at the start and 1 at the end."""
        return (time - self.start) / self.seconds


class Drawing:
    """What the pictures of a schedule share: lanes, a colour for each name in the order of the legend, the ends of the
    updates as (update, time), and the first and last time."""

    def __init__(self, bars: Sequence[Bar]) -> None:
        self.lanes = lanes(bars)
        self.colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names(bars))}
        self.ends = boundaries(bars)
        self.span = span(bars)
        self.longest_name = max((len(lane.name) for lane in self.lanes), default=0)

    def cramped(self, width: float, char: float, margin: float) -> set[str]:
        """The names with a bar that is too short for its whole label. `width` is the width of a second, `char` of a
        character, and `margin` the space around a label."""
        bars = (bar for lane in self.lanes for track in lane.tracks for bar in track)
        # By name, not by bar: else bars of one node would be labelled in two ways.
        return {bar.name for bar in bars if bar.seconds * width < len(bar.label) * char + margin}

    def shade(self, bar: Bar, share: float = 0.28) -> str:
        """The colour of a bar: lighter by `share` if it worked with an odd version."""
        color = self.colors[bar.name]
        mixed = "".join(f"{round(c + (255 - c) * share):02X}" for c in rgb(color))
        return f"#{mixed}" if (bar.version or 0) % 2 else color


def round_step(span: float, num_steps: float) -> float:
    """A step of 1, 2, 5 or 10 times a power of ten, such that about `num_steps` of them cover the span."""
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


def ink(color: str) -> str:
    """Black or white, whichever is readable on a colour (relative luminance of WCAG, without its gamma)."""
    red, green, blue = rgb(color)
    return "#16191D" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 135 else "#FFFFFF"


# A lane with more tracks is drawn as the number of its simultaneous bars.
MAX_TRACKS = 4
HEIGHTS = " ▁▂▃▄▅▆▇█"
# Begin, body and end of a bar, by its name's place in the legend, for output without colours.
STYLES = (("├", "─", "┤"), ("┣", "━", "┫"), ("╞", "═", "╡"), ("╟", "┄", "╢"), ("┝", "╍", "┥"), ("┠", "┈", "┨"))
MARK = "┊"

# A character, and its ANSI escape ("": none).
_Cell = tuple[str, str]


def gantt_text(bars: Sequence[Bar], width: int = 100, color: bool = False) -> str:
    """The schedule as lines of at most `width` columns: an axis, the ends of the updates, lanes, a legend.

    With `color`, ANSI escapes colour bars by name and shade them by version. Without, each name has its own line style.
    """
    if not bars:
        return "nothing happened"
    # Names may hold escapes, which could not be told from the picture's own later: make them visible now.
    drawing = Drawing([replace(bar, lane=visible(bar.lane), name=visible(bar.name)) for bar in bars])
    gutter = drawing.longest_name + 2
    columns = max(width - gutter - 1, 10)
    axis = make_axis(*drawing.span, columns // 14)

    def column(time: float) -> int:
        return min(round(axis.fraction(time) * columns), columns)

    ticks, versions, free = [" "] * columns, [" "] * columns, 0
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        at = column(axis.start + tick)
        if at + len(label) < columns:
            ticks[at : at + len(label) + 1] = "╷" + label
    ends = [column(time) for _, time in drawing.ends]
    for (update, _), at in zip(drawing.ends, ends, strict=True):
        label = f"{MARK}v{update + 1}"
        if free <= at <= columns - len(label):
            versions[at : at + len(label)] = label
            free = at + len(label) + 1
    lines = [" " * gutter + "".join(line) for line in (ticks, versions)]
    cramped = drawing.cramped(columns / axis.seconds, 1, 4)
    for lane in drawing.lanes:
        rows: list[list[_Cell]] = []
        if len(lane.tracks) > MAX_TRACKS:
            front = _ansi(drawing.colors[lane.tracks[-1][0].name]) if color else ""
            rows = [[(char, front if char != " " else "") for char in _bars_at_once(lane, axis, columns)]]
        for track in lane.tracks if not rows else ():
            cells: list[_Cell] = [(" ", "")] * columns
            for bar in track:
                first, last = column(bar.start), column(bar.end)
                if last > first or bar.seconds > 0:
                    label = str(bar.index) if bar.name in cramped else bar.label
                    text, paint = _bar_text(drawing, bar, label, max(last - first, 1), color)
                    cells[first : first + len(text)] = [(char, paint) for char in text[: columns - first]]
            rows.append(cells)
        for number, cells in enumerate(rows):
            for at in ends:  # draw the ends of updates through idle cells
                if at < columns and cells[at] == (" ", ""):
                    cells[at] = (MARK, "\x1b[2m" if color else "")
            painted, last_paint = "", ""
            for char, paint in cells:
                # One escape for a run of equal cells: with one for each cell a line would be ten times as long.
                if paint != last_paint:
                    painted += ("\x1b[0m" if last_paint else "") + paint
                    last_paint = paint
                painted += char
            lines.append((lane.name if not number else "").ljust(gutter) + painted + ("\x1b[0m" if last_paint else ""))
    return "\n".join(line.rstrip() for line in [*lines, "", *_text_legend(drawing, color, width)])


def _bar_text(drawing: Drawing, bar: Bar, label: str, room: int, color: bool) -> tuple[str, str]:
    """A bar as `room` characters, with its label if it fits, and the ANSI escape for them."""
    if color:
        shade = drawing.shade(bar, 0.25)
        return (f"▏{label}" if len(label) < room else "▏").ljust(room), _ansi(ink(shade), shade)
    begin, body, end = STYLES[list(drawing.colors).index(bar.name) % len(STYLES)]
    text = begin + body * (room - 2) + end if room > 1 else "│"
    label = label if label == str(bar.index) else f" {label} "
    label = label if len(label) <= room - 2 else ""
    at = (room - len(label)) // 2
    return text[:at] + label + text[at + len(label) :], ""


def _bars_at_once(lane: Lane, axis: Axis, columns: int) -> str:
    """The number of simultaneous bars of a lane in each column, in eighths of the lane's maximum."""
    counts = [0.0] * columns
    for bar in (bar for track in lane.tracks for bar in track):
        low, high = axis.fraction(bar.start) * columns, axis.fraction(bar.end) * columns
        for column in range(int(low), min(int(high) + 1, columns)):
            counts[column] += max(0.0, min(high, column + 1) - max(low, column))
    # A column with little in it is never blank: one short firing must look different from none.
    return "".join(HEIGHTS[min(8, round(count / len(lane.tracks) * 8)) or int(count > 0.05)] for count in counts)


def _ansi(front: str, ground: str = "") -> str:
    codes = [38, 2, *rgb(front), *((48, 2, *rgb(ground)) if ground else ())]
    return f"\x1b[{';'.join(map(str, codes))}m"


def _text_legend(drawing: Drawing, color: bool, width: int) -> list[str]:
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


# Width of the picture in pixels.
WIDTH = 1200
# Width of a character of a label, in pixels: an upper estimate for the fonts in `STYLE`.
CHAR = 6.3
# Pixels: a track with labels, the thinnest track, the gap between lanes, y of the lanes and of the legend, edge.
TRACK, THIN, GAP, HEAD, LEGEND, EDGE = 22.0, 5.0, 10.0, 76.0, 44.0, 16.0
# Pixels that a lane may take before its tracks get thinner.
LANE = 132.0

# Every rule begins with `.gantt`: in a notebook, other pictures are in the same document.
STYLE = """
.gantt text{font:11px ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#3A4048}
.gantt .back{fill:#FFFFFF}.gantt .band{fill:#F4F6F8}.gantt .grid{stroke:#E2E6EA}
.gantt .end{stroke:#6B7480;stroke-dasharray:2 3}.gantt .title{font-size:14px;font-weight:600;fill:#16191D}
.gantt .lane{font-weight:600}.gantt .faint{fill:#7A838D}.gantt .label{font-size:10.5px}
@media (prefers-color-scheme:dark){.gantt .back{fill:#15181C}.gantt .band{fill:#1D2126}.gantt .grid{stroke:#2C3238}
.gantt .end{stroke:#8A939D}.gantt text{fill:#C9D1D9}.gantt .title{fill:#F0F3F6}.gantt .faint{fill:#8A939D}}
"""


def gantt_svg(bars: Sequence[Bar], title: str = "") -> str:
    """The schedule as one SVG document: a row per track, a box with a tooltip per bar."""
    drawing = Drawing(bars)
    left = EDGE + 14 + CHAR * drawing.longest_name
    axis = make_axis(*drawing.span, int((WIDTH - left) // 110))
    scale = (WIDTH - left - EDGE) / axis.seconds
    bands: list[str] = []
    body: list[str] = []
    top = HEAD
    cramped = drawing.cramped(scale, CHAR, 8)
    for number, lane in enumerate(drawing.lanes):
        height = max(min(TRACK * len(lane.tracks), LANE), THIN * len(lane.tracks))
        if number % 2 == 0:
            bands.append(_stripe(top - GAP / 2, height + GAP, "band"))
        body.append(_text(EDGE, top + height / 2 + 4, lane.name, "lane"))
        step = height / len(lane.tracks)
        for track, items in enumerate(lane.tracks):
            for bar in items:
                x, w = left + (bar.start - axis.start) * scale, max(bar.seconds * scale, 0.75)
                label = str(bar.index) if bar.name in cramped else bar.label
                body.append(_bar(bar, label, drawing.shade(bar), x, top + track * step, w, step))
        top += height + GAP
    bottom = top + 4
    grid: list[str] = []
    reach = f'y1="{HEAD - 8:.0f}" y2="{bottom:.0f}"'
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        x = left + tick * scale
        grid.append(f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" {reach}/>')
        if x + len(label) * CHAR <= WIDTH:
            grid.append(_text(x, HEAD - 12, label, "faint"))
    free = 0.0
    for update, time in drawing.ends:
        x, label = left + (time - axis.start) * scale, f"v{update + 1}"
        grid.append(f'<line class="end" x1="{x:.2f}" x2="{x:.2f}" {reach}/>')
        if x - len(label) * CHAR >= free:
            grid.append(f'<text x="{x - 3:.2f}" y="{bottom:.0f}" text-anchor="end" class="faint">{label}</text>')
            free = x + 4
    head, x = [_text(EDGE, 24, title, "title")], EDGE
    for name, color in drawing.colors.items():
        head.append(f'<rect x="{x:.1f}" y="{LEGEND - 9:.1f}" width="11" height="11" rx="2.5" fill="{color}"/>')
        head.append(_text(x + 16, LEGEND, name, ""))
        x += 16 + len(name) * CHAR + 20
    said = "an update ends and makes version v1, v2, …  (odd versions are lighter)"
    sample = f'x1="{x + 5:.1f}" x2="{x + 5:.1f}" y1="{LEGEND - 10:.1f}" y2="{LEGEND + 3:.1f}"'
    head += [f'<line class="end" {sample}/>', _text(x + 14, LEGEND, said, "faint")]
    parts = [_stripe(0, bottom + 8, "back"), *head, *bands, *grid, *body]
    size = f'width="{WIDTH}" height="{bottom + 8:.0f}" viewBox="0 0 {WIDTH} {bottom + 8:.0f}"'
    fits = 'class="gantt" style="max-width:100%;height:auto"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {fits} {size}><style>{STYLE}</style>{"".join(parts)}</svg>\n'


def _bar(bar: Bar, label: str, shade: str, x: float, y: float, w: float, step: float) -> str:
    """A box of width `w` in a track of height `step`, with a tooltip, and its label if it fits."""
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


def _stripe(y: float, height: float, kind: str) -> str:
    """A box as wide as the picture."""
    return f'<rect class="{kind}" x="0.0" y="{y:.1f}" width="{WIDTH:.1f}" height="{height:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>' if text else ""


# How many thread numbers each replica has.
TRACKS = 1000


def chrome_trace(bars: Sequence[Bar], title: str = "penstock") -> dict[str, Any]:
    """The trace as a value for JSON. Times start at 0, in microseconds as the format requires. A pool is a process.
    Each track of a replica is a thread of its own, since the viewers nest overlapping events of one thread."""

    def us(seconds: float) -> float:
        return round(seconds * 1e6, 3)

    def named(kind: str, pid: int, tid: int, name: str, order: int) -> list[dict[str, Any]]:
        place = {"ph": "M", "pid": pid, "tid": tid}
        return [
            {**place, "name": f"{kind}_name", "args": {"name": name}},
            {**place, "name": f"{kind}_sort_index", "args": {"sort_index": order}},
        ]

    origin = span(bars)[0]
    events: list[dict[str, Any]] = []
    pools: dict[str, int] = {}
    for place, lane in enumerate(lanes(bars)):
        pool = pool_of(lane.name)
        if pool not in pools:
            pools[pool] = pid = len(pools) + 1
            events += named("process", pid, 0, pool, pid)
        pid = pools[pool]
        for number, track in enumerate(lane.tracks):
            tid = place * TRACKS + number
            events += named("thread", pid, tid, lane.name if len(lane.tracks) == 1 else f"{lane.name} · {number}", tid)
            for bar in track:
                facts: dict[str, Any] = {"index": bar.index}
                facts |= {"version": bar.version} if bar.version is not None else {}
                facts |= {"detail": bar.detail} if bar.detail else {}
                event = {"ph": "X", "name": bar.label, "cat": bar.kind, "pid": pid, "tid": tid, "args": facts}
                events.append({**event, "ts": us(bar.start - origin), "dur": us(bar.seconds)})
    for update, end in boundaries(bars):
        instant = {"ph": "i", "s": "g", "name": f"version {update + 1}", "cat": "version"}
        events.append({**instant, "ts": us(end - origin), "pid": 1, "tid": 0})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}
