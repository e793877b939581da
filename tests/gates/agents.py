"""Runs over hosts in network namespaces (`network`): a launcher on the first one, agents on the others."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from .network import Network
from .running import DEADLINE_S, Line, Running

HOSTS = "a", "b", "c"


def asked_for(running: Running, host: str) -> Line:
    return running.until_line(lambda line: line.get("host") == host, f"the agent of host {host} was asked for")


class Agents:
    """The agents of other hosts. Each takes its join file from the shared run folder or from a copy."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *error: object) -> None:
        """End what a failed test has left."""
        for process in self.processes.values():
            process.kill()
            process.communicate()

    def start(self, line: Line, *flags: str, hidden: tuple[Path, ...] = ()) -> None:
        where = self.network.on(line["host"], hidden=hidden)
        command = [*where, sys.executable, "-m", "penstock.runtime.cli.main", "agent", line["join"], *flags]
        pipe = subprocess.PIPE
        self.processes[line["host"]] = subprocess.Popen(command, stderr=pipe, text=True, start_new_session=True)

    def kill(self, host: str) -> None:
        """Send SIGKILL to a host's agent alone."""
        for process in psutil.Process(self.processes[host].pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # a short-lived child, such as one that asks for the host's facts
                words = process.cmdline()
                if words[:1] == [sys.executable] and "agent" in words:
                    process.kill()

    def ended(self, host: str) -> tuple[int, str]:
        """Return the exit status of a host's agent and its stderr, which also lists what was left on the host."""
        _, said = self.processes[host].communicate(timeout=DEADLINE_S)
        return self.processes[host].returncode, said


class Commands:
    """Commands of Penstock on the hosts of a network. At the end those that a failed test has left are killed."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Commands":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def start(
        self, host: str, *words: str, before: str = "", path: Path | None = None, hidden: tuple[Path, ...] = ()
    ) -> "subprocess.Popen[str]":
        """Start `penstock WORDS` on one core. `before` are lines of Python that run first; modules in the folder `path`
        shadow all others."""
        code = f"{before}\nfrom penstock.runtime.cli.main import main\nmain({list(words)!r})"
        folders = [str(path)] * bool(path) + os.environ.get("PYTHONPATH", "").split(os.pathsep)
        alone = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), "env", f"PYTHONPATH={':'.join(folders)}"]
        command = [*self.network.on(host, hidden=hidden), *alone, sys.executable, "-c", code]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        self.processes.append(process)
        return process

    def agent(self, host: str, ticket: Path, *flags: str, **options: Any) -> "subprocess.Popen[str]":
        return self.start(host, "agent", "--ticket", str(ticket), *flags, **options)


def terminate(process: "subprocess.Popen[str]") -> None:
    """Send SIGTERM to a command on a host. It is a descendant of the process that made the host's namespaces."""
    found = []
    for each in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a short-lived child
            if each.cmdline()[:1] == [sys.executable]:
                found.append(each)
    min(found, key=lambda each: each.create_time()).terminate()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Return the exit status of a command, and its stderr."""
    _, said = process.communicate(timeout=DEADLINE_S)
    return process.returncode, said


@contextmanager
def spread(network: Network, folder: Path, hosts: Sequence[str] = HOSTS) -> Iterator[tuple[Running, Agents]]:
    """Launch a run on the first host, with agents on all `hosts`."""
    with Running(folder, network.on("a")) as running, Agents(network) as agents:
        for host in hosts[1:]:
            agents.start(asked_for(running, host))
        yield running, agents
