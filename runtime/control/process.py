"""Children of a run: they die with their parent, carry the run's mark, and leave nothing behind. Linux only.

A child is started in a session of its own, so that Ctrl-C in the terminal reaches the launcher alone. Its arguments,
which every user of the machine can read, hold no secret: those are in files of mode 0600 (see `keys`).
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import IO

from penstock.runtime.control.messages import signal_name
from penstock.runtime.record.faults import RecordError
from penstock.runtime.record.folder import open_regular

RUN = "PENSTOCK_RUN"
"""Environment variable of every process of a run: the run's id."""
PARENT = "PENSTOCK_PARENT"
"""Environment variable: the pid with which a child must end."""
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # as in linux/prctl.h
_TAIL_LINES, _TAIL_BYTES = 12, 4000
_LOOKS, _LOOK_S = 250, 0.02
"""Of a sweep: it counts looks and no seconds, for what was killed has no time to end while the whole machine stands."""


def start(
    command: Sequence[str],
    run: str,
    *,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> "subprocess.Popen[bytes]":
    """Start `python COMMAND…`, which must call `die_with_parent` first of all. Not from a thread that ends before
    the child: the kernel takes the thread's end for the parent's.
    """
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **(environment or {}), RUN: run, PARENT: str(os.getpid())},
        start_new_session=True,
    )


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; nothing for one that `start` did not start."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(1)  # the parent ended before the kernel was asked


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of descendants whose own parent ends: only it can wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def take_name(name: str) -> None:
    """Be called `name` by ps and top, which show its first 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value)


def kill(child: "subprocess.Popen[bytes]") -> None:
    """SIGKILL to a child and to what it has started itself."""
    if child.poll() is None:  # a pid that has been waited for may be another process's by now
        kill_session(child.pid)


def kill_session(pid: int) -> None:
    """SIGKILL to a child that nobody has waited for yet, and to what it has started itself."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def describe_exit(child: "subprocess.Popen[bytes]") -> str:
    """How a child ended, in a few words."""
    status = child.returncode
    if status < 0:
        return f"killed by {signal_name(-status)}"
    asked = f" ({signal_name(status - 128)})" if 128 < status < 160 else ""  # the shell's way to say so
    return f"exit status {status}{asked}"


def tail(path: Path) -> str:
    """The last lines of a log."""
    try:
        file = os.fdopen(open_regular(path, os.O_RDONLY), "rb")
    except (OSError, RecordError):
        return ""
    with file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


def processes_of(run: str) -> list[int]:
    """The pids on this host that carry the run's mark, this process not among them."""
    mark = f"{RUN}={run}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # another user's, or gone meanwhile
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def sweep_processes(run: str) -> list[int]:
    """Kill whatever of a run is alive on this host; the pids left after some seconds (none, normally)."""
    quiet = 0
    left: list[int] = []
    for _ in range(_LOOKS):
        left = processes_of(run)
        quiet = 0 if left else quiet + 1
        if quiet == 2:  # twice: a process that is just starting a program shows no environment
            break
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sleep(_LOOK_S)
    return left


def read_line(line: bytes) -> dict[str, object] | None:
    """One line of a child's report: a JSON object; None for anything else, such as a library's print."""
    with suppress(ValueError):
        data = json.loads(line)
        if isinstance(data, dict):
            return data
    return None
