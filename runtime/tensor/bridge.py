"""Two replicas joined by a process group of their own, point to point: no other rank waits for it.

A sync to one peer is a header (version, messages, bytes), then the messages of `parcel`. The death of a replica breaks
its own bridge only. A bridge that failed once stays broken: a new one is made in milliseconds.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from penstock.runtime.tensor.arena import Parts
from penstock.runtime.tensor.digest import ProofError
from penstock.runtime.tensor.group import Group, open_group
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.parcel import Parcel, bundle, pack, unpack
from penstock.runtime.tensor.transport import TransportError

Side = Literal["source", "destination"]
Message = tuple[Copy, ...]


@dataclass(frozen=True)
class Bridge:
    """Where two replicas meet: `path` is a file that both can write and that no earlier attempt has used.

    `timeout` bounds, in seconds, making the bridge and each wait for a peer.
    """

    channel: str
    path: Path
    sources: int = 1
    destinations: int = 1
    timeout: float = 60.0
    backend: Literal["gloo", "nccl"] = "gloo"
    interface: str = "lo"

    def open(self, side: Side, rank: int = 0) -> "BridgeTransport":
        """Join as one rank of one side; blocks until all ranks of both have."""
        try:
            group = open_group(
                self.path,
                rank if side == "source" else self.sources + rank,
                self.sources + self.destinations,
                timeout=self.timeout,
                backend=self.backend,
                interface=self.interface,
            )
        except RuntimeError as error:
            ranks = f"{self.sources} source and {self.destinations} destination ranks"
            text = f"{self.channel}: {side} rank {rank}: the bridge of {ranks} is not complete after {self.timeout} s"
            raise TransportError(f"{text}: {_first_line(error)}") from error
        return BridgeTransport(self, side, group)


class BridgeTransport:
    """One rank of a bridge. See the module for what is on the wire."""

    def __init__(self, bridge: Bridge, side: Side, group: Group) -> None:
        self._bridge = bridge
        self._side = side
        self._group: Group | None = group
        self._staging: dict[tuple[int, int], Tensor] = {}
        self._fault = ""

    def send(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        group, total = self._open(version), 0
        pending: list[tuple[Work, int, Message]] = []
        for peer, parcels in self._by_peer(group, copies, parts):
            with self._naming(version, peer, ()):
                pending.append((group.send(_header(version, parcels, group.device), peer, 0), peer, ()))
            for tag, parcel in enumerate(parcels, 1):
                with self._naming(version, peer, parcel.copies):
                    if parcel.staged:
                        pack(parcel)
                    pending.append((group.send(parcel.buffer, peer, tag), peer, parcel.copies))
                total += parcel.buffer.nbytes
        for work, peer, message in pending:
            with self._naming(version, peer, message):
                group.wait(work)
        return total

    def receive(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        group, total = self._open(version), 0
        pending: list[tuple[Work, int, Parcel]] = []
        for peer, parcels in self._by_peer(group, copies, parts):
            self._receive_header(group, version, peer, parcels)
            for tag, parcel in enumerate(parcels, 1):
                with self._naming(version, peer, parcel.copies):
                    pending.append((group.receive(parcel.buffer, peer, tag), peer, parcel))
                total += parcel.buffer.nbytes
        for work, peer, parcel in pending:
            with self._naming(version, peer, parcel.copies):
                group.wait(work)
            if parcel.staged:
                unpack(parcel)
        return total

    def close(self) -> None:
        self._group = None
        self._staging.clear()
        self._bridge.path.unlink(missing_ok=True)

    def _open(self, version: int) -> Group:
        if self._group is None or self._fault:
            reason = self._fault or "closed"
            raise TransportError(f"{self._bridge.channel}: version {version}: the bridge is broken: {reason}")
        return self._group

    def _receive_header(self, group: Group, version: int, peer: int, parcels: Sequence[Parcel]) -> None:
        """The proof would find a stale or partial version too, but could not say what it is."""
        needed = _header(version, parcels, group.device)
        given = torch.empty_like(needed)
        with self._naming(version, peer, ()):
            group.wait(group.receive(given, peer, 0))
        if given.tolist() != needed.tolist():
            names = "version", "messages", "bytes"
            facts = [dict(zip(names, header.tolist(), strict=True)) for header in (given, needed)]
            self._fault = f"{self._peer(peer)} sent {facts[0]}, needed {facts[1]}"
            raise ProofError(f"{self._bridge.channel}: {self._fault}")

    def _by_peer(self, group: Group, copies: Sequence[Copy], parts: Parts) -> Iterator[tuple[int, list[Parcel]]]:
        """Peers by their rank in the group, each with its messages: the same on both sides of a pair."""
        by_peer: dict[int, list[Copy]] = {}
        for copy in copies:
            peer = self._bridge.sources + copy.destination if self._side == "source" else copy.source
            by_peer.setdefault(peer, []).append(copy)
        for peer, own in by_peer.items():
            pieces = [parts[copy.tensor].cut(copy.box) for copy in own]
            groups = enumerate(bundle([piece.nbytes for piece in pieces]), 1)
            yield peer, [self._parcel(group, (peer, tag), own[span], pieces[span]) for tag, span in groups]

    def _parcel(self, group: Group, key: tuple[int, int], copies: Sequence[Copy], pieces: Sequence[Tensor]) -> Parcel:
        """A single contiguous piece travels from and to where it lies, if the group can read it there. Others have a
        staging buffer, made once, since the plan is the same at each sync.
        """
        first = pieces[0]
        if len(pieces) == 1 and first.is_contiguous() and first.device.type == group.device.type:
            return Parcel(tuple(copies), pieces, first.view(-1).view(torch.uint8), False)
        nbytes = sum(piece.nbytes for piece in pieces)
        buffer = self._staging.get(key)
        if buffer is None or buffer.nbytes != nbytes:
            pinned = first.is_cuda and group.device.type == "cpu"
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=group.device, pin_memory=pinned)
            self._staging[key] = buffer
        return Parcel(tuple(copies), pieces, buffer, True)

    def _peer(self, peer: int) -> str:
        sources = self._bridge.sources
        return f"source rank {peer}" if peer < sources else f"destination rank {peer - sources}"

    @contextmanager
    def _naming(self, version: int, peer: int, message: Message) -> Iterator[None]:
        """Errors of the process group say neither what was moved nor whose fault it is."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            verb = "to" if self._side == "source" else "from"
            after = f"after {time.monotonic() - started:.1f} s"
            self._fault = f"version {version}: {_named(message)} {verb} {self._peer(peer)} failed {after}: "
            self._fault += _first_line(error)
            raise TransportError(f"{self._bridge.channel}: {self._fault}") from error


def _header(version: int, parcels: Sequence[Parcel], device: torch.device) -> Tensor:
    nbytes = sum(parcel.buffer.nbytes for parcel in parcels)
    return torch.tensor([version, len(parcels), nbytes], dtype=torch.int64, device=device)


def _named(message: Message) -> str:
    if not message:
        return "the header"
    more = f" and {len(message) - 1} more tensors" if len(message) > 1 else ""
    return f"{message[0].tensor} {message[0].box}{more}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
