"""One sync of weights, on both sides: publish, send, receive, check, swap.

The sending rank's `WeightPublisher` takes a snapshot of the carried value's weights (`publish`) and sends it to any
number of replicas, while the optimizer goes on. A replica may have several ranks, with one of these objects on each:
weights go from shard to shard. Two things go by the control plane, both equal on all ranks of the sender: once, the
`description` of the weights, from which both sides make the same plan; and for each version the digests that `publish`
returns. The receiving rank's `WeightReceiver` fills its shadow buffer while its nodes read the live weights, checks
what arrived, and swaps on command, between two steps.

    digests = publisher.publish(7)                              # sender, on Publish → Published
    publisher.start(7, transport, ranks, done, mesh)            # sender, on Send
    receiver.describe(publisher.description)                    # receiver, once
    receiver.start(7, digests, transport, done)                 # receiver, on Send; done → Arrived
    receiver.swap(7)                                            # receiver, on Swap → Swapped

Invariants: a snapshot that is being sent is not overwritten; the live weights change only in `swap`; a version arrives
once, and is newer than the live one. On a GPU all of this has its own streams (`streams`). A snapshot is taken after
the work that computed the weights, and before the work that changes them. A shadow is written after the steps that read
it before the last swap, and before the steps that will read it after the next swap.

If replicas may be lost (`elastic`), a held version may be published again, and a receiver may go back to an older
version, even if a newer one has arrived and is not live yet.
"""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.graph.protocols import EXPERT, TENSOR, Axes, Carried, Described, Rule, Sharded
from penstock.graph.types import Weights
from penstock.runtime.tensor.buffers import (
    Allocate,
    Convert,
    Device,
    Done,
    DoubleBuffer,
    Shards,
    WeightSnapshot,
    in_background,
)
from penstock.runtime.tensor.digest import MODES, Add, ChecksumError, Checksums, Mode, alone, hashed_tensors
from penstock.runtime.tensor.layout import ITEMSIZE, Copy, Layout, LayoutError, Mesh, sharded
from penstock.runtime.tensor.process_group import AllReduce, Receiving, Sending, TransportError
from penstock.runtime.tensor.quantise import Converter, Restorer
from penstock.runtime.tensor.streams import Fence, SideStream, current_stream, fence
from penstock.runtime.tensor.wire_format import SyncLayouts, converted, rules_to_json


class LocalTransport:
    """Both sides in one process, taking turns: `send` notes its pieces, `receive` copies them."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self._sent: dict[tuple[int, Copy], Tensor] = {}

    def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        pieces = {(version, copy): parts[copy.tensor].cut(copy.region) for copy in copies}
        self._sent |= pieces
        return sum(piece.nbytes for piece in pieces.values())

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        # Drop pieces of other versions: their snapshots may be overwritten by now.
        sent, self._sent = self._sent, {}
        total = 0
        for copy in copies:
            if (version, copy) not in sent:
                raise TransportError(f"{self.channel}: version {version}: {copy.tensor} {copy.region} was not sent")
            piece = sent[version, copy]
            parts[copy.tensor].cut(copy.region).copy_(piece)
            total += piece.nbytes
        return total

    def close(self) -> None:
        self._sent.clear()


def source_layout(carried: Carried, ranks: int, add: Add) -> tuple[Layout, Mapping[str, Rule], int]:
    """The layout of the value's weights on its ranks, the rules by which receivers split them, and the number of a
    layer's experts, which receivers may divide.

    The ranks exchange the dtypes (through `add`), since a rank may hold nothing of a tensor. Raises `LayoutError` for
    weights that cannot be sent, or that do not match the sharding.
    """
    own = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in carried.weights().items()}
    if isinstance(carried, Sharded):
        own = {name: (shape, dtype) for name, (shape, dtype) in own.items() if 0 not in shape}
    if unknown := [f"{name} ({dtype})" for name, (_, dtype) in own.items() if dtype not in ITEMSIZE]:
        raise LayoutError(f"dtypes that do not travel: {', '.join(unknown)}; needed one of {', '.join(ITEMSIZE)}")
    if not isinstance(carried, Sharded):
        return Layout.whole([(name, *entry) for name, entry in own.items()], ranks), {}, 0
    sharding = carried.sharding()
    mesh, shapes = Mesh(tuple(sharding.mesh)), sharding.shapes
    if mesh.size != ranks:
        raise LayoutError(f"sharding over {mesh}: given {mesh.size} ranks, needed the replica's {ranks}")
    if surplus := own.keys() - shapes.keys():
        raise LayoutError(f"weights that the sharding does not name: {', '.join(sorted(surplus))}")
    # The number of ranks with each dtype.
    votes = [[int(name in own and own[name][1] == dtype) for dtype in ITEMSIZE] for name in shapes]
    found = [
        [dtype for dtype, count in zip(ITEMSIZE, row, strict=True) if count]
        for row in add(torch.tensor(votes, dtype=torch.int64).view(len(shapes), len(ITEMSIZE))).tolist()
    ]
    said = dict(zip(shapes, found, strict=True))
    if wrong := [
        f"  {name}: {' and '.join(dtypes) or 'on no rank'}" for name, dtypes in said.items() if len(dtypes) != 1
    ]:
        raise LayoutError("\n".join(["the ranks do not hold one dtype of each tensor:", *wrong]))
    # The sharding has no dtypes, since it may be made before the weights.
    entries = [(name, tuple(shape), said[name][0]) for name, shape in shapes.items()]
    layout = sharded(entries, mesh, sharding.rules, sharding.stages, experts=sharding.experts)
    return layout, sharding.wanted, sharding.experts


# A sender's weights, as JSON: their "layout", the "wire" format, the rules by which receivers split them ("wanted"),
# the number of "experts" of a layer, the mode of their checksums ("proof"), and what the carried value says "about"
# them.
Description = dict[str, Any]


class SyncError(RuntimeError):
    """A command out of order: for a version that is not held, was received already, or has not arrived."""


class Moved(NamedTuple):
    """One rank's part of one sync: bytes, seconds of the transfer, and seconds of checksums (0 for a sender)."""

    version: int
    nbytes: int
    wire_s: float
    prove_s: float


class WeightPublisher:
    """One rank's snapshots of a carried value's weights, of the last `keep` published versions.

    The value is sharded as its `sharding` says; without one, each of the `ranks` ranks holds all of it, and the plan
    divides the sending. `wire` is one of `wire_format`; "" leaves tensors as `Carried.weights` gives them. `add` sums
    over the ranks; it is needed if no rank holds everything. All ranks must publish the same versions in the same
    order. A snapshot that is being sent is never overwritten: if all are, one more is made.
    """

    def __init__(
        self,
        channel: str,
        carried: Carried,
        *,
        rank: int = 0,
        ranks: int = 1,
        wire: str = "",
        keep: int = 1,
        device: Device = "cpu",
        add: AllReduce | None = None,
        proof: Mode = "full",
        elastic: bool = False,
    ) -> None:
        if proof not in MODES:
            raise ValueError(f"{channel}: proof: given {proof!r}, needed one of {', '.join(MODES)}")
        if ranks > 1 and add is None and isinstance(carried, Sharded):
            raise ValueError(f"{channel}: given weights in parts on {ranks} ranks, needed `add`, to sum over them")
        self.channel = channel
        self._source, wanted, experts = source_layout(carried, ranks, add or alone)
        self.layout = converted(self._source, wire)
        self._convert: Convert | None = None
        if wire:
            agree = add.maximum if add else None
            self._convert = partial(Converter(self._source, self.layout, rank).convert, agree=agree)
        self._carried = carried
        self._rank = rank
        self._keep = keep
        self._elastic = elastic
        self._device = device
        self._stream = SideStream(device)
        self._proof = proof
        self._checksums = Checksums(self.layout, rank, add)
        self._names = tuple(t.name for t in self.layout.tensors)
        self.description: Description = {
            "layout": self._source.to_json(),
            "wire": wire,
            "wanted": rules_to_json(wanted),
            "experts": experts,
            "proof": proof,
            "about": dict(carried.about()) if isinstance(carried, Described) else {},
        }
        self._snapshots: list[WeightSnapshot] = []
        self._published: dict[int, dict[str, int]] = {}  # the digests of the held versions
        self._sending: Counter[int] = Counter()  # transfers in progress, by version
        self._lock = threading.Lock()
        self._copies: dict[Mesh, tuple[Copy, ...]] = {}

    def publish(self, version: int, carried: Carried | None = None) -> dict[str, int]:
        """Take a snapshot of the weights as `version`, in the wire format; blocks meanwhile. Return its digests by
        tensor, for the tensors that the mode asks for. `carried` is the current value: an update may return another
        object than it was given. Raises `ConversionError` for weights that the format cannot represent.
        """
        if self._elastic and version in self._published:
            return self._published[version]
        self._carried = self._carried if carried is None else carried
        names = hashed_tensors(self._proof, version, self._names)
        weights = self._carried.weights()
        with self._stream.in_order():
            snapshot = self._free_snapshot(version)
            hashed = partial(self._checksums.digests, snapshot.parts, names)
            digests = snapshot.take(version, weights, hashed, self._convert)
        self._published = {s.version: self._published.get(s.version, digests) for s in self._snapshots}
        return digests

    def send(self, version: int, transport: Sending, ranks: int = 1, mesh: Axes | None = None) -> Moved:
        """Send a published version to a replica on `mesh`, or to `ranks` ranks that each get everything; blocks until
        it is sent. A `LayoutError` is raised before any byte is sent.
        """
        return self._send(self._hold(version), transport, Mesh.of(mesh, ranks))

    def start(self, version: int, transport: Sending, ranks: int, done: Done[Moved], mesh: Axes | None = None) -> None:
        """`send` in the background. The snapshot is held from now on, whatever is published meanwhile."""
        snapshot, target = self._hold(version), Mesh.of(mesh, ranks)
        in_background(f"send {self.channel} {version}", lambda: self._send(snapshot, transport, target), done)

    def _send(self, snapshot: WeightSnapshot, transport: Sending, mesh: Mesh) -> Moved:
        try:
            copies = self._planned(mesh)
            started = time.perf_counter()
            with self._stream.detached():  # without a fence: a snapshot is complete when `publish` returns
                nbytes = transport.send(snapshot.version, copies, snapshot.parts)
            return Moved(snapshot.version, nbytes, time.perf_counter() - started, 0.0)
        finally:
            with self._lock:
                self._sending[snapshot.version] -= 1

    def _planned(self, mesh: Mesh) -> tuple[Copy, ...]:
        """The copies that this rank sends to a replica on `mesh`."""
        # Always the same object: transports cache their buckets by its identity.
        with self._lock:  # two replicas may ask at once
            if mesh not in self._copies:
                self._copies[mesh] = SyncLayouts.of(self.description, mesh).plan.sends(self._rank)
            return self._copies[mesh]

    def _hold(self, version: int) -> WeightSnapshot:
        with self._lock:
            for snapshot in self._snapshots:
                if snapshot.version == version:
                    self._sending[version] += 1
                    return snapshot
            held = sorted(s.version for s in self._snapshots)
            raise SyncError(f"{self.channel}: send version {version}: only {held} are held (keep={self._keep})")

    def _free_snapshot(self, version: int) -> WeightSnapshot:
        """The oldest snapshot that is neither among the last `keep` (with the new one) nor being sent, or a new one."""
        with self._lock:
            by_age = sorted(self._snapshots, key=lambda s: s.version)
            if by_age and by_age[-1].version >= version:
                raise SyncError(f"{self.channel}: publish version {version}: {by_age[-1].version} is published already")
            for snapshot in by_age[: max(0, len(by_age) - self._keep + 1)]:
                if not self._sending[snapshot.version]:
                    del self._sending[snapshot.version]
                    # It must not be sent while it is overwritten.
                    snapshot.version = -1
                    return snapshot
            self._snapshots.append(WeightSnapshot(self._source, self.layout, self._rank, self._device))
            return self._snapshots[-1]


class WeightReceiver:
    """One rank's shards of a channel's weights. On a `mesh` (axis, size) these are its part of each tensor over the
    axis "tp", by the rules of the sender, and its experts of the axis "ep"; without a mesh, each of `ranks` ranks has
    everything.

    `weights` is always the same object, and only `swap` changes it; at first it has version -1 and no tensors. The next
    sync overwrites the tensors of the previous version, so readers must take the mapping again at each step. `add` sums
    over the replica's ranks, as for a publisher; without it each rank must hold everything. `allocate` gives the
    memory, such as `one_sided.SharedMemory`. Readers get tensors in the sender's dtypes (`quantise` says at what cost)
    or, unless it `restores` them, as they were sent: elements, and scales by NAME.scale. `fused` tensors lie next to
    each other (see `Fusing`).
    """

    def __init__(
        self,
        channel: str,
        *,
        rank: int = 0,
        ranks: int = 1,
        mesh: Axes | None = None,
        device: Device = "cpu",
        add: Add | None = None,
        allocate: Allocate | None = None,
        restores: bool = True,
        elastic: bool = False,
        fused: Sequence[Sequence[str]] = (),
    ) -> None:
        self.channel = channel
        self.mesh = Mesh.of(mesh, ranks)
        if add is None and self.mesh.extent(TENSOR) * self.mesh.extent(EXPERT) > 1:
            raise ValueError(f"{channel}: given weights in parts on {self.mesh}, needed `add`, to sum over them")
        self.weights = Weights(-1, {})
        self._rank = rank
        self._device = torch.device(device)
        self._stream = SideStream(device)
        self._read: Fence | None = None  # the steps that read what was live before the last swap
        self._filled: Fence | None = None  # the version that arrived
        self._add = add
        self._allocate = allocate
        self._restores = restores
        self._elastic = elastic
        self._fused = fused
        self._restorer: Restorer | None = None
        self._arena: DoubleBuffer | None = None
        self._checksums: Checksums | None = None
        self._copies: tuple[Copy, ...] = ()
        self.description: Description = {}
        self._arrived: int | None = None
        self._busy = False

    def describe(self, description: Description) -> None:
        """Set the sender's description of its weights, before the first version. Raises `LayoutError` for another
        description than before."""
        if self.description and self.description != description:
            raise LayoutError(f"{self.channel}: the weights' names, shapes, dtypes or layout changed during the run")
        self.description = description
        self.weights.about = description["about"]

    def receive(self, version: int, digests: Mapping[str, int], transport: Receiving) -> Moved:
        """Fill the shadow with `version` and compare it with the sender's `digests`; blocks. An error does not change
        the live weights."""
        self._begin(version)
        return self._receive(version, digests, transport)

    def start(self, version: int, digests: Mapping[str, int], transport: Receiving, done: Done[Moved]) -> None:
        """`receive` in the background."""
        self._begin(version)
        in_background(f"receive {self.channel} {version}", lambda: self._receive(version, digests, transport), done)

    def swap(self, version: int) -> None:
        """Make the version that arrived live. Call it between two steps of the readers of `weights`."""
        if self._arena is None or self._arrived != version:
            raise SyncError(f"{self.channel}: swap to version {version}: {self._state()}")
        if self._filled is not None:
            current_stream(self._device).wait_event(self._filled)
        self._read = fence(self._device)
        self._arena.swap()
        self._arrived = None
        live = self._arena.live
        restored = self._restorer.swap(live) if self._restorer else None
        self.weights.tensors = restored or {name: part.tensor for name, part in live.items()}
        # Set the version last: a reader that sees it also sees its tensors.
        self.weights.version = version

    def _begin(self, version: int) -> None:
        """Check that the shadow may be written: that it is neither in use, nor (unless `elastic`) about to go live."""
        late = self._arrived is not None or version < self.weights.version
        if not self.description or self._busy or version == self.weights.version or (late and not self._elastic):
            raise SyncError(f"{self.channel}: receive version {version}: {self._state()}")
        self._busy, self._arrived = True, None

    def _receive(self, version: int, digests: Mapping[str, int], transport: Receiving) -> Moved:
        try:
            with self._stream.detached(self._read):
                return self._received(version, digests, transport)
        finally:
            self._busy = False

    def _received(self, version: int, digests: Mapping[str, int], transport: Receiving) -> Moved:
        arena, checksums = self._prepared()
        mode = self.description["proof"]
        needed = hashed_tensors(mode, version, [t.name for t in arena.layout.tensors])
        if digests.keys() != set(needed):
            names = ", ".join(sorted(digests.keys() ^ set(needed)))
            raise ChecksumError(f"{self.channel}: version {version}: a proof ({mode}) that differs in {names}")
        started = time.perf_counter()
        # Into the shadow, since the live weights are being read.
        nbytes = transport.receive(version, self._copies, arena.shadow)
        arrived = time.perf_counter()
        checksums.check(arena.shadow, digests, version, self._sides())
        proved = time.perf_counter()
        if self._restorer is not None:
            self._restorer.fill(arena.shadow)
        self._filled, self._arrived = fence(self._device), version
        return Moved(version, nbytes, arrived - started, proved - arrived)

    def _prepared(self) -> tuple[DoubleBuffer, Checksums]:
        """The buffers and their checksums; made for the first version."""
        if self._arena is None or self._checksums is None:
            layouts, wire = SyncLayouts.of(self.description, self.mesh), self.description["wire"]
            self._copies, target = layouts.plan.receives(self._rank), layouts.received
            if wire and self._restores:
                self._restorer = Restorer(layouts.read, target, wire, self._rank, self._device, self._fused)
            self._arena = DoubleBuffer(target, self._rank, self._device, self._allocate, self._fused)
            self._checksums = Checksums(target, self._rank, self._add)
        return self._arena, self._checksums

    def _sides(self) -> str:
        sources = sorted({copy.source for copy in self._copies})
        came = f" from source ranks {', '.join(map(str, sources))}" if len(sources) > 1 else ""
        return f"{self.channel}, destination rank {self._rank}{came}"

    def _state(self) -> str:
        doing = "a version is being received" if self._busy else f"arrived: {self._arrived}"
        if not self.description:
            doing = "the sender has not described its weights"
        return f"live: {self.weights.version}, {doing}"


def sync_in_process(
    publisher: WeightPublisher, receiver: WeightReceiver, version: int, digests: Mapping[str, int]
) -> Moved:
    """Send and receive in one process and one thread, with the same plan and checksums, and a single copy."""
    transport = LocalTransport(receiver.channel)
    publisher.send(version, transport, mesh=receiver.mesh.axes)
    return receiver.receive(version, digests, transport)
