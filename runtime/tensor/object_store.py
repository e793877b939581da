"""Values in shared memory: their maker puts them into its `ObjectStore`, readers get copies by an `ObjectReader`, and
the maker frees them.

A block is [prefix][JSON of `codec.encode`][tensors], every tensor on a multiple of 64 bytes. The prefix repeats the
serial number of its reference, so that a reference that outlived its block does not read another value; it also has a
checksum of the JSON. A store belongs to one thread, and so does a reader. A reader on another host gets the same bytes
over the network.

A reader may want only some rows of a batch (`ObjectRows`). So long texts are stored as tensors of bytes. Columns with
one number per row, and those that the value's class derives from its rows (`Batchable.derived`), come first.
"""

import ctypes
import json
import logging
import secrets
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from penstock.graph.deferred import Column, LoadedColumn
from penstock.graph.types import Batchable
from penstock.runtime.tensor.codec import DTYPES, NAMES, CodecError, decode, encode
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

_PREFIX = struct.Struct("<4sIQQI")  # magic, bytes of JSON, serial number, bytes in all, checksum of the JSON
_MAGIC = b"PSTK"
_ALIGN = 64
_LARGEST_STEP = 256 << 20
# Bytes of a batch that `ObjectRows` reads first: mostly enough for the facts and the columns with a number per row.
_HEAD = 4 << 10
# Bytes of JSON above which a tuple is stored as a tensor, not in the facts.
_LONG_TEXT = 512
_JSON = json.JSONEncoder(separators=(",", ":"))  # made once: json.dumps makes one per call

_log = logging.getLogger(__name__)
T = TypeVar("T")
Range = tuple[int, int]  # first byte, and number of bytes


class Usage(NamedTuple):
    """Blocks and bytes now in use, segments and their total bytes, and the number of puts so far."""

    blocks: int
    block_bytes: int
    segments: int
    segment_bytes: int
    puts: int


class FreeList:
    """Allocates ranges of `size` bytes. Both calls are linear in the number of free pieces."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)]

    def take(self, nbytes: int) -> int | None:
        """Allocate `nbytes` (> 0), and return their offset; None if no free piece is long enough."""
        for index, (offset, length) in enumerate(self._free):
            if length > nbytes:
                self._free[index] = (offset + nbytes, length - nbytes)
                return offset
            if length == nbytes:
                del self._free[index]
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Free a range exactly as `take` gave it."""
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
    """A segment of ours, the address of its first byte, and its free ranges."""

    segment: ShmSegment
    address: int
    blocks: FreeList


# Most segments of one store; each is twice as large as the one before, up to a limit.
_SEGMENTS = 1_000_000


def life_of(handle: ObjectRef) -> int:
    """The `life` of the store that a value is in."""
    return int(handle.segment.rpartition("-")[2]) // _SEGMENTS


class ObjectStore:
    """The values that one process offers to others, until it frees them or closes.

    Memory is allocated in segments, each at least as large as the one before, and never freed before `close`. A segment
    goes to the first of `folders` with room for it: a second one, on disk, is used if `/dev/shm` is small; then `warn`
    is called once, with the numbers. `host` and `endpoint` go into the handles: where the owner is, and where it
    answers others. An owner may have a store in each `life`: values of its earlier ones may still be read.
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
        life: int = 0,
    ) -> None:
        self.run, self.owner, self.host, self.endpoint = run, owner, host, endpoint
        self._folders = tuple(folders)
        self._warn = warn
        self._fallen_back = False
        self._first_segment = life * _SEGMENTS
        self._homes: dict[str, _Home] = {}
        self._live: dict[tuple[str, int], ObjectRef] = {}
        self._puts = 0
        self._first_serial = secrets.randbits(48)  # random, so that a later store of the same name repeats none
        self._next_bytes = segment_bytes
        self._grow(segment_bytes)

    def put(self, value: object) -> ObjectRef:
        """Copy `value` (see `codec`) into a block, and return its reference."""
        tensors, facts = _laid_out(value)
        # The facts come first: they tell a reader where the tensors lie.
        header = _JSON.encode(facts).encode()
        offsets, nbytes = _places(_PREFIX.size + len(header), [t.nbytes for t in tensors])
        home, start = self._take(nbytes)
        self._puts += 1
        serial = self._first_serial + self._puts
        prefix = _PREFIX.pack(_MAGIC, len(header), serial, nbytes, crc32(header))
        home.segment.view[start : start + _PREFIX.size + len(header)] = prefix + header
        for offset, tensor in zip(offsets, tensors, strict=True):
            ctypes.memmove(home.address + start + offset, tensor.data_ptr(), tensor.nbytes)
        handle = ObjectRef(home.segment.name, start, nbytes, serial, self.owner, self.host, self.endpoint)
        self._live[handle.segment, start] = handle
        return handle

    def free(self, handle: ObjectRef) -> None:
        """Free the block. A reader that comes too late gets an error, not another value."""
        if self._live.get((handle.segment, handle.offset)) != handle:
            raise ObjectRefError(f"free: {handle} is not in use in the store of {self.owner} (freed twice?)")
        # From here on a second free is an error, and cannot free another value.
        del self._live[handle.segment, handle.offset]
        home = self._homes[handle.segment]
        # Without the serial number no reader takes the remaining bytes for the value.
        home.segment.view[handle.offset : handle.offset + _PREFIX.size] = bytes(_PREFIX.size)
        home.blocks.give(handle.offset, handle.nbytes)

    def usage(self) -> Usage:
        used = sum(handle.nbytes for handle in self._live.values())
        size = sum(home.segment.size for home in self._homes.values())
        return Usage(len(self._live), used, len(self._homes), size, self._puts)

    def close(self) -> None:
        """Unlink the segments. Readers that have not mapped them cannot read their values any more. May be repeated."""
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
        name = segment_name(self.run, self.owner, self._first_segment + len(self._homes))
        segment = create_segment(name, size, self._folders)
        if segment.path.parent != self._folders[0] and not self._fallen_back:
            self._fallen_back = True
            lacks = f"no room for {size} bytes of samples in {self._folders[0]} ({room(self._folders[0])})"
            self._warn(f"{self.owner}: {lacks}; they lie in {segment.path.parent} where it is full, which is slower")
        # Each is twice as large: a run with large values soon needs no new segments, which are slow to create.
        self._next_bytes = min(2 * size, _LARGEST_STEP)
        address = ctypes.addressof(ctypes.c_char.from_buffer(segment.view))
        self._homes[segment.name] = _Home(segment, address, FreeList(size))


class ObjectReader:
    """Copies values out of the stores of one run; maps each segment of this host once.

    `far` gets ranges of bytes (start, length) of the block of a handle whose host is not `host`. `copied` is the number
    of bytes of values that were copied here, from any host.
    """

    def __init__(
        self,
        run: str,
        *,
        host: str = "",
        far: Callable[[ObjectRef, Sequence[Range]], list[bytearray]] | None = None,
        folders: Sequence[Path] = (SHM,),
    ) -> None:
        self._prefix = segment_name(run, "", 0).removesuffix("-0")
        self._host, self._far = host, far
        self._folders = tuple(folders)
        self._segments: dict[str, ShmSegment] = {}
        self.copied = 0

    def get(self, handle: ObjectRef, cls: type[T]) -> T:
        """A copy of the value as an instance of `cls`, the edge's type. The block may be freed right after."""
        (block,) = self.ranges(handle, [(0, handle.nbytes)])
        _check_prefix(handle, block, 0)
        with _damaged(handle):
            meta = _facts(block)
            return decode(cls, *_fields_of(_tensors(block, meta), meta))

    def rows(self, handle: ObjectRef, cls: type[Batchable]) -> "ObjectRows":
        """The columns of a batch, an instance of `cls`. Only the facts about them are read now; the columns can be read
        until the block is freed."""
        return ObjectRows(handle, cls, partial(self.ranges, handle))

    def ranges(self, handle: ObjectRef, wanted: Sequence[Range]) -> list[bytearray]:
        """Copies of these ranges (start, length) of a block."""
        self.copied += sum(length for _, length in wanted)
        if handle.host == self._host:
            return [self.part(handle, start, length) for start, length in wanted]
        if self._far is None:
            raise ObjectRefError(f"{handle}: given to a reader on host {self._host!r} that cannot ask other hosts")
        return self._far(handle, wanted)

    def part(self, handle: ObjectRef, start: int, length: int) -> bytearray:
        """A copy of `length` bytes of a block of this host, from its byte `start` on."""
        segment = self._segment(handle)
        first, end = handle.offset, handle.offset + handle.nbytes
        if not (0 <= first <= end - _PREFIX.size and end <= segment.size):
            raise ObjectRefError(f"{handle}: outside its segment of {segment.size} bytes")
        if not 0 <= start < start + length <= handle.nbytes:
            raise ObjectRefError(
                f"{handle}: given bytes {start} to {start + length}, needed some of its {handle.nbytes}"
            )
        # A single copy: the owner may free the block at any moment.
        copied = bytearray(segment.view[first + start : first + start + length])
        # Check after the copy: a block that was freed meanwhile has lost its serial number.
        _check_prefix(handle, segment.view, first)
        return copied

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _segment(self, handle: ObjectRef) -> ShmSegment:
        segment = self._segments.get(handle.segment)
        if segment is None:
            # A reference comes from a peer: it must not open segments of another run.
            if not handle.segment.startswith(self._prefix):
                raise ObjectRefError(f"{handle}: not a segment of this run ({self._prefix}…)")
            try:
                segment = open_segment(handle.segment, self._folders)
            except (SegmentError, OSError) as error:
                raise ObjectRefError(f"{handle}: {error}") from error
            self._segments[handle.segment] = segment
        return segment


class ObjectRows:
    """The columns of a batch in a block: `columns` by name (None for a column that is None), each of `count` rows.

    Raises ObjectRefError for a block that is damaged, or is no batch of the class.
    """

    def __init__(
        self, handle: ObjectRef, cls: type[Batchable], read: Callable[[Sequence[Range]], list[bytearray]]
    ) -> None:
        self.handle, self._read = handle, read
        (self._head,) = read([(0, min(handle.nbytes, _HEAD))])
        _check_prefix(handle, self._head, 0)
        with _damaged(handle):
            end = _header_end(self._head)
            if not _PREFIX.size <= end <= handle.nbytes:
                raise ValueError(f"given {end} bytes of facts in {handle.nbytes}")
            if end > len(self._head):
                self._head += read([(len(self._head), end - len(self._head))])[0]
            meta = _facts(self._head)
            tensors = _tensor_places(meta, end, handle.nbytes)
            self.columns: dict[str, Column | None] = {
                name: None if value is None else LoadedColumn(tuple(value)) for name, value in meta["plain"].items()
            }
            for name, dtype, shape, offset in tensors:
                if name in meta["texts"]:
                    self.columns[name] = _Texts(self, offset, shape[0])
                else:
                    self.columns[name] = _Rows(self, offset, dtype, shape)
            names = {field.name for field in fields(cls) if field.init} | set(cls.derived)
            if self.columns.keys() != names:
                raise CodecError(f"{cls.__name__}: given the columns {sorted(self.columns)}, needed {sorted(names)}")
            self.count = int(meta["rows"])
            counts = [len(value) for value in meta["plain"].values() if value is not None]
            counts += [shape[0] for name, _, shape, _ in tensors if name not in meta["texts"]]
            if set(counts) - {self.count}:
                raise ValueError(f"given columns of {sorted(set(counts))} rows, needed {self.count}")

    def bytes_at(self, wanted: Sequence[Range]) -> list[bytearray]:
        """Ranges of the block. Those in its head are here already."""
        lacking = [(start, length) for start, length in wanted if start + length > len(self._head)]
        found = dict(zip(lacking, self._read(lacking), strict=True)) if lacking else {}
        return [found.get((start, length)) or self._head[start : start + length] for start, length in wanted]


@dataclass(frozen=True)
class _Rows:
    """A column that is a tensor of a block."""

    block: ObjectRows
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        return self.shape[1:]

    def read(self, rows: Sequence[int]) -> Tensor:
        nbytes = _count(self.widths) * self.dtype.itemsize
        if not rows or not nbytes:
            return torch.empty((len(rows), *self.widths), dtype=self.dtype)
        # Read runs of neighbouring rows at once.
        runs: list[list[int]] = []
        for row in rows:
            if runs and row == runs[-1][-1] + 1:
                runs[-1].append(row)
            else:
                runs.append([row])
        parts = self.block.bytes_at([(self.offset + run[0] * nbytes, len(run) * nbytes) for run in runs])
        with _damaged(self.block.handle):
            return torch.frombuffer(bytearray().join(parts), dtype=self.dtype).view(len(rows), *self.widths)


@dataclass(frozen=True)
class _Texts:
    """A column that is a tuple, stored as JSON in a tensor. It is read as a whole."""

    block: ObjectRows
    offset: int
    nbytes: int
    widths: tuple[int, ...] = ()

    def read(self, rows: Sequence[int]) -> tuple[Any, ...]:
        (found,) = self.block.bytes_at([(self.offset, self.nbytes)])
        with _damaged(self.block.handle):
            values = json.loads(bytes(found))
            if len(values) != self.block.count:
                raise ValueError(f"given {len(values)} texts, needed {self.block.count}")
            return tuple(values[row] for row in rows)


def _laid_out(value: object) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors of a value in the order of a block, and the facts about them: those of `encode`; which tensors are
    `texts`, long JSON; which ones its class has `derived`; and the number of its rows, if it is a batch."""
    tensors, facts = encode(value)
    named = {entry[0]: tensor for entry, tensor in zip(facts["tensors"], tensors, strict=True)}
    facts |= {"texts": [], "derived": []}
    if isinstance(value, Batchable):
        facts["rows"] = len(value)
        for name in type(value).derived:
            if (found := getattr(value, name)) is None:
                facts["plain"][name] = None
            else:
                named[name] = torch.as_tensor(found).detach().cpu().contiguous()
            facts["derived"].append(name)
    for name in facts["tuples"]:
        if len(text := _JSON.encode(facts["plain"][name]).encode()) > _LONG_TEXT:
            del facts["plain"][name]
            facts["texts"].append(name)
            named[name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    # Tensors with one number per row first: readers want all of these, and get them in one read with the facts.
    order = sorted(named, key=lambda name: named[name].dim() != 1 or name in facts["texts"])
    facts["tensors"] = [(name, NAMES[named[name].dtype], tuple(named[name].shape)) for name in order]
    return [named[name] for name in order], facts


def _fields_of(tensors: Sequence[Tensor], meta: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """The arguments of `decode`, from what `_laid_out` has made."""
    plain = {name: value for name, value in meta["plain"].items() if name not in meta["derived"]}
    kept = []
    for entry, tensor in zip(meta["tensors"], tensors, strict=True):
        if entry[0] in meta["texts"]:
            plain[entry[0]] = json.loads(tensor.numpy().tobytes())
        elif entry[0] not in meta["derived"]:
            kept.append((entry, tensor))
    found = {"tensors": [entry for entry, _ in kept], "plain": plain, "tuples": meta["tuples"]}
    return [tensor for _, tensor in kept], found


@contextmanager
def _damaged(handle: ObjectRef) -> Iterator[None]:
    """Turn errors of the decoders into ObjectRefErrors, which name the value."""
    try:
        yield
    except ObjectRefError:
        raise
    except CodecError as error:
        raise ObjectRefError(f"{handle}: {error}") from error
    # All errors that bytes of another host can cause in the decoders of JSON (RecursionError) and of tensors.
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise ObjectRefError(f"{handle}: the block is damaged ({error!r:.200})") from error


def _places(header_end: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offsets in a block of tensors of these sizes, and the block's size."""
    offsets, end = [], -(-header_end // _ALIGN) * _ALIGN
    for nbytes in sizes:
        offsets.append(end)
        end += -(-nbytes // _ALIGN) * _ALIGN
    return offsets, end


def _check_prefix(handle: ObjectRef, memory: bytearray | memoryview, start: int) -> None:
    if len(memory) < start + _PREFIX.size:
        raise ObjectRefError(f"{handle}: given {len(memory)} bytes, needed at least {_PREFIX.size}")
    magic, _, serial, nbytes, _ = _PREFIX.unpack_from(memory, start)
    if (magic, serial, nbytes) != (_MAGIC, handle.serial, handle.nbytes):
        raise ObjectRefError(f"{handle}: the block is not in use for this value (freed?)")


def _header_end(block: bytearray) -> int:
    return _PREFIX.size + int(_PREFIX.unpack_from(block)[1])


def _facts(block: bytearray) -> dict[str, Any]:
    """The JSON of a block. Raises ValueError if it was changed: damaged sizes could still fill the same bytes."""
    found = bytes(block[_PREFIX.size : _header_end(block)])
    if crc32(found) != _PREFIX.unpack_from(block)[4]:
        raise ValueError("its facts do not have their checksum")
    return json.loads(found)  # type: ignore[no-any-return]


def _tensors(block: bytearray, meta: dict[str, Any]) -> list[Tensor]:
    """The tensors as views of `block`, after a check that they lie in it."""
    return [
        torch.frombuffer(block, dtype=dtype, count=count, offset=offset).view(shape)
        if (count := _count(shape))
        else torch.empty(shape, dtype=dtype)
        for _, dtype, shape, offset in _tensor_places(meta, _header_end(block), len(block))
    ]


def _tensor_places(
    meta: dict[str, Any], header_end: int, nbytes: int
) -> list[tuple[str, torch.dtype, tuple[int, ...], int]]:
    """Name, dtype, shape and first byte of each tensor of a block of `nbytes`. Raises ValueError unless they fill it:
    damaged sizes would give views of other bytes."""
    sizes = [(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in meta["tensors"]]
    offsets, needed = _places(header_end, [_count(shape) * dtype.itemsize for _, dtype, shape in sizes])
    if needed != nbytes:
        raise ValueError(f"given {nbytes} bytes, needed {needed}")
    return [(*size, offset) for size, offset in zip(sizes, offsets, strict=True)]


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError(f"given shape {shape}")
        count *= size
    return count
