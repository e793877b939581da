"""Child processes of tests, forked from one that has imported what they call: they start in milliseconds, not seconds.

peer = Forked("tests.runtime.tensor.peer:main", "source", str(path))      # like a Popen with pipes
"""

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

from .halt import until_it_stands

HERE = Path(__file__).parent


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Else each process would import these by itself: the modules that it calls, and those that a call imports.
    cases = [f"tests.nodes.{path.stem}" for path in sorted((HERE / "nodes").glob("*_cases.py"))]
    later = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
    context.set_forkserver_preload([*later, *cases, "tests.nodes.ranked", "tests.runtime.tensor.peer"])
    return context


class Forked:
    """A process that calls a function, `module:name`, with words. Its input is a pipe; its output, too, or a `log`.

    Its exit status is 0 if the function returns, else 1, after a traceback. It ends at the latest with this process.
    """

    def __init__(self, function: str, *words: str, log: Path | None = None) -> None:
        theirs, stdin = os.pipe()
        stdout, ours = os.pipe()
        if log is not None:
            os.close(ours)
            ours = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with Connection(theirs, writable=False) as source, Connection(ours, readable=False) as sink:
            args = (function, words, source, sink, log is not None)
            self._process = _context().Process(target=_be, args=args, daemon=True)
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return its exit status, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Wait for its exit status. Raises TimeoutError if it still runs after `timeout` seconds."""
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout:g} s")
        return status

    def kill(self, signalled: int = signal.SIGKILL) -> None:
        """Send it a signal, unless it has ended; never to another process that got its pid."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ended, signalled)

    def halt(self) -> None:
        """Stop it, and wait until all its threads have stopped: until then it may answer once more."""
        self.kill(signal.SIGSTOP)
        until_it_stands(self.pid)

    def end(self) -> None:
        self.kill()
        self.wait(60)
        for pipe in (self.stdin, self.stdout):
            with suppress(BrokenPipeError):  # it had not read all that was written
                pipe.close()
        os.close(self._ended)


def _be(function: str, words: tuple[str, ...], source: Connection, sink: Connection, logged: bool) -> None:
    status = 1
    gc.freeze()  # else a collection would touch, and so copy, all memory that is shared with the parent
    os.dup2(source.fileno(), 0)
    os.dup2(sink.fileno(), 1)
    if logged:
        os.dup2(1, 2)
    source.close()
    sink.close()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # multiprocessing makes /dev/null the input of a process.
    sys.stdin = os.fdopen(0, closefd=False)
    try:
        importlib.import_module("torch").set_num_threads(1)
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(*words)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # an orderly exit may wait for threads of a process group
