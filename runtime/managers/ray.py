"""Agents on a Ray cluster (`--on ray`): a placement group with a bundle for each node, and in each an actor with an
agent.

Ray is never imported here. Its driver is a child of this process (`ray_driver`), for three reasons: Ray ends a driver
that has lost its cluster, at any point; it takes over signal handlers and the terminal, and needs hundreds of
megabytes; and an attempt to connect can be given up in time. The two exchange JSON objects, one per line:

- the driver gets `{"agents": N}` (null: one for each node), and answers `found` (slots, address) or `failed` (text;
  `again`: another attempt may succeed);
- it gets `{"ticket": text, "folder": path}`, and sends `names` (the host names of the agents), `note` (text for the
  user), `state` (what the missing agents wait for, "" for nothing), and `ended` (host, why) for an agent that has
  ended;
- when its stdin closes, because the run or this process has ended, it frees what it took from Ray, and ends.
"""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryFile
from time import monotonic
from typing import IO, Any

from penstock.host import install_command, module_command
from penstock.runtime.control.agents import AgentsError
from penstock.runtime.control.process import describe_exit, kill, last_text

DRIVER = "penstock.runtime.managers.ray_driver"
# Where Ray's clients look for their cluster; without it, they look for one that this machine is part of.
ADDRESS = "RAY_ADDRESS"
NEEDED = f"needed one that runs: ray start --head, or from outside: {ADDRESS}=ray://HOST:10001"
# Seconds for a cluster to answer, and how many times it may fail to. For each client of `ray://` Ray forks a process
# beside gRPC threads. In a few of 100 connections, more under load, it dies at once
# (https://github.com/ray-project/ray/issues/63202). Ray waits for it for 30 s, and mostly reports its death after 40 to
# 75 s, but sometimes at once: then there are `TRIES` in all.
CONNECT_S, CONNECTS, TRIES = 35.0, 3, 6
# Seconds for the driver to free its resources; agents have `ray_driver.LEAVE_S` of these.
FREE_S = 12.0
# Bytes of Ray's output that an error shows.
SHOWN_BYTES = 1500

Said = dict[str, Any]


class RayAgents:
    """The `Agents` of the Ray cluster of RAY_ADDRESS, or of the one that this machine is part of."""

    def __init__(self, count: int | None) -> None:
        if find_spec("ray") is None:
            raise AgentsError(f"--on ray: the package ray is not installed; needed: {install_command('ray')}")
        self._where = os.environ.get(ADDRESS, "")
        self._names: list[str] = []
        self._state, self._over = "", False
        self._tell: Callable[[str], None] = lambda text: None
        # Ray's output is only for errors.
        self._log = TemporaryFile()  # noqa: SIM115
        try:
            found = self._connect(count)
        except BaseException:
            self._log.close()
            raise
        self.slots, self.address = int(found["slots"]), str(found["address"])

    def start(self, ticket: Path, tell: Callable[[str], None]) -> None:
        self._tell = tell
        # Through a pipe, so that the ticket is no argument of a process here or in Ray.
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
        self._close_stdin()
        with suppress(subprocess.TimeoutExpired):
            self._driver.wait(FREE_S)
        # Ray frees the resources of a dead driver.
        self._kill_driver()
        self._log.close()

    # The driver -------------------------------------------------------------------------------------------

    def _connect(self, count: int | None) -> Said:
        """Start a driver, and return what it has found. Try again with another driver if the cluster does not answer
        in time, or fails in a way that may pass. Raises AgentsError."""
        late = 0
        for _ in range(TRIES):
            self._start_driver()
            said: Said | None = None
            try:
                self._ask({"agents": count})
                said = self._answer()
            finally:
                if said is None or said["kind"] != "found":
                    self._kill_driver()  # it may hang while it connects, and holds no resources yet
            if said is None:
                late += 1
                told = f"--on ray: no Ray cluster {self._given()} answered within {CONNECT_S:g} s, {late} times"
                why = f"{told}; {NEEDED}{self._printed()}"
                if late == CONNECTS:
                    break
            elif said["kind"] == "found":
                return said
            else:
                why = f"--on ray: given no Ray cluster {self._given()}; {NEEDED}\n{said['text']}"
                if not said["again"]:
                    break
        raise AgentsError(why)

    def _start_driver(self) -> None:
        self._said: Queue[Said | None] = Queue()
        try:
            # In its own session: Ctrl-C is for the run, which still needs its agents.
            self._driver = subprocess.Popen(
                module_command(DRIVER),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentsError(f"--on ray: Ray's driver cannot be started: {error}") from error
        assert self._driver.stdout is not None
        threading.Thread(target=self._hear, args=(self._driver.stdout, self._said), daemon=True).start()

    def _close_stdin(self) -> None:
        assert self._driver.stdin is not None
        with suppress(BrokenPipeError):
            self._driver.stdin.close()

    def _kill_driver(self) -> None:
        self._close_stdin()
        kill(self._driver)
        self._driver.wait()

    def _ask(self, said: Said) -> None:
        assert self._driver.stdin is not None
        with suppress(BrokenPipeError):  # the driver has ended, which `_heard` soon shows
            self._driver.stdin.write(json.dumps(said).encode() + b"\n")
            self._driver.stdin.flush()

    @staticmethod
    def _hear(lines: IO[bytes], said: "Queue[Said | None]") -> None:
        """Put the driver's lines into a queue, and None at the end. Runs in its own thread."""
        with lines:
            for line in lines:
                said.put(json.loads(line))
        said.put(None)

    def _heard(self) -> Iterable[Said | None]:
        while not self._over:
            try:
                yield self._said.get_nowait()
            except Empty:
                return

    def _answer(self) -> Said | None:
        """The driver's first line; None if there is none in time. Raises AgentsError if it ends without one."""
        until = monotonic() + CONNECT_S
        while monotonic() < until:
            # In short waits, so that signals are handled.
            with suppress(Empty):
                said = self._said.get(timeout=0.2)
                if said is None:
                    raise AgentsError(f"--on ray: Ray's driver ended ({self._ending()}); {NEEDED}")
                return said
        return None

    def _given(self) -> str:
        return f"at {self._where} ({ADDRESS})" if self._where else f"that this machine is part of (no {ADDRESS})"

    def _ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._driver.wait(1.0)
        how = "it does not end" if self._driver.returncode is None else describe_exit(self._driver)
        return f"{how}{self._printed()}"

    def _printed(self) -> str:
        """The end of Ray's output."""
        text = last_text(self._log, SHOWN_BYTES)
        return f"\n{text}" if text else ""
