"""Weights written directly into the receivers' memory on one host: `OneSidedTransport`, and the memory that it writes:
`SharedMemory`, and a sender's view of it, `MappedMemory`. `cuda_ipc` has the same for a GPU's memory.

A sync with one source: the receiver offers a free shadow buffer (version, shadow, copies, bytes of the map); the first
time it also sends where each piece goes in this shadow (the map, as JSON). The source writes the pieces, and reports it
(version, copies, bytes). The receiver copies nothing.

Invariant: a source writes only into a shadow that its owner has offered and that the owner's GPU does not read any
more, and it reports only what its GPU has finished writing.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from penstock.runtime.tensor.buffers import Device, Shards, copy_elements
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.process_group import Connection, Message, TransportError
from penstock.runtime.tensor.shm import SHM, SegmentError, ShmSegment, create_segment, open_segment, segment_name

# Memory that other processes can write: segments of shared memory, or blocks of a GPU's.
MemoryKind = Literal["shm", "cuda_ipc"]

_OFFER, _MAP, _DONE = range(3)  # tags
_OFFERED = "version", "shadow", "copies", "map bytes"
_WRITTEN = "version", "copies", "bytes"
_KEPT = 256  # peers times shadows times buffers whose views are kept

_log = logging.getLogger(__name__)


class OneSidedTransport:
    """One rank of a link whose senders can write the receivers' memory. `memory` is a receiver's own; `peers` is a
    sender's view of the receivers' memory.
    """

    def __init__(self, connection: Connection, memory: "WritableMemory | None", peers: "PeerMemory") -> None:
        self._connection = connection
        self._memory = memory
        self._peers = peers
        self._places: dict[tuple[int, int], list[tuple[Location, list[int]]]] = {}  # by peer and shadow, as offered
        self._pairs: list[tuple[Sequence[Copy], Shards, int, int, list[tuple[Tensor, Tensor]]]] = []
        self._offered: list[tuple[Shards, set[int]]] = []  # shadows by number, and the peers that have their map

    def send(self, version: int, copies: Sequence[Copy], shards: Shards) -> int:
        """Write `copies` of `shards` into the peers' shadows. Return the bytes written. Raises TransportError."""
        connection, by_peer = self._connection, self._connection.by_peer(copies)
        connection.sync = f"version {version}"
        total, answers = 0, []
        for offer in [
            connection.receive(torch.empty(len(_OFFERED), dtype=torch.int64), peer, _OFFER, "the offer of a shadow")
            for peer in by_peer
        ]:
            peer, own = offer.peer, by_peer[offer.peer]
            number = self._accept(version, len(own), offer)
            pairs = self._paired(peer, number, own, copies, shards)
            with connection.naming(peer, "the writing of the shadow"):
                self._peers.write(pairs)
            nbytes = sum(piece.nbytes for _, piece in pairs)
            total += nbytes
            answers.append(connection.send(torch.tensor([version, len(own), nbytes]), peer, _DONE))
        for answer in answers:
            answer.wait()
        return total

    def receive(self, version: int, copies: Sequence[Copy], shards: Shards) -> int:
        """Offer `shards`, wait until all peers have written `copies` into them, and return their bytes. Raises
        TransportError, or ChecksumError if a peer sends another version or plan.
        """
        connection = self._connection
        connection.sync = f"version {version}"
        assert self._memory is not None, "a receiver's transport has its memory"
        try:
            # A decoding step that began before the swap may still read the buffer that is the shadow now.
            self._memory.wait_idle()
        except RuntimeError as error:
            raise TransportError(f"{connection.channel}: version {version}: no shadow is free: {error}") from error
        number = next((k for k, (known, _) in enumerate(self._offered) if known is shards), len(self._offered))
        # A receiver's two buffers take turns as the shadow; each gets a number when it is first offered.
        if number == len(self._offered):
            self._offered.append((shards, set()))
        told = self._offered[number][1]
        sent, pending = [], []
        for peer, own in connection.by_peer(copies).items():
            pieces = [shards[copy.tensor].cut(copy.region) for copy in own]
            # The map goes along unless the peer has it: [[segment, byte, strides of the piece], …].
            places = [[*self._memory.place(piece), piece.stride()] for piece in pieces] if peer not in told else None
            where = msgspec.json.encode(places) if places else b""
            # The map of a large model is megabytes, and stays the same for the whole run.
            told.add(peer)
            offer = torch.tensor([version, number, len(pieces), len(where)])
            sent.append(connection.send(offer, peer, _OFFER, "the offer of a shadow"))
            if where:
                data = torch.frombuffer(bytearray(where), dtype=torch.uint8)
                sent.append(connection.send(data, peer, _MAP, "the map of a shadow"))
            done = torch.empty(len(_WRITTEN), dtype=torch.int64)
            needed = torch.tensor([version, len(own), sum(piece.nbytes for piece in pieces)])
            pending.append((connection.receive(done, peer, _DONE, "the word that all is written"), needed))
        for message in sent:
            message.wait()
        for message, needed in pending:
            connection.match(message.wait(), needed, _WRITTEN, message.peer)
        return sum(int(needed[2]) for _, needed in pending)

    def close(self) -> None:
        self._connection.close()
        self._pairs.clear()
        self._peers.close()

    def _accept(self, version: int, copies: int, offer: Message) -> int:
        """The number of the shadow that a peer offers. Receives its map, if it is new."""
        connection, given, peer = self._connection, offer.wait(), offer.peer
        number, map_bytes = int(given[1]), int(given[3])
        if map_bytes:
            buffer = torch.empty(map_bytes, dtype=torch.uint8)
            data = connection.receive(buffer, peer, _MAP, "the map of a shadow").wait().numpy().tobytes()
            rows = msgspec.json.decode(data, type=list[tuple[str, int, list[int]]])
            self._places[peer, number] = [(Location(segment, offset), strides) for segment, offset, strides in rows]
        needed = torch.tensor([version, number, copies, map_bytes])
        if not torch.equal(given, needed):
            # Tell the receiver, so that it fails, too: otherwise it would wait for its deadline.
            connection.send(torch.tensor([version, 0, 0]), peer, _DONE).wait()
        connection.match(given, needed, _OFFERED, peer)
        return number

    def _paired(
        self, peer: int, number: int, own: Sequence[Copy], copies: Sequence[Copy], shards: Shards
    ) -> list[tuple[Tensor, Tensor]]:
        """Each piece with its place in the peer's shadow, as views (place, piece)."""
        # Cached by our buffer and the shadow: to make thousands of views costs more than to copy small pieces.
        for known_copies, known_shards, known_peer, known_number, pairs in self._pairs:
            if known_copies is copies and known_shards is shards and (known_peer, known_number) == (peer, number):
                return pairs
        places, who = self._places[peer, number], f"{self._connection.channel}: {self._connection.names[peer]}"
        # The places come from another process: with too few of them, some tensors would not be written.
        if len(places) != len(own):
            raise TransportError(f"{who} gave {len(places)} places for {len(own)} copies")
        pieces = [shards[copy.tensor].cut(copy.region) for copy in own]
        try:
            pairs = [
                (self._peers.view(place, piece, strides), piece)
                for (place, strides), piece in zip(places, pieces, strict=True)
            ]
        except SegmentError as error:
            raise TransportError(f"{who}: {error}") from error
        # Drop the oldest: the snapshots and shadows in use are among the last ones.
        self._pairs = [*self._pairs[1 - _KEPT :], (copies, shards, peer, number, pairs)]
        return pairs


class Location(NamedTuple):
    """A byte offset in a segment (or in a block of a GPU's memory)."""

    segment: str
    offset: int


class WritableMemory(ABC):
    """A receiver's memory that senders' processes write; an `Allocate`. `owner` names the rank, and is unique in a run.

    If no memory can be shared, it is the process's own: `warn` is called, `refused` says why, `shared` is false, and
    weights must come as messages.
    """

    kind: MemoryKind
    fallback: str
    """How weights come if no memory can be shared, for the warning."""

    def __init__(self, owner: str, device: Device, warn: Callable[[str], object]) -> None:
        self._owner = owner
        self._device = torch.device(device)
        self._warn = warn
        self._exported: list[tuple[str, Tensor]] = []
        self.refused = ""

    @property
    def shared(self) -> bool:
        """True if all allocated memory can be written by others."""
        return bool(self._exported) and not self.refused

    def __call__(self, nbytes: int) -> Tensor:
        try:
            name, buffer = self._export(max(nbytes, 1))
        except SegmentError as error:
            self.refused = str(error)
            self._warn(f"{self._owner}: {error}; {self.fallback}, which is slower")
            return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._exported.append((name, buffer))
        return buffer[:nbytes]

    def place(self, tensor: Tensor) -> Location:
        """Where the first element of a tensor lies. Raises SegmentError if it is not in this memory."""
        for name, buffer in self._exported:
            offset = tensor.data_ptr() - buffer.data_ptr()
            if 0 <= offset < buffer.nbytes:
                return Location(name, offset)
        raise SegmentError(f"{self._owner}: a tensor of {tensor.nbytes} bytes is in none of its segments")

    @abstractmethod
    def _export(self, nbytes: int) -> tuple[str, Tensor]:
        """New zeroed memory and its name. Raises SegmentError if there is none."""

    @abstractmethod
    def wait_idle(self) -> None:
        """Wait until all reads and writes of it by this process have ended. RuntimeError past the deadline."""

    @abstractmethod
    def close(self) -> None:
        """Remove the names; the memory stays for the tensors in it. May be repeated."""


class PeerMemory(ABC):
    """A sender's view of receivers' memory; each segment is opened once."""

    def __init__(self) -> None:
        self._opened: dict[str, Tensor] = {}

    def view(self, place: Location, like: Tensor, strides: Sequence[int]) -> Tensor:
        """The tensor at `place` with the dtype and shape of `like`, and these strides (in elements). Raises
        SegmentError if it is not within the segment.
        """
        if place.segment not in self._opened:
            self._opened[place.segment] = self._open(place.segment)
        buffer = self._opened[place.segment]
        # A place comes from another process: unchecked, `as_strided` could read and write beyond the end.
        last = sum((n - 1) * stride for n, stride in zip(like.shape, strides, strict=True))
        end = place.offset + (last + 1) * like.dtype.itemsize
        if min(strides, default=0) < 0 or place.offset < 0 or end > buffer.nbytes:
            raise SegmentError(f"{place}: a tensor up to byte {end} is not in the {buffer.nbytes} bytes there")
        return buffer[place.offset : end].view(like.dtype).as_strided(like.shape, tuple(strides))

    @abstractmethod
    def _open(self, name: str) -> Tensor:
        """All bytes of a segment."""

    @abstractmethod
    def write(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each second tensor into the first. On return the data can be read. RuntimeError past the deadline."""

    @abstractmethod
    def close(self) -> None: ...


class SharedMemory(WritableMemory):
    """Segments of shared memory of the run `run`, in the first of `folders` with room."""

    kind = "shm"
    fallback = "weights come as messages"

    def __init__(
        self, run: str, owner: str, folders: Sequence[Path] = (SHM,), warn: Callable[[str], object] = _log.warning
    ) -> None:
        super().__init__(owner, "cpu", warn)
        self._run = run
        self._folders = tuple(folders)
        self._segments: list[ShmSegment] = []

    def _export(self, nbytes: int) -> tuple[str, Tensor]:
        segment = create_segment(segment_name(self._run, self._owner, len(self._segments)), nbytes, self._folders)
        self._segments.append(segment)
        return segment.name, torch.frombuffer(segment.view, dtype=torch.uint8)

    def wait_idle(self) -> None:
        """Does nothing: a CPU's reads and writes are done when they return."""

    def close(self) -> None:
        for segment in self._segments:
            # Remove only the name: senders and readers still use the memory.
            segment.unlink()


class MappedMemory(PeerMemory):
    """Other ranks' segments of shared memory, each mapped once for writing."""

    def __init__(self) -> None:
        super().__init__()
        self._segments: list[ShmSegment] = []

    def _open(self, name: str) -> Tensor:
        self._segments.append(open_segment(name, (SHM,), writable=True))
        return torch.frombuffer(self._segments[-1].view, dtype=torch.uint8)

    def write(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, piece in pairs:
            copy_elements(target, piece)

    def close(self) -> None:
        """Unmap the segments that no view refers to any more."""
        self._opened.clear()
        for segment in self._segments:
            # A view that is still in use keeps its mapping until the process ends.
            with suppress(BufferError):
                segment.close()
        self._segments.clear()
