"""How the wires of a graph's picture run between its boxes, and how wide everything is for that. Pure numbers.

Wires run along free rows and turn in the channels between the columns, where each has a track of its own; feedback
runs above or below all lanes. Channel c lies left of column c.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.graph.grid import (
    FEEDBACK_TRACK,
    FOOTER,
    HEAD,
    HEADER,
    LANE_GAP,
    MARGIN,
    NOTE,
    STUB,
    TRACK,
    Grid,
    Lane,
    Placed,
)
from penstock.graph.ir import Graph
from penstock.graph.picture import Link, picture

Point = tuple[float, float]
Key = tuple[str, str, str, int]
"""What has a track of its own in a channel: an output's wires, or one feedback wire; and which of its turns."""


BETWEEN = (0, 4, -4, 8, -8, 12, -12, 16, 20, 24)
"""Heights for wires between two lanes, from the middle of the gap: beside it lie the lanes' own margins."""


@dataclass
class Wire:
    """A link's corners; its label with the middle of the label's lower edge, if this wire is the one to carry it."""

    link: Link
    points: list[Point] = field(default_factory=list)
    label: str = ""
    label_at: Point = (0.0, 0.0)


@dataclass(frozen=True)
class Layout:
    width: float
    height: float
    lanes: list[Lane]
    placed: list[Placed]
    wires: list[Wire]


def layout(graph: Graph, notes: Mapping[str, str] | None = None) -> Layout:
    """Place the graph's picture. `notes` are second lines of boxes, by name, instead of their own."""
    boxes, links = picture(graph)
    known = notes or {}
    return _Router(Grid([replace(box, note=known.get(box.name, box.note)) for box in boxes], links)).layout()


class _Router:
    """First each wire's vertical pieces, then the tracks of each channel, then widths; then all corners are known."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._runs: list[tuple[float, int, int, str]] = []

    def _way(self, link: Link) -> list[tuple[int, float, float]]:
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

    def layout(self) -> Layout:
        ways = {link: self._way(link) for link in (*self.grid.data, *self.grid.back)}
        tracks = self._tracks(ways)
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
        wires = [self._wire(link, way, turns) for link, way in ways.items()]
        self._label(wires)
        wires += [self._own(link) for link in self.grid.links if link.kind == "own"]
        end = self.grid.lanes[-1].y + self.grid.lanes[-1].height if self.grid.lanes else HEADER
        height = end + len(self.grid.under) * FEEDBACK_TRACK + FOOTER
        return Layout(x + MARGIN, height, self.grid.lanes, list(self.grid.placed.values()), wires)

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
        return (link.tail, link.output, link.label if link in self.grid.back else "", number)

    def _wire(self, link: Link, way: list[tuple[int, float, float]], turns: dict[tuple[int, Key], float]) -> Wire:
        tail, head = self.grid.placed[link.tail], self.grid.placed[link.head]
        points = [(tail.x + tail.width, self.grid.port_out(link))]
        for number, (channel, start, end) in enumerate(way):
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
        """An output's type stands once, where it leaves; a lag on the wire's way back."""
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
