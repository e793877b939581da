"""Bars as text for a terminal: one row per track, or the number of bars at once where a lane has many. Pure."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from penstock.runtime.record.axis import Axis, colors, ink, lighter, make_axis, rgb
from penstock.runtime.record.timeline import Bar, Lane, boundaries, lanes, names, span

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
    found = lanes(bars)
    gutter = max(len(lane.name) for lane in found) + 2
    columns = max(width - gutter - 1, 10)
    axis = make_axis(*span(bars), columns // 14)
    legend = names(bars)
    ends = [(update, _column(axis, time, columns)) for update, time in boundaries(bars)]
    room = columns / axis.seconds
    cramped = {bar.name for bar in bars if bar.seconds * room < len(bar.label) + 4}
    painter = _paint_color(colors(legend), cramped) if color else _paint_plain(legend, cramped)
    lines = [" " * gutter + _axis_line(axis, columns), " " * gutter + _version_line(ends, columns)]
    for lane in found:
        front = _ansi(colors(legend)[lane.tracks[-1][0].name]) if color else ""
        for number, cells in enumerate(_lane(lane, axis, columns, painter, front)):
            _mark(cells, [column for _, column in ends], color)
            lines.append((lane.name if not number else "").ljust(gutter) + _render(cells))
    return "\n".join(line.rstrip() for line in [*lines, "", *_legend(legend, found, color, width)])


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


def _paint_color(palette: dict[str, str], cramped: Set[str]) -> _Painter:
    def paint(cells: list[_Cell], bar: Bar, first: int, last: int) -> None:
        ground = palette[bar.name]
        shade = lighter(ground, 0.25) if (bar.version or 0) % 2 else ground
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


def _mark(cells: list[_Cell], columns: Sequence[int], color: bool) -> None:
    """The ends of updates run through the idle cells."""
    for column in columns:
        if column < len(cells) and cells[column].char == " " and not cells[column].paint:
            cells[column] = _Cell(MARK, "\x1b[2m" if color else "")


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


def _legend(legend: Sequence[str], found: Sequence[Lane], color: bool, width: int) -> list[str]:
    palette = colors(legend)
    items = []
    for i, name in enumerate(legend):
        plain = f"{''.join(STYLES[i % len(STYLES)])} {name}"
        items.append((f"{_ansi(ink(palette[name]), palette[name])} {name} \x1b[0m" if color else plain, len(name) + 4))
    end = f"{MARK} end of an update"
    lines, room = [""], width
    for text, columns in [*items, (end, len(end))]:
        if columns > room and lines[-1]:
            lines.append("")
            room = width
        lines[-1] += text + "  "
        room -= columns + 2
    many = [f"{lane.name} up to {len(lane.tracks)}" for lane in found if len(lane.tracks) > MAX_TRACKS]
    return [*lines, f"▁▄█ firings at once: {', '.join(many)}"] if many else lines
