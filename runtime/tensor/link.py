"""A link between two replicas: `ReplicaLink.open` joins their ranks in a process group of their own, point to point,
and chooses the transport on which weights go over it. No other rank waits for it.

The death of a replica breaks its own links only. A link that failed once stays broken: a new one is made in
milliseconds. All ranks use the same transport: weights are written straight into the receivers' memory ("shm",
"cuda_ipc") where every rank is on one host and can do that, and sent as messages otherwise: all bytes, or, with
`delta`, what changed.

To agree, each rank says which host it is on, which GPUs it sees, and which memory it can write or be written in. The
first rank answers with the transport, or with the rank that cannot use the one that was asked for.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch._C._distributed_c10d import Store

from penstock.runtime.cluster.endpoints import LOOPBACK
from penstock.runtime.tensor.cuda_ipc import OpenedMemory, visible_devices
from penstock.runtime.tensor.delta import DeltaTransport
from penstock.runtime.tensor.one_sided import MappedMemory, MemoryKind, OneSidedTransport, WritableMemory
from penstock.runtime.tensor.process_group import (
    AbsentError,
    LinkEnds,
    PeerConnection,
    PeerGroup,
    Side,
    Transport,
    TransportError,
    first_line,
    open_group,
)
from penstock.runtime.tensor.send_recv import MessageTransport
from penstock.runtime.tensor.shm import SHM

TransportChoice = Literal["auto", "messages", MemoryKind]
TRANSPORTS: tuple[TransportChoice, ...] = ("auto", "messages", *get_args(MemoryKind))
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
Backend = Literal["gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True)
class ReplicaLink:
    """A link from `sources` to `destinations` ranks, which rendezvous at `store`: all of them share it, and no other
    group has used it. `address` is where the other ranks reach this one's host: it listens there.

    `timeout` bounds, in seconds, opening the link and each wait for a peer. With `delta` n, messages say what changed,
    and at least each n-th sync is full (gloo only); memory that is written directly ignores it. `transport` asks for
    one of `TRANSPORTS` (gloo only); a link whose ranks cannot all use it does not open.
    """

    channel: str
    store: Store
    sources: int = 1
    destinations: int = 1
    timeout: float = 60.0
    backend: Backend = "gloo"
    address: str = LOOPBACK
    delta: int = 0
    transport: TransportChoice = "auto"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"{self.channel}: given backend {self.backend!r}, needed one of {', '.join(BACKENDS)}")
        if self.delta < 0 or (self.delta and self.backend != "gloo"):
            needed = "0 or more" if self.delta < 0 else "0, or gloo"
            raise ValueError(f"{self.channel}: given delta={self.delta} over {self.backend}, needed {needed}")
        choices = TRANSPORTS if self.backend == "gloo" else ("auto", "messages")
        if self.transport not in choices:
            given = f"transport {self.transport!r} over {self.backend}"
            raise ValueError(f"{self.channel}: given {given}, needed one of {', '.join(choices)}")

    def open(
        self, side: Side, rank: int = 0, memory: WritableMemory | None = None, device: torch.device | str = "cpu"
    ) -> Transport:
        """Join as one rank of one side; blocks until all ranks of both have. `memory` is where a destination's arena
        lies, which must be there already; a source gives none, but the `device` of its weights.
        """
        ends = LinkEnds(self.channel, self.sources, self.destinations)
        started = time.monotonic()
        try:
            group = open_group(
                self.store,
                ends.place(side, rank),
                self.sources + self.destinations,
                timeout=self.timeout,
                backend=self.backend,
                address=self.address,
            )
        except RuntimeError as error:
            ranks = f"{self.sources} source and {self.destinations} destination ranks"
            after = f"after {time.monotonic() - started:.1f} s of {self.timeout} s"
            text = f"{self.channel}: {side} rank {rank}: the link of {ranks} is not complete {after}"
            absent = [*map(ends.name, error.ranks)] if isinstance(error, AbsentError) else []
            why = f"not there: {', '.join(absent)}" if absent else first_line(error)
            raise TransportError(f"{text}: {why}") from error
        connection = PeerConnection(ends, side, group)
        if self.backend == "gloo":
            way = agree_on_transport(
                connection, group, ends.place(side, rank), writable_kinds(side, memory, device), self.transport
            )
            if way is not None:
                mapped = OpenedMemory(self.timeout) if way == "cuda_ipc" else MappedMemory()
                return OneSidedTransport(connection, memory, mapped)
        return DeltaTransport(connection, self.delta) if self.delta else MessageTransport(connection)


def writable_kinds(side: str, memory: WritableMemory | None, device: torch.device | str) -> tuple[MemoryKind, ...]:
    """The memory that a destination with this `memory` can be written in, or a source with its weights on `device` can
    write."""
    if side == "destination":
        return (memory.kind,) if memory is not None and memory.shared else ()
    return MEMORY_KINDS if torch.device(device).type == "cuda" else ("shm",)


_AGREE = 1 << 20  # the tag of these messages: no sync uses it
_HOST, _DEVICES, _CAN = range(3)  # what a rank says
_OTHER_HOST, _OTHER_GPUS, _LACKS_MEMORY = range(3)  # why a rank cannot use a transport
_REASONS = ("is on another host than {first}", "sees other GPUs than {first}", "{lacks}")
_LACKS = {
    "shm": ("has no arena in shared memory", ""),
    "cuda_ipc": ("has no arena in a GPU's memory that others can write", "has its weights on no GPU"),
}


def agree_on_transport(
    connection: PeerConnection, group: PeerGroup, place: int, can: Sequence[MemoryKind], choice: TransportChoice
) -> MemoryKind | None:
    """The memory that is written over a link, equal on all its ranks; None for messages. `place` is this rank's in the
    group.

    Raises TransportError on all of them if one cannot use the transport that is asked for.
    """
    ends = connection.ends
    own = torch.tensor(
        [_host(), visible_devices() if "cuda_ipc" in can else 0, sum(1 << MEMORY_KINDS.index(kind) for kind in can)]
    )
    verdict = torch.zeros(3, dtype=torch.int64)
    what = "the choice of a transport"
    if place:
        connection.wait(group.send(own, 0, _AGREE), -1, 0, what)
        connection.wait(group.receive(verdict, 0, _AGREE), -1, 0, what)
    else:
        said = [own, *(torch.empty_like(own) for _ in range(1, ends.sources + ends.destinations))]
        for peer, work in [(k, group.receive(said[k], k, _AGREE)) for k in range(1, len(said))]:
            connection.wait(work, -1, peer, what)
        verdict[:] = torch.tensor(_verdict([row.tolist() for row in said], choice))
        for peer, work in [(k, group.send(verdict, k, _AGREE)) for k in range(1, len(said))]:
            connection.wait(work, -1, peer, what)
    kind, culprit, reason = map(int, verdict)
    if kind >= 0:
        return MEMORY_KINDS[kind]
    if choice in ("auto", "messages"):
        return None
    lacks = _LACKS[choice][culprit < ends.sources]
    why = f"{ends.name(culprit)} {_REASONS[reason].format(first=ends.name(0), lacks=lacks)}"
    raise TransportError(f"{ends.channel}: given the transport {choice}, needed auto or messages: {why}")


def _verdict(said: Sequence[Sequence[int]], choice: TransportChoice) -> tuple[int, int, int]:
    """The memory by number, -1 for messages; then the first rank that cannot use the last one tried, and why."""
    culprit, reason = 0, 0
    for number, kind in enumerate(MEMORY_KINDS):
        if choice not in ("auto", kind):
            continue
        for place, row in enumerate(said):
            if row[_HOST] != said[0][_HOST]:
                reason = _OTHER_HOST
            elif not row[_CAN] >> number & 1:
                reason = _LACKS_MEMORY
            # A block of a GPU is named by the GPU's number: both sides must count alike.
            elif kind == "cuda_ipc" and row[_DEVICES] != said[0][_DEVICES]:
                reason = _OTHER_GPUS
            else:
                continue
            culprit = place
            break
        else:
            return number, 0, 0
    return -1, culprit, reason


def _host() -> int:
    """Equal for processes that see the same shared memory: of one boot, and with one `/dev/shm` mounted."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        facts = f"{boot}\n{os.stat(SHM).st_dev}"
    except OSError:
        facts = f"alone\n{os.getpid()}\n{os.urandom(8).hex()}"
    return int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=7).digest(), "little")
