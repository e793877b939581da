"""A graph as SVG: an image of its own, or a part of the page of a run's report.

Both are drawn by one template. An image brings its own style and needs no fonts, scripts or system packages. A page
has a style for the same classes, so that it follows light and dark themes, and its boxes show what was measured.

`GraphLayout` places the boxes: layers from left to right, a lane for each pool. Layers are longest paths over the links
within an update. Wires run along free rows and turn in the channels between the columns, where each has a track of its
own; feedback runs above or below all lanes. Channel c lies left of column c. Units are SVG pixels.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

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
# Heights to try for wires between two lanes, relative to the middle of the gap; the lanes' margins are free, too.
BETWEEN = (0, 4, -4, 8, -8, 12, -12, 16, 20, 24)

Point = tuple[float, float]
# What has one track in a channel: (node, output, label), the wires of an output or one feedback wire, and which piece.
Key = tuple[str, str, str, int]
# The vertical pieces of a wire: (channel, from y, to y).
Route = list[tuple[int, float, float]]


@dataclass
class Placed:
    """A box with its place: `x`, `y` is its upper left corner."""

    box: Box
    layer: int
    lane: int
    row: int
    width: float
    x: float = 0.0
    y: float = 0.0
    height: float = BOX_HEIGHT

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True)
class PoolLane:
    pool: str
    y: float
    height: float


@dataclass
class Wire:
    """A link's corners. If this wire carries the link's label: the label, and the middle of its lower edge."""

    link: Link
    points: list[Point] = field(default_factory=list)
    label: str = ""
    label_at: Point = (0.0, 0.0)

    def path(self) -> str:
        """The SVG path. Corners are right angles, rounded as far as the pieces beside them allow."""
        steps = [f"M{_px(*self.points[0])}"]
        for before, corner, after in zip(self.points, self.points[1:], self.points[2:], strict=False):
            ends = []
            radius = min(8.0, _length(before, corner) / 2, _length(corner, after) / 2)
            for end in (before, after):
                part = radius / (_length(corner, end) or 1.0)
                ends.append(_px(corner[0] + (end[0] - corner[0]) * part, corner[1] + (end[1] - corner[1]) * part))
            steps.append(f"L{ends[0]}Q{_px(*corner)} {ends[1]}")
        return "".join([*steps, f"L{_px(*self.points[-1])}"])


def _length(a: Point, b: Point) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _px(*numbers: float) -> str:
    return " ".join(f"{number:.1f}" for number in numbers)


def layers(boxes: list[Box], links: list[Link]) -> dict[str, int]:
    """Each box's column: one more than the furthest of those that it reads. An argument is just before its first
    reader. A node that only feedback connects is last, near to where feedback comes from."""
    data = [(link.tail, link.head) for link in links if link.kind == "data"]
    layer = {box.name: 0 for box in boxes}
    # The links of a node come after those of all that it reads.
    for tail, head in data:
        layer[head] = max(layer[head], layer[tail] + 1)
    for box in boxes:
        readers = [layer[head] for tail, head in data if tail == box.name]
        if box.kind != "node" and readers:
            layer[box.name] = min(readers) - 1
    for box in boxes:
        if box.kind == "node" and not any(box.name in link for link in data):
            layer[box.name] = max(layer.values())
    used = sorted(set(layer.values()))
    return {name: used.index(column) for name, column in layer.items()}


class GraphLayout:
    """The graph's picture with all coordinates. `notes` replace the second lines of boxes, by name.

    Computed in this order: columns, lanes and heights of boxes; vertical pieces of wires; tracks of channels and widths
    of columns; corners of wires. `data` links run to the right; `back` links return, `over` all lanes or `under` them.
    """

    def __init__(self, graph: Graph, notes: Mapping[str, str] | None = None) -> None:
        boxes, links = picture(graph)
        boxes = [replace(box, note=(notes or {}).get(box.name, box.note)) for box in boxes]
        self.links = list(dict.fromkeys(links))
        layer = layers(boxes, links)
        first = {pool: min(layer[b.name] for b in boxes if b.pool == pool) for pool in (b.pool for b in boxes)}
        pools = sorted(first, key=lambda pool: first[pool])
        self.columns = max(layer.values(), default=-1) + 1
        self.placed: dict[str, Placed] = {}
        rows: Counter[tuple[int, int]] = Counter()
        for box in boxes:
            place = (layer[box.name], pools.index(box.pool))
            width = max(len(box.title) * TITLE, len(box.note) * NOTE) + 24
            self.placed[box.name] = Placed(box, *place, rows[place], width)
            rows[place] += 1
        self.own = {link.tail for link in self.links if link.kind == "own"}
        self.data = [link for link in self.links if link.kind == "data"]
        self.back = [link for link in self.links if link.kind == "feedback"]
        self.over = [k for k in self.back if 2 * self.placed[k.head].lane < max(len(pools), 2)]
        self.under = [k for k in self.back if k not in self.over]
        self.ports_out: dict[str, list[str]] = defaultdict(list)
        for link in (*self.data, *self.back):
            if link.output not in self.ports_out[link.tail]:
                self.ports_out[link.tail].append(link.output)
        self.lanes = self._lanes(pools)
        self._runs: list[tuple[float, int, int, str]] = []
        routes = {link: self._route(link) for link in (*self.data, *self.back)}
        turns, right = self._columns(routes)
        self.wires = [self._wire(link, route, turns) for link, route in routes.items()]
        self._label()
        self.wires += [self._loop(link) for link in self.links if link.kind == "own"]
        self.width = right + MARGIN
        self.height = self._bottom + len(self.under) * FEEDBACK_TRACK + FOOTER

    @property
    def _bottom(self) -> float:
        return self.lanes[-1].y + self.lanes[-1].height if self.lanes else HEADER

    def _lanes(self, pools: list[str]) -> list[PoolLane]:
        """Return the lanes. Set each box's height and y."""
        ports_in = Counter(link.head for link in (*self.data, *self.back))
        for name, placed in self.placed.items():
            ports = max(ports_in[name], len(self.ports_out[name]))
            placed.height = max(BOX_HEIGHT, ports * PORT + 8)
        lanes, y = [], HEADER + len(self.over) * FEEDBACK_TRACK
        for index, pool in enumerate(pools):
            top, members = y, [p for p in self.placed.values() if p.lane == index]
            y += LANE_TOP
            for row in range(max(p.row for p in members) + 1):
                same = [p for p in members if p.row == row]
                tallest = max(p.height for p in same)
                for placed in same:
                    placed.y = y + (tallest - placed.height) / 2
                y += tallest + ROW_GAP + OWN * any(p.box.name in self.own for p in same)
            y += LANE_BOTTOM - ROW_GAP
            lanes.append(PoolLane(pool, top, y - top))
            y += LANE_GAP
        return lanes

    def _port_out(self, link: Link) -> float:
        ports = self.ports_out[link.tail]
        return self.placed[link.tail].middle + (ports.index(link.output) - (len(ports) - 1) / 2) * PORT

    def _port_in(self, link: Link) -> float:
        """The y of a link's input port. From the top: feedback from above, data, feedback from below."""

        def key(other: Link) -> tuple[int, float]:
            side = -1 if other in self.over else 1 if other in self.under else 0
            return side, self._port_out(other)

        reaching = [k for k in (*self.data, *self.back) if k.head == link.head and not self._from_outside(k)]
        ports = sorted(reaching, key=key)
        head = self.placed[link.head]
        y = head.middle + (ports.index(link) - (len(ports) - 1) / 2) * PORT
        # Not at the height at which another value leaves a box further left: the two wires would overlap.
        for other in (*self.data, *self.back):
            tail = self.placed[other.tail]
            beside = (tail.lane, tail.row) == (head.lane, head.row) and tail.layer < head.layer
            if beside and (other.tail, other.output) != (link.tail, link.output) and abs(self._port_out(other) - y) < 4:
                return y + PORT / 3
        return y

    def _from_outside(self, link: Link) -> bool:
        """True if feedback enters a box from above or below, since nothing is in between."""
        head = self.placed[link.head]
        if link in self.over:
            return head.lane == 0 and head.row == 0
        last = max(p.row for p in self.placed.values() if p.lane == head.lane and p.layer == head.layer)
        lowest = head.lane == len(self.lanes) - 1 and head.row == last and link.head not in self.own
        return link in self.under and lowest

    def _route(self, link: Link) -> Route:
        tail, head = self.placed[link.tail], self.placed[link.head]
        start = self._port_out(link)
        if link in self.back:
            track = self._track(link)
            leave = (tail.layer + 1, start, track)
            return [leave] if self._from_outside(link) else [leave, (head.layer, track, self._port_in(link))]
        end, first = self._port_in(link), tail.layer + 1
        if head.layer == first or self._run(start, tail.lane, tail.row, link):
            return [(head.layer, start, end)]
        if self._run(end, head.lane, head.row, link):
            return [(first, start, end)]
        lane = self.lanes[tail.lane]
        between = lane.y + lane.height + LANE_GAP / 2 if head.lane >= tail.lane else lane.y - LANE_GAP / 2
        between = next((y for d in BETWEEN if self._run(y := between + d, -1, 0, link)), between)
        return [(first, start, between), (head.layer, between, end)]

    def _run(self, y: float, lane: int, row: int, link: Link) -> bool:
        """Reserve the height `y` for a wire between its ends. False if a box or another wire is in the way."""
        after, before = self.placed[link.tail].layer, self.placed[link.head].layer
        row_of = [p for p in self.placed.values() if p.lane == lane and p.row == row]
        if any(after < p.layer < before for p in row_of):
            return False
        source = f"{link.tail}.{link.output}"
        for other_y, start, end, other in self._runs:
            if abs(y - other_y) < 4 and start < before and after < end and other != source:
                return False
        self._runs.append((y, after, before, source))
        return True

    def _track(self, link: Link) -> float:
        """The height at which a feedback wire runs back; the widest wire is furthest out."""
        side = self.over if link in self.over else self.under
        span = {k: self.placed[k.head].layer - self.placed[k.tail].layer for k in side}
        place = sorted(side, key=lambda k: (span[k], k.label)).index(link)
        if link in self.over:
            return HEADER + (place + 0.5) * FEEDBACK_TRACK
        return self._bottom + (len(side) - place) * FEEDBACK_TRACK - 6

    def _columns(self, routes: Mapping[Link, Route]) -> tuple[dict[tuple[int, Key], float], float]:
        """Set each box's x and width. Return (the x of each vertical piece, the right end of the picture)."""
        # Tracks of a channel from left to right: long pieces are on the right, so that they enclose short ones.
        lengths: dict[int, dict[Key, float]] = defaultdict(dict)
        for link, route in routes.items():
            for number, (channel, start, end) in enumerate(route):
                if abs(start - end) > 1:
                    key = self._key(link, number)
                    lengths[channel][key] = max(lengths[channel].get(key, 0.0), abs(start - end))
        x, turns = MARGIN, {}
        for channel in range(self.columns + 1):
            labels = [k.label for k in self.data if self.placed[k.tail].layer == channel - 1]
            x += max((len(label) * NOTE + 10 for label in labels), default=STUB)
            tracks = lengths[channel]
            for number, key in enumerate(sorted(tracks, key=lambda key: tracks[key])):
                turns[channel, key] = x + number * TRACK + 4
            x += len(tracks) * TRACK + HEAD
            column = [p for p in self.placed.values() if p.layer == channel]
            widest = max((p.width for p in column), default=0.0)
            for placed in column:
                placed.x, placed.width = x, widest
            x += widest
        return turns, x

    def _key(self, link: Link, number: int) -> Key:
        # Wires of one output share their tracks.
        return (link.tail, link.output, link.label if link in self.back else "", number)

    def _wire(self, link: Link, route: Route, turns: Mapping[tuple[int, Key], float]) -> Wire:
        tail, head = self.placed[link.tail], self.placed[link.head]
        points = [(tail.x + tail.width, self._port_out(link))]
        for number, (channel, start, end) in enumerate(route):
            if abs(start - end) > 1:
                x = turns[channel, self._key(link, number)]
                points += [(x, start), (x, end)]
        if not self._from_outside(link):
            return Wire(link, [*points, (head.x, points[-1][1])])
        same = [k for k in self.back if k.head == link.head and (k in self.over) == (link in self.over)]
        x = head.x + head.width * (same.index(link) + 1) / (len(same) + 1)
        edge = head.y if link in self.over else head.y + head.height
        return Wire(link, [*points, (x, points[-1][1]), (x, edge)])

    def _label(self) -> None:
        """Label each output once, where it leaves its box, and each feedback wire where it runs back."""
        said = set()
        for wire in self.wires:
            link = wire.link
            if link in self.back:
                left, right = min(x for x, _ in wire.points), max(x for x, _ in wire.points)
                wire.label, wire.label_at = link.label, ((left + right) / 2, self._track(link) - 5)
            elif (link.tail, link.output) not in said:
                said.add((link.tail, link.output))
                x, y = wire.points[0]
                wire.label, wire.label_at = link.label, (x + 5 + len(link.label) * NOTE / 2, y - 5)

    def _loop(self, link: Link) -> Wire:
        """A loop under its box, around its label."""
        box = self.placed[link.tail]
        middle, bottom = box.x + box.width / 2, box.y + box.height
        half = min(max(len(link.label) * NOTE / 2 + 10, 30.0), box.width / 2 - 6)
        corners = [(middle + half, bottom), (middle + half, bottom + 20), (middle - half, bottom + 20)]
        return Wire(link, [*corners, (middle - half, bottom)], link.label, (middle, bottom + 14))


# Background and line colour of each pool in turn, in an image.
COLOURS = (
    ("#e8f5f2", "#1f8a7a"),
    ("#fdf3e0", "#b7791f"),
    ("#ebeefc", "#4254c5"),
    ("#fbe9ef", "#b83266"),
    ("#eef6e8", "#4d8a2f"),
    ("#f2ebfa", "#7a4bb0"),
)


TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, trim_blocks=True)
TEMPLATES.filters["px"] = _px


@dataclass(frozen=True)
class Measured:
    """What a report measured of a run: by node, the second line of its box and how far the box is filled (0 to 1);
    and which `nodes` and `pools` bound the run."""

    notes: Mapping[str, str]
    shares: Mapping[str, float]
    nodes: Set[str]
    pools: Set[str]


def svg(graph: Graph, measured: Measured | None = None) -> str:
    """The graph as an image, readable on light and dark pages; with `measured`, as a part of an HTML page.

    Solid wires stay within an update; dashed ones feed a later update. The page's style has the classes lane, pool,
    node, share, title, note, mark, wire, feedback, wire-label and halo; what bounds the run has the class bounds, too.
    """
    drawn = GraphLayout(graph, measured.notes if measured else None)
    width, summary = max(drawn.width, 420.0), graph.doc.partition("\n")[0]
    # Cut the summary to the image's width: SVG text does not wrap.
    room = max(int((width - 2 * MARGIN - len(graph.name) * 10 - 20) / 6.2), 1)
    turns = any(wire.label == "next turn" for wire in drawn.wires)
    legend = [("within an update", "", MARGIN)]
    if any(wire.link.kind != "data" for wire in drawn.wires):
        legend.append(("to a later update or turn" if turns else "to a later update", "feedback", 183.0))
    return TEMPLATES.get_template("graph.svg.j2").render(
        name=graph.name,
        summary=summary,
        shown=summary if len(summary) <= room else summary[: room - 1].rstrip() + "…",
        width=width,
        height=drawn.height,
        lanes=drawn.lanes,
        wires=drawn.wires,
        boxes=drawn.placed.values(),
        colours=COLOURS,
        legend=legend,
        measured=measured,
    )
