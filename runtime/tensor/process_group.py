"""torch's process groups, made directly, and the connections that weights use: no global world, no collective, no TCP
store. A `Connection` sends and receives over gloo between the ranks of a link or of a replica, and names the peer at
fault (`nccl` has what goes beside it between GPUs); `AllReduce` adds over the ranks of one replica; `open_world` makes
torch's default group where a replica's ranks compute together, and `Pace` keeps their steps in time. `Transport` is
what moves the copies of a plan.

Gloo listens at the one address that it is given. It asks a peer for no key and encrypts nothing: on one host that is
loopback, and beyond it a network must be trusted.
"""

import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Literal, Protocol, TypeVar

import psutil
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from penstock.runtime.cluster.endpoints import LOOPBACK
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.digest import ChecksumError
from penstock.runtime.tensor.layout import Copy

# The store at which the ranks of a group rendezvous, by the group's name.
OpenStore = Callable[[str], Store]
Side = Literal["source", "destination"]
HEADER = "the header"
_FOLD = 1 << 20  # the tag of messages to and from rank 0: no sync uses it
T = TypeVar("T")


class TransportError(RuntimeError):
    """A peer that died, hung or is not there. It names channel, version, peer rank and tensors."""


class Receiving(Protocol):
    """The side of a channel that receives. Used by one thread at a time; every wait has a deadline."""

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        """Write `copies` into `parts`; the bytes received. After an error what is written is undefined."""


class Sending(Protocol):
    """The side of a channel that sends. Used by one thread at a time; every wait has a deadline."""

    def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        """Send `copies` out of `parts`, which must not change meanwhile; the bytes sent."""


class Transport(Sending, Receiving, Protocol):
    """One side of a channel to one replica, either of them."""

    def close(self) -> None:
        """Give up the connection. May be repeated."""


class Message:
    """A message that has begun: its buffer must not change before `wait` has returned."""

    def __init__(self, connection: "Connection", work: Work, buffer: Tensor, peer: int, what: str) -> None:
        self._connection = connection
        self._work = work
        self.buffer = buffer
        self.peer = peer
        self._what = what

    def wait(self) -> Tensor:
        """Until it is sent or received; without the interpreter's lock. TransportError past the deadline.

        Gloo tells of a lost peer at once for messages that have not begun; one that is half way waits for the deadline.
        """
        with self._connection.naming(self.peer, self._what):
            self._work.wait(timedelta(seconds=self._connection.timeout))
            return self.buffer


class Connection:
    """Point-to-point messages over gloo between the ranks of a link or of a replica, as one of them sees it; buffers
    lie in the host's memory. Errors name the peer. After a fault it stays broken: open a new one.

    `names` are what the ranks are called; the first `sources` of them send weights to the others. `timeout` bounds each
    wait, in seconds. `sync` says what the messages are for just now, for errors.
    """

    def __init__(
        self,
        channel: str,
        names: Sequence[str],
        store: Store,
        rank: int,
        *,
        sources: int = 0,
        timeout: float = 60.0,
        address: str = LOOPBACK,
    ) -> None:
        """Join as `rank`; blocks until all have. `store` is where they meet: no other group has used it.

        Gloo listens at `address`, and the others must reach it there. Raises TransportError past `timeout`, with the
        ranks that have not come, and for ranks that do not reach each other and what this machine lacks.
        """
        self.channel = channel
        self.names = names
        self.rank = rank
        self.sources = sources
        self.timeout = timeout
        self.sync = "opening"
        self._fault = ""
        self._group: Any = None
        began = time.monotonic()
        try:
            # Gloo itself would say only that its store timed out: so the roll is called first.
            call_roll(store, names, rank, timeout)
            # For connecting: all have come, and what is left of the time has to do.
            left = max(timeout / 4, timeout - (time.monotonic() - began))
            # A prefix of its own: the keys of the roll call must not be taken for gloo's.
            self._group = _connect_gloo(PrefixStore("gloo", store), rank, len(names), left, address)
        except RuntimeError as error:
            after = f"after {time.monotonic() - began:.1f} s of {timeout} s"
            text = f"{channel}: {names[rank]}: the connection of {len(names)} ranks is not complete {after}"
            raise TransportError(f"{text}: {first_line(error)}") from error

    def close(self) -> None:
        # With the last reference the sockets close, so that the peers learn it at once.
        self._group = None

    def send(self, buffer: Tensor, peer: int, tag: int, what: str = HEADER) -> Message:
        """Begin to send. Messages to one peer are told apart by `tag`, and of one tag by their order."""
        with self.naming(peer, what) as group:
            return Message(self, group.send([buffer], peer, tag), buffer, peer, what)

    def receive(self, buffer: Tensor, peer: int, tag: int, what: str = HEADER) -> Message:
        with self.naming(peer, what) as group:
            return Message(self, group.recv([buffer], peer, tag), buffer, peer, what)

    def fold(self, own: Tensor, what: str, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """What `combine` makes, on rank 0, of the tensors that all ranks give: the same on each, and of `own`'s shape.

        Point to point rather than a collective of gloo's, so that an error names the rank that did not answer.
        """
        if self.rank:
            self.send(own, 0, _FOLD, what).wait()
            return self.receive(torch.empty_like(own), 0, _FOLD, what).wait()
        peers = range(1, len(self.names))
        given = [self.receive(torch.empty_like(own), peer, _FOLD, what) for peer in peers]
        answer = combine([own, *(message.wait() for message in given)])
        for message in [self.send(answer, peer, _FOLD, what) for peer in peers]:
            message.wait()
        return answer

    def by_peer(self, copies: Sequence[Copy]) -> dict[int, tuple[Copy, ...]]:
        """The peers in the order of the plan, each with its copies."""
        found: dict[int, list[Copy]] = defaultdict(list)
        for copy in copies:
            found[self.sources + copy.destination if self.rank < self.sources else copy.source].append(copy)
        return {peer: tuple(own) for peer, own in found.items()}

    def match(self, given: Tensor, needed: Tensor, fields: Sequence[str], peer: int) -> None:
        """Raise ChecksumError unless a peer's header is the one needed: both sides must mean the same sync."""
        # The checksums would find a stale or partial version, too, but could not say what it is.
        if given.tolist() != needed.tolist():
            facts = [dict(zip(fields, header.tolist(), strict=True)) for header in (given, needed)]
            self._fault = f"{self.names[peer]} sent {facts[0]}, needed {facts[1]}"
            raise ChecksumError(f"{self.channel}: {self._fault}")

    @contextmanager
    def naming(self, peers: int | Sequence[int], what: str) -> Iterator[Any]:
        """The process group, whose errors say neither what was moved nor whose fault it is: in here they do.

        `peers` are those to or from whom `what` goes. Raises TransportError for a link that is broken or closed.
        """
        # Read once: another thread may close the connection meanwhile.
        group = self._group
        if group is None or self._fault:
            raise TransportError(f"{self.channel}: {self.sync}: the link is broken: {self._fault or 'closed'}")
        started = time.monotonic()
        try:
            yield group
        # A wait inside another one has named the peer already.
        except TransportError:
            raise
        except RuntimeError as error:
            verb = "to" if self.rank < self.sources else "from"
            after = f"after {time.monotonic() - started:.1f} s"
            named = ", ".join(self.names[peer] for peer in ([peers] if isinstance(peers, int) else peers))
            self._fault = f"{self.sync}: {what} {verb} {named} failed {after}: {first_line(error)}"
            raise TransportError(f"{self.channel}: {self._fault}") from error


def call_roll(store: Store, names: Sequence[str], rank: int, timeout: float) -> None:
    """Wait until all ranks have come, so that an error can say who has not. Raises RuntimeError past `timeout`."""
    here = [f"here/{number}" for number in range(len(names))]
    store.set(here[rank], "1")
    try:
        store.wait(here, timedelta(seconds=timeout))
    except RuntimeError:
        absent = [name for name, key in zip(names, here, strict=True) if not store.check([key])]
        if not absent:
            raise
        raise RuntimeError(f"not there: {', '.join(absent)}") from None


def _connect_gloo(rendezvous: PrefixStore, rank: int, size: int, seconds: float, address: str) -> Any:
    """Gloo itself says neither where it listens nor what a wait was for."""
    gloo: Any = ProcessGroupGloo  # torch's stubs lack the options
    options = gloo._Options()
    options._timeout = timedelta(seconds=seconds)
    try:
        # The host's name would resolve to an address that others may reach: gloo is to listen at this one alone.
        options._devices = [gloo.create_device(hostname=address.strip("[]"))]
    except RuntimeError as error:
        needed = "needed an address of this machine (`address` of its host in the cluster file)"
        raise RuntimeError(f"cannot listen on {address}, {needed}: {error}") from error
    try:
        return gloo(rendezvous, rank, size, options)
    except RuntimeError as error:
        text = f"all have come, but do not reach each other; this one listens on {address}"
        raise RuntimeError(f"{text}: {error}") from error


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def interface_of(address: str) -> str:
    """The name of this machine's network interface that has an address, and has it first: gloo and NCCL are told an
    interface, and take its first address. Raises TransportError where none has.
    """
    wanted = ip_address(address.strip("[]"))
    if wanted.is_loopback:
        return "lo"
    found: dict[IPv4Address | IPv6Address, str] = {
        # An IPv6 address of a link is written with its interface's name behind it.
        ip_address(one.address.partition("%")[0]): name
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6)
    }
    where = "(`address` of its host in the cluster file)"
    if wanted not in found:
        has = ", ".join(f"{address} ({name})" for address, name in found.items())
        raise TransportError(f"given the address {address}, needed one of this machine {where}; it has {has or 'none'}")
    first = next(each for each, name in found.items() if name == found[wanted])
    if wanted != first:
        needed = f"needed {first} {where}: gloo and NCCL meet at the first address of {found[wanted]}"
        raise TransportError(f"given the address {address}, {needed}")
    return found[wanted]


def prepare_nccl(address: str, *, beside: bool) -> None:
    """Have NCCL meet at the interface of an address, and leave its errors to us; `beside`: weights go by it beside a
    node's own work. To be called before a process uses its GPU: the driver, NCCL and torch ask the environment.
    """
    if beside:
        # A kernel that is loaded at its first use waits for all that the card does, and with it every call of this
        # process into the driver. What the card does may be to wait for a peer that waits in the same way: two ranks of
        # one H200 stood still so.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # Without "=" each interface whose name begins so would do.
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(address)}"
    os.environ.update(
        # Else torch ends a process whose peer is gone, which would then be named in the peer's place: deadlines are
        # kept by links and by the controller.
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        # Without the threads that look for errors there would be none.
        TORCH_NCCL_BLOCKING_WAIT="0",
        # Else each process of the run asks the store once a second whether any group has failed; then it writes what it
        # knows into /tmp, and is ended some minutes later.
        TORCH_NCCL_ENABLE_MONITORING="0",
        TORCH_NCCL_DUMP_ON_TIMEOUT="0",
        TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="0",
    )


def open_world(
    store: Store,
    names: Sequence[str],
    rank: int,
    *,
    timeout: float,
    connecting: float = 30.0,
    device: str = "cpu",
    address: str = LOOPBACK,
) -> None:
    """Make the default group of the ranks with these `names`, which meet at `store`; blocks until all have. It must be
    kept. The others reach this one at `address`.

    NCCL carries what lies on GPUs (see `prepare_nccl`), gloo the rest. Raises TransportError for ranks that have
    not come within `timeout` seconds, and for ranks that have, and do not reach each other within `connecting` seconds.
    A collective over gloo has twice the `timeout`.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    store.set_timeout(timedelta(seconds=timeout))
    reach = ""
    try:
        # torch's default group, and those that are made of its ranks, take no address: gloo asks the environment.
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
        call_roll(store, names, rank, timeout)
        reach = f"all have come, but do not reach each other; this one listens on {address}"
        limit = timedelta(seconds=min(timeout, connecting))
        dist.init_process_group(backend, store=store, rank=rank, world_size=len(names), timeout=limit)
        # Who waits for a rank that hangs must not be heard first: the controller knows who has not answered.
        c10d._set_pg_timeout(timedelta(seconds=2 * timeout))
    except RuntimeError as error:
        text = f"{names[rank]}: the {len(names)} ranks of the replica did not meet"
        raise TransportError(": ".join(filter(None, (text, reach, first_line(error))))) from error


class Pace:
    """When a rank takes up what it has been told: at once if it is alone, or its nodes keep step by themselves.

    `together`, for ranks whose streams decode together, each takes up what all of them have got, so that all make the
    same steps with the same groups and the same weights. All ranks get the same orders in the same sequence, each in
    its own time. One that has any waits for the others to come here, too: what it has got, they will get. As long as
    one of them was busy when they last met, or may be with what they took up then, all come back. `busy`: another rank
    may be, so that this one must not wait for messages.
    """

    def __init__(self, together: bool) -> None:
        self._together = together
        self.taken, self.busy = 0, False

    def take(self, waiting: deque[T], busy: bool) -> list[T]:
        """Those of the orders in `waiting` to carry out before the next step, removed from it."""
        count = len(waiting)
        if self._together and (waiting or busy or self.busy):
            # The least of the counts is what all ranks have got; the least of -busy says whether any one is.
            met, least = _least(self.taken + count, -int(busy))
            count = met - self.taken
            # What they take up may be done in one step on one of them, and not on another.
            self.busy = bool(least) or count > 0
        self.taken += count
        return [waiting.popleft() for _ in range(count)]


def all_say(yes: bool) -> bool:
    """Do all ranks of this replica say so (see `open_world`)? Each asks at the same place. Raises TransportError."""
    return bool(_least(int(yes))[0])


def _least(*numbers: int) -> list[int]:
    """The least of what the ranks of this replica give, one by one."""
    met = torch.tensor(numbers)
    try:
        dist.all_reduce(met, dist.ReduceOp.MIN)
    except RuntimeError as error:
        raise TransportError(f"a rank of this replica is gone: {first_line(error)}") from error
    return [int(number) for number in met]


class AllReduce:
    """Sums and maxima over the ranks of a replica, which meet at `store`, which no other group has used; each makes the
    same calls. Called, it is the `Add` of checksums; `maximum` is what quantising ranks agree by. The ranks are called
    by their `names`, and reach this one at `address`.

    Opened by the first call, in any thread. After an error it stays broken.
    """

    def __init__(
        self, name: str, store: Store, rank: int, names: Sequence[str], timeout: float = 60.0, address: str = LOOPBACK
    ) -> None:
        self._open = partial(Connection, name, names, store, rank, timeout=timeout, address=address)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._calls = 0

    def __call__(self, sums: Tensor) -> Tensor:
        """The sum of an int64 CPU tensor over the ranks, mod 2^64, on each. TransportError if shapes differ."""
        return self._reduce(sums, partial(torch.sum, dim=0))

    def maximum(self, magnitudes: Tensor) -> Tensor:
        """The largest of the ranks' float32 numbers, element by element, on each: none is negative or NaN."""
        return self._reduce(magnitudes.cpu(), partial(torch.amax, dim=0)).to(magnitudes.device)

    def close(self) -> None:
        self._connection = None

    def _reduce(self, numbers: Tensor, fold: Callable[[Tensor], Tensor]) -> Tensor:
        with self._lock:
            connection = self._connection = self._connection or self._open()
            self._calls += 1
            connection.sync = f"sum {self._calls}"
            # The first word tells calls apart that do not belong together.
            own = torch.cat([torch.tensor([self._calls], dtype=numbers.dtype), numbers.reshape(-1)])

            def combine(given: Sequence[Tensor]) -> Tensor:
                for peer, row in enumerate(given):
                    connection.match(row[:1], own[:1], ("sum",), peer)
                return fold(torch.stack(list(given)))

            return connection.fold(own, "the numbers", combine)[1:].view(numbers.shape)
