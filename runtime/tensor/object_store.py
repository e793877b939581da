"""Values in shared memory: their maker puts them into its `ObjectStore`, readers get copies by an `ObjectReader`, and
the maker frees them.

A block is [prefix][JSON of `codec.encode`][tensors], every tensor on a multiple of 64 bytes. The prefix repeats
the serial number that its reference carries, so that a reference that outlived its block does not read another value.
A store belongs to one thread, a reader too. A reader on another host gets the same bytes over the network.
"""

import ctypes
import json
import logging
import secrets
import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from penstock.runtime.tensor.codec import DTYPES, CodecError, decode, encode
from penstock.runtime.tensor.shm import (
    SHM,
    ObjectRef,
    ObjectRefError,
    SegmentError,
    ShmSegment,
    create_segment,
    open_segment,
    room,
    segment_name,
)

_PREFIX = struct.Struct("<4sIQQ")  # magic, bytes of JSON, serial number, bytes in all
_MAGIC = b"PSTK"
_ALIGN = 64
_LARGEST_STEP = 256 << 20
_JSON = json.JSONEncoder(separators=(",", ":"))  # made once: json.dumps makes one per call

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Usage(NamedTuple):
    """Blocks and bytes now in use, segments and their bytes in all, and puts so far."""

    blocks: int
    block_bytes: int
    segments: int
    segment_bytes: int
    puts: int


class FreeList:
    """Offsets into `size` bytes. Both calls are linear in the number of free pieces."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)]

    def take(self, nbytes: int) -> int | None:
        """The offset of `nbytes` (> 0) now in use; None if no free piece is as long."""
        for index, (offset, length) in enumerate(self._free):
            if length > nbytes:
                self._free[index] = (offset + nbytes, length - nbytes)
                return offset
            if length == nbytes:
                del self._free[index]
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Give back exactly what `take` gave."""
        free = self._free
        index = bisect_left(free, (offset, 0))
        end = offset + nbytes
        if index < len(free) and free[index][0] == end:
            end += free.pop(index)[1]
        if index and sum(free[index - 1]) == offset:
            index -= 1
            offset = free.pop(index)[0]
        free.insert(index, (offset, end - offset))


@dataclass(frozen=True, slots=True)
class _Home:
    """A segment of ours, the address of its first byte, and what of it is in use."""

    segment: ShmSegment
    address: int
    blocks: FreeList


class ObjectStore:
    """The values that one process offers to others, until it frees them or closes.

    Memory is taken a segment at a time, each at least as large as the one before, and never given back before
    `close`. A segment goes to the first of `folders` with room for it: a second one, on disk, serves where
    `/dev/shm` is small, and `warn` is told so once, with the numbers. `host` and `endpoint` go into the handles: where
    the owner is, and where it answers others.
    """

    def __init__(
        self,
        run: str,
        owner: str,
        *,
        host: str = "",
        endpoint: str = "",
        folders: Sequence[Path] = (SHM,),
        segment_bytes: int = 4 << 20,
        warn: Callable[[str], object] = _log.warning,
    ) -> None:
        self.run, self.owner, self.host, self.endpoint = run, owner, host, endpoint
        self._folders = tuple(folders)
        self._warn = warn
        self._fallen_back = False
        self._homes: dict[str, _Home] = {}
        self._live: dict[tuple[str, int], ObjectRef] = {}
        self._puts = 0
        self._first_serial = secrets.randbits(48)  # so that a store of the same name, made anew, repeats none
        self._next_bytes = segment_bytes
        self._grow(segment_bytes)

    def put(self, value: object) -> ObjectRef:
        """Copy `value` (see `codec`) into a block."""
        tensors, facts = encode(value)
        # First the facts, so that a reader knows where the tensors lie before it looks at them.
        header = _JSON.encode(facts).encode()
        offsets, nbytes = _places(_PREFIX.size + len(header), [t.nbytes for t in tensors])
        home, start = self._take(nbytes)
        self._puts += 1
        serial = self._first_serial + self._puts
        prefix = _PREFIX.pack(_MAGIC, len(header), serial, nbytes)
        home.segment.view[start : start + _PREFIX.size + len(header)] = prefix + header
        for offset, tensor in zip(offsets, tensors, strict=True):
            ctypes.memmove(home.address + start + offset, tensor.data_ptr(), tensor.nbytes)
        handle = ObjectRef(home.segment.name, start, nbytes, serial, self.owner, self.host, self.endpoint)
        self._live[handle.segment, start] = handle
        return handle

    def free(self, handle: ObjectRef) -> None:
        """Take the block back; a reader that comes late gets an error, not another value."""
        if self._live.get((handle.segment, handle.offset)) != handle:
            raise ObjectRefError(f"free: {handle} is not in use in the store of {self.owner} (freed twice?)")
        # From here on a second free is an error, not the end of another value.
        del self._live[handle.segment, handle.offset]
        home = self._homes[handle.segment]
        # Without its serial number no reader takes what is left here for the value.
        home.segment.view[handle.offset : handle.offset + _PREFIX.size] = bytes(_PREFIX.size)
        home.blocks.give(handle.offset, handle.nbytes)

    def usage(self) -> Usage:
        used = sum(handle.nbytes for handle in self._live.values())
        size = sum(home.segment.size for home in self._homes.values())
        return Usage(len(self._live), used, len(self._homes), size, self._puts)

    def close(self) -> None:
        """Unlink the segments; values not freed are lost to readers that have not mapped them. May be repeated."""
        for home in self._homes.values():
            home.segment.unlink()
            home.segment.close()
        self._homes.clear()
        self._live.clear()

    def _take(self, nbytes: int) -> tuple[_Home, int]:
        for home in self._homes.values():
            offset = home.blocks.take(nbytes)
            if offset is not None:
                return home, offset
        self._grow(nbytes)
        return self._take(nbytes)

    def _grow(self, nbytes: int) -> None:
        """Add a segment with room for a block of `nbytes`."""
        size = -(-max(nbytes, self._next_bytes) // 4096) * 4096
        segment = create_segment(segment_name(self.run, self.owner, len(self._homes)), size, self._folders)
        if segment.path.parent != self._folders[0] and not self._fallen_back:
            self._fallen_back = True
            lacks = f"no room for {size} bytes of samples in {self._folders[0]} ({room(self._folders[0])})"
            self._warn(f"{self.owner}: {lacks}; they lie in {segment.path.parent} where it is full, which is slower")
        # Each twice as large: a run with large values soon needs no new ones, which take long to make.
        self._next_bytes = min(2 * size, _LARGEST_STEP)
        address = ctypes.addressof(ctypes.c_char.from_buffer(segment.view))
        self._homes[segment.name] = _Home(segment, address, FreeList(size))


class ObjectReader:
    """Copies values out of the stores of one run; maps each segment of this host once.

    `far` gets the block of a handle whose host is not `host`.
    """

    def __init__(
        self,
        run: str,
        *,
        host: str = "",
        far: Callable[[ObjectRef], bytearray] | None = None,
        folders: Sequence[Path] = (SHM,),
    ) -> None:
        self._prefix = segment_name(run, "", 0).removesuffix("-0")
        self._host, self._far = host, far
        self._folders = tuple(folders)
        self._segments: dict[str, ShmSegment] = {}

    def get(self, handle: ObjectRef, cls: type[T]) -> T:
        """A copy of the value as an instance of `cls`, the edge's type: the block may be freed at once."""
        if handle.host == self._host:
            block = self.part(handle, 0, handle.nbytes)
        elif self._far is None:
            raise ObjectRefError(f"{handle}: given to a reader on host {self._host!r} that cannot ask other hosts")
        else:
            block = self._far(handle)
            _check_prefix(handle, block, 0)
        try:
            meta = json.loads(bytes(block[_PREFIX.size : _header_end(block)]))
            return decode(cls, _tensors(block, meta), meta)
        except CodecError as error:
            raise ObjectRefError(f"{handle}: {error}") from error
        # All that bytes of another host can do to the decoders of JSON (RecursionError) and of tensors.
        except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise ObjectRefError(f"{handle}: the block is damaged ({error!r:.200})") from error

    def part(self, handle: ObjectRef, start: int, length: int) -> bytearray:
        """A copy of so many bytes of a block of this host, beginning with byte `start` of it."""
        segment = self._segment(handle)
        first, end = handle.offset, handle.offset + handle.nbytes
        if not (0 <= first <= end - _PREFIX.size and end <= segment.size):
            raise ObjectRefError(f"{handle}: outside its segment of {segment.size} bytes")
        if not 0 <= start < start + length <= handle.nbytes:
            raise ObjectRefError(
                f"{handle}: given bytes {start} to {start + length}, needed some of its {handle.nbytes}"
            )
        # One copy in one go: the owner may free the block at any moment.
        copied = bytearray(segment.view[first + start : first + start + length])
        # Looked at after copying: a block that was freed meanwhile, whatever is in it now, has lost its number.
        _check_prefix(handle, segment.view, first)
        return copied

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _segment(self, handle: ObjectRef) -> ShmSegment:
        segment = self._segments.get(handle.segment)
        if segment is None:
            # A reference is a peer's word: it must not open what belongs to another run.
            if not handle.segment.startswith(self._prefix):
                raise ObjectRefError(f"{handle}: not a segment of this run ({self._prefix}…)")
            try:
                segment = open_segment(handle.segment, self._folders)
            except (SegmentError, OSError) as error:
                raise ObjectRefError(f"{handle}: {error}") from error
            self._segments[handle.segment] = segment
        return segment


def _places(header_end: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where in a block tensors of these sizes go, and the block's size."""
    offsets, end = [], -(-header_end // _ALIGN) * _ALIGN
    for nbytes in sizes:
        offsets.append(end)
        end += -(-nbytes // _ALIGN) * _ALIGN
    return offsets, end


def _check_prefix(handle: ObjectRef, memory: bytearray | memoryview, start: int) -> None:
    if len(memory) < start + _PREFIX.size:
        raise ObjectRefError(f"{handle}: given {len(memory)} bytes, needed at least {_PREFIX.size}")
    magic, _, serial, nbytes = _PREFIX.unpack_from(memory, start)
    if (magic, serial, nbytes) != (_MAGIC, handle.serial, handle.nbytes):
        raise ObjectRefError(f"{handle}: the block is not in use for this value (freed?)")


def _header_end(block: bytearray) -> int:
    return _PREFIX.size + int(_PREFIX.unpack_from(block)[1])


def _tensors(block: bytearray, meta: dict[str, Any]) -> list[Tensor]:
    """Views of `block`, after checking that they lie in it."""
    shapes = [(DTYPES[dtype], shape) for _, dtype, shape in meta["tensors"]]
    counts = [_count(shape) for _, shape in shapes]
    sizes = [count * dtype.itemsize for count, (dtype, _) in zip(counts, shapes, strict=True)]
    offsets, end = _places(_header_end(block), sizes)
    # The tensors must fill the block: sizes that were damaged would give views of other bytes.
    if end != len(block):
        raise ValueError(f"given {len(block)} bytes, needed {end}")
    return [
        torch.frombuffer(block, dtype=dtype, count=count, offset=offset).view(shape)
        if count
        else torch.empty(shape, dtype=dtype)
        for (dtype, shape), count, offset in zip(shapes, counts, offsets, strict=True)
    ]


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError(f"given shape {shape}")
        count *= size
    return count
