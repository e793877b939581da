"""Weights put straight into the receivers' shadows, which lie in shared memory or on a GPU of one host. The receiver
copies nothing.

A sync with one source: the receiver says which shadow is free (version, shadow, copies, bytes of the map), and where
each piece goes in it, the first time that it names this shadow (the map: JSON). The source writes, and says that it
has (version, copies, bytes). So nothing is ever written into a shadow that its owner has not offered, or that its GPU
is still reading, and nothing is called written that a GPU has yet to write.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.process_group import HEADER, PeerConnection, TransportError
from penstock.runtime.tensor.shm import SegmentError
from penstock.runtime.tensor.shm_transport import PeerMemory, Place, WritableMemory

_OFFER, _MAP, _DONE = range(3)  # tags
_OFFERED = "version", "shadow", "copies", "map bytes"
_WRITTEN = "version", "copies", "bytes"
_KEPT = 256  # peers times shadows times buffers whose views are kept


class OneSidedTransport:
    """One rank of a bridge whose receivers' arenas lie where senders can write them; `memory` is a receiver's, `mapped`
    a sender's view of all of them.
    """

    def __init__(self, connection: PeerConnection, memory: WritableMemory | None, mapped: PeerMemory) -> None:
        self._connection = connection
        self._memory = memory
        self._mapped = mapped
        self._places: dict[tuple[int, int], list[tuple[Place, list[int]]]] = {}  # by peer and shadow, as offered
        self._pairs: list[tuple[Sequence[Copy], Shards, int, int, list[tuple[Tensor, Tensor]]]] = []
        self._offered: list[tuple[Shards, set[int]]] = []  # shadows by number, and the peers that have their map

    def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        connection, group = self._connection, self._connection.group(version)
        offers: list[tuple[int, tuple[Copy, ...], Tensor, Work]] = []
        for peer, own in connection.by_peer(copies).items():
            offer = torch.empty(len(_OFFERED), dtype=torch.int64)
            with connection.naming(version, peer, HEADER):
                offers.append((peer, own, offer, group.receive(offer, peer, _OFFER)))
        total, answers = 0, []
        for peer, own, offer, work in offers:
            connection.wait(work, version, peer, "the offer of a shadow")
            nbytes = self._write(version, peer, own, copies, parts, offer)
            total += nbytes
            answer = torch.tensor([version, len(own), nbytes])
            with connection.naming(version, peer, HEADER):
                answers.append((group.send(answer, peer, _DONE), peer, answer))
        for work, peer, _ in answers:
            connection.wait(work, version, peer, HEADER)
        return total

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        connection, group = self._connection, self._connection.group(version)
        self._settle(version)
        pending: list[tuple[Work, int, Tensor, Tensor]] = []
        sent: list[tuple[Work, int, object]] = []
        for peer, own in connection.by_peer(copies).items():
            offer, where = self._offer(version, peer, own, parts)
            with connection.naming(version, peer, HEADER):
                sent.append((group.send(offer, peer, _OFFER), peer, offer))
                if len(where):
                    sent.append((group.send(where, peer, _MAP), peer, where))
                nbytes = sum(parts[copy.tensor].cut(copy.region).nbytes for copy in own)
                done = torch.empty(len(_WRITTEN), dtype=torch.int64)
                pending.append(
                    (group.receive(done, peer, _DONE), peer, done, torch.tensor([version, len(own), nbytes]))
                )
        for work, peer, _ in sent:
            connection.wait(work, version, peer, "the offer of a shadow")
        for work, peer, done, needed in pending:
            connection.wait(work, version, peer, "the word that all is written")
            connection.match(done, needed, _WRITTEN, peer)
        return int(sum(int(needed[2]) for _, _, _, needed in pending))

    def close(self) -> None:
        self._connection.close()
        self._pairs.clear()
        self._mapped.close()

    def _settle(self, version: int) -> None:
        assert self._memory is not None, "a receiver's transport has its memory"
        try:
            self._memory.settle()
        except RuntimeError as error:
            raise TransportError(
                f"{self._connection.ends.channel}: version {version}: no shadow is free: {error}"
            ) from error

    def _offer(self, version: int, peer: int, own: Sequence[Copy], parts: Shards) -> tuple[Tensor, Tensor]:
        """The header, and the map unless this peer has it: [[segment, byte, strides of the piece], …]."""
        assert self._memory is not None, "a receiver's transport has its memory"
        number = next((k for k, (known, _) in enumerate(self._offered) if known is parts), len(self._offered))
        if number == len(self._offered):
            self._offered.append((parts, set()))
        where = b""
        if peer not in self._offered[number][1]:
            pieces = [parts[copy.tensor].cut(copy.region) for copy in own]
            where = json.dumps([[*self._memory.place(piece), list(piece.stride())] for piece in pieces]).encode()
            self._offered[number][1].add(peer)
        header = torch.tensor([version, number, len(own), len(where)])
        return header, torch.frombuffer(bytearray(where), dtype=torch.uint8) if where else torch.empty(0)

    def _write(
        self, version: int, peer: int, own: Sequence[Copy], copies: Sequence[Copy], parts: Shards, offer: Tensor
    ) -> int:
        """Copy all pieces for one peer into the shadow that it offers; the bytes."""
        connection = self._connection
        number, map_bytes = int(offer[1]), int(offer[3])
        if map_bytes:
            self._places[peer, number] = self._receive_map(version, peer, map_bytes)
        needed = torch.tensor([version, number, len(own), map_bytes])
        if offer.tolist() != needed.tolist():  # let the receiver see what is sent here, and fail too
            word = torch.tensor([version, 0, 0])
            with connection.naming(version, peer, HEADER):
                connection.wait(connection.group(version).send(word, peer, _DONE), version, peer, HEADER)
        connection.match(offer, needed, _OFFERED, peer)
        pairs = self._paired(peer, number, own, copies, parts)
        with connection.naming(version, peer, "the writing of the shadow"):
            self._mapped.write(pairs)
        return sum(piece.nbytes for _, piece in pairs)

    def _receive_map(self, version: int, peer: int, nbytes: int) -> list[tuple[Place, list[int]]]:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        with self._connection.naming(version, peer, HEADER):
            work = self._connection.group(version).receive(buffer, peer, _MAP)
        self._connection.wait(work, version, peer, "the map of a shadow")
        data: list[Any] = json.loads(bytes(buffer.numpy()))
        return [(Place(segment, offset), strides) for segment, offset, strides in data]

    def _paired(
        self, peer: int, number: int, own: Sequence[Copy], copies: Sequence[Copy], parts: Shards
    ) -> list[tuple[Tensor, Tensor]]:
        """Each piece with its place, as views: made once for each of our buffers and each shadow."""
        for known_copies, known_parts, known_peer, known_number, pairs in self._pairs:
            if known_copies is copies and known_parts is parts and (known_peer, known_number) == (peer, number):
                return pairs
        places = self._places[peer, number]
        if len(places) != len(own):
            name = self._connection.ends.name(peer)
            raise TransportError(
                f"{self._connection.ends.channel}: {name} gave {len(places)} places for {len(own)} copies"
            )
        pieces = [parts[copy.tensor].cut(copy.region) for copy in own]
        try:
            views = [self._mapped.view(at, piece, strides) for piece, (at, strides) in zip(pieces, places, strict=True)]
        except SegmentError as error:
            raise TransportError(
                f"{self._connection.ends.channel}: {self._connection.ends.name(peer)}: {error}"
            ) from error
        pairs = list(zip(views, pieces, strict=True))
        self._pairs = [*self._pairs[1 - _KEPT :], (copies, parts, peer, number, pairs)]
        return pairs
