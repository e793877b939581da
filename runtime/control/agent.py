"""One agent per host: starts the ranks that the controller asks for, watches their pids, and ends with them.

`python -m penstock.runtime.control.agent JOIN_FILE`, started by the launcher, or `penstock agent` on another host.

A rank is forked (see `forks`) from `python -m penstock.runtime.control.worker`, in a session of its own, with in its
environment
    PENSTOCK_JOIN      the file to connect with: `Join.read(Path(os.environ["PENSTOCK_JOIN"]))`
    PENSTOCK_FOLDER    the run folder on this host
    PENSTOCK_REPLICA, PENSTOCK_RANK, PENSTOCK_DEVICE, PENSTOCK_THREADS, PENSTOCK_RUN, PENSTOCK_PARENT
    OMP_NUM_THREADS, MKL_NUM_THREADS: the rank's threads
and stdout and stderr in `logs/<pool>-<replica>-<rank>.out` and `.err`.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import NoReturn

from penstock.runtime.control.client import Client
from penstock.runtime.control.heartbeat import INTERVAL
from penstock.runtime.control.keys import Join
from penstock.runtime.control.messages import (
    AgentReady,
    Exited,
    Goodbye,
    Heartbeat,
    Kill,
    Launch,
    Message,
    Note,
    signal_name,
)
from penstock.runtime.control.process import die_with_parent
from penstock.runtime.control.ranks import Ended, Ranks
from penstock.runtime.control.stops import on_stop
from penstock.runtime.control.wire import JOIN_S, SILENCE
from penstock.runtime.record.faults import visible
from penstock.runtime.record.folder import make_folder
from penstock.runtime.tensor.segments import SHM, sweep

WORKER = ("-m", "penstock.runtime.control.worker")
LEAVE_S = 3.0
"""Seconds that ranks have to end by themselves after a goodbye."""


class Agent:
    """The ranks of one host. `worker` forks them; `silence` is how long the controller may be out of reach."""

    def __init__(self, join: Join, join_file: Path, worker: Sequence[str] = WORKER, silence: float = SILENCE) -> None:
        self._join, self._join_file = join, join_file
        # A Unix socket breaks only when the controller is gone; between hosts a line may come back.
        self._silence = 1.0 if join.endpoint.startswith("ipc://") else silence
        self._client = Client(join, "agent", join.host)
        logs = make_folder(Path(join.folder) / "logs")
        self._ranks = Ranks(worker, join.run, join.host, logs, self._client)
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
                    self._obey(message)
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

    def _obey(self, message: Message) -> None:
        if isinstance(message, Launch):
            self._launch(message)
        elif isinstance(message, Kill):
            self._ranks.kill(f"{message.replica}.{message.rank}")

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
            **launch.environment,
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
        for name, pid, status, tail in ended:
            replica, _, rank = name.rpartition(".")
            self._client.send(Exited(replica, int(rank), pid, max(0, status), max(0, -status), tail))

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
