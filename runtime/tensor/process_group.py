"""torch's process groups, made directly, and the connections that weights use: no global world, no collective, no TCP
store. A `Connection` sends and receives over gloo between the ranks of a link or of a replica, and its errors name the
peer (`nccl` adds transfers between GPUs). `AllReduce` reduces over the ranks of one replica. `open_world` makes torch's
default group if a replica's ranks compute together, and `Pace` keeps their steps aligned. `Transport` executes the
copies of a plan.

Gloo listens only at the address that it is given. It neither authenticates peers nor encrypts: on one host the address
is loopback; between hosts the network must be trusted.
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

# Returns the store at which the ranks of a group rendezvous, by the group's name.
OpenStore = Callable[[str], Store]
Side = Literal["source", "destination"]
HEADER = "the header"
_FOLD = 1 << 20  # the tag of messages to and from rank 0: no sync uses it
T = TypeVar("T")


class TransportError(RuntimeError):
    """A peer died, hangs or is absent. The text names channel, version, peer rank and tensors."""


class Receiving(Protocol):
    """The receiving side of a channel. Used by one thread at a time; every wait has a deadline."""

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        """Receive `copies` into `parts`, and return the bytes received. After an error `parts` are undefined."""


class Sending(Protocol):
    """The sending side of a channel. Used by one thread at a time; every wait has a deadline."""

    def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        """Send `copies` of `parts`, which must not change meanwhile, and return the bytes sent."""


class Transport(Sending, Receiving, Protocol):
    """Either side of a channel to one replica."""

    def close(self) -> None:
        """Close the connection. May be repeated."""


class Message:
    """A message in flight: its buffer must not change before `wait` has returned."""

    def __init__(self, connection: "Connection", work: Work, buffer: Tensor, peer: int, what: str) -> None:
        self._connection = connection
        self._work = work
        self.buffer = buffer
        self.peer = peer
        self._what = what

    def wait(self) -> Tensor:
        """Wait until it is sent or received, without the interpreter's lock. TransportError past the deadline.

        Gloo reports a lost peer at once for messages that have not begun; one that is half way waits for the deadline.
        """
        with self._connection.naming(self.peer, self._what):
            self._work.wait(timedelta(seconds=self._connection.timeout))
            return self.buffer


class Connection:
    """One rank's connection to the other ranks of a link or replica, for point-to-point messages over gloo. Buffers lie
    in host memory. Errors name the peer. After a fault it stays broken: open a new one.

    `names` are the names of the ranks; the first `sources` of them send weights to the others. `timeout` limits each
    wait, in seconds. `sync` describes the current messages in errors.
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
        """Join as `rank`; blocks until all have joined. They rendezvous at `store`, which no other group has used.

        Gloo listens at `address`, where the others must reach it. Raises TransportError past `timeout`, with the ranks
        that have not come; for ranks that do not reach each other; and if this machine lacks the address.
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
            # Call the roll first: gloo's own error would only say that its store timed out.
            call_roll(store, names, rank, timeout)
            # All have come: the remaining time is for connecting.
            left = max(timeout / 4, timeout - (time.monotonic() - began))
            # With a prefix, so that the keys of the roll call are not taken for gloo's.
            self._group = _connect_gloo(PrefixStore("gloo", store), rank, len(names), left, address)
        except RuntimeError as error:
            after = f"after {time.monotonic() - began:.1f} s of {timeout} s"
            text = f"{channel}: {names[rank]}: the connection of {len(names)} ranks is not complete {after}"
            raise TransportError(f"{text}: {first_line(error)}") from error

    def close(self) -> None:
        # The sockets close with the last reference, so that the peers notice at once.
        self._group = None

    def send(self, buffer: Tensor, peer: int, tag: int, what: str = HEADER) -> Message:
        """Begin to send. Messages to one peer are distinguished by `tag`, then by their order."""
        with self.naming(peer, what) as group:
            return Message(self, group.send([buffer], peer, tag), buffer, peer, what)

    def receive(self, buffer: Tensor, peer: int, tag: int, what: str = HEADER) -> Message:
        with self.naming(peer, what) as group:
            return Message(self, group.recv([buffer], peer, tag), buffer, peer, what)

    def fold(self, own: Tensor, what: str, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return on each rank what `combine` makes, on rank 0, of the tensors of all ranks. It has the shape of `own`.

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
        """Raise ChecksumError unless a peer's header is `needed`: both sides must mean the same sync."""
        # Checksums would also find a stale or partial version, but could not name it.
        if given.tolist() != needed.tolist():
            facts = [dict(zip(fields, header.tolist(), strict=True)) for header in (given, needed)]
            self._fault = f"{self.names[peer]} sent {facts[0]}, needed {facts[1]}"
            raise ChecksumError(f"{self.channel}: {self._fault}")

    @contextmanager
    def naming(self, peers: int | Sequence[int], what: str) -> Iterator[Any]:
        """Yields the process group, and adds to its errors what was moved, `what`, and to or from which `peers`.

        Raises TransportError for a link that is broken or closed.
        """
        # Read once: another thread may close the connection meanwhile.
        group = self._group
        if group is None or self._fault:
            raise TransportError(f"{self.channel}: {self.sync}: the link is broken: {self._fault or 'closed'}")
        started = time.monotonic()
        try:
            yield group
        # A nested wait has named the peer already.
        except TransportError:
            raise
        except RuntimeError as error:
            verb = "to" if self.rank < self.sources else "from"
            after = f"after {time.monotonic() - started:.1f} s"
            named = ", ".join(self.names[peer] for peer in ([peers] if isinstance(peers, int) else peers))
            self._fault = f"{self.sync}: {what} {verb} {named} failed {after}: {first_line(error)}"
            raise TransportError(f"{self.channel}: {self._fault}") from error


def call_roll(store: Store, names: Sequence[str], rank: int, timeout: float) -> None:
    """Wait until all ranks have come. Raises RuntimeError past `timeout`, with the names of those that have not."""
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
    """Open gloo's process group, with errors that say where it listens and what it waited for."""
    gloo: Any = ProcessGroupGloo  # torch's stubs lack the options
    options = gloo._Options()
    options._timeout = timedelta(seconds=seconds)
    try:
        # By default gloo would listen at the address of the host's name, which others may reach.
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
    """The name of the network interface of this machine whose first address is `address`: gloo and NCCL are given an
    interface, and use its first address. Raises TransportError if there is none.
    """
    wanted = ip_address(address.strip("[]"))
    if wanted.is_loopback:
        return "lo"
    found: dict[IPv4Address | IPv6Address, str] = {
        # A link-local IPv6 address is followed by its interface's name.
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
    """Set the environment so that NCCL uses the interface of an address, and its errors are left to us. `beside`:
    weights go by NCCL while nodes compute. Call it before a process uses its GPU: the driver, NCCL and torch read the
    environment then.
    """
    if beside:
        # Loading a kernel at its first use waits for all work on the GPU, and blocks every driver call of this process.
        # That work may be a wait for a peer that waits in the same way: two ranks on one H200 deadlocked so.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # Without "=", any interface whose name begins like this one would match.
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(address)}"
    os.environ.update(
        # Otherwise torch ends a process whose peer is gone, and that process would be blamed. Links and the controller
        # enforce the deadlines.
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        # With blocking waits, torch has no threads that look for errors.
        TORCH_NCCL_BLOCKING_WAIT="0",
        # Otherwise each process asks the store every second whether any group has failed; if so, it dumps its state
        # into /tmp, and is ended some minutes later.
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
    """Make the default group of the ranks with these `names`, which rendezvous at `store`; blocks until all have come.
    Keep the store. The others reach this rank at `address`.

    NCCL transfers data on GPUs (see `prepare_nccl`), gloo the rest. Raises TransportError for ranks that have not come
    within `timeout` seconds, and for ranks that have come but do not reach each other within `connecting` seconds. A
    collective over gloo has twice the `timeout`.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    store.set_timeout(timedelta(seconds=timeout))
    reach = ""
    try:
        # torch's default group, and groups of its ranks, take no address: gloo reads the environment.
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
        call_roll(store, names, rank, timeout)
        reach = f"all have come, but do not reach each other; this one listens on {address}"
        limit = timedelta(seconds=min(timeout, connecting))
        dist.init_process_group(backend, store=store, rank=rank, world_size=len(names), timeout=limit)
        # A rank that waits for one that hangs must not fail first: the controller knows which one has not answered.
        c10d._set_pg_timeout(timedelta(seconds=2 * timeout))
    except RuntimeError as error:
        text = f"{names[rank]}: the {len(names)} ranks of the replica did not meet"
        raise TransportError(": ".join(filter(None, (text, reach, first_line(error))))) from error


class Pace:
    """Decides when a rank takes its orders: at once if it is alone, or if its nodes synchronise by themselves.

    `together`: the streams of several ranks decode together. Then each rank takes only the orders that all have got, so
    that all do the same steps with the same groups and weights. All ranks get the same orders in the same sequence, but
    at different times. A rank with orders waits here for the others, which will get the same. As long as any rank was
    busy when they last met, or may be busy with the orders taken then, all come here again. `busy`: another rank may be
    busy, so this one must not wait for messages.
    """

    def __init__(self, together: bool) -> None:
        self._together = together
        self.taken, self.busy = 0, False

    def take(self, waiting: deque[T], busy: bool) -> list[T]:
        """Take out of `waiting` the orders to carry out before the next step."""
        count = len(waiting)
        if self._together and (waiting or busy or self.busy):
            # The minimum of the counts is what all ranks have got; that of -busy tells whether any rank is busy.
            met, least = _least(self.taken + count, -int(busy))
            count = met - self.taken
            # Orders may be done within one step on one rank, but not on another.
            self.busy = bool(least) or count > 0
        self.taken += count
        return [waiting.popleft() for _ in range(count)]


def all_say(yes: bool) -> bool:
    """True if all ranks of this replica pass True (see `open_world`). All must call it. Raises TransportError."""
    return bool(_least(int(yes))[0])


def _least(*numbers: int) -> list[int]:
    """The element-wise minimum of the numbers of all ranks of this replica."""
    met = torch.tensor(numbers)
    try:
        dist.all_reduce(met, dist.ReduceOp.MIN)
    except RuntimeError as error:
        raise TransportError(f"a rank of this replica is gone: {first_line(error)}") from error
    return [int(number) for number in met]


class AllReduce:
    """Sums and maxima over the ranks of a replica. They rendezvous at `store`, which no other group has used; all make
    the same calls. A call of the object itself is the `Add` of checksums; `maximum` is the `Agree` of quantisation.
    `names` are the ranks' names; they reach this one at `address`.

    The first call opens it, in any thread. After an error it stays broken.
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
        """The element-wise maximum of the ranks' float32 tensors, on each. No number may be negative or NaN."""
        return self._reduce(magnitudes.cpu(), partial(torch.amax, dim=0)).to(magnitudes.device)

    def close(self) -> None:
        self._connection = None

    def _reduce(self, numbers: Tensor, fold: Callable[[Tensor], Tensor]) -> Tensor:
        with self._lock:
            connection = self._connection = self._connection or self._open()
            self._calls += 1
            connection.sync = f"sum {self._calls}"
            # The first number finds ranks that are at different calls.
            own = torch.cat([torch.tensor([self._calls], dtype=numbers.dtype), numbers.reshape(-1)])

            def combine(given: Sequence[Tensor]) -> Tensor:
                for peer, row in enumerate(given):
                    connection.match(row[:1], own[:1], ("sum",), peer)
                return fold(torch.stack(list(given)))

            return connection.fold(own, "the numbers", combine)[1:].view(numbers.shape)
