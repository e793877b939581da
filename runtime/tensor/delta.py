"""Weight sync that sends only what changed since a version that the receiver has: `encode` and `decode` for one bucket
of bytes, and `DeltaTransport`, which sends deltas over a replica link. For links that are slower than memory.

A delta is lossless. A bucket is sent dense, or as the places and new values of the changed elements, whichever is
smaller. Values overwrite, so applying a delta twice does no harm. Elements are words of 1, 2 or 4 bytes and are
compared as integers: NaN and -0.0 are bits like any others. On the wire, little-endian:

    counts    int32 for each block of 65,536 elements: how many of it follow
    places    uint16 for each changed element: its place in its block
    values    the changed elements

One sync with one peer: the receiver sends (wanted version, held version). The source answers with (version,
predecessor, number of messages, bytes without deltas), where predecessor is the version that the delta starts from. It
then sends the number of changed elements of each bucket (-1 for a dense one), then the buckets. A receiver that holds
another version than the last one sent gets everything.

Invariant: `_Kept.buffers` are the bytes of `_Kept.version`, or that version is `NONE`. Both sides keep them, since a
receiver's shadow buffer holds the version before its live one. This costs one more copy of what is sent; on a source,
one for each replica.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.process_group import Connection, Message
from penstock.runtime.tensor.send_recv import GLOO_SIZES, Bucket, BucketCache, pack, unpack

# The predecessor of a full sync, and the number of changed elements of a dense bucket.
NONE = -1

_BLOCK = 1 << 16  # elements that a uint16 can number
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class DeltaError(RuntimeError):
    """Bytes that are no delta of this bucket. Nothing was written."""


class Delta(NamedTuple):
    """The difference of two versions of a bucket: `changed` elements in `payload` (uint8, on the bucket's device).

    If `changed` is `NONE` it is dense: the payload is the bucket itself.
    """

    changed: int
    payload: Tensor


def encode(previous: Tensor | None, current: Tensor, itemsize: int) -> Delta:
    """The delta that turns `previous` into `current`: contiguous tensors of equal size, aligned to `itemsize`. Without
    `previous` it is dense. The payload may be a view of `current`.
    """
    bucket = _words(current, itemsize)
    dense = Delta(NONE, bucket.view(torch.uint8))
    if previous is None:
        return dense
    before = _words(previous, itemsize)
    if bucket.is_cpu:
        # numpy compares four times as fast as torch on a CPU, and finds the places three times as fast.
        places = torch.from_numpy(np.flatnonzero(np.not_equal(before.numpy(), bucket.numpy())))
    else:
        places = (before != bucket).nonzero().view(-1)
    blocks = -(-len(bucket) // _BLOCK)
    # The size of counts, places and values: a delta that is not smaller than the bucket is useless.
    if 4 * blocks + (2 + itemsize) * len(places) >= bucket.nbytes:
        return dense
    edges = torch.arange(blocks + 1, device=places.device) * _BLOCK
    counts = torch.searchsorted(places, edges).diff().to(torch.int32)
    pieces = counts, places.to(torch.int16), bucket.index_select(0, places)
    return Delta(len(places), torch.cat([piece.view(torch.uint8) for piece in pieces]))


def payload_bytes(nbytes: int, itemsize: int, changed: int) -> int:
    """The bytes that are sent for a bucket of `nbytes`. Raises `DeltaError` for a number of changed elements for which
    no delta would be made, so that a receiver never waits for bytes that do not come.
    """
    if changed == NONE:
        return nbytes
    needed = 4 * -(-nbytes // itemsize // _BLOCK) + (2 + itemsize) * changed
    if changed < 0 or needed >= nbytes:
        raise DeltaError(f"given {changed} changed elements of {nbytes // itemsize}, which makes no delta")
    return needed


def decode(delta: Delta, into: Tensor, itemsize: int) -> None:
    """Turn `into`, a contiguous tensor that holds the predecessor, into the delta's version, in place. Raises
    `DeltaError`, before anything is written, if places lie outside.
    """
    bucket = _words(into, itemsize)
    needed = payload_bytes(bucket.nbytes, itemsize, delta.changed)
    if delta.payload.nbytes != needed:
        raise DeltaError(f"given a payload of {delta.payload.nbytes} bytes, needed {needed}")
    if delta.changed == NONE:
        bucket.view(torch.uint8).copy_(delta.payload)
        return
    blocks = -(-len(bucket) // _BLOCK)
    sizes = [4 * blocks, 2 * delta.changed, itemsize * delta.changed]
    kinds = [torch.int32, torch.int16, _WORDS[itemsize]]
    # Cloned, since a view with larger elements must be aligned.
    counts, low, values = (
        piece.clone().view(kind) for piece, kind in zip(torch.split(delta.payload, sizes), kinds, strict=True)
    )
    counts = counts.long()
    if int(counts.min()) < 0 or int(counts.sum()) != delta.changed:
        raise DeltaError(f"the counts of the blocks do not make {delta.changed}")
    # A place has two bytes and is relative to its block, which follows from the counts: four bytes would double most
    # deltas.
    block = torch.repeat_interleave(torch.arange(blocks, device=into.device), counts)
    places = (low.long() & _BLOCK - 1).add_(block, alpha=_BLOCK)
    if delta.changed and int(places.max()) >= len(bucket):
        raise DeltaError(f"given a place {int(places.max())}, needed one below {len(bucket)}")
    bucket.scatter_(0, places, values)


def _words(part: Tensor, itemsize: int) -> Tensor:
    """A contiguous tensor as a flat one of integers of `itemsize` bytes."""
    return part.view(-1).view(torch.uint8).view(_WORDS[itemsize])


_HELD, _ANSWER, _CHANGED, _PAYLOADS = range(4)  # tags; payloads use `_PAYLOADS` and the numbers after it
_ANSWERED = "version", "predecessor", "messages", "bytes"


@dataclass
class _Kept:
    """The bytes of each message to or from one peer as of `version`, and the number of deltas that a source has sent to
    that peer since the last full sync."""

    buffers: list[Tensor]
    version: int = NONE
    deltas: int = 0


class DeltaTransport:
    """One rank of a link. Of any `every` consecutive syncs with one peer, at least one is full. `counts` has the number
    of "full" and "delta" syncs sent, summed over peers; the "bytes" of the deltas, and those of the "whole" buckets."""

    def __init__(self, connection: Connection, every: int) -> None:
        self._connection = connection
        self._every = every
        self._cache = BucketCache(connection, torch.device("cpu"), GLOO_SIZES, reused=False)
        self._kept: dict[int, _Kept] = {}
        self.counts: Counter[str] = Counter()

    def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        connection, by_peer = self._connection, self._buckets(copies, parts)
        connection.sync = f"version {version}"
        what = "the version that it holds"
        words = [connection.receive(torch.empty(2, dtype=torch.int64), peer, _HELD, what) for peer in by_peer]
        pending: list[Message] = []
        for word in words:
            own, (wanted, held) = by_peer[word.peer], word.wait().tolist()
            kept = self._of(word.peer, own)
            # A delta needs equal bytes on both sides: the peer must hold the version that was sent and kept last.
            usable = NONE != kept.version == held < version and kept.deltas < self._every - 1
            kept.deltas = kept.deltas + 1 if usable else 0
            self.counts["delta" if usable else "full"] += 1
            answer = _answer(version, kept.version if usable else NONE, own)
            connection.send(answer, word.peer, _ANSWER).wait()
            # Check only after the answer is sent: the receiver must see it, and fail too.
            connection.match(torch.tensor([wanted]), torch.tensor([version]), _ANSWERED[:1], word.peer)
            deltas = []
            for bucket, before in zip(own, kept.buffers, strict=True):
                if bucket.slot is not None:
                    pack(bucket)
                deltas.append(encode(before if usable else None, bucket.buffer, bucket.itemsize))
                if usable:
                    self.counts.update(bytes=deltas[-1].payload.nbytes, whole=bucket.buffer.nbytes)
            changed = torch.tensor([delta.changed for delta in deltas])
            pending.append(connection.send(changed, word.peer, _CHANGED))
            for tag, (bucket, delta) in enumerate(zip(own, deltas, strict=True), _PAYLOADS):
                pending.append(connection.send(delta.payload, word.peer, tag, bucket.name))
        total = sum(message.wait().nbytes for message in pending)
        for peer, own in by_peer.items():
            self._keep(version, peer, own)
        return total

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        connection, by_peer = self._connection, self._buckets(copies, parts)
        connection.sync = f"version {version}"
        answers: list[Message] = []
        for peer, own in by_peer.items():
            word = torch.tensor([version, self._of(peer, own).version])
            asked = connection.send(word, peer, _HELD)
            answers.append(connection.receive(torch.empty(len(_ANSWERED), dtype=torch.int64), peer, _ANSWER))
            asked.wait()
        total = 0
        for message in answers:
            own, held = by_peer[message.peer], self._kept[message.peer].version
            answer = message.wait()
            predecessor = NONE if int(answer[1]) == NONE else held
            connection.match(answer, _answer(version, predecessor, own), _ANSWERED, message.peer)
            total += self._receive_from(version, message.peer, own)
        return total

    def close(self) -> None:
        self._connection.close()
        self._cache.clear()
        self._kept.clear()

    def _buckets(self, copies: Sequence[Copy], parts: Shards) -> dict[int, list[Bucket]]:
        """The buckets by peer; both sides of a pair make the same ones."""
        exchange = self._cache.of(copies, parts)
        rounds = self._cache.rounds(exchange, dict.fromkeys(exchange.loads, GLOO_SIZES.full))
        return {peer: [bucket for own in each for bucket in own] for peer, each in rounds.items()}

    def _of(self, peer: int, own: Sequence[Bucket]) -> _Kept:
        if peer not in self._kept:
            self._kept[peer] = _Kept([torch.empty_like(bucket.buffer) for bucket in own])
        return self._kept[peer]

    def _keep(self, version: int, peer: int, own: Sequence[Bucket]) -> None:
        """Keep the bytes that were sent: the next delta for this peer starts from them."""
        kept = self._kept[peer]
        kept.version = NONE  # invalid until all are copied
        for bucket, buffer in zip(own, kept.buffers, strict=True):
            buffer.copy_(bucket.buffer)
        kept.version = version

    def _receive_from(self, version: int, peer: int, own: Sequence[Bucket]) -> int:
        """Receive `version` into the kept bytes and the shards. Return the bytes received."""
        connection, kept = self._connection, self._kept[peer]
        # Until all deltas are applied, the kept bytes are of no version: after an error the next sync must be full.
        kept.version = NONE
        changed = connection.receive(torch.empty(len(own), dtype=torch.int64), peer, _CHANGED).wait()
        pending = []
        for tag, (count, bucket, buffer) in enumerate(zip(changed.tolist(), own, kept.buffers, strict=True), _PAYLOADS):
            with connection.naming(peer, bucket.name):
                size = payload_bytes(buffer.nbytes, bucket.itemsize, count)
            # A dense payload is received directly into the kept buffer.
            payload = buffer if count == NONE else torch.empty(size, dtype=torch.uint8)
            pending.append((connection.receive(payload, peer, tag, bucket.name), count, bucket, buffer))
        for message, count, bucket, buffer in pending:
            payload = message.wait()
            with connection.naming(peer, bucket.name):
                decode(Delta(count, payload), buffer, bucket.itemsize)
            bucket.buffer.copy_(buffer)
            if bucket.slot is not None:
                unpack(bucket)
        kept.version = version
        return changed.nbytes + sum(message.buffer.nbytes for message, _, _, _ in pending)


def _answer(version: int, predecessor: int, own: Sequence[Bucket]) -> Tensor:
    return torch.tensor([version, predecessor, len(own), sum(bucket.buffer.nbytes for bucket in own)])
