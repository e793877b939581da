"""Weights as messages over a bridge: gloo or NCCL, point to point.

A sync to one peer is a header (version, messages, bytes), then the messages of `bucket`, which are made once for each
buffer that takes part and used again at each sync. Those that are packed take turns in `SLOTS` staging buffers. Peers
take turns, too, on both sides in one order: a rank that waits for a message has begun all that come before it, so that
ranks cannot wait for each other in a circle, and what comes from several peers comes in about the order of the plan.

How the pieces of one peer become messages: a large contiguous piece as it lies, small and strided ones in buckets.

A piece of more than a bucket is cut into slabs, so that whoever packs one message while another travels needs a few
buckets of memory only, which stay in a core's caches. Both sides compute the same messages from the same plan, so that
nothing but the bytes travels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.process_group import HEADER, PeerConnection, PeerGroup, named
from penstock.runtime.tensor.reshard import BUCKET, LARGE


class Bucket(NamedTuple):
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


class BucketCache:
    """The messages of a plan for each buffer that takes part in syncs: made once, in staging buffers that they share,
    since a bridge has one sync at a time. `limit` bounds the staging buffers of each peer.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._made: list[tuple[Sequence[Copy], Shards, dict[int, list[Bucket]]]] = []
        self._staging: dict[int, Staging] = {}

    def once(
        self,
        copies: Sequence[Copy],
        parts: Shards,
        make: Callable[[Callable[[int], Staging]], dict[int, list[Bucket]]],
    ) -> dict[int, list[Bucket]]:
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


def buckets_of(copies: Sequence[Copy], parts: Shards, device: torch.device, staging: Staging) -> list[Bucket]:
    """The messages to or from one peer, through a group whose buffers lie on `device`."""
    slabs = [slab for copy in copies for slab in _slabs(copy, parts[copy.tensor].tensor.dtype.itemsize)]
    pieces = [parts[slab.tensor].cut(slab.region) for slab in slabs]
    made: list[Bucket] = []
    staged = 0
    for span in bundle([piece.nbytes for piece in pieces]):
        made.append(_parcel(tuple(slabs[span]), pieces[span], device, staging, staged))
        staged += made[-1].staged
    return made


def _slabs(copy: Copy, itemsize: int) -> list[Copy]:
    """A copy as copies of about a bucket at most, where it can be cut."""
    parts = -(-copy.region.size * itemsize // BUCKET)
    return [copy] if parts < 2 else [replace(copy, region=region) for region in copy.region.cut(parts)]


def _parcel(
    copies: tuple[Copy, ...], pieces: Sequence[Tensor], device: torch.device, staging: Staging, number: int
) -> Bucket:
    """A single contiguous piece travels from and to where it lies, if the group can read it there."""
    first = pieces[0]
    if len(pieces) == 1 and first.is_contiguous() and first.device.type == device.type:
        return Bucket(copies, pieces, first.view(-1).view(torch.uint8), None)
    slot, nbytes = staging.slot(number), sum(piece.nbytes for piece in pieces)
    pinned = first.is_cuda and device.type == "cpu"
    return Bucket(copies, pieces, staging.buffer(slot, nbytes, device, pinned), slot)


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


def pack(bucket: Bucket) -> None:
    for piece, place in _places(bucket):
        place.copy_(piece)


def unpack(bucket: Bucket) -> None:
    for piece, place in _places(bucket):
        piece.copy_(place)


def _places(bucket: Bucket) -> Iterator[tuple[Tensor, Tensor]]:
    """The bytes of each piece of a staged bucket, with their place in the buffer, in one shape."""
    start = 0
    for piece in bucket.pieces:
        as_bytes = _bytes(piece)
        yield as_bytes, bucket.buffer[start : start + piece.nbytes].view(as_bytes.shape)
        start += piece.nbytes


def _bytes(piece: Tensor) -> Tensor:
    """A view: along the last dimension if that is contiguous, else with a dimension for the bytes of an element."""
    if piece.dim() and piece.stride(-1) == 1:
        return piece.view(torch.uint8)
    return piece.unsqueeze(-1).view(torch.uint8)


SLOTS = 3  # one is packed while another is sent, and a third waits for the peer
_FIELDS = "version", "messages", "bytes"
Tell = Callable[[Sequence[Copy]], None]
"""Told of the copies of one message."""


class _Underway:
    """The messages of one sync that have been begun, and end in that order; of those in one staging buffer, one."""

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
        slot = peer, next(self._numbers) if bucket.slot is None else -1 - bucket.slot
        while slot in self._begun:
            self._end_oldest()
        with self._connection.naming(self._version, peer, named(bucket.copies)):
            self._begun[slot] = start(), peer, bucket

    def end(self) -> None:
        """Wait for all."""
        while self._begun:
            self._end_oldest()

    def _end_oldest(self) -> None:
        work, peer, bucket = self._begun.pop(next(iter(self._begun)))
        self._connection.wait(work, self._version, peer, named(bucket.copies))
        if self._finish is not None:
            self._finish(bucket)


class MessageTransport:
    """One rank of a bridge. See the module for what is on the wire."""

    def __init__(self, connection: PeerConnection) -> None:
        self._connection = connection
        self._post = BucketCache(SLOTS)

    def send(self, version: int, copies: Sequence[Copy], parts: Shards, ready: Tell | None = None) -> int:
        """`ready` waits until the copies of a message may be read; each is asked for just before it is sent."""
        connection, group = self._connection, self._connection.group(version)
        by_peer = buckets_by_peer(self._post, connection, copies, parts, group.device)
        underway, headers = _Underway(connection, version), []
        for peer, own in by_peer.items():
            with connection.naming(version, peer, HEADER):
                header = _header(version, own, group.device)
                headers.append((group.send(header, peer, 0), peer, header))
        for tag, peer, bucket in _in_turn(by_peer):
            if ready is not None:
                ready(bucket.copies)
            underway.begin(peer, bucket, partial(_packed_and_sent, group, bucket, peer, tag))
        for work, peer, _ in headers:
            connection.wait(work, version, peer, HEADER)
        underway.end()
        return _nbytes(by_peer.values())

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards, arrived: Tell | None = None) -> int:
        """`arrived` is told when the copies of a message are in their places."""
        connection, group = self._connection, self._connection.group(version)
        by_peer = buckets_by_peer(self._post, connection, copies, parts, group.device)
        headers: list[tuple[int, Tensor, Work]] = []
        for peer in by_peer:
            header = torch.empty(3, dtype=torch.int64, device=group.device)
            with connection.naming(version, peer, HEADER):
                headers.append((peer, header, group.receive(header, peer, 0)))
        for peer, header, work in headers:
            connection.wait(work, version, peer, HEADER)
            connection.match(header, _header(version, by_peer[peer], group.device), _FIELDS, peer)
        underway = _Underway(connection, version, partial(_unpacked, arrived))
        for tag, peer, bucket in _in_turn(by_peer):
            underway.begin(peer, bucket, partial(group.receive, bucket.buffer, peer, tag))
        underway.end()
        return _nbytes(by_peer.values())

    def close(self) -> None:
        self._connection.close()
        self._post.clear()


def buckets_by_peer(
    post: BucketCache, connection: PeerConnection, copies: Sequence[Copy], parts: Shards, device: torch.device
) -> dict[int, list[Bucket]]:
    """Each peer's messages, the same on both sides of a pair."""
    return post.once(
        copies,
        parts,
        lambda staging: {
            peer: buckets_of(own, parts, device, staging(peer)) for peer, own in connection.by_peer(copies).items()
        },
    )


def _in_turn(by_peer: Mapping[int, Sequence[Bucket]]) -> Iterator[tuple[int, int, Bucket]]:
    """(tag, peer, message): the first message of each peer, then the second of each, …"""
    for tag in range(1, 1 + max(map(len, by_peer.values()), default=0)):
        for peer, own in by_peer.items():
            if tag <= len(own):
                yield tag, peer, own[tag - 1]


def _packed_and_sent(group: PeerGroup, bucket: Bucket, peer: int, tag: int) -> Work:
    if bucket.staged:
        pack(bucket)
    return group.send(bucket.buffer, peer, tag)


def _unpacked(arrived: Tell | None, bucket: Bucket) -> None:
    if bucket.staged:
        unpack(bucket)
    if arrived is not None:
        arrived(bucket.copies)


def _header(version: int, own: Sequence[Bucket], device: torch.device) -> Tensor:
    return torch.tensor([version, len(own), _nbytes([own])], dtype=torch.int64, device=device)


def _nbytes(parcels_of_peers: object) -> int:
    return sum(bucket.buffer.nbytes for own in parcels_of_peers for bucket in own)  # type: ignore[attr-defined]
