"""Processes that are started before the run exists: they do their slow imports, then wait for their arguments.

`penstock run` starts the controller, the agent of this machine and the process that forks its ranks before it knows the
program, since each needs up to seconds for its imports. The process that forks ranks also forks the one that traces the
program (`Early.ask`). They know only the run's id, and print nothing: their stderr is kept in memory. The launcher
takes them instead of starting new ones (`Early.take`): then each reads a line of JSON at its stdin, [its argument, the
file of its log]. If one has ended by then, the launcher starts a new one, which logs why it fails. A process that is
not taken ends with `Early.close`, or with its parent.
"""

import json
import os
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.runtime.control.process import PACKET_BYTES, ask_to_fork, kill, log_to, start, sweep_processes

CONTROLLER = ("-m", "penstock.runtime.control.controller")
AGENT = ("-m", "penstock.runtime.control.agent")
# The first argument of such a process.
EARLY = "--early"
Child = subprocess.Popen[bytes]


class Early:
    """The run's id, `run`, and its early processes by their commands. Create it in the thread that will launch the
    run."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(6)
        self._children: dict[tuple[str, ...], Child] = {}
        self._launched = False
        # The socket to the process that forks ranks, which answers one request before it is told of a run.
        self._control: socket.socket | None = None

    def begin(
        self, modules: Sequence[str], agent: Sequence[str] = AGENT, controller: Sequence[str] = CONTROLLER
    ) -> None:
        """Start `python CONTROLLER… --early` and `python AGENT… --early SOCKET MODULE…`. The agent's child that forks
        ranks imports the modules and then listens at the socket. If a process cannot be started, the run will say so.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._begin(agent, str(theirs.fileno()), *modules, passed=[theirs.fileno()])
        self._begin(controller, report=True)

    def _begin(self, command: Sequence[str], *arguments: str, report: bool = False, passed: Sequence[int] = ()) -> None:
        stderr, stdout = os.memfd_create(EARLY), subprocess.PIPE if report else subprocess.DEVNULL
        with suppress(OSError):
            self._children[tuple(command)] = start(
                (*command, EARLY, *arguments),
                self.run,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                passed=passed,
            )
        os.close(stderr)

    def ask(self, function: str, words: Sequence[str], memfd: int) -> Callable[[float], int | None]:
        """Fork a process that calls `function(*words, memfd)` on behalf of this one (`ask_to_fork`). Return a function
        that waits for it for the given seconds, and returns its exit status, or None if nothing could be forked; it
        raises TimeoutError. The process ends with `close`."""
        assert self._control is not None, "nothing has begun"
        control = self._control
        with suppress(ConnectionError):  # `answer` finds that the other side has ended
            ask_to_fork(control, function, words, memfd)

        def answer(seconds: float) -> int | None:
            if not select.select([control], [], [], seconds)[0]:
                raise TimeoutError
            with suppress(ConnectionError), control:
                if said := control.recv(PACKET_BYTES):
                    return int(json.loads(said))
            return None

        return answer

    def take(self, command: Sequence[str], argument: str, log: Path) -> Child | None:
        """Give the process of this command its argument and log, and return it; None if it was not started, or has
        ended. From now on it is the caller's."""
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
        """End the processes that were not taken. If no run was launched, also end their children, and a process that
        was only just started."""
        if self._control is not None:
            self._control.close()
        while self._children:
            _end(self._children.popitem()[1])
        if not self._launched:
            # Children end with their parent, but some seconds later if they are still importing.
            sweep_processes(self.run)


def _end(child: Child) -> None:
    kill(child)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def awaited() -> str:
    """In an early process: wait until it is taken, and return its argument. The process ends here if it never is."""
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    argument, log = json.loads(line)
    log_to(Path(log))
    return str(argument)
