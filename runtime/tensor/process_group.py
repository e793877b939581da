"""torch's process groups, made directly, and the connections that weights use: no global world, no collective, no TCP
store. `PeerGroup` sends and receives; `PeerConnection` is one rank's end of a link between two replicas and names the
peer at fault; `AllReduce` adds over the ranks of one replica; `open_world` makes torch's default group where a
replica's ranks compute together, and `Lockstep` keeps their steps in time. `Transport` is what moves the copies of a
plan; `LocalTransport` does it within one process.

Gloo listens at the one address that it is given. It asks a peer for no key and encrypts nothing: on one host that is
loopback, and beyond it a network must be trusted.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from penstock.runtime.cluster.endpoints import LOOPBACK
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.digest import ChecksumError
from penstock.runtime.tensor.layout import Copy

# The store at which the ranks of a group rendezvous, by the group's name.
OpenStore = Callable[[str], Store]


class PeerGroup:
    """Point-to-point messages between numbered ranks. `device` is where buffers must lie.

    Messages to one peer are told apart by `tag` (gloo) and by their order (NCCL, which has no tags).
    """

    def __init__(self, backend: Any, device: torch.device, timeout: float) -> None:
        self._backend = backend
        self.device = device
        self._timeout = timeout

    def send(self, buffer: Tensor, peer: int, tag: int) -> Work:
        """Begin to send; `buffer` must not change until `wait` returns."""
        work: Work = self._backend.send([buffer], peer, tag)
        return work

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Work:
        work: Work = self._backend.recv([buffer], peer, tag)
        return work

    def wait(self, work: Work) -> None:
        """Until the message is sent or received; without the interpreter's lock. RuntimeError past the deadline.

        Gloo tells of a lost peer at once for messages that have not begun; one that is half way waits for the deadline.
        """
        if self.device.type == "cpu":
            work.wait(timedelta(seconds=self._timeout))
            return
        # NCCL's own wait only orders streams, and its watchdog ends the whole process: so look, with a deadline.
        deadline = time.monotonic() + self._timeout
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out after {self._timeout} s")
            time.sleep(1e-4)
        work.wait()


class AbsentError(RuntimeError):
    """`ranks` have not come to the rendezvous."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        names = ", ".join(map(str, ranks))
        super().__init__(f"ranks {names} have not come" if len(ranks) > 1 else f"rank {names} has not come")
        self.ranks = ranks


def open_group(
    store: Store, rank: int, size: int, *, timeout: float, backend: str = "gloo", address: str = LOOPBACK
) -> PeerGroup:
    """Join as `rank` of `size`; blocks until all have. `store` is where they meet: no other group has used it.

    Gloo listens at `address`, and the others must reach it there. Raises AbsentError past `timeout`, and RuntimeError
    for ranks that do not reach each other and for what this machine lacks.
    """
    if backend == "nccl" and not dist.is_nccl_available():
        raise RuntimeError(f"given nccl, which torch {torch.__version__} here is built without; needed gloo")
    began = time.monotonic()
    call_roll(store, rank, size, timeout)
    rendezvous = PrefixStore(backend, store)
    if backend == "nccl":
        return _open_nccl(rendezvous, rank, size, timeout)
    # For connecting: all have come, and what is left of the time has to do.
    left = max(timeout / 4, timeout - (time.monotonic() - began))
    return PeerGroup(_connect_gloo(rendezvous, rank, size, left, address), torch.device("cpu"), timeout)


def call_roll(store: Store, rank: int, size: int, timeout: float) -> None:
    """Wait until all ranks have come, so that an error can say who has not. Raises AbsentError past `timeout`."""
    here = [f"here/{number}" for number in range(size)]
    store.set(here[rank], "1")
    try:
        store.wait(here, timedelta(seconds=timeout))
    except RuntimeError:
        absent = tuple(number for number, key in enumerate(here) if not store.check([key]))
        if not absent:
            raise
        raise AbsentError(absent) from None


def _connect_gloo(rendezvous: PrefixStore, rank: int, size: int, seconds: float, address: str) -> Any:
    """Gloo itself says neither where it listens nor what a wait was for."""
    gloo: Any = ProcessGroupGloo  # torch's stubs lack the options
    options = gloo._Options()
    options._timeout = timedelta(seconds=seconds)
    try:
        options._devices = [gloo.create_device(hostname=address.strip("[]"))]
    except RuntimeError as error:
        needed = "needed an address of this machine (`address` of its host in the cluster file)"
        raise RuntimeError(f"cannot listen on {address}, {needed}: {error}") from error
    try:
        return gloo(rendezvous, rank, size, options)
    except RuntimeError as error:
        text = f"all have come, but do not reach each other; this one listens on {address}"
        raise RuntimeError(f"{text}: {error}") from error


def _open_nccl(rendezvous: PrefixStore, rank: int, size: int, timeout: float) -> PeerGroup:
    """Ranks on different GPUs, each with its GPU as the current device. NCCL_SOCKET_IFNAME names the interface.
    The tests do not run this: it needs two GPUs.
    """
    from torch.distributed import ProcessGroupNCCL  # absent from CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    nccl = ProcessGroupNCCL(rendezvous, rank, size, options)
    return PeerGroup(nccl, torch.device("cuda", torch.cuda.current_device()), timeout)


class TransportError(RuntimeError):
    """A peer that died, hung or is not there. It names channel, version, peer rank and tensors."""


class Receiving(Protocol):
    """The side of a channel that receives. Used by one thread at a time; every wait has a deadline."""

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        """Write `copies` into `parts`; the bytes received. After an error what is written is undefined."""


class Transport(Receiving, Protocol):
    """One side of a channel to one replica, either of them."""

    def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        """Send `copies` out of `parts`, which must not change meanwhile; the bytes sent."""

    def close(self) -> None:
        """Give up the connection. May be repeated."""


@dataclass
class LocalTransport:
    """Both sides in one process, taking turns: `send` names its parts, `receive` copies out of them."""

    channel: str
    _sent: list[tuple[int, tuple[Copy, ...], Shards]] = field(default_factory=list)

    def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        self._sent.append((version, tuple(copies), parts))
        return sum(parts[c.tensor].cut(c.region).nbytes for c in copies)

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        sent = [entry for entry in self._sent if entry[0] == version]
        self._sent.clear()
        origin = {copy: source for _, sent_copies, source in sent for copy in sent_copies}
        total = 0
        for copy in copies:
            if copy not in origin:
                raise TransportError(f"{self.channel}: version {version}: {copy.tensor} {copy.region} was not sent")
            piece = origin[copy][copy.tensor].cut(copy.region)
            parts[copy.tensor].cut(copy.region).copy_(piece)
            total += piece.nbytes
        return total

    def close(self) -> None:
        self._sent.clear()


Side = Literal["source", "destination"]
HEADER = "the header"


@dataclass(frozen=True)
class LinkEnds:
    """The ranks of a link: source ranks come first in its group."""

    channel: str
    sources: int
    destinations: int

    def place(self, side: Side, rank: int) -> int:
        """The rank in the group."""
        return rank if side == "source" else self.sources + rank

    def name(self, place: int) -> str:
        return f"source rank {place}" if place < self.sources else f"destination rank {place - self.sources}"


class PeerConnection:
    """The group of a link as one rank of one side sees it. After a fault it stays broken: open a new link."""

    def __init__(self, ends: LinkEnds, side: Side, group: PeerGroup) -> None:
        self.ends = ends
        self._side = side
        self._group: PeerGroup | None = group
        self._fault = ""

    def group(self, version: int) -> PeerGroup:
        """The group, for one sync."""
        if self._group is None or self._fault:
            reason = self._fault or "closed"
            raise TransportError(f"{self.ends.channel}: version {version}: the link is broken: {reason}")
        return self._group

    def close(self) -> None:
        self._group = None

    def by_peer(self, copies: Sequence[Copy]) -> dict[int, tuple[Copy, ...]]:
        """Peers by their place in the group, in the order of the plan, each with its copies."""
        found: dict[int, list[Copy]] = {}
        for copy in copies:
            peer = self.ends.sources + copy.destination if self._side == "source" else copy.source
            found.setdefault(peer, []).append(copy)
        return {peer: tuple(own) for peer, own in found.items()}

    def wait(self, work: Work, version: int, peer: int, what: str) -> None:
        """Until a message is there, or the deadline."""
        with self.naming(version, peer, what):
            self.group(version).wait(work)

    def match(self, given: torch.Tensor, needed: torch.Tensor, names: Sequence[str], peer: int) -> None:
        """Raise ChecksumError unless a peer's header is the one needed: both sides must mean the same sync."""
        # The checksums would find a stale or partial version, too, but could not say what it is.
        if given.tolist() != needed.tolist():
            facts = [dict(zip(names, header.tolist(), strict=True)) for header in (given, needed)]
            self._fault = f"{self.ends.name(peer)} sent {facts[0]}, needed {facts[1]}"
            raise ChecksumError(f"{self.ends.channel}: {self._fault}")

    @contextmanager
    def naming(self, version: int, peer: int, what: str) -> Iterator[None]:
        """Errors of the process group say neither what was moved nor whose fault it is."""
        started = time.monotonic()
        try:
            yield
        except TransportError:
            raise
        except RuntimeError as error:
            verb = "to" if self._side == "source" else "from"
            after = f"after {time.monotonic() - started:.1f} s"
            self._fault = f"version {version}: {what} {verb} {self.ends.name(peer)} failed {after}: {first_line(error)}"
            raise TransportError(f"{self.ends.channel}: {self._fault}") from error


def named(copies: Sequence[Copy]) -> str:
    """The copies of a message, in short."""
    more = f" and {len(copies) - 1} more tensors" if len(copies) > 1 else ""
    return f"{copies[0].tensor} {copies[0].region}{more}"


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


T = TypeVar("T")


class WorldError(RuntimeError):
    """The ranks of a replica did not all meet, or one of them is gone."""


def open_world(store: Store, rank: int, size: int, *, timeout: float, device: str = "cpu") -> None:
    """Make the default group of `size` ranks, which meet at `store`; blocks until all have. It must be kept.

    NCCL carries what lies on GPUs, gloo the rest. Raises WorldError past `timeout` seconds, which bound each
    collective, too.
    """
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    store.set_timeout(timedelta(seconds=timeout))
    try:
        call_roll(store, rank, size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        text = f"rank {rank}: the {size} ranks of the replica did not meet within {timeout:g} s"
        raise WorldError(f"{text}: {first_line(error)}") from error


class Pace(Protocol):
    """When a rank takes up what it has been told."""

    busy: bool
    """Whether another rank may be, so that this one must not wait for messages."""

    def take(self, waiting: deque[T], busy: bool) -> list[T]:
        """Those of the orders in `waiting` to carry out before the next step, removed from it."""


class AtOnce:
    """A rank alone, or one whose nodes keep step by themselves: at once."""

    busy = False

    def take(self, waiting: deque[T], busy: bool) -> list[T]:
        taken = list(waiting)
        waiting.clear()
        return taken


class Lockstep:
    """Ranks whose streams decode together: each takes up what all of them have got, so that all make the same steps
    with the same groups and the same weights.

    All ranks get the same orders in the same sequence, each in its own time. One that has any waits for the others to
    come here, too: what it has got, they will get. As long as one of them was busy when they last met, all come back.
    """

    def __init__(self) -> None:
        self.taken, self.busy = 0, False

    def take(self, waiting: deque[T], busy: bool) -> list[T]:
        if not (waiting or busy or self.busy):
            return []
        met = torch.tensor([self.taken + len(waiting), -int(busy)])
        try:
            dist.all_reduce(met, dist.ReduceOp.MIN)
        except RuntimeError as error:
            raise WorldError(f"a rank of this replica is gone: {first_line(error)}") from error
        count, self.busy = int(met[0]) - self.taken, bool(met[1])
        self.taken += count
        return [waiting.popleft() for _ in range(count)]


Fold = Callable[[Tensor, Tensor], Tensor]


class AllReduce:
    """Sums and maxima over ranks of one host that meet at `store`, which no other group has used; each makes the same
    calls. Called, it is the `Add` of checksums; `maximum` is what quantising ranks agree by.

    Opened by the first call, in any thread. After an error it stays broken.
    """

    def __init__(self, name: str, store: Store, rank: int, ranks: int, timeout: float = 60.0) -> None:
        self._name = name
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._timeout = timeout
        self._lock = threading.Lock()
        self._group: PeerGroup | None = None
        self._calls = 0

    def __call__(self, sums: Tensor) -> Tensor:
        """The sum of an int64 CPU tensor over the ranks, mod 2^64, on each. TransportError if shapes differ."""
        return self._reduce(sums, torch.add)

    def maximum(self, magnitudes: Tensor) -> Tensor:
        """The largest of the ranks' float32 numbers, element by element, on each: none is negative or NaN."""
        # Without a sign, floats are ordered as the integers of the same bits.
        bits = magnitudes.contiguous().view(torch.int32).long().cpu()
        largest = self._reduce(bits, torch.maximum).int().view(torch.float32)
        return largest.to(magnitudes.device)

    def close(self) -> None:
        self._group = None

    def _reduce(self, numbers: Tensor, fold: Fold) -> Tensor:
        with self._lock:
            if self._group is None:
                try:
                    self._group = open_group(self._store, self._rank, self._ranks, timeout=self._timeout)
                except RuntimeError as error:
                    text = f"{self._name}: rank {self._rank}: not all of {self._ranks} ranks met"
                    raise TransportError(f"{text} within {self._timeout} s: {first_line(error)}") from error
            self._calls += 1
            # The first word tells calls apart that do not belong together.
            own = torch.cat([torch.tensor([self._calls]), numbers.reshape(-1)])
            if self._rank == 0:
                total = self._lead(self._group, own, fold)
            else:
                total = torch.empty_like(own)
                self._wait(self._group, self._group.send(own, 0, 0), 0)
                self._wait(self._group, self._group.receive(total, 0, 1), 0)
            return total[1:].view(numbers.shape)

    # Rank 0 adds up rather than a collective of gloo's, so that an error can name the rank that did not answer.
    def _lead(self, group: PeerGroup, own: Tensor, fold: Fold) -> Tensor:
        answers = [torch.empty_like(own) for _ in range(1, self._ranks)]
        works = [group.receive(answer, peer, 0) for peer, answer in enumerate(answers, 1)]
        total = own.clone()
        for peer, (work, answer) in enumerate(zip(works, answers, strict=True), 1):
            self._wait(group, work, peer)
            if answer[0] != own[0]:
                raise TransportError(f"{self._name}: rank {peer} adds up sum {int(answer[0])}, needed {int(own[0])}")
            total[1:] = fold(total[1:], answer[1:])
        for peer, work in enumerate([group.send(total, peer, 1) for peer in range(1, self._ranks)], 1):
            self._wait(group, work, peer)
        return total

    def _wait(self, group: PeerGroup, work: Work, peer: int) -> None:
        try:
            group.wait(work)
        except RuntimeError as error:
            text = f"{self._name}: rank {self._rank}: no sum from rank {peer} within {self._timeout} s"
            raise TransportError(f"{text}: {first_line(error)}") from error
