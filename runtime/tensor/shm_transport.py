"""Where an arena's bytes lie: in the process's own memory, or where other processes of the host can write them.

A sender that may write straight into a receiver's shadow needs no receiver on the way: it maps the segment and copies.
"""

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.runtime.tensor.shm import SHM, SegmentError, ShmSegment, create_segment, open_segment, segment_name

Allocate = Callable[[int], Tensor]
"""Zeroed memory of this many bytes, as a uint8 tensor, all of it touched."""

MemoryKind = Literal["shm", "cuda_ipc"]
"""How one process writes another's memory: segments of shared memory, or blocks of a GPU's."""

_log = logging.getLogger(__name__)


class Place(NamedTuple):
    """A segment (or a block of a GPU's memory), and the byte in it."""

    segment: str
    offset: int


class WritableMemory(Protocol):
    """A receiver's memory, which senders' processes write: what `Allocate` gives, and where a tensor of it lies."""

    @property
    def kind(self) -> MemoryKind: ...

    @property
    def shared(self) -> bool:
        """Whether all that was asked for lies where others can write it."""

    @property
    def refused(self) -> str:
        """Why not; "" where it does."""

    def __call__(self, nbytes: int) -> Tensor: ...

    def place(self, tensor: Tensor) -> Place: ...

    def settle(self) -> None:
        """Wait until nothing that this process has begun reads or writes it. RuntimeError past the deadline."""

    def close(self) -> None: ...


class PeerMemory(Protocol):
    """A sender's view of receivers' memory."""

    def view(self, place: Place, like: Tensor, strides: Sequence[int]) -> Tensor:
        """The tensor of the dtype and shape of `like`, with these strides (in elements), that begins at `place`."""

    def write(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy into each first tensor the second; then all is there to be read. RuntimeError past the deadline."""

    def close(self) -> None: ...


class SharedMemory:
    """Segments of shared memory that belong to one rank: `owner` names it, once in a run.

    Where there is no room for a segment, the memory is the process's own, `warn` is told so with the numbers, and
    `shared` is false: weights must then come as messages.
    """

    kind: Literal["shm"] = "shm"

    def __init__(
        self, run: str, owner: str, folders: Sequence[Path] = (SHM,), warn: Callable[[str], object] = _log.warning
    ) -> None:
        self._run = run
        self._owner = owner
        self._folders = tuple(folders)
        self._warn = warn
        self._segments: list[tuple[ShmSegment, Tensor]] = []
        self.refused = ""

    @property
    def shared(self) -> bool:
        """Whether all that was asked for lies in segments."""
        return bool(self._segments) and not self.refused

    def __call__(self, nbytes: int) -> Tensor:
        name = segment_name(self._run, self._owner, len(self._segments))
        try:
            segment = create_segment(name, max(nbytes, 1), self._folders)
        except SegmentError as error:
            self.refused = str(error)
            self._warn(f"{self._owner}: {error}; weights come as messages, which is slower")
            return torch.zeros(nbytes, dtype=torch.uint8)
        buffer = torch.frombuffer(segment.view, dtype=torch.uint8)
        self._segments.append((segment, buffer))
        return buffer[:nbytes]

    def place(self, tensor: Tensor) -> Place:
        """Where the first element of a tensor lies; it must be in a segment."""
        return place_among(((segment.name, buffer) for segment, buffer in self._segments), tensor, self._owner)

    def settle(self) -> None:
        """A processor's writes and reads are over when they return."""

    def close(self) -> None:
        """Remove the names; the memory stays for the tensors that lie in it. May be repeated."""
        for segment, _ in self._segments:
            segment.unlink()


class MappedMemory:
    """Other ranks' segments, mapped once and written into."""

    def __init__(self, folders: Sequence[Path] = (SHM,)) -> None:
        self._folders = tuple(folders)
        self._mapped: dict[str, tuple[ShmSegment, Tensor]] = {}

    def view(self, place: Place, like: Tensor, strides: Sequence[int]) -> Tensor:
        if place.segment not in self._mapped:
            segment = open_segment(place.segment, self._folders, writable=True)
            self._mapped[place.segment] = segment, torch.frombuffer(segment.view, dtype=torch.uint8)
        return view_at(self._mapped[place.segment][1], place, like, strides)

    def write(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, piece in pairs:
            copy_elements(target, piece)

    def close(self) -> None:
        """Unmap, once nothing refers to the views any more."""
        for segment, _ in self._mapped.values():
            with suppress(BufferError):
                segment.close()
        self._mapped.clear()


def place_among(owned: Iterable[tuple[str, Tensor]], tensor: Tensor, owner: str) -> Place:
    """Where the first element of a tensor lies in one of an owner's named buffers."""
    for name, buffer in owned:
        offset = tensor.data_ptr() - buffer.data_ptr()
        if 0 <= offset < buffer.nbytes:
            return Place(name, offset)
    raise SegmentError(f"{owner}: a tensor of {tensor.nbytes} bytes is in none of its segments")


def view_at(buffer: Tensor, place: Place, like: Tensor, strides: Sequence[int]) -> Tensor:
    """What `PeerMemory.view` gives, in the buffer that `place` names."""
    last = sum((n - 1) * stride for n, stride in zip(like.shape, strides, strict=True))
    end = place.offset + (last + 1) * like.dtype.itemsize
    if min(strides, default=0) < 0 or place.offset < 0 or end > buffer.nbytes:
        raise SegmentError(f"{place}: a tensor up to byte {end} is not in the {buffer.nbytes} bytes there")
    return buffer[place.offset : end].view(like.dtype).as_strided(like.shape, tuple(strides))


def copy_elements(target: Tensor, source: Tensor) -> None:
    """Copy between tensors of one shape, converting; as bytes, which is faster, between equal ones on a CPU."""
    as_bytes = target.is_cpu and source.is_cpu and target.dtype == source.dtype
    if as_bytes and target.is_contiguous() and source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)
