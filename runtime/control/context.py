"""The ZeroMQ context that all clients of a process share: one I/O thread, which serves several sockets at each turn."""

import threading

import zmq


class SharedContext:
    """The first user makes the context. The last one ends it, and waits for what any of them is still sending."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def take(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if not self._users:
                self._context = zmq.Context()
            self._users += 1
            return self._context

    def give(self) -> None:
        """The user's sockets must be closed, each with its linger: the wait is as long as the longest of these."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._context.term()


SHARED = SharedContext()
