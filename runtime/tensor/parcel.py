"""How the pieces of one peer become messages: a large contiguous piece as it lies, small and strided ones in buckets.

Both sides compute the same messages from the same plan, so that nothing but the bytes travels.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.runtime.tensor.arena import Parts
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.plan import BUCKET as BUCKET
from penstock.runtime.tensor.plan import LARGE as LARGE


class Parcel(NamedTuple):
    """One message: its copies, their places in memory, and the bytes that travel, `staged` or in place."""

    copies: tuple[Copy, ...]
    pieces: Sequence[Tensor]
    buffer: Tensor
    staged: bool


Staging = dict[int, Tensor]
"""The staging buffers of one peer, by the number of the message."""

_KEPT = 8  # sets of messages: more than the buffers that take turns on one side of a channel


class Post:
    """The messages of a plan for each buffer that takes part in syncs: made once, in staging buffers that they share,
    since a bridge has one sync at a time.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Sequence[Copy], Parts, dict[int, list[Parcel]]]] = []
        self._staging: dict[int, Staging] = {}

    def once(
        self,
        copies: Sequence[Copy],
        parts: Parts,
        make: Callable[[dict[int, Staging]], dict[int, list[Parcel]]],
    ) -> dict[int, list[Parcel]]:
        """What was made for these two objects, or is made now."""
        for known_copies, known_parts, own in self._made:
            if known_copies is copies and known_parts is parts:
                return own
        own = make(self._staging)
        self._made = [*self._made[1 - _KEPT :], (copies, parts, own)]
        return own

    def clear(self) -> None:
        self._made.clear()
        self._staging.clear()


def parcels(copies: Sequence[Copy], parts: Parts, device: torch.device, staging: Staging) -> list[Parcel]:
    """The messages to or from one peer, through a group whose buffers lie on `device`."""
    pieces = [parts[copy.tensor].cut(copy.box) for copy in copies]
    spans = bundle([piece.nbytes for piece in pieces])
    return [_parcel(tuple(copies[span]), pieces[span], device, staging, number) for number, span in enumerate(spans)]


def _parcel(
    copies: tuple[Copy, ...], pieces: Sequence[Tensor], device: torch.device, staging: Staging, number: int
) -> Parcel:
    """A single contiguous piece travels from and to where it lies, if the group can read it there."""
    first = pieces[0]
    if len(pieces) == 1 and first.is_contiguous() and first.device.type == device.type:
        return Parcel(copies, pieces, first.view(-1).view(torch.uint8), False)
    nbytes = sum(piece.nbytes for piece in pieces)
    buffer = staging.get(number)
    if buffer is None or buffer.nbytes != nbytes:
        pinned = first.is_cuda and device.type == "cpu"
        buffer = staging[number] = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    return Parcel(copies, pieces, buffer, True)


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
