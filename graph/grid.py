"""Where the boxes of a graph's picture stand: layers from left to right, a lane for each pool. Pure numbers.

Layers are longest paths over the links within an update. Units are SVG pixels.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from penstock.graph.picture import Box, Link

TITLE = 8.5
"""Width of a character of a box's title: 14 px in any common monospaced font, rounded up."""
NOTE = 6.7
"""Width of a character of notes and labels: 11 px."""

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
class Lane:
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
