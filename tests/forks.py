"""Other processes of a test, forked from one that has imported torch once: they start in milliseconds, not seconds.

peer = Forked("tests.runtime.tensor.peer:main", "source", str(path))      # like a Popen with pipes
"""

import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from time import monotonic, sleep
from typing import Any, NoReturn

import psutil

ROOT = Path(__file__).resolve().parent.parent
LOOK_S = 0.005


class Forked:
    """A process that calls a function, `module:name`, with words; its input and output are pipes, or a `log`.

    Its environment is that of the first one. Its status is 0 if the function returns, else 1, after a traceback.
    """

    def __init__(self, function: str, *words: str, log: Path | None = None) -> None:
        theirs, stdin = os.pipe()
        stdout, ours = os.pipe()
        if log is not None:
            os.close(ours)
            ours = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.pid = _ask([function, *words, log is not None], theirs, ours)
        os.close(theirs)
        os.close(ours)
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        self._ended = os.pidfd_open(self.pid)
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""
        if self._status is None:
            self._status = _ask(self.pid)
        return self._status

    def wait(self, timeout: float) -> int:
        """Raises TimeoutError if it still runs after so many seconds."""
        deadline = monotonic() + timeout
        while (status := self.poll()) is None:
            if monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} still runs after {timeout:g} s")
            sleep(LOOK_S)
        return status

    def kill(self, signalled: int = signal.SIGKILL) -> None:
        """Nothing happens to a process that has ended, or to another one with its number."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ended, signalled)

    def halt(self) -> None:
        """Stop it, and wait until it stands: on another core, it may answer once more until then."""
        self.kill(signal.SIGSTOP)
        while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            sleep(LOOK_S)

    def end(self) -> None:
        self.kill()
        self.wait(60)
        for pipe in (self.stdin, self.stdout):
            with suppress(BrokenPipeError):  # of words that it had not read
                pipe.close()
        os.close(self._ended)


@cache
def _server() -> socket.socket:
    """The connection to the process that forks. It ends, with all that it forked, when the connection does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "tests.forks", str(theirs.fileno())]
    server = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
    )
    theirs.close()
    atexit.register(server.wait, 60)
    atexit.register(ours.close)
    return ours


def _ask(order: object, *descriptors: int) -> Any:
    with _lock:
        socket.send_fds(_server(), [json.dumps(order).encode()], descriptors)
        return json.loads(_server().recv(64))


_lock = Lock()  # tests ask from several threads


def serve(connection: socket.socket) -> None:
    importlib.import_module("torch._dynamo")  # which optimizers import when they are made, each process by itself
    statuses: dict[int, int] = {}
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 1 << 16, 2)
        if not message:
            os.killpg(0, signal.SIGKILL)
        asked = json.loads(message)
        if isinstance(asked, int):
            if asked not in statuses:
                pid, status = os.waitpid(asked, os.WNOHANG)
                statuses.update({asked: os.waitstatus_to_exitcode(status)} if pid else {})
            connection.send(json.dumps(statuses.get(asked)).encode())
            continue
        function, *words, logged = asked
        module, _, name = function.partition(":")
        importlib.import_module(module)
        pid = os.fork()
        if pid == 0:
            connection.close()
            _be(module, name, words, descriptors, logged)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps(pid).encode())


def _be(module: str, name: str, words: list[str], descriptors: list[int], logged: bool) -> NoReturn:
    status = 1
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if logged:
        os.dup2(1, 2)
    try:
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        getattr(importlib.import_module(module), name)(*words)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads of a process group may outlive an orderly end


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
