"""The plan from a source layout to a destination layout (`reshard`), from which each rank takes its own copies, and the
chain of replicas that pass a version on (`chain`). Pure, no torch.

Tensors of one signature (shape, dtype and holdings on both sides) have equal copies, so the plan is made once for all
of them. A `CopySet` is a region of each of these tensors, the ranks that hold it, the ranks that need it, and how many
of the copies each holder sends. A rank expands only its own copy sets.

**Who sends**: holders on the receiver's host if there are any; among these the one with the least to send. Regions that
only one rank holds are counted first, then large copies before small ones, so that the small ones balance the loads. A
large region whose copies cannot be divided evenly is split.

**In which order**: source s and destination d exchange in step (d - s) mod P, with P the larger number of ranks. In
each step a rank has at most one peer, so that every link is busy. Between two ranks, copies come in the order of the
tensors in the destination layout.

**Chains**, for few trainers and many replicas: if the trainers sent to each of n replicas, the busiest trainer would
send n times its part of one replica, while a replica's rank receives its part once. So the trainers feed only so many
heads that they are no busier than a receiver, and each head starts a chain of replicas of the same layout. A rank
forwards one round to the same rank of the next replica while it receives the next round. In a chain of d replicas the
last one is complete after the time for its own bytes and for d - 1 more rounds.
"""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from penstock.runtime.tensor.layout import ITEMSIZE, Copy, Holding, IntArray, Layout, LayoutError, Region

_BLOCK = 1 << 20  # pairs of regions compared by one call


class DistinctRegions(NamedTuple):
    """The distinct non-empty regions of a holding, sorted, and the ranks that hold each. start and stop are [N, D]."""

    start: IntArray
    stop: IntArray
    ranks: Sequence[tuple[int, ...]]

    def region(self, index: int) -> Region:
        return Region(tuple(self.start[index].tolist()), tuple(self.stop[index].tolist()))

    @property
    def sizes(self) -> IntArray:
        """The number of elements of each, [N]."""
        sizes: IntArray = (self.stop - self.start).prod(1)
        return sizes


class Piece(NamedTuple):
    """Elements that all of `sources` hold and all of `destinations` need."""

    region: Region
    sources: tuple[int, ...]
    destinations: tuple[int, ...]


class Missing(NamedTuple):
    """Elements that all of `destinations` need and no source rank holds."""

    regions: tuple[Region, ...]
    destinations: tuple[int, ...]


def cover(src: Holding, dst: Holding, shape: tuple[int, ...]) -> tuple[list[Piece], list[Missing]]:
    """The pieces that fill each region of `dst` exactly once, by destination and then by place; and what is missing."""
    held, wanted = disjoint_regions(src, shape), distinct_regions(dst, shape)
    to, by, start, stop = _overlaps(wanted, held)
    found = np.zeros(len(wanted.ranks), np.int64)
    np.add.at(found, to, (stop - start).prod(1))
    rows = zip(to.tolist(), by.tolist(), start.tolist(), stop.tolist(), strict=True)
    pieces = [Piece(Region(tuple(a), tuple(b)), held.ranks[s], wanted.ranks[d]) for d, s, a, b in rows]
    gaps = np.flatnonzero(found < wanted.sizes).tolist()
    return pieces, [Missing(_gaps(wanted.region(index), held), wanted.ranks[index]) for index in gaps]


def distinct_regions(holding: Holding, shape: tuple[int, ...]) -> DistinctRegions:
    edges = holding.edges(shape)
    # Empty regions are normal, as with more ranks than rows.
    some = (edges.start < edges.stop).all(1)
    ranks, rows = edges.ranks[some], np.concatenate((edges.start, edges.stop), 1)[some]
    # Sorted, so that every rank makes the same plan, whatever the order of its lists.
    order = np.lexsort((ranks, *rows.T[::-1]))
    ranks, rows = ranks[order], rows[order]
    first = np.ones(len(rows), np.bool_)
    first[1:] = (rows[1:] != rows[:-1]).any(1)
    bounds = [*np.flatnonzero(first).tolist(), len(rows)]
    listed = ranks.tolist()
    holders = [tuple(dict.fromkeys(listed[a:b])) for a, b in itertools.pairwise(bounds)]
    return DistinctRegions(rows[first, : len(shape)], rows[first, len(shape) :], holders)


def disjoint_regions(holding: Holding, shape: tuple[int, ...]) -> DistinctRegions:
    """The elements of `distinct_regions` as regions without common elements, each with all ranks that hold it."""
    held = distinct_regions(holding, shape)
    return held if holding.disjoint else _made_disjoint(held)


def _overlaps(a: DistinctRegions, b: DistinctRegions) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Every pair of regions with common elements: its indices in `a` and `b`, sorted, and the common start and stop."""
    found = []
    # In blocks: all pairs of two layouts with thousands of ranks would take gigabytes.
    step = max(1, _BLOCK // max(1, len(b.ranks)))
    for base in range(0, max(1, len(a.ranks)), step):
        start = np.maximum(a.start[base : base + step, None], b.start)
        stop = np.minimum(a.stop[base : base + step, None], b.stop)
        i, j = np.nonzero((start < stop).all(2))
        found.append((i + base, j, start[i, j], stop[i, j]))
    i, j, start, stop = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return i, j, start, stop


def _made_disjoint(held: DistinctRegions) -> DistinctRegions:
    """The same elements as regions without common ones, each with all ranks that hold it."""
    if len(_overlaps(held, held)[0]) == len(held.ranks):
        return held
    found: list[tuple[Region, tuple[int, ...]]] = []
    for index, ranks in enumerate(held.ranks):
        new, refined = [held.region(index)], []
        for atom, holders in found:
            common = atom & held.region(index)
            if common.size:
                refined.append((common, tuple(sorted({*holders, *ranks}))))
                new = [part for region in new for part in region.minus(common)]
            refined += [(part, holders) for part in atom.minus(common)]
        found = refined + [(region, ranks) for region in new]
    found.sort(key=lambda atom: (atom[0].start, atom[0].stop))
    shape = held.start.shape[1]
    start = np.array([region.start for region, _ in found], np.int64).reshape(len(found), shape)
    stop = np.array([region.stop for region, _ in found], np.int64).reshape(len(found), shape)
    return DistinctRegions(start, stop, [ranks for _, ranks in found])


def _gaps(region: Region, held: DistinctRegions) -> tuple[Region, ...]:
    rest = [region]
    for index in range(len(held.ranks)):
        rest = [part for piece in rest for part in piece.minus(held.region(index))]
    return tuple(rest)


LARGE = 1 << 20  # bytes from which a piece is a message of its own: below, a message costs more than a second copy
BUCKET = 4 << 20  # most bytes of a round of messages between two ranks through the hosts' memory


def nccl_round(nbytes: int, peers: int) -> int:
    """The most bytes of a round by NCCL, for a rank that sends or receives `nbytes` in all.

    Rounds are so small that the first packing, the last unpacking and each hop of a chain are a small part of the sync.
    But they have at least 16 MiB with each peer, and at most 512 MiB, since two of them may be staged at a time.
    """
    return min(512 << 20, max(nbytes // 32, peers * (16 << 20)))


class CopySet(NamedTuple):
    """A region of every tensor of a group, from the ranks that hold it to those that need it.

    The copies are numbered through the tensors for the first receiver, then for the second, …. `sources[k]` sends the
    copies before `ends[k]`, from `ends[k - 1]` on.
    """

    region: Region
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    ends: tuple[int, ...]


class SignatureGroup(NamedTuple):
    """The tensors of one signature, with their places in the destination layout, and their copy sets, `lanes`."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    itemsize: int
    lanes: list[CopySet]


class Route(NamedTuple):
    """Region `region` of the tensors first to last (exclusive) of a group, from one rank to another."""

    source: int
    destination: int
    group: int
    lane: int
    first: int
    last: int
    region: Region


@dataclass(frozen=True)
class ReshardPlan:
    """Every copy of one sync between `sources` and `destinations` ranks."""

    groups: tuple[SignatureGroup, ...]
    sources: int
    destinations: int

    @property
    def copies(self) -> tuple[Copy, ...]:
        """All copies, by destination rank. For 405B there are 37 M, so a rank asks only for its own."""
        return tuple(copy for rank in range(self.destinations) for copy in self.receives(rank))

    def sends(self, source: int) -> tuple[Copy, ...]:
        """The copies that a source rank sends, by destination in rotation order."""
        return self._expanded(self.routes(source=source))

    def receives(self, destination: int) -> tuple[Copy, ...]:
        """The copies that a destination rank receives, by source in rotation order."""
        return self._expanded(self.routes(destination=destination))

    def routes(self, source: int | None = None, destination: int | None = None) -> tuple[Route, ...]:
        """The routes of a source rank, of a destination rank, or between the two; all if neither is given. In rotation
        order, then by group and lane.
        """
        found = []
        for index, group in enumerate(self.groups):
            tensors = len(group.names)
            for number, lane in enumerate(group.lanes):
                if destination is not None and destination not in lane.destinations:
                    continue
                place = None if destination is None else lane.destinations.index(destination)
                for sender, start, end in zip(lane.sources, (0, *lane.ends), lane.ends, strict=False):
                    if source not in (None, sender) or start == end:
                        continue
                    sent = range(start // tensors, -(-end // tensors))
                    for k in sent if place is None else (place,) if place in sent else ():
                        first, last = max(start - k * tensors, 0), min(end - k * tensors, tensors)
                        found.append(Route(sender, lane.destinations[k], index, number, first, last, lane.region))
        steps = max(self.sources, self.destinations, 1)
        # Rotation: in each step a rank has one peer, and a receiver one sender.
        found.sort(key=lambda route: ((route.destination - route.source) % steps, route.source))
        return tuple(found)

    @property
    def nbytes(self) -> int:
        """The bytes that are sent in all."""
        return sum(self.bytes_out)

    @property
    def bytes_out(self) -> tuple[int, ...]:
        """The bytes that each source rank sends."""
        return self._loads[0]

    @property
    def bytes_in(self) -> tuple[int, ...]:
        """The bytes that each destination rank receives."""
        return self._loads[1]

    @cached_property
    def _loads(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        out, into = np.zeros(self.sources, np.int64), np.zeros(self.destinations, np.int64)
        for group in self.groups:
            for lane in group.lanes:
                nbytes = lane.region.size * group.itemsize
                out[list(lane.sources)] += np.diff(lane.ends, prepend=0) * nbytes
                into[list(lane.destinations)] += nbytes * len(group.names)
        return tuple(out.tolist()), tuple(into.tolist())

    def _expanded(self, routes: tuple[Route, ...]) -> tuple[Copy, ...]:
        """The copies of one rank's routes: by peer in the given order, then by tensor."""
        by_pair: dict[tuple[int, int], list[tuple[int, int, str, Region]]] = defaultdict(list)
        for source, destination, index, lane, first, last, region in routes:
            names, places, _, _ = self.groups[index]
            by_pair[source, destination] += [(places[k], lane, names[k], region) for k in range(first, last)]
        return tuple(
            Copy(name, source, destination, region)
            for (source, destination), entries in by_pair.items()
            for _, _, name, region in sorted(entries)  # a lane has each tensor once: ties are impossible
        )


def share(loads: Sequence[int], copies: int, nbytes: int) -> list[int]:
    """How many of `copies` copies of `nbytes` bytes each sender makes, if always the sender with the least bytes so
    far, the first among equals, takes the next one. Takes the time of a sort, however many copies there are.
    """
    # The level to which all bytes raise the loads, the least loaded first; senders exceed it by at most one copy. It is
    # the smallest mean of all bytes and the first few loads, since loads above the level would raise the mean.
    level = min((copies * nbytes + filled) // n for n, filled in enumerate(accumulate(sorted(loads)), 1))
    counts = [max(0, level - load) // nbytes for load in loads]
    queue = [(load + count * nbytes, sender) for sender, (load, count) in enumerate(zip(loads, counts, strict=True))]
    heapq.heapify(queue)
    for _ in range(copies - sum(counts)):
        load, sender = queue[0]
        counts[sender] += 1
        heapq.heapreplace(queue, (load + nbytes, sender))
    return counts


Faults = defaultdict[str, list[str]]


def reshard(src: Layout, dst: Layout) -> ReshardPlan:
    """The copies that fill every region of `dst` from the regions of `src`. Each element of each destination region is
    written exactly once. A pure function of its arguments, so that each rank makes the same plan by itself.

    Raises `LayoutError` with every tensor that is missing on one side, differs in shape or dtype, or is not covered.
    """
    faults = _faults(src, dst)
    sound = dst.by_name.keys() - faults.keys()
    source_index = {t.name: index for t, index in zip(src.tensors, src.signatures[1], strict=True)}
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, (t, index) in enumerate(zip(dst.tensors, dst.signatures[1], strict=True)):
        if t.name in sound:
            places[source_index[t.name], index].append(place)
    loads = [0] * src.ranks
    groups: list[SignatureGroup] = []
    shared: list[tuple[int, int, int]] = []  # copy sets that several ranks hold: (- bytes of a copy, group, lane)
    for (source, destination), own in places.items():
        shape, dtype, held = src.signatures[0][source]
        pieces, missing = cover(held, dst.signatures[0][destination][2], shape)
        names, itemsize, lanes = tuple(dst.tensors[place].name for place in own), ITEMSIZE[dtype], list[CopySet]()
        for name in names if missing else ():
            faults[name] += map(_uncovered, missing)
        # After a fault, only look for other faults: there will be no plan.
        whole = [] if faults else pieces
        for part in (part for piece in whole for part in _parts(piece, len(own), itemsize, src, dst)):
            nbytes, copies = part.region.size * itemsize, len(part.destinations) * len(own)
            if len(part.sources) == 1:
                loads[part.sources[0]] += nbytes * copies
            else:
                shared.append((-nbytes, len(groups), len(lanes)))
            lanes.append(CopySet(*part, (copies,)))
        groups.append(SignatureGroup(names, tuple(own), itemsize, lanes))
    if faults:
        lines = [f"  {name}: {fault}" for name in sorted(faults) for fault in faults[name]]
        raise LayoutError("\n".join(["no plan from source to destination:", *lines]))
    # Large copies first, so that the small ones balance the loads.
    for nbytes, index, number in sorted(shared):
        lane = groups[index].lanes[number]
        counts = share([loads[source] for source in lane.sources], lane.ends[0], -nbytes)
        for source, count in zip(lane.sources, counts, strict=True):
            loads[source] -= nbytes * count
        groups[index].lanes[number] = lane._replace(ends=tuple(accumulate(counts)))
    return ReshardPlan(tuple(groups), src.ranks, dst.ranks)


def _parts(piece: Piece, tensors: int, itemsize: int, src: Layout, dst: Layout) -> Iterator[Piece]:
    """Divide a piece by the holders that may send it to each receiver, and split it if that balances the loads."""
    receivers: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for receiver in piece.destinations:
        # Holders on its host; all holders if there are none there, or hosts are not known.
        known = src.hosts and dst.hosts
        near = tuple(source for source in piece.sources if known and src.hosts[source] == dst.hosts[receiver])
        receivers[near or piece.sources].append(receiver)
    for sources, destinations in receivers.items():
        uneven = tensors * len(destinations) % len(sources)
        worth_it = uneven and piece.region.size * itemsize >= len(sources) * LARGE
        for region in piece.region.cut(len(sources)) if worth_it else (piece.region,):
            # Deal receivers out like cards: if both sides have the same inner axes, replicated tensors are then sent
            # between ranks that exchange other tensors anyway.
            dealt = [d for first in range(len(sources)) for d in destinations[first :: len(sources)]]
            yield Piece(region, sources, tuple(dealt))


def _faults(src: Layout, dst: Layout) -> Faults:
    """By tensor: what makes a plan impossible, except missing coverage."""
    faults: Faults = defaultdict(list)
    for side, layout in (("source", src), ("destination", dst)):
        if layout.hosts and len(layout.hosts) < layout.ranks:
            faults["hosts"].append(f"{len(layout.hosts)} for {layout.ranks} ranks of the {side}")
        own: dict[int, list[str]] = {}  # by signature
        times = Counter(t.name for t in layout.tensors)
        for t, index in zip(layout.tensors, layout.signatures[1], strict=True):
            if index not in own:
                own[index] = t.faults()
            several = [f"{times[t.name]} times"] if times[t.name] > 1 else []
            if several or own[index]:
                faults[t.name] += [f"{fault} in the {side}" for fault in (*several, *own[index])]
    for name in src.by_name.keys() | dst.by_name.keys():
        a, b = src.by_name.get(name), dst.by_name.get(name)
        if a is None or b is None:
            faults[name].append(f"only in the {'source' if b is None else 'destination'}")
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            given = f"{a.dtype} {a.shape} in the source, {b.dtype} {b.shape} in the destination"
            faults[name].append(given)
    return faults


def _uncovered(missing: Missing, limit: int = 3) -> str:
    regions = _listed([str(region) for region in missing.regions], limit)
    ranks = _listed([str(rank) for rank in missing.destinations], limit)
    return f"{regions} for rank{'s' if len(missing.destinations) > 1 else ''} {ranks} is held by no source rank"


def _listed(texts: list[str], limit: int) -> str:
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more


# How much more than a receiver a trainer may have to transfer before another hop is better.
SLACK = 1.05


def chain(plan: ReshardPlan, replicas: int) -> tuple[int | None, ...]:
    """The source of a version for each replica: another replica with a smaller number, or the trainers (None). `plan`
    is that from the trainers to one replica. A replica forwards to at most one other.
    """
    if replicas < 1:
        raise ValueError(f"given {replicas} replicas, needed at least 1")
    heads = num_heads(max(plan.bytes_out, default=0), max(plan.bytes_in, default=0), replicas)
    return tuple(None if k < heads else k - heads for k in range(replicas))


def num_heads(out: int, into: int, replicas: int) -> int:
    """The number of replicas that the trainers feed, if the busiest trainer sends `out` bytes to each, and a replica's
    busiest rank receives `into` bytes.
    """
    return max(1, min(replicas, int(SLACK * into / out))) if out else replicas


def forwards(held: Mapping[str, Region], rank: int) -> tuple[Copy, ...]:
    """The copies from a rank to the same rank of the next replica: all that it holds, in its own order."""
    return tuple(Copy(name, rank, rank, region) for name, region in held.items() if region.size)
