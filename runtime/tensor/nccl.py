"""Buckets between GPUs over NCCL: a communicator for each link, beside the link's gloo connection, which has the short
messages in host memory.

NCCL executes calls in the order in which a rank makes them, buffers nothing, and has neither tags nor deadlines. So a
round of a sync (`send_recv`) is one group call, whose messages end together. Each link has one communicator of all its
ranks: single sends would create one more for each pair, and a kernel for each message. Both sides agree by gloo on the
sync before they begin any of its buckets. Buckets are large and lie on the GPU, where packing costs little; a call
costs a launch on each rank.

Every wait has a deadline, also those for NCCL itself, which blocks the calling thread while pairs of ranks first
connect: it is called in its own thread. A rank that gives up a link notes that in the link's store, where ranks that
wait for it look twice a second; then, or after a deadline, they abort the communicator.

A call that waits for its peer occupies a part of the GPU, and the ranks of a trainer may begin the calls of several
links, and their own collectives, in different orders. No computation waits for a link, so all calls end if they fit on
the GPU at once: the calls of a link take few of its multiprocessors, and are not queued behind others.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType, PrefixStore, Store

from penstock.runtime.tensor.process_group import Connection, TransportError, first_line
from penstock.runtime.tensor.reshard import nccl_round
from penstock.runtime.tensor.send_recv import Bucket, BucketSizes
from penstock.runtime.tensor.streams import current_stream, on_device, on_stream, streams_of

T = TypeVar("T")
Verb = Literal["send", "receive"]

# One round is packed while another is sent. Up to `large` bytes, a copy on the GPU costs no more than a message.
NCCL_SIZES = BucketSizes(large=4 << 20, full=nccl_round(1 << 60, 1), slots=2)
_LOOK_S, _ABORT_S = 0.5, 5.0
# Multiprocessors of a GPU that the calls of a link take, of a hundred or more. At NCCL's usual rates (not measured
# here) they send faster than a network card.
_PROCESSORS = 8
_GONE = "given up by"

# Blocks until a group call is over or aborted: without a deadline, and without the interpreter's lock.
UntilOver = Callable[[], object]


class DeviceGroup(Protocol):
    """A communicator: the ranks of a link make the same calls in the same order, and nothing is buffered. All buffers
    lie on `device`."""

    device: torch.device

    def call(self, verb: Verb, messages: Sequence[tuple[int, Tensor]]) -> UntilOver:
        """Begin to send, or receive, a buffer to or from each of these peers, in one group call. RuntimeError if it
        fails."""

    def fault(self) -> str:
        """An error since it was opened; "" for none."""

    def abort(self) -> None:
        """End all calls on this rank. From any thread; may be repeated."""


class NcclCarrier:
    """A `Carrier` that sends the buckets of a link by group calls. The link's ranks share `store`."""

    def __init__(self, connection: Connection, group: DeviceGroup, store: Store) -> None:
        self.device = group.device
        self.sizes = NCCL_SIZES
        self._connection = connection
        self._group = group
        self._store = store
        self._closed = self._aborted = False

    def room(self, loads: Mapping[int, int]) -> dict[int, int]:
        """The bytes of a round for each peer: proportional to its share of all bytes. So all peers end after the same
        number of rounds, and the staging buffers do not grow with the number of peers."""
        total = sum(loads.values())
        most = min(self.sizes.full, nccl_round(total, len(loads)))
        return {peer: -(-nbytes * most // total) for peer, nbytes in loads.items()}

    def send(self, messages: Iterable[tuple[int, Bucket]], number: int) -> "_GroupCall":
        return self._call("send", [*messages])

    def receive(self, messages: Iterable[tuple[int, Bucket]], number: int) -> "_GroupCall":
        return self._call("receive", [*messages])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(RuntimeError):  # the store may be gone with the run
                self._store.set(f"{_GONE} {self._connection.rank}", "1")
            self.abort()

    def abort(self) -> None:
        """End calls in flight. With a deadline, since even NCCL's abort may not return."""
        self._aborted = True
        with suppress(RuntimeError):
            in_time(_ABORT_S, self._group.abort)

    def look(self, peers: Iterable[int]) -> None:
        """Raise RuntimeError if calls to or from these peers have failed, or will."""
        if fault := self._group.fault():
            raise RuntimeError(fault)
        if self._aborted:  # aborted calls return as if they had succeeded
            raise RuntimeError("the link was given up here")
        for peer in peers:
            if self._store.check([f"{_GONE} {peer}"]):
                raise RuntimeError(f"{self._connection.names[peer]} has given up the link")

    def _call(self, verb: Verb, messages: Sequence[tuple[int, Bucket]]) -> "_GroupCall":
        buffers = [(peer, bucket.buffer) for peer, bucket in messages]
        more = f" and {len(messages) - 1} more messages" if len(messages) > 1 else ""
        call = _GroupCall(self, [*dict.fromkeys(peer for peer, _ in messages)], f"{messages[0][1].name}{more}")
        stream = current_stream(self.device)

        def begin() -> UntilOver:
            # NCCL's call comes after the work in the current stream: that must be the packing stream, also here.
            with on_stream(stream, self.device):
                return self._group.call(verb, buffers)

        with call.naming() as seconds:
            call.until_over = in_time(seconds, begin)
        return call


class _GroupCall:
    """A round that has begun; a `Begun`."""

    until_over: UntilOver

    def __init__(self, carrier: NcclCarrier, peers: Sequence[int], what: str) -> None:
        self._carrier, self._peers, self._what = carrier, peers, what

    def wait(self) -> None:
        # The host waits, so that all later work in the current stream comes after the call.
        with self.naming() as seconds:
            in_time(seconds, self.until_over, lambda: self._carrier.look(self._peers))
            self._carrier.look(())

    @contextmanager
    def naming(self) -> Iterator[float]:
        """Yields the seconds that a wait may take. An error names the peers, and aborts calls in flight."""
        try:
            with self._carrier._connection.naming(self._peers, self._what):
                yield self._carrier._connection.timeout
        except TransportError:
            self._carrier.abort()
            raise


class NcclGroup:
    """A communicator of torch's NCCL for the ranks of one link, each with a different GPU.

    Opening blocks until all ranks have come, at most `timeout` seconds. Raises TransportError.
    """

    def __init__(self, connection: Connection, store: Store, device: torch.device) -> None:
        self.device = torch.device(device.type, device.index or 0)
        rank, size, seconds = connection.rank, len(connection.names), connection.timeout
        try:
            if not dist.is_nccl_available():
                raise RuntimeError(f"torch {torch.__version__} here is built without NCCL")
            self._group, self._backend = in_time(
                seconds, lambda: _opened(PrefixStore("nccl", store), rank, size, self.device)
            )
            self._calls = streams_of(self.device).Stream(self.device)  # only waits for calls
        except RuntimeError as error:
            text = f"NCCL between {size} ranks, here on {self.device}, did not open: {first_line(error)}"
            raise TransportError(f"{connection.channel}: {connection.names[rank]}: {text}") from error

    def call(self, verb: Verb, messages: Sequence[tuple[int, Tensor]]) -> UntilOver:
        self._group._start_coalescing(self.device)
        for peer, buffer in messages:
            (self._group.send if verb == "send" else self._group.recv)([buffer], peer, 0)
        work = self._group._end_coalescing(self.device)
        # torch's own test for completion holds the interpreter's lock, also while another thread aborts the
        # communicator: this process would then send no heartbeats. So wait for an event of ours after the call.
        over = streams_of(self.device).Event(blocking=True)
        with on_stream(self._calls, self.device):
            work.wait()  # this stream waits, not the host
            over.record(self._calls)
        until_over: UntilOver = over.synchronize
        return until_over

    def fault(self) -> str:
        error = self._backend.get_error()
        return "" if error == ErrorType.SUCCESS else f"NCCL: {error}"

    def abort(self) -> None:
        self._backend.abort()


def _opened(rendezvous: Store, rank: int, size: int, device: torch.device) -> tuple[Any, Any]:
    """A process group of torch's outside the global world, bound to `device`, and its backend. Call `prepare_nccl`
    before."""
    from torch.distributed import ProcessGroupNCCL  # absent from CPU builds

    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # This file enforces deadlines; torch's watchdog would end the process.
    options._timeout = timedelta(days=1)
    options.config.max_ctas = _PROCESSORS
    with on_device(device):
        backend: Any = ProcessGroupNCCL(rendezvous, rank, size, options)
        group: Any = dist.ProcessGroup(rendezvous, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
        group.bound_device_id = device
        # Create the communicator of all ranks now: otherwise single sends would create one for each pair.
        backend.eager_connect_single_device(device)
    return group, backend


def in_time(seconds: float, work: Callable[[], T], look: Callable[[], object] = lambda: None) -> T:
    """Run `work` in its own thread, where it may block forever, and return its result. Call `look` regularly meanwhile.
    Raises RuntimeError after `seconds`, or what `work` or `look` raises.
    """
    found: SimpleQueue[T | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            found.put(work())
        except BaseException as error:
            found.put(error)

    threading.Thread(target=run, name="NCCL", daemon=True).start()
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        try:
            result = found.get(timeout=max(0.0, min(left, _LOOK_S)))
        except Empty:
            if left <= 0:
                raise RuntimeError(f"timed out after {seconds:g} s") from None
            look()
            continue
        if isinstance(result, BaseException):
            raise result
        return result
