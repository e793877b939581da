"""A rank's weight channels: what it publishes, what it receives, and the links to the replicas on the other side.

`runtime/tensor/weight_sync` does a sync. This file knows which channels the rank has, and reports the end of a
transfer: `Arrived` when a version is in the shadow buffer and verified, `Abort` when it failed.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from penstock.graph.protocols import Carried
from penstock.graph.types import Weights
from penstock.runtime.cluster.endpoints import LOOPBACK
from penstock.runtime.cluster.placement import Replica
from penstock.runtime.control.messages import Manifest, SendFailed
from penstock.runtime.control.routes import BY_MESSAGES, Routes, hosts
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

T = TypeVar("T")


class LocalChannels:
    """The channels of one rank if all ranks share one process. `peers` are the others', by replica. The receiving rank
    copies directly from the sender's snapshot.

    `publishers` and `receivers` are made when a channel is first used. A publisher keeps `keep` versions.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel],
        replica: str,
        rank: int,
        device: str,
        peers: dict[str, "LocalChannels"],
        wire: str = "",
        keep: int = 1,
    ) -> None:
        self.replica, self.rank, self.device, self.peers = replica, rank, device, peers
        self.wire, self.keep = wire, keep
        # Only the channels in which this replica takes part.
        self.channels = {n: c for n, c in channels.items() if replica in {r.name for r in (c.source, *c.replicas)}}
        self.publishers: dict[str, WeightPublisher] = {}
        self.receivers: dict[str, WeightReceiver] = {}
        self._fused: defaultdict[str, list[Sequence[str]]] = defaultdict(list)
        self._events: SimpleQueue[Arrived | Abort] = SimpleQueue()
        self._unsent: SimpleQueue[SendFailed] = SimpleQueue()
        peers[replica] = self

    def weights(self, channel: str) -> Weights:
        """The live weights that nodes of this rank read; always the same object."""
        return self._receiver(channel).weights

    def fuse(self, channel: str, fused: Sequence[Sequence[str]]) -> None:
        """Place some tensors of a channel next to each other in memory. Call it before the first version."""
        self._fused[channel].extend(fused)

    def publish(self, channel: str, version: int, carried: Mapping[str, Carried]) -> Manifest | None:
        """Take a snapshot of the weights. Return the version's manifest; None on all ranks but the first."""
        # All versions of a channel have the same layout, which travels with the first.
        value, layout = carried[self.channels[channel].carried], ""
        if channel not in self.publishers:
            self.publishers[channel] = self._publisher(channel, value)
            layout = json.dumps(self.publishers[channel].description, separators=(",", ":"))
        digests = self.publishers[channel].publish(version, value)
        return None if self.rank else Manifest(channel, version, digests, layout)

    def send(self, command: Send, manifest: Manifest | None, life: int = 0) -> None:
        """Begin this rank's part in the transfer of a published version: as sender, as receiver, or both. `manifest` is
        the version's for a receiver, and None for a sender. `life` is the receiver's."""
        if command.replica == self.replica:
            receiver, digests = self._told(manifest)
            # Both sides are in this process: the receiver does the work of the two.
            publisher = self.peers[command.source].publishers[command.channel]
            try:
                self._ended(sync_in_process(publisher, receiver, command.version, digests), command)
            except (ChecksumError, TransportError) as error:
                self._ended(error)

    def swap(self, channel: str, version: int) -> None:
        self.receivers[channel].swap(version)

    def arrived(self) -> list[Arrived | Abort]:
        """The transfers that have ended since the last call."""
        return drained(self._events)

    def unsent(self) -> list[SendFailed]:
        """The transfers that have failed since the last call, to replicas that may be lost."""
        return drained(self._unsent)

    def _told(self, manifest: Manifest | None) -> tuple[WeightReceiver, Mapping[str, int]]:
        """The receiver of a version, after it was given the layout, and the version's digests."""
        assert manifest is not None
        receiver = self._receiver(manifest.channel)
        if manifest.layout:
            receiver.describe(json.loads(manifest.layout))
        return receiver, manifest.digests

    def _receiver(self, channel: str) -> WeightReceiver:
        if channel not in self.receivers:
            self.receivers[channel] = self._new_receiver(channel)
        return self.receivers[channel]

    def _publisher(self, channel: str, value: Carried, **more: Any) -> WeightPublisher:
        wire = self.channels[channel].precision or self.wire
        return WeightPublisher(channel, value, rank=self.rank, device=self.device, wire=wire, keep=self.keep, **more)

    def _new_receiver(self, channel: str, **more: Any) -> WeightReceiver:
        restores = not self.channels[channel].precision
        own: dict[str, Any] = {"restores": restores, "fused": self._fused[channel]}
        return WeightReceiver(channel, rank=self.rank, device=self.device, **own, **more)

    def _ended(self, moved: Moved | Exception, received: Send | None = None) -> None:
        """Report the end of a transfer: the arrival of a `received` version; of a sent one only a failure."""
        if isinstance(moved, Exception):
            self._events.put(Abort(f"{self.replica} rank {self.rank}: {moved}"))
        elif received is not None:
            self._events.put(Arrived(received.channel, received.version, self.replica, self.rank))


@dataclass(frozen=True)
class SyncSettings:
    """Settings that all weight channels of a rank's process share.

    `run` is the run's id, and `life` how often the replica has been lost. `meet` opens the key-value store of a group,
    by the group's name. Ranks of other hosts reach this one at `address`. `timeout` is the seconds that a wait for a
    peer may take. The run's `options` say how weights travel. `wake` wakes the rank's loop; `warn` warns the user of a
    slower transport. `elastic`: receivers may be lost; `keep` versions of weights are kept for their successors.
    """

    run: str
    meet: OpenStore
    address: str
    timeout: float
    options: RunOptions
    wake: Callable[[], None]
    warn: Callable[[str], object]
    life: int = 0
    elastic: bool = False
    keep: int = 1


class Span(NamedTuple):
    """Identifies a link: its channel, source replica, target replica in its `life`, and this rank's side."""

    channel: str
    source: str
    target: str
    side: Side
    life: int = 0


class WeightChannels(LocalChannels):
    """Channels between processes, with a link for each channel and pair of replicas. Both sides open it at their first
    transfer, in the transfer's thread, since opening waits for the other side.

    A receiver's buffer lies in shared memory if possible, on a GPU in memory that other processes can map, so that
    senders on the same host write directly into it.
    """

    def __init__(
        self, channels: Mapping[str, Channel], replica: str, rank: int, device: str, settings: SyncSettings
    ) -> None:
        super().__init__(channels, replica, rank, device, {}, settings.options.wire, settings.keep)
        self.settings = settings
        options = settings.options
        # A lost replica would break the chain for the replicas after it.
        self.routes = {
            name: Routes(channel, options.transport, options.delta, alone=settings.elastic)
            for name, channel in self.channels.items()
        }
        self.relays: dict[str, ChainForwarder] = {}
        self.all_reduces: dict[str, AllReduce] = {}
        self.memories: dict[str, WritableMemory] = {}
        self._opened: dict[Span, Transport] = {}
        self._turns: defaultdict[Span, Lock] = defaultdict(Lock)
        self._lives: dict[str, int] = {}  # the newest life of each receiver

    def counts(self) -> Counter[str]:
        """The numbers of syncs sent in full and as deltas, and of versions passed on; without zeros."""
        counts = Counter({"passed on": sum(relay.passed_on for relay in self.relays.values())})
        deltas = (link for link in [*self._opened.values()] if isinstance(link, DeltaTransport))
        return sum((link.counts for link in deltas), counts) + Counter()  # a sum of counters has no zeros

    def send(self, command: Send, manifest: Manifest | None, life: int = 0) -> None:
        channel, version, together = command.channel, command.version, command.together
        if not self._of_this_life(command, life):
            return
        routes = self.routes[channel]
        if command.source == self.replica:
            publisher = self.publishers[channel]
            routes.settle(publisher.description)
            # If there is a source, that replica passes this version on.
            if not routes.source(command.replica, together):
                target = self.channels[channel].replica(command.replica)
                span = Span(channel, command.source, command.replica, "source", life)
                self._give_up(span)
                ended = partial(self._sent, span) if self.settings.elastic else self._ended
                publisher.start(version, self.lazy(span), len(target.ranks), ended, target.mesh or None)
        if command.replica == self.replica:
            receiver, digests = self._told(manifest)
            routes.settle(receiver.description)
            source, after = routes.source(self.replica, together), routes.next(self.replica, together)
            upstream = Span(channel, source or command.source, self.replica, "destination", life)
            link_here: Receiving = self.lazy(upstream)
            if routes.chained(self.replica):
                relay = self.relays.setdefault(channel, ChainForwarder(channel, self.rank, self._ended))
                onward = partial(self._messages, Span(channel, self.replica, after, "source")) if after else None
                link_here = ChainHop(relay, partial(self._messages, upstream), onward, linked=bool(source))
            receiver.start(version, digests, link_here, partial(self._ended, received=command))

    def lazy(self, span: Span) -> "_Lazy":
        """A link that is opened at its first use. Sends over it take turns: the next version may be asked for when the
        receiver has the last one, while that one's sender is not finished yet.
        """
        return _Lazy(self, span, self._turns[span])

    def open(self, span: Span) -> Transport:
        if span not in self._opened:
            channel, source, target, side, life = span
            routes, settings = self.routes[channel], self.settings
            start, end = (self.channels[channel].replica(name) for name in (source, target))
            apart = len(hosts(start, end)) > 1
            names = [one.located if apart else one.name for one in (start, end)]
            link = ReplicaLink(
                f"{channel} from {' to '.join(names)}",
                # A new name for each life: the keys of earlier lives are still on the board.
                settings.meet(f"{channel} from {source} to {target}" + (f", life {life}" if life else "")),
                len(start.ranks),
                len(end.ranks),
                timeout=settings.timeout * routes.patience(target),
                address=settings.address if apart else LOOPBACK,
                delta=settings.options.delta,
                transport=settings.options.transport,
                # A chain hop needs messages to pass on, and another host's memory cannot be written directly.
                direct=not (apart or routes.chained(target)),
                warn=settings.warn,
            )
            # Senders write into the memory of receivers.
            memory = self.memories.get(channel) if side == "destination" else None
            self._opened[span] = link.open(side, self.rank, memory, self.device)
        return self._opened[span]

    def close(self) -> None:
        # Over a copy: abandoned transfers may still open links.
        for link in [*self._opened.values()]:
            link.close()
        for all_reduce in self.all_reduces.values():
            all_reduce.close()
        for memory in self.memories.values():
            memory.close()

    def _messages(self, span: Span) -> MessageTransport:
        """Open a link of a chain."""
        transport = self.open(span)
        assert isinstance(transport, MessageTransport)
        return transport

    def _publisher(self, channel: str, value: Carried, **more: Any) -> WeightPublisher:
        own = self.channels[channel].source
        add = self._all_reduce(channel, own)
        options = self.settings.options
        return super()._publisher(
            channel, value, ranks=len(own.ranks), add=add, proof=options.proof, elastic=self.settings.elastic
        )

    def _new_receiver(self, channel: str, **more: Any) -> WeightReceiver:
        own, settings = self.channels[channel].replica(self.replica), self.settings
        owner = f"{self.replica}.{self.rank}.{channel}".replace("/", ".").replace(">", ".")
        owner += f".{settings.life}" if settings.life else ""
        if settings.options.transport not in BY_MESSAGES:
            shared = partial(SharedMemory, settings.run, owner, warn=settings.warn)
            on_device = partial(DeviceMemory, self.device, owner, settings.timeout, settings.warn)
            self.memories[channel] = shared() if self.device == "cpu" else on_device()
        ranks, mesh, allocate = len(own.ranks), own.mesh or None, self.memories.get(channel)
        add = self._all_reduce(channel, own)
        own_options: dict[str, Any] = {"mesh": mesh, "add": add, "allocate": allocate, "elastic": settings.elastic}
        return super()._new_receiver(channel, ranks=ranks, **own_options)

    def _all_reduce(self, channel: str, own: Replica) -> AllReduce | None:
        """The all-reduce for the digests of this replica's ranks; None for a single rank."""
        if len(own.ranks) > 1:
            label, apart = f"{channel} on {self.replica}", len(own.hosts) > 1
            names = [f"rank {number}{f' on host {rank.host}' * apart}" for number, rank in enumerate(own.ranks)]
            life = f", life {self.settings.life}" if self.settings.life else ""
            store, address = self.settings.meet(f"proof of {label}{life}"), self.settings.address if apart else LOOPBACK
            self.all_reduces[channel] = AllReduce(label, store, self.rank, names, self.settings.timeout, address)
        return self.all_reduces.get(channel)

    def _ended(self, moved: Moved | Exception, received: Send | None = None) -> None:
        super()._ended(moved, received)
        self.settings.wake()

    def _sent(self, span: Span, moved: Moved | Exception) -> None:
        """Report a failed transfer to a replica that may be lost."""
        if isinstance(moved, Exception):
            if (link := self._opened.get(span)) is not None:
                link.close()  # the memory of a receiver that is gone is freed only when it is unmapped here
            self._unsent.put(SendFailed(span.target, span.life, f"{self.replica} rank {self.rank}: {moved}"))
            self.settings.wake()

    def _of_this_life(self, command: Send, life: int) -> bool:
        """True if a version is for the current life of its receiver. Otherwise warn the user."""
        receives = command.replica == self.replica
        known = self.settings.life if receives else max(life, self._lives.get(command.replica, 0))
        self._lives[command.replica] = known
        if life != known:
            given = f"version {command.version} of {command.channel} for {command.replica}, life {life}"
            self.settings.warn(f"{self.replica} rank {self.rank}: given {given}, needed life {known}: it is not moved")
            self.settings.wake()
        return life == known

    def _give_up(self, span: Span) -> None:
        """Close the links to a receiver's former lives."""
        for former in [known for known in self._opened if known[:-1] == span[:-1] and known.life < span.life]:
            self._opened.pop(former).close()


@dataclass(frozen=True)
class _Lazy:
    channels: WeightChannels
    span: Span
    turn: Lock

    def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        with self.turn:  # its holder never waits without a deadline
            return self.channels.open(self.span).send(version, copies, parts)

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        return self.channels.open(self.span).receive(version, copies, parts)


def drained(queue: "SimpleQueue[T]") -> list[T]:
    """Take all items out of a queue."""
    found: list[T] = []
    with suppress(Empty):
        while True:
            found.append(queue.get_nowait())
    return found
