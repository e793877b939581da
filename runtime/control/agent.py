"""One agent per host: starts the ranks that the controller asks for, tells of their ends, and ends with them.

`python -m penstock.runtime.control.agent JOIN_FILE`, started by the launcher, or `penstock agent` on another host.

The ranks are forked by a child of the agent, `python -m penstock.runtime.control.worker` (`process.serve_forks`). Each
is in a session of its own, has stdout and stderr in `logs/<pool>-<replica>-<rank>.out` and `.err`, and in its
environment
    PENSTOCK_JOIN      the file to connect with: `Join.read(Path(os.environ["PENSTOCK_JOIN"]))`
    PENSTOCK_FOLDER    the run folder on this host
    PENSTOCK_REPLICA, PENSTOCK_RANK, PENSTOCK_DEVICE, PENSTOCK_THREADS, PENSTOCK_RUN, PENSTOCK_PARENT
    OMP_NUM_THREADS, MKL_NUM_THREADS: the rank's threads
"""

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple, NoReturn

from penstock.runtime.control.messages import (
    AgentReady,
    Exited,
    Goodbye,
    Heartbeat,
    Launch,
    Note,
    signal_name,
)
from penstock.runtime.control.process import (
    PACKET_BYTES,
    ForkOrder,
    die_with_parent,
    kill,
    start,
    tail,
)
from penstock.runtime.control.rendezvous import INTERVAL
from penstock.runtime.control.security import Join
from penstock.runtime.control.signals import on_stop
from penstock.runtime.control.sockets import JOIN_S, SILENCE, Client
from penstock.runtime.record.errors import visible
from penstock.runtime.record.folder import make_folder, open_append
from penstock.runtime.tensor.shm import SHM, sweep

# Seconds for the kernel to end what was killed.
LAST_S = 10.0
# Libraries that ask at their import how many threads they may have would start them in what forks.
ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Ended(NamedTuple):
    """`status` is negative for a signal; `tail` is the end of what was written to stderr."""

    name: str
    pid: int
    status: int
    tail: str


class RankProcesses:
    """The ranks of `host` by name, forked by a child of this process, with which they end.

    `command` is the program of that child (see `serve_forks`); `client` wakes when there is something to ask `ended`
    for.
    """

    def __init__(self, command: Sequence[str], run: str, host: str, logs: Path, client: Client) -> None:
        self._logs, self._client = logs, client
        self._log = logs / f"ranks-{host}.err"
        self._stderr: dict[str, Path] = {}  # of each rank that has not ended
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Room for the orders of some hundred ranks: the child reads none before it has imported torch.
        self._door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with theirs, os.fdopen(open_append(self._log), "ab") as stderr:
            self._child = start(command, run, environment=ALONE, stdin=theirs.fileno(), stderr=stderr)
        self._door.setblocking(False)
        self._watched = True
        client.watch(self._door.fileno())

    def __len__(self) -> int:
        return len(self._stderr)

    def launch(self, name: str, environment: Mapping[str, str]) -> None:
        """Start the rank `POOL/REPLICA.INDEX`, whose output goes to files of that name in `logs`."""
        stem = "-".join(name.replace("/", "-").rsplit(".", 1))
        stdout, stderr = self._logs / f"{stem}.out", self._logs / f"{stem}.err"
        order = ForkOrder(name=name, environment=environment, stdout=str(stdout), stderr=str(stderr))
        assert name not in self._stderr, name
        self._stderr[name] = stderr
        with suppress(ConnectionError):  # that the child has ended is found by `ended`
            self._door.send(json.dumps(order).encode())

    def ended(self) -> list[Ended]:
        """Those that have ended since the last call, and those that will never begin."""
        found: list[Ended] = []
        while True:
            try:
                packet = self._door.recv(PACKET_BYTES)
            except BlockingIOError:
                return found
            except ConnectionError:  # the child has ended before it had read all; what it said before that follows
                continue
            if not packet:
                break
            name, pid, status = json.loads(packet)
            found.append(Ended(name, pid, status, tail(self._stderr.pop(name)) or tail(self._log)))
        if self._watched:
            self._client.unwatch(self._door.fileno())
            self._watched = False
        pid, status = self._child.pid, self._child.wait(timeout=LAST_S)
        found += [Ended(name, pid, status, tail(stderr) or tail(self._log)) for name, stderr in self._stderr.items()]
        self._stderr.clear()
        return found

    def close(self) -> list[Ended]:
        """End all of them, and what forks them."""
        self._door.shutdown(socket.SHUT_WR)  # upon which the child kills them
        found, until = self.ended(), monotonic() + LAST_S
        while self._stderr and monotonic() < until:
            sleep(0.002)
            found += self.ended()
        kill(self._child)
        self._child.wait(timeout=LAST_S)
        found += self.ended()
        self._door.close()
        return found


WORKER = ("-m", "penstock.runtime.control.worker")
# Seconds that ranks have to end by themselves after a goodbye.
LEAVE_S = 3.0


class Agent:
    """The ranks of one host. `worker` forks them; `silence` is how long the controller may be out of reach."""

    def __init__(self, join: Join, join_file: Path, worker: Sequence[str] = WORKER, silence: float = SILENCE) -> None:
        self._join, self._join_file = join, join_file
        # A Unix socket breaks only when the controller is gone; between hosts a line may come back.
        self._silence = 1.0 if join.endpoint.startswith("ipc://") else silence
        self._client = Client(join, "agent", join.host)
        logs = make_folder(Path(join.folder) / "logs")
        self._ranks = RankProcesses((*worker, *join.modules), join.run, join.host, logs, self._client)
        self._joined = False

    def run(self) -> str:
        """Until the controller says goodbye (""), or cannot be reached any more: then why. No rank outlives it, and no
        segment of a run whose processes on this host have all ended.
        """
        folders = (SHM, Path(self._join.folder))
        sweep(None, folders)  # of agents that were killed
        try:
            self._client.send(AgentReady(self._join.host, os.getpid()))
            beat = 0.0
            while True:
                for message in self._client.receive(INTERVAL / 2):
                    if isinstance(message, Goodbye):
                        self._leave()
                        return ""
                    if isinstance(message, Launch):
                        self._launch(message)
                self._tell(self._ranks.ended())
                now = monotonic()
                if now >= beat:
                    beat = now + INTERVAL
                    self._client.send(Heartbeat(self._join.host, 0, now))
                if fault := self._fault(now):
                    return fault
        except _Ended as ended:
            # Before the ranks' deaths, of which this is the reason: they are killed.
            by = f"ended by {signal_name(ended.number)}"
            self._client.send(Note("error", f"the agent of host {self._join.host} was {by}, and with it its ranks"))
            raise
        finally:
            self._tell(self._ranks.close())
            sweep(None, folders)
            self._client.close()

    def _fault(self, now: float) -> str:
        lost = self._client.lost(now)
        self._joined = self._joined or lost == 0
        where = f"the controller at {self._join.endpoint}"
        if self._client.refused:
            return f"{where} does not know the key of host {self._join.host!r}; needed the key file of this run"
        if not self._joined and lost > JOIN_S:
            return f"{where} has not answered within {JOIN_S:.0f} s"
        if self._joined and lost > self._silence:
            return f"{where} is gone (no connection for {lost:.0f} s)"
        return ""

    def _launch(self, launch: Launch) -> None:
        environment = {
            "PENSTOCK_JOIN": str(self._join_file),
            "PENSTOCK_FOLDER": self._join.folder,
            "PENSTOCK_REPLICA": launch.replica,
            "PENSTOCK_RANK": str(launch.rank),
            "PENSTOCK_DEVICE": launch.device,
            "PENSTOCK_THREADS": str(launch.threads),
            "OMP_NUM_THREADS": str(launch.threads),
            "MKL_NUM_THREADS": str(launch.threads),
        }
        self._ranks.launch(f"{launch.replica}.{launch.rank}", environment)

    def _tell(self, ended: Sequence[Ended]) -> None:
        """Tell the controller of ranks that have ended."""
        for name, pid, status, last_lines in ended:
            replica, _, rank = name.rpartition(".")
            self._client.send(Exited(replica, int(rank), pid, max(0, status), max(0, -status), last_lines))

    def _leave(self) -> None:
        """Ranks hear their own goodbyes; those that do not end in time are ended."""
        until = monotonic() + LEAVE_S
        self._tell(self._ranks.ended())
        while self._ranks and monotonic() < until:
            self._client.receive(0.05)
            self._tell(self._ranks.ended())


def serve(join_file: Path, folder: Path | None = None) -> int:
    """Be the agent of this host until the run is over; the exit status. `folder` is the run folder here, if it is
    not where the launcher has it; it is made if it is not there.
    """
    join = Join.read(join_file)
    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        join = replace(join, folder=str(folder.absolute()))
    elif not Path(join.folder).is_dir():
        needed = "needed a file system that the hosts share, or a folder of this host's own for its logs and its part"
        said = f"penstock agent: host {join.host} has no {join.folder}: {needed} of checkpoints (--folder)"
        print(visible(said), file=sys.stderr)
        return 2
    with on_stop(_end):
        fault = Agent(join, join_file).run()
    if fault:
        print(visible(f"penstock agent: {fault}"), file=sys.stderr)
    return 1 if fault else 0


class _Ended(SystemExit):
    """A signal asks this process to end: `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def _end(number: int, frame: object) -> NoReturn:
    raise _Ended(number)


def main() -> None:
    die_with_parent()
    if len(sys.argv) != 2:
        sys.exit("usage: python -m penstock.runtime.control.agent JOIN_FILE (started by `penstock`)")
    sys.exit(serve(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
