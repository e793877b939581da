"""How the pieces of one peer become messages: a large contiguous piece as it lies, small and strided ones in buckets.

A piece of more than a bucket is cut into slabs, so that whoever packs one message while another travels needs a few
buckets of memory only, which stay in a core's caches. Both sides compute the same messages from the same plan, so that
nothing but the bytes travels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.runtime.tensor.arena import Parts
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.plan import BUCKET as BUCKET
from penstock.runtime.tensor.plan import LARGE as LARGE


class Parcel(NamedTuple):
    """One message: its copies, their places in memory, and the bytes that travel: in place, or in staging buffer `slot`
    of its peer.
    """

    copies: tuple[Copy, ...]
    pieces: Sequence[Tensor]
    buffer: Tensor
    slot: int | None

    @property
    def staged(self) -> bool:
        return self.slot is not None


@dataclass
class Staging:
    """The staging buffers of one peer: `limit` of them that take turns, or as many as there are messages."""

    limit: int | None
    buffers: dict[int, Tensor] = field(default_factory=dict)

    def slot(self, number: int) -> int:
        """Where the staged message of this number is packed."""
        return number if self.limit is None else number % self.limit

    def buffer(self, slot: int, nbytes: int, device: torch.device, pinned: bool) -> Tensor:
        found = self.buffers.get(slot)
        if found is None or found.nbytes < nbytes:
            room = nbytes if self.limit is None else max(nbytes, BUCKET)
            found = self.buffers[slot] = torch.empty(room, dtype=torch.uint8, device=device, pin_memory=pinned)
        return found[:nbytes]


_KEPT = 8  # sets of messages: more than the buffers that take turns on one side of a channel


class Post:
    """The messages of a plan for each buffer that takes part in syncs: made once, in staging buffers that they share,
    since a bridge has one sync at a time. `limit` bounds the staging buffers of each peer.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._made: list[tuple[Sequence[Copy], Parts, dict[int, list[Parcel]]]] = []
        self._staging: dict[int, Staging] = {}

    def once(
        self,
        copies: Sequence[Copy],
        parts: Parts,
        make: Callable[[Callable[[int], Staging]], dict[int, list[Parcel]]],
    ) -> dict[int, list[Parcel]]:
        """What was made for these two objects, or is made now."""
        for known_copies, known_parts, own in self._made:
            if known_copies is copies and known_parts is parts:
                return own
        own = make(lambda peer: self._staging.setdefault(peer, Staging(self._limit)))
        self._made = [*self._made[1 - _KEPT :], (copies, parts, own)]
        return own

    def clear(self) -> None:
        self._made.clear()
        self._staging.clear()


def parcels(copies: Sequence[Copy], parts: Parts, device: torch.device, staging: Staging) -> list[Parcel]:
    """The messages to or from one peer, through a group whose buffers lie on `device`."""
    slabs = [slab for copy in copies for slab in _slabs(copy, parts[copy.tensor].tensor.dtype.itemsize)]
    pieces = [parts[slab.tensor].cut(slab.box) for slab in slabs]
    made: list[Parcel] = []
    staged = 0
    for span in bundle([piece.nbytes for piece in pieces]):
        made.append(_parcel(tuple(slabs[span]), pieces[span], device, staging, staged))
        staged += made[-1].staged
    return made


def _slabs(copy: Copy, itemsize: int) -> list[Copy]:
    """A copy as copies of about a bucket at most, where it can be cut."""
    parts = -(-copy.box.size * itemsize // BUCKET)
    return [copy] if parts < 2 else [replace(copy, box=box) for box in copy.box.cut(parts)]


def _parcel(
    copies: tuple[Copy, ...], pieces: Sequence[Tensor], device: torch.device, staging: Staging, number: int
) -> Parcel:
    """A single contiguous piece travels from and to where it lies, if the group can read it there."""
    first = pieces[0]
    if len(pieces) == 1 and first.is_contiguous() and first.device.type == device.type:
        return Parcel(copies, pieces, first.view(-1).view(torch.uint8), None)
    slot, nbytes = staging.slot(number), sum(piece.nbytes for piece in pieces)
    pinned = first.is_cuda and device.type == "cpu"
    return Parcel(copies, pieces, staging.buffer(slot, nbytes, device, pinned), slot)


def bundle(sizes: Sequence[int]) -> list[slice]:
    """Cut a list of pieces of these bytes into messages, in order: a large piece is one by itself, neighbours that
    are small share one until it is full.
    """
    spans: list[slice] = []
    start, filled = 0, 0
    for index, nbytes in enumerate(sizes):
        if filled and (nbytes >= LARGE or filled >= BUCKET):
            spans.append(slice(start, index))
            start, filled = index, 0
        filled += nbytes
        if nbytes >= LARGE:
            spans.append(slice(start, index + 1))
            start, filled = index + 1, 0
    return [*spans, slice(start, len(sizes))] if filled else spans


def pack(parcel: Parcel) -> None:
    for piece, place in _places(parcel):
        place.copy_(piece)


def unpack(parcel: Parcel) -> None:
    for piece, place in _places(parcel):
        piece.copy_(place)


def _places(parcel: Parcel) -> Iterator[tuple[Tensor, Tensor]]:
    """The bytes of each piece of a staged parcel, with their place in the buffer, in one shape."""
    start = 0
    for piece in parcel.pieces:
        as_bytes = _bytes(piece)
        yield as_bytes, parcel.buffer[start : start + piece.nbytes].view(as_bytes.shape)
        start += piece.nbytes


def _bytes(piece: Tensor) -> Tensor:
    """A view: along the last dimension if that is contiguous, else with a dimension for the bytes of an element."""
    if piece.dim() and piece.stride(-1) == 1:
        return piece.view(torch.uint8)
    return piece.unsqueeze(-1).view(torch.uint8)
