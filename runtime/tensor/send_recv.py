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
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.process_group import Connection, Message
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
    def itemsize(self) -> int:
        """The bytes of the smallest elements in it: compared by these, one changed byte costs the fewest bytes."""
        return min(4, *(piece.dtype.itemsize for piece in self.pieces))

    @property
    def name(self) -> str:
        """The copies, in short."""
        more = f" and {len(self.copies) - 1} more tensors" if len(self.copies) > 1 else ""
        return f"{self.copies[0].tensor} {self.copies[0].region}{more}"


# Begins the message of a bucket, to or from a peer, with this tag.
Start = Callable[[Bucket, int, int], Message]


class MessageTransport:
    """One rank of a link that sends all bytes of each version. See the module for what is on the wire."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._cache = BucketCache(connection, SLOTS)

    def send(self, version: int, copies: Sequence[Copy], shards: Shards, ready: Tell | None = None) -> int:
        """Send `copies` out of `shards`; the bytes sent. `ready` is called with the copies of each message just before
        it is sent, and returns when they may be read. Raises TransportError.
        """
        connection, by_peer = self._connection, self._cache.by_peer(copies, shards)
        connection.sync = f"version {version}"
        headers: Begun = {
            (peer, 0): (connection.send(self._header(version, own), peer, 0), None) for peer, own in by_peer.items()
        }

        def start(bucket: Bucket, peer: int, tag: int) -> Message:
            if ready is not None:
                ready(bucket.copies)
            if bucket.slot is not None:
                with connection.naming(peer, bucket.name):
                    pack(bucket)
            return connection.send(bucket.buffer, peer, tag, bucket.name)

        return sum(bucket.buffer.nbytes for bucket in _in_turn(by_peer, start, headers))

    def receive(self, version: int, copies: Sequence[Copy], shards: Shards, arrived: Tell | None = None) -> int:
        """Write `copies` into `shards`; the bytes received. `arrived` is called with the copies of each message that
        is in its place. Raises TransportError, or ChecksumError if the peer sends another version or plan.
        """
        connection, by_peer = self._connection, self._cache.by_peer(copies, shards)
        connection.sync = f"version {version}"
        needed = {peer: self._header(version, own) for peer, own in by_peer.items()}
        # All headers are compared before any bucket is received: nothing of another version gets into the shadow.
        for header in [connection.receive(torch.empty_like(header), peer, 0) for peer, header in needed.items()]:
            connection.match(header.wait(), needed[header.peer], _FIELDS, header.peer)
        received = 0

        def start(bucket: Bucket, peer: int, tag: int) -> Message:
            return connection.receive(bucket.buffer, peer, tag, bucket.name)

        for bucket in _in_turn(by_peer, start, {}):
            if bucket.slot is not None:
                unpack(bucket)
            if arrived is not None:
                arrived(bucket.copies)
            received += bucket.buffer.nbytes
        return received

    def close(self) -> None:
        self._connection.close()
        self._cache.clear()

    def _header(self, version: int, own: Sequence[Bucket]) -> Tensor:
        facts = version, len(own), sum(bucket.buffer.nbytes for bucket in own)
        return torch.tensor(facts, device=self._connection.device)


# Messages that have begun, by peer and tag or staging buffer, in the order in which they began. A header has no bucket.
Begun = dict[tuple[int, int], tuple[Message, Bucket | None]]


def _in_turn(by_peer: Mapping[int, Sequence[Bucket]], start: Start, begun: Begun) -> Iterator[Bucket]:
    """Begin the messages of all peers: the first of each, then the second of each, … They end in the order in which
    they began, and each is given when it has ended; a staging buffer holds one of them at a time.
    """

    def end_oldest() -> Iterator[Bucket]:
        message, bucket = begun.pop(next(iter(begun)))
        message.wait()
        if bucket is not None:
            yield bucket

    for tag in range(1, 1 + max(map(len, by_peer.values()), default=0)):
        for peer, own in by_peer.items():
            if tag > len(own):
                continue
            bucket = own[tag - 1]
            # Slots are counted down from -1, so that they never collide with the tags of messages that need none.
            key = peer, tag if bucket.slot is None else -1 - bucket.slot
            while key in begun:
                yield from end_oldest()
            begun[key] = start(bucket, peer, tag), bucket
    while begun:
        yield from end_oldest()


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

    def __init__(self, connection: Connection, limit: int | None = None) -> None:
        self._connection = connection
        self._limit = limit
        self._made: list[tuple[Sequence[Copy], Shards, dict[int, list[Bucket]]]] = []
        self._staging: dict[int, Staging] = {}

    def by_peer(self, copies: Sequence[Copy], shards: Shards) -> dict[int, list[Bucket]]:
        """Each peer's buckets, the same on both sides of a pair."""
        # By identity: comparing the copies of a large model would take longer than sending a small one.
        for known_copies, known_shards, made in self._made:
            if known_copies is copies and known_shards is shards:
                return made
        made = {
            peer: buckets_of(own, shards, self._connection.device, self._staging.setdefault(peer, Staging(self._limit)))
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
        # Both sides count from the region alone, so that they cut alike however each has it in memory.
        parts = -(-copy.region.size * shards[copy.tensor].tensor.dtype.itemsize // BUCKET)
        slabs += [copy] if parts < 2 else [replace(copy, region=slab) for slab in copy.region.cut(parts)]
    pieces = [shards[slab.tensor].cut(slab.region) for slab in slabs]
    made: list[Bucket] = []
    staged = 0
    for span in bundle([piece.nbytes for piece in pieces]):
        own, first, buffer, slot = pieces[span], pieces[span.start], None, None
        # A bucket that lies as it travels needs no copy; memory of another device has to be staged.
        if len(own) == 1 and first.is_contiguous() and first.device.type == device.type:
            buffer = first.view(-1).view(torch.uint8)
        else:
            slot = staging.slot(staged)
            staged += 1
            # Copies from a GPU into memory that is not pinned go through a second buffer of the driver's.
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
