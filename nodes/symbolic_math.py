"""Comparison of two answers in LaTeX by `math-verify`, in a process of its own.

A model's answer may take a computer algebra system unlimited time or memory (`9^{9^{9^9}}`), in C code that no Python
signal interrupts; and math-verify's own timeouts are signals, which work only in a main thread. So each process that
compares answers has one child process, with limits on memory and time. It is killed at a deadline, and started again
for the next question. Answers that are numbers do not need it (see `math_answer`).
"""

import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec
from threading import Lock
from time import monotonic

from penstock.host import install_command, module_command

# Seconds for one question, and for the child to import the library.
DEADLINE_S, START_S = 10.0, 120.0
MEMORY_MIB = 4096
# Decimal places to which a decimal number must agree with one that is written otherwise.
DECIMALS = 12
READY, EQUAL, OTHER, UNREADABLE = b"ready", b"equal", b"other", b"unreadable"


def lack() -> str:
    """What must be installed before answers can be compared; "" if nothing."""
    return "" if find_spec("math_verify") else f"the package math-verify: {install_command('math')}"


class Grader:
    """The child process of this one. Can be called from many threads, which take turns."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.child: subprocess.Popen[bytes] | None = None

    def equal(self, reference: str, response: str) -> bool | None:
        """True if the response is the reference answer; None without a verdict within the limits of time and memory.

        Raises ValueError for a reference that cannot be read.
        """
        with self.lock:
            child = self.child or self._start()
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps([reference, response]).encode() + b"\n")
                verdict = self._line(monotonic() + DEADLINE_S)
            except BrokenPipeError:
                verdict = b""
            if not verdict:
                self._stop()
        if verdict == UNREADABLE:
            raise ValueError(f"given the reference answer {reference!r:.200}, needed one that math-verify can read")
        return None if not verdict else verdict == EQUAL

    def _start(self) -> "subprocess.Popen[bytes]":
        self.child = subprocess.Popen(
            module_command(__name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        if self._line(monotonic() + START_S) != READY:
            self._stop()
            raise RuntimeError(f"math_answer: given no start of its process within {START_S:g} s, needed one")
        return self.child

    def _line(self, until: float) -> bytes:
        """The child's next line; b"" if it does not come by `until`, or if the child has ended."""
        assert self.child is not None
        assert self.child.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self.child.stdout], [], [], max(0.0, until - monotonic()))[0]:
                return b""
            if not (more := os.read(self.child.stdout.fileno(), 1)):
                return b""
            line += more
        return line.strip()

    def _stop(self) -> None:
        assert self.child is not None
        self.child.kill()
        self.child.communicate()
        self.child = None


@lru_cache(maxsize=1)
def grader() -> Grader:
    return Grader()


def main() -> None:
    """Answer questions, one a line, until standard input ends."""
    size = MEMORY_MIB << 20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    from math_verify import parse, verify

    logging.disable()
    print(READY.decode(), flush=True)
    for line in sys.stdin:
        reference, response = json.loads(line)
        # Ends a child whose parent has died. The alarm kills it even in C code.
        signal.alarm(int(DEADLINE_S) + 5)
        needed, given = (parse(text, parsing_timeout=None) for text in (f"\\boxed{{{reference}}}", response))
        equal = bool(needed and given) and verify(needed, given, float_rounding=DECIMALS, timeout_seconds=None)
        signal.alarm(0)
        print((EQUAL if equal else OTHER if needed else UNREADABLE).decode(), flush=True)


if __name__ == "__main__":
    main()
