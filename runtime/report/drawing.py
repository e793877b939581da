"""The graph of a run with its times: each node's share of the period, and what bounds it, marked. Pure.

Colours and fonts are classes of the page's style, so that the picture follows its light and dark themes.
"""

from collections.abc import Mapping, Set
from html import escape

from penstock.graph.grid import MARGIN, Lane, Placed
from penstock.graph.ir import Graph
from penstock.graph.layout import Wire, layout
from penstock.graph.passes import Bound
from penstock.graph.svg import wire_path


def graph_svg(
    graph: Graph, notes: Mapping[str, str], shares: Mapping[str, float], bound: Bound | None, pools: Set[str]
) -> str:
    """`notes` are the second lines of the boxes, `shares` say how much of its box is filled, by node. `pools` are the
    labels that the pool of the bound has in the graph."""
    drawn = layout(graph, notes)
    marked = set(bound.cycle) if bound else set()
    width, height = max(drawn.width, 420.0), drawn.height - 50
    parts = [
        *(_lane(lane, width, bounds=lane.pool in pools) for lane in drawn.lanes),
        *(_wire(wire) for wire in drawn.wires),
        *(_box(placed, marked, shares.get(placed.box.name, 0.0)) for placed in drawn.placed),
        *(_label(wire) for wire in drawn.wires if wire.label),
    ]
    label = f"The graph {graph.name}; the table below has the same figures"
    view = f'viewBox="0 44 {width:.0f} {height - 30:.0f}" width="{width:.0f}"'
    return (
        f'<svg {view} role="img" aria-label="{escape(label)}">'
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z"/></marker></defs>{"".join(parts)}</svg>'
    )


def _lane(lane: Lane, width: float, *, bounds: bool) -> str:
    kind, mark = (" bounds", '<tspan class="mark" dx="10">bounds the run</tspan>') if bounds else ("", "")
    return (
        f'<rect class="lane{kind}" x="{MARGIN / 2}" y="{lane.y:.1f}" width="{width - MARGIN:.1f}" '
        f'height="{lane.height:.1f}" rx="10"/>'
        f'<text class="pool" x="{MARGIN / 2 + 12}" y="{lane.y + 20:.1f}">{escape(lane.pool)}{mark}</text>'
    )


def _box(placed: Placed, marked: Set[str], share: float) -> str:
    box, middle = placed.box, placed.x + placed.width / 2
    bounds = box.name in marked and box.kind == "node"
    corner = 8 if box.kind == "node" else placed.height / 2
    place = f'x="{placed.x:.1f}" y="{placed.y:.1f}" height="{placed.height:.1f}" rx="{corner:.1f}"'
    filled = f'<rect class="share" {place} width="{placed.width * min(share, 1.0):.1f}"/>' if share > 0.01 else ""
    texts = [("title", placed.middle - 3, box.title), ("note", placed.middle + 14, box.note)]
    texts += [("mark", placed.y - 5, "bounds")] if bounds else []
    words = "".join(
        f'<text class="{kind}" x="{middle:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'
        for kind, y, text in texts
    )
    kind = ' class="bounds"' if bounds else ""
    return f'<g{kind}><rect class="node" {place} width="{placed.width:.1f}"/>{filled}{words}</g>'


def _wire(wire: Wire) -> str:
    kind = "wire" if wire.link.kind == "data" else "wire feedback"
    return f'<path class="{kind}" d="{wire_path(wire.points)}" marker-end="url(#head)"/>'


def _label(wire: Wire) -> str:
    x, y = wire.label_at
    return f'<text class="wire-label halo" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(wire.label)}</text>'
