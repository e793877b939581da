"""Weights as messages that say what changed since the version before, for links that are slower than memory.

The messages are those of `parcel`, each dense or as the elements that differ, whichever is smaller (`delta`). A sync
with one peer: the receiver says which version it holds (version, held); the source answers from which one it sends the
difference (version, predecessor, messages, bytes before), and sends the headers of all deltas as one message, then what
follows each. A receiver that holds anything else than what it was sent last gets everything.

Both sides keep the bytes that were moved last, since a receiver's shadow holds the version before its live one: one
more copy of what crosses, on a source for each replica that it sends to. The source's time is one comparison with that
copy and the update of it, the receiver's one copy of all bytes beside the changed elements.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from penstock.runtime.tensor.arena import Parts
from penstock.runtime.tensor.crossing import HEADER, Crossing, named
from penstock.runtime.tensor.delta import HEADER as HEADER_BYTES
from penstock.runtime.tensor.delta import NONE, Chain, decode, encode, parse, payload_bytes
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.messages import parcels_by_peer
from penstock.runtime.tensor.parcel import Parcel, Post, pack, unpack

_HELD, _ANSWER, _HEADERS, _PAYLOADS = range(4)  # tags; the payloads' are counted on
_ASKED = ("version",)
_ANSWERED = "version", "predecessor", "messages", "bytes"


@dataclass
class _Kept:
    """The bytes of each message to or from one peer as of `version`; `NONE` while they change."""

    buffers: list[Tensor]
    version: int = NONE


class DeltaTransport:
    """One rank of a bridge; of any `every` syncs in a row with one peer, at least one is full. `counts` are those that
    were sent, "full" or as a "delta", one for each peer, and the "bytes" that deltas had of the "whole" ones."""

    def __init__(self, crossing: Crossing, every: int) -> None:
        self._crossing = crossing
        self._post = Post()
        self._chain = Chain(every)
        self._kept: dict[int, _Kept] = {}
        self.counts: Counter[str] = Counter()

    def send(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        crossing, group = self._crossing, self._crossing.group(version)
        by_peer = parcels_by_peer(self._post, crossing, copies, parts, group.device)
        words: list[tuple[int, list[Parcel], Tensor, Work]] = []
        for peer, own in by_peer.items():
            word = torch.empty(2, dtype=torch.int64)
            with crossing.naming(version, peer, HEADER):
                words.append((peer, own, word, group.receive(word, peer, _HELD)))
        total, pending = 0, []
        for peer, own, word, work in words:
            crossing.wait(work, version, peer, "the version that it holds")
            messages = self._encoded(version, peer, own, word)
            total += sum(message.nbytes for _, message in messages)
            for tag, (what, message) in enumerate(messages, _HEADERS):
                with crossing.naming(version, peer, what):
                    pending.append((group.send(message, peer, tag), peer, what, message))
        for work, peer, what, _ in pending:
            crossing.wait(work, version, peer, what)
        for peer, own in by_peer.items():
            self._keep(version, peer, own)
        return total

    def receive(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        crossing, group = self._crossing, self._crossing.group(version)
        by_peer = parcels_by_peer(self._post, crossing, copies, parts, group.device)
        asked: list[tuple[int, Tensor, Work]] = []
        for peer, own in by_peer.items():
            kept = self._kept.setdefault(peer, _Kept([torch.empty_like(parcel.buffer) for parcel in own]))
            answer = torch.empty(len(_ANSWERED), dtype=torch.int64)
            with crossing.naming(version, peer, HEADER):
                word = group.send(torch.tensor([version, kept.version]), peer, _HELD)
                asked.append((peer, answer, group.receive(answer, peer, _ANSWER)))
            crossing.wait(word, version, peer, HEADER)
        total = 0
        for peer, answer, work in asked:
            crossing.wait(work, version, peer, HEADER)
            own = by_peer[peer]
            crossing.match(answer, _answer(version, int(answer[1]), own), _ANSWERED, peer)
            total += self._receive_from(version, peer, own)
        return total

    def close(self) -> None:
        self._crossing.close()
        self._post.clear()
        self._kept.clear()

    def _encoded(self, version: int, peer: int, own: Sequence[Parcel], word: Tensor) -> list[tuple[str, Tensor]]:
        """The headers and payloads for one peer, after the answer to its word."""
        crossing, group = self._crossing, self._crossing.group(version)
        held = int(word[1])
        predecessor = self._predecessor(version, peer, held)
        self.counts["full" if predecessor == NONE else "delta"] += 1
        with crossing.naming(version, peer, HEADER):
            work = group.send(_answer(version, predecessor, own), peer, _ANSWER)
        crossing.wait(work, version, peer, HEADER)
        crossing.match(word[:1], torch.tensor([version]), _ASKED, peer)
        headers, messages = [], []
        for index, parcel in enumerate(own):
            if parcel.staged:
                pack(parcel)
            before = None if predecessor == NONE else self._kept[peer].buffers[index]
            delta = encode(before, parcel.buffer, _itemsize(parcel), version, predecessor)
            headers.append(delta.header())
            if predecessor != NONE:
                self.counts.update(bytes=delta.payload.nbytes, whole=parcel.buffer.nbytes)
            messages.append((named(parcel.copies), delta.payload))
        return [(HEADER, torch.frombuffer(bytearray(b"".join(headers)), dtype=torch.uint8)), *messages]

    def _predecessor(self, version: int, peer: int, held: int) -> int:
        """From which version to send: that which was sent last, if the peer has it."""
        name, kept = self._crossing.ends.name(peer), self._kept.get(peer)
        if kept is not None and NONE != kept.version == held:
            self._chain.acknowledge(name, held)
        else:
            self._chain.forget(name)
        return self._chain.send(name, version, [held])

    def _keep(self, version: int, peer: int, own: Sequence[Parcel]) -> None:
        if peer not in self._kept:
            self._kept[peer] = _Kept([torch.empty_like(parcel.buffer) for parcel in own])
        kept = self._kept[peer]
        kept.version = NONE
        for parcel, buffer in zip(own, kept.buffers, strict=True):
            buffer.copy_(parcel.buffer)
        kept.version = version

    def _receive_from(self, version: int, peer: int, own: Sequence[Parcel]) -> int:
        """Bring the kept bytes to `version`, and the parcels' places with them; the bytes received."""
        crossing, group, kept = self._crossing, self._crossing.group(version), self._kept[peer]
        held, kept.version = kept.version, NONE
        packed = torch.empty(len(own) * HEADER_BYTES, dtype=torch.uint8)
        with crossing.naming(version, peer, HEADER):
            work = group.receive(packed, peer, _HEADERS)
        crossing.wait(work, version, peer, HEADER)
        pending = []
        for index, (parcel, buffer) in enumerate(zip(own, kept.buffers, strict=True)):
            header = bytes(packed[index * HEADER_BYTES : (index + 1) * HEADER_BYTES].numpy())
            with crossing.naming(version, peer, named(parcel.copies)):
                size = payload_bytes(header, buffer.nbytes)
                payload = buffer if size == buffer.nbytes else torch.empty(size, dtype=torch.uint8)
                pending.append((group.receive(payload, peer, _PAYLOADS + index), header, payload, parcel, buffer))
        for work, header, payload, parcel, buffer in pending:
            crossing.wait(work, version, peer, named(parcel.copies))
            with crossing.naming(version, peer, named(parcel.copies)):
                decode(parse(header, payload), buffer, held)
            parcel.buffer.copy_(buffer)
            if parcel.staged:
                unpack(parcel)
        kept.version = version
        return packed.nbytes + sum(payload.nbytes for _, _, payload, _, _ in pending)


def _answer(version: int, predecessor: int, own: Sequence[Parcel]) -> Tensor:
    return torch.tensor([version, predecessor, len(own), sum(parcel.buffer.nbytes for parcel in own)])


def _itemsize(parcel: Parcel) -> int:
    """The words by which to compare: the smallest elements in it, 4 bytes at most."""
    return min(4, *(piece.dtype.itemsize for piece in parcel.pieces))
