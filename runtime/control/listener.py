"""Sockets that listen and sockets that connect; on tcp they are secured by CURVE keys.

A listener lets in listed keys, and few strangers at once (ZAP, rfc.zeromq.org/spec/27). libzmq accepts every
connection, and a process has a limited number of descriptors. So connections that have not sent a valid message yet
(strangers) are counted, and beyond a limit the oldest one is closed.
"""

import resource
import select
import socket as sockets
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

import zmq
from zmq.utils import z85

from penstock.runtime.cluster.endpoints import AddressError, bind_fault, is_ipv6, resolved_endpoint, socket_file
from penstock.runtime.control.security import Join, KeyPair

# Most strangers beyond the expected connections; fewer if the process may open few files.
MAX_STRANGERS = 256
# Connections that the system queues until libzmq accepts them: those of a large run come at once. It may allow fewer.
BACKLOG = 4096
# Seconds for a connection to prove its key.
HANDSHAKE_S = 10.0
_ZAP = "inproc://zeromq.zap.01"
# Most frames, and bytes, that one `drain` takes, so that a flood does not keep the caller from its other inputs and
# deadlines.
MAX_DRAIN, MAX_DRAIN_BYTES = 4096, 16 << 20
# Events that the monitor of a client's socket reports: handshakes, failed ones too, and the ends of connections.
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
CONNECTION_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED

Options = Mapping[zmq.SocketOption, int]


class WireError(OSError):
    """An address that cannot be listened on: the user's fault, or another process's. `strerror` has the whole text."""


def raise_descriptors() -> int:
    """Let this process open as many files as the system permits, and return that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft


class Listener:
    """A ROUTER socket. The attribute `endpoint` is where it listens, with the port that the system chose. Only its
    owner can open a Unix socket. On tcp, `keys` are the server's secret key and the public keys of clients that it lets
    in; None instead of the public keys lets in any key: messages are encrypted, but the sender is not known. Raises
    WireError.

    libzmq asks a thread of the listener about each key. If that thread does not answer, no connection is let in. It
    calls `refused` with the address of a client whose key is not on the list. `expected` connections may come at once.
    """

    def __init__(
        self,
        endpoint: str,
        options: Options,
        keys: tuple[str, Iterable[str] | None] | None = None,
        refused: Callable[[str], None] = print,
        expected: int = 0,
    ) -> None:
        try:
            where = resolved_endpoint(endpoint)
        except AddressError as error:
            raise WireError(0, f"cannot listen on {endpoint}: {error}") from None
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.IPV6, is_ipv6(where))
        # ROUTER_MANDATORY: a send to a peer that is gone raises an error.
        _set(self.socket, {zmq.LINGER: 0, zmq.ROUTER_MANDATORY: 1, zmq.BACKLOG: BACKLOG, **options})
        self._lock, self._refused = threading.Lock(), refused
        self._waiting: dict[int, None] = {}  # descriptors of connections, the oldest first
        self._known: dict[int, None] = {}
        self._thread: threading.Thread | None = None
        if keys:
            self._allowed = None if keys[1] is None else {z85.decode(public.encode()) for public in keys[1]}
            self._questions = self._context.socket(zmq.REP)
            self._questions.setsockopt(zmq.LINGER, 0)
            self._questions.bind(_ZAP)
            self.socket.setsockopt(zmq.ZAP_DOMAIN, b"penstock")
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys[0].encode())
            handshake_ms = int(1000 * HANDSHAKE_S)
            _set(self.socket, {zmq.ZAP_ENFORCE_DOMAIN: 1, zmq.CURVE_SERVER: 1, zmq.HANDSHAKE_IVL: handshake_ms})
            # libzmq blocks until these events are read, so it accepts connections no faster than they are counted.
            events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
            self._events = self.socket.get_monitor_socket(events)
            self._thread = threading.Thread(target=self._watch, name="gate", daemon=True)
        file = socket_file(endpoint)
        try:
            self.socket.bind(where)
            if file is not None:
                file.chmod(0o600)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise WireError(error.errno or 0, f"cannot listen on {endpoint}: {bind_fault(error.errno)}") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._thread is not None:
            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            files = files if files > 0 else 1 << 20
            # An eighth is left for other files.
            strangers = min(expected + min(MAX_STRANGERS, files // 8), 3 * files // 8)
            self._most = max(4, strangers), files // 2
            self._port = int(self.endpoint.rpartition(":")[2])
            self._thread.start()

    def drain(self) -> Iterator[tuple[list[bytes], str, int]]:
        """Yield the waiting messages, up to a bound, each with its sender's public key and the descriptor of its
        connection; "" and -1 on a Unix socket."""
        return drain(self.socket, locked=self._thread is not None)

    def know(self, descriptor: int) -> None:
        """The connection of this descriptor has sent a valid message: it is no stranger any more."""
        with self._lock:
            if descriptor in self._waiting:
                del self._waiting[descriptor]
                self._known[descriptor] = None
                self._shut_oldest()

    def peer(self, descriptor: int) -> str:
        """The address at the other end of a connection on tcp; "" for one that has ended."""
        with suppress(OSError):
            connection = sockets.socket(fileno=descriptor)
            try:
                # As below: the descriptor may be another file's.
                if connection.getsockname()[1] == self._port:
                    return str(connection.getpeername()[0])
            finally:
                connection.detach()
        return ""

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket. Messages that are still being sent get `linger_s` seconds."""
        if self._thread is not None:
            self.socket.disable_monitor()
            self._thread.join()
        self._context.destroy(linger=int(1000 * linger_s))

    def _watch(self) -> None:
        poller = zmq.Poller()
        for one in (self._questions, self._events):
            poller.register(one, zmq.POLLIN)
        event = 0
        while event != zmq.EVENT_MONITOR_STOPPED:
            ready = dict(poller.poll())
            # Read all events before answering: a connection must be counted before the answer lets it in, since `know`
            # may be called for it at once. libzmq queues fewer events than this.
            for _ in range(MAX_DRAIN):
                try:
                    event, descriptor = struct.unpack("=hi", self._events.recv_multipart(zmq.NOBLOCK)[0])
                except zmq.Again:
                    break
                self._count(event, descriptor)
                if event == zmq.EVENT_MONITOR_STOPPED:
                    break
            if self._questions in ready:
                self._answer()
        self._events.close(linger=0)
        self._questions.close(linger=0)

    def _count(self, event: int, descriptor: int) -> None:
        """Count a connection that has come or gone."""
        with self._lock:
            self._waiting.pop(descriptor, None)
            self._known.pop(descriptor, None)
            if event == zmq.EVENT_ACCEPTED:
                self._waiting[descriptor] = None
                self._shut_oldest()

    def _answer(self) -> None:
        """Tell libzmq whether to let in a key."""
        version, number, _, address, _, mechanism, *keys = self._questions.recv_multipart()
        known = mechanism == b"CURVE" and len(keys) == 1 and (self._allowed is None or keys[0] in self._allowed)
        if not known:
            self._refused(address.decode(errors="replace"))
        # The key becomes the connection's User-Id, which identifies the host of each frame.
        verdict = [b"200", b"OK", z85.encode(keys[0])] if known else [b"400", b"not on the list", b""]
        self._questions.send_multipart([version, number, *verdict, b""])

    def _shut_oldest(self) -> None:
        """Shut down the oldest connections beyond the limits; libzmq then closes them."""
        for of, most in zip((self._waiting, self._known), self._most, strict=True):
            while len(of) > most:
                descriptor = next(iter(of))
                del of[descriptor]
                with suppress(OSError):
                    connection = sockets.socket(fileno=descriptor)
                    try:
                        # libzmq may have closed it already, and the descriptor be another file's.
                        if connection.getsockname()[1] == self._port and connection.getpeername():
                            connection.shutdown(sockets.SHUT_RDWR)
                    finally:
                        connection.detach()


def dial(
    context: "zmq.Context[zmq.Socket[bytes]]",
    endpoint: str,
    server: str,
    keys: Join | KeyPair,
    options: Options,
    watched: int = 0,
) -> "zmq.Socket[bytes]":
    """A DEALER socket that connects to `endpoint`; on tcp with these `keys`, to the server with the public key
    `server`. Its monitor reports the `watched` events. Raises ZMQError for a bad endpoint."""
    socket = context.socket(zmq.DEALER)
    _set(socket, {zmq.LINGER: 0, **options})
    if not endpoint.startswith("ipc://"):
        socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt(zmq.IPV6, is_ipv6(endpoint))
    if watched:
        # Before it connects: a handshake may be over at once, and is reported only once.
        socket.get_monitor_socket(watched)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def drain(socket: zmq.Socket[bytes], *, locked: bool = False) -> Iterator[tuple[list[bytes], str, int]]:
    """Yield the waiting messages of a readable socket. `locked`: it belongs to a listener with keys, which set each
    connection's User-Id to the sender's public key."""
    size = 0
    for number in range(MAX_DRAIN):
        try:
            # `recv_multipart` asks the socket after each frame whether more follow, which costs more than this loop.
            parts = [socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return
        while parts[-1].more:
            parts.append(socket.recv(zmq.NOBLOCK, copy=False))
        frames = [part.bytes for part in parts]
        if locked:
            yield frames, str(parts[-1].get("User-Id")), int(parts[-1].get(zmq.SRCFD))
        else:
            yield frames, "", -1
        size += sum(map(len, frames))
        # After the first message, ask whether there is another: an exception for "none" would cost three times as much.
        # After several messages, one exception costs less than asking each time.
        if size > MAX_DRAIN_BYTES or (number == 0 and not int(socket.getsockopt(zmq.EVENTS)) & select.POLLIN):
            return


def _set(socket: zmq.Socket[bytes], options: Options) -> None:
    for option, value in options.items():
        socket.setsockopt(option, value)
