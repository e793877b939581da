"""Weights as messages over a bridge: gloo or NCCL, point to point.

A sync to one peer is a header (version, messages, bytes), then the messages of `parcel`, which are made once for each
buffer that takes part and used again at each sync. Those that are packed take turns in `SLOTS` staging buffers. Peers
take turns, too, on both sides in one order: a rank that waits for a message has begun all that come before it, so that
ranks cannot wait for each other in a circle, and what comes from several peers comes in about the order of the plan.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from penstock.runtime.tensor.arena import Parts
from penstock.runtime.tensor.crossing import HEADER, Crossing, named
from penstock.runtime.tensor.group import Group
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.parcel import Parcel, Post, pack, parcels, unpack

SLOTS = 3  # one is packed while another is sent, and a third waits for the peer
_FIELDS = "version", "messages", "bytes"
Tell = Callable[[Sequence[Copy]], None]
"""Told of the copies of one message."""


class _Underway:
    """The messages of one sync that have been begun, and end in that order; of those in one staging buffer, one."""

    def __init__(self, crossing: Crossing, version: int, finish: Callable[[Parcel], None] | None = None) -> None:
        self._crossing = crossing
        self._version = version
        self._finish = finish
        self._begun: dict[tuple[int, int], tuple[Work, int, Parcel]] = {}
        self._numbers = count()

    def begin(self, peer: int, parcel: Parcel, start: Callable[[], Work]) -> None:
        """`start` the message when its staging buffer is free."""
        slot = peer, next(self._numbers) if parcel.slot is None else -1 - parcel.slot
        while slot in self._begun:
            self._end_oldest()
        with self._crossing.naming(self._version, peer, named(parcel.copies)):
            self._begun[slot] = start(), peer, parcel

    def end(self) -> None:
        """Wait for all."""
        while self._begun:
            self._end_oldest()

    def _end_oldest(self) -> None:
        work, peer, parcel = self._begun.pop(next(iter(self._begun)))
        self._crossing.wait(work, self._version, peer, named(parcel.copies))
        if self._finish is not None:
            self._finish(parcel)


class MessageTransport:
    """One rank of a bridge. See the module for what is on the wire."""

    def __init__(self, crossing: Crossing) -> None:
        self._crossing = crossing
        self._post = Post(SLOTS)

    def send(self, version: int, copies: Sequence[Copy], parts: Parts, ready: Tell | None = None) -> int:
        """`ready` waits until the copies of a message may be read; each is asked for just before it is sent."""
        crossing, group = self._crossing, self._crossing.group(version)
        by_peer = parcels_by_peer(self._post, crossing, copies, parts, group.device)
        underway, headers = _Underway(crossing, version), []
        for peer, own in by_peer.items():
            with crossing.naming(version, peer, HEADER):
                header = _header(version, own, group.device)
                headers.append((group.send(header, peer, 0), peer, header))
        for tag, peer, parcel in _in_turn(by_peer):
            if ready is not None:
                ready(parcel.copies)
            underway.begin(peer, parcel, partial(_packed_and_sent, group, parcel, peer, tag))
        for work, peer, _ in headers:
            crossing.wait(work, version, peer, HEADER)
        underway.end()
        return _nbytes(by_peer.values())

    def receive(self, version: int, copies: Sequence[Copy], parts: Parts, arrived: Tell | None = None) -> int:
        """`arrived` is told when the copies of a message are in their places."""
        crossing, group = self._crossing, self._crossing.group(version)
        by_peer = parcels_by_peer(self._post, crossing, copies, parts, group.device)
        headers: list[tuple[int, Tensor, Work]] = []
        for peer in by_peer:
            header = torch.empty(3, dtype=torch.int64, device=group.device)
            with crossing.naming(version, peer, HEADER):
                headers.append((peer, header, group.receive(header, peer, 0)))
        for peer, header, work in headers:
            crossing.wait(work, version, peer, HEADER)
            crossing.match(header, _header(version, by_peer[peer], group.device), _FIELDS, peer)
        underway = _Underway(crossing, version, partial(_unpacked, arrived))
        for tag, peer, parcel in _in_turn(by_peer):
            underway.begin(peer, parcel, partial(group.receive, parcel.buffer, peer, tag))
        underway.end()
        return _nbytes(by_peer.values())

    def close(self) -> None:
        self._crossing.close()
        self._post.clear()


def parcels_by_peer(
    post: Post, crossing: Crossing, copies: Sequence[Copy], parts: Parts, device: torch.device
) -> dict[int, list[Parcel]]:
    """Each peer's messages, the same on both sides of a pair."""
    return post.once(
        copies,
        parts,
        lambda staging: {
            peer: parcels(own, parts, device, staging(peer)) for peer, own in crossing.by_peer(copies).items()
        },
    )


def _in_turn(by_peer: Mapping[int, Sequence[Parcel]]) -> Iterator[tuple[int, int, Parcel]]:
    """(tag, peer, message): the first message of each peer, then the second of each, …"""
    for tag in range(1, 1 + max(map(len, by_peer.values()), default=0)):
        for peer, own in by_peer.items():
            if tag <= len(own):
                yield tag, peer, own[tag - 1]


def _packed_and_sent(group: Group, parcel: Parcel, peer: int, tag: int) -> Work:
    if parcel.staged:
        pack(parcel)
    return group.send(parcel.buffer, peer, tag)


def _unpacked(arrived: Tell | None, parcel: Parcel) -> None:
    if parcel.staged:
        unpack(parcel)
    if arrived is not None:
        arrived(parcel.copies)


def _header(version: int, own: Sequence[Parcel], device: torch.device) -> Tensor:
    return torch.tensor([version, len(own), _nbytes([own])], dtype=torch.int64, device=device)


def _nbytes(parcels_of_peers: object) -> int:
    return sum(parcel.buffer.nbytes for own in parcels_of_peers for parcel in own)  # type: ignore[attr-defined]
