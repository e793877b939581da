"""Weight sync that sends only what changed since a version that the receiver has: `encode` and `decode` for one bucket
of bytes, and `DeltaTransport`, which moves deltas over a replica link. For links that are slower than memory.

A delta is lossless. A bucket travels dense, or as the places and new values of the elements that differ, whichever is
smaller. Values overwrite, so that applying a delta twice does no harm. Elements are words of 1, 2 or 4 bytes and are
compared as integers: NaN and -0.0 are bits like any others. On the wire, little-endian:

    header    magic, element size, dense?, 0, version, predecessor, bytes of the bucket, changed elements
    counts    int32 for each block of 65,536 elements: how many of it follow
    places    uint16 for each changed element: its place in its block
    values    the changed elements; all of the bucket if it is dense, without counts and places

One sync with one peer: the receiver names the version that it holds (version, held); the source answers from which
version it sends the difference (version, predecessor, messages, bytes before), and sends the headers of all deltas as
one message, then each payload. A receiver that holds any other version than the one sent last gets everything.

Invariant: `_Kept.buffers` are the bytes of `_Kept.version`, or that version is `NONE`. Both sides keep them, since a
receiver's shadow holds the version before its live one: one more copy of what crosses, on a source for each replica.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.process_group import HEADER, PeerConnection, named
from penstock.runtime.tensor.send_recv import Bucket, BucketCache, pack, unpack

# The predecessor of what needs none.
NONE = -1

_HEADER = struct.Struct("<4sBBHqqQQ")
# Bytes by which a bucket may be larger than dense.
DELTA_HEADER = _HEADER.size

_MAGIC = b"PSD1"
_BLOCK = 1 << 16  # elements: what a uint16 counts
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class DeltaError(RuntimeError):
    """A delta of something else than what the receiver has, or bytes that are none. Nothing has been written."""


@dataclass(frozen=True)
class Delta:
    """One bucket: what turns version `predecessor` of its `nbytes` bytes into `version`.

    `payload` is what follows the header, uint8, on the device of the bucket; that of a dense one is the bucket itself.
    """

    version: int
    predecessor: int
    itemsize: int
    nbytes: int
    changed: int
    dense: bool
    payload: Tensor

    def header(self) -> bytes:
        facts = self.itemsize, self.dense, 0, self.version, self.predecessor, self.nbytes, self.changed
        return _HEADER.pack(_MAGIC, *facts)


def encode(previous: Tensor | None, current: Tensor, itemsize: int, version: int, predecessor: int = NONE) -> Delta:
    """What turns `previous`, version `predecessor`, into `current`: contiguous tensors of as many bytes, aligned to
    `itemsize`. Without `previous` it is dense and needs no predecessor. The payload may be a view of `current`.
    """
    if (previous is None) != (predecessor == NONE):
        raise ValueError(f"given predecessor {predecessor} and {'no' if previous is None else 'its'} bytes")
    bucket = _words(current, itemsize)
    if previous is None:
        return Delta(version, NONE, itemsize, bucket.nbytes, len(bucket), True, bucket.view(torch.uint8))
    before = _words(previous, itemsize)
    if len(before) != len(bucket):
        raise ValueError(f"given {before.nbytes} bytes of version {predecessor}, needed {bucket.nbytes}")
    blocks = -(-len(bucket) // _BLOCK)
    if bucket.is_cpu:
        # numpy compares four times as fast as torch on a CPU, and finds the places three times as fast.
        places = torch.from_numpy(np.flatnonzero(np.not_equal(before.numpy(), bucket.numpy())))
    else:
        places = (before != bucket).nonzero().view(-1)
    if 4 * blocks + (2 + itemsize) * len(places) >= bucket.nbytes:
        return Delta(version, predecessor, itemsize, bucket.nbytes, len(bucket), True, bucket.view(torch.uint8))
    edges = torch.arange(blocks + 1, device=places.device) * _BLOCK
    counts = torch.searchsorted(places, edges).diff().to(torch.int32)
    pieces = counts, places.to(torch.int16), bucket.index_select(0, places)
    payload = torch.cat([piece.view(torch.uint8) for piece in pieces])
    return Delta(version, predecessor, itemsize, bucket.nbytes, len(places), False, payload)


def payload_bytes(header: bytes, bucket: int | None = None) -> int:
    """The bytes that follow a header, no more than those of its bucket. Raises `DeltaError` if it is none, or, where
    `bucket` is given, not one of a bucket of so many bytes: so that a receiver never waits for what does not come.
    """
    if len(header) != DELTA_HEADER:
        raise DeltaError(f"given a header of {len(header)} bytes, needed {DELTA_HEADER}")
    magic, itemsize, dense, zero, version, predecessor, nbytes, changed = _HEADER.unpack(header)
    sizes_fit = itemsize in _WORDS and nbytes % itemsize == 0 and changed <= nbytes // itemsize
    if magic != _MAGIC or dense > 1 or zero or not NONE <= predecessor < version or not sizes_fit:
        raise DeltaError(f"given {header.hex()}, needed the header of a delta")
    needed = nbytes if dense else 4 * -(-nbytes // itemsize // _BLOCK) + (2 + itemsize) * changed
    if needed > nbytes or bucket not in (None, nbytes):
        given = f"a bucket of {nbytes} bytes, {needed} of which travel"
        raise DeltaError(f"delta of version {version}: given {given}, needed {needed if bucket is None else bucket}")
    return int(needed)


def parse(header: bytes, payload: Tensor) -> Delta:
    """The delta of these bytes. Raises `DeltaError` unless the header is one and the payload has the bytes it needs."""
    needed = payload_bytes(header)
    _, itemsize, dense, _, version, predecessor, nbytes, changed = _HEADER.unpack(header)
    if payload.nbytes != needed:
        of = f"{changed} elements of {itemsize} bytes, {'dense' if dense else 'sparse'}"
        raise DeltaError(
            f"delta of version {version}: given a payload of {payload.nbytes} bytes, needed {needed}: {of}"
        )
    return Delta(version, predecessor, itemsize, nbytes, changed, bool(dense), payload.view(-1).view(torch.uint8))


def decode(delta: Delta, into: Tensor, held: int) -> None:
    """Turn `into`, a contiguous tensor that holds version `held` of the bucket, into the delta's version, in place.

    Raises `DeltaError`, before anything is written, if it is another version or bucket, or if places lie outside.
    """
    if delta.predecessor not in (NONE, held):
        needed = f"needed its predecessor {delta.predecessor}"
        raise DeltaError(f"delta of version {delta.version}: given a bucket of version {held}, {needed}")
    if into.nbytes != delta.nbytes:
        raise DeltaError(f"delta of version {delta.version}: given a bucket of {into.nbytes} bytes, of {delta.nbytes}")
    bucket = _words(into, delta.itemsize)
    if delta.dense:
        bucket.view(torch.uint8).copy_(delta.payload)
        return
    blocks = -(-len(bucket) // _BLOCK)
    sizes = [4 * blocks, 2 * delta.changed, delta.itemsize * delta.changed]
    kinds = [torch.int32, torch.int16, _WORDS[delta.itemsize]]
    pieces = torch.split(delta.payload, sizes)
    # Cloned: a view of larger elements has to begin where one may lie.
    counts, low, values = (piece.clone().view(kind) for piece, kind in zip(pieces, kinds, strict=True))
    counts = counts.long()
    if blocks and (int(counts.min()) < 0 or int(counts.sum()) != delta.changed):
        raise DeltaError(f"delta of version {delta.version}: the counts of its blocks do not make {delta.changed}")
    block = torch.repeat_interleave(torch.arange(blocks, device=into.device), counts)
    places = (low.long() & _BLOCK - 1).add_(block, alpha=_BLOCK)
    if delta.changed and int(places.max()) >= len(bucket):
        given = f"a place {int(places.max())}, needed one below {len(bucket)}"
        raise DeltaError(f"delta of version {delta.version}: given {given}")
    bucket.scatter_(0, places, values)


def _words(part: Tensor, itemsize: int) -> Tensor:
    """A contiguous tensor, flat, as integers of this many bytes."""
    if itemsize not in _WORDS or part.nbytes % itemsize or part.data_ptr() % itemsize:
        raise ValueError(f"given {part.nbytes} bytes in elements of {itemsize}, needed whole aligned ones of 1, 2 or 4")
    return part.view(-1).view(torch.uint8).view(_WORDS[itemsize])


_HELD, _ANSWER, _HEADERS, _PAYLOADS = range(4)  # tags; the payloads' are counted on
_ASKED = ("version",)
_ANSWERED = "version", "predecessor", "messages", "bytes"


@dataclass
class _Kept:
    """The bytes of each message to or from one peer as of `version`, and how many deltas a source has sent to that
    peer since the last full sync."""

    buffers: list[Tensor]
    version: int = NONE
    deltas: int = 0


class DeltaTransport:
    """One rank of a link. Of any `every` syncs in a row with one peer, at least one is full. `counts` has the syncs
    sent to each peer, "full" or "delta", and the "bytes" that the deltas took instead of the "whole" ones."""

    def __init__(self, connection: PeerConnection, every: int) -> None:
        self._connection = connection
        self._every = every
        self._cache = BucketCache(connection)
        self._kept: dict[int, _Kept] = {}
        self.counts: Counter[str] = Counter()

    def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        connection, group = self._connection, self._connection.group(version)
        by_peer = self._cache.by_peer(copies, parts, group.device)
        words: list[tuple[int, list[Bucket], Tensor, Work]] = []
        for peer, own in by_peer.items():
            word = torch.empty(2, dtype=torch.int64)
            with connection.naming(version, peer, HEADER):
                words.append((peer, own, word, group.receive(word, peer, _HELD)))
        total, pending = 0, []
        for peer, own, word, work in words:
            connection.wait(work, version, peer, "the version that it holds")
            messages = self._encoded(version, peer, own, word)
            total += sum(message.nbytes for _, message in messages)
            for tag, (what, message) in enumerate(messages, _HEADERS):
                with connection.naming(version, peer, what):
                    pending.append((group.send(message, peer, tag), peer, what, message))
        for work, peer, what, _ in pending:
            connection.wait(work, version, peer, what)
        for peer, own in by_peer.items():
            self._keep(version, peer, own)
        return total

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        connection, group = self._connection, self._connection.group(version)
        by_peer = self._cache.by_peer(copies, parts, group.device)
        asked: list[tuple[int, Tensor, Work]] = []
        for peer, own in by_peer.items():
            kept = self._of(peer, own)
            answer = torch.empty(len(_ANSWERED), dtype=torch.int64)
            with connection.naming(version, peer, HEADER):
                word = group.send(torch.tensor([version, kept.version]), peer, _HELD)
                asked.append((peer, answer, group.receive(answer, peer, _ANSWER)))
            connection.wait(word, version, peer, HEADER)
        total = 0
        for peer, answer, work in asked:
            connection.wait(work, version, peer, HEADER)
            own = by_peer[peer]
            connection.match(answer, _answer(version, int(answer[1]), own), _ANSWERED, peer)
            total += self._receive_from(version, peer, own)
        return total

    def close(self) -> None:
        self._connection.close()
        self._cache.clear()
        self._kept.clear()

    def _encoded(self, version: int, peer: int, own: Sequence[Bucket], word: Tensor) -> list[tuple[str, Tensor]]:
        """The headers and payloads for one peer, after the answer to its word."""
        connection, group = self._connection, self._connection.group(version)
        kept = self._of(peer, own)
        # A delta needs equal bytes on both sides: the peer has what was sent last, and that was kept to the end.
        usable = NONE != kept.version == int(word[1]) < version and kept.deltas < self._every - 1
        predecessor = kept.version if usable else NONE
        kept.deltas = kept.deltas + 1 if usable else 0
        self.counts["delta" if usable else "full"] += 1
        with connection.naming(version, peer, HEADER):
            work = group.send(_answer(version, predecessor, own), peer, _ANSWER)
        connection.wait(work, version, peer, HEADER)
        connection.match(word[:1], torch.tensor([version]), _ASKED, peer)
        headers, messages = [], []
        for index, bucket in enumerate(own):
            if bucket.staged:
                pack(bucket)
            # Compared by the smallest elements in it: one changed byte then costs the fewest bytes.
            itemsize = min(4, *(piece.dtype.itemsize for piece in bucket.pieces))
            before = kept.buffers[index] if usable else None
            delta = encode(before, bucket.buffer, itemsize, version, predecessor)
            headers.append(delta.header())
            if usable:
                self.counts.update(bytes=delta.payload.nbytes, whole=bucket.buffer.nbytes)
            messages.append((named(bucket.copies), delta.payload))
        return [(HEADER, torch.frombuffer(bytearray(b"".join(headers)), dtype=torch.uint8)), *messages]

    def _of(self, peer: int, own: Sequence[Bucket]) -> _Kept:
        if peer not in self._kept:
            self._kept[peer] = _Kept([torch.empty_like(bucket.buffer) for bucket in own])
        return self._kept[peer]

    def _keep(self, version: int, peer: int, own: Sequence[Bucket]) -> None:
        """Remember what was sent: the bytes that the next delta for this peer is taken from."""
        kept = self._of(peer, own)
        kept.version = NONE
        for bucket, buffer in zip(own, kept.buffers, strict=True):
            buffer.copy_(bucket.buffer)
        kept.version = version

    def _receive_from(self, version: int, peer: int, own: Sequence[Bucket]) -> int:
        """Bring the kept bytes to `version`, and the buckets' places with them; the bytes received."""
        connection, group, kept = self._connection, self._connection.group(version), self._kept[peer]
        # Until all deltas are applied the kept bytes are of no version: an error must lead to a full sync.
        held, kept.version = kept.version, NONE
        packed = torch.empty(len(own) * DELTA_HEADER, dtype=torch.uint8)
        with connection.naming(version, peer, HEADER):
            work = group.receive(packed, peer, _HEADERS)
        connection.wait(work, version, peer, HEADER)
        pending = []
        for index, (bucket, buffer) in enumerate(zip(own, kept.buffers, strict=True)):
            header = bytes(packed[index * DELTA_HEADER : (index + 1) * DELTA_HEADER].numpy())
            with connection.naming(version, peer, named(bucket.copies)):
                size = payload_bytes(header, buffer.nbytes)
                # A dense payload is received where it is kept: no second copy of it.
                payload = buffer if size == buffer.nbytes else torch.empty(size, dtype=torch.uint8)
                pending.append((group.receive(payload, peer, _PAYLOADS + index), header, payload, bucket, buffer))
        for work, header, payload, bucket, buffer in pending:
            connection.wait(work, version, peer, named(bucket.copies))
            with connection.naming(version, peer, named(bucket.copies)):
                decode(parse(header, payload), buffer, held)
            bucket.buffer.copy_(buffer)
            if bucket.staged:
                unpack(bucket)
        kept.version = version
        return packed.nbytes + sum(payload.nbytes for _, _, payload, _, _ in pending)


def _answer(version: int, predecessor: int, own: Sequence[Bucket]) -> Tensor:
    return torch.tensor([version, predecessor, len(own), sum(bucket.buffer.nbytes for bucket in own)])
