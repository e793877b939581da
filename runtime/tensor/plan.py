"""The copies that turn one layout into another, as a small value from which each rank takes its own. Pure, no torch.

Tensors of one signature (shape, dtype and holdings on both sides) have equal copies. A *lane* is a box of each of
them, the ranks that hold it, the ranks that need it, and how many of the copies each holder sends; `reshard` makes
them. A rank expands its own lanes only.

In which order: source s and destination d meet in step (d - s) mod P, with P the larger number of ranks. In each step
a rank has at most one peer, so that every link is busy. Between two ranks, copies come in the order of the tensors in
the destination layout.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.runtime.tensor.box import Box
from penstock.runtime.tensor.layout import Copy

LARGE = 1 << 20  # bytes from which a piece travels by itself: below it a message costs more than a second copy
BUCKET = 4 << 20  # bytes at which a bucket is full


class Lane(NamedTuple):
    """A box of every tensor of a group, from those that hold it to those that need it.

    The copies count through the tensors for the first receiver, then for the second, …: ends[k] is where those end
    that sources[k] sends.
    """

    box: Box
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    ends: tuple[int, ...]


class Group(NamedTuple):
    """The tensors of one signature, with their places in the destination layout, and their lanes."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    itemsize: int
    lanes: tuple[Lane, ...]


class Route(NamedTuple):
    """Box `box` of the tensors first to last (exclusive) of a group, from one rank to another."""

    source: int
    destination: int
    group: int
    lane: int
    first: int
    last: int
    box: Box


@dataclass(frozen=True)
class Plan:
    """Every copy of one sync between `sources` and `destinations` ranks."""

    groups: tuple[Group, ...]
    sources: int
    destinations: int

    @property
    def copies(self) -> tuple[Copy, ...]:
        """All copies, by destination rank. For 405B there are 37 M: a rank asks for its own."""
        return tuple(copy for rank in range(self.destinations) for copy in self.receives(rank))

    def sends(self, source: int) -> tuple[Copy, ...]:
        """What one source rank sends, by destination in rotation order."""
        return self._expanded(self.routes(source=source))

    def receives(self, destination: int) -> tuple[Copy, ...]:
        """What one destination rank receives, by source in rotation order."""
        return self._expanded(self.routes(destination=destination))

    def routes(self, source: int | None = None, destination: int | None = None) -> tuple[Route, ...]:
        """The routes of a source rank, of a destination rank or between the two; all if neither is given. In rotation
        order, and for one peer by group and lane.
        """
        routes = [
            route
            for index, group in enumerate(self.groups)
            for number, lane in enumerate(group.lanes)
            if (source is None or source in lane.sources) and (destination is None or destination in lane.destinations)
            for route in _routes(self.groups, index, number, source, destination)
        ]
        steps = max(self.sources, self.destinations, 1)
        routes.sort(key=lambda route: ((route.destination - route.source) % steps, route.source))
        return tuple(routes)

    @property
    def nbytes(self) -> int:
        """What travels."""
        return sum(self.bytes_out)

    @property
    def bytes_out(self) -> tuple[int, ...]:
        """What each source rank sends."""
        return self._loads[0]

    @property
    def bytes_in(self) -> tuple[int, ...]:
        """What each destination rank receives."""
        return self._loads[1]

    @cached_property
    def _loads(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        out, into = [0] * self.sources, [0] * self.destinations
        alike: dict[tuple[int, ...], int] = defaultdict(int)  # many lanes have the same receivers
        for group in self.groups:
            for lane in group.lanes:
                nbytes, start = lane.box.size * group.itemsize, 0
                alike[lane.destinations] += nbytes * len(group.names)
                for source, end in zip(lane.sources, lane.ends, strict=True):
                    out[source] += (end - start) * nbytes
                    start = end
        for destinations, nbytes in alike.items():
            for destination in destinations:
                into[destination] += nbytes
        return tuple(out), tuple(into)

    def _expanded(self, routes: tuple[Route, ...]) -> tuple[Copy, ...]:
        """The copies of one rank's routes: by peer as they come, then by tensor."""
        by_pair: dict[tuple[int, int], list[tuple[int, int, str, Box]]] = defaultdict(list)
        for source, destination, index, lane, first, last, box in routes:
            names, places, _, _ = self.groups[index]
            by_pair[source, destination] += [(places[k], lane, names[k], box) for k in range(first, last)]
        return tuple(
            Copy(name, source, destination, box)
            for (source, destination), entries in by_pair.items()
            for _, _, name, box in sorted(entries)  # a lane has each tensor once: ties are impossible
        )


def _routes(
    groups: tuple[Group, ...], index: int, number: int, source: int | None, destination: int | None
) -> Iterator[Route]:
    """The routes of one lane: those of one source or destination rank, if given."""
    group, lane = groups[index], groups[index].lanes[number]
    tensors, place = len(group.names), None if destination is None else lane.destinations.index(destination)
    for sender, start, end in zip(lane.sources, (0, *lane.ends), lane.ends, strict=False):
        if source not in (None, sender) or start == end:
            continue
        sent = range(start // tensors, -(-end // tensors))
        for k in sent if place is None else (place,) if place in sent else ():
            first, last = max(start - k * tensors, 0), min(end - k * tensors, tensors)
            yield Route(sender, lane.destinations[k], index, number, first, last, lane.box)
