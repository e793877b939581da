"""The socket of a rank or agent, a `Client` (DEALER) of the controller's `Server` (see `wire`)."""

import os
import select
import struct
from collections import Counter
from itertools import count
from time import monotonic
from typing import Literal

import zmq

from penstock.runtime.control.context import SHARED
from penstock.runtime.control.keys import Join
from penstock.runtime.control.messages import Message, MessageError, pack, unpack_frame
from penstock.runtime.control.wire import FLUSH_S, drain, tune


class Client:
    """It says Hello by itself, and connects again when a connection breaks. Not for several threads.

    `refused` is true once the controller has turned this key away; `counts` is as the server's.
    """

    def __init__(self, join: Join, role: Literal["rank", "agent", "heartbeat"], name: str, rank: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self.refused = False
        self._down_since: float | None = monotonic()
        self._numbers = count(1)
        self._heard = 0
        self._socket = SHARED.take().socket(zmq.DEALER)
        tune(self._socket)
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
        return [message for frames in drain(self._socket) if (message := self._take(frames)) is not None]

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
        self._socket.close(linger=int(1000 * FLUSH_S))
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
