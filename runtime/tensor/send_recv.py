"""Weight sync by point-to-point messages over a replica link (gloo or NCCL): `MessageTransport`, and the buckets that
it and `delta.DeltaTransport` send.

A sync with one peer is a header (version, messages, bytes), then the buckets in order. A large contiguous piece is a
bucket by itself and travels from and to where it lies; small and strided pieces are packed into staging buffers. A
piece of more than `BUCKET` bytes is cut into slabs, so that packing one message while another travels needs a few
buckets of memory, which stay in a core's caches. Both sides compute the same buckets from the same plan, so that
nothing but the bytes travels.

Invariant: peers take turns in one order on both sides. A rank that waits for a message has begun all that come before
it, so that ranks cannot wait for each other in a circle, and messages arrive in about the order of the plan.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.process_group import HEADER, PeerConnection, named
from penstock.runtime.tensor.reshard import BUCKET, LARGE

SLOTS = 3  # one is packed while another is sent, and a third waits for the peer
_KEPT = 8  # sets of buckets: more than the buffers that take turns on one side of a channel
_FIELDS = "version", "messages", "bytes"
# Told of the copies of one message.
Tell = Callable[[Sequence[Copy]], None]


class Bucket(NamedTuple):
    """One message: its copies, their places in memory, and the bytes that travel: in place (`slot` is None), or in
    staging buffer `slot` of its peer.
    """

    copies: tuple[Copy, ...]
    pieces: Sequence[Tensor]
    buffer: Tensor
    slot: int | None

    @property
    def staged(self) -> bool:
        return self.slot is not None


class MessageTransport:
    """One rank of a link that sends all bytes of each version. See the module for what is on the wire."""

    def __init__(self, connection: PeerConnection) -> None:
        self._connection = connection
        self._cache = BucketCache(connection, SLOTS)

    def send(self, version: int, copies: Sequence[Copy], shards: Shards, ready: Tell | None = None) -> int:
        """Send `copies` out of `shards`; the bytes sent. `ready` is called with the copies of each message just before
        it is sent, and returns when they may be read. Raises TransportError.
        """
        connection, group = self._connection, self._connection.group(version)
        by_peer = self._cache.by_peer(copies, shards, group.device)
        in_flight, headers = _InFlight(connection, version), []
        for peer, own in by_peer.items():
            with connection.naming(version, peer, HEADER):
                header = _header(version, own, group.device)
                headers.append((group.send(header, peer, 0), peer, header))

        for tag, peer, bucket in _in_turn(by_peer):

            def start(bucket: Bucket = bucket, peer: int = peer, tag: int = tag) -> Work:
                if bucket.staged:
                    pack(bucket)
                return group.send(bucket.buffer, peer, tag)

            if ready is not None:
                ready(bucket.copies)
            in_flight.begin(peer, bucket, start)
        for work, peer, _ in headers:
            connection.wait(work, version, peer, HEADER)
        in_flight.end()
        return sum(map(_nbytes, by_peer.values()))

    def receive(self, version: int, copies: Sequence[Copy], shards: Shards, arrived: Tell | None = None) -> int:
        """Write `copies` into `shards`; the bytes received. `arrived` is called with the copies of each message that
        is in its place. Raises TransportError, or ChecksumError if the peer sends another version or plan.
        """
        connection, group = self._connection, self._connection.group(version)
        by_peer = self._cache.by_peer(copies, shards, group.device)
        headers: list[tuple[int, Tensor, Work]] = []
        for peer in by_peer:
            header = torch.empty(len(_FIELDS), dtype=torch.int64, device=group.device)
            with connection.naming(version, peer, HEADER):
                headers.append((peer, header, group.receive(header, peer, 0)))
        # All headers are compared before any bucket is received: nothing of another version gets into the shadow.
        for peer, header, work in headers:
            connection.wait(work, version, peer, HEADER)
            connection.match(header, _header(version, by_peer[peer], group.device), _FIELDS, peer)

        def finish(bucket: Bucket) -> None:
            if bucket.staged:
                unpack(bucket)
            if arrived is not None:
                arrived(bucket.copies)

        in_flight = _InFlight(connection, version, finish)
        for tag, peer, bucket in _in_turn(by_peer):
            in_flight.begin(peer, bucket, lambda b=bucket, p=peer, t=tag: group.receive(b.buffer, p, t))  # type: ignore[misc]
        in_flight.end()
        return sum(map(_nbytes, by_peer.values()))

    def close(self) -> None:
        self._connection.close()
        self._cache.clear()


class _InFlight:
    """The messages of one sync that have begun. They end in the order in which they began; a staging buffer holds one
    of them at a time. `finish` is called with each that has ended."""

    def __init__(
        self, connection: PeerConnection, version: int, finish: Callable[[Bucket], None] | None = None
    ) -> None:
        self._connection = connection
        self._version = version
        self._finish = finish
        self._begun: dict[tuple[int, int], tuple[Work, int, Bucket]] = {}
        self._numbers = count()

    def begin(self, peer: int, bucket: Bucket, start: Callable[[], Work]) -> None:
        """`start` the message when its staging buffer is free."""
        # Slots are counted down from -1, so that they never collide with the numbers of messages that need none.
        key = peer, next(self._numbers) if bucket.slot is None else -1 - bucket.slot
        while key in self._begun:
            self._end_oldest()
        with self._connection.naming(self._version, peer, named(bucket.copies)):
            self._begun[key] = start(), peer, bucket

    def end(self) -> None:
        """Wait for all."""
        while self._begun:
            self._end_oldest()

    def _end_oldest(self) -> None:
        work, peer, bucket = self._begun.pop(next(iter(self._begun)))
        self._connection.wait(work, self._version, peer, named(bucket.copies))
        if self._finish is not None:
            self._finish(bucket)


def _in_turn(by_peer: Mapping[int, Sequence[Bucket]]) -> Iterator[tuple[int, int, Bucket]]:
    """(tag, peer, bucket): the first bucket of each peer, then the second of each, …"""
    for tag in range(1, 1 + max(map(len, by_peer.values()), default=0)):
        for peer, own in by_peer.items():
            if tag <= len(own):
                yield tag, peer, own[tag - 1]


def _header(version: int, own: Sequence[Bucket], device: torch.device) -> Tensor:
    return torch.tensor([version, len(own), _nbytes(own)], dtype=torch.int64, device=device)


def _nbytes(own: Sequence[Bucket]) -> int:
    return sum(bucket.buffer.nbytes for bucket in own)


@dataclass
class Staging:
    """The staging buffers of one peer: `limit` of them that take turns, or as many as there are messages (None)."""

    limit: int | None
    buffers: dict[int, Tensor] = field(default_factory=dict)

    def slot(self, number: int) -> int:
        """The staging buffer of the `number`-th message that is packed."""
        return number if self.limit is None else number % self.limit

    def buffer(self, slot: int, nbytes: int, device: torch.device, pinned: bool) -> Tensor:
        found = self.buffers.get(slot)
        if found is None or found.nbytes < nbytes:
            # Buffers that take turns get room for any bucket at once: pinned memory is slow to allocate.
            room = nbytes if self.limit is None else max(nbytes, BUCKET)
            found = self.buffers[slot] = torch.empty(room, dtype=torch.uint8, device=device, pin_memory=pinned)
        return found[:nbytes]


class BucketCache:
    """The buckets of a link for each buffer that takes part in syncs: made once and used at each sync. They share
    staging buffers, `limit` of them for each peer, since a link has one sync at a time.
    """

    def __init__(self, connection: PeerConnection, limit: int | None = None) -> None:
        self._connection = connection
        self._limit = limit
        self._made: list[tuple[Sequence[Copy], Shards, dict[int, list[Bucket]]]] = []
        self._staging: dict[int, Staging] = {}

    def by_peer(self, copies: Sequence[Copy], shards: Shards, device: torch.device) -> dict[int, list[Bucket]]:
        """Each peer's buckets, the same on both sides of a pair. The group's buffers lie on `device`."""
        # By identity: comparing the copies of a large model would take longer than sending a small one.
        for known_copies, known_shards, made in self._made:
            if known_copies is copies and known_shards is shards:
                return made
        made = {
            peer: buckets_of(own, shards, device, self._staging.setdefault(peer, Staging(self._limit)))
            for peer, own in self._connection.by_peer(copies).items()
        }
        self._made = [*self._made[1 - _KEPT :], (copies, shards, made)]
        return made

    def clear(self) -> None:
        self._made.clear()
        self._staging.clear()


def buckets_of(copies: Sequence[Copy], shards: Shards, device: torch.device, staging: Staging) -> list[Bucket]:
    """The buckets to or from one peer, through a group whose buffers lie on `device`."""
    slabs: list[Copy] = []
    for copy in copies:
        parts = -(-copy.region.size * shards[copy.tensor].tensor.dtype.itemsize // BUCKET)
        slabs += [copy] if parts < 2 else [replace(copy, region=slab) for slab in copy.region.cut(parts)]
    pieces = [shards[slab.tensor].cut(slab.region) for slab in slabs]
    made: list[Bucket] = []
    staged = 0
    for span in bundle([piece.nbytes for piece in pieces]):
        own, first, buffer, slot = pieces[span], pieces[span.start], None, None
        if len(own) == 1 and first.is_contiguous() and first.device.type == device.type:
            buffer = first.view(-1).view(torch.uint8)
        else:
            slot = staging.slot(staged)
            staged += 1
            pinned = first.is_cuda and device.type == "cpu"
            buffer = staging.buffer(slot, sum(piece.nbytes for piece in own), device, pinned)
        made.append(Bucket(tuple(slabs[span]), own, buffer, slot))
    return made


def bundle(sizes: Sequence[int]) -> list[slice]:
    """Divide a list of pieces of these bytes into messages, in order: a large piece is one by itself, neighbours that
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


def pack(bucket: Bucket) -> None:
    """Copy the pieces of a staged bucket into its buffer."""
    for piece, place in _places(bucket):
        place.copy_(piece)


def unpack(bucket: Bucket) -> None:
    """Copy the buffer of a staged bucket into its pieces."""
    for piece, place in _places(bucket):
        piece.copy_(place)


def _places(bucket: Bucket) -> Iterator[tuple[Tensor, Tensor]]:
    """The bytes of each piece of a staged bucket, with their place in the buffer, in one shape."""
    start = 0
    for piece in bucket.pieces:
        # As bytes: the buffer is not aligned for all dtypes. A strided piece gets a dimension for those of an element.
        contiguous = piece.dim() and piece.stride(-1) == 1
        as_bytes = (piece if contiguous else piece.unsqueeze(-1)).view(torch.uint8)
        yield as_bytes, bucket.buffer[start : start + piece.nbytes].view(as_bytes.shape)
        start += piece.nbytes
