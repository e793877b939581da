"""The sockets: a `Server` (ROUTER) in the controller, a `Client` (DEALER) in every rank and agent.

Nobody is heard before a Hello with the run's token. A frame that is malformed, oversized, replayed, of an unknown
connection or of a kind that a controller does not hear is counted by kind in `counts`, described in `dropped`,
and never raises. On tcp always CURVE: a key that is not on the door's list does not get as far as a frame. Each side
numbers its frames on a connection; a number that does not grow is a replay. Neither class is for several threads.
"""

import os
import select
import struct
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from hmac import compare_digest
from itertools import count
from time import monotonic
from typing import Literal

import zmq

from penstock.runtime.control.context import SHARED
from penstock.runtime.control.endpoints import socket_file
from penstock.runtime.control.gate import Gate
from penstock.runtime.control.keys import Door, Join
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
_FLUSH_S = 0.5
_MORE = zmq.NOBLOCK | zmq.SNDMORE


def _tune(socket: zmq.Socket[bytes]) -> None:
    """What both sides need. A peer that stops answering libzmq's own pings is cut off after SILENCE."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
    socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, _CUT_OFF)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * SILENCE))


def _drain(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
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
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._gate: Gate | None = None
        _tune(self._socket)
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
        for frames in _drain(self._socket) if self._socket in ready else ():
            try:
                found += self._take(frames, now)
            except _Dropped as drop:
                self._count(*drop.args)
        return found

    def send(self, peer: str, message: Message) -> bool:
        """False when `peer` cannot be reached: it never said Hello, is gone, or has stopped reading."""
        connection = self._routes.get(peer)
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

    def late(self, now: float) -> list[str]:
        """The peers that gave no sign of life for `silence` seconds, in the order of their names."""
        return self._tracker.late(now)

    def forget(self, peer: str) -> None:
        """A peer that ended: it is not late, cannot be sent to, and may say Hello again as a new process."""
        self._routes.pop(peer, None)
        self._tracker.forget(peer)
        self.doing.pop(peer, None)
        self._connections = {i: c for i, c in self._connections.items() if c.peer != peer}

    def close(self) -> None:
        """What is still being sent gets half a second."""
        self._context.destroy(linger=int(1000 * _FLUSH_S))
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
            return []
        self._routes[message.peer] = connection
        return [(message.peer, message)]

    def _refuse(self, address: str) -> None:
        self._count("refused", address, "a key that is not on the list")

    def _count(self, kind: str, name: str, text: str) -> None:
        self.counts[kind] += 1
        self.dropped.append(f"{kind} frame of {name}: {text}")


class Client:
    """A rank's or agent's end. It says Hello by itself, and connects again when a connection breaks.

    `refused` is true once the controller has turned this key away; `counts` is as the server's.
    """

    def __init__(self, join: Join, role: Literal["rank", "agent", "heartbeat"], name: str, rank: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self.refused = False
        self._down_since: float | None = monotonic()
        self._numbers = count(1)
        self._heard = 0
        self._socket = SHARED.take().socket(zmq.DEALER)
        _tune(self._socket)
        if not join.endpoint.startswith("ipc://"):
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, join.server.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, join.public.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, join.secret.encode())
        failures = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | failures
        )
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for one in (self._socket, self._monitor, self._waker):
            self._poller.register(one, select.POLLIN)
        self._socket.connect(join.endpoint)
        self.send(join.hello(role, name, rank))

    def receive(self, timeout: float) -> list[Message]:
        """All that is waiting, after at most `timeout` seconds for the first of it; perhaps nothing.

        Returns early when another thread calls `wake`, and when a descriptor of `watch` has something.
        """
        ready = dict(self._poller.poll(int(1000 * timeout)))
        if self._waker in ready:
            os.eventfd_read(self._waker)
        if self._monitor in ready:
            self._note_connection()
        if self._socket not in ready:
            return []
        return [message for frames in _drain(self._socket) if (message := self._take(frames)) is not None]

    def send(self, message: Message) -> bool:
        """False when more than MAX_WAITING messages wait already. While there is no connection, messages wait."""
        try:
            self._socket.send(pack(message, next(self._numbers)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def wake(self) -> None:
        """Make `receive` return; the one method for other threads."""
        os.eventfd_write(self._waker, 1)

    def watch(self, descriptor: int) -> None:
        """Let `receive` return when `descriptor` is readable."""
        self._poller.register(descriptor, select.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)

    def lost(self, now: float) -> float:
        """Seconds for which there has been no connection to the controller; 0 while there is one."""
        return 0.0 if self._down_since is None else now - self._down_since

    def close(self) -> None:
        """What is still being sent gets half a second."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(1000 * _FLUSH_S))
        SHARED.give()
        os.close(self._waker)

    def _note_connection(self) -> None:
        while True:
            try:
                event, _ = struct.unpack("=hi", self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._down_since = None
            elif self._down_since is None:
                self._down_since = monotonic()
            self.refused = self.refused or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def _take(self, frames: list[bytes]) -> Message | None:
        try:
            sequence, message = unpack_frame(frames[0] if len(frames) == 1 else b"")
        except MessageError:
            self.counts["malformed"] += 1
            return None
        if sequence <= self._heard:
            self.counts["replayed"] += 1
            return None
        self._heard = sequence
        return message
