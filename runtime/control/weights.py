"""A rank's ways of weights: what it publishes, what it receives, and the bridges to the other side.

`runtime/tensor/sync` knows how a sync goes; here is which channels this rank has, and what their ends become:
`Arrived` when a version is in the shadow and proved, `Abort` when it could not be.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from penstock.graph.ir import Firing
from penstock.graph.types import Carried, Weights
from penstock.runtime.schedule.events import Abort, Arrived, Send
from penstock.runtime.schedule.tables import Channel
from penstock.runtime.tensor.arena import Parts
from penstock.runtime.tensor.bridge import Bridge, Side
from penstock.runtime.tensor.digest import ProofError
from penstock.runtime.tensor.handle import Handle
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.sync import Moved, Publisher, Receiver, hand_over
from penstock.runtime.tensor.transport import Transport, TransportError

Handles = Mapping[tuple[Firing, str], Handle]


class Ways(ABC):
    """The channels of one rank. `publishers` and `receivers` are made when a channel is first used."""

    def __init__(self, channels: Mapping[str, Channel], replica: str, rank: int, device: str) -> None:
        self.replica, self.rank, self.device = replica, rank, device
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
            way = self.channels[channel]
            value, ranks = carried[way.carried], len(way.source.ranks)
            self.publishers[channel] = Publisher(channel, value, rank=self.rank, ranks=ranks, device=self.device)
        return json.dumps(self.publishers[channel].publish(version), separators=(",", ":"))

    @abstractmethod
    def send(self, command: Send, handles: Handles) -> None:
        """Begin this rank's part of moving a published version: as sender, as receiver, or both."""

    def swap(self, channel: str, version: int) -> None:
        self.receivers[channel].swap(version)

    def arrived(self) -> list[Arrived | Abort]:
        """What background transfers have to tell since the last call."""
        events: list[Arrived | Abort] = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except Empty:
                return events

    def close(self) -> None:  # noqa: B027 - a process has none to give up
        """Give up all connections."""

    def _receiver(self, channel: str) -> Receiver:
        if channel not in self.receivers:
            ranks = len(self.channels[channel].replicas[0].ranks)
            self.receivers[channel] = Receiver(channel, rank=self.rank, ranks=ranks, device=self.device)
        return self.receivers[channel]

    def _tell(self, command: Send, moved: Moved | Exception) -> None:
        """In the transfer's thread: its end, as an event."""
        if isinstance(moved, Moved):
            self._events.put(Arrived(command.channel, command.version, command.replica, self.rank))
        else:
            self._events.put(Abort(f"{self.replica} rank {self.rank}: {moved}"))


class BridgeWays(Ways):
    """Ways between processes: one bridge for each channel and destination replica, opened at the first send.

    `wake` is called from a transfer's thread when there is something to tell.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel],
        replica: str,
        rank: int,
        device: str,
        folder: Path,
        timeout: float,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(channels, replica, rank, device)
        self.folder, self.timeout, self.wake = folder, timeout, wake
        self.transports: dict[tuple[str, str], Transport] = {}

    def send(self, command: Send, handles: Handles) -> None:
        channel, version = command.channel, command.version
        ranks = len(next(r.ranks for r in self.channels[channel].replicas if r.name == command.replica))
        if command.source == self.replica:
            way = _Lazy(self, command, "source")
            self.publishers[channel].start(version, way, ranks, lambda moved: self._sent(command, moved))
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
            sources = len(way.source.ranks)
            destinations = len(next(r.ranks for r in way.replicas if r.name == command.replica))
            label = f"{command.channel} from {way.source.name} to {command.replica}"
            bridge = Bridge(label, self.folder / name, sources, destinations, timeout=self.timeout)
            self.transports[key] = bridge.open(side, self.rank)
        return self.transports[key]

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()

    def _sent(self, command: Send, moved: Moved | Exception) -> None:
        if isinstance(moved, Exception):
            self._tell(command, moved)
            self.wake()

    def _received(self, command: Send, moved: Moved | Exception) -> None:
        self._tell(command, moved)
        self.wake()


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
        self, channels: Mapping[str, Channel], replica: str, rank: int, device: str, peers: dict[str, "LocalWays"]
    ) -> None:
        super().__init__(channels, replica, rank, device)
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


def channels_of(channels: Mapping[str, Channel], replica: str) -> dict[str, Channel]:
    """The channels that end at `replica`, or begin there."""
    return {
        name: channel
        for name, channel in channels.items()
        if channel.source.name == replica or any(r.name == replica for r in channel.replicas)
    }
