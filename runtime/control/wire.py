"""The socket of the controller, a `Server` (ROUTER), for the `Client`s (see `client`) of ranks and agents.

No peer is heard before a Hello with the run's token. A frame that is malformed, oversized, replayed, of an unknown
connection or of a kind that a controller does not hear is counted by kind in `counts`, described in `dropped`,
and never raises. On tcp always CURVE: a key that is not on the door's list does not get as far as a frame. Each side
numbers its frames on a connection; a number that does not grow is a replay. Not for several threads.

Who may say what is decided here and nowhere else. On tcp a connection is its key's host, whatever it says; on a Unix
socket, which only the run's user can open, the host that it says. A host may say Hello for its own agent and for the
ranks that the plan has there, a rank speaks for itself, an agent for itself and the ranks of its host, and values are
where their maker is. What goes beyond that is counted as "unauthorised", what goes beyond a peer's amount of notes or
questions as "excessive".
"""

import select
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from time import monotonic
from typing import get_args

import zmq
from msgspec import structs

from penstock.runtime.control.endpoints import socket_file
from penstock.runtime.control.gate import Gate
from penstock.runtime.control.keys import Door
from penstock.runtime.control.listen import listen
from penstock.runtime.control.messages import (
    MAX_BYTES,
    MAX_TEXT,
    AgentReady,
    Exited,
    Heartbeat,
    Hello,
    Message,
    MessageError,
    Note,
    Question,
    Ready,
    Result,
    Results,
    agent_peer,
    pack,
    rank_peer,
    shortened,
    unpack_frame,
)
from penstock.runtime.control.tracker import Tracker
from penstock.runtime.schedule.events import Abort, Arrived, Done, Failed, Published, Saved, Swapped
from penstock.runtime.tensor.handle import Handle, owner_of

SILENCE = 15.0
"""Seconds without a sign of life after which a peer is taken for dead."""
JOIN_S = 60.0
"""Seconds that a process tries to reach its controller for the first time."""
MAX_WAITING = 100_000
"""Messages that may wait for one peer: past it the peer is stuck, and sending fails."""
MAX_UNREAD = 64
"""Frames of one connection that the controller keeps before it has read them; the others wait with their sender."""
MAX_DRAIN, MAX_DRAIN_BYTES = 4096, 16 << 20
"""Frames that one `receive` takes, and their bytes, so that a flood does not keep the caller from what else it hears
and from its deadlines."""
LATEST_S = 1e12
"""No clock of a machine has gone on for so many seconds; figures of a run are made with its times."""
MAX_DOING = 200
"""Characters of what a peer says that it is at."""
MAX_NOTES = 100
"""Notes of one peer that are handed on. Those that say why it ends are not counted."""
_CUT_OFF = MAX_BYTES + (64 << 10)
"""Frames above this are not read at all: the connection is closed by libzmq. Below, they are counted."""
FLUSH_S = 0.5
"""Seconds for what is still being sent when a socket is closed."""
_MORE = zmq.NOBLOCK | zmq.SNDMORE


_SAYS: Mapping[str, tuple[type, ...]] = {
    "agent": (AgentReady, Exited, Heartbeat, Note),
    "rank": (Ready, Results, Heartbeat, Note),
    "heartbeat": (Heartbeat, Note, *get_args(Question)),
}
"""What a connection of each role may say after its Hello."""


def tune(socket: zmq.Socket[bytes]) -> None:
    """What both sides need. A connection is cut when the other side's kernel has not answered for SILENCE. It is not
    libzmq that pings: it would not answer while its process is stopped, and cut all its connections when that goes on.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
    socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, _CUT_OFF)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, int(SILENCE / 3)))
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, int(SILENCE / 15)))
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 10)
    socket.setsockopt(zmq.TCP_MAXRT, int(1000 * SILENCE))
    socket.setsockopt(zmq.RCVBUF, 1 << 20)  # what is said while the process is stopped


def drain(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """What waits at a socket that is readable. It is asked for more, since an exception to say none costs thrice."""
    for _ in range(MAX_DRAIN):
        yield socket.recv_multipart(zmq.NOBLOCK)
        if not int(socket.getsockopt(zmq.EVENTS)) & select.POLLIN:
            return


class _Dropped(Exception):
    """A frame that goes no further: its kind, its sender's name, and why."""


@dataclass(slots=True)
class _Connection:
    """A peer's socket. `key` is the public key that it came with, "" on a Unix socket; `heard` and `said` are the last
    sequence numbers.
    """

    peer: str
    role: str
    host: str
    key: str
    identity: bytes
    heard: int
    said: int = 0


class Server:
    """The controller's end. `endpoint` is where it really listens; `peers` are those that said Hello; `doing` is what
    each peer was at when it last beat.
    """

    def __init__(self, door: Door, ranks: Mapping[str, str], silence: float = SILENCE) -> None:
        """`ranks` has the host of each rank that may come, by its name as a peer."""
        self.counts: Counter[str] = Counter()
        self.dropped: deque[str] = deque(maxlen=32)
        self.doing: dict[str, str] = {}
        self._token = door.token.encode()
        self._ranks = ranks
        self._hosts = {public: host for host, public in door.allowed.items()}
        self._notes: Counter[str] = Counter()
        self._tracker = Tracker(silence)
        self._connections: dict[bytes, _Connection] = {}
        self._routes: dict[str, _Connection] = {}
        self._sides: dict[str, _Connection] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._gate: Gate | None = None
        tune(self._socket)
        self._socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if not door.endpoint.startswith("ipc://"):
                if not (door.secret and door.allowed):
                    raise ValueError(f"{door.endpoint}: given no keys, needed CURVE keys on tcp")
                self._gate = Gate(self._socket, door.secret, door.allowed.values(), self._refuse)
            self.endpoint = listen(self._socket, door.endpoint)
            if self._gate is not None:
                self._gate.open()
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
        now = monotonic()
        for frames, key, descriptor in self._drain() if self._socket in ready else ():
            try:
                found += self._take(frames, key, now)
                if self._gate is not None:
                    self._gate.know(descriptor)
            except _Dropped as drop:
                self.drop(*drop.args)
        return found

    def drop(self, kind: str, name: str, text: str) -> None:
        """Count and describe what goes no further."""
        self.counts[kind] += 1
        self.dropped.append(f"{kind} frame of {name:.200}: {text:.400}")

    def send(self, peer: str, message: Message) -> bool:
        """False when `peer` cannot be reached: it never said Hello, is gone, or has stopped reading."""
        return self._deliver(self._routes.get(peer), message)

    def answer(self, peer: str, message: Message) -> bool:
        """The same to the thread of a rank that beats for it, which hears while the main thread is at work."""
        return self._deliver(self._sides.get(peer), message)

    def _deliver(self, connection: _Connection | None, message: Message) -> bool:
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

    def heard(self, peer: str) -> float:
        """When `peer` gave its last sign of life; as long ago as can be if it never did."""
        return self._tracker.last(peer)

    def held_up(self, now: float) -> float:
        """Seconds up to `now` that the controller itself was stopped: whoever is waited for need not answer for these.

        A deadline is looked at with the same `now`: a stop may come between any two lines.
        """
        return self._tracker.held_up(now)

    def late(self, now: float) -> list[str]:
        """The peers that gave no sign of life for `silence` seconds, in the order of their names."""
        return self._tracker.late(now)

    def forget(self, peer: str) -> None:
        """A peer that ended: it is not late, cannot be sent to, and may say Hello again as a new process."""
        self._routes.pop(peer, None)
        self._sides.pop(peer, None)
        self._tracker.forget(peer)
        self.doing.pop(peer, None)
        self._connections = {i: c for i, c in self._connections.items() if c.peer != peer}

    def close(self) -> None:
        """What is still being sent gets half a second."""
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=int(1000 * FLUSH_S))
        if (file := socket_file(self.endpoint)) is not None:
            file.unlink(missing_ok=True)

    def _drain(self) -> Iterator[tuple[list[bytes], str, int]]:
        """What waits, up to the bounds of one `receive`, each as from `keyed`."""
        unix = ((frames, "", -1) for frames in drain(self._socket))
        size = 0
        for frames, key, descriptor in unix if self._gate is None else keyed(self._socket):
            yield frames, key, descriptor
            size += sum(map(len, frames))
            if size > MAX_DRAIN_BYTES:
                return

    def _take(self, frames: list[bytes], key: str, now: float) -> list[tuple[str, Message]]:
        """What a frame says to the caller, if anything. Raises _Dropped."""
        connection = self._connections.get(frames[0])
        # libzmq lets a client choose its identity: another host's could take that of a connection that has broken.
        if connection is not None and connection.key != key:
            connection = None
        name = "an unknown connection" if connection is None else connection.peer
        if key:
            name = f"{name} (key of host {self._hosts[key]})"
        if len(frames) != 2:
            raise _Dropped("malformed", name, f"{len(frames)} frames")
        if len(frames[1]) > MAX_BYTES:
            raise _Dropped("oversized", name, f"{len(frames[1])} bytes")
        try:
            sequence, message = unpack_frame(frames[1])
        except MessageError as error:
            raise _Dropped("malformed", name, str(error)) from error
        if connection is None:
            return self._greet(frames[0], key, name, sequence, message, now)
        if sequence <= connection.heard:
            raise _Dropped("replayed", name, f"frame {sequence} after frame {connection.heard}")
        if not isinstance(message, _SAYS[connection.role]):
            raise _Dropped("unexpected", name, type(message).__name__)
        if isinstance(message, Results):
            for one in message.results:
                if not (abs(one.began) < LATEST_S and abs(one.ended) < LATEST_S):
                    raise _Dropped("malformed", name, f"a Result from {one.began} to {one.ended} s")
        if claim := _overreach(message, connection, self._ranks):
            raise _Dropped("unauthorised", name, claim)
        connection.heard = sequence
        self._tracker.heard(connection.peer, now)
        if isinstance(message, Heartbeat):
            self.doing[connection.peer] = message.doing[:MAX_DOING]
            return []
        if isinstance(message, Note) and message.level != "error":
            self._notes[connection.peer] += 1
            if self._notes[connection.peer] > MAX_NOTES:
                raise _Dropped("excessive", name, f"a note after {MAX_NOTES} of them")
        return [(connection.peer, _readable(message))]

    def _greet(
        self, identity: bytes, key: str, name: str, sequence: int, message: Message, now: float
    ) -> list[tuple[str, Message]]:
        """A connection's first frame: let it in. Raises _Dropped."""
        if not isinstance(message, Hello):
            raise _Dropped("unknown", name, f"{type(message).__name__} before Hello")
        if not compare_digest(message.token.encode(), self._token):
            raise _Dropped("unknown", name, f"Hello of {message.peer} with another run's token")
        host = self._hosts[key] if key else message.host
        own = message.name if message.role == "agent" else self._ranks.get(message.peer)
        if not host == own == message.host:
            raise _Dropped("unauthorised", name, f"Hello of {message.peer}, which is none of host {host}")
        beats = message.role == "heartbeat"
        if message.peer in (self._sides if beats else self._routes):
            raise _Dropped("duplicate", name, f"Hello of {message.peer}, pid {message.pid}, but it is here already")
        connection = _Connection(message.peer, message.role, host, key, identity, sequence)
        self._connections[identity] = connection
        self._tracker.heard(message.peer, now)
        if beats:
            self._sides[message.peer] = connection
            return []
        self._routes[message.peer] = connection
        return [(message.peer, message)]

    def _refuse(self, address: str) -> None:
        self.drop("refused", address, "a key that is not on the list")


def keyed(socket: zmq.Socket[bytes]) -> Iterator[tuple[list[bytes], str, int]]:
    """`drain`, and for each message its sender's public key, which the gate gave as its user's name, and the descriptor
    of its connection.
    """
    for _ in range(MAX_DRAIN):
        frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        yield [one.bytes for one in frames], str(frames[-1].get("User-Id")), int(frames[-1].get(zmq.SRCFD))
        if not int(socket.getsockopt(zmq.EVENTS)) & select.POLLIN:
            return


def _overreach(message: Message, connection: _Connection, ranks: Mapping[str, str]) -> str:
    """What a message claims that its sender may not; "" for none."""
    peer, handles = connection.peer, list[Handle]()
    match message:
        case Ready(replica=replica, rank=rank, restored=restored):
            handles = [handle for _, _, handle in restored]
            claimed = {rank_peer(replica, rank)}
        case Results(results):
            claimed = set()
            for event in (result.event for result in results):
                if isinstance(event, Done | Failed | Published | Arrived | Swapped | Saved):
                    claimed.add(rank_peer(event.replica, event.rank))
                elif not isinstance(event, Abort):
                    return f"a {type(event).__name__}"  # the controller's own
            handles = [handle for result in results for handle in result.outputs.values()]
        case AgentReady(host=host):
            claimed = {agent_peer(host)}
        case Exited(replica=replica, rank=rank):
            dead = rank_peer(replica, rank)
            return "" if ranks.get(dead) == connection.host else f"Exited of {dead}"
        case _:
            return ""
    if others := claimed - {peer}:
        return f"{type(message).__name__} of {', '.join(sorted(others))}"
    name, _, index = peer.rpartition(":")
    for handle in handles:
        if handle.host not in ("", connection.host) or handle.owner != owner_of(name, int(index)):
            return f"a value of {handle.owner} on host {handle.host}"
    return ""


def _readable(message: Message) -> Message:
    """The message with texts of a length that a terminal and a log can take."""
    match message:
        case Note(text=text) if len(text) > MAX_TEXT:
            return structs.replace(message, text=shortened(text))
        case Exited(tail=tail) if len(tail) > MAX_TEXT:
            return structs.replace(message, tail=shortened(tail))
        case Results(results) if any(len(getattr(one.event, "error", "")) > MAX_TEXT for one in results):
            return Results(tuple(map(_readable_result, results)))
    return message


def _readable_result(result: Result) -> Result:
    if not isinstance(result.event, Failed | Abort):
        return result
    return structs.replace(result, event=structs.replace(result.event, error=shortened(result.event.error)))
