"""A rank's questions to ranks of other hosts: the blocks of the values that they keep, part by part.

One DEALER socket for each owner, kept until the owner stops answering. CURVE: the owner is known by the key of its
host, wherever it says that it listens.
"""

from collections import Counter
from itertools import count
from time import monotonic

import zmq

from penstock.runtime.control.codec import MessageError
from penstock.runtime.control.context import SHARED
from penstock.runtime.control.exchange import ANSWER, CHUNK, EXCHANGE, QUESTION, WINDOW, Ask, Refused
from penstock.runtime.control.keys import Join
from penstock.runtime.control.wire import SILENCE
from penstock.runtime.tensor.handle import Handle, HandleError


class ExchangeClient:
    """`patience` is how many seconds an owner may be silent. For one thread.

    `counts["asked"]` are the parts asked for. Answers to questions that are no longer asked ("late"), and what is no
    answer ("malformed"), are counted and dropped.
    """

    def __init__(self, join: Join, patience: float) -> None:
        self.counts: Counter[str] = Counter()
        self._join, self._patience = join, patience
        self._sockets: dict[tuple[str, str], zmq.Socket[bytes]] = {}
        self._numbers = count(1)
        self._context = SHARED.take()

    def block(self, handle: Handle) -> bytearray:
        """The whole block. Raises HandleError when its owner has no such block, or is silent for too long."""
        socket = self._socket(handle)
        starts = iter(range(0, max(1, handle.nbytes), CHUNK))
        asked: dict[int, tuple[int, int]] = {}
        block = bytearray()
        window = 1  # nothing that a handle says is believed before its owner has given the first part
        while True:
            while len(asked) < window and (start := next(starts, None)) is not None:
                number, length = next(self._numbers), min(CHUNK, handle.nbytes - start)
                socket.send(QUESTION.pack((EXCHANGE, number, Ask(handle, start, length))))
                asked[number] = start, length
                self.counts["asked"] += 1
            if not asked:
                return block
            number, part = self._hear(socket, handle, asked)
            start, length = asked.pop(number)
            if not block:
                try:
                    block, window = bytearray(handle.nbytes), WINDOW
                except (MemoryError, OverflowError, ValueError) as error:
                    raise HandleError(f"{handle}: no memory for {handle.nbytes} bytes") from error
            block[start : start + length] = part

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._sockets.clear()
        SHARED.give()

    def _hear(
        self, socket: zmq.Socket[bytes], handle: Handle, asked: dict[int, tuple[int, int]]
    ) -> tuple[int, memoryview]:
        """The next part that was asked for, and the number of its question."""
        until = monotonic() + self._patience
        while (left := until - monotonic()) > 0:
            if not socket.poll(int(1000 * left) + 1):
                continue
            head, *parts = socket.recv_multipart(copy=False)
            try:
                _, number, answer = ANSWER.unpack(head.bytes)
            except MessageError:
                self.counts["malformed"] += 1
                continue
            if number not in asked:
                self.counts["late"] += 1
            elif isinstance(answer, Refused):
                raise HandleError(answer.reason)
            elif len(parts) != 1 or len(parts[0]) != asked[number][1]:
                self.counts["malformed"] += 1
            else:
                return number, parts[0].buffer
        # A new socket next time: what was on its way when a connection broke never comes.
        self._sockets.pop((handle.host, handle.endpoint)).close(linger=0)
        silent = f"has not answered at {handle.endpoint} for {self._patience:g} s: dead, stopped, or out of reach"
        raise HandleError(f"{handle}: {handle.owner} on host {handle.host} {silent} of host {self._join.host}")

    def _socket(self, handle: Handle) -> zmq.Socket[bytes]:
        """The way to the owner of a handle."""
        socket = self._sockets.get((handle.host, handle.endpoint))
        if socket is not None:
            return socket
        key = self._join.hosts.get(handle.host)
        if key is None or not handle.endpoint.startswith("tcp://"):
            needed = f"needed a host of {', '.join(self._join.hosts) or 'several'} and a tcp endpoint"
            raise HandleError(f"{handle}: given host {handle.host!r} and endpoint {handle.endpoint!r}, {needed}")
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * CHUNK)  # CURVE adds some bytes
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * SILENCE))
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._join.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._join.secret.encode())
        try:
            socket.connect(handle.endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise HandleError(f"{handle}: {handle.endpoint} is no address to connect to ({error})") from error
        self._sockets[handle.host, handle.endpoint] = socket
        return socket
