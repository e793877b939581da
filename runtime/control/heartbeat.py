"""A thread that says every half second that its process lives, over a socket of its own.

It is started before anything heavy is imported, so that seconds of importing do not look like death. It cannot see a
main thread that hangs: firings have deadlines for that.
"""

import threading

from penstock.runtime.control.messages import Heartbeat, Hello
from penstock.runtime.control.wire import Client, Keys, WireError

INTERVAL = 0.5


class Heart:
    """Beats for `name` until `stop`, or until the process ends."""

    def __init__(self, endpoint: str, name: str, hello: Hello, keys: Keys | None = None) -> None:
        self._arguments = (endpoint, f"beat:{name}", hello, keys)
        self._name = name
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        client = Client(*self._arguments)
        try:
            while not self._stopped.wait(INTERVAL):
                client.send(Heartbeat(self._name))
        except WireError:
            return  # the controller is gone; the agent sees to the rest
        finally:
            client.close(0.0)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2 * INTERVAL)
