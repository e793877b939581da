"""Key pairs of CURVE; the gate lets in listed keys, and few strangers at once (ZAP, rfc.zeromq.org/spec/27).

libzmq accepts every connection, and a process has only so many descriptors: connections that have not said anything
of use yet are counted, and beyond a number the oldest of them is shut.
"""

import resource
import socket as sockets
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

import zmq
from zmq.utils import z85

MAX_WAITING = 256
"""Connections at most that have not said anything of use yet; fewer where a process may open few files."""
HANDSHAKE_S = 10.0
"""Seconds for a connection to prove its key."""
_ZAP = "inproc://zeromq.zap.01"


def new_pair() -> tuple[str, str]:
    """A new public and secret key, in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def raise_descriptors() -> int:
    """Let this process open as many files as the system permits; how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft


class Gate:
    """Locks a server's socket, with a thread of its own from `open` to `close`.

    libzmq asks it about each key. Should it not answer, no connection is let in. `refused` is told the address of a
    client whose key is not on the list, in that thread. Each message of a client that is let in carries its public key
    in Z85 as the property "User-Id": libzmq has proved that the client has the secret one.
    """

    def __init__(
        self, server: zmq.Socket[bytes], secret: str, allowed: Iterable[str], refused: Callable[[str], None]
    ) -> None:
        self._server = server
        self._allowed = {z85.decode(public.encode()) for public in allowed}
        self._refused = refused
        self._questions: zmq.Socket[bytes] = server.context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(_ZAP)
        server.setsockopt(zmq.ZAP_DOMAIN, b"penstock")
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
        server.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))
        # libzmq waits where these are not read in time: it accepts no faster than they are counted.
        self._events = server.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        )
        self._lock = threading.Lock()
        self._waiting: dict[int, None] = {}  # descriptors of connections, the oldest first
        self._known: dict[int, None] = {}
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """The server's socket is bound: from now on connections are let in."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        files = files if files > 0 else 1 << 20
        self._most = max(4, min(MAX_WAITING, files // 8)), files // 2
        self._port = int(self._server.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._thread = threading.Thread(target=self._watch, name="gate", daemon=True)
        self._thread.start()

    def know(self, descriptor: int) -> None:
        """The connection of this descriptor has said something of use: it is shut for no newer stranger."""
        with self._lock:
            if descriptor in self._waiting:
                del self._waiting[descriptor]
                self._known[descriptor] = None
                self._shut_oldest()

    def close(self) -> None:
        """In the thread that uses the server's socket, before that is closed."""
        if self._thread is not None:
            self._server.disable_monitor()
            self._thread.join()

    def _watch(self) -> None:
        poller = zmq.Poller()
        for one in (self._questions, self._events):
            poller.register(one, zmq.POLLIN)
        event = 0
        while event != zmq.EVENT_MONITOR_STOPPED:
            ready = dict(poller.poll())
            if self._questions in ready:
                self._answer()
            if self._events in ready:
                event, descriptor = struct.unpack("=hi", self._events.recv_multipart()[0])
                with self._lock:
                    self._waiting.pop(descriptor, None)
                    self._known.pop(descriptor, None)
                    if event == zmq.EVENT_ACCEPTED:
                        self._waiting[descriptor] = None
                        self._shut_oldest()
        self._events.close(linger=0)
        self._questions.close(linger=0)

    def _answer(self) -> None:
        """Answer one question of libzmq."""
        version, number, _, address, _, mechanism, *keys = self._questions.recv_multipart()
        known = mechanism == b"CURVE" and len(keys) == 1 and keys[0] in self._allowed
        if not known:
            self._refused(address.decode(errors="replace"))
        verdict = [b"200", b"OK", z85.encode(keys[0])] if known else [b"400", b"not on the list", b""]
        self._questions.send_multipart([version, number, *verdict, b""])

    def _shut_oldest(self) -> None:
        for of, most in zip((self._waiting, self._known), self._most, strict=True):
            while len(of) > most:
                descriptor = next(iter(of))
                del of[descriptor]
                self._shut(descriptor)

    def _shut(self, descriptor: int) -> None:
        """End a connection, which libzmq then closes. It may have done so already, and the descriptor be another
        file's: what is no connection to this server's port is left alone.
        """
        with suppress(OSError):
            connection = sockets.socket(fileno=descriptor)
            try:
                if connection.getsockname()[1] == self._port and connection.getpeername():
                    connection.shutdown(sockets.SHUT_RDWR)
            finally:
                connection.detach()
