"""A test instrument that models NCCL: ranks are threads, and messages have the order of NCCL's streams and no buffers.
A communication schedule that would deadlock on GPUs deadlocks here, too, and is reported at once.

Model: a rank enqueues *calls* in streams, and goes on. A call is a group of sends and receives, or a single one. It is
over when all of them are. Only the first unfinished call of a stream is at work. A send and a receive meet if both are
at work; nothing is buffered, and there are no tags: between two ranks they meet in order. A wait for a call blocks the
thread. (On a GPU it blocks only the compute stream. To block the host, too, is stricter: what ends here ends there.)

Several communicators: each is a world. Each GPU of `Cards` runs at most `room` calls at once, of all worlds together;
a further call is not at work yet. Without `Cards` there is no limit.

Streams: all groups of a rank share the communicator's stream. A send or receive outside of a group uses a stream of
its pair of ranks, for both directions, as in a lazily made `ProcessGroupNCCL`; with `eager` it uses the
communicator's, as if the process group was bound to its device.

    world = Unbuffered(2)
    world.run(lambda: work(world.rank(0)), lambda: work(world.rank(1)))   # raises Deadlock, and any other error

`world.as_torch(monkeypatch)` puts the world in place of torch's point-to-point calls (`dist.isend`, `irecv`, `send`,
`recv`, `batch_isend_irecv`, `P2POp`, `get_rank`, `get_world_size`), for code that calls them in the threads of `run`.

If all threads of `run` wait and nothing meets, that is a deadlock, reported at once. If other threads take part, too,
`patience` seconds without a meeting count as a deadlock.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from time import monotonic
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Kind = Literal["send", "receive"]
# A stream: that of two ranks, for their messages outside of groups; None is the communicator's.
Pair = frozenset[int] | None


class Deadlock(RuntimeError):
    """Nothing can go on. The text has the first unfinished call of each stream."""


class Mismatch(RuntimeError):
    """A send met a receive of another size."""


class Operation(NamedTuple):
    """One message of a call, to or from rank `peer`."""

    kind: Kind
    tensor: Tensor
    peer: int

    def __str__(self) -> str:
        return f"{self.kind} {self.tensor.nbytes} bytes {'to' if self.kind == 'send' else 'from'} rank {self.peer}"


@dataclass(eq=False)
class Call:
    """Messages that are over together; `wait` blocks until they are."""

    world: "Unbuffered"
    open: list[Operation]

    def wait(self, *timeout: object) -> bool:
        """Block until the call is over. Raises Deadlock, Mismatch, or what another rank has raised."""
        self.world.wait(self)
        return True

    def is_completed(self) -> bool:
        return not self.open


class Cards:
    """The GPUs of the ranks of several worlds, by name. On each, at most `room` calls are at work at once."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.changed = threading.Condition()
        self.worlds: list[Unbuffered] = []
        self._at_work: defaultdict[str, list[Call]] = defaultdict(list)

    def has(self, card: str, call: Call) -> bool:
        """True if a call is at work on its card. It begins now if there is room."""
        own = self._at_work[card] = [each for each in self._at_work[card] if each.open]
        if call not in own and len(own) < self.room:
            own.append(call)
        return call in own


class Unbuffered:
    """A communicator of `size` ranks, on the GPUs `places` of `cards` if these are given. `trace` has the meetings in
    order: (sender, receiver, bytes)."""

    def __init__(
        self,
        size: int,
        *,
        eager: bool = False,
        patience: float = 20.0,
        cards: Cards | None = None,
        places: Sequence[str] = (),
    ) -> None:
        self.size, self.eager, self.patience = size, eager, patience
        self.trace: list[tuple[int, int, int]] = []
        self._cards, self._places = cards, places
        self._changed = cards.changed if cards else threading.Condition()
        if cards:
            cards.worlds.append(self)
        # Keys are a rank and, for the stream of a pair of ranks, the pair.
        self._streams: defaultdict[tuple[int, Pair], deque[Call]] = defaultdict(deque)
        self._fault: Exception | None = None
        self._running: set[threading.Thread] = set()  # threads of `run` that have not ended
        self._awaited: dict[threading.Thread, Call] = {}
        self._strangers = False

    def rank(self, rank: int) -> "UnbufferedRank":
        return UnbufferedRank(self, rank)

    def run(self, *works: Callable[[], T]) -> list[T]:
        """Do the work of each rank in a thread of its own, and return their results. Raises the first error, or
        AssertionError for calls that no other rank met.
        """
        results: list[Any] = [None] * len(works)
        errors: list[Exception] = []

        def run(rank: int) -> None:
            _here.end = self.rank(rank)
            try:
                results[rank] = works[rank]()
            except Exception as error:
                errors.append(error)
                self._break(error)
            finally:
                with self._changed:
                    self._running.discard(threading.current_thread())
                    self._look_for_deadlock()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(works))]
        self._running = set(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert not self._heads(), f"calls that nobody met: {self._heads()}"
        return results

    def start(self, rank: int, operations: Sequence[Operation], grouped: bool) -> Call:
        """Enqueue a call of a rank in its stream, and let all meetings happen that are possible now."""
        call = Call(self, list(operations))
        pair = None if grouped or self.eager else frozenset({rank, operations[0].peer})
        with self._changed:
            if self._fault is not None:
                raise self._fault
            if call.open:
                self._streams[rank, pair].append(call)
                # A meeting ends calls, which lets the next ones of their streams begin.
                worlds = self._cards.worlds if self._cards else [self]
                while any(world._met(*key) for world in worlds for key in [*world._streams]):
                    pass
                self._changed.notify_all()
        return call

    def wait(self, call: Call) -> None:
        me = threading.current_thread()
        with self._changed:
            self._strangers |= me not in self._running
            self._awaited[me] = call
            try:
                met, until = len(self.trace), monotonic() + self.patience
                while call.open:
                    self._look_for_deadlock()
                    if self._fault is not None:
                        raise self._fault
                    self._changed.wait(0.1)
                    if len(self.trace) > met:
                        met, until = len(self.trace), monotonic() + self.patience
                    elif monotonic() > until:
                        self._break(Deadlock(f"nothing meets: {self._heads()}"))
            finally:
                del self._awaited[me]

    def close(self, error: Exception) -> None:
        """End all waits, now and later, with `error`."""
        self._break(error)

    def as_torch(self, monkeypatch: Any) -> None:
        """Replace torch's calls for the threads of `run`. A group's ranks are the world's."""

        def isend(tensor: Tensor, dst: Any = None, group: Any = None, tag: int = 0, **more: int) -> Call:
            return _here.end.send(tensor, more.get("group_dst", dst))

        def irecv(tensor: Tensor, src: Any = None, group: Any = None, tag: int = 0, **more: int) -> Call:
            return _here.end.receive(tensor, more.get("group_src", src))

        def batch(given: Sequence[P2POp]) -> list[Call]:
            kinds: dict[Any, Kind] = {isend: "send", irecv: "receive"}
            operations = [Operation(kinds[each.op], each.tensor, each.peer) for each in given]
            return [_here.end.group(operations)] if operations else []

        def send(*args: Any, **named: Any) -> None:
            isend(*args, **named).wait()

        def recv(*args: Any, **named: Any) -> None:
            irecv(*args, **named).wait()

        replaced: dict[str, Any] = {
            "isend": isend,
            "irecv": irecv,
            "send": send,
            "recv": recv,
            "batch_isend_irecv": batch,
            "P2POp": P2POp,
            "get_rank": lambda group=None: _here.end.rank,
            "get_world_size": lambda group=None: self.size,
            "get_global_rank": lambda group, rank: rank,
        }
        for name, function in replaced.items():
            monkeypatch.setattr(dist, name, function)

    def _met(self, rank: int, pair: Pair) -> bool:
        """True if a send of a stream's first call has met its receive now."""
        calls = self._streams[rank, pair]
        for ours in calls[0].open if calls and self._at_work(rank, calls[0]) else ():
            others = self._streams[ours.peer, pair] if ours.kind == "send" else None
            # Between two ranks the messages of a call keep their order: the first open one is next.
            theirs = (
                next((o for o in others[0].open if o.kind == "receive" and o.peer == rank), None) if others else None
            )
            if not others or theirs is None or not self._at_work(ours.peer, others[0]):
                continue
            if ours.tensor.nbytes != theirs.tensor.nbytes:
                self._break(Mismatch(f"rank {rank}: {ours} met, on rank {ours.peer}, {theirs}"))
                return False
            with torch.no_grad():
                theirs.tensor.copy_(ours.tensor.reshape(theirs.tensor.shape))
            self.trace.append((rank, ours.peer, ours.tensor.nbytes))
            for queue, over in ((calls, ours), (others, theirs)):
                queue[0].open = [each for each in queue[0].open if each is not over]
                if not queue[0].open:
                    queue.popleft()
            return True
        return False

    def _at_work(self, rank: int, call: Call) -> bool:
        return self._cards is None or self._cards.has(self._places[rank], call)

    def _look_for_deadlock(self) -> None:
        """Report a deadlock if all threads wait for open calls, since then none is left to meet them."""
        waiting = {thread for thread, call in self._awaited.items() if call.open}
        if self._running and self._running <= waiting and not self._strangers:
            self._break(Deadlock(f"nothing meets: {self._heads()}"))

    def _heads(self) -> str:
        """Return the first unfinished call of each stream, as text."""
        heads = [(rank, calls[0].open) for (rank, _), calls in self._streams.items() if calls]
        return "; ".join(f"rank {rank}: {', '.join(map(str, own))}" for rank, own in sorted(heads, key=itemgetter(0)))

    def _break(self, error: Exception) -> None:
        with self._changed:
            self._fault = self._fault or error
            self._changed.notify_all()


class UnbufferedRank:
    """The calls of one rank."""

    def __init__(self, world: Unbuffered, rank: int) -> None:
        self.world, self.rank = world, rank

    def group(self, operations: Sequence[Operation]) -> Call:
        """Begin messages that are over together, in the communicator's stream."""
        return self.world.start(self.rank, operations, grouped=True)

    def send(self, tensor: Tensor, peer: int) -> Call:
        """Begin a message outside of a group, in the stream of the pair."""
        return self.world.start(self.rank, [Operation("send", tensor, peer)], grouped=False)

    def receive(self, tensor: Tensor, peer: int) -> Call:
        return self.world.start(self.rank, [Operation("receive", tensor, peer)], grouped=False)


class P2POp:
    """torch's `P2POp`, for a group whose ranks are the world's."""

    def __init__(
        self, op: Any, tensor: Tensor, peer: Any = None, group: Any = None, tag: int = 0, group_peer: Any = None
    ) -> None:
        self.op, self.tensor, self.peer = op, tensor, peer if group_peer is None else group_peer


class _Here(threading.local):
    end: UnbufferedRank


_here = _Here()
