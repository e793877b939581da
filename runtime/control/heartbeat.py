"""Signs of life: a rank's thread that says it lives, and the controller's list of those that did not.

The thread has a socket of its own and starts before anything heavy is imported, so that an import of seconds is
not taken for death. It does not see a main thread that hangs: firings have deadlines for that.
"""

import threading
from collections.abc import Callable
from time import monotonic

from penstock.runtime.control.keys import Join
from penstock.runtime.control.messages import Heartbeat
from penstock.runtime.control.wire import Client

INTERVAL = 1.0
"""Seconds from one heartbeat to the next."""


class Pulse:
    """Beats for a rank from its own thread until `stop`. `doing` says what the main thread is at."""

    def __init__(self, join: Join, replica: str, rank: int, interval: float = INTERVAL) -> None:
        self._join, self._replica, self._rank, self._interval = join, replica, rank, interval
        self.doing: Callable[[], str] = str
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> "Pulse":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._over.set()
        self._thread.join(timeout=5.0)

    def _beat(self) -> None:
        client = Client(self._join, "heartbeat", self._replica, self._rank)
        while not self._over.wait(self._interval):
            client.send(Heartbeat(self._replica, self._rank, monotonic(), self.doing()))
        client.close()
