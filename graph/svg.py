"""A graph as one SVG image: no fonts, scripts or system packages needed, readable on light and dark pages."""

from html import escape

from penstock.graph.grid import MARGIN, Lane, Placed
from penstock.graph.ir import Graph
from penstock.graph.layout import Layout, Point, Wire, layout

LANES = (
    ("#e8f5f2", "#1f8a7a"),
    ("#fdf3e0", "#b7791f"),
    ("#ebeefc", "#4254c5"),
    ("#fbe9ef", "#b83266"),
    ("#eef6e8", "#4d8a2f"),
    ("#f2ebfa", "#7a4bb0"),
)
"""Background and line colour of each pool in turn."""

INK, FAINT, DATA, FEEDBACK = "#1e293b", "#64748b", "#475569", "#c2410c"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
ROUND = 8.0


def svg(graph: Graph) -> str:
    """The graph's picture. Solid wires stay within an update; dashed ones feed a later update."""
    drawn = layout(graph)
    summary = graph.doc.partition("\n")[0]
    width, height = max(drawn.width, 420.0), drawn.height
    colours = {lane.pool: LANES[i % len(LANES)] for i, lane in enumerate(drawn.lanes)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="{MONO}">',
        f"<title>{escape(f'{graph.name}: {summary}' if summary else graph.name)}</title>",
        f"<defs>{_marker('data', DATA)}{_marker('feedback', FEEDBACK)}</defs>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="12" fill="#fbfcfe"/>',
        *_heading(graph.name, summary, width),
        *(_lane(lane, width, *colours[lane.pool]) for lane in drawn.lanes),
        *(_wire(wire) for wire in drawn.wires),
        *(_box(placed, colours[placed.box.pool][1]) for placed in drawn.placed),
        *(_label(wire) for wire in drawn.wires if wire.label),
        *_legend(drawn, height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _heading(name: str, summary: str, width: float) -> list[str]:
    room = int((width - 2 * MARGIN - len(name) * 10 - 20) / 6.2)
    shown = summary if len(summary) <= room else summary[: max(room - 1, 0)].rstrip() + "…"
    title = f'<text x="{MARGIN}" y="36" font-size="17" font-weight="700" fill="{INK}">{escape(name)}'
    tail = (
        f'<tspan dx="14" font-size="12.5" font-weight="400" font-family="{SANS}" fill="{FAINT}">{escape(shown)}</tspan>'
    )
    return [title + (tail if shown else "") + "</text>"]


def _lane(lane: Lane, width: float, background: str, colour: str) -> str:
    return (
        f'<rect x="{MARGIN / 2}" y="{lane.y:.1f}" width="{width - MARGIN:.1f}" height="{lane.height:.1f}" rx="10" '
        f'fill="{background}"/><text x="{MARGIN / 2 + 12}" y="{lane.y + 20:.1f}" font-size="12" font-weight="600" '
        f'font-family="{SANS}" fill="{colour}">{escape(lane.pool)}</text>'
    )


def _box(placed: Placed, colour: str) -> str:
    box, middle = placed.box, placed.x + placed.width / 2
    corner = 8 if box.kind == "node" else placed.height / 2
    fill = "#ffffff" if box.kind == "node" else "#ffffffb0"
    return (
        f'<rect x="{placed.x:.1f}" y="{placed.y:.1f}" width="{placed.width:.1f}" height="{placed.height:.1f}" '
        f'rx="{corner:.1f}" fill="{fill}" stroke="{colour}" stroke-width="1.6"/>'
        f'<text x="{middle:.1f}" y="{placed.middle - 3:.1f}" text-anchor="middle" font-size="14" font-weight="600" '
        f'fill="{INK}">{escape(box.title)}</text>'
        f'<text x="{middle:.1f}" y="{placed.middle + 14:.1f}" text-anchor="middle" font-size="11" '
        f'fill="{FAINT}">{escape(box.note)}</text>'
    )


def _wire(wire: Wire) -> str:
    data = wire.link.kind == "data"
    colour, marker = (DATA, "data") if data else (FEEDBACK, "feedback")
    dashes = "" if data else ' stroke-dasharray="6 4"'
    return (
        f'<path d="{wire_path(wire.points)}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes} '
        f'marker-end="url(#{marker})"/>'
    )


def wire_path(points: list[Point]) -> str:
    """A path through right-angled corners, rounded as far as the pieces beside them allow."""
    steps = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        radius = min(ROUND, _length(before, corner) / 2, _length(corner, after) / 2)
        into, out = _towards(corner, before, radius), _towards(corner, after, radius)
        steps.append(f"L{into[0]:.1f} {into[1]:.1f}Q{corner[0]:.1f} {corner[1]:.1f} {out[0]:.1f} {out[1]:.1f}")
    steps.append(f"L{points[-1][0]:.1f} {points[-1][1]:.1f}")
    return "".join(steps)


def _length(a: Point, b: Point) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _towards(start: Point, end: Point, distance: float) -> Point:
    whole = _length(start, end) or 1.0
    return start[0] + (end[0] - start[0]) * distance / whole, start[1] + (end[1] - start[1]) * distance / whole


def _label(wire: Wire) -> str:
    """The halo keeps words readable where a wire passes under them."""
    x, y = wire.label_at
    colour = FAINT if wire.link.kind == "data" else FEEDBACK
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" font-size="11" fill="{colour}" stroke="#ffffff" '
        f'stroke-width="3" stroke-opacity="0.75" paint-order="stroke">{escape(wire.label)}</text>'
    )


def _marker(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path d="M0 1L10 5L0 9z" fill="{colour}"/></marker>'
    )


def _legend(drawn: Layout, height: float) -> list[str]:
    turns = any(wire.link.label == "next turn" for wire in drawn.wires)
    later = "to a later update or turn" if turns else "to a later update"
    kinds = [("within an update", DATA, ""), (later, FEEDBACK, ' stroke-dasharray="6 4"')]
    if all(wire.link.kind == "data" for wire in drawn.wires):
        kinds = kinds[:1]
    parts, x = [], MARGIN
    for words, colour, dashes in kinds:
        parts.append(
            f'<path d="M{x} {height - 19:.1f}h28" stroke="{colour}" stroke-width="1.6"{dashes}/>'
            f'<text x="{x + 35}" y="{height - 15:.1f}" font-size="11.5" font-family="{SANS}" '
            f'fill="{FAINT}">{words}</text>'
        )
        x += 35 + len(words) * 6.5 + 24
    return parts
