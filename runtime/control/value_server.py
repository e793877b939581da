"""`ExchangeServer` answers ranks of other hosts with parts of the blocks in a rank's store.

It is a thread with its own ROUTER socket and its own reader of the store's segments, so that no reader waits for the
rank's computation. CURVE with the host's keys: only clients with keys of the run's hosts can send a frame. Questions
change nothing. A frame that is malformed, oversized or from a reader that is gone is dropped: counted by kind in
`counts`, and described on stderr for the first of each kind.

`ExchangeClient` asks ranks of other hosts for the blocks of their values, part by part. It has one DEALER socket for
each owner, kept until the owner stops answering. CURVE: an owner is authenticated by the key of its host, whatever
address it gives.
"""

import os
import select
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic

import zmq

from penstock.runtime.cluster.endpoints import tcp_endpoint
from penstock.runtime.control.listener import Listener, WireError, dial
from penstock.runtime.control.messages import (
    ANSWER,
    CHUNK,
    EXCHANGE,
    MAX_QUESTION,
    QUESTION,
    WINDOW,
    Ask,
    MessageError,
)
from penstock.runtime.control.security import Join
from penstock.runtime.control.silence import AwakeClock
from penstock.runtime.control.sockets import SILENCE
from penstock.runtime.record.errors import visible
from penstock.runtime.tensor.object_store import ObjectReader
from penstock.runtime.tensor.shm import ObjectRef, ObjectRefError

# libzmq closes the connection at a frame above this size. Smaller oversized frames are counted.
_CUT_OFF = 4 * MAX_QUESTION
# Most answers that may wait for one peer. libzmq notes those that were taken only in batches of half this number. A
# reader with WINDOW questions under way never meets this limit; one that does not read costs so many chunks.
_MAX_WAITING = 4 * WINDOW
# Seconds between two looks at the clock.
LOOK_S = 0.5
# A connection that is silent for longer is gone.
_HEARTBEAT = {zmq.HEARTBEAT_IVL: 1000, zmq.HEARTBEAT_TIMEOUT: int(1000 * SILENCE)}


class ExchangeServer:
    """Answers at `endpoint` until `close`. `counts["served"]` is the number of parts that it has sent."""

    def __init__(self, join: Join, owner: str, reader: ObjectReader, died: Callable[[str], object]) -> None:
        """`reader` is only for this server's thread. The thread calls `died` with a traceback if it ends before
        `close`. Raises WireError for an address that cannot be listened on.
        """
        self.counts: Counter[str] = Counter()
        self._owner, self._reader, self._died = owner, reader, died
        options = {zmq.SNDHWM: _MAX_WAITING, zmq.MAXMSGSIZE: _CUT_OFF, **_HEARTBEAT}
        keys = join.secret, join.hosts.values()
        try:
            self._listener = Listener(tcp_endpoint(f"{join.address}:0"), options, keys, self._refuse)
        except WireError as error:
            where = f"(`address` of host {join.host} in the cluster file)"
            text = f"{owner}: {error.strerror}, for readers on other hosts {where}"
            raise WireError(error.errno or 0, text) from error
        self.endpoint = self._listener.endpoint
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="exchange", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close it, before the store: nothing is read any more once this returns."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        self._listener.close()
        self._reader.close()
        os.close(self._end)

    def _serve(self) -> None:
        try:
            poller = zmq.Poller()
            for one in (self._listener.socket, self._end):
                poller.register(one, select.POLLIN)
            while self._end not in dict(poller.poll()):
                for frames, _, descriptor in self._listener.drain():
                    self._answer(frames, descriptor)
        # Readers would wait in vain from now on, and blame their own hosts: this rank must report that it is the cause.
        except BaseException:
            self._died(traceback.format_exc())

    def _answer(self, frames: list[bytes], descriptor: int) -> None:
        try:
            kind, answer = reply(frames[1:], self._owner, self._reader)
            self._listener.know(descriptor)
        except MessageError as error:
            self._drop("oversized" if len(frames[-1]) > MAX_QUESTION else "malformed", str(error))
            return
        try:
            self._listener.socket.send_multipart([frames[0], *answer], zmq.NOBLOCK, copy=False)
            self.counts[kind] += 1
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._drop("gone" if error.errno == zmq.EHOSTUNREACH else "unread", "an answer")

    def _refuse(self, address: str) -> None:
        self._drop("stranger", f"a key that is not on the list, from {address}")

    def _drop(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            print(visible(f"{self._owner}: dropped ({kind}): {text!r:.400}"), file=sys.stderr, flush=True)


def reply(frames: Sequence[bytes], owner: str, reader: ObjectReader) -> tuple[str, list[bytes | bytearray]]:
    """Answer a question of any bytes: return "served" or "refused", and the answer's frames.

    `frames` are the question's, without the sender's identity. Raises MessageError for a malformed question.
    """
    if len(frames) != 1:
        raise MessageError(f"given {len(frames)} frames, needed 1")
    if len(frames[0]) > MAX_QUESTION:
        raise MessageError(f"given {len(frames[0])} bytes, needed at most {MAX_QUESTION}")
    _, number, ask = QUESTION.unpack(frames[0])
    if ask.length > CHUNK:
        raise MessageError(f"given {ask.length} bytes of a block to send at once, needed at most {CHUNK}")
    try:
        if ask.handle.owner != owner:
            raise ObjectRefError(f"{ask.handle}: asked of {owner}")
        # A copy, not a view of the segment: the block may be freed while libzmq still sends it.
        part = reader.part(ask.handle, ask.start, ask.length)
    except ObjectRefError as error:
        return "refused", [ANSWER.pack((EXCHANGE, number, str(error)))]
    return "served", [ANSWER.pack((EXCHANGE, number, "")), part]


class ExchangeClient:
    """Gets blocks from ranks of other hosts. `patience` is the seconds that an owner may be silent. For one thread.

    `counts["asked"]` is the number of parts asked for, `counts["bytes"]` their bytes. Answers that come too late
    ("late"), and frames that are no answer ("malformed"), are counted and dropped.
    """

    def __init__(self, join: Join, patience: float) -> None:
        self.counts: Counter[str] = Counter()
        self._join, self._patience = join, patience
        self._sockets: dict[tuple[str, str], zmq.Socket[bytes]] = {}
        self._numbers = count(1)
        self._context = zmq.Context()

    def ranges(self, handle: ObjectRef, wanted: Sequence[tuple[int, int]]) -> list[bytearray]:
        """The bytes of a block for each (start, length) in `wanted`. Raises ObjectRefError if the owner does not have
        the block, is silent for too long, or refuses this host's key."""
        socket = self._socket(handle)
        parts = (
            (place, first, min(CHUNK, length - first))
            for place, (_, length) in enumerate(wanted)
            for first in range(0, max(1, length), CHUNK)
        )
        asked: dict[int, tuple[int, int, int]] = {}
        found: list[bytearray] = []
        window = 1  # a handle is not trusted, nor memory reserved for it, until its owner has sent the first part
        while True:
            while len(asked) < window and (part := next(parts, None)) is not None:
                number, (place, first, length) = next(self._numbers), part
                question = QUESTION.pack((EXCHANGE, number, Ask(handle, wanted[place][0] + first, length)))
                try:
                    socket.send(question, zmq.NOBLOCK)
                except zmq.Again:
                    # libzmq has given up a connection that was refused: a blocking send would never return.
                    raise self._lost(handle, f"refuses this host's key at {handle.endpoint}") from None
                asked[number] = part
                self.counts["asked"] += 1
            if not asked:
                return found
            number, answer = self._hear(socket, handle, asked)
            place, first, length = asked.pop(number)
            self.counts["bytes"] += length
            if not found:
                try:
                    found, window = [bytearray(length) for _, length in wanted], WINDOW
                except (MemoryError, OverflowError, ValueError) as error:
                    needed = sum(length for _, length in wanted)
                    raise ObjectRefError(f"{handle}: no memory for {needed} bytes") from error
            found[place][first : first + length] = answer

    def close(self) -> None:
        self._sockets.clear()
        self._context.destroy(linger=0)

    def _hear(
        self, socket: zmq.Socket[bytes], handle: ObjectRef, asked: dict[int, tuple[int, int, int]]
    ) -> tuple[int, memoryview]:
        """The next part, and the number of its question."""
        # Time in which this process itself was suspended does not count as the owner's silence.
        clock = AwakeClock()
        until = clock.counted(monotonic()) + self._patience
        # Late and malformed frames are counted, and the wait goes on.
        while (left := until - clock.counted(monotonic())) > 0:
            if not socket.poll(int(1000 * min(left, LOOK_S)) + 1):
                continue
            head, *parts = socket.recv_multipart(copy=False)
            try:
                _, number, refusal = ANSWER.unpack(head.bytes)
            except MessageError:
                self.counts["malformed"] += 1
                continue
            if number not in asked:
                self.counts["late"] += 1
            elif refusal:
                raise ObjectRefError(refusal)
            elif len(parts) != 1 or len(parts[0]) != asked[number][2]:
                self.counts["malformed"] += 1
            else:
                return number, parts[0].buffer
        silent = f"has not answered at {handle.endpoint} for {self._patience:g} s: dead, stopped, or out of reach"
        raise self._lost(handle, f"{silent} of host {self._join.host}")

    def _lost(self, handle: ObjectRef, why: str) -> ObjectRefError:
        """Close the socket to the owner of a handle, and return what to raise. A new socket is used next time: messages
        in flight are lost when a connection breaks."""
        self._sockets.pop((handle.host, handle.endpoint)).close(linger=0)
        return ObjectRefError(f"{handle}: {handle.owner} on host {handle.host} {why}")

    def _socket(self, handle: ObjectRef) -> zmq.Socket[bytes]:
        """The socket to the owner of a handle."""
        socket = self._sockets.get((handle.host, handle.endpoint))
        if socket is not None:
            return socket
        key = self._join.hosts.get(handle.host)
        if key is None or not handle.endpoint.startswith("tcp://"):
            needed = f"needed a host of {', '.join(self._join.hosts) or 'several'} and a tcp endpoint"
            raise ObjectRefError(f"{handle}: given host {handle.host!r} and endpoint {handle.endpoint!r}, {needed}")
        options = {zmq.MAXMSGSIZE: 2 * CHUNK, **_HEARTBEAT}  # CURVE adds some bytes to a chunk
        try:
            socket = dial(self._context, handle.endpoint, key, self._join, options)
        except zmq.ZMQError as error:
            raise ObjectRefError(f"{handle}: {handle.endpoint} is no address to connect to ({error})") from error
        self._sockets[handle.host, handle.endpoint] = socket
        return socket
