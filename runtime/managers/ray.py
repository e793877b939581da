"""Agents on a Ray cluster (`--on ray`): a placement group with a bundle for each node, in each an actor with an agent.

Ray is never imported here. Its driver is a child of this process (`ray_driver`), for three reasons: Ray ends a driver
that has lost its cluster, whatever it is in the middle of; it takes signal handlers, the terminal and hundreds of
megabytes; and a connection to nobody can be given up in time. What the two say are JSON objects, one per line:

- the driver is asked for `{"agents": N}` (null: a node each), and says `found` (slots, address) or `failed` (text);
- it is given `{"ticket": text, "folder": path}`, and says `note` (text for the user), `state` (what the agents that
  have not come wait for, "" for nothing), and `ended` (host, reason) of an agent that has ended;
- when its stdin closes, because the run has ended or this process has, it frees what it took from Ray, and ends.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryFile
from time import monotonic
from typing import IO, Any

from penstock.runtime.control.agents import AgentsError
from penstock.runtime.control.process import describe_exit, kill, last_text

DRIVER = "penstock.runtime.managers.ray_driver"
# Where Ray's clients look for their cluster; without it, for one that this machine is part of.
ADDRESS = "RAY_ADDRESS"
# Seconds for a cluster to answer, which starts a process for each client of `ray://`, and waits for that one for 30 s;
# and for the driver to free what it has taken: agents have `ray_driver.LEAVE_S` of it.
CONNECT_S, FREE_S = 60.0, 12.0
# Bytes of what Ray has printed that an error shows.
SHOWN_BYTES = 1500

Said = dict[str, Any]


class RayAgents:
    """The `Agents` of the Ray cluster of RAY_ADDRESS, or of the one that this machine is part of."""

    def __init__(self, count: int | None) -> None:
        if find_spec("ray") is None:
            raise AgentsError("--on ray: the package ray is not installed; needed: pip install 'penstock[ray]'")
        self._where = os.environ.get(ADDRESS, "")
        self._said: Queue[Said | None] = Queue()
        self._names: list[str] = []
        self._state, self._over = "", False
        self._tell: Callable[[str], None] = lambda text: None
        # What Ray prints is for an error alone.
        self._log = TemporaryFile()  # noqa: SIM115
        # A session of its own: Ctrl-C is the run's, which still needs its agents.
        self._driver = subprocess.Popen(
            [sys.executable, "-m", DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        assert self._driver.stdout is not None
        threading.Thread(target=self._hear, args=(self._driver.stdout,), daemon=True).start()
        try:
            self._ask({"agents": count})
            found = self._answer()
        except BaseException:
            kill(self._driver)  # it may hang in a connection, and holds nothing yet
            self.stop()
            raise
        self.slots, self.address = int(found["slots"]), str(found["address"])

    def start(self, ticket: Path, tell: Callable[[str], None]) -> None:
        self._tell = tell
        # By a pipe: no process of this machine or of Ray's has it among its arguments.
        self._ask({"ticket": ticket.read_text(), "folder": str(Path.cwd())})

    def poll(self) -> list[tuple[str, str]]:
        ended: list[tuple[str, str]] = []
        for said in self._heard():
            match said:
                case None:
                    self._over = True
                    why = f"Ray's driver, which holds it, ended ({self._ending()})"
                    ended += [(name, why) for name in self._names or [""]]
                case {"kind": "names", "names": names}:
                    self._names = list(names)
                case {"kind": "state", "text": text}:
                    self._state = str(text)
                case {"kind": "note", "text": text}:
                    self._tell(str(text))
                case {"kind": "ended", "host": host, "why": why}:
                    ended.append((str(host), str(why)))
        return ended

    def lacking(self) -> str:
        return self._state

    def stop(self) -> None:
        self._over = True
        assert self._driver.stdin is not None
        with suppress(BrokenPipeError):
            self._driver.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._driver.wait(FREE_S)
        # Ray frees what a driver had that is no more.
        kill(self._driver)
        self._driver.wait()
        self._log.close()

    # The driver -------------------------------------------------------------------------------------------

    def _ask(self, said: Said) -> None:
        assert self._driver.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as is heard in a moment
            self._driver.stdin.write(json.dumps(said).encode() + b"\n")
            self._driver.stdin.flush()

    def _hear(self, lines: IO[bytes]) -> None:
        """In a thread of its own."""
        with lines:
            for line in lines:
                self._said.put(json.loads(line))
        self._said.put(None)

    def _heard(self) -> Iterable[Said | None]:
        while not self._over:
            try:
                yield self._said.get_nowait()
            except Empty:
                return

    def _answer(self) -> Said:
        """The first line of the driver. Raises AgentsError where it says that there is no cluster, or says nothing."""
        until = monotonic() + CONNECT_S
        where = f"at {self._where} ({ADDRESS})" if self._where else f"that this machine is part of (no {ADDRESS})"
        needed = f"needed one that runs: ray start --head, or from outside: {ADDRESS}=ray://HOST:10001"
        while monotonic() < until:
            # In short waits, so that signals are heard.
            with suppress(Empty):
                said = self._said.get(timeout=0.2)
                if said is None:
                    raise AgentsError(f"--on ray: Ray's driver ended ({self._ending()}); {needed}")
                if said["kind"] == "failed":
                    raise AgentsError(f"--on ray: given no Ray cluster {where}; {needed}\n{said['text']}")
                return said
        raise AgentsError(
            f"--on ray: no Ray cluster {where} answered within {CONNECT_S:g} s; {needed}{self._printed()}"
        )

    def _ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._driver.wait(1.0)
        how = "it does not end" if self._driver.returncode is None else describe_exit(self._driver)
        return f"{how}{self._printed()}"

    def _printed(self) -> str:
        """What Ray has printed last."""
        text = last_text(self._log, SHOWN_BYTES)
        return f"\n{text}" if text else ""
