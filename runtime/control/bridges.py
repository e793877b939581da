"""The bridges of one rank: one for each channel and pair of replicas between which weights go."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from penstock.runtime.control.endpoints import LOOPBACK
from penstock.runtime.control.ground import Ground
from penstock.runtime.control.routes import Routes, hosts
from penstock.runtime.schedule.tables import Channel
from penstock.runtime.tensor.arena import Parts
from penstock.runtime.tensor.bridge import Bridge, Side
from penstock.runtime.tensor.differences import DeltaTransport
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.memory import Exported
from penstock.runtime.tensor.messages import MessageTransport
from penstock.runtime.tensor.transport import Transport


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
        memories: Mapping[str, Exported],
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
            bridge = Bridge(
                f"{channel} from {' to '.join(names)}",
                ground.meet(f"{channel} from {source} to {target}"),
                len(start.ranks),
                len(end.ranks),
                timeout=ground.timeout * routes.patience(target),
                address=ground.address if apart else LOOPBACK,
                delta=ground.delta,
                way="messages" if apart or routes.chained(target) else ground.transport,
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

    def send(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        with self.turn:  # whoever has it waits for nothing without a deadline
            return self.bridges.open(self.span).send(version, copies, parts)

    def receive(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        return self.bridges.open(self.span).receive(version, copies, parts)

    def close(self) -> None:
        self.bridges.open(self.span).close()
