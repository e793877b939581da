"""The sockets of the control plane: the only file that knows ZeroMQ.

One ROUTER in the controller, a DEALER in every peer. On one host they meet at a Unix socket in a private folder;
over TCP the connection is always CURVE, with keys made for the run and an allow-list. A frame that is oversized, does
not decode, was seen before, or comes from a peer that did not present the run's token is counted and dropped.
"""

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from penstock.runtime.control.messages import Heartbeat, Hello, Message, pack, unpack
from penstock.runtime.control.packing import MAX_BYTES, MessageError

_IPC_LIMIT = 100
_DRAIN = 1000
"""Frames taken from the socket before their messages are worked on."""


class WireError(RuntimeError):
    """An address that cannot be used, or a peer that cannot be reached."""


@dataclass(frozen=True)
class Keys:
    """One side's CURVE key pair (Z85), and what it knows of the other: the server's key, or the clients' keys."""

    public: str
    secret: str
    server: str = ""
    allowed: tuple[str, ...] = ()


def ipc_endpoint(folder: Path) -> str:
    """A Unix socket in `folder`, or, if its path is too long for one, in a private folder under the temporary one."""
    path = folder / "control.sock"
    if len(os.fsencode(path)) > _IPC_LIMIT:
        private = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
        private.mkdir(mode=0o700, exist_ok=True)
        if private.stat().st_uid != os.getuid() or private.stat().st_mode & 0o077:
            raise WireError(f"{private}: needed a folder of this user with mode 0700")
        path = private / (hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16] + ".sock")
    return f"ipc://{path}"


@dataclass
class _Peer:
    """A connection by its identity: admitted once it said Hello with the token; the last sequence number."""

    admitted: bool = False
    sequence: int = -1


class Server:
    """The controller's socket. `counts` says how many frames were dropped, by reason."""

    def __init__(self, endpoint: str, token: str, keys: Keys | None = None) -> None:
        if endpoint.startswith("tcp://") and keys is None:
            raise WireError(f"{endpoint}: given no keys; needed CURVE keys for TCP")
        self.token, self.endpoint = token, endpoint
        self.counts: Counter[str] = Counter()
        self.seen: dict[str, float] = {}
        self._peers: dict[bytes, _Peer] = {}
        self._next: Counter[bytes] = Counter()
        self._context = zmq.Context()
        self._allow: _AllowList | None = None
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.MAXMSGSIZE, MAX_BYTES * 4),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 100_000),
            (zmq.SNDTIMEO, 5000),
        ):
            self._socket.setsockopt(option, value)
        if keys is not None:
            self._secure(keys)
        try:
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
            self._socket.bind(endpoint)
            self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        except zmq.ZMQError as error:
            self.close()
            raise WireError(f"{endpoint}: cannot listen: {error}; needed a free address of this machine") from error

    def _secure(self, keys: Keys) -> None:
        self._allow = _AllowList(keys.allowed, self.counts)
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=self._allow)
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.public.encode()
        self._socket.curve_secretkey = keys.secret.encode()

    def receive(self, timeout: float) -> list[tuple[str, Message]]:
        """The messages that wait, with their senders' names; waits up to `timeout` seconds for the first."""
        messages: list[tuple[str, Message]] = []
        if not self._socket.poll(int(timeout * 1000)):
            return messages
        for _ in range(_DRAIN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._accept(frames)
            if message is not None:
                messages.append((frames[0].decode(errors="replace"), message))
        return messages

    def _accept(self, frames: list[bytes]) -> Message | None:
        """A frame's message, if it is one, is new, and its sender is known."""
        if len(frames) != 2:
            self.counts["malformed"] += 1
            return None
        identity, data = frames
        if len(data) > MAX_BYTES:
            self.counts["oversized"] += 1
            return None
        try:
            sequence, message = unpack(data)
        except MessageError:
            self.counts["malformed"] += 1
            return None
        peer = self._peers.get(identity)
        if isinstance(message, Hello):
            if message.token != self.token:
                self.counts["unauthenticated"] += 1
                return None
            if peer is None:
                peer = self._peers[identity] = _Peer(admitted=True)
        if peer is None:
            self.counts["unauthenticated"] += 1
            return None
        if sequence <= peer.sequence:
            self.counts["replayed"] += 1
            return None
        peer.sequence = sequence
        if isinstance(message, Heartbeat):
            self.seen[message.name] = monotonic()
            return None
        return message

    def send(self, peer: str, message: Message) -> bool:
        """Hand a message over; False if there is no such peer any more."""
        identity = peer.encode()
        self._next[identity] += 1
        try:
            self._socket.send_multipart([identity, pack(self._next[identity], message)])
        except zmq.ZMQError:
            return False
        return True

    def late(self, now: float, names: Iterable[str], silence: float) -> list[str]:
        """Those of `names` that have sent a heartbeat, but none for `silence` seconds."""
        return [name for name in names if now - self.seen.get(name, now) > silence]

    def close(self) -> None:
        self._socket.close(0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


class _AllowList:
    """The public keys that may connect; ZeroMQ asks in the authenticator's thread."""

    def __init__(self, allowed: Iterable[str], counts: Counter[str]) -> None:
        self._allowed, self._counts = {key.encode() for key in allowed}, counts

    def callback(self, domain: str, key: bytes) -> bool:
        known = key in self._allowed
        if not known:
            self._counts["refused"] += 1
        return known


class Client:
    """A peer's socket. One thread uses it; `wake` may be called from any."""

    def __init__(self, endpoint: str, name: str, hello: Hello, keys: Keys | None = None) -> None:
        self._sequence = 0
        self._server_sequence = 0
        self.counts: Counter[str] = Counter()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES * 4)
        self._socket.setsockopt(zmq.SNDTIMEO, 30_000)
        if keys is not None:
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.curve_serverkey = keys.server.encode()
        self._socket.connect(endpoint)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self.send(hello)

    def send(self, message: Message) -> None:
        """Raises WireError if the server takes nothing for 30 s."""
        self._sequence += 1
        try:
            self._socket.send(pack(self._sequence, message))
        except zmq.Again as error:
            raise WireError("the controller has taken no message for 30 s") from error

    def receive(self, timeout: float) -> list[Message]:
        """The messages that wait; waits up to `timeout` seconds for the first, or for `wake`."""
        ready = dict(self._poller.poll(int(timeout * 1000)))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        messages: list[Message] = []
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                sequence, message = unpack(data)
            except MessageError:
                self.counts["malformed"] += 1
                continue
            if sequence <= self._server_sequence:
                self.counts["replayed"] += 1
                continue
            self._server_sequence = sequence
            messages.append(message)

    def wake(self) -> None:
        """End the wait of `receive`, from another thread."""
        os.eventfd_write(self._wake, 1)

    def close(self, linger: float = 1.0) -> None:
        """Let what was sent go out, for `linger` seconds at most."""
        self._socket.close(int(linger * 1000))
        self._context.term()
        os.close(self._wake)


def make_keys(hosts: Iterable[str]) -> tuple[Keys, dict[str, Keys]]:
    """Keys of a run: the server's, and one pair for each host, all new."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    clients = {}
    for host in hosts:
        own_public, own_secret = (key.decode() for key in zmq.curve_keypair())
        clients[host] = Keys(own_public, own_secret, server=public)
    return Keys(public, secret, allowed=tuple(k.public for k in clients.values())), clients
