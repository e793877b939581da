"""Weight sync by point-to-point messages over a replica link: `MessageTransport`, and the buckets that it and
`delta.DeltaTransport` send.

The copies between two ranks go in rounds, in the order of the plan. A large contiguous piece is a message of its own
and is sent and received in place. A strided piece goes through a staging buffer. So do the small pieces of a round, in
one message. A piece is split where a round is full, so that packing one round while another is sent needs only a few
rounds of memory. A sync begins with two short messages: the receiver sends the version that it awaits, and the bytes of
a round for which it has room; the sender answers with a header (version, bytes of a round, messages, bytes). From these
both sides make the same rounds of the same plan, so that only data needs to be sent then. The short messages go over
gloo, buckets by the link's `Carrier`: over gloo or NCCL.

Invariant: the n-th rounds with all peers are round n, every rank does its rounds in order, and a message is of the same
round on both sides. So ranks cannot deadlock, even if the messages of a round end together and nothing is buffered:
what the first unfinished round waits for has begun, or will begin without its end.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.runtime.tensor.buffers import Shards, aligned
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.process_group import Connection, Message
from penstock.runtime.tensor.reshard import BUCKET, LARGE

_KEPT = 8  # cached sets of buckets: more than the number of buffers on one side of a channel
_ASKED = "version", "room"
_FIELDS = "version", "bytes of a round", "messages", "bytes"
# Called with the copies of one message.
Tell = Callable[[Sequence[Copy]], None]


class BucketSizes(NamedTuple):
    """How pieces become messages: a piece of `large` bytes or more is a message of its own; a round between two ranks
    has at most `full` bytes; each peer has `slots` staging buffers, which take turns and have room for a round each."""

    large: int
    full: int
    slots: int


# A bucket fits in a core's caches. One is packed while another is sent, and a third waits for the peer.
GLOO_SIZES = BucketSizes(LARGE, BUCKET, 3)


class Bucket(NamedTuple):
    """One message: its copies, their places in memory, and the buffer that is sent: in place (`slot` is None), or in
    staging buffer `slot` of its peer.
    """

    copies: tuple[Copy, ...]
    pieces: Sequence[Tensor]
    buffer: Tensor
    slot: int | None

    @property
    def itemsize(self) -> int:
        """The size of its smallest elements, at most 4: a delta of such words is smallest for one changed element."""
        return min(4, *(piece.dtype.itemsize for piece in self.pieces))

    @property
    def name(self) -> str:
        """The copies, in short, for errors."""
        more = f" and {len(self.copies) - 1} more tensors" if len(self.copies) > 1 else ""
        return f"{self.copies[0].tensor} {self.copies[0].region}{more}"


class Begun(Protocol):
    """The messages of a round in flight: their buffers must not change before `wait` has returned."""

    def wait(self) -> object:
        """Wait until all are sent or received. Raises TransportError past the deadline."""


class Carrier(Protocol):
    """Sends the buckets of a link. Their buffers lie on `device`."""

    device: torch.device
    sizes: BucketSizes

    def room(self, loads: Mapping[int, int]) -> dict[int, int]:
        """The bytes of a round that this rank can take, by peer; `loads` are all bytes to or from each. The two sides
        of a pair use the smaller number."""

    def send(self, messages: Iterable[tuple[int, Bucket]], number: int) -> Begun:
        """Begin round `number`: pairs of peer and bucket. Each may be sent as soon as the iterator gives it. Those of
        one peer arrive in this order."""

    def receive(self, messages: Iterable[tuple[int, Bucket]], number: int) -> Begun: ...

    def close(self) -> None:
        """Abort messages in flight. May be repeated, by any thread."""


class GlooCarrier:
    """Sends buckets as messages of the link's connection, from and to host memory."""

    def __init__(self, connection: Connection) -> None:
        self.device, self.sizes = torch.device("cpu"), GLOO_SIZES
        self._connection = connection

    def room(self, loads: Mapping[int, int]) -> dict[int, int]:
        return dict.fromkeys(loads, self.sizes.full)

    def send(self, messages: Iterable[tuple[int, Bucket]], number: int) -> Begun:
        # Each message begins before the next bucket is packed.
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
    """One rank of a link that sends all bytes of each version. See the module for the protocol."""

    def __init__(self, connection: Connection, carrier: Carrier | None = None) -> None:
        self._connection = connection
        self._carrier = carrier or GlooCarrier(connection)
        self._cache = BucketCache(connection, self._carrier.device, self._carrier.sizes)

    def send(self, version: int, copies: Sequence[Copy], shards: Shards, ready: Tell | None = None) -> int:
        """Send `copies` of `shards`, and return the bytes sent. `ready` is called with the copies of each message just
        before it is sent, and returns when they may be read. Raises TransportError, or ChecksumError if a peer awaits
        another version.
        """
        connection, exchange = self._connection, self._cache.of(copies, shards)
        connection.sync = f"version {version}"
        asks = [connection.receive(torch.empty(len(_ASKED), dtype=torch.int64), peer, 0) for peer in exchange.loads]
        # Send no bucket before all peers are at this version: a GPU would be busy waiting for them.
        asked, room = {ask.peer: ask.wait() for ask in asks}, self._carrier.room(exchange.loads)
        rounds = self._cache.rounds(exchange, {peer: min(room[peer], int(ask[1])) for peer, ask in asked.items()})
        for header in [connection.send(_header(version, exchange, peer), peer, 0) for peer in asked]:
            header.wait()
        for peer, ask in asked.items():
            # Check only after the header is sent: the receiver must see it, and fail, too.
            connection.match(ask[:1], torch.tensor([version]), _ASKED[:1], peer)

        def packed(messages: Iterable[tuple[int, Bucket]]) -> Iterator[tuple[int, Bucket]]:
            for peer, bucket in messages:
                if ready is not None:
                    ready(bucket.copies)
                if bucket.slot is not None:
                    with connection.naming(peer, bucket.name):
                        pack(bucket)
                yield peer, bucket

        sent = _in_turn(rounds, lambda messages, number: self._carrier.send(packed(messages), number))
        return sum(bucket.buffer.nbytes for bucket in sent)

    def receive(self, version: int, copies: Sequence[Copy], shards: Shards, arrived: Tell | None = None) -> int:
        """Receive `copies` into `shards`, and return the bytes received. `arrived` is called with the copies of each
        message when they are in place. Raises TransportError, or ChecksumError if the peer sends another version or
        plan.
        """
        connection, exchange = self._connection, self._cache.of(copies, shards)
        connection.sync = f"version {version}"
        room = self._carrier.room(exchange.loads)
        asks = [connection.send(torch.tensor((version, room[peer])), peer, 0) for peer in room]
        headers = [connection.receive(torch.empty(len(_FIELDS), dtype=torch.int64), peer, 0) for peer in room]
        for ask in asks:
            ask.wait()
        given = {header.peer: header.wait() for header in headers}
        rounds = self._cache.rounds(exchange, {peer: min(room[peer], int(said[1])) for peer, said in given.items()})
        # Compare all headers before any bucket is received, so that no data of another version gets into the shadow.
        for peer, said in given.items():
            connection.match(said, _header(version, exchange, peer), _FIELDS, peer)
        received = 0
        for bucket in _in_turn(rounds, self._carrier.receive):
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


Round = list[Bucket]
Messages = Sequence[tuple[int, Bucket]]


def _in_turn(rounds: Mapping[int, Sequence[Round]], begin: Callable[[Messages, int], Begun]) -> Iterator[Bucket]:
    """Begin the rounds in order, and yield the buckets of each when it has ended, in the same order. Only one round at
    a time uses a staging buffer.
    """
    begun: deque[tuple[Begun, Messages]] = deque()

    def end_oldest() -> Iterator[Bucket]:
        work, messages = begun.popleft()
        work.wait()
        yield from (bucket for _, bucket in messages)

    for number in range(max(map(len, rounds.values()), default=0)):
        own = [(peer, bucket) for peer, each in rounds.items() if number < len(each) for bucket in each[number]]
        slots = _slots(own)
        while any(slots & _slots(messages) for _, messages in begun):
            yield from end_oldest()
        begun.append((begin(own, number + 1), own))  # tag 0 is the header's
    while begun:
        yield from end_oldest()


def _slots(messages: Messages) -> set[tuple[int, int]]:
    """The staging buffers of a round, by peer."""
    return {(peer, bucket.slot) for peer, bucket in messages if bucket.slot is not None}


@dataclass
class Staging:
    """The staging buffers of one peer: `limit` buffers that take turns; None: one for each round."""

    limit: int | None
    buffers: dict[int, Tensor] = field(default_factory=dict)

    def slot(self, number: int) -> int:
        """The staging buffer of the `number`-th staged round."""
        return number if self.limit is None else number % self.limit

    def reserve(self, needed: Mapping[int, int], device: torch.device, pinned: bool) -> None:
        """Make room for the needed bytes in each slot. Allocated at once, since pinned memory is slow to allocate."""
        for slot, nbytes in needed.items():
            if slot not in self.buffers or self.buffers[slot].nbytes < nbytes:
                self.buffers[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)


@dataclass(eq=False)
class Exchange:
    """What goes to, or comes from, each peer for one buffer: its copies, and their bytes (`loads`). `rounds` have at
    most `full` bytes, on which the two sides have agreed."""

    copies: Sequence[Copy]
    shards: Shards
    by_peer: Mapping[int, Sequence[Copy]]
    loads: dict[int, int]
    full: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, list[Round]] = field(default_factory=dict)


def _header(version: int, exchange: Exchange, peer: int) -> Tensor:
    return torch.tensor((version, exchange.full[peer], sum(map(len, exchange.rounds[peer])), exchange.loads[peer]))


class BucketCache:
    """The buckets of a link for each buffer that takes part in syncs: made once and used at each sync. Their buffers
    lie on `device`. They share staging buffers, since a link does one sync at a time; with `reused` false, each round
    has its own.
    """

    def __init__(
        self, connection: Connection, device: torch.device, sizes: BucketSizes, *, reused: bool = True
    ) -> None:
        self._connection = connection
        self._device = device
        self._sizes = sizes
        self._limit = sizes.slots if reused else None
        self._made: list[Exchange] = []
        self._staging: dict[int, Staging] = {}

    def of(self, copies: Sequence[Copy], shards: Shards) -> Exchange:
        # Compare by identity: comparing the copies of a large model takes longer than sending a small one.
        for known in self._made:
            if known.copies is copies and known.shards is shards:
                return known
        by_peer, itemsizes = self._connection.by_peer(copies), _itemsizes(shards)
        loads = {peer: sum(_nbytes(copy, itemsizes) for copy in own) for peer, own in by_peer.items()}
        self._made = [*self._made[1 - _KEPT :], Exchange(copies, shards, by_peer, loads)]
        return self._made[-1]

    def rounds(self, exchange: Exchange, full: dict[int, int]) -> dict[int, list[Round]]:
        """Each peer's rounds of at most `full` bytes; both sides of a pair make the same ones."""
        if exchange.full != full:
            for peer, own in exchange.by_peer.items():
                staging = self._staging.setdefault(peer, Staging(self._limit))
                sizes = self._sizes._replace(full=full[peer])
                exchange.rounds[peer] = rounds_of(own, exchange.shards, self._device, staging, sizes)
            exchange.full = full
        return exchange.rounds

    def clear(self) -> None:
        self._made.clear()
        self._staging.clear()


def rounds_of(
    copies: Sequence[Copy], shards: Shards, device: torch.device, staging: Staging, sizes: BucketSizes
) -> list[Round]:
    """The rounds of one peer."""
    planned = []
    turn, room = 0, Counter[int]()
    for messages in divide(copies, _itemsizes(shards), sizes):
        pieces = [[shards[slab.tensor].cut(slab.region) for slab in slabs] for slabs in messages]
        needed = [_staged(own, device) for own in pieces]
        slot = staging.slot(turn)
        turn += any(needed)
        room[slot] = max(room[slot], sum(needed))
        planned.append((slot, messages, pieces, needed))
    # Copies from a GPU into unpinned memory would go through a buffer of the driver.
    pinned = device.type == "cpu" and any(shard.tensor.is_cuda for shard in shards.values())
    staging.reserve(room, device, pinned)
    made: list[Round] = []
    for slot, messages, pieces, needed in planned:
        made.append([])
        for slabs, own, nbytes, end in zip(messages, pieces, needed, accumulate(needed), strict=True):
            if nbytes:
                start = end - nbytes
                buffer = staging.buffers[slot][start : start + sum(piece.nbytes for piece in own)]
            else:
                buffer = own[0].view(-1).view(torch.uint8)
            made[-1].append(Bucket(slabs, own, buffer, slot if nbytes else None))
    return made


def _staged(pieces: Sequence[Tensor], device: torch.device) -> int:
    """The bytes of a staging buffer that a message needs; 0 if it is sent and received in place."""
    first = pieces[0]
    # Memory of another device must be staged.
    if len(pieces) == 1 and first.is_contiguous() and first.device.type == device.type:
        return 0
    return aligned(sum(piece.nbytes for piece in pieces))


def divide(copies: Sequence[Copy], itemsizes: Mapping[str, int], sizes: BucketSizes) -> list[list[tuple[Copy, ...]]]:
    """Divide the copies between two ranks, in order, into rounds of at most `full` bytes, and each round into messages:
    a large piece is a message of its own, and the small pieces of a round share one. Pure. `itemsizes` are by tensor.

    A copy is split where a round is full, along its first dimension, or along later ones if a slab exceeds a round.
    """
    rounds: list[list[Copy]] = [[]]
    room = sizes.full
    for copy in copies:
        pending = [copy.region]
        while pending:
            region = pending.pop()
            nbytes = region.size * itemsizes[copy.tensor]
            dim, extent = next(((d, n) for d, n in enumerate(region.shape) if n > 1), (0, 1))
            slab = nbytes // extent
            if nbytes <= room or (extent == 1 and room == sizes.full):
                rounds[-1].append(replace(copy, region=region))
                room -= nbytes
            elif slab > room and room < sizes.full:
                rounds.append([])
                room = sizes.full
                pending.append(region)
            else:
                pending += reversed(region.parted(dim, max(1, room // slab)))
    made: list[list[tuple[Copy, ...]]] = []
    for own in rounds:
        made.append([(copy,) for copy in own if _nbytes(copy, itemsizes) >= sizes.large])
        if small := tuple(copy for copy in own if _nbytes(copy, itemsizes) < sizes.large):
            made[-1].append(small)
    return made


def _itemsizes(shards: Shards) -> dict[str, int]:
    return {name: shard.tensor.dtype.itemsize for name, shard in shards.items()}


def _nbytes(copy: Copy, itemsizes: Mapping[str, int]) -> int:
    return copy.region.size * itemsizes[copy.tensor]


def pack(bucket: Bucket) -> None:
    """Copy the pieces of a staged bucket into its buffer."""
    for piece, place in _places(bucket):
        place.copy_(piece)


def unpack(bucket: Bucket) -> None:
    """Copy the buffer of a staged bucket into its pieces."""
    for piece, place in _places(bucket):
        piece.copy_(place)


def _places(bucket: Bucket) -> Iterator[tuple[Tensor, Tensor]]:
    """Each piece of a staged bucket, as bytes, with its place in the buffer, in the same shape."""
    start = 0
    for piece in bucket.pieces:
        # As bytes: the buffer is not aligned for all dtypes. A strided piece gets a dimension for an element's bytes.
        contiguous = piece.dim() and piece.stride(-1) == 1
        as_bytes = (piece if contiguous else piece.unsqueeze(-1)).view(torch.uint8)
        yield as_bytes, bucket.buffer[start : start + piece.nbytes].view(as_bytes.shape)
        start += piece.nbytes
