"""The socket of the controller, a `Server` (ROUTER), and of ranks and agents, a `Client`.

A peer must first send a Hello with the run's token. A frame that is malformed, oversized, replayed, from an unknown
connection or of an unexpected kind is counted by kind in `counts`, described in `dropped`, and never raises. On tcp
CURVE is always on: a client whose key is not on the server's list cannot send a frame. Each side numbers its frames on
a connection; a number that does not grow is a replay. Not thread-safe.

On tcp a connection's host is that of its key, whatever it claims; on a Unix socket, which only the run's user can open,
it is the host that it claims. A host may send Hello for its own agent and for the ranks that the plan has there. A
message beyond that, or beyond `rights`, is counted as "unauthorised"; notes or questions beyond a peer's limits are
counted as "excessive".

Another process of an agent's name is told to wait until the first is forgotten; then it is asked to introduce itself.
An agent that comes back after it was forgotten is told so, since its successor may be there.

A rank has a connection of its own, or its agent forwards its messages (`relay`); then the agent watches its heartbeat.
"""

import os
import select
import struct
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

import zmq
from msgspec import structs

from penstock.runtime.cluster.endpoints import socket_file
from penstock.runtime.control.listener import CONNECTION_EVENTS, Listener, Options, dial, drain
from penstock.runtime.control.messages import (
    MAX_BYTES,
    AgentReady,
    BoardValues,
    Delivery,
    GivenUp,
    Heartbeat,
    Hello,
    Introduce,
    Message,
    MessageError,
    Note,
    OfRank,
    RankMessages,
    Ready,
    SignsOfLife,
    Waits,
    framed,
    pack,
    pack_message,
    unpack,
)
from penstock.runtime.control.rights import SAYS, overreach, readable
from penstock.runtime.control.security import Join, ServerKeys
from penstock.runtime.control.silence import LivenessTracker

# Seconds without a sign of life after which a peer is taken for dead.
SILENCE = 10.0
# Seconds for which a process tries to reach its controller for the first time.
JOIN_S = 60.0
# Most messages that may wait for one peer. Beyond it the peer counts as stuck, and sending fails.
MAX_WAITING = 100_000
# Most unread frames of one connection in the controller; more wait at their sender.
MAX_UNREAD = 64
# Most characters of a peer's `doing`.
MAX_DOING = 200
# Most notes of one peer that are handed on. Notes with the reason of its end do not count.
MAX_NOTES = 100
# libzmq closes the connection at a frame above this size. Smaller oversized frames are counted.
_CUT_OFF = MAX_BYTES + (64 << 10)
# Seconds for unsent messages when a socket is closed.
FLUSH_S = 0.5
# With `MANY_HOSTS` hosts or more, `receive` gathers messages for a moment, since waking up costs as much as ten
# answers. The moment is `WORK_SHARE` times as long as the caller last worked, but within `GATHER_S` and `BURST_S`
# seconds. While only heartbeats come, which all hosts send at the same moment, it is `BURST_S`.
MANY_HOSTS, GATHER_S, WORK_SHARE, BURST_S = 32, 0.002, 10, 0.01
_MORE = zmq.NOBLOCK | zmq.SNDMORE
# The number of the last frame to a process that is given up: more than any that it has heard.
_LAST = 1 << 62
# Most processes of one agent's name that wait for another one to be forgotten.
MAX_WAITING_AGENTS = 4
# The kinds of dropped frames that an agent may report.
DROPPED = ("malformed", "oversized", "unknown", "replayed", "unexpected", "unauthorised", "duplicate", "excessive")

# Options of both sides. A connection is cut when the other side's kernel has not answered for SILENCE. libzmq's own
# heartbeats would not do: a suspended process does not answer them, and cuts all its connections when it goes on.
_OPTIONS: Options = {
    zmq.SNDHWM: MAX_WAITING,
    zmq.RCVHWM: MAX_WAITING,
    zmq.MAXMSGSIZE: _CUT_OFF,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: max(1, int(SILENCE / 3)),
    zmq.TCP_KEEPALIVE_INTVL: max(1, int(SILENCE / 15)),
    zmq.TCP_KEEPALIVE_CNT: 10,
    zmq.TCP_MAXRT: int(1000 * SILENCE),
    zmq.RCVBUF: 1 << 20,  # for messages that come while the process is suspended
}


class _Dropped(Exception):
    """A frame is dropped: its kind, its sender's name, and why."""


@dataclass(slots=True)
class _Connection:
    """A peer's connection. `key` is its public key, "" on a Unix socket. `heard` and `said` are the last sequence
    numbers, `hello` that of its Hello, and `pid` the process that sent it. `name` is for people.
    """

    peer: str
    name: str
    role: str
    host: str
    key: str
    identity: bytes
    pid: int
    hello: int
    heard: int
    said: int


def connections(ranks: Mapping[str, str], endpoint: str) -> int:
    """The number of connections to a run's controller: one per host and, on a Unix socket, two per rank."""
    return len(set(ranks.values())) + (2 * len(ranks) if endpoint.startswith("ipc://") else 0)


class Server:
    """The controller's socket. `endpoint` is where it really listens; `peers` are those that sent Hello; `doing` is
    what each peer was working on at its last heartbeat; `tracker` has the last signs of life.
    """

    def __init__(self, server_keys: ServerKeys, ranks: Mapping[str, str], silence: float = SILENCE) -> None:
        """`ranks` has the host of each rank that may come, by its name as a peer."""
        self.counts: Counter[str] = Counter()
        self.dropped: deque[str] = deque(maxlen=32)
        self.doing: dict[str, str] = {}
        self._token = server_keys.token.encode()
        self._ranks = ranks
        # The ranks of each host by replica, for which its agent may speak.
        here: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for peer, host in ranks.items():
            replica, _, rank = peer.rpartition(":")
            here[host][replica].add(int(rank))
        self._here = {host: {name: frozenset(of) for name, of in replicas.items()} for host, replicas in here.items()}
        self._hosts = {public: host for host, public in server_keys.allowed.items()}
        self._notes: Counter[str] = Counter()
        self.tracker = LivenessTracker(silence)
        self._connections: dict[bytes, _Connection] = {}
        # By peer: the connection that leads to it, its own or its agent's; and its heartbeat's connection.
        self._routes: dict[str, _Connection] = {}
        self._heartbeats: dict[str, _Connection] = {}
        # Sets of peers that are sent the same message, split by connection. Valid until a route changes.
        self._grouped: dict[tuple[str, ...], list[tuple[_Connection | None, tuple[str, ...]]]] = {}
        self._silent: dict[str, str] = {}  # silent ranks, and the agent that reported each
        # Peers that have ever sent Hello, whether on their heartbeat's socket, and their pids; `forget` keeps them.
        self._greeted: set[tuple[str, bool, int]] = set()
        # By connection: the agents that wait, and whether they have lost a connection of their own, with messages. An
        # agent is "" once it has been asked to introduce itself.
        self._waiting: dict[bytes, tuple[str, bool]] = {}
        self._replies = count(1)
        keys = None
        if not server_keys.endpoint.startswith("ipc://"):
            if not (server_keys.secret and server_keys.allowed):
                raise ValueError(f"{server_keys.endpoint}: given no keys, needed CURVE keys on tcp")
            keys = server_keys.secret, server_keys.allowed.values()
        options = {**_OPTIONS, zmq.RCVHWM: MAX_UNREAD}
        self._returned = 0.0  # when `receive` last returned
        self._listener = Listener(
            server_keys.endpoint, options, keys, self._refused, connections(ranks, server_keys.endpoint)
        )
        self.socket, self.endpoint = self._listener.socket, self._listener.endpoint
        self._file = socket_file(self.endpoint)
        self._bound = None if self._file is None else _inode(self._file)
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for one in (self.socket, self._waker):
            self._poller.register(one, zmq.POLLIN)

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(self._routes)

    def receive(self, timeout: float) -> list[tuple[str, Message]]:
        """All waiting messages, after a wait of at most `timeout` seconds for the first one; perhaps none. Returns
        early when another thread calls `wake`.

        A peer's Hello comes as its first message. Heartbeats are noted here and not returned.
        """
        found: list[tuple[str, Message]] = []
        began = monotonic()
        until, left, gather = began + timeout, timeout, 0.0
        if len(self._here) >= MANY_HOSTS:
            gather = min(BURST_S, max(GATHER_S, WORK_SHARE * (began - self._returned)))
        # Heartbeats alone are no reason to return: with a thousand ranks there is one each moment.
        while not found and (ready := dict(self._poller.poll(int(1000 * left)))):
            if self._waker in ready:
                os.eventfd_read(self._waker)
                left = 0.0
            if gather:
                sleep(gather)
                gather = BURST_S
            now = monotonic()
            for frames, key, descriptor in self._listener.drain():
                try:
                    found += self._take(frames, key, descriptor, now)
                except _Dropped as drop:
                    self.drop(*drop.args)
            left = min(left, until - now)
            if left <= 0:
                break
        self._returned = monotonic()
        return found

    def wake(self) -> None:
        """Make `receive` return; the one method for other threads."""
        if self._waker >= 0:
            os.eventfd_write(self._waker, 1)

    def _refused(self, address: str) -> None:
        self.drop("refused", address, "a key that is not on the list")

    def drop(self, kind: str, name: str, text: str) -> None:
        """Count and describe a dropped frame."""
        self.counts[kind] += 1
        self.dropped.append(f"{kind} frame of {name:.200}: {text:.400}")

    def send(self, peer: str, message: Message) -> bool:
        """Send a message. False if `peer` cannot be reached: it never sent Hello, is gone, or has stopped reading."""
        connection = self._routes.get(peer)
        # A rank's heartbeat thread asks, and gets the answer while the main thread is busy.
        aside = isinstance(message, BoardValues)
        packed = pack_message(message)
        if connection is not None and connection.peer != peer:
            return self._send(connection, partial(pack, Delivery((peer,), packed, aside)))
        if aside:
            connection = self._heartbeats.get(peer)
        return connection is not None and self._send(connection, partial(framed, packed))

    def send_all(self, peers: Sequence[str], message: Message) -> list[str]:
        """Send one message to several peers. Return those that cannot be reached."""
        packed, unreached = pack_message(message), list[str]()
        for connection, reached in self._by_connection(tuple(peers)):
            if connection is not None:
                carried = connection.peer != reached[0]
                frame = partial(pack, Delivery(reached, packed)) if carried else partial(framed, packed)
                if self._send(connection, frame):
                    continue
            unreached += reached
        return unreached

    def _by_connection(self, peers: tuple[str, ...]) -> list[tuple[_Connection | None, tuple[str, ...]]]:
        """Connections, each with the peers that it reaches. Cached: the ranks of a replica come again and again."""
        if peers not in self._grouped:
            found: dict[bytes, tuple[_Connection | None, list[str]]] = {}
            for peer in peers:
                connection = self._routes.get(peer)
                found.setdefault(connection.identity if connection else b"", (connection, []))[1].append(peer)
            self._grouped[peers] = [(connection, tuple(of)) for connection, of in found.values()]
        return self._grouped[peers]

    def deliver(self, delivery: Delivery) -> None:
        """Forward a message to peers with connections of their own. Those that are gone are skipped."""
        of = self._heartbeats if delivery.aside else self._routes
        for peer in delivery.peers:
            if (connection := of.get(peer)) is not None:
                self._send(connection, partial(framed, delivery.message))

    def late(self, now: float) -> list[str]:
        """The peers that give no sign of life, sorted by name."""
        return sorted([*self.tracker.late(now), *self._silent])

    def _send(self, connection: _Connection, frame: Callable[[int], bytes]) -> bool:
        # Numbers must grow, and may have gaps: the number of an unsent frame is not used again.
        connection.said += 1
        try:
            self.socket.send(connection.identity, _MORE)
            self.socket.send(frame(connection.said), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def forget(self, peer: str) -> None:
        """Forget a peer that ended: it is not late, cannot be sent to, and may send Hello again as a new process. With
        an agent, the ranks are forgotten whose messages it forwards."""
        self._grouped.clear()
        self._routes = {name: to for name, to in self._routes.items() if peer not in (name, to.peer)}
        self._silent = {name: agent for name, agent in self._silent.items() if peer not in (name, agent)}
        self._heartbeats.pop(peer, None)
        self.tracker.forget(peer)
        self.doing.pop(peer, None)
        self._connections = {i: c for i, c in self._connections.items() if c.peer != peer}
        for identity, (agent, lost) in [*self._waiting.items()]:
            if agent == peer and lost:
                del self._waiting[identity]
                self._reply(identity, GivenUp(_LOST), _LAST)
            elif agent == peer:
                self._waiting[identity] = "", False
                self._reply(identity, Introduce(), next(self._replies))

    def _wait(self, hello: Hello, identity: bytes, before: _Connection) -> None:
        """Let an agent wait until the other process of its name is forgotten. Of too many, the oldest is given up."""
        # A pid alone is no proof: in containers, each agent may have the same one.
        lost = hello.again and hello.pid == before.pid
        self._waiting.pop(identity, None)
        self._waiting[identity] = hello.peer, lost
        same = [other for other, (peer, _) in self._waiting.items() if peer == hello.peer]
        for other in same[:-MAX_WAITING_AGENTS]:
            del self._waiting[other]
            self._reply(other, GivenUp(f"{MAX_WAITING_AGENTS} later processes wait for the place of this one"), _LAST)
        if not lost:
            self._reply(identity, Waits(before.pid), next(self._replies))

    def _reply(self, identity: bytes, message: Message, number: int) -> None:
        """Send a message to a connection that is no peer's, if it is still there."""
        with suppress(zmq.ZMQError):
            self.socket.send(identity, _MORE)
            self.socket.send(pack(message, number), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; unsent messages get half a second."""
        self._listener.close(FLUSH_S)
        if self._waker >= 0:
            waker, self._waker = self._waker, -1
            os.close(waker)
        # A successor that listens at the same path has replaced the file.
        if self._file is not None and _inode(self._file) == self._bound:
            self._file.unlink(missing_ok=True)

    def _take(self, frames: list[bytes], key: str, descriptor: int, now: float) -> list[tuple[str, Message]]:
        """The messages of a frame for the caller, if any. Raises _Dropped."""
        connection = self._connections.get(frames[0])
        # libzmq lets a client choose its identity: another host's client could take that of a broken connection.
        if connection is not None and connection.key != key:
            connection = None
        name = self._spelled("an unknown connection", key) if connection is None else connection.name
        if len(frames) != 2:
            raise _Dropped("malformed", name, f"{len(frames)} frames")
        if len(frames[1]) > MAX_BYTES:
            raise _Dropped("oversized", name, f"{len(frames[1])} bytes")
        try:
            sequence, message = unpack(frames[1])
        except MessageError as error:
            raise _Dropped("malformed", name, str(error)) from error
        if connection is None:
            if frames[0] in self._waiting and not isinstance(message, Hello):
                return []
            greeted = self._greet(frames[0], key, name, sequence, message, now)
            self._listener.know(descriptor)
            return greeted
        if sequence <= connection.heard:
            raise _Dropped("replayed", name, f"frame {sequence} after frame {connection.heard}")
        if not isinstance(message, SAYS[connection.role]):
            raise _Dropped("unexpected", name, type(message).__name__)
        plain = isinstance(message, (Heartbeat, SignsOfLife, RankMessages))  # their claims are checked below
        if not plain and (claim := overreach(message, connection.peer, connection.host, self._ranks)):
            raise _Dropped("unauthorised", name, claim)
        # Only now: a refused frame must not turn the frames after it into replays.
        connection.heard = sequence
        self.tracker.heard(connection.peer, now)
        if isinstance(message, Heartbeat):
            self.doing[connection.peer] = message.doing[:MAX_DOING]
            return []
        if isinstance(message, RankMessages):
            return self._reported(message, connection, name)
        if isinstance(message, SignsOfLife):
            self._note_signs(message, connection, name)
            return []
        return [self._noted(connection.peer, message, name)]

    def _spelled(self, name: str, key: str) -> str:
        return f"{name} (key of host {self._hosts[key]})" if key else name

    def _reported(self, report: RankMessages, agent: _Connection, name: str) -> list[tuple[str, Message]]:
        """The messages of an agent's ranks. One that is not allowed is dropped without the others."""
        found = []
        for peer, message in report.said:
            try:
                found.append(self._carried(peer, message, agent, name))
            except _Dropped as drop:
                self.drop(*drop.args)
        return found

    def _carried(self, peer: str, message: OfRank, agent: _Connection, name: str) -> tuple[str, Message]:
        """A rank's message that its agent forwarded. Raises _Dropped."""
        if self._ranks.get(peer) != agent.host:
            raise _Dropped("unauthorised", name, f"{type(message).__name__} of {peer:.200}")
        known = self._routes.get(peer)
        if isinstance(message, Hello):
            if (message.role, message.peer, message.host) != ("rank", peer, agent.host):
                raise _Dropped("unauthorised", name, f"Hello of {message.peer}, handed on as that of {peer}")
            if known is not None and not (message.again and known is agent):
                raise _Dropped("duplicate", name, f"Hello of {peer}, pid {message.pid}, but it is here already")
            self._greeted.add((peer, False, message.pid))
            self._routes[peer] = agent
            self._grouped.clear()
            return peer, message
        if known is not agent:
            raise _Dropped("unknown", name, f"{type(message).__name__} of {peer}, before its Hello or after its end")
        if claim := overreach(message, peer, agent.host, self._ranks, self._here[agent.host]):
            raise _Dropped("unauthorised", name, f"{claim}, handed on as that of {peer}")
        return self._noted(peer, message, name)

    def _noted(self, peer: str, message: Message, name: str) -> tuple[str, Message]:
        """A message for the caller. Raises _Dropped for a note beyond the limit."""
        if isinstance(message, Note) and message.level != "error":
            self._notes[peer] += 1
            if self._notes[peer] > MAX_NOTES:
                raise _Dropped("excessive", name, f"a note of {peer} after {MAX_NOTES} of them")
        return peer, readable(message)

    def _note_signs(self, signs: SignsOfLife, agent: _Connection, name: str) -> None:
        """Note an agent's report of its ranks. What it reports of other ranks is ignored."""
        own = {peer: doing for peer, doing in signs.doing.items() if self._routes.get(peer) is agent}
        self.doing.update((peer, doing[:MAX_DOING]) for peer, doing in own.items())
        silent = {peer: agent.peer for peer in signs.silent if self._routes.get(peer) is agent}
        self._silent = {peer: by for peer, by in self._silent.items() if by != agent.peer} | silent
        if counted := {kind: number for kind, number in signs.dropped.items() if kind in DROPPED and number > 0}:
            self.counts.update(counted)
            self.dropped.append(f"{signs.last:.600} (at {name})")

    def _greet(
        self, identity: bytes, key: str, name: str, sequence: int, message: Message, now: float
    ) -> list[tuple[str, Message]]:
        """Check a connection's first frame, and accept the connection. Raises _Dropped."""
        if not isinstance(message, Hello):
            raise _Dropped("unknown", name, f"{type(message).__name__} before Hello")
        # In constant time, so that timing reveals nothing of the token.
        if not compare_digest(message.token.encode(), self._token):
            raise _Dropped("unknown", name, f"Hello of {message.peer} with another run's token")
        host = self._hosts[key] if key else message.host
        own = message.name if message.role == "agent" else self._ranks.get(message.peer)
        if not host == own == message.host:
            raise _Dropped("unauthorised", name, f"Hello of {message.peer}, which is none of host {host}")
        beats = message.role == "heartbeat"
        of = self._heartbeats if beats else self._routes
        said = f"Hello of {message.peer}, pid {message.pid}"
        before = of.get(message.peer)
        if before is not None and not (message.again and _begun_again(before, message, host)):
            if message.role == "agent":
                self._wait(message, identity, before)
                said += " (it waits)"
            raise _Dropped("duplicate", name, f"{said}, but it is here already")
        # The run has gone on without this process: a successor of that name may be starting.
        greeted = (message.peer, beats, message.pid)
        if before is None and message.again and greeted in self._greeted:
            if message.role == "agent":
                self._reply(identity, GivenUp(_LOST), _LAST)
            raise _Dropped("duplicate", name, f"{said}, which was here before and was given up")
        name = self._spelled(message.peer, key)
        # A client's numbers grow over all its connections, and after what it was told before.
        said_so_far = before.said if before is not None else next(self._replies)
        connection = _Connection(
            message.peer, name, message.role, host, key, identity, message.pid, sequence, sequence, said_so_far
        )
        if before is not None:
            self._connections.pop(before.identity, None)
        self._greeted.add(greeted)
        self._waiting.pop(identity, None)
        self._connections[identity] = of[message.peer] = connection
        self._grouped.clear()
        self.tracker.heard(message.peer, now)
        return [] if beats else [(message.peer, message)]


# What an agent is told whose connection broke for so long that it was given up.
_LOST = "its connection broke, and it was given up"


def _inode(file: Path) -> tuple[int, int] | None:
    """The device and number of a file; None if there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _begun_again(before: _Connection, hello: Hello, host: str) -> bool:
    """True if the process of this Hello also sent that of the connection `before`, and nothing after it: then nothing
    was lost with that connection."""
    return (before.host, before.pid, before.heard) == (host, hello.pid, before.hello)


class Client:
    """The socket of a rank or agent. It sends Hello by itself, and reconnects when a connection breaks. Not
    thread-safe.

    `refused` is true once the controller has refused this key; `counts` is as the server's.
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
        self._socket = dial(self._context, join.endpoint, join.server, join, _OPTIONS, CONNECTION_EVENTS)
        self._monitor = self._socket.get_monitor_socket(CONNECTION_EVENTS)
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for one in (self._socket, self._monitor, self._waker):
            self._poller.register(one, select.POLLIN)
        self._opening: list[Message] = []  # messages that are repeated on a new connection
        self.send(Hello(role, name, rank, os.getpid(), join.host, join.token))

    def receive(self, timeout: float) -> list[Message]:
        """All waiting messages, after a wait of at most `timeout` seconds for the first one; perhaps none.

        Returns early when another thread calls `wake`, and when a descriptor of `watch` is readable.
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
        """Send a message; while there is no connection, it waits. False if MAX_WAITING messages wait already."""
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

    def watch(self, descriptor: int | zmq.Socket[bytes]) -> None:
        """Let `receive` return when a descriptor, or another socket, is readable."""
        self._poller.register(descriptor, select.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        with suppress(KeyError):  # it is not watched any more
            self._poller.unregister(descriptor)

    def lost(self, now: float) -> float:
        """Seconds for which there has been no connection to the controller; 0 while there is one."""
        return 0.0 if self._down_since is None else now - self._down_since

    def gone(self, silence: float = SILENCE) -> str:
        """Why the controller counts as gone; "" while it may still be reached."""
        self._note_connection()  # after a refusal libzmq drops the queue, so `send` may fail before the event is read
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
        """Close the socket; unsent messages get half a second."""
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
                # Reconnected: the controller may have cut the earlier connection before it read anything.
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
        if isinstance(message, Introduce):
            for said in self._opening:
                self._say(said)
            return None
        return message
