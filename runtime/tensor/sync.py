"""One sync of weights, from both sides: publish, send, receive, prove, swap.

The sending rank's `Publisher` copies the carried value's weights aside (`publish`) and sends that copy to any number
of replicas, while the optimizer goes on. The facts that `publish` returns travel by the control plane: the layout,
from which both sides make the same plan, and the proof. The receiving rank's `Receiver` fills its shadow while its
nodes read the live weights, proves what arrived, and swaps when it is told to, between two steps.

    facts = publisher.publish(7)                                # sender, at the firing of broadcast
    publisher.start(7, transport, ranks, done)                  # sender, on Send
    receiver.start(7, facts, transport, done)                   # receiver, on Send; done → Arrived
    receiver.swap(7)                                            # receiver, on Swap → Swapped
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from penstock.graph.types import Carried, Weights
from penstock.runtime.tensor.arena import Arena, Device, Snapshot
from penstock.runtime.tensor.digest import ProofError, compare, digest
from penstock.runtime.tensor.layout import ITEMSIZE, Layout, LayoutError
from penstock.runtime.tensor.plan import Plan
from penstock.runtime.tensor.reshard import reshard
from penstock.runtime.tensor.transport import LocalTransport, Transport

Facts = dict[str, Any]
T = TypeVar("T")
Done = Callable[[T | Exception], None]
"""What a background transfer calls once, in its own thread: with its result, or with the error that ended it."""


class SyncError(RuntimeError):
    """A command that does not follow from those before it: a version not held, twice received, or not arrived."""


class Moved(NamedTuple):
    """One rank's part of one sync: bytes, seconds on the wire, and seconds spent on the proof (0 for a sender)."""

    version: int
    nbytes: int
    wire_s: float
    prove_s: float


class Publisher:
    """One rank's copies of a carried value's weights, as of the last `keep` versions published.

    `wire` names the dtype in which floating-point tensors travel; None leaves each as `Carried.weights` gives it.
    With `ranks` > 1 every rank holds all the weights, and the plan shares the sending out. A copy being sent is never
    written over: one more is made when they all are.
    """

    def __init__(
        self,
        channel: str,
        carried: Carried,
        *,
        rank: int = 0,
        ranks: int = 1,
        wire: str | None = None,
        keep: int = 2,
        device: Device = "cpu",
    ) -> None:
        self.channel = channel
        self.layout = _whole_layout(carried.weights(), wire, ranks)
        self._carried = carried
        self._rank = rank
        self._keep = keep
        self._device = device
        self._snapshots: list[Snapshot] = []
        self._sending: Counter[int] = Counter()  # transfers under way, by version
        self._lock = threading.Lock()
        self._plans: dict[int, Plan] = {}

    def publish(self, version: int) -> Facts:
        """Copy the weights aside as `version`; what receivers need to know, JSON-able. Blocks while it copies."""
        started = time.perf_counter()
        snapshot = self._free_snapshot(version)
        snapshot.take(version, self._carried.weights())
        copied = time.perf_counter()
        proof = digest({name: part.tensor for name, part in snapshot.parts.items()})
        return {
            "version": version,
            "layout": self.layout.to_json(),
            "digest": proof,
            "copy_s": copied - started,
            "prove_s": time.perf_counter() - copied,
        }

    def send(self, version: int, transport: Transport, ranks: int = 1) -> Moved:
        """Send a published version to a replica of `ranks` ranks; blocks until it is sent."""
        return self._send(self._hold(version), transport, ranks)

    def start(self, version: int, transport: Transport, ranks: int, done: Done[Moved]) -> None:
        """`send` in the background. The version is held from now on, whatever is published meanwhile."""
        snapshot = self._hold(version)
        _in_background(f"send {self.channel} {version}", lambda: self._send(snapshot, transport, ranks), done)

    def _send(self, snapshot: Snapshot, transport: Transport, ranks: int) -> Moved:
        try:
            plan = self._plan(ranks)
            started = time.perf_counter()
            nbytes = transport.send(snapshot.version, plan.sends(self._rank), snapshot.parts)
            return Moved(snapshot.version, nbytes, time.perf_counter() - started, 0.0)
        finally:
            with self._lock:
                self._sending[snapshot.version] -= 1

    def _plan(self, ranks: int) -> Plan:
        if ranks not in self._plans:
            self._plans[ranks] = reshard(self.layout, self.layout.replicated(ranks))
        return self._plans[ranks]

    def _hold(self, version: int) -> Snapshot:
        with self._lock:
            for snapshot in self._snapshots:
                if snapshot.version == version:
                    self._sending[version] += 1
                    return snapshot
            held = sorted(s.version for s in self._snapshots)
            raise SyncError(f"{self.channel}: send version {version}: only {held} are held (keep={self._keep})")

    def _free_snapshot(self, version: int) -> Snapshot:
        """The oldest copy that is neither among the last `keep` (with the new one) nor being sent; else a new one."""
        with self._lock:
            by_age = sorted(self._snapshots, key=lambda s: s.version)
            if by_age and by_age[-1].version >= version:
                raise SyncError(f"{self.channel}: publish version {version}: {by_age[-1].version} is published already")
            for snapshot in by_age[: max(0, len(by_age) - self._keep + 1)]:
                if not self._sending[snapshot.version]:
                    del self._sending[snapshot.version]
                    snapshot.version = -1
                    return snapshot
            self._snapshots.append(Snapshot(self.layout, self._rank, self._device))
            return self._snapshots[-1]


class Receiver:
    """One rank's copy of a channel's weights, whole.

    `weights` is one object for ever, changed by `swap` alone: version -1 and no tensors at first. The tensors of the
    version before are written over by the next sync, so that readers take the mapping anew at each step.
    """

    def __init__(self, channel: str, *, rank: int = 0, ranks: int = 1, device: Device = "cpu") -> None:
        self.channel = channel
        self.ranks = ranks
        self.weights = Weights(-1, {})
        self._rank = rank
        self._device = device
        self._arena: Arena | None = None
        self._plan = Plan((), 0, 0)
        self._arrived: int | None = None
        self._busy = False

    def receive(self, version: int, facts: Mapping[str, Any], transport: Transport) -> Moved:
        """Fill the shadow with `version` and prove it; blocks. After an error the live weights are as they were."""
        self._begin(version, facts)
        return self._receive(version, facts, transport)

    def start(self, version: int, facts: Mapping[str, Any], transport: Transport, done: Done[Moved]) -> None:
        """`receive` in the background."""
        self._begin(version, facts)
        _in_background(f"receive {self.channel} {version}", lambda: self._receive(version, facts, transport), done)

    def swap(self, version: int) -> None:
        """Make the version that arrived live; the caller is between two steps of whatever reads `weights`."""
        if self._arena is None or self._arrived != version:
            raise SyncError(f"{self.channel}: swap to version {version}: {self._state()}")
        self._arena.swap()
        self._arrived = None
        self.weights.tensors = {name: part.tensor for name, part in self._arena.live.items()}
        self.weights.version = version

    def _begin(self, version: int, facts: Mapping[str, Any]) -> None:
        """Nothing may be written into a shadow that is in use, or that is about to go live."""
        if self._busy or self._arrived is not None or version <= self.weights.version:
            raise SyncError(f"{self.channel}: receive version {version}: {self._state()}")
        if facts["version"] != version:
            raise ProofError(f"{self.channel}: given the proof of version {facts['version']}, needed {version}")
        self._busy = True

    def _receive(self, version: int, facts: Mapping[str, Any], transport: Transport) -> Moved:
        try:
            arena = self._prepared(Layout.from_json(facts["layout"]))
            started = time.perf_counter()
            nbytes = transport.receive(version, self._plan.receives(self._rank), arena.shadow)
            arrived = time.perf_counter()
            found = digest({name: part.tensor for name, part in arena.shadow.items()})
            compare(version, facts["digest"], found, f"{self.channel}, destination rank {self._rank}")
            self._arrived = version
            return Moved(version, nbytes, arrived - started, time.perf_counter() - arrived)
        finally:
            self._busy = False

    def _prepared(self, source: Layout) -> Arena:
        """The arena, made for the first layout that is sent; all later ones must be equal."""
        target = source.replicated(self.ranks)
        if self._arena is None:
            self._plan = reshard(source, target)
            self._arena = Arena(target, self._rank, self._device)
        elif self._arena.layout != target:
            raise LayoutError(f"{self.channel}: the weights' names, shapes or dtypes changed during the run")
        return self._arena

    def _state(self) -> str:
        doing = "a version is being received" if self._busy else f"arrived: {self._arrived}"
        return f"live: {self.weights.version}, {doing}"


def hand_over(publisher: Publisher, receiver: Receiver, version: int, facts: Mapping[str, Any]) -> Moved:
    """Send and receive in one process and one thread: the same plan, the same proof, one copy."""
    transport = LocalTransport(receiver.channel)
    publisher.send(version, transport, receiver.ranks)
    return receiver.receive(version, facts, transport)


def _whole_layout(tensors: Mapping[str, Tensor], wire: str | None, ranks: int) -> Layout:
    def dtype(tensor: Tensor) -> str:
        return wire if wire is not None and tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")

    entries = [(name, tuple(t.shape), dtype(t)) for name, t in tensors.items()]
    unknown = [f"{name} ({dtype})" for name, _, dtype in entries if dtype not in ITEMSIZE]
    if unknown:
        raise LayoutError(f"dtypes that do not travel: {', '.join(unknown)}; needed one of {', '.join(ITEMSIZE)}")
    return Layout.whole(entries, ranks)


def _in_background(name: str, work: Callable[[], T], done: Done[T]) -> None:
    def run() -> None:
        try:
            result: T | Exception = work()
        except Exception as error:
            result = error
        done(result)

    # A daemon: a peer's deadline must not hold up an interpreter that is told to end.
    threading.Thread(target=run, name=name, daemon=True).start()
