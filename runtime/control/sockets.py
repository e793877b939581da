"""The socket of the controller, a `Server` (ROUTER), for the `Client`s of ranks and agents.

No peer is heard before a Hello with the run's token. A frame that is malformed, oversized, replayed, of an unknown
connection or of a kind that a controller does not hear is counted by kind in `counts`, described in `dropped`,
and never raises. On tcp always CURVE: a key that is not on the door's list does not get as far as a frame. Each side
numbers its frames on a connection; a number that does not grow is a replay. Not for several threads.

Who may say what is decided here and nowhere else. On tcp a connection is its key's host, whatever it says; on a Unix
socket, which only the run's user can open, the host that it says. A host may say Hello for its own agent and for the
ranks that the plan has there, a rank speaks for itself, an agent for itself and the ranks of its host, and values are
where their maker is. What goes beyond that is counted as "unauthorised", what goes beyond a peer's amount of notes or
questions as "excessive".

`Tracker` knows who has been silent for too long. It is pure: time is passed in, and never goes back.
"""

import os
import select
import struct
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest
from itertools import count, takewhile
from math import inf
from time import monotonic
from typing import Any, Literal, get_args

import zmq
from msgspec import structs

from penstock.runtime.cluster.endpoints import socket_file
from penstock.runtime.control.listener import Listener, Options, dial, drain
from penstock.runtime.control.messages import (
    MAX_BYTES,
    AgentReady,
    Exited,
    Found,
    Heartbeat,
    Hello,
    Leaving,
    Message,
    MessageError,
    Note,
    Question,
    Ready,
    Results,
    SendFailed,
    agent_peer,
    pack,
    pack_for_many,
    rank_peer,
    shortened,
    unpack,
)
from penstock.runtime.control.security import Door, Join
from penstock.runtime.schedule.events import Abort, Failed
from penstock.runtime.tensor.shm import ObjectRef, owner_of

# Seconds between two looks that count at most: whoever looks at nobody for longer was held up, not they.
PAUSE_S = 1.0


class Tracker:
    """The last sign of life of each peer. A peer is tracked from its first sign until it is forgotten.

    Peers are kept in the order of their last signs, so that a look at who is late costs no more for many of them.
    While the one who listens is stopped it hears nobody: that time, `held_up` in all, is no one's silence.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._last: dict[str, tuple[float, float]] = {}  # as the clock had it, and of the time that counts
        self._looked = inf
        self._held_up = 0.0

    def heard(self, peer: str, now: float) -> None:
        self._last.pop(peer, None)
        self._last[peer] = now, self._counted(now)

    def forget(self, peer: str) -> None:
        self._last.pop(peer, None)

    def last(self, peer: str) -> float:
        """Its last sign of life; −∞ for a peer that is not tracked."""
        return self._last.get(peer, (-inf, -inf))[0]

    def late(self, now: float) -> list[str]:
        """The peers silent for more than `silence` seconds, in the order of their names."""
        until = self._counted(now) - self._silence
        silent = takewhile(lambda entry: entry[1][1] < until, self._last.items())
        return sorted(peer for peer, _ in silent)

    def held_up(self, now: float) -> float:
        """Seconds up to `now` in which the one who listens was stopped itself: whoever is waited for need not answer
        for these. A deadline is looked at with the same `now`: a stop may come between any two lines.
        """
        self._held_up += max(0.0, now - self._looked - PAUSE_S)
        self._looked = now
        return self._held_up

    def _counted(self, now: float) -> float:
        return now - self.held_up(now)


# Seconds without a sign of life after which a peer is taken for dead.
SILENCE = 10.0
# Seconds that a process tries to reach its controller for the first time.
JOIN_S = 60.0
# Messages that may wait for one peer: past it the peer is stuck, and sending fails.
MAX_WAITING = 100_000
# Frames of one connection that the controller keeps before it has read them; the others wait with their sender.
MAX_UNREAD = 64
# Characters of what a peer says that it is at.
MAX_DOING = 200
# Notes of one peer that are handed on. Those that say why it ends are not counted.
MAX_NOTES = 100
# Frames above this are not read at all: the connection is closed by libzmq. Below, they are counted.
_CUT_OFF = MAX_BYTES + (64 << 10)
# Seconds for what is still being sent when a socket is closed.
FLUSH_S = 0.5
_MORE = zmq.NOBLOCK | zmq.SNDMORE


# What a connection of each role may say after its Hello.
_SAYS: Mapping[str, tuple[type, ...]] = {
    "agent": (AgentReady, Exited, Heartbeat, Leaving, Note),
    "rank": (Ready, Results, SendFailed, Heartbeat, Note),
    "heartbeat": (Heartbeat, Note, *get_args(Question)),
}


# What both sides need. A connection is cut when the other side's kernel has not answered for SILENCE. It is not libzmq
# that pings: it would not answer while its process is stopped, and cut all its connections when that goes on.
_OPTIONS: Options = {
    zmq.SNDHWM: MAX_WAITING,
    zmq.RCVHWM: MAX_WAITING,
    zmq.MAXMSGSIZE: _CUT_OFF,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: max(1, int(SILENCE / 3)),
    zmq.TCP_KEEPALIVE_INTVL: max(1, int(SILENCE / 15)),
    zmq.TCP_KEEPALIVE_CNT: 10,
    zmq.TCP_MAXRT: int(1000 * SILENCE),
    zmq.RCVBUF: 1 << 20,  # what is said while the process is stopped
}


class _Dropped(Exception):
    """A frame that goes no further: its kind, its sender's name, and why."""


@dataclass(slots=True)
class _Connection:
    """A peer's socket. `key` is the public key that it came with, "" on a Unix socket; `heard` and `said` are the last
    sequence numbers, `hello` that of its Hello, and `pid` the process that said it.
    """

    peer: str
    role: str
    host: str
    key: str
    identity: bytes
    pid: int
    hello: int
    heard: int
    said: int = 0


def connections(ranks: Mapping[str, str]) -> int:
    """How many a run makes with its controller: two for each rank, and one for each host."""
    return 2 * len(ranks) + len(set(ranks.values()))


class Server:
    """The controller's end. `endpoint` is where it really listens; `peers` are those that said Hello; `doing` is what
    each peer was at when it last beat, and `tracker` when that was.
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
        self.tracker = Tracker(silence)
        self._connections: dict[bytes, _Connection] = {}
        self._routes: dict[str, _Connection] = {}
        self._sides: dict[str, _Connection] = {}
        # Peers, and whether it was their heartbeat's socket, that have ever said Hello: `forget` leaves them here.
        self._greeted: set[tuple[str, bool]] = set()
        keys = None
        if not door.endpoint.startswith("ipc://"):
            if not (door.secret and door.allowed):
                raise ValueError(f"{door.endpoint}: given no keys, needed CURVE keys on tcp")
            keys = door.secret, door.allowed.values()
        options = {**_OPTIONS, zmq.RCVHWM: MAX_UNREAD}
        self._listener = Listener(door.endpoint, options, keys, self._refused, connections(ranks))
        self._socket, self.endpoint = self._listener.socket, self._listener.endpoint
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(self._routes)

    def receive(self, timeout: float) -> list[tuple[str, Message]]:
        """All that is waiting, after at most `timeout` seconds for the first of it; perhaps nothing.

        A peer's Hello comes as its first message. Heartbeats are noted and not handed on.
        """
        found: list[tuple[str, Message]] = []
        until, left = monotonic() + timeout, timeout
        # Heartbeats alone are no reason to return: of a thousand ranks there is one each moment.
        while not found and self._poller.poll(int(1000 * left)):
            now = monotonic()
            for frames, key, descriptor in self._listener.drain():
                try:
                    found += self._take(frames, key, descriptor, now)
                except _Dropped as drop:
                    self.drop(*drop.args)
            left = until - now
            if left <= 0:
                break
        return found

    def _refused(self, address: str) -> None:
        self.drop("refused", address, "a key that is not on the list")

    def drop(self, kind: str, name: str, text: str) -> None:
        """Count and describe what goes no further."""
        self.counts[kind] += 1
        self.dropped.append(f"{kind} frame of {name:.200}: {text:.400}")

    def send(self, peer: str, message: Message) -> bool:
        """False when `peer` cannot be reached: it never said Hello, is gone, or has stopped reading."""
        # The thread that beats for a rank asks, and hears the answer while the main thread is at work.
        connection = (self._sides if isinstance(message, Found) else self._routes).get(peer)
        if connection is None:
            return False
        return self._send(connection, partial(pack, message))

    def send_all(self, peers: Sequence[str], message: Message) -> list[str]:
        """Send the same to several; those of them that cannot be reached."""
        framed = pack_for_many(message)
        return [p for p in peers if (one := self._routes.get(p)) is None or not self._send(one, framed)]

    def _send(self, connection: _Connection, framed: Callable[[int], bytes]) -> bool:
        # Numbers have to grow, and may have gaps: that of a frame that is not sent is not used again.
        connection.said += 1
        try:
            self._socket.send(connection.identity, _MORE)
            self._socket.send(framed(connection.said), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def forget(self, peer: str) -> None:
        """A peer that ended: it is not late, cannot be sent to, and may say Hello again as a new process."""
        self._routes.pop(peer, None)
        self._sides.pop(peer, None)
        self.tracker.forget(peer)
        self.doing.pop(peer, None)
        self._connections = {i: c for i, c in self._connections.items() if c.peer != peer}

    def close(self) -> None:
        """What is still being sent gets half a second."""
        self._listener.close(FLUSH_S)
        if (file := socket_file(self.endpoint)) is not None:
            file.unlink(missing_ok=True)

    def _take(self, frames: list[bytes], key: str, descriptor: int, now: float) -> list[tuple[str, Message]]:
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
            sequence, message = unpack(frames[1])
        except MessageError as error:
            raise _Dropped("malformed", name, str(error)) from error
        if connection is None:
            greeted = self._greet(frames[0], key, name, sequence, message, now)
            self._listener.know(descriptor)
            return greeted
        if sequence <= connection.heard:
            raise _Dropped("replayed", name, f"frame {sequence} after frame {connection.heard}")
        if not isinstance(message, _SAYS[connection.role]):
            raise _Dropped("unexpected", name, type(message).__name__)
        if claim := _overreach(message, connection, self._ranks):
            raise _Dropped("unauthorised", name, claim)
        # Not before: a frame that is refused must not make those behind it replays.
        connection.heard = sequence
        self.tracker.heard(connection.peer, now)
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
        # In constant time: a stranger who measures learns nothing of the token.
        if not compare_digest(message.token.encode(), self._token):
            raise _Dropped("unknown", name, f"Hello of {message.peer} with another run's token")
        host = self._hosts[key] if key else message.host
        own = message.name if message.role == "agent" else self._ranks.get(message.peer)
        if not host == own == message.host:
            raise _Dropped("unauthorised", name, f"Hello of {message.peer}, which is none of host {host}")
        beats = message.role == "heartbeat"
        of = self._sides if beats else self._routes
        said = f"Hello of {message.peer}, pid {message.pid}"
        before = of.get(message.peer)
        if before is not None and not (message.again and _begun_again(before, message, host)):
            raise _Dropped("duplicate", name, f"{said}, but it is here already")
        # The run has gone on without it: a successor of that name may be on its way.
        if before is None and message.again and (message.peer, beats) in self._greeted:
            raise _Dropped("duplicate", name, f"{said}, which was here before and was given up")
        connection = _Connection(message.peer, message.role, host, key, identity, message.pid, sequence, sequence)
        if before is not None:
            connection.said = before.said  # numbers grow for a client, whatever connection they come on
            self._connections.pop(before.identity, None)
        self._greeted.add((message.peer, beats))
        self._connections[identity] = of[message.peer] = connection
        self.tracker.heard(message.peer, now)
        return [] if beats else [(message.peer, message)]


def _begun_again(before: _Connection, hello: Hello, host: str) -> bool:
    """Is a Hello of the process that said the one `before`, and nothing since? So nothing it said is lost with that
    connection: it was cut at once."""
    return (before.host, before.pid, before.heard) == (host, hello.pid, before.hello)


def _overreach(message: Message, connection: _Connection, ranks: Mapping[str, str]) -> str:
    """What a message claims that its sender may not; "" for none."""
    peer, handles = connection.peer, list[ObjectRef]()
    match message:
        case Ready(replica=replica, rank=rank, restored=restored):
            claimed, handles = {rank_peer(replica, rank)}, [handle for _, _, handle in restored]
        case Results(results):
            answers = [result.event for result in results if not isinstance(result.event, Abort)]
            claimed = {rank_peer(answer.replica, answer.rank) for answer in answers}
            handles = [handle for result in results for handle in result.outputs.values()]
        case AgentReady(host=host) | Leaving(host=host):
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


def _readable(message: Any) -> Any:
    """The message with texts of a length that a terminal and a log can take."""
    if isinstance(message, Results) and any(isinstance(one.event, Failed | Abort) for one in message.results):
        return Results(tuple(structs.replace(one, event=_readable(one.event)) for one in message.results))
    if not isinstance(message, Note | Exited | Failed | Abort | SendFailed):
        return message
    texts = ((name, getattr(message, name)) for name in ("text", "tail", "error") if hasattr(message, name))
    return structs.replace(message, **{name: shortened(text) for name, text in texts})


class Client:
    """The socket of a rank or agent. It says Hello by itself, and connects again when a connection breaks. Not for
    several threads.

    `refused` is true once the controller has turned this key away; `counts` is as the server's.
    """

    def __init__(self, join: Join, role: Literal["rank", "agent", "heartbeat"], name: str, rank: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self.refused = False
        self._down_since: float | None = monotonic()
        self._connected = self._joined = False
        self._controller = f"the controller at {join.endpoint}"
        self._host = join.host
        self._numbers = count(1)
        self._heard = 0
        self._context = zmq.Context()
        failures = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        failures |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | failures
        self._socket = dial(self._context, join.endpoint, join.server, join, _OPTIONS, events)
        self._monitor = self._socket.get_monitor_socket(events)
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for one in (self._socket, self._monitor, self._waker):
            self._poller.register(one, select.POLLIN)
        self._opening: list[Message] = []  # what is said again on a new connection
        self.send(Hello(role, name, rank, os.getpid(), join.host, join.token))

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
        return [message for frames, _, _ in drain(self._socket) if (message := self._take(frames)) is not None]

    def send(self, message: Message) -> bool:
        """False when more than MAX_WAITING messages wait already. While there is no connection, messages wait."""
        if isinstance(message, Hello | AgentReady | Ready):
            self._opening.append(message)
        return self._say(message)

    def _say(self, message: Message) -> bool:
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
        with suppress(KeyError):  # it is not watched any more
            self._poller.unregister(descriptor)

    def lost(self, now: float) -> float:
        """Seconds for which there has been no connection to the controller; 0 while there is one."""
        return 0.0 if self._down_since is None else now - self._down_since

    def gone(self, silence: float = SILENCE) -> str:
        """Why the controller is not waited for any more; "" while it may still be reached."""
        lost = self.lost(monotonic())
        self._joined = self._joined or lost == 0
        if self.refused:
            return f"{self._controller} does not know the key of host {self._host!r}; needed the key file of this run"
        if not self._joined and lost > JOIN_S:
            return f"{self._controller} has not answered within {JOIN_S:.0f} s"
        if self._joined and lost > silence:
            return f"{self._controller} is gone (no connection for {lost:.0f} s)"
        return ""

    def close(self) -> None:
        """What is still being sent gets half a second."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=int(1000 * FLUSH_S))
        os.close(self._waker)

    def _note_connection(self) -> None:
        while True:
            try:
                event, _ = struct.unpack("=hi", self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                # The controller may have cut the first connection before it heard anything.
                for said in self._opening if self._connected else ():
                    self._say(structs.replace(said, again=True) if isinstance(said, Hello) else said)
                self._down_since, self._connected = None, True
            elif self._down_since is None:
                self._down_since = monotonic()
            self.refused = self.refused or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def _take(self, frames: list[bytes]) -> Message | None:
        try:
            sequence, message = unpack(frames[0] if len(frames) == 1 else b"")
        except MessageError:
            self.counts["malformed"] += 1
            return None
        if sequence <= self._heard:
            self.counts["replayed"] += 1
            return None
        self._heard = sequence
        return message
