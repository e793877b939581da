"""One agent per host: starts the ranks that the controller asks for, watches them, and ends with them.

`python -m penstock.runtime.control.agent`, told its address on standard input by the launcher, or `penstock agent` on
another host. Ranks die with their agent, and the agent ends its ranks when the controller is gone.
"""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from penstock.runtime.control.heartbeat import Heart
from penstock.runtime.control.messages import Exited, Goodbye, Heartbeat, Hello, Kill, Launch
from penstock.runtime.control.process import Address, describe_exit, die_with_parent, read_address, start
from penstock.runtime.control.wire import Client

TICK = 0.05
"""Seconds between two looks at the ranks' processes: the delay with which a death is told."""


@dataclass
class Rank:
    process: "subprocess.Popen[bytes]"
    stderr: Path


class Agent:
    def __init__(self, address: Address, silence: float = 30.0) -> None:
        self.address, self.silence = address, silence
        self.hello = Hello("agent", address.host, 0, os.getpid(), address.token)
        self.client = Client(address.endpoint, f"agent:{address.host}", self.hello, address.keys)
        self.heart = Heart(address.endpoint, f"agent:{address.host}", self.hello, address.keys)
        self.ranks: dict[tuple[str, int], Rank] = {}
        self.heard = monotonic()
        self.leaving = False

    def serve(self) -> str:
        """Until the controller says goodbye and all ranks have ended, or it is silent too long; why it ended."""
        try:
            while True:
                for message in self.client.receive(TICK):
                    self.heard = monotonic()
                    if isinstance(message, Launch):
                        self._launch(message)
                    elif isinstance(message, Kill):
                        self._kill(message.replica, message.rank)
                    elif isinstance(message, Goodbye):
                        self.leaving = True
                self._bury()
                if self.leaving and not self.ranks:
                    return ""
                if monotonic() - self.heard > self.silence:
                    return f"the controller has been silent for {self.silence:.0f} s"
        finally:
            self.close()

    def _launch(self, launch: Launch) -> None:
        folder = Path(self.address.folder)
        logs = folder / "logs"
        logs.mkdir(exist_ok=True)
        stem = f"{launch.replica.replace('/', '-')}-{launch.rank}"
        stderr = logs / f"{stem}.err"
        threads = str(launch.threads)
        name = f"rank:{launch.replica}:{launch.rank}"
        told = replace(self.address, name=launch.replica, rank=launch.rank).to_json()
        with open(logs / f"{stem}.out", "ab") as out, open(stderr, "ab") as err:
            process = start(
                "penstock.runtime.control.worker",
                [name],
                told,
                environment={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
                stdout=out,
                stderr=err,
            )
        self.ranks[launch.replica, launch.rank] = Rank(process, stderr)

    def _bury(self) -> None:
        """Tell the controller of ranks that have ended."""
        for (replica, index), rank in list(self.ranks.items()):
            status = rank.process.poll()
            if status is not None:
                del self.ranks[replica, index]
                self.client.send(Exited(replica, index, status, describe_exit(status, rank.stderr)))

    def _kill(self, replica: str, index: int) -> None:
        if (replica, index) in self.ranks:
            self.ranks[replica, index].process.kill()

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.process.kill()
        for rank in self.ranks.values():
            rank.process.wait(timeout=10)
        self.heart.stop()
        self.client.close()


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reason = Agent(read_address()).serve()
    if reason:
        print(f"penstock agent: {reason}; its ranks were ended", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
