"""Processes of a run that begin before there is one: they import what takes long, and wait for what they are to do.

Beside the child that traces a program, `penstock run` starts the controller, the agent of this machine and the process
that forks its ranks, since each needs up to seconds for its imports. None of them has anything of a run but its id, and
none says anything: what they write to stderr is kept in memory. The launcher takes them in place of ones of its own
(`Early.take`): then each reads a line of JSON at its stdin, [its argument, the file of its log]. One that has ended by
then is started as ever, and says why it cannot. Whoever is not taken ends with `Early.close`, or with its parent.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.runtime.control.process import kill, log_to, start, sweep_processes

CONTROLLER = ("-m", "penstock.runtime.control.controller")
AGENT = ("-m", "penstock.runtime.control.agent")
# The first word of such a process.
EARLY = "--early"
Child = subprocess.Popen[bytes]


class Early:
    """The run's id, `run`, and its early processes by their commands; to be made by the thread that will launch it."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(6)
        self._children: dict[tuple[str, ...], Child] = {}
        self._launched = False

    def begin(
        self, modules: Sequence[str], agent: Sequence[str] = AGENT, controller: Sequence[str] = CONTROLLER
    ) -> None:
        """Start `python AGENT… --early MODULE…`, whose child that forks ranks imports the modules, and `python
        CONTROLLER… --early`. Where no process can be started, the run will say so."""
        self._begin(agent, *modules)
        self._begin(controller, report=True)

    def _begin(self, command: Sequence[str], *arguments: str, report: bool = False) -> None:
        stderr, stdout = os.memfd_create(EARLY), subprocess.PIPE if report else subprocess.DEVNULL
        with suppress(OSError):
            words = (*command, EARLY, *arguments)
            self._children[tuple(command)] = start(words, self.run, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)
        os.close(stderr)

    def take(self, command: Sequence[str], argument: str, log: Path) -> Child | None:
        """The process of this command, which goes on with an argument and a log; None if it was not begun, or has
        ended. It is the caller's from now on."""
        self._launched = True
        child = self._children.pop(tuple(command), None)
        if child is None:
            return None
        assert child.stdin is not None
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps([argument, str(log)]).encode() + b"\n")
            child.stdin.flush()
            if child.poll() is None:
                return child
        _end(child)
        return None

    def close(self) -> None:
        """End those that nobody has taken; without a run also what they have started, and one that was just begun."""
        while self._children:
            _end(self._children.popitem()[1])
        if not self._launched:
            # Each ends with its parent, but some seconds later where it is importing still.
            sweep_processes(self.run)


def _end(child: Child) -> None:
    kill(child)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def awaited() -> str:
    """In such a process: its argument, once it is taken. It ends here if it never is."""
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    argument, log = json.loads(line)
    log_to(Path(log))
    return str(argument)
