"""Weights as messages over a bridge: gloo or NCCL, point to point.

A sync to one peer is a header (version, messages, bytes), then the messages of `parcel`, which are made once for each
buffer that takes part and used again at each sync.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from penstock.runtime.tensor.arena import Parts
from penstock.runtime.tensor.crossing import HEADER, Crossing, named
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.parcel import Parcel, Post, pack, parcels, unpack

_FIELDS = "version", "messages", "bytes"


class MessageTransport:
    """One rank of a bridge. See the module for what is on the wire."""

    def __init__(self, crossing: Crossing, path: Path) -> None:
        self._crossing = crossing
        self._path = path
        self._post = Post()

    def send(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        crossing, group = self._crossing, self._crossing.group(version)
        pending: list[tuple[Work, int, str]] = []
        by_peer = parcels_by_peer(self._post, crossing, copies, parts, group.device)
        for peer, own in by_peer.items():
            with crossing.naming(version, peer, HEADER):
                pending.append((group.send(_header(version, own, group.device), peer, 0), peer, HEADER))
            for tag, parcel in enumerate(own, 1):
                with crossing.naming(version, peer, named(parcel.copies)):
                    if parcel.staged:
                        pack(parcel)
                    pending.append((group.send(parcel.buffer, peer, tag), peer, named(parcel.copies)))
        for work, peer, what in pending:
            crossing.wait(work, version, peer, what)
        return _nbytes(by_peer.values())

    def receive(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        crossing, group = self._crossing, self._crossing.group(version)
        by_peer = parcels_by_peer(self._post, crossing, copies, parts, group.device)
        headers: list[tuple[int, Tensor, Work]] = []
        for peer in by_peer:
            header = torch.empty(3, dtype=torch.int64, device=group.device)
            with crossing.naming(version, peer, HEADER):
                headers.append((peer, header, group.receive(header, peer, 0)))
        pending: list[tuple[Work, int, Parcel]] = []
        for peer, header, work in headers:
            crossing.wait(work, version, peer, HEADER)
            crossing.match(header, _header(version, by_peer[peer], group.device), _FIELDS, peer)
            for tag, parcel in enumerate(by_peer[peer], 1):
                with crossing.naming(version, peer, named(parcel.copies)):
                    pending.append((group.receive(parcel.buffer, peer, tag), peer, parcel))
        for work, peer, parcel in pending:
            crossing.wait(work, version, peer, named(parcel.copies))
            if parcel.staged:
                unpack(parcel)
        return _nbytes(by_peer.values())

    def close(self) -> None:
        self._crossing.close()
        self._post.clear()
        self._path.unlink(missing_ok=True)


def parcels_by_peer(
    post: Post, crossing: Crossing, copies: Sequence[Copy], parts: Parts, device: torch.device
) -> dict[int, list[Parcel]]:
    """Each peer's messages, the same on both sides of a pair."""
    return post.once(
        copies,
        parts,
        lambda staging: {
            peer: parcels(own, parts, device, staging.setdefault(peer, {}))
            for peer, own in crossing.by_peer(copies).items()
        },
    )


def _header(version: int, own: Sequence[Parcel], device: torch.device) -> Tensor:
    return torch.tensor([version, len(own), _nbytes([own])], dtype=torch.int64, device=device)


def _nbytes(parcels_of_peers: object) -> int:
    return sum(parcel.buffer.nbytes for own in parcels_of_peers for parcel in own)  # type: ignore[attr-defined]
