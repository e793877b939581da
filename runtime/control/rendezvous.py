"""How ranks find each other, and how they show that they are alive.

`Board` is the controller's key-value store, where ranks that form a process group find the addresses gloo listens on.
It replaces torch's TCPStore, which listens on all interfaces without authentication, and files, which hosts may not
share. Its content stays for the run: some hundred bytes for each rank of a group. What a peer may store and ask for is
limited, and it may not change another peer's values. Pure.

`HeartbeatThread` is a rank's thread that sends heartbeats, and questions that must not wait for the main thread. It has
a socket of its own and starts before anything heavy is imported, so that a rank that imports for seconds is not taken
for dead. It does not notice a main thread that hangs: firings have deadlines for that.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import count
from queue import SimpleQueue
from time import monotonic

from penstock.runtime.control.messages import (
    MAX_BYTES,
    BoardValues,
    Count,
    Heartbeat,
    Look,
    MessageError,
    Note,
    Question,
)
from penstock.runtime.control.security import Join
from penstock.runtime.control.sockets import Client

# Most bytes that one peer may have on the board: its keys and values, and its unanswered questions. A group of a
# hundred ranks needs some 60,000 from each.
MAX_KEPT = 4 << 20
# Most bytes of all peers.
MAX_BOARD = 256 << 20
# Most bytes of all answers to one peer in a run: they wait in memory if it does not read them.
MAX_ANSWERED = 256 << 20
# Most bytes of one answer, so that it fits in a frame.
MAX_ANSWER = MAX_BYTES - 4096
# What each text costs beside its characters.
_EACH = 64


class Board:
    """Answers questions, some of them later: a `Look` waits until all its keys are there, without a timeout. A question
    beyond a limit changes nothing; the `error` of its answer says so.
    """

    def __init__(self) -> None:
        self._posted: dict[str, str] = {}
        self._posters: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        # By the first missing key of each question: asker, question, place of that key, cost. Keys before it are there.
        self._waiting: defaultdict[str, list[tuple[str, Look, int, int]]] = defaultdict(list)
        self._kept: Counter[str] = Counter()
        self._total = 0  # the sum of `_kept`
        self._answered: Counter[str] = Counter()

    def hear(self, peer: str, question: Question) -> list[tuple[str, BoardValues]]:
        """Handle a question of `peer`. Return the answers that it allows, each with the peer that it is for."""
        if isinstance(question, Look):
            return self._look(peer, question)
        key, counts = question.key, isinstance(question, Count)
        number = question.number if isinstance(question, Count) else 0
        poster = self._posters.get(key, peer)
        # Otherwise one rank could redirect the connections of others to itself.
        if poster != peer and not (counts and key in self._counts):
            return [(peer, BoardValues(number, {}, f"{key:.200}: posted by {poster}, which alone may change it"))]
        if isinstance(question, Count):
            # In decimal digits, as torch's own stores keep a number.
            value = str(self._counts[key] + question.amount).encode().hex()
        else:
            value = question.value
        more = _cost(key, value) - (_cost(key, self._posted[key]) if key in self._posted else 0)
        if refusal := self._refusal(poster, more):
            return [(peer, BoardValues(number, {}, refusal))]
        self._posters[key], self._posted[key] = poster, value
        self._keep(poster, more)
        answers = []
        if isinstance(question, Count):
            self._counts[key] += question.amount
            answers.append(self._found(peer, number, (key,)))
        for asker, look, place, cost in self._waiting.pop(key, ()):
            if (lacking := self._lacking(look, place + 1)) is None:
                self._keep(asker, -cost)
                answers.append(self._found(asker, look.number, look.keys))
            else:
                self._waiting[look.keys[lacking]].append((asker, look, lacking, cost))
        return answers

    def forget(self, peer: str) -> None:
        """A peer has ended: drop its questions, since a successor of its name numbers its own. Its values stay."""
        for key, waiting in [*self._waiting.items()]:
            self._keep(peer, -sum(cost for asker, _, _, cost in waiting if asker == peer))
            if left := [one for one in waiting if one[0] != peer]:
                self._waiting[key] = left
            else:
                del self._waiting[key]

    def _look(self, peer: str, look: Look) -> list[tuple[str, BoardValues]]:
        """The answer to a question; [] if it waits for a key."""
        if look.at_once or (lacking := self._lacking(look)) is None:
            return [self._found(peer, look.number, look.keys)]
        cost = _cost(*look.keys)
        if refusal := self._refusal(peer, cost):
            return [(peer, BoardValues(look.number, {}, refusal))]
        self._keep(peer, cost)
        self._waiting[look.keys[lacking]].append((peer, look, lacking, cost))
        return []

    def _lacking(self, look: Look, start: int = 0) -> int | None:
        """The place of the first missing key from `start` on; None if there is none."""
        return next((place for place in range(start, len(look.keys)) if look.keys[place] not in self._posted), None)

    def _keep(self, peer: str, more: int) -> None:
        self._kept[peer] += more
        self._total += more

    def _refusal(self, peer: str, more: int) -> str:
        """Why `more` bytes of a peer cannot be kept; "" if they can."""
        if more > 0 and self._kept[peer] + more > MAX_KEPT:
            given = f"{peer} has {self._kept[peer]} bytes on the controller's board and gave {more} more"
            return f"{given}; needed at most {MAX_KEPT} for each rank"
        if more > 0 and self._total + more > MAX_BOARD:
            given = f"the controller's board has {self._total} bytes and {peer} gave {more} more"
            return f"{given}; needed at most {MAX_BOARD}"
        return ""

    def _found(self, peer: str, number: int, keys: tuple[str, ...]) -> tuple[str, BoardValues]:
        values = {key: self._posted[key] for key in keys if key in self._posted}
        size = _cost(*values, *values.values())
        if size > MAX_ANSWER:
            error = f"given {len(values)} keys with {size} bytes; needed at most {MAX_ANSWER} at once"
        elif self._answered[peer] > MAX_ANSWERED:
            error = f"{peer} was answered with {self._answered[peer]} bytes; needed at most {MAX_ANSWERED}"
        else:
            self._answered[peer] += size
            return peer, BoardValues(number, values)
        return peer, BoardValues(number, {}, error)


def _cost(*texts: str) -> int:
    """Bytes of texts in a frame, with their overhead."""
    return sum(_EACH + (len(text) if text.isascii() else len(text.encode())) for text in texts)


# Seconds from one heartbeat to the next. With more than `RANKS` ranks it grows, up to `LONGEST`, which is a fifth of
# the silence after which a rank is taken for dead.
INTERVAL, RANKS, LONGEST = 1.0, 256, 2.0


# The heartbeat interval of agents grows beyond so many hosts.
HOSTS = 32


def agent_interval(hosts: int) -> float:
    """Seconds from one heartbeat of an agent to the next in a run of `hosts` hosts."""
    return min(LONGEST, max(INTERVAL, INTERVAL * hosts / HOSTS))


def beat_interval(ranks: int) -> float:
    """Seconds from one heartbeat of a rank to the next in a run of `ranks` ranks: the controller gets all of them."""
    return min(LONGEST, max(INTERVAL, INTERVAL * ranks / RANKS))


def _next(now: float, interval: float) -> float:
    """The time of the next heartbeat. All ranks of a host have the same, so that the controller wakes once for them."""
    return (now // interval + 1) * interval


class HeartbeatThread:
    """Sends a rank's heartbeats from its own thread until `stop`, and asks the controller's board for any thread of the
    rank. `doing` returns what the main thread is working on; `suspended_s` is the controller's, as of its last answer.
    """

    def __init__(self, join: Join, replica: str, rank: int, interval: float = INTERVAL) -> None:
        self._interval = interval
        self.doing: Callable[[], str] = str
        self.suspended_s = 0.0
        self._client = Client(join, "heartbeat", replica, rank)
        self._numbers = count(1)
        self._said: SimpleQueue[Question | Note] = SimpleQueue()
        self._awaited: set[int] = set()
        self._found: dict[int, BoardValues] = {}
        self._refused = ""  # why there will be no answers: a Post was refused, or the controller is gone
        self._heard = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> "HeartbeatThread":
        self._thread.start()
        return self

    def pace(self, ranks: int) -> None:
        """Set the heartbeat interval for a run of `ranks` ranks."""
        self._interval = beat_interval(ranks)

    def stop(self) -> None:
        with self._heard:
            self._over.set()
            self._client.wake()
        # A thread that hangs must not hold up the end of its rank.
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._client.close()  # no thread wakes it after `_over` is set

    def say(self, message: Question | Note) -> None:
        """Send a message that needs no answer. Does nothing after `stop`."""
        with self._heard:
            if not self._over.is_set():
                self._said.put(message)
                self._client.wake()

    def ask(self, question: Callable[[int], Count | Look], seconds: float) -> Mapping[str, str] | None:
        """Send the question that `question` makes with a new number, and return its answer; None if there is none in
        `seconds`. Raises RuntimeError if the controller refuses it or has refused an earlier Post, or is gone."""
        with self._heard:
            number = next(self._numbers)
            self._awaited.add(number)
            self.say(question(number))
            self._heard.wait_for(lambda: number in self._found or self._refused, seconds)
            self._awaited.discard(number)
            found = self._found.pop(number, None)
            if refused := self._refused or (found.error if found else ""):
                raise RuntimeError(f"no answer of the controller's key-value store: {refused}")
            return found.values if found else None

    def _beat(self) -> None:
        client, due = self._client, _next(monotonic(), self._interval)
        while not self._over.is_set():
            if gone := client.gone():
                self._refuse(gone)
            for message in client.receive(max(0.0, due - monotonic())):
                if isinstance(message, BoardValues):
                    self._hear(message)
            while not self._said.empty():
                try:
                    client.send(self._said.get())
                except MessageError as error:  # too large for a frame. Go on, or the rank would seem dead
                    self._refuse(str(error))
            if monotonic() >= due:
                due = _next(monotonic(), self._interval)
                client.send(Heartbeat(self.doing()))

    def _hear(self, message: BoardValues) -> None:
        """Hand an answer to the thread that waits for it. Drop one that no thread waits for any more."""
        with self._heard:
            self.suspended_s = message.suspended_s
            if message.number == 0:
                self._refused = message.error
            elif message.number in self._awaited:
                self._found[message.number] = message
            self._heard.notify_all()

    def _refuse(self, why: str) -> None:
        """Tell all waiting threads that there will be no answers."""
        with self._heard:
            self._refused = why
            self._heard.notify_all()
