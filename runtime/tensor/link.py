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
from penstock.runtime.tensor.process_group import Connection, Side, Transport, TransportError
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
        names = [f"source rank {number}" for number in range(self.sources)]
        names += [f"destination rank {number}" for number in range(self.destinations)]
        connection = Connection(
            self.channel,
            names,
            self.store,
            rank if side == "source" else self.sources + rank,
            sources=self.sources,
            timeout=self.timeout,
            backend=self.backend,
            address=self.address,
        )
        if self.backend == "gloo":
            kind = agree_on_transport(connection, writable_kinds(side, memory, device), self.transport)
            if kind is not None:
                # Also on a receiver, which opens nothing: both ends then close in the same way.
                mapped = OpenedMemory(self.timeout) if kind == "cuda_ipc" else MappedMemory()
                return OneSidedTransport(connection, memory, mapped)
        return DeltaTransport(connection, self.delta) if self.delta else MessageTransport(connection)


def writable_kinds(side: str, memory: WritableMemory | None, device: torch.device | str) -> tuple[MemoryKind, ...]:
    """The memory that a destination with this `memory` can be written in, or a source with its weights on `device` can
    write."""
    if side == "destination":
        return (memory.kind,) if memory is not None and memory.shared else ()
    return MEMORY_KINDS if torch.device(device).type == "cuda" else ("shm",)


_HOST, _DEVICES, _CAN = range(3)  # what a rank says
_OTHER_HOST, _OTHER_GPUS, _LACKS_MEMORY = range(3)  # why a rank cannot use a transport
_REASONS = ("is on another host than {first}", "sees other GPUs than {first}", "{lacks}")
_LACKS = {
    "shm": ("has no arena in shared memory", ""),
    "cuda_ipc": ("has no arena in a GPU's memory that others can write", "has its weights on no GPU"),
}


def agree_on_transport(connection: Connection, can: Sequence[MemoryKind], choice: TransportChoice) -> MemoryKind | None:
    """The memory that is written over a link, equal on all its ranks; None for messages.

    Raises TransportError on all of them if one cannot use the transport that is asked for.
    """
    devices = visible_devices() if "cuda_ipc" in can else 0
    own = torch.tensor([_host(), devices, sum(1 << MEMORY_KINDS.index(kind) for kind in can)])
    verdict = connection.fold(
        own, "the choice of a transport", lambda said: torch.tensor(_verdict([row.tolist() for row in said], choice))
    )
    kind, culprit, reason = map(int, verdict)
    if kind >= 0:
        return MEMORY_KINDS[kind]
    if choice in ("auto", "messages"):
        return None
    names = connection.names
    lacks = _LACKS[choice][culprit < connection.sources]
    why = f"{names[culprit]} {_REASONS[reason].format(first=names[0], lacks=lacks)}"
    raise TransportError(f"{connection.channel}: given the transport {choice}, needed auto or messages: {why}")


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
        # Without these facts no other process is known to share memory with this one.
        facts = f"alone\n{os.getpid()}\n{os.urandom(8).hex()}"
    return int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=7).digest(), "little")
