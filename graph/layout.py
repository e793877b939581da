"""Where boxes and wires of a graph's picture go: layers from left to right, a lane for each pool. Pure numbers.

Layers are longest paths over the links within an update. Wires run along free rows and turn in the channels between
the columns, where each has a track of its own; feedback runs above or below all lanes. Units are SVG pixels.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from penstock.graph.ir import Graph
from penstock.graph.picture import Box, Link, picture

TITLE = 8.5
"""Width of a character of a box's title: 14 px in any common monospaced font, rounded up."""
NOTE = 6.7
"""Width of a character of notes and labels: 11 px."""

BOX_HEIGHT, PORT = 48.0, 20.0
LANE_TOP, LANE_BOTTOM, ROW_GAP, LANE_GAP = 34.0, 16.0, 14.0, 12.0
TRACK, FEEDBACK_TRACK, OWN = 12.0, 26.0, 30.0
MARGIN, HEADER, FOOTER, HEAD = 20.0, 58.0, 40.0, 18.0

Point = tuple[float, float]
Key = tuple[str, str, str, int]
"""What has a track of its own in a channel: an output's wires, or one feedback wire; and which of its turns."""


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


@dataclass
class Wire:
    """A link's corners; its label with the middle of the label's lower edge, if this wire is the one to carry it."""

    link: Link
    points: list[Point] = field(default_factory=list)
    label: str = ""
    label_at: Point = (0.0, 0.0)


@dataclass(frozen=True)
class Lane:
    pool: str
    y: float
    height: float


@dataclass(frozen=True)
class Layout:
    width: float
    height: float
    lanes: list[Lane]
    placed: list[Placed]
    wires: list[Wire]


def layers(boxes: list[Box], links: list[Link]) -> dict[str, int]:
    """Each box's column: one more than the furthest of what it reads; a source stands just before its first reader."""
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
    used = sorted(set(layer.values()))
    return {name: used.index(column) for name, column in layer.items()}


def layout(graph: Graph) -> Layout:
    """Place the graph's picture."""
    boxes, links = picture(graph)
    return _Placement(boxes, links).layout()


class _Placement:
    """Decides in this order: columns and lanes, heights, tracks, widths; then the wires' corners are known."""

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
            width = max(len(box.title) * TITLE, len(box.note) * NOTE) + 28
            self.placed[box.name] = Placed(box, place[1], place[0], rows[place], width=width)
            rows[place] += 1
        # A wire that goes back is drawn like feedback, whatever it is: only a graph with faults has others.
        self.back = [k for k in self.links if k.kind == "feedback" or (k.kind == "data" and self._span(k) <= 0)]
        self.data = [k for k in self.links if k.kind == "data" and k not in self.back]
        self.over = [k for k in self.back if 2 * self.placed[k.head].lane < max(len(self.pools), 2)]
        self.under = [k for k in self.back if k not in self.over]
        self.ports_out: dict[str, list[str]] = defaultdict(list)
        for link in (*self.data, *self.back):
            if link.output not in self.ports_out[link.tail]:
                self.ports_out[link.tail].append(link.output)
        self.lanes = self._heights()

    def _span(self, link: Link) -> int:
        return self.placed[link.head].layer - self.placed[link.tail].layer

    # Heights -----------------------------------------------------------------------------------------------

    def _heights(self) -> list[Lane]:
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
            lanes.append(Lane(pool, top, y - top))
            y += LANE_GAP
        return lanes

    def _port_out(self, link: Link) -> float:
        ports = self.ports_out[link.tail]
        return self.placed[link.tail].middle + (ports.index(link.output) - (len(ports) - 1) / 2) * PORT

    def _port_in(self, link: Link) -> float:
        """Ports from the top in the order in which the wires come: feedback from above, data, feedback from below."""

        def key(other: Link) -> tuple[int, float]:
            side = -1 if other in self.over else 1 if other in self.under else 0
            return side, self._port_out(other)

        ports = sorted(
            (k for k in (*self.data, *self.back) if k.head == link.head and not self._from_outside(k)), key=key
        )
        return self.placed[link.head].middle + (ports.index(link) - (len(ports) - 1) / 2) * PORT

    def _from_outside(self, link: Link) -> bool:
        """Does feedback enter a box from above or below, since nothing stands between?"""
        head = self.placed[link.head]
        if link in self.over:
            return head.lane == 0 and head.row == 0
        last = max(p.row for p in self.placed.values() if p.lane == head.lane and p.layer == head.layer)
        own = any(k.kind == "own" and k.tail == link.head for k in self.links)
        return link in self.under and head.lane == len(self.pools) - 1 and head.row == last and not own

    # Ways --------------------------------------------------------------------------------------------------

    def _way(self, link: Link) -> list[tuple[int, float, float]]:
        """The vertical pieces of a wire: (channel, from y, to y). Channel c lies left of column c."""
        tail, head = self.placed[link.tail], self.placed[link.head]
        start = self._port_out(link)
        if link in self.back:
            track = self._track(link)
            leave = (tail.layer + 1, start, track)
            return [leave] if self._from_outside(link) else [leave, (head.layer, track, self._port_in(link))]
        end = self._port_in(link)
        if head.layer == tail.layer + 1 or self._free(tail.lane, tail.row, tail.layer, head.layer):
            return [(head.layer, start, end)]
        if self._free(head.lane, head.row, tail.layer, head.layer):
            return [(tail.layer + 1, start, end)]
        lane = self.lanes[tail.lane]
        between = lane.y + lane.height + LANE_GAP / 2 if head.lane >= tail.lane else lane.y - LANE_GAP / 2
        return [(tail.layer + 1, start, between), (head.layer, between, end)]

    def _free(self, lane: int, row: int, after: int, before: int) -> bool:
        """Is there no box in this row between two columns?"""
        return not any(p.lane == lane and p.row == row and after < p.layer < before for p in self.placed.values())

    def _track(self, link: Link) -> float:
        """The height at which feedback runs back: the widest furthest out."""
        side = self.over if link in self.over else self.under
        place = sorted(side, key=lambda k: (self._span(k), k.label)).index(link)
        if link in self.over:
            return HEADER + (place + 0.5) * FEEDBACK_TRACK
        bottom = self.lanes[-1].y + self.lanes[-1].height
        return bottom + (len(side) - place) * FEEDBACK_TRACK - 6

    # Widths and corners ------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        ways = {link: self._way(link) for link in (*self.data, *self.back)}
        tracks = self._tracks(ways)
        x, turns = MARGIN, {}
        for channel in range(self.columns + 1):
            labels = [k.label for k in self.data if self.placed[k.tail].layer == channel - 1]
            x += max((len(label) * NOTE + 10 for label in labels), default=4)
            for number, key in enumerate(tracks[channel]):
                turns[channel, key] = x + number * TRACK + 4
            x += len(tracks[channel]) * TRACK + HEAD
            column = [p for p in self.placed.values() if p.layer == channel]
            widest = max((p.width for p in column), default=0.0)
            for placed in column:
                placed.x, placed.width = x, widest
            x += widest
        wires = [self._wire(link, way, turns) for link, way in ways.items()]
        self._label(wires)
        wires += [self._own(link) for link in self.links if link.kind == "own"]
        end = self.lanes[-1].y + self.lanes[-1].height if self.lanes else HEADER
        height = end + len(self.under) * FEEDBACK_TRACK + FOOTER
        return Layout(x + MARGIN, height, self.lanes, list(self.placed.values()), wires)

    def _tracks(self, ways: dict[Link, list[tuple[int, float, float]]]) -> dict[int, list[Key]]:
        """The tracks of each channel from left to right: long pieces on the right, so that they enclose short ones.
        Wires of one output share theirs."""
        length: dict[int, dict[Key, float]] = defaultdict(dict)
        for link, way in ways.items():
            for number, (channel, start, end) in enumerate(way):
                if abs(start - end) > 1:
                    key = self._key(link, number)
                    length[channel][key] = max(length[channel].get(key, 0.0), abs(start - end))
        found = {channel: sorted(keys, key=lambda key: keys[key]) for channel, keys in length.items()}
        return defaultdict(list, found)

    def _key(self, link: Link, number: int) -> Key:
        return (link.tail, link.output, link.label if link in self.back else "", number)

    def _wire(self, link: Link, way: list[tuple[int, float, float]], turns: dict[tuple[int, Key], float]) -> Wire:
        tail, head = self.placed[link.tail], self.placed[link.head]
        points = [(tail.x + tail.width, self._port_out(link))]
        for number, (channel, start, end) in enumerate(way):
            if abs(start - end) > 1:
                x = turns[channel, self._key(link, number)]
                points += [(x, start), (x, end)]
        if not self._from_outside(link):
            return Wire(link, [*points, (head.x, points[-1][1])])
        same = [k for k in self.back if k.head == link.head and (k in self.over) == (link in self.over)]
        x = head.x + head.width * (same.index(link) + 1) / (len(same) + 1)
        edge = head.y if link in self.over else head.y + head.height
        return Wire(link, [*points, (x, points[-1][1]), (x, edge)])

    def _label(self, wires: list[Wire]) -> None:
        """An output's type stands once, where it leaves; a lag on the wire's way back."""
        said = set()
        for wire in wires:
            link = wire.link
            if link in self.back:
                left, right = min(x for x, _ in wire.points), max(x for x, _ in wire.points)
                wire.label, wire.label_at = link.label, ((left + right) / 2, self._track(link) - 5)
            elif (link.tail, link.output) not in said:
                said.add((link.tail, link.output))
                x, y = wire.points[0]
                wire.label, wire.label_at = link.label, (x + 5 + len(link.label) * NOTE / 2, y - 5)

    def _own(self, link: Link) -> Wire:
        """A loop under its box, around its label."""
        box = self.placed[link.tail]
        middle, bottom = box.x + box.width / 2, box.y + box.height
        half = min(max(len(link.label) * NOTE / 2 + 10, 30.0), box.width / 2 - 6)
        corners = [(middle + half, bottom), (middle + half, bottom + 20), (middle - half, bottom + 20)]
        return Wire(link, [*corners, (middle - half, bottom)], link.label, (middle, bottom + 14))
