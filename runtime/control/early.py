"""Processes of a run that begin before there is one: they import what takes long, and wait for what they are to do.

`penstock run` starts the controller, the agent of this machine and the process that forks its ranks before it knows the
program, since each needs up to seconds for its imports. The last of them forks the process that traces the program, too
(`Early.ask`). None of them has anything of a run but its id, and none says anything: what they write to stderr is kept
in memory. The launcher takes them in place of ones of its own (`Early.take`): then each reads a line of JSON at its
stdin, [its argument, the file of its log]. One that has ended by then is started as ever, and says why it cannot.
Whoever is not taken ends with `Early.close`, or with its parent.
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
# The first word of such a process.
EARLY = "--early"
Child = subprocess.Popen[bytes]


class Early:
    """The run's id, `run`, and its early processes by their commands; to be made by the thread that will launch it."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(6)
        self._children: dict[tuple[str, ...], Child] = {}
        self._launched = False
        # To what forks ranks, which hears one question before it is told of a run.
        self._door: socket.socket | None = None

    def begin(
        self, modules: Sequence[str], agent: Sequence[str] = AGENT, controller: Sequence[str] = CONTROLLER
    ) -> None:
        """Start `python AGENT… --early SOCKET MODULE…`, whose child that forks ranks imports the modules and then hears
        at the socket, and `python CONTROLLER… --early`. Where no process can be started, the run will say so."""
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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

    def ask(self, function: str, words: Sequence[str], paper: int) -> Callable[[float], int | None]:
        """Have a process forked that calls `function(*words, paper)` in this one's place (`ask_to_fork`). What is
        returned waits for it so many seconds: its exit status; None where nothing could be forked. Raises TimeoutError.
        It ends with `close`."""
        assert self._door is not None, "nothing has begun"
        door = self._door
        with suppress(ConnectionError):  # that its other side has ended is found below
            ask_to_fork(door, function, words, paper)

        def answer(seconds: float) -> int | None:
            if not select.select([door], [], [], seconds)[0]:
                raise TimeoutError
            with suppress(ConnectionError), door:
                if said := door.recv(PACKET_BYTES):
                    return int(json.loads(said))
            return None

        return answer

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
        if self._door is not None:
            self._door.close()
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
