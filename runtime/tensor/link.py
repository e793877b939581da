"""A link between two replicas: `ReplicaLink.open` joins their ranks in a process group of their own, point to point,
and chooses the transport of its weights. No other rank waits for it.

The death of a replica breaks only its own links. A link that failed once stays broken: a new one is made in
milliseconds. All ranks use the same transport, which `choose_transport` chooses by what all of them can use. Weights
are written directly into the receivers' memory ("shm", "cuda_ipc") if all ranks are on one host and can do so. Between
GPUs they go by NCCL ("nccl"). Otherwise they go as messages through the hosts' memory ("messages"): all bytes or, with
`delta`, what changed.

Each rank sends what it can use (`RankFacts`). The first rank answers with the transport, or with the rank that cannot
use the one that was asked for.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import is_nccl_available

from penstock.runtime.cluster.endpoints import LOOPBACK
from penstock.runtime.tensor.cuda_ipc import OpenedMemory, visible_devices
from penstock.runtime.tensor.delta import DeltaTransport
from penstock.runtime.tensor.nccl import NcclCarrier, NcclGroup
from penstock.runtime.tensor.one_sided import MappedMemory, MemoryKind, OneSidedTransport, WritableMemory
from penstock.runtime.tensor.process_group import Connection, Side, Transport, TransportError
from penstock.runtime.tensor.send_recv import MessageTransport
from penstock.runtime.tensor.shm import SHM

Transported = Literal[MemoryKind, "nccl", "messages"]
TransportChoice = Literal["auto", Transported]
# In the order of preference.
TRANSPORTED: tuple[Transported, ...] = ("shm", "cuda_ipc", "nccl", "messages")
TRANSPORTS: tuple[TransportChoice, ...] = ("auto", *TRANSPORTED)
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaLink:
    """A link from `sources` to `destinations` ranks, which rendezvous at `store`: all of them share it, and no other
    group has used it. This rank listens at `address`, where the other ranks reach its host.

    `timeout` is the seconds for opening the link, and for each wait for a peer. With `delta` n, messages have what
    changed, and at least each n-th sync is full; these messages go through the hosts' memory. Directly written memory
    ignores `delta`. `transport` asks for one of `TRANSPORTS`; a link whose ranks cannot all use it does not open. With
    `direct` false, weights come as messages, also by NCCL, whatever the ranks can use. `warn` is called if ranks on
    GPUs cannot use NCCL.
    """

    channel: str
    store: Store
    sources: int = 1
    destinations: int = 1
    timeout: float = 60.0
    address: str = LOOPBACK
    delta: int = 0
    transport: TransportChoice = "auto"
    direct: bool = True
    warn: Callable[[str], object] = _log.warning

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            given = f"transport {self.transport!r}"
            raise ValueError(f"{self.channel}: given {given}, needed one of {', '.join(TRANSPORTS)}")
        if self.delta < 0 or (self.delta and self.transport == "nccl"):
            needed = (
                "0 or more" if self.delta < 0 else "0, or auto or messages: deltas are made and applied on the host"
            )
            raise ValueError(f"{self.channel}: given delta={self.delta} over {self.transport}, needed {needed}")
        if not self.direct and self.transport in MEMORY_KINDS:
            raise ValueError(f"{self.channel}: given transport {self.transport!r}, needed auto, nccl or messages here")

    def open(
        self, side: Side, rank: int = 0, memory: WritableMemory | None = None, device: torch.device | str = "cpu"
    ) -> Transport:
        """Join as one rank of one side; blocks until all ranks of both sides have joined. `memory` is that of a
        destination's buffers, which must exist already; a source gives none. `device` has the rank's weights.
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
            address=self.address,
        )
        device = torch.device(device)
        facts = RankFacts.here(side, memory if self.direct else None, device, self.direct)
        kind = agree_on_transport(connection, facts, self.transport, self.delta, self.warn)
        if kind == "nccl":
            group = NcclGroup(connection, self.store, device)
            return MessageTransport(connection, NcclCarrier(connection, group, self.store))
        if kind != "messages":
            # Also on a receiver, which opens nothing, so that both sides close in the same way.
            mapped = OpenedMemory(self.timeout) if kind == "cuda_ipc" else MappedMemory()
            return OneSidedTransport(connection, memory, mapped)
        return DeltaTransport(connection, self.delta) if self.delta else MessageTransport(connection)


class RankFacts(NamedTuple):
    """What a rank of a link can use, as numbers.

    `host` is equal on ranks that see the same shared memory. `devices` is equal on ranks that see the same GPUs with
    the same indices. `can` has a bit for each of the `MEMORY_KINDS` that a destination's memory is of, or that a source
    can write to from the device of its weights. `gpu` identifies the GPU of its weights, as NCCL does; 0 on a CPU.
    `nccl` is the version of NCCL here; 0 without.
    """

    host: int
    devices: int
    can: int
    gpu: int
    nccl: int

    @staticmethod
    def here(side: Side, memory: WritableMemory | None, device: torch.device, direct: bool = True) -> "RankFacts":
        """The facts of this rank; `memory` is a destination's."""
        if side == "destination":
            can: Sequence[MemoryKind] = (memory.kind,) if memory is not None and memory.shared else ()
        else:
            can = MEMORY_KINDS if device.type == "cuda" else ("shm",)
        devices = visible_devices() if "cuda_ipc" in can else 0
        bits = sum(1 << MEMORY_KINDS.index(kind) for kind in can) if direct else 0
        if device.type != "cuda":
            return RankFacts(_host(), devices, bits, 0, 0)
        # NCCL refuses two ranks on one GPU of one host, and distinguishes hosts by this name, if it is set.
        card = f"{os.environ.get('NCCL_HOSTID', '')} {torch.cuda.get_device_properties(device).uuid}"
        return RankFacts(_host(), devices, bits, _number(card), nccl_version())


def nccl_version() -> int:
    """The version as one number; 0 if torch is built without NCCL."""
    if not is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 1_000_000 + minor * 1000 + patch)


class Choice(NamedTuple):
    """A transport. If others had to be refused: the first rank (`culprit`) that cannot use the last one refused, why,
    and the `other` rank that it conflicts with."""

    transport: Transported | None
    culprit: int = 0
    reason: int = 0
    other: int = 0


_LACKS_MEMORY, _OTHER_HOST, _OTHER_GPUS, _NO_GPU, _NO_NCCL, _SAME_GPU, _OTHER_NCCL = range(1, 8)
_REASONS = {
    _OTHER_HOST: "is on another host than {other}",
    _OTHER_GPUS: "sees other GPUs than {other}",
    _NO_GPU: "has its weights on no GPU",
    _NO_NCCL: "has a torch that is built without NCCL",
    _SAME_GPU: "is on the GPU of {other}, and NCCL joins no two ranks on one",
    _OTHER_NCCL: "has another version of NCCL than {other}",
}
_LACKS = {
    "shm": ("has no arena in shared memory", ""),
    "cuda_ipc": ("has no arena in a GPU's memory that others can write", "has its weights on no GPU"),
}


def choose_transport(ranks: Sequence[RankFacts], asked: TransportChoice, delta: int = 0) -> Choice:
    """The transport between these ranks; None if they cannot use the one that was asked for. Pure.

    Direct writes if all ranks can; else NCCL if all GPUs are different, unless deltas are wanted; else messages through
    the hosts' memory.
    """
    refused = Choice(None)
    for kind in TRANSPORTED if asked == "auto" else (asked,):
        if kind == "messages":
            return refused._replace(transport="messages")
        if kind == "nccl" and delta:
            continue
        found = _why_no_nccl(ranks) if kind == "nccl" else _why_no_memory(ranks, kind)
        if found is None:
            return Choice(kind)
        refused = found
    return refused


def _why_no_memory(ranks: Sequence[RankFacts], kind: MemoryKind) -> Choice | None:
    first, bit = ranks[0], MEMORY_KINDS.index(kind)
    for place, rank in enumerate(ranks):
        if rank.host != first.host:
            return Choice(None, place, _OTHER_HOST)
        if not rank.can >> bit & 1:
            return Choice(None, place, _LACKS_MEMORY)
        # A GPU's block is named by the GPU's index: both sides must see the same indices.
        if kind == "cuda_ipc" and rank.devices != first.devices:
            return Choice(None, place, _OTHER_GPUS)
    return None


def _why_no_nccl(ranks: Sequence[RankFacts]) -> Choice | None:
    seen: dict[int, int] = {}
    for place, rank in enumerate(ranks):
        if not rank.gpu:
            return Choice(None, place, _NO_GPU)
        if not rank.nccl:
            return Choice(None, place, _NO_NCCL)
        if rank.gpu in seen:
            return Choice(None, place, _SAME_GPU, seen[rank.gpu])
        if rank.nccl != ranks[0].nccl:
            return Choice(None, place, _OTHER_NCCL)
        seen[rank.gpu] = place
    return None


def agree_on_transport(
    connection: Connection, own: RankFacts, asked: TransportChoice, delta: int, warn: Callable[[str], object]
) -> Transported:
    """The transport of a link, equal on all its ranks. All must call this with the same `asked` and `delta`.

    Raises TransportError on all of them if one cannot use the transport that was asked for.
    """

    def answer(said: Sequence[Tensor]) -> Tensor:
        found = choose_transport([RankFacts(*row.tolist()) for row in said], asked, delta)
        number = -1 if found.transport is None else TRANSPORTED.index(found.transport)
        return torch.tensor([number, found.culprit, found.reason, found.other, 0])

    number, culprit, reason, other, _ = connection.fold(torch.tensor(own), "the choice of a transport", answer).tolist()
    names = connection.names
    why = ""
    if reason:
        lacks = _LACKS.get(asked, ("", ""))[culprit < connection.sources]
        why = f"{names[culprit]} {_REASONS.get(reason, lacks).format(other=names[other])}"
    if number < 0:
        raise TransportError(f"{connection.channel}: given the transport {asked}, needed auto or messages: {why}")
    kind: Transported = TRANSPORTED[int(number)]
    if kind == "messages" and reason in (_NO_NCCL, _SAME_GPU, _OTHER_NCCL) and connection.rank == 0:
        warn(f"{connection.channel}: {why}; weights go as messages through the host's memory, which is slower")
    return kind


def _host() -> int:
    """A number that is equal in processes that see the same shared memory: same boot, and same `/dev/shm` mounted."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return _number(f"{boot}\n{os.stat(SHM).st_dev}")
    except OSError:
        # Without these facts, assume that no other process shares memory with this one.
        return _number(f"alone\n{os.getpid()}\n{os.urandom(8).hex()}")


def _number(facts: str) -> int:
    """A hash of a text, never 0."""
    return int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=7).digest(), "little") | 1
