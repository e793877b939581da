"""Servers and clients in one process, and helpers that wait with a deadline."""

import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import zmq

from penstock.runtime.cluster.endpoints import ipc_endpoint
from penstock.runtime.control.messages import Hello, Message, pack
from penstock.runtime.control.security import Join, Keys
from penstock.runtime.control.sockets import Client, Server

DEADLINE_S = 60.0
Role = Literal["rank", "agent", "heartbeat"]
RANKS = {
    **{
        f"{name}/{i}:{rank}": "local"
        for name in ("generator", "scorer", "trainer")
        for i in (0, 1)
        for rank in range(8)
    },
    "generator/7:0": "b",
    "generator/7:1": "b",
}
"""The ranks of a bench's plan, and their hosts."""


def until(look: Callable[[], Any], deadline: float = DEADLINE_S) -> Any:
    """Call `look` until its result is true, and return that; raise after the deadline."""
    end = monotonic() + deadline
    while monotonic() < end:
        if found := look():
            return found
    raise AssertionError(f"not within {deadline:.0f} s")


@dataclass
class Bench:
    """A server, the keys of its run, and the messages it has received so far."""

    server: Server
    keys: Keys
    folder: Path
    stack: ExitStack
    heard: list[tuple[str, Message]] = field(default_factory=list)

    def join(self, host: str = "local") -> Join:
        return self.keys.join(host, self.server.endpoint, self.folder)

    def client(self, name: str = "generator/0", rank: int = 0, host: str = "local") -> Client:
        """Return a connected client of a rank."""
        client = Client(self.join(host), "rank", name, rank)
        self.stack.callback(client.close)
        until(lambda: self.hear() or f"{name}:{rank}" in self.server.peers)
        return client

    def raw(self, host: str = "local") -> "Raw":
        """Return a socket that sends any frame."""
        raw = Raw(self.join(host))
        self.stack.callback(raw.context.destroy, linger=0)
        return raw

    def hear(self) -> list[tuple[str, Message]]:
        found = self.server.receive(0.05)
        self.heard += found
        return found

    def wait_for(self, number: int) -> list[tuple[str, Message]]:
        """Wait until this many messages were received in all."""
        until(lambda: self.hear() is not None and len(self.heard) >= number)
        return self.heard

    def wait_for_count(self, kind: str, number: int = 1) -> None:
        until(lambda: self.hear() is not None and self.server.counts[kind] >= number)


class Raw:
    """A DEALER socket that does not follow the protocol."""

    def __init__(self, join: Join, identity: bytes = b"") -> None:
        self.join = join
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        if join.server:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, join.server.encode())
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, join.public.encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, join.secret.encode())
        self.socket.connect(join.endpoint)

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def hello(
        self,
        name: str = "generator/0",
        token: str | None = None,
        sequence: int = 1,
        role: Role = "rank",
        host: str = "",
        pid: int = 1,
        again: bool = False,
    ) -> None:
        token = self.join.token if token is None else token
        self.say(pack(Hello(role, name, 0, pid, host or self.join.host, token, again), sequence))


@contextmanager
def bench(folder: Path, endpoint: str = "", silence: float = 60.0, ranks: Mapping[str, str] = RANKS) -> Iterator[Bench]:
    """A listening server, by default on a Unix socket in `folder`; everything is closed at the end."""
    run = f"t{secrets.token_hex(6)}"  # the same tests may run twice on this machine
    keys = Keys.make(run, endpoint or ipc_endpoint(folder), ["local", "b"])
    with ExitStack() as stack:
        server = Server(keys.server, ranks, silence)
        stack.callback(server.close)
        yield Bench(server, keys, folder, stack)


def mutated(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return one of the frames with some bytes changed, cut out, repeated, or replaced by another frame's."""
    data = bytearray(chance.choice(seeds))
    for _ in range(int(1 / (chance.random() + 0.1))):
        at, length = int(chance.random() * len(data)), int(1 / (chance.random() + 0.02))
        match int(chance.random() * 4):
            case 0:
                data[at : at + length] = chance.randbytes(length)
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length] * length
            case 3:
                other = chance.choice(seeds)
                data[at : at + length] = other[at : at + length]
    return bytes(data)


def stranger(join: Join) -> Join:
    """The same endpoint with another key."""
    other = Keys.make("run1", "tcp://127.0.0.1:0", ["local"]).hosts["local"]
    return replace(join, public=other.public, secret=other.secret)
