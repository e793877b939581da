"""Runs a piece of Python in a short-lived process with hard limits, and leaves no process behind.

Where bubblewrap (`bwrap`) works, the process has no network, no files but the interpreter's own (read-only), and
processes of its own that end with it. Elsewhere it has resource limits, `python -I`, an empty folder that nothing can
be written to, and an audit hook that refuses processes, network and files: that stops accidents, not an attacker.
Linux only.
"""

import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import monotonic, sleep

_CHILD = Path(__file__).with_name("sandbox_child.py")
_PASSED_ON = ("PENSTOCK_RUN",)
"""Environment variables that the process gets: the run's mark, by which what a killed run left behind is found."""
_SYSTEM = ("/usr", "/lib", "/lib64")
_GLANCE_S, _PAUSE_S = 0.05, 0.001


class SandboxWarning(UserWarning):
    """Code of a model runs with less isolation than there could be."""


@dataclass(frozen=True)
class Limits:
    """`seconds` by the clock, `cpu_seconds` of computing, memory in MiB, and output in bytes."""

    seconds: float
    cpu_seconds: int
    memory_mib: int
    max_output: int

    def __post_init__(self) -> None:
        for name, least in (("seconds", 0), ("cpu_seconds", 0), ("memory_mib", 31), ("max_output", 0)):
            if getattr(self, name) <= least:
                raise ValueError(f"sandbox: given {name} {getattr(self, name)}, needed more than {least}")


@dataclass(frozen=True)
class Answer:
    """What the code wrote, with a last line that says what went wrong, if it `failed`. `late`: it was killed at its
    deadline."""

    output: str
    failed: bool = False
    late: bool = False


def run_python(code: str, limits: Limits) -> Answer:
    """Run `code`; returns within `limits.seconds` and the time that a kill takes. Can be called from many threads."""
    process = _start(code, limits)
    try:
        output, late = _listen(process, monotonic() + limits.seconds, limits.max_output)
    finally:
        status = _end(process)
    text = output[: limits.max_output].decode(errors="replace").rstrip("\n")
    too_much = len(output) > limits.max_output
    late = not too_much and (late or _killed_by(signal.SIGALRM, status))
    trouble = ""
    if too_much:
        trouble = f"OutputError: more than {limits.max_output} bytes"
    elif late:
        trouble = f"TimeoutError: no end within {limits.seconds:g} s"
    elif _killed_by(signal.SIGXCPU, status):
        trouble = f"TimeoutError: more than {limits.cpu_seconds} s of computing"
    elif status not in (0, 1):
        trouble = f"SystemError: the process ended with status {status}"
    return Answer("\n".join(filter(None, (text, trouble))), failed=bool(trouble) or status != 0, late=late)


def _killed_by(number: signal.Signals, status: int) -> bool:
    return status in (-number, 128 + number)  # the second is bubblewrap's way of saying it


@lru_cache(maxsize=1)
def isolation() -> tuple[str, ...]:
    """The command that isolates a process; empty where there is none, and then it is said once per process."""
    path = shutil.which("bwrap")
    if path is None:
        return _without("bubblewrap (bwrap) is not installed")
    binds = [word for folder in _SYSTEM if Path(folder).exists() for word in ("--ro-bind", folder, folder)]
    binds += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    command = (path, "--unshare-all", "--die-with-parent", *binds, "--remount-ro", "/", "--chdir", "/", "--")
    try:
        tried = subprocess.run([*command, _python(), "-I", "-S", "-c", ""], capture_output=True, timeout=10, cwd="/")
    except subprocess.TimeoutExpired:
        return _without("bubblewrap (bwrap) does not answer")
    return (
        command if tried.returncode == 0 else _without(f"bubblewrap: {tried.stderr.decode(errors='replace').strip()}")
    )


def _without(reason: str) -> tuple[str, ...]:
    message = f"{reason}: code of a model runs with resource limits only, which stop accidents and no attacker"
    warnings.warn(message, SandboxWarning, stacklevel=3)
    return ()


def _python() -> str:
    return os.path.realpath(sys.executable)


def _start(code: str, limits: Limits) -> "subprocess.Popen[bytes]":
    """In a session of its own, so that all of it can be killed."""
    wrapper = isolation()
    # One second more than the deadline: it is for a process whose parent has died.
    numbers = (limits.cpu_seconds, limits.memory_mib, math.ceil(limits.seconds) + 1, int(not wrapper))
    command = [*wrapper, _python(), "-I", "-S", "-c", _CHILD.read_text(), *map(str, numbers)]
    with tempfile.TemporaryFile() as source:
        source.write(code.encode(errors="replace"))
        source.seek(0)
        # The folder is removed when the process has entered it: nothing is left, and nothing can be written there.
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            return subprocess.Popen(
                command,
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/" if wrapper else folder,
                env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                start_new_session=True,
            )


def _listen(process: "subprocess.Popen[bytes]", deadline: float, max_output: int) -> tuple[bytes, bool]:
    """What it writes until it ends, has written more than `max_output`, or its deadline passes (and whether it did).

    Its end counts, not that of its output: a child of its own might keep that open.
    """
    assert process.stdout is not None
    poll, output, closed = select.poll(), b"", False
    poll.register(process.stdout, select.POLLIN)
    while len(output) <= max_output:
        left = max(0.0, deadline - monotonic())
        ended = _ended(process)  # after the clock: what has ended is not late, however long this thread had to wait
        heard = not closed and bool(poll.poll(0 if ended else 1000 * min(left, _GLANCE_S)))
        if heard:
            piece = os.read(process.stdout.fileno(), 1 << 16)
            output, closed = output + piece, not piece
        if not left or (ended and not heard):
            return output, not ended
        if closed and not ended:
            sleep(min(left, _PAUSE_S))
    return output, False


def _ended(process: "subprocess.Popen[bytes]") -> bool:
    """It stays a zombie, so that its group's number cannot become another's before the group is killed."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Kill all that is left of it; its exit status."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    process.stdout.close()
    return process.wait()
