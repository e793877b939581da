"""A rank's ways of weights: what it publishes, what it receives, and the bridges to the other side.

`runtime/tensor/sync` knows how a sync goes; here is which channels this rank has, and what their ends become:
`Arrived` when a version is in the shadow and proved, `Abort` when it could not be.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from penstock.graph.ir import Firing
from penstock.graph.types import Carried, Weights
from penstock.runtime.plan.plan import Replica
from penstock.runtime.schedule.events import Abort, Arrived, Send
from penstock.runtime.schedule.tables import Channel
from penstock.runtime.tensor.adder import Adder
from penstock.runtime.tensor.arena import Parts
from penstock.runtime.tensor.bridge import Bridge, Side
from penstock.runtime.tensor.cuda_ipc import DeviceMemory
from penstock.runtime.tensor.differences import DeltaTransport
from penstock.runtime.tensor.digest import ProofError
from penstock.runtime.tensor.handle import Handle
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.memory import Exported, SharedMemory
from penstock.runtime.tensor.proof import Mode
from penstock.runtime.tensor.sync import Moved, Publisher, Receiver, hand_over
from penstock.runtime.tensor.transport import Transport, TransportError
from penstock.runtime.tensor.ways import Choice

T = TypeVar("T")
Handles = Mapping[tuple[Firing, str], Handle]


class Ways(ABC):
    """The channels of one rank. `publishers` and `receivers` are made when a channel is first used."""

    def __init__(self, channels: Mapping[str, Channel], replica: str, rank: int, device: str, wire: str) -> None:
        self.replica, self.rank, self.device, self.wire = replica, rank, device, wire
        self.published_here = {n for n, c in channels.items() if c.source.name == replica}
        self.channels = channels
        self.publishers: dict[str, Publisher] = {}
        self.receivers: dict[str, Receiver] = {}
        self._events: SimpleQueue[Arrived | Abort] = SimpleQueue()

    def weights(self, channel: str) -> Weights:
        """What the nodes here read; one object for ever."""
        return self._receiver(channel).weights

    def publish(self, channel: str, version: int, carried: Mapping[str, Carried]) -> str:
        """Copy the weights aside; the facts that receivers need, as JSON."""
        if channel not in self.publishers:
            self.publishers[channel] = self._publisher(channel, carried[self.channels[channel].carried])
        return json.dumps(self.publishers[channel].publish(version), separators=(",", ":"))

    @abstractmethod
    def send(self, command: Send, handles: Handles) -> None:
        """Begin this rank's part of moving a published version: as sender, as receiver, or both."""

    def swap(self, channel: str, version: int) -> None:
        self.receivers[channel].swap(version)

    def arrived(self) -> list[Arrived | Abort]:
        """What background transfers have to tell since the last call."""
        return drained(self._events)

    def close(self) -> None:  # noqa: B027 - a process has none to give up
        """Give up all connections."""

    def _receiver(self, channel: str) -> Receiver:
        if channel not in self.receivers:
            self.receivers[channel] = self._new_receiver(channel)
        return self.receivers[channel]

    def _publisher(self, channel: str, value: Carried) -> Publisher:
        return Publisher(channel, value, rank=self.rank, device=self.device, wire=self.wire)

    def _new_receiver(self, channel: str) -> Receiver:
        return Receiver(channel, rank=self.rank, device=self.device)

    def _tell(self, command: Send, moved: Moved | Exception) -> None:
        """In the transfer's thread: its end, as an event."""
        if isinstance(moved, Moved):
            self._events.put(Arrived(command.channel, command.version, command.replica, self.rank))
        else:
            self._events.put(Abort(f"{self.replica} rank {self.rank}: {moved}"))


@dataclass(frozen=True)
class Ground:
    """What the ways of a process stand on: the run's id, a folder for meeting files that no earlier process has used,
    the seconds that a wait for a peer may take, how much of each sync is proved, the format in which weights travel,
    how often all of them do (0: always), the way that they are to go, how to wake the rank, and how to tell the user of
    a slower way."""

    run: str
    folder: Path
    timeout: float
    proof: Mode
    wire: str
    delta: int
    transport: Choice
    wake: Callable[[], None]
    warn: Callable[[str], object]


class BridgeWays(Ways):
    """Ways between processes: one bridge for each channel and destination replica, opened at the first send.

    A receiver's arena lies in shared memory where it can, or in such memory of its GPU, for senders of the same host to
    write into.
    """

    def __init__(self, channels: Mapping[str, Channel], replica: str, rank: int, device: str, ground: Ground) -> None:
        super().__init__(channels, replica, rank, device, ground.wire)
        self.ground = ground
        self.transports: dict[tuple[str, str], Transport] = {}
        self.adders: dict[str, Adder] = {}
        self.memories: dict[str, Exported] = {}

    def counts(self) -> Counter[str]:
        """The syncs that went out in full and as deltas, where there are any."""
        deltas = (way for way in self.transports.values() if isinstance(way, DeltaTransport))
        return sum((way.counts for way in deltas), Counter())

    def send(self, command: Send, handles: Handles) -> None:
        channel, version = command.channel, command.version
        if command.source == self.replica:
            way, target = _Lazy(self, command, "source"), self._replica(command)
            done = partial(self._sent, command)
            self.publishers[channel].start(version, way, len(target.ranks), done, target.mesh or None)
        if command.replica == self.replica:
            facts = json.loads(handles[Firing(channel, version), "out"].meta)
            way = _Lazy(self, command, "destination")
            self._receiver(channel).start(version, facts, way, lambda moved: self._received(command, moved))

    def transport(self, command: Send, side: Side) -> Transport:
        """The bridge to a replica, opened by both sides at their first send."""
        key = (command.channel, command.replica)
        if key not in self.transports:
            way = self.channels[command.channel]
            name = f"{command.channel}-{command.replica}".replace("/", ".").replace(">", "-")
            sources, destinations = len(way.source.ranks), len(self._replica(command).ranks)
            label = f"{command.channel} from {way.source.name} to {command.replica}"
            path, timeout, delta = self.ground.folder / name, self.ground.timeout, self.ground.delta
            choice = self.ground.transport
            bridge = Bridge(label, path, sources, destinations, timeout=timeout, delta=delta, way=choice)
            memory = self.memories.get(command.channel) if side == "destination" else None
            self.transports[key] = bridge.open(side, self.rank, memory, self.device)
        return self.transports[key]

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()
        for adder in self.adders.values():
            adder.close()
        for memory in self.memories.values():
            memory.close()

    def _replica(self, command: Send) -> Replica:
        return next(r for r in self.channels[command.channel].replicas if r.name == command.replica)

    def _publisher(self, channel: str, value: Carried) -> Publisher:
        ranks, proof = len(self.channels[channel].source.ranks), self.ground.proof
        add = self._adder(channel, ranks)
        agree = add.maximum if add else None
        return Publisher(
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

    def _new_receiver(self, channel: str) -> Receiver:
        own = next(r for r in self.channels[channel].replicas if r.name == self.replica)
        ranks, memory = len(own.ranks), None
        if self.ground.transport != "messages":
            memory = self.memories[channel] = self._memory(channel)
        return Receiver(
            channel,
            rank=self.rank,
            ranks=ranks,
            mesh=own.mesh or None,
            device=self.device,
            add=self._adder(channel, ranks),
            allocate=memory,
        )

    def _memory(self, channel: str) -> Exported:
        owner = f"{self.replica}.{self.rank}.{channel}".replace("/", ".").replace(">", ".")
        if self.device == "cpu":
            return SharedMemory(self.ground.run, owner, warn=self.ground.warn)
        return DeviceMemory(self.device, owner, self.ground.timeout, self.ground.warn)

    def _adder(self, channel: str, ranks: int) -> Adder | None:
        """For the proofs of this replica's ranks; one alone needs none."""
        if ranks == 1:
            return None
        name = f"proof-{channel}-{self.replica}".replace("/", ".").replace(">", "-")
        label = f"{channel} on {self.replica}"
        self.adders[channel] = Adder(label, self.ground.folder / name, self.rank, ranks, self.ground.timeout)
        return self.adders[channel]

    def _sent(self, command: Send, moved: Moved | Exception) -> None:
        if isinstance(moved, Exception):
            self._tell(command, moved)
            self.ground.wake()

    def _received(self, command: Send, moved: Moved | Exception) -> None:
        self._tell(command, moved)
        self.ground.wake()


@dataclass(frozen=True)
class _Lazy:
    """A transport that is opened in the transfer's own thread, since opening waits for the other side."""

    ways: BridgeWays
    command: Send
    side: Side

    def send(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        return self.ways.transport(self.command, self.side).send(version, copies, parts)

    def receive(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        return self.ways.transport(self.command, self.side).receive(version, copies, parts)

    def close(self) -> None:
        self.ways.transport(self.command, self.side).close()


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

    def send(self, command: Send, handles: Handles) -> None:
        if command.replica != self.replica:
            return
        facts = json.loads(handles[Firing(command.channel, command.version), "out"].meta)
        publisher = self.peers[command.source].publishers[command.channel]
        try:
            moved: Moved | Exception = hand_over(publisher, self._receiver(command.channel), command.version, facts)
        except (ProofError, TransportError) as error:
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
