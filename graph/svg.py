"""A graph as SVG: an image of its own, or a part of the page of a run's report. Pure.

Both have the same boxes and wires. An image carries its own colours and needs no fonts, scripts or system packages. A
page styles the graph by classes, so that it follows light and dark themes, and its boxes show what was measured.

`Grid` places the boxes: layers from left to right, a lane for each pool. Layers are longest paths over the links within
an update. Units are SVG pixels.

`layout` routes the wires between them, and says how wide everything is for that. Wires run along free rows and turn in
the channels between the columns, where each has a track of its own; feedback runs above or below all lanes. Channel c
lies left of column c.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from html import escape

from penstock.graph.ir import Graph
from penstock.graph.show import Box, Link, picture

# Width of a character of a box's title: 14 px in any common monospaced font, rounded up.
TITLE = 8.5
# Width of a character of notes and labels: 11 px.
NOTE = 6.7

BOX_HEIGHT, PORT = 48.0, 20.0
LANE_TOP, LANE_BOTTOM, ROW_GAP, LANE_GAP = 34.0, 16.0, 14.0, 12.0
TRACK, FEEDBACK_TRACK, OWN, STUB = 11.0, 26.0, 24.0, 10.0
MARGIN, HEADER, FOOTER, HEAD = 20.0, 58.0, 40.0, 18.0


@dataclass
class Placed:
    """A box with its place: `x`, `y` is its upper left corner."""

    box: Box
    layer: int
    lane: int
    row: int = 0
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = BOX_HEIGHT

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True)
class PoolLane:
    pool: str
    y: float
    height: float


def layers(boxes: list[Box], links: list[Link]) -> dict[str, int]:
    """Each box's column: one more than the furthest of what it reads. A source stands just before its first reader; a
    node that only feedback joins to the others stands last, near to where feedback comes from."""
    data = [(link.tail, link.head) for link in links if link.kind == "data"]
    layer = {box.name: 0 for box in boxes}
    # A graph with a cycle (which `check` refuses, and which one may yet want to see) stops after as many rounds.
    for _ in boxes:
        for tail, head in data:
            layer[head] = min(max(layer[head], layer[tail] + 1), len(boxes))
    for box in boxes:
        readers = [layer[head] for tail, head in data if tail == box.name]
        if box.kind != "node" and readers:
            layer[box.name] = max(min(readers) - 1, 0)
    for box in boxes:
        if box.kind == "node" and not any(box.name in link for link in data):
            layer[box.name] = max(layer.values())
    used = sorted(set(layer.values()))
    return {name: used.index(column) for name, column in layer.items()}


class Grid:
    """Boxes with their columns, lanes and heights, and the heights at which links leave and reach them.

    `data` links run to the right; `back` ones return, `over` all lanes or `under` them.
    """

    def __init__(self, boxes: list[Box], links: list[Link]) -> None:
        self.links = list(dict.fromkeys(links))
        layer = layers(boxes, links)
        first = {pool: min(layer[b.name] for b in boxes if b.pool == pool) for pool in (b.pool for b in boxes)}
        self.pools = sorted(first, key=lambda pool: first[pool])
        self.columns = max(layer.values(), default=-1) + 1
        self.placed: dict[str, Placed] = {}
        rows: Counter[tuple[int, int]] = Counter()
        for box in boxes:
            place = (self.pools.index(box.pool), layer[box.name])
            width = max(len(box.title) * TITLE, len(box.note) * NOTE) + 24
            self.placed[box.name] = Placed(box, place[1], place[0], rows[place], width=width)
            rows[place] += 1
        # A wire that goes back is drawn like feedback, whatever it is: only a graph with faults has others.
        self.back = [k for k in self.links if k.kind == "feedback" or (k.kind == "data" and self.span(k) <= 0)]
        self.data = [k for k in self.links if k.kind == "data" and k not in self.back]
        self.over = [k for k in self.back if 2 * self.placed[k.head].lane < max(len(self.pools), 2)]
        self.under = [k for k in self.back if k not in self.over]
        self.ports_out: dict[str, list[str]] = defaultdict(list)
        for link in (*self.data, *self.back):
            if link.output not in self.ports_out[link.tail]:
                self.ports_out[link.tail].append(link.output)
        self.lanes = self._heights()

    def span(self, link: Link) -> int:
        return self.placed[link.head].layer - self.placed[link.tail].layer

    def _heights(self) -> list[PoolLane]:
        own = {link.tail for link in self.links if link.kind == "own"}
        ports_in = Counter(link.head for link in (*self.data, *self.back))
        for name, placed in self.placed.items():
            ports = max(ports_in[name], len(self.ports_out[name]))
            placed.height = max(BOX_HEIGHT, ports * PORT + 8)
        lanes, y = [], HEADER + len(self.over) * FEEDBACK_TRACK
        for index, pool in enumerate(self.pools):
            top, members = y, [p for p in self.placed.values() if p.lane == index]
            y += LANE_TOP
            for row in range(max(p.row for p in members) + 1):
                same = [p for p in members if p.row == row]
                tallest = max(p.height for p in same)
                for placed in same:
                    placed.y = y + (tallest - placed.height) / 2
                y += tallest + ROW_GAP + OWN * any(p.box.name in own for p in same)
            y += LANE_BOTTOM - ROW_GAP
            lanes.append(PoolLane(pool, top, y - top))
            y += LANE_GAP
        return lanes

    def port_out(self, link: Link) -> float:
        ports = self.ports_out[link.tail]
        return self.placed[link.tail].middle + (ports.index(link.output) - (len(ports) - 1) / 2) * PORT

    def port_in(self, link: Link) -> float:
        """Ports from the top in the order in which the wires come: feedback from above, data, feedback from below."""

        def key(other: Link) -> tuple[int, float]:
            side = -1 if other in self.over else 1 if other in self.under else 0
            return side, self.port_out(other)

        ports = sorted(
            (k for k in (*self.data, *self.back) if k.head == link.head and not self.from_outside(k)), key=key
        )
        y = self.placed[link.head].middle + (ports.index(link) - (len(ports) - 1) / 2) * PORT
        head = self.placed[link.head]
        # Not at the height at which another value leaves a box further left: the two wires would lie on one another.
        for other in (*self.data, *self.back):
            tail = self.placed[other.tail]
            beside = (tail.lane, tail.row) == (head.lane, head.row) and tail.layer < head.layer
            if beside and (other.tail, other.output) != (link.tail, link.output) and abs(self.port_out(other) - y) < 4:
                return y + PORT / 3
        return y

    def from_outside(self, link: Link) -> bool:
        """Does feedback enter a box from above or below, since nothing stands between?"""
        head = self.placed[link.head]
        if link in self.over:
            return head.lane == 0 and head.row == 0
        last = max(p.row for p in self.placed.values() if p.lane == head.lane and p.layer == head.layer)
        own = any(k.kind == "own" and k.tail == link.head for k in self.links)
        return link in self.under and head.lane == len(self.pools) - 1 and head.row == last and not own


Point = tuple[float, float]
# What has a track of its own in a channel: an output's wires, or one feedback wire; and which of its turns.
Key = tuple[str, str, str, int]


# Heights for wires between two lanes, from the middle of the gap: beside it lie the lanes' own margins.
BETWEEN = (0, 4, -4, 8, -8, 12, -12, 16, 20, 24)


@dataclass
class Wire:
    """A link's corners; its label with the middle of the label's lower edge, if this wire is the one to carry it."""

    link: Link
    points: list[Point] = field(default_factory=list)
    label: str = ""
    label_at: Point = (0.0, 0.0)

    @property
    def is_data(self) -> bool:
        return self.link.kind == "data"


@dataclass(frozen=True)
class GraphLayout:
    width: float
    height: float
    lanes: list[PoolLane]
    placed: list[Placed]
    wires: list[Wire]


def layout(graph: Graph, notes: Mapping[str, str] | None = None) -> GraphLayout:
    """Place the graph's picture. `notes` are second lines of boxes, by name, instead of their own."""
    boxes, links = picture(graph)
    known = notes or {}
    return _Router(Grid([replace(box, note=known.get(box.name, box.note)) for box in boxes], links)).layout()


class _Router:
    """First each wire's vertical pieces, then the tracks of each channel, then widths; then all corners are known."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._runs: list[tuple[float, int, int, str]] = []

    def _route(self, link: Link) -> list[tuple[int, float, float]]:
        """The vertical pieces of a wire: (channel, from y, to y). Channel c lies left of column c."""
        tail, head = self.grid.placed[link.tail], self.grid.placed[link.head]
        start = self.grid.port_out(link)
        if link in self.grid.back:
            track = self._track(link)
            leave = (tail.layer + 1, start, track)
            return [leave] if self.grid.from_outside(link) else [leave, (head.layer, track, self.grid.port_in(link))]
        end, first = self.grid.port_in(link), tail.layer + 1
        if head.layer == first or self._run(start, tail.lane, tail.row, link):
            return [(head.layer, start, end)]
        if self._run(end, head.lane, head.row, link):
            return [(first, start, end)]
        lane = self.grid.lanes[tail.lane]
        between = lane.y + lane.height + LANE_GAP / 2 if head.lane >= tail.lane else lane.y - LANE_GAP / 2
        between = next((y for d in BETWEEN if self._run(y := between + d, -1, 0, link)), between)
        return [(first, start, between), (head.layer, between, end)]

    def _run(self, y: float, lane: int, row: int, link: Link) -> bool:
        """Take the height `y` for a wire past the columns between its ends, if no box and no other wire is there."""
        after, before = self.grid.placed[link.tail].layer, self.grid.placed[link.head].layer
        row_of = [p for p in self.grid.placed.values() if p.lane == lane and p.row == row]
        if any(after < p.layer < before for p in row_of):
            return False
        source = f"{link.tail}.{link.output}"
        for other_y, start, end, other in self._runs:
            if abs(y - other_y) < 4 and start < before and after < end and other != source:
                return False
        self._runs.append((y, after, before, source))
        return True

    def _track(self, link: Link) -> float:
        """The height at which feedback runs back: the widest furthest out."""
        side = self.grid.over if link in self.grid.over else self.grid.under
        place = sorted(side, key=lambda k: (self.grid.span(k), k.label)).index(link)
        if link in self.grid.over:
            return HEADER + (place + 0.5) * FEEDBACK_TRACK
        bottom = self.grid.lanes[-1].y + self.grid.lanes[-1].height
        return bottom + (len(side) - place) * FEEDBACK_TRACK - 6

    def layout(self) -> GraphLayout:
        routes = {link: self._route(link) for link in (*self.grid.data, *self.grid.back)}
        tracks = self._tracks(routes)
        x, turns = MARGIN, {}
        for channel in range(self.grid.columns + 1):
            labels = [k.label for k in self.grid.data if self.grid.placed[k.tail].layer == channel - 1]
            x += max((len(label) * NOTE + 10 for label in labels), default=STUB)
            for number, key in enumerate(tracks[channel]):
                turns[channel, key] = x + number * TRACK + 4
            x += len(tracks[channel]) * TRACK + HEAD
            column = [p for p in self.grid.placed.values() if p.layer == channel]
            widest = max((p.width for p in column), default=0.0)
            for placed in column:
                placed.x, placed.width = x, widest
            x += widest
        wires = [self._wire(link, route, turns) for link, route in routes.items()]
        self._label(wires)
        wires += [self._own(link) for link in self.grid.links if link.kind == "own"]
        end = self.grid.lanes[-1].y + self.grid.lanes[-1].height if self.grid.lanes else HEADER
        height = end + len(self.grid.under) * FEEDBACK_TRACK + FOOTER
        return GraphLayout(x + MARGIN, height, self.grid.lanes, list(self.grid.placed.values()), wires)

    def _tracks(self, routes: dict[Link, list[tuple[int, float, float]]]) -> dict[int, list[Key]]:
        """The tracks of each channel from left to right: long pieces on the right, so that they enclose short ones.
        Wires of one output share theirs."""
        length: dict[int, dict[Key, float]] = defaultdict(dict)
        for link, route in routes.items():
            for number, (channel, start, end) in enumerate(route):
                if abs(start - end) > 1:
                    key = self._key(link, number)
                    length[channel][key] = max(length[channel].get(key, 0.0), abs(start - end))
        found = {channel: sorted(keys, key=lambda key: keys[key]) for channel, keys in length.items()}
        return defaultdict(list, found)

    def _key(self, link: Link, number: int) -> Key:
        return (link.tail, link.output, link.label if link in self.grid.back else "", number)

    def _wire(self, link: Link, route: list[tuple[int, float, float]], turns: dict[tuple[int, Key], float]) -> Wire:
        tail, head = self.grid.placed[link.tail], self.grid.placed[link.head]
        points = [(tail.x + tail.width, self.grid.port_out(link))]
        for number, (channel, start, end) in enumerate(route):
            if abs(start - end) > 1:
                x = turns[channel, self._key(link, number)]
                points += [(x, start), (x, end)]
        if not self.grid.from_outside(link):
            return Wire(link, [*points, (head.x, points[-1][1])])
        same = [k for k in self.grid.back if k.head == link.head and (k in self.grid.over) == (link in self.grid.over)]
        x = head.x + head.width * (same.index(link) + 1) / (len(same) + 1)
        edge = head.y if link in self.grid.over else head.y + head.height
        return Wire(link, [*points, (x, points[-1][1]), (x, edge)])

    def _label(self, wires: list[Wire]) -> None:
        """An output's type stands once, where it leaves; a lag where the wire runs back."""
        said = set()
        for wire in wires:
            link = wire.link
            if link in self.grid.back:
                left, right = min(x for x, _ in wire.points), max(x for x, _ in wire.points)
                wire.label, wire.label_at = link.label, ((left + right) / 2, self._track(link) - 5)
            elif (link.tail, link.output) not in said:
                said.add((link.tail, link.output))
                x, y = wire.points[0]
                wire.label, wire.label_at = link.label, (x + 5 + len(link.label) * NOTE / 2, y - 5)

    def _own(self, link: Link) -> Wire:
        """A loop under its box, around its label."""
        box = self.grid.placed[link.tail]
        middle, bottom = box.x + box.width / 2, box.y + box.height
        half = min(max(len(link.label) * NOTE / 2 + 10, 30.0), box.width / 2 - 6)
        corners = [(middle + half, bottom), (middle + half, bottom + 20), (middle - half, bottom + 20)]
        return Wire(link, [*corners, (middle - half, bottom)], link.label, (middle, bottom + 14))


# Background and line colour of each pool in turn.
LANES = (
    ("#e8f5f2", "#1f8a7a"),
    ("#fdf3e0", "#b7791f"),
    ("#ebeefc", "#4254c5"),
    ("#fbe9ef", "#b83266"),
    ("#eef6e8", "#4d8a2f"),
    ("#f2ebfa", "#7a4bb0"),
)

INK, FAINT, DATA, FEEDBACK = "#1e293b", "#64748b", "#475569", "#c2410c"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
ROUND = 8.0


@dataclass(frozen=True)
class Measured:
    """What a report knows of a run, by node: the second lines of the boxes, how far each is filled (0 to 1), and which
    `nodes` and `pools` bound the run."""

    notes: Mapping[str, str]
    shares: Mapping[str, float]
    nodes: Set[str]
    pools: Set[str]


@dataclass(frozen=True)
class _Look:
    """The attributes of what is drawn of a pool: its lane and its name, boxes of nodes and of sources, their words."""

    lane: str
    pool: str
    node: str
    source: str
    title: str
    note: str


def svg(graph: Graph) -> str:
    """The graph as an image, readable on light and dark pages. Solid wires stay within an update; dashed ones feed a
    later update."""
    drawn = layout(graph)
    summary = graph.doc.partition("\n")[0]
    width, height = max(drawn.width, 420.0), drawn.height
    looks = {lane.pool: _image_look(*LANES[i % len(LANES)]) for i, lane in enumerate(drawn.lanes)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="{MONO}">',
        f"<title>{escape(f'{graph.name}: {summary}' if summary else graph.name)}</title>",
        f"<defs>{_marker('data', DATA)}{_marker('feedback', FEEDBACK)}</defs>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="12" fill="#fbfcfe"/>',
        *_heading(graph.name, summary, width),
        *(_lane(lane, width, looks[lane.pool]) for lane in drawn.lanes),
        *(_wire(wire, IMAGE_WIRE[wire.is_data]) for wire in drawn.wires),
        *(_box(placed, looks[placed.box.pool]) for placed in drawn.placed),
        *(_label(wire, IMAGE_LABEL[wire.is_data]) for wire in drawn.wires if wire.label),
        *_legend(drawn, height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def svg_in_page(graph: Graph, measured: Measured) -> str:
    """The graph as a part of an HTML page, whose style has the classes lane, pool, node, share, title, note, mark,
    wire, feedback, wire-label and halo; what bounds the run has the class bounds, too."""
    drawn = layout(graph, measured.notes)
    mark = '<tspan class="mark" dx="10">bounds the run</tspan>'
    width, height = max(drawn.width, 420.0), drawn.height - 50
    parts = [
        *(_lane(lane, width, PAGE) for lane in drawn.lanes if lane.pool not in measured.pools),
        *(_lane(lane, width, PAGE_BOUND, mark) for lane in drawn.lanes if lane.pool in measured.pools),
        *(_wire(wire, PAGE_WIRE[wire.is_data]) for wire in drawn.wires),
        *(_page_box(placed, measured) for placed in drawn.placed),
        *(_label(wire, 'class="wire-label halo"') for wire in drawn.wires if wire.label),
    ]
    label = f"The graph {graph.name}; the table below has the same figures"
    view = f'viewBox="0 44 {width:.0f} {height - 30:.0f}" width="{width:.0f}"'
    return (
        f'<svg {view} role="img" aria-label="{escape(label)}">'
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z"/></marker></defs>{"".join(parts)}</svg>'
    )


# What both draw -------------------------------------------------------------------------------------------------


def _lane(lane: PoolLane, width: float, look: _Look, more: str = "") -> str:
    """`more` follows the pool's name."""
    return (
        f'<rect x="{MARGIN / 2}" y="{lane.y:.1f}" width="{width - MARGIN:.1f}" height="{lane.height:.1f}" rx="10" '
        f'{look.lane}/><text x="{MARGIN / 2 + 12}" y="{lane.y + 20:.1f}" {look.pool}>{escape(lane.pool)}{more}</text>'
    )


def _box(placed: Placed, look: _Look, filled: str = "") -> str:
    """`filled` lies between the box and its words."""
    box, node = placed.box, placed.box.kind == "node"
    return (
        f"<rect {_place(placed)} {look.node if node else look.source}/>{filled}"
        f"{_centred(placed, placed.middle - 3, look.title, box.title)}"
        f"{_centred(placed, placed.middle + 14, look.note, box.note)}"
    )


def _centred(placed: Placed, y: float, look: str, words: str) -> str:
    """A line of text in the middle of a box."""
    x = placed.x + placed.width / 2
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" {look}>{escape(words)}</text>'


def _place(placed: Placed, share: float = 1.0) -> str:
    """Where a box is, or the first `share` of its width."""
    corner = 8 if placed.box.kind == "node" else placed.height / 2
    return (
        f'x="{placed.x:.1f}" y="{placed.y:.1f}" width="{placed.width * share:.1f}" height="{placed.height:.1f}" '
        f'rx="{corner:.1f}"'
    )


def _wire(wire: Wire, look: str) -> str:
    return f'<path d="{_path(wire.points)}" {look}/>'


def _label(wire: Wire, look: str) -> str:
    x, y = wire.label_at
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" {look}>{escape(wire.label)}</text>'


def _path(points: list[Point]) -> str:
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


# How an image looks ---------------------------------------------------------------------------------------------


def _image_look(background: str, colour: str) -> _Look:
    stroke = f'stroke="{colour}" stroke-width="1.6"'
    return _Look(
        lane=f'fill="{background}"',
        pool=f'font-size="12" font-weight="600" font-family="{SANS}" fill="{colour}"',
        node=f'fill="#ffffff" {stroke}',
        source=f'fill="#ffffffb0" {stroke}',
        title=f'font-size="14" font-weight="600" fill="{INK}"',
        note=f'font-size="11" fill="{FAINT}"',
    )


# Of wires within an update, and of those to a later one.
IMAGE_WIRE = {
    True: f'fill="none" stroke="{DATA}" stroke-width="1.6" marker-end="url(#data)"',
    False: f'fill="none" stroke="{FEEDBACK}" stroke-width="1.6" stroke-dasharray="6 4" marker-end="url(#feedback)"',
}


# The halo keeps words readable where a wire passes under them.
_HALO = 'stroke="#ffffff" stroke-width="3" stroke-opacity="0.75" paint-order="stroke"'
IMAGE_LABEL = {
    True: f'font-size="11" fill="{FAINT}" {_HALO}',
    False: f'font-size="11" fill="{FEEDBACK}" {_HALO}',
}


def _heading(name: str, summary: str, width: float) -> list[str]:
    room = int((width - 2 * MARGIN - len(name) * 10 - 20) / 6.2)
    shown = summary if len(summary) <= room else summary[: max(room - 1, 0)].rstrip() + "…"
    title = f'<text x="{MARGIN}" y="36" font-size="17" font-weight="700" fill="{INK}">{escape(name)}'
    tail = (
        f'<tspan dx="14" font-size="12.5" font-weight="400" font-family="{SANS}" fill="{FAINT}">{escape(shown)}</tspan>'
    )
    return [title + (tail if shown else "") + "</text>"]


def _marker(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path d="M0 1L10 5L0 9z" fill="{colour}"/></marker>'
    )


def _legend(drawn: GraphLayout, height: float) -> list[str]:
    turns = any(wire.link.label == "next turn" for wire in drawn.wires)
    later = "to a later update or turn" if turns else "to a later update"
    kinds = [("within an update", DATA, ""), (later, FEEDBACK, ' stroke-dasharray="6 4"')]
    if all(wire.is_data for wire in drawn.wires):
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


# How a page's graph looks ---------------------------------------------------------------------------------------

PAGE = _Look(*(f'class="{name}"' for name in ("lane", "pool", "node", "node", "title", "note")))
PAGE_BOUND = replace(PAGE, lane='class="lane bounds"')
PAGE_WIRE = {True: 'class="wire" marker-end="url(#head)"', False: 'class="wire feedback" marker-end="url(#head)"'}


def _page_box(placed: Placed, measured: Measured) -> str:
    share = measured.shares.get(placed.box.name, 0.0)
    filled = f'<rect class="share" {_place(placed, min(share, 1.0))}/>' if share > 0.01 else ""
    if placed.box.kind != "node" or placed.box.name not in measured.nodes:
        return f"<g>{_box(placed, PAGE, filled)}</g>"
    mark = _centred(placed, placed.y - 5, 'class="mark"', "bounds")
    return f'<g class="bounds">{_box(placed, PAGE, filled)}{mark}</g>'
