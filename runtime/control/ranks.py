"""The ranks that an agent has started: forked on its order, killed, and waited for."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from penstock.runtime.control.client import Client
from penstock.runtime.control.forks import PACKET_BYTES, Order
from penstock.runtime.control.process import adopt_orphans, kill, kill_session, start, tail
from penstock.runtime.record.folder import open_append

LAST_S = 10.0
"""Seconds for the kernel to end what was killed."""
TRIES = 2
"""Processes that are asked for a rank: one may be killed, but if a second one ends before it forks it, none can."""
ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Libraries that ask at their import how many threads they may have would start them in what forks."""


class Ended(NamedTuple):
    """`status` is negative for a signal; `tail` is the end of what was written to stderr."""

    name: str
    pid: int
    status: int
    tail: str


@dataclass(slots=True)
class _Rank:
    """`pid` is 0 until it is born; one that is `doomed` is killed then. `asked`: the process that forks has the order.
    `lost` are those that ended before they had forked it.
    """

    order: bytes
    stderr: Path
    asked: bool = False
    lost: int = 0
    pid: int = 0
    pidfd: int = -1
    doomed: bool = False


class Ranks:
    """Ranks of `host` by name. `command` is the program of the process that forks them (see `forks`); `client` wakes
    when there is something to ask `ended` for. What forks is started at once, and again for a rank if it has ended.
    """

    def __init__(self, command: Sequence[str], run: str, host: str, logs: Path, client: Client) -> None:
        adopt_orphans()
        self._command, self._run, self._logs, self._client = command, run, logs, client
        self._log = logs / f"ranks-{host}.err"
        self._ranks: dict[str, _Rank] = {}
        self._open()

    def __len__(self) -> int:
        return len(self._ranks)

    def launch(self, name: str, environment: Mapping[str, str]) -> None:
        """Start the rank `POOL/REPLICA.INDEX`, whose output goes to files of that name in `logs`."""
        if self._door.fileno() < 0:
            self._open()
        stem = "-".join(name.replace("/", "-").rsplit(".", 1))
        stdout, stderr = self._logs / f"{stem}.out", self._logs / f"{stem}.err"
        order: Order = {"name": name, "environment": dict(environment), "stdout": str(stdout), "stderr": str(stderr)}
        packet = json.dumps(order).encode()
        assert name not in self._ranks, name
        assert len(packet) <= PACKET_BYTES, name
        self._ranks[name] = _Rank(packet, stderr)
        self._ask()

    def kill(self, name: str) -> None:
        """SIGKILL to a rank and to what it has started itself; nothing for one that is not there."""
        if rank := self._ranks.get(name):
            rank.doomed = True
            self._end(rank)

    def ended(self) -> list[Ended]:
        """Those that have ended since the last call, and those that will never begin."""
        statuses = self._statuses()
        self._hear_of_births(statuses)
        self._ask()
        found = []
        for name, rank in list(self._ranks.items()):
            if rank.pid in statuses:
                found.append(Ended(name, rank.pid, statuses[rank.pid], tail(rank.stderr) or tail(self._log)))
            elif not rank.pid and self._door.fileno() < 0:
                found.append(Ended(name, self._server.pid, self._server.returncode, tail(self._log)))
            else:
                continue
            del self._ranks[name]
            self._forget(rank.pidfd)
        return found

    def close(self) -> list[Ended]:
        """End all of them, and what forks them."""
        self._shut()
        for rank in self._ranks.values():
            self._end(rank)
        found, until = self.ended(), monotonic() + LAST_S
        while self._ranks and monotonic() < until:
            sleep(0.002)
            found += self.ended()
        return found

    def _open(self) -> None:
        door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, os.fdopen(open_append(self._log), "ab") as stderr:
            self._server = start(self._command, self._run, environment=ALONE, stdin=theirs.fileno(), stderr=stderr)
        door.setblocking(False)
        self._client.watch(door.fileno())
        self._door = door

    def _shut(self) -> None:
        if self._door.fileno() >= 0:
            self._client.unwatch(self._door.fileno())
            self._door.close()
        kill(self._server)
        self._server.wait(timeout=LAST_S)

    def _ask(self) -> None:
        """Send the orders that are still to be sent. When the door is full, births will make room for the rest."""
        with suppress(BlockingIOError, ConnectionError):  # a door that nobody is behind is found by `_hear_of_births`
            for rank in self._ranks.values():
                if not rank.asked and self._door.fileno() >= 0:
                    self._door.send(rank.order)
                    rank.asked = True

    def _ask_another(self) -> None:
        """Of what forks nothing is left, and of each rank that it has begun the pid is known: another one begins the
        others, unless that is the second to fail.
        """
        self._shut()
        unborn = [rank for rank in self._ranks.values() if not rank.pid]
        for rank in unborn:
            rank.asked, rank.lost = False, rank.lost + 1
        if unborn and max(rank.lost for rank in unborn) < TRIES:
            self._open()

    def _statuses(self) -> dict[int, int]:
        """Exit status of each child of this process that has ended; orphans of ranks are among them."""
        found: dict[int, int] = {}
        with suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                found[child[0]] = os.waitstatus_to_exitcode(child[1])
        if self._server.pid in found:
            self._server.returncode = found[self._server.pid]  # it cannot be waited for again
        return found

    def _hear_of_births(self, statuses: Mapping[int, int]) -> None:
        """A rank's pid is said before that can be waited for, so those that have ended are among these."""
        while self._door.fileno() >= 0:
            try:
                packet = self._door.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:  # it ended before it had read all; what was said before that follows
                continue
            if not packet:
                self._ask_another()
                return
            name, pid = json.loads(packet)
            rank = self._ranks[name]
            rank.pid = pid
            if pid not in statuses:
                rank.pidfd = os.pidfd_open(pid)
                self._client.watch(rank.pidfd)
            if rank.doomed:
                self._end(rank)

    def _forget(self, pidfd: int) -> None:
        if pidfd >= 0:
            self._client.unwatch(pidfd)
            os.close(pidfd)

    def _end(self, rank: _Rank) -> None:
        if rank.pid:
            kill_session(rank.pid)
