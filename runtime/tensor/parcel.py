"""How the pieces of one peer become messages: a large contiguous piece as it lies, small and strided ones in buckets.

Both sides compute the same messages from the same plan, so that nothing but the bytes travels.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.plan import BUCKET as BUCKET
from penstock.runtime.tensor.plan import LARGE as LARGE


class Parcel(NamedTuple):
    """One message: its copies, their places in memory, and the bytes that travel, `staged` or in place."""

    copies: tuple[Copy, ...]
    pieces: Sequence[Tensor]
    buffer: Tensor
    staged: bool


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
        place.copy_(piece.reshape(-1).view(torch.uint8))


def unpack(parcel: Parcel) -> None:
    for piece, place in _places(parcel):
        flat = piece if piece.is_contiguous() else torch.empty_like(piece, memory_format=torch.contiguous_format)
        flat.view(-1).view(torch.uint8).copy_(place)
        if flat is not piece:
            piece.copy_(flat)


def _places(parcel: Parcel) -> Iterator[tuple[Tensor, Tensor]]:
    """Each piece of a staged parcel with its bytes in the buffer."""
    ends = itertools.accumulate(piece.nbytes for piece in parcel.pieces)
    for piece, end in zip(parcel.pieces, ends, strict=True):
        yield piece, parcel.buffer[end - piece.nbytes : end]
