"""Weight sync by point-to-point messages over a replica link: `MessageTransport`, and the buckets that it and
`delta.DeltaTransport` send.

A sync with one peer is a header (version, messages, bytes), then the buckets in order. A large contiguous piece is a
bucket by itself and travels from and to where it lies; small and strided pieces are packed into staging buffers. A
piece larger than a bucket is cut into slabs, so that packing one message while another travels needs a few buckets of
memory. Both sides compute the same buckets from the same plan, so that nothing but the bytes travels. Headers go over
gloo, buckets by the link's `Carrier`: over gloo, too, or over NCCL.

Invariant: the n-th buckets of all peers are round n, and every rank goes through its rounds in order; a message is of
one round on both of its sides. So ranks cannot wait for each other in a circle, even where the messages of a round end
together and nothing is buffered: what the first unfinished round waits for has begun, or will without its end.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.process_group import Connection, Message
from penstock.runtime.tensor.reshard import BUCKET, LARGE

_KEPT = 8  # sets of buckets: more than the buffers that take turns on one side of a channel
_FIELDS = "version", "messages", "bytes"
# Told of the copies of one message.
Tell = Callable[[Sequence[Copy]], None]


class BucketSizes(NamedTuple):
    """How pieces become messages, equal on both sides of a link: `large` are the bytes from which a piece travels by
    itself, `full` those at which a bucket is full; `slots` staging buffers of each peer take turns."""

    large: int
    full: int
    slots: int


# A bucket stays in a core's caches; one is packed while another is sent, and a third waits for the peer.
GLOO_SIZES = BucketSizes(LARGE, BUCKET, 3)


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


class Begun(Protocol):
    """The messages of one round, which have begun: their buffers must not change before `wait` has returned."""

    def wait(self) -> object:
        """Until all are sent or received. Raises TransportError past the deadline."""


class Carrier(Protocol):
    """What the buckets of a link travel by. `device` is where their buffers lie."""

    device: torch.device
    sizes: BucketSizes

    def send(self, messages: Iterable[tuple[int, Bucket]], number: int) -> Begun:
        """Begin round `number`: each peer with its bucket, which is to be sent when it is given."""

    def receive(self, messages: Iterable[tuple[int, Bucket]], number: int) -> Begun: ...

    def close(self) -> None:
        """Give up what is on its way. May be repeated, by any thread."""


class GlooCarrier:
    """Buckets as messages of the link's connection, from and into the host's memory."""

    def __init__(self, connection: Connection) -> None:
        self.device, self.sizes = torch.device("cpu"), GLOO_SIZES
        self._connection = connection

    def send(self, messages: Iterable[tuple[int, Bucket]], number: int) -> Begun:
        # Each begins before the next one is packed.
        return _Messages([self._connection.send(b.buffer, peer, number, b.name) for peer, b in messages])

    def receive(self, messages: Iterable[tuple[int, Bucket]], number: int) -> Begun:
        return _Messages([self._connection.receive(b.buffer, peer, number, b.name) for peer, b in messages])

    def close(self) -> None:
        self._connection.close()


class _Messages(list[Message]):
    def wait(self) -> None:
        for message in self:
            message.wait()


class MessageTransport:
    """One rank of a link that sends all bytes of each version. See the module for what is on the wire."""

    def __init__(self, connection: Connection, carrier: Carrier | None = None) -> None:
        self._connection = connection
        self._carrier = carrier or GlooCarrier(connection)
        self._cache = BucketCache(connection, self._carrier.device, self._carrier.sizes)

    def send(self, version: int, copies: Sequence[Copy], shards: Shards, ready: Tell | None = None) -> int:
        """Send `copies` out of `shards`; the bytes sent. `ready` is called with the copies of each message just before
        it is sent, and returns when they may be read. Raises TransportError.
        """
        connection, by_peer = self._connection, self._cache.by_peer(copies, shards)
        connection.sync = f"version {version}"
        headers = [connection.send(_header(version, own), peer, 0) for peer, own in by_peer.items()]

        def packed(messages: Mapping[int, Bucket]) -> Iterator[tuple[int, Bucket]]:
            for peer, bucket in messages.items():
                if ready is not None:
                    ready(bucket.copies)
                if bucket.slot is not None:
                    with connection.naming(peer, bucket.name):
                        pack(bucket)
                # No bucket leaves before all peers are at this version: a GPU would spend itself on waiting for them.
                while headers:
                    headers.pop().wait()
                yield peer, bucket

        rounds = _in_rounds(by_peer, lambda messages, number: self._carrier.send(packed(messages), number))
        return sum(bucket.buffer.nbytes for bucket in rounds)

    def receive(self, version: int, copies: Sequence[Copy], shards: Shards, arrived: Tell | None = None) -> int:
        """Write `copies` into `shards`; the bytes received. `arrived` is called with the copies of each message that
        is in its place. Raises TransportError, or ChecksumError if the peer sends another version or plan.
        """
        connection, by_peer = self._connection, self._cache.by_peer(copies, shards)
        connection.sync = f"version {version}"
        needed = {peer: _header(version, own) for peer, own in by_peer.items()}
        # All headers are compared before any bucket is received: nothing of another version gets into the shadow.
        for header in [connection.receive(torch.empty_like(header), peer, 0) for peer, header in needed.items()]:
            connection.match(header.wait(), needed[header.peer], _FIELDS, header.peer)
        received = 0
        for bucket in _in_rounds(by_peer, lambda messages, number: self._carrier.receive(messages.items(), number)):
            if bucket.slot is not None:
                unpack(bucket)
            if arrived is not None:
                arrived(bucket.copies)
            received += bucket.buffer.nbytes
        return received

    def close(self) -> None:
        self._carrier.close()
        self._connection.close()
        self._cache.clear()


def _header(version: int, own: Sequence[Bucket]) -> Tensor:
    return torch.tensor((version, len(own), sum(bucket.buffer.nbytes for bucket in own)))


def _in_rounds(
    by_peer: Mapping[int, Sequence[Bucket]], begin: Callable[[Mapping[int, Bucket], int], Begun]
) -> Iterator[Bucket]:
    """Begin round after round. They end in the order in which they began, and the buckets of each are given when it
    has ended; a staging buffer holds one of them at a time.
    """
    begun: deque[tuple[Begun, Mapping[int, Bucket]]] = deque()

    def end_oldest() -> Iterator[Bucket]:
        messages, buckets = begun.popleft()
        messages.wait()
        yield from buckets.values()

    for number in range(max(map(len, by_peer.values()), default=0)):
        own = {peer: buckets[number] for peer, buckets in by_peer.items() if number < len(buckets)}
        slots = _slots(own)
        while any(slots & _slots(buckets) for _, buckets in begun):
            yield from end_oldest()
        begun.append((begin(own, number + 1), own))  # tag 0 is the header's
    while begun:
        yield from end_oldest()


def _slots(buckets: Mapping[int, Bucket]) -> set[tuple[int, int]]:
    """The staging buffers of a round, by peer."""
    return {(peer, bucket.slot) for peer, bucket in buckets.items() if bucket.slot is not None}


@dataclass
class Staging:
    """The staging buffers of one peer: `limit` of them that take turns, of `room` bytes at least, or as many as there
    are messages (None)."""

    limit: int | None
    room: int = BUCKET
    buffers: dict[int, Tensor] = field(default_factory=dict)

    def slot(self, number: int) -> int:
        """The staging buffer of the `number`-th message that is packed."""
        return number if self.limit is None else number % self.limit

    def buffer(self, slot: int, nbytes: int, device: torch.device, pinned: bool) -> Tensor:
        found = self.buffers.get(slot)
        if found is None or found.nbytes < nbytes:
            # Buffers that take turns get room for any bucket at once: pinned memory is slow to allocate.
            room = nbytes if self.limit is None else max(nbytes, self.room)
            found = self.buffers[slot] = torch.empty(room, dtype=torch.uint8, device=device, pin_memory=pinned)
        return found[:nbytes]


class BucketCache:
    """The buckets of a link for each buffer that takes part in syncs: made once and used at each sync. They travel on
    `device`. They share staging buffers, since a link has one sync at a time; with `reused` false, each has its own.
    """

    def __init__(
        self, connection: Connection, device: torch.device, sizes: BucketSizes, *, reused: bool = True
    ) -> None:
        self._connection = connection
        self._device = device
        self._sizes = sizes
        self._limit = sizes.slots if reused else None
        self._made: list[tuple[Sequence[Copy], Shards, dict[int, list[Bucket]]]] = []
        self._staging: dict[int, Staging] = {}

    def by_peer(self, copies: Sequence[Copy], shards: Shards) -> dict[int, list[Bucket]]:
        """Each peer's buckets, the same on both sides of a pair."""
        # By identity: comparing the copies of a large model would take longer than sending a small one.
        for known_copies, known_shards, made in self._made:
            if known_copies is copies and known_shards is shards:
                return made
        made = {}
        for peer, own in self._connection.by_peer(copies).items():
            staging = self._staging.setdefault(peer, Staging(self._limit, self._sizes.full))
            made[peer] = buckets_of(own, shards, self._device, staging, self._sizes)
        self._made = [*self._made[1 - _KEPT :], (copies, shards, made)]
        return made

    def clear(self) -> None:
        self._made.clear()
        self._staging.clear()


def buckets_of(
    copies: Sequence[Copy], shards: Shards, device: torch.device, staging: Staging, sizes: BucketSizes
) -> list[Bucket]:
    """The buckets to or from one peer, whose buffers lie on `device`."""
    slabs: list[Copy] = []
    for copy in copies:
        # Both sides count from the region alone, so that they cut alike however each has it in memory.
        parts = -(-copy.region.size * shards[copy.tensor].tensor.dtype.itemsize // sizes.full)
        slabs += [copy] if parts < 2 else [replace(copy, region=slab) for slab in copy.region.cut(parts)]
    pieces = [shards[slab.tensor].cut(slab.region) for slab in slabs]
    made: list[Bucket] = []
    staged = 0
    for span in bundle([piece.nbytes for piece in pieces], sizes):
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


def bundle(pieces: Sequence[int], sizes: BucketSizes) -> list[slice]:
    """Divide a list of pieces of so many bytes into messages, in order: a large piece is one by itself, neighbours that
    are small share one until it is full.
    """
    spans: list[slice] = []
    start, filled = 0, 0
    for index, nbytes in enumerate(pieces):
        if filled and (nbytes >= sizes.large or filled >= sizes.full):
            spans.append(slice(start, index))
            start, filled = index, 0
        filled += nbytes
        if nbytes >= sizes.large:
            spans.append(slice(start, index + 1))
            start, filled = index + 1, 0
    return [*spans, slice(start, len(pieces))] if filled else spans


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
