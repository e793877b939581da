"""A rank's answers to ranks of other hosts: parts of the blocks that its store holds.

A thread with a ROUTER socket of its own and its own reader of the store's segments, so that no reader waits for what
the rank computes. CURVE with the host's keys: only keys of the run's hosts get as far as a frame. Nothing that is said
here can change anything; a frame that is malformed, oversized or of a reader that is gone is counted by kind in
`counts`, the first of each kind is described on stderr, and it goes no further.
"""

import os
import select
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence

import zmq

from penstock.runtime.control.codec import MessageError
from penstock.runtime.control.endpoints import bind_fault, tcp_endpoint
from penstock.runtime.control.exchange import (
    ANSWER,
    CHUNK,
    EXCHANGE,
    MAX_QUESTION,
    QUESTION,
    WINDOW,
    Part,
    Refused,
)
from penstock.runtime.control.gate import Gate
from penstock.runtime.control.keys import Join
from penstock.runtime.control.listen import WireError
from penstock.runtime.control.wire import SILENCE, keyed
from penstock.runtime.record.faults import visible
from penstock.runtime.tensor.handle import HandleError
from penstock.runtime.tensor.store import Reader

_CUT_OFF = 4 * MAX_QUESTION
"""Frames above this are not read at all: the connection is closed by libzmq. Below, they are counted."""
_MAX_WAITING = 4 * WINDOW
"""Answers that may wait for one peer. libzmq counts those taken in batches of half of it: a reader with WINDOW
questions under way never meets this bound, and one that does not read costs so many chunks, no more."""


class ExchangeServer:
    """Answers until `close`. `endpoint` is where; `counts["served"]` are the parts given."""

    def __init__(self, join: Join, owner: str, reader: Reader, died: Callable[[str], object]) -> None:
        """`reader` is for this server's thread alone, which calls `died` with a traceback if it ends before `close`.

        Raises WireError for an address that cannot be listened on.
        """
        self.counts: Counter[str] = Counter()
        self._owner, self._reader, self._died = owner, reader, died
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_WAITING)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _CUT_OFF)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * SILENCE))
        self._gate = Gate(self._socket, join.secret, join.hosts.values(), self._refuse)
        wanted = tcp_endpoint(f"{join.address}:0")
        try:
            self._socket.bind(wanted)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            text = f"{owner}: cannot listen on {wanted} for readers on other hosts: {bind_fault(error.errno)}"
            raise WireError(error.errno or 0, f"{text} (`address` of host {join.host} in the cluster file)") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._gate.open()
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="exchange", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Before the store's: nothing is read any more once this returns."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        self._gate.close()
        self._context.destroy(linger=0)
        self._reader.close()
        os.close(self._end)

    def _serve(self) -> None:
        try:
            poller = zmq.Poller()
            for one in (self._socket, self._end):
                poller.register(one, select.POLLIN)
            while self._end not in (ready := dict(poller.poll())):
                if self._socket in ready:
                    for frames, _, descriptor in keyed(self._socket):
                        self._answer(frames, descriptor)
        # Readers would wait in vain from now on, and blame their own hosts: this rank has to say that it is the cause.
        except BaseException:
            self._died(traceback.format_exc())

    def _answer(self, frames: list[bytes], descriptor: int) -> None:
        try:
            kind, answer = reply(frames[1:], self._owner, self._reader)
            self._gate.know(descriptor)
        except MessageError as error:
            self._drop("oversized" if len(frames[-1]) > MAX_QUESTION else "malformed", str(error))
            return
        try:
            self._socket.send_multipart([frames[0], *answer], zmq.NOBLOCK, copy=False)
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


def reply(frames: Sequence[bytes], owner: str, reader: Reader) -> tuple[str, list[bytes | bytearray]]:
    """The answer to a question, whatever its bytes are: "served" or "refused", and the answer's frames.

    `frames` are the question's, without the asker's identity. Raises MessageError for what is no question.
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
            raise HandleError(f"{ask.handle}: asked of {owner}")
        # A copy, not a view of the segment: the block may be freed while libzmq still sends it.
        part = reader.part(ask.handle, ask.start, ask.length)
    except HandleError as error:
        return "refused", [ANSWER.pack((EXCHANGE, number, Refused(str(error))))]
    return "served", [ANSWER.pack((EXCHANGE, number, Part())), part]
