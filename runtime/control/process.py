"""Children of a run: they die with their parent, carry the run's mark, and leave nothing behind. Linux only.

A child is started in a session of its own, so that Ctrl-C in the terminal reaches the launcher alone. Its arguments,
which every user of the machine can read, hold no secret: those are in files of mode 0600 (see `keys`).

The ranks of a host are forked from one process that has imported what each of them needs: torch takes seconds.

It is a child of the agent (see `ranks`), whose program ends in `serve_forks(main)`, with a socket for its stdin. For
each order there it forks twice. The process between ends at once, so that the rank becomes the agent's own child: the
agent waits for it, and the kernel ends it with the agent. What forks has one thread and has computed nothing, on no
device.

Memory that a process frees stays with it.

glibc gives the end of its heap back to the kernel whenever enough of it is free, and the heaps that it makes for other
threads as soon as they are empty. Then each update gets pages anew and has them cleared: 18,000 page faults and 8 % of
the time of an update of a model of 3 million parameters on a CPU. One heap for all threads is enough where what they
take is large and seldom.

What is said of an exception that a node or a maker raised.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import IO, NoReturn, TypedDict

from penstock.runtime.control.messages import shortened, signal_name
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import open_append, open_regular

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


PACKET_BYTES = 1 << 17
"""The most of an order."""


class ForkOrder(TypedDict):
    """A rank to be forked: its name, what its environment has beside the server's, and the files of its output."""

    name: str
    environment: Mapping[str, str]
    stdout: str
    stderr: str


def serve_forks(main: Callable[[], None], preload: Sequence[str] = ()) -> None:
    """Fork a process that calls `main` for each order of the agent at stdin, until it closes that."""
    die_with_parent()
    for module in preload:
        import_module(module)
    gc.collect()
    gc.freeze()  # or the first collection in each rank would write to, and so copy, every page
    with socket.socket(fileno=os.dup(0)) as door:
        while packet := door.recv(PACKET_BYTES):
            between = os.fork()
            if between == 0:
                _fork_again(door, json.loads(packet), main)
            if os.waitpid(between, 0)[1]:
                raise ChildProcessError("a rank could not be forked")  # the agent asks another process for it


def _fork_again(door: socket.socket, order: ForkOrder, main: Callable[[], None]) -> NoReturn:
    """In the process between: it makes the rank's, says its pid, whatever becomes of it, and ends."""
    between, status = os.getpid(), 1
    try:
        leads, leading = os.pipe()
        if rank := os.fork():
            os.close(leading)
            os.read(leads, 1)  # until it leads its session, by which it can be killed, or is dead
            _tell(door, order["name"], rank)
            os._exit(0)
        os.setsid()
        for descriptor in (leads, leading, door.detach()):
            os.close(descriptor)
        _become(order, between)
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _tell(door: socket.socket, name: str, rank: int) -> None:
    try:
        door.send(json.dumps([name, rank]).encode())
    except OSError:  # nobody would know of it
        os.kill(rank, signal.SIGKILL)
        raise


def _become(order: ForkOrder, between: int) -> None:
    """Be the rank: a child of the agent, with its own output, environment and randomness."""
    while os.getppid() == between:  # which does nothing but end
        sleep(0.0005)
    die_with_parent()
    _become_file(0, os.open(os.devnull, os.O_RDONLY))
    _become_file(1, open_append(Path(order["stdout"])))
    _become_file(2, open_append(Path(order["stderr"])))
    os.environ.update(order["environment"])
    take_name(order["name"])
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as in a process of its own; the standard library sees to itself


def _become_file(descriptor: int, opened: int) -> None:
    os.dup2(opened, descriptor)
    os.close(opened)


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # as in malloc.h
_KEEP_BYTES = (1 << 31) - 1
_LARGEST_ON_HEAP = 32 << 20  # the most that glibc takes


def keep_freed_memory() -> None:
    """For the whole process and before it starts threads; nothing where the C library has no such setting."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        mallopt(_ARENA_MAX, 1)


OWN = ("penstock.", "__main__")
BETWEEN = ("torch.", "concurrent.futures.")


def told(error: BaseException) -> str:
    """Its traceback; of a refusal the message alone.

    A refusal is a ValueError or TypeError that this package raises with no code of the user's on the way. It says what
    was given and what is needed, and the lines that found out are of no use to whoever wrote the program.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    refused = isinstance(error, ValueError | TypeError) and bool(modules) and modules[-1].startswith(OWN)
    shown = refused and all(module.startswith(OWN + BETWEEN) for module in modules)
    text = "".join(traceback.format_exception_only(error) if shown else traceback.format_exception(error))
    text = shortened(text)
    return text.encode(errors="backslashreplace").decode()  # half a character, which no message could carry
