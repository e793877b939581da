"""The socket of the controller, a `Server` (ROUTER), for the `Client`s (see `client`) of ranks and agents.

Nobody is heard before a Hello with the run's token. A frame that is malformed, oversized, replayed, of an unknown
connection or of a kind that a controller does not hear is counted by kind in `counts`, described in `dropped`,
and never raises. On tcp always CURVE: a key that is not on the door's list does not get as far as a frame. Each side
numbers its frames on a connection; a number that does not grow is a replay. Not for several threads.
"""

import select
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from hmac import compare_digest
from time import monotonic

import zmq

from penstock.runtime.control.endpoints import socket_file
from penstock.runtime.control.gate import Gate
from penstock.runtime.control.keys import Door
from penstock.runtime.control.listen import listen
from penstock.runtime.control.messages import (
    MAX_BYTES,
    TO_CONTROLLER,
    Heartbeat,
    Hello,
    Message,
    MessageError,
    pack,
    unpack_frame,
)
from penstock.runtime.control.tracker import Tracker

SILENCE = 15.0
"""Seconds without a sign of life after which a peer is taken for dead."""
MAX_WAITING = 100_000
"""Messages that may wait for one peer: past it the peer is stuck, and sending fails."""
MAX_DRAIN = 4096
"""Frames that one `receive` takes, so that a flood does not keep the caller from its deadlines."""
_CUT_OFF = 4 * MAX_BYTES
"""Frames above this are not read at all: the connection is closed by libzmq. Below, they are counted."""
FLUSH_S = 0.5
"""Seconds for what is still being sent when a socket is closed."""
_MORE = zmq.NOBLOCK | zmq.SNDMORE


def tune(socket: zmq.Socket[bytes]) -> None:
    """What both sides need. A peer that stops answering libzmq's own pings is cut off after SILENCE."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
    socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, _CUT_OFF)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * SILENCE))


def drain(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """What waits at a socket that is readable. It is asked for more, since an exception to say none costs thrice."""
    for _ in range(MAX_DRAIN):
        yield socket.recv_multipart(zmq.NOBLOCK)
        if not int(socket.getsockopt(zmq.EVENTS)) & select.POLLIN:
            return


class _Dropped(Exception):
    """A frame that goes no further: its kind, its sender's name, and why."""


@dataclass(slots=True)
class _Connection:
    """A peer's socket. `heard` and `said` are the last sequence numbers."""

    peer: str
    identity: bytes
    heard: int
    said: int = 0


class Server:
    """The controller's end. `endpoint` is where it really listens; `peers` are those that said Hello; `doing` is what
    each peer was at when it last beat.
    """

    def __init__(self, door: Door, silence: float = SILENCE) -> None:
        self.counts: Counter[str] = Counter()
        self.dropped: deque[str] = deque(maxlen=32)
        self.doing: dict[str, str] = {}
        self._token = door.token.encode()
        self._tracker = Tracker(silence)
        self._connections: dict[bytes, _Connection] = {}
        self._routes: dict[str, _Connection] = {}
        self._sides: dict[str, _Connection] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._gate: Gate | None = None
        tune(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if not door.endpoint.startswith("ipc://"):
                if not (door.secret and door.allowed):
                    raise ValueError(f"{door.endpoint}: given no keys, needed CURVE keys on tcp")
                self._gate = Gate(self._socket, door.secret, door.allowed.values(), self._refuse)
                self._poller.register(self._gate.socket, zmq.POLLIN)
            self.endpoint = listen(self._socket, door.endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(self._routes)

    def receive(self, timeout: float) -> list[tuple[str, Message]]:
        """All that is waiting, after at most `timeout` seconds for the first of it; perhaps nothing.

        A peer's Hello comes as its first message. Heartbeats are noted and not handed on.
        """
        found: list[tuple[str, Message]] = []
        ready = dict(self._poller.poll(int(1000 * timeout)))
        if self._gate is not None and self._gate.socket in ready:
            self._gate.answer()
        now = monotonic()
        for frames in drain(self._socket) if self._socket in ready else ():
            try:
                found += self._take(frames, now)
            except _Dropped as drop:
                self._count(*drop.args)
        return found

    def send(self, peer: str, message: Message) -> bool:
        """False when `peer` cannot be reached: it never said Hello, is gone, or has stopped reading."""
        return self._deliver(self._routes.get(peer), message)

    def answer(self, peer: str, message: Message) -> bool:
        """The same to the thread of a rank that beats for it, which hears while the main thread is at work."""
        return self._deliver(self._sides.get(peer), message)

    def _deliver(self, connection: _Connection | None, message: Message) -> bool:
        if connection is None:
            return False
        connection.said += 1
        try:
            self._socket.send(connection.identity, _MORE)
            self._socket.send(pack(message, connection.said), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def heard(self, peer: str) -> float:
        """When `peer` gave its last sign of life; as long ago as can be if it never did."""
        return self._tracker.last(peer)

    @property
    def held_up(self) -> float:
        """Seconds that the controller itself was stopped, in all: whoever is waited for need not answer for these."""
        return self._tracker.held_up

    def late(self, now: float) -> list[str]:
        """The peers that gave no sign of life for `silence` seconds, in the order of their names."""
        return self._tracker.late(now)

    def forget(self, peer: str) -> None:
        """A peer that ended: it is not late, cannot be sent to, and may say Hello again as a new process."""
        self._routes.pop(peer, None)
        self._sides.pop(peer, None)
        self._tracker.forget(peer)
        self.doing.pop(peer, None)
        self._connections = {i: c for i, c in self._connections.items() if c.peer != peer}

    def close(self) -> None:
        """What is still being sent gets half a second."""
        self._context.destroy(linger=int(1000 * FLUSH_S))
        if (file := socket_file(self.endpoint)) is not None:
            file.unlink(missing_ok=True)

    def _take(self, frames: list[bytes], now: float) -> list[tuple[str, Message]]:
        """What a frame says to the caller, if anything. Raises _Dropped."""
        connection = self._connections.get(frames[0])
        name = "an unknown connection" if connection is None else connection.peer
        if len(frames) != 2:
            raise _Dropped("malformed", name, f"{len(frames)} frames")
        if len(frames[1]) > MAX_BYTES:
            raise _Dropped("oversized", name, f"{len(frames[1])} bytes")
        try:
            sequence, message = unpack_frame(frames[1])
        except MessageError as error:
            raise _Dropped("malformed", name, str(error)) from error
        if connection is None:
            return self._greet(frames[0], sequence, message, now)
        if sequence <= connection.heard:
            raise _Dropped("replayed", name, f"frame {sequence} after frame {connection.heard}")
        if not isinstance(message, TO_CONTROLLER) or isinstance(message, Hello):
            raise _Dropped("unexpected", name, type(message).__name__)
        connection.heard = sequence
        self._tracker.heard(connection.peer, now)
        if isinstance(message, Heartbeat):
            self.doing[connection.peer] = message.doing
            return []
        return [(connection.peer, message)]

    def _greet(self, identity: bytes, sequence: int, message: Message, now: float) -> list[tuple[str, Message]]:
        """A connection's first frame: let it in. Raises _Dropped."""
        if not isinstance(message, Hello):
            raise _Dropped("unknown", "an unknown connection", f"{type(message).__name__} before Hello")
        if not compare_digest(message.token.encode(), self._token):
            raise _Dropped("unknown", message.peer, "Hello with another run's token")
        beats = message.role == "heartbeat"
        if not beats and message.peer in self._routes:
            raise _Dropped("duplicate", message.peer, f"Hello of pid {message.pid}, but it is here already")
        connection = _Connection(message.peer, identity, sequence)
        self._connections[identity] = connection
        self._tracker.heard(message.peer, now)
        if beats:
            self._sides[message.peer] = connection
            return []
        self._routes[message.peer] = connection
        return [(message.peer, message)]

    def _refuse(self, address: str) -> None:
        self._count("refused", address, "a key that is not on the list")

    def _count(self, kind: str, name: str, text: str) -> None:
        self.counts[kind] += 1
        self.dropped.append(f"{kind} frame of {name}: {text}")
