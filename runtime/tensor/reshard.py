"""The plan from a source layout to a destination layout, made once for all tensors of a signature. Pure, no torch.

Who sends: holders on the receiver's host if there are any; among these the one with the least to send. What only one
rank holds is counted first, then large copies before small ones, so that the small ones level out what is left. A
large box whose copies cannot be shared out evenly is cut.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from penstock.runtime.tensor.cover import Missing, Piece, cover
from penstock.runtime.tensor.layout import ITEMSIZE, Layout, LayoutError, TensorLayout
from penstock.runtime.tensor.plan import LARGE, Group, Lane, Plan
from penstock.runtime.tensor.share import share

Faults = defaultdict[str, list[str]]


class _Draft(NamedTuple):
    """A group before it is settled who sends what."""

    tensors: tuple[TensorLayout, ...]
    places: tuple[int, ...]
    pieces: list[Piece]


def reshard(src: Layout, dst: Layout) -> Plan:
    """The copies that fill every box of `dst` from the boxes of `src`: each element of each destination box is
    written exactly once. A pure function of its arguments, so that each rank makes the same plan by itself.

    Raises `LayoutError` with every tensor that is missing on a side, differs in shape or dtype, or is not covered.
    """
    faults = _faults(src, dst)
    drafts = list(_drafts(src, dst, faults))
    if faults:
        lines = [f"  {name}: {fault}" for name in sorted(faults) for fault in faults[name]]
        raise LayoutError("\n".join(["no plan from source to destination:", *lines]))
    return Plan(tuple(_settled(drafts, src, dst)), src.ranks, dst.ranks)


def _drafts(src: Layout, dst: Layout, faults: Faults) -> Iterator[_Draft]:
    """The tensors without faults by their signatures on both sides, in order of appearance in `dst`. Adds to `faults`
    what no source rank holds.
    """
    sound = dst.by_name.keys() - faults.keys()
    source_index = {t.name: index for t, index in zip(src.tensors, src.signatures[1], strict=True)}
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, (t, index) in enumerate(zip(dst.tensors, dst.signatures[1], strict=True)):
        if t.name in sound:
            places[source_index[t.name], index].append(place)
    for (source, destination), own in places.items():
        shape, _, held = src.signatures[0][source]
        pieces, missing = cover(held, dst.signatures[0][destination][2], shape)
        tensors = tuple(dst.tensors[place] for place in own)
        for t in tensors if missing else ():
            faults[t.name] += map(_uncovered, missing)
        yield _Draft(tensors, tuple(own), pieces)


def _settled(drafts: list[_Draft], src: Layout, dst: Layout) -> Iterator[Group]:
    loads = [0] * src.ranks
    lanes: list[list[Lane]] = []
    open_lanes: list[tuple[int, int, int]] = []  # (- bytes of a copy, draft, lane)
    for index, draft in enumerate(drafts):
        itemsize, tensors = ITEMSIZE[draft.tensors[0].dtype], len(draft.tensors)
        lanes.append([])
        for piece in draft.pieces:
            for part in (piece,) if len(piece.sources) == 1 else _parts(piece, tensors, itemsize, src, dst):
                nbytes, copies = part.box.size * itemsize, len(part.destinations) * tensors
                if len(part.sources) == 1:
                    loads[part.sources[0]] += nbytes * copies
                else:
                    open_lanes.append((-nbytes, index, len(lanes[-1])))
                lanes[-1].append(Lane(*part, (copies,)))
    for nbytes, index, number in sorted(open_lanes):
        lane = lanes[index][number]
        counts = share([loads[source] for source in lane.sources], lane.ends[0], -nbytes)
        for source, count in zip(lane.sources, counts, strict=True):
            loads[source] -= nbytes * count
        lanes[index][number] = Lane(lane.box, lane.sources, lane.destinations, tuple(accumulate(counts)))
    for draft, own in zip(drafts, lanes, strict=True):
        names = tuple(t.name for t in draft.tensors)
        yield Group(names, draft.places, ITEMSIZE[draft.tensors[0].dtype], tuple(own))


def _parts(piece: Piece, tensors: int, itemsize: int, src: Layout, dst: Layout) -> Iterator[Piece]:
    """A piece that several ranks hold: by the holders that may send it to each receiver, cut where that helps."""
    for sources, destinations in _near(piece, src, dst).items():
        uneven = tensors * len(destinations) % len(sources)
        worth_it = uneven and piece.box.size * itemsize >= len(sources) * LARGE
        for box in piece.box.cut(len(sources)) if worth_it else (piece.box,):
            # Dealt out like cards: where both sides have the same inner axes, replicated tensors then travel between
            # ranks that have other business with each other anyway.
            dealt = [d for first in range(len(sources)) for d in destinations[first :: len(sources)]]
            yield Piece(box, sources, tuple(dealt))


def _near(piece: Piece, src: Layout, dst: Layout) -> dict[tuple[int, ...], list[int]]:
    """The receivers by the holders on their host; by all holders where there are none, or hosts are not known."""
    if not src.hosts or not dst.hosts:
        return {piece.sources: list(piece.destinations)}
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for receiver in piece.destinations:
        near = tuple(source for source in piece.sources if src.hosts[source] == dst.hosts[receiver])
        found[near or piece.sources].append(receiver)
    return found


def _faults(src: Layout, dst: Layout) -> Faults:
    """By tensor: what makes a plan impossible, but for coverage."""
    faults: Faults = defaultdict(list)
    for side, layout in (("source", src), ("destination", dst)):
        _own_faults(layout, side, faults)
    for name in src.by_name.keys() | dst.by_name.keys():
        a, b = src.by_name.get(name), dst.by_name.get(name)
        if a is None or b is None:
            faults[name].append(f"only in the {'source' if b is None else 'destination'}")
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            given = f"{a.dtype} {a.shape} in the source, {b.dtype} {b.shape} in the destination"
            faults[name].append(given)
    return faults


def _own_faults(layout: Layout, side: str, faults: Faults) -> None:
    """What is wrong with the tensors of one layout by themselves."""
    if layout.hosts and len(layout.hosts) < layout.ranks:
        faults["hosts"].append(f"{len(layout.hosts)} for {layout.ranks} ranks of the {side}")
    found: dict[int, list[str]] = {}
    times = Counter(t.name for t in layout.tensors)
    for t, index in zip(layout.tensors, layout.signatures[1], strict=True):
        if times[t.name] > 1:
            faults[t.name].append(f"{times[t.name]} times in the {side}")
        if index not in found:
            found[index] = t.faults()
        if found[index]:
            faults[t.name] += [f"{fault} in the {side}" for fault in found[index]]


def _uncovered(missing: Missing, limit: int = 3) -> str:
    boxes = _listed([str(box) for box in missing.boxes], limit)
    ranks = _listed([str(rank) for rank in missing.destinations], limit)
    return f"{boxes} for rank{'s' if len(missing.destinations) > 1 else ''} {ranks} is held by no source rank"


def _listed(texts: list[str], limit: int) -> str:
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more
