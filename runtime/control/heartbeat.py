"""Signs of life: a rank's thread that says it lives, and asks what must not wait for the main thread.

The thread has a socket of its own and starts before anything heavy is imported, so that an import of seconds is
not taken for death. It does not see a main thread that hangs: firings have deadlines for that.
"""

import threading
from collections.abc import Callable, Mapping
from itertools import count
from queue import Empty, SimpleQueue
from time import monotonic

from penstock.runtime.control.client import Client
from penstock.runtime.control.keys import Join
from penstock.runtime.control.messages import Count, Found, Heartbeat, Look, MessageError, Note, Question
from penstock.runtime.control.wire import JOIN_S, SILENCE

INTERVAL = 1.0
"""Seconds from one heartbeat to the next."""


class Pulse:
    """Beats for a rank from its own thread until `stop`, and asks the controller's board for any thread of the rank.
    `doing` says what the main thread is at; `held_up` is the controller's, as of its last answer.
    """

    def __init__(self, join: Join, replica: str, rank: int, interval: float = INTERVAL) -> None:
        self._replica, self._rank, self._interval = replica, rank, interval
        self.doing: Callable[[], str] = str
        self.held_up = 0.0
        self._client = Client(join, "heartbeat", replica, rank)
        self._numbers = count(1)
        self._said: SimpleQueue[Question | Note] = SimpleQueue()
        self._awaited: set[int] = set()
        self._found: dict[int, Found] = {}
        self._refused = ""  # why the controller did not take what was posted
        self._heard = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> "Pulse":
        self._thread.start()
        return self

    def stop(self) -> None:
        with self._heard:
            self._over.set()
            self._client.wake()
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._client.close()  # not before all have woken it

    def say(self, message: Question | Note) -> None:
        """Say what needs no answer; nothing once it has been stopped."""
        with self._heard:
            if not self._over.is_set():
                self._said.put(message)
                self._client.wake()

    def ask(self, question: Callable[[int], Count | Look], seconds: float) -> Mapping[str, str] | None:
        """The answer to the `question` that is made with a number of its own; None if there is none in `seconds`.

        Raises RuntimeError where the controller refuses it, or has refused what was posted before.
        """
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
        client, due, joined = self._client, monotonic() + self._interval, False
        while not self._over.is_set():
            lost = client.lost(monotonic())
            joined = joined or lost == 0
            if lost > (SILENCE if joined else JOIN_S):
                self._refuse(f"no connection to the controller for {lost:.0f} s")
            for message in client.receive(max(0.0, due - monotonic())):
                if isinstance(message, Found):
                    self._hear(message)
            self._say_all()
            if monotonic() >= due:
                due = monotonic() + self._interval
                client.send(Heartbeat(self._replica, self._rank, monotonic(), self.doing()))

    def _hear(self, message: Found) -> None:
        """An answer that no thread awaits any more is dropped."""
        with self._heard:
            self.held_up = message.held_up
            if message.number == 0:
                self._refused = message.error
            elif message.number in self._awaited:
                self._found[message.number] = message
            self._heard.notify_all()

    def _say_all(self) -> None:
        while True:
            try:
                self._client.send(self._said.get_nowait())
            except Empty:
                return
            except MessageError as error:  # too large for a frame; the thread goes on, or the rank would seem dead
                self._refuse(str(error))

    def _refuse(self, why: str) -> None:
        """There will be no answer."""
        with self._heard:
            self._refused = why
            self._heard.notify_all()
