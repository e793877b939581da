"""The secrets of one run: a token and CURVE key pairs, made by the launcher, kept in files of mode 0600.

`keys/controller.json` (a `Door`) is what the controller listens with, `keys/<host>.json` (a `Join`) what the agent of
that host and its ranks connect with, to the controller and to the ranks of other hosts. No secret is ever an argument
of a process.

Key pairs of CURVE; the gate lets in listed keys, and few strangers at once (ZAP, rfc.zeromq.org/spec/27).

libzmq accepts every connection, and a process has only so many descriptors: connections that have not said anything
of use yet are counted, and beyond a number the oldest of them is shut.
"""

import json
import os
import resource
import secrets
import socket as sockets
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

import msgspec
import zmq
from zmq.utils import z85

from penstock.runtime.cluster.endpoints import LOOPBACK
from penstock.runtime.control.messages import Hello
from penstock.runtime.record.folder import create_file, make_folder
from penstock.runtime.record.typed_json import parse_json

# Connections at most that have not said anything of use yet; fewer where a process may open few files.
MAX_WAITING = 256
# Seconds for a connection to prove its key.
HANDSHAKE_S = 10.0
_ZAP = "inproc://zeromq.zap.01"


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
        """End the oldest connections, which libzmq then closes."""
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


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85."""

    public: str
    secret: str = field(repr=False)

    @staticmethod
    def make() -> "KeyPair":
        return KeyPair(*(key.decode() for key in zmq.curve_keypair()))


class KeyFileError(ValueError):
    """A file is no key file, or others may read it. `status` is the exit status of a command that was given it."""

    status: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class _Secrets:
    """A dataclass of strings, lists and maps of strings that is kept as JSON. `needed` says which file it is."""

    needed: ClassVar[str]

    def write(self, path: Path) -> None:
        """Made with mode 0600 before the first byte is in it. Raises FileExistsError."""
        make_folder(path.parent)
        create_file(path, json.dumps({"format": 1, **asdict(self)}, indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises KeyFileError for a file that is not what `write` makes, or that others may read."""
        try:
            data = parse_json(path.read_bytes(), "JSON")  # a path in it may be no UTF-8, of which msgspec reads nothing
            found = msgspec.convert(data, cls)
            others = path.stat().st_mode & 0o077
        except OSError as error:
            raise KeyFileError(f"{path}: cannot be read: {error.strerror}; needed {cls.needed}") from error
        except ValueError as error:
            raise KeyFileError(f"{path}: not a key file of Penstock ({error}); needed {cls.needed}") from error
        if unknown := sorted(data.keys() - {"format"} - {known.name for known in fields(cls)}):
            raise KeyFileError(f"{path}: given a key file with {', '.join(unknown)}; needed {cls.needed}")
        if data.get("format") != 1:
            raise KeyFileError(f"{path}: given format {data.get('format')!r}, needed 1")
        if others:
            raise KeyFileError(f"{path}: others may read this key file; needed mode 0600 (chmod 600 {path})")
        return found


@dataclass(frozen=True, slots=True)
class Door(_Secrets):
    """What a controller listens with. `allowed` has each host's public key; no keys at all means ipc."""

    needed: ClassVar[str] = "what the launcher wrote for the controller"

    run: str
    endpoint: str
    token: str = field(repr=False)
    public: str = ""
    secret: str = field(default="", repr=False)
    allowed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Join(_Secrets):
    """What one host connects with. `folder` is the run folder there; `server` the controller's public key.

    `hosts` has each host's public key: those who may ask this host's ranks for values, and whom they may ask.
    `address` is where these ranks listen for that. `modules` are what all ranks import, once for a host.
    """

    needed: ClassVar[str] = "the join file that `penstock run --cluster` wrote for this host"

    run: str
    endpoint: str
    token: str = field(repr=False)
    host: str
    folder: str
    server: str = ""
    public: str = ""
    secret: str = field(default="", repr=False)
    address: str = LOOPBACK
    hosts: dict[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()

    def hello(self, role: Literal["rank", "agent", "heartbeat"], name: str, rank: int = 0) -> Hello:
        """How this process introduces itself."""
        return Hello(role, name, rank, os.getpid(), self.host, self.token)


@dataclass(frozen=True, slots=True)
class Keys:
    """All of a run's secrets, in the launcher's memory until they are written."""

    door: Door
    hosts: dict[str, KeyPair]

    @staticmethod
    def make(run: str, endpoint: str, hosts: Iterable[str]) -> "Keys":
        """A new token, new key pairs for several hosts, and for tcp also for a single one and the controller."""
        names, unix, nothing = list(hosts), endpoint.startswith("ipc://"), KeyPair("", "")
        pairs = {name: nothing if unix and len(names) == 1 else KeyPair.make() for name in names}
        server, allowed = nothing if unix else KeyPair.make(), {name: pair.public for name, pair in pairs.items()}
        token = secrets.token_hex(16)
        return Keys(Door(run, endpoint, token, server.public, server.secret, {} if unix else allowed), pairs)

    def join(
        self, host: str, endpoint: str, folder: Path, address: str = LOOPBACK, modules: tuple[str, ...] = ()
    ) -> Join:
        """`endpoint` is where the controller really listens: its port may have been the system's choice."""
        door, pair = self.door, self.hosts[host]
        publics = {name: other.public for name, other in self.hosts.items() if other.public}
        join = Join(door.run, endpoint, door.token, host, str(folder), door.public, pair.public, pair.secret)
        return replace(join, address=address, hosts=publics, modules=modules)
