"""Moves the copies of a plan, and decides nothing: what goes where, and when, is settled before it is called.

`LocalTransport` serves two sides in one process; `bridge.BridgeTransport` those of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.runtime.tensor.arena import Parts
from penstock.runtime.tensor.layout import Copy


class TransportError(RuntimeError):
    """A peer that died, hung or is not there. It names channel, version, peer rank and tensors."""


class Receiving(Protocol):
    """The side of a channel that receives. Used by one thread at a time; every wait has a deadline."""

    def receive(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        """Write `copies` into `parts`; the bytes received. After an error what is written is undefined."""


class Transport(Receiving, Protocol):
    """One side of a channel to one replica, either of them."""

    def send(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        """Send `copies` out of `parts`, which must not change meanwhile; the bytes sent."""

    def close(self) -> None:
        """Give up the connection. May be repeated."""


@dataclass
class LocalTransport:
    """Both sides in one process, taking turns: `send` names its parts, `receive` copies out of them."""

    channel: str
    _sent: list[tuple[int, tuple[Copy, ...], Parts]] = field(default_factory=list)

    def send(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        self._sent.append((version, tuple(copies), parts))
        return sum(parts[c.tensor].cut(c.box).nbytes for c in copies)

    def receive(self, version: int, copies: Sequence[Copy], parts: Parts) -> int:
        sent = [entry for entry in self._sent if entry[0] == version]
        self._sent.clear()
        origin = {copy: source for _, sent_copies, source in sent for copy in sent_copies}
        total = 0
        for copy in copies:
            if copy not in origin:
                raise TransportError(f"{self.channel}: version {version}: {copy.tensor} {copy.box} was not sent")
            piece = origin[copy][copy.tensor].cut(copy.box)
            parts[copy.tensor].cut(copy.box).copy_(piece)
            total += piece.nbytes
        return total

    def close(self) -> None:
        self._sent.clear()
