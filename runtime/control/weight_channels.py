"""A rank's ways of weights: what it publishes, what it receives, and the bridges to the other side.

`runtime/tensor/sync` knows how a sync goes; here is which channels this rank has, and what their ends become:
`Arrived` when a version is in the shadow and proved, `Abort` when it could not be.

The bridges of one rank: one for each channel and pair of replicas between which weights go.

Per-process settings shared by all weight channels.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock
from typing import NamedTuple, TypeVar

from penstock.graph.protocols import Carried
from penstock.graph.types import Weights
from penstock.runtime.cluster.endpoints import LOOPBACK
from penstock.runtime.control.messages import Manifest
from penstock.runtime.control.routes import Routes, hosts
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.schedule.compile import Channel
from penstock.runtime.schedule.events import Abort, Arrived, Send
from penstock.runtime.tensor.broadcast_chain import ChainForwarder, ChainHop
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.cuda_ipc import DeviceMemory
from penstock.runtime.tensor.delta import DeltaTransport
from penstock.runtime.tensor.digest import ChecksumError
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.one_sided import SharedMemory, WritableMemory
from penstock.runtime.tensor.process_group import AllReduce, OpenStore, Receiving, Side, Transport, TransportError
from penstock.runtime.tensor.send_recv import MessageTransport
from penstock.runtime.tensor.weight_sync import Moved, WeightPublisher, WeightReceiver, sync_in_process


@dataclass(frozen=True)
class Ground:
    """`run` is the run's id. `meet` is where the ranks of a group meet, by the group's name. Ranks of other hosts reach
    this one at `address`. `timeout` are the seconds that a wait for a peer may take. The run's `options` say how
    weights travel. `wake` wakes the rank's loop, and `warn` tells the user of a slower way."""

    run: str
    meet: OpenStore
    address: str
    timeout: float
    options: RunOptions
    wake: Callable[[], None]
    warn: Callable[[str], object]


class Span(NamedTuple):
    """The bridge of a channel from one replica to another, and on which side of it this rank is."""

    channel: str
    source: str
    target: str
    side: Side


class Bridges:
    """Opened by both sides at their first use, in the transfer's own thread, since opening waits for the other side."""

    def __init__(
        self,
        channels: Mapping[str, Channel],
        rank: int,
        device: str,
        ground: Ground,
        routes: Mapping[str, Routes],
        memories: Mapping[str, WritableMemory],
    ) -> None:
        self._channels, self._rank, self._device, self._ground = channels, rank, device, ground
        self._routes, self._memories = routes, memories
        self._opened: dict[Span, Transport] = {}
        self._turns: defaultdict[Span, Lock] = defaultdict(Lock)

    def lazy(self, span: Span) -> Transport:
        """A bridge that is opened when it is used. Versions are sent over it one after the other: the next one may be
        asked for as soon as the receiver has the one before, whose sender may not be through with it yet.
        """
        return _Lazy(self, span, self._turns[span])

    def open(self, span: Span) -> Transport:
        if span not in self._opened:
            channel, source, target, side = span
            way, routes, ground = self._channels[channel], self._routes[channel], self._ground
            start, end = way.replica(source), way.replica(target)
            apart = len(hosts(start, end)) > 1
            names = [f"{one.name} on host {one.ranks[0].host}" if apart else one.name for one in (start, end)]
            bridge = ReplicaLink(
                f"{channel} from {' to '.join(names)}",
                ground.meet(f"{channel} from {source} to {target}"),
                len(start.ranks),
                len(end.ranks),
                timeout=ground.timeout * routes.patience(target),
                address=ground.address if apart else LOOPBACK,
                delta=ground.options.delta,
                transport="messages" if apart or routes.chained(target) else ground.options.transport,
            )
            memory = self._memories.get(channel) if side == "destination" else None
            self._opened[span] = bridge.open(side, self._rank, memory, self._device)
        return self._opened[span]

    def messages(self, span: Span) -> MessageTransport:
        """One of a chain's, opened."""
        transport = self.open(span)
        assert isinstance(transport, MessageTransport)
        return transport

    def counts(self) -> Counter[str]:
        """The syncs that went out in full and as deltas, where there are any."""
        deltas = (way for way in [*self._opened.values()] if isinstance(way, DeltaTransport))
        return sum((way.counts for way in deltas), Counter())

    def close(self) -> None:
        for transport in [*self._opened.values()]:  # transfers that are given up may still open some
            transport.close()


@dataclass(frozen=True)
class _Lazy:
    bridges: Bridges
    span: Span
    turn: Lock

    def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        with self.turn:  # whoever has it waits for nothing without a deadline
            return self.bridges.open(self.span).send(version, copies, parts)

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        return self.bridges.open(self.span).receive(version, copies, parts)

    def close(self) -> None:
        self.bridges.open(self.span).close()


T = TypeVar("T")


class Ways(ABC):
    """The channels of one rank. `publishers` and `receivers` are made when a channel is first used."""

    def __init__(self, channels: Mapping[str, Channel], replica: str, rank: int, device: str, wire: str) -> None:
        self.replica, self.rank, self.device, self.wire = replica, rank, device, wire
        self.channels = channels
        self.publishers: dict[str, WeightPublisher] = {}
        self.receivers: dict[str, WeightReceiver] = {}
        self._events: SimpleQueue[Arrived | Abort] = SimpleQueue()

    def weights(self, channel: str) -> Weights:
        """What the nodes here read; one object for ever."""
        return self._receiver(channel).weights

    def publish(self, channel: str, version: int, carried: Mapping[str, Carried]) -> Manifest | None:
        """Copy the weights aside. The first rank's manifest stands for all; the first version's has the layout."""
        value, layout = carried[self.channels[channel].carried], ""
        if channel not in self.publishers:
            self.publishers[channel] = self._publisher(channel, value)
            layout = json.dumps(self.publishers[channel].description, separators=(",", ":"))
        digests = self.publishers[channel].publish(version, value)
        return None if self.rank else Manifest(channel, version, digests, layout)

    @abstractmethod
    def send(self, command: Send, manifest: Manifest | None) -> None:
        """Begin this rank's part of moving a published version: as sender, as receiver, or both. `manifest` is the
        version's for a receiver, and None for a sender."""

    def swap(self, channel: str, version: int) -> None:
        self.receivers[channel].swap(version)

    def arrived(self) -> list[Arrived | Abort]:
        """What background transfers have to tell since the last call."""
        return drained(self._events)

    def close(self) -> None:  # noqa: B027 - a process has none to give up
        """Give up all connections."""

    def _told(self, manifest: Manifest | None) -> tuple[WeightReceiver, Mapping[str, int]]:
        """The receiver of a version, which knows its layout from now on, and the version's digests."""
        assert manifest is not None
        receiver = self._receiver(manifest.channel)
        if manifest.layout:
            receiver.describe(json.loads(manifest.layout))
        return receiver, manifest.digests

    def _receiver(self, channel: str) -> WeightReceiver:
        if channel not in self.receivers:
            self.receivers[channel] = self._new_receiver(channel)
        return self.receivers[channel]

    def _publisher(self, channel: str, value: Carried) -> WeightPublisher:
        return WeightPublisher(channel, value, rank=self.rank, device=self.device, wire=self.wire)

    def _new_receiver(self, channel: str) -> WeightReceiver:
        return WeightReceiver(channel, rank=self.rank, device=self.device)

    def _tell(self, command: Send, moved: Moved | Exception) -> None:
        """In the transfer's thread: its end, as an event."""
        if isinstance(moved, Moved):
            self._events.put(Arrived(command.channel, command.version, command.replica, self.rank))
        else:
            self._events.put(Abort(f"{self.replica} rank {self.rank}: {moved}"))


class BridgeWays(Ways):
    """Ways between processes: a bridge for each channel and pair of replicas, opened at the first send between them.

    A receiver's arena lies in shared memory where it can, or in such memory of its GPU, for senders of the same host to
    write into.
    """

    def __init__(self, channels: Mapping[str, Channel], replica: str, rank: int, device: str, ground: Ground) -> None:
        super().__init__(channels, replica, rank, device, ground.options.wire)
        self.ground = ground
        transport, delta = ground.options.transport, ground.options.delta
        self.routes = {name: Routes(channel, transport, delta) for name, channel in channels.items()}
        self.relays: dict[str, ChainForwarder] = {}
        self.adders: dict[str, AllReduce] = {}
        self.memories: dict[str, WritableMemory] = {}
        self.bridges = Bridges(self.channels, rank, device, ground, self.routes, self.memories)

    def counts(self) -> Counter[str]:
        """The syncs that went out in full and as deltas, and the versions that were passed on, where there are any."""
        passed_on = sum(relay.passed_on for relay in self.relays.values())
        return self.bridges.counts() + Counter({"passed on": passed_on})  # a sum of counters has no zeros

    def send(self, command: Send, manifest: Manifest | None) -> None:
        channel, version, routes = command.channel, command.version, self.routes[command.channel]
        if command.source == self.replica:
            publisher = self.publishers[channel]
            routes.settle(publisher.description)
            if not routes.source(command.replica, command.together):
                target = self.channels[channel].replica(command.replica)
                way = self.bridges.lazy(Span(channel, command.source, command.replica, "source"))
                publisher.start(version, way, len(target.ranks), self._sent, target.mesh or None)
        if command.replica == self.replica:
            receiver, digests = self._told(manifest)
            routes.settle(receiver.description)
            receiver.start(version, digests, self._way_here(command), partial(self._received, command))

    def close(self) -> None:
        self.bridges.close()
        for adder in self.adders.values():
            adder.close()
        for memory in self.memories.values():
            memory.close()

    def _way_here(self, command: Send) -> Receiving:
        """How a version comes to this rank, and goes on from it if it is in a chain."""
        channel, routes, together = command.channel, self.routes[command.channel], command.together
        source, after = routes.source(self.replica, together), routes.next(self.replica, together)
        upstream = Span(channel, source or command.source, self.replica, "destination")
        if not routes.chained(self.replica):
            return self.bridges.lazy(upstream)
        downstream = Span(channel, self.replica, after, "source")
        relay = self.relays.setdefault(channel, ChainForwarder(channel, self.rank, self._failed))
        onward = partial(self.bridges.messages, downstream) if after else None
        return ChainHop(relay, partial(self.bridges.messages, upstream), onward, linked=bool(source))

    def _publisher(self, channel: str, value: Carried) -> WeightPublisher:
        ranks, proof = len(self.channels[channel].source.ranks), self.ground.options.proof
        add = self._adder(channel, ranks)
        agree = add.maximum if add else None
        return WeightPublisher(
            channel,
            value,
            rank=self.rank,
            ranks=ranks,
            wire=self.wire,
            device=self.device,
            add=add,
            agree=agree,
            proof=proof,
        )

    def _new_receiver(self, channel: str) -> WeightReceiver:
        own = self.channels[channel].replica(self.replica)
        ranks, memory = len(own.ranks), None
        if self.ground.options.transport != "messages":
            memory = self.memories[channel] = self._memory(channel)
        return WeightReceiver(
            channel,
            rank=self.rank,
            ranks=ranks,
            mesh=own.mesh or None,
            device=self.device,
            add=self._adder(channel, ranks),
            allocate=memory,
        )

    def _memory(self, channel: str) -> WritableMemory:
        owner = f"{self.replica}.{self.rank}.{channel}".replace("/", ".").replace(">", ".")
        if self.device == "cpu":
            return SharedMemory(self.ground.run, owner, warn=self.ground.warn)
        return DeviceMemory(self.device, owner, self.ground.timeout, self.ground.warn)

    def _adder(self, channel: str, ranks: int) -> AllReduce | None:
        """For the proofs of this replica's ranks; one alone needs none."""
        if ranks == 1:
            return None
        label = f"{channel} on {self.replica}"
        store = self.ground.meet(f"proof of {label}")
        self.adders[channel] = AllReduce(label, store, self.rank, ranks, self.ground.timeout)
        return self.adders[channel]

    def _sent(self, moved: Moved | Exception) -> None:
        if isinstance(moved, Exception):
            self._failed(moved)

    def _received(self, command: Send, moved: Moved | Exception) -> None:
        self._tell(command, moved)
        self.ground.wake()

    def _failed(self, error: Exception) -> None:
        """What this rank had to send could not be sent."""
        self._events.put(Abort(f"{self.replica} rank {self.rank}: {error}"))
        self.ground.wake()


class LocalWays(Ways):
    """Ways inside one process: the receiving rank copies straight from the snapshot."""

    def __init__(
        self,
        channels: Mapping[str, Channel],
        replica: str,
        rank: int,
        device: str,
        peers: dict[str, "LocalWays"],
        wire: str = "",
    ) -> None:
        super().__init__(channels, replica, rank, device, wire)
        self.peers = peers
        peers[replica] = self

    def send(self, command: Send, manifest: Manifest | None) -> None:
        if command.replica != self.replica:
            return
        receiver, digests = self._told(manifest)
        publisher = self.peers[command.source].publishers[command.channel]
        try:
            moved: Moved | Exception = sync_in_process(publisher, receiver, command.version, digests)
        except (ChecksumError, TransportError) as error:
            moved = error
        self._tell(command, moved)


def drained(queue: "SimpleQueue[T]") -> list[T]:
    """What is in a queue, taken out."""
    found: list[T] = []
    while True:
        try:
            found.append(queue.get_nowait())
        except Empty:
            return found


def channels_of(channels: Mapping[str, Channel], replica: str) -> dict[str, Channel]:
    """The channels that end at `replica`, or begin there."""
    return {
        name: channel
        for name, channel in channels.items()
        if channel.source.name == replica or any(r.name == replica for r in channel.replicas)
    }
