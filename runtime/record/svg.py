"""Bars as an SVG picture: a lane per replica, colours by name, updates' ends, an axis and a legend. Pure.

It needs no script and no font file, and follows the reader's light or dark theme.
"""

from collections.abc import Sequence
from html import escape

from penstock.runtime.record.axis import Axis, colors, ink, lighter, make_axis
from penstock.runtime.record.timeline import Bar, Lane, boundaries, lanes, names, span

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
    found = lanes(bars)
    left = EDGE + 14 + CHAR * max((len(lane.name) for lane in found), default=0)
    axis = make_axis(*span(bars), int((width - left) // 110))
    scale = (width - left - EDGE) / axis.seconds
    palette = colors(names(bars))
    bands: list[str] = []
    body: list[str] = []
    top = HEAD
    cramped = {bar.name for bar in bars if bar.seconds * scale < len(bar.label) * CHAR + 8}
    for number, lane in enumerate(found):
        height = _height(lane)
        if number % 2 == 0:
            bands.append(_rect(0, top - GAP / 2, width, height + GAP, "band"))
        body.append(_text(EDGE, top + height / 2 + 4, lane.name, "lane"))
        step = height / len(lane.tracks)
        for track, items in enumerate(lane.tracks):
            for bar in items:
                x, w = left + (bar.start - axis.start) * scale, max(bar.seconds * scale, 0.75)
                label = str(bar.index) if bar.name in cramped else bar.label
                body.append(_bar(bar, label, palette[bar.name], x, top + track * step, w, step))
        top += height + GAP
    bottom = top + 4
    grid = _grid(axis, scale, left, bottom, width)
    ends = _ends([(u, left + (t - axis.start) * scale) for u, t in boundaries(bars)], bottom)
    head = [_text(EDGE, 24, title, "title"), *_legend(palette, 44)]
    parts = [_rect(0, 0, width, bottom + 8, "back"), *head, *bands, *grid, *ends, *body]
    size = f'width="{width}" height="{bottom + 8:.0f}" viewBox="0 0 {width} {bottom + 8:.0f}"'
    fits = 'class="gantt" style="max-width:100%;height:auto"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {fits} {size}><style>{STYLE}</style>{"".join(parts)}</svg>\n'


def _height(lane: Lane) -> float:
    return max(min(TRACK * len(lane.tracks), LANE), THIN * len(lane.tracks))


def _bar(bar: Bar, label: str, color: str, x: float, y: float, w: float, step: float) -> str:
    shade = lighter(color, 0.28) if (bar.version or 0) % 2 else color
    inset = min(1.0, step / 8)
    space = min(0.6, w / 4)
    box = f'x="{x:.2f}" y="{y + inset:.2f}" width="{w - space:.2f}" height="{step - 2 * inset:.2f}"'
    rect = f'<rect {box} rx="{min(3.0, step / 4, w / 3):.1f}" fill="{shade}"/>'
    text = ""
    if step >= 13 and len(label) * CHAR + 4 <= w:
        place = f'x="{x + (w - space) / 2:.2f}" y="{y + step / 2 + 3.8:.2f}" text-anchor="middle"'
        text = f'<text {place} class="label" style="fill:{ink(shade)}">{escape(label)}</text>'
    return f"<g><title>{escape(_tooltip(bar))}</title>{rect}{text}</g>"


def _tooltip(bar: Bar) -> str:
    version = f"\nweights of version {bar.version}" if bar.version is not None else ""
    detail = f"\n{bar.detail}" if bar.detail else ""
    return f"{bar.label} on {bar.lane}\n{bar.seconds * 1e3:.4g} ms{version}{detail}"


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


def _legend(palette: dict[str, str], y: float) -> list[str]:
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
