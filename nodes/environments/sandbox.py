"""Runs a piece of Python that a model wrote in a short-lived process, isolated by bubblewrap (`bwrap`).

The process has no network, and sees no other process. Its only files are the interpreter's own, the system's libraries
(read-only), its input as `/dev/stdin`, and `/dev/null`. It can start threads, which share its memory and its CPU time,
but no processes, so its limits are those of the whole call. A filter of system calls refuses processes, memory that
belongs to no process (shared memory, message queues, memfd), and calls that only an attack needs. `isolation` tests all
of this once before any code runs, and raises if it does not hold. Linux only.

sandbox=False runs code without isolation: with resource limits, `python -I`, an empty folder, and an audit hook that
refuses processes, network and files. That stops accidents, not an attacker: one line of code removes the hook.
"""

import errno
import math
import os
import platform
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from threading import Lock
from time import monotonic, sleep

from penstock.graph.requires import Call
from penstock.graph.types import NodeWarning

_CHILD = Path(__file__).with_name("sandbox_child.py")
# Environment variables that the process gets: the run's mark, which identifies leftovers of a killed run.
_PASSED_ON = ("PENSTOCK_RUN",)
# And one more: a heap for each thread would take 64 MiB of the memory limit.
_SET = {"MALLOC_ARENA_MAX": "1"}
# Folders that an interpreter needs beside its own. Not all of /usr: containers have programs and their data there.
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64", "/usr/share/zoneinfo")
_GLANCE_S, _PAUSE_S = 0.05, 0.001
# If this process is root, calls run as these users in turn: the kernel exempts root from the limit on threads, and
# counts the threads of a user, which all calls with the same user share. systemd lists these numbers as unused.
_USERS = cycle(range(65520, 65534))
_FIRST_LOOK = Lock()
_PROBE = """
import os, socket
try:
    child = os.fork()
except OSError:
    seen = [path for path in ("/home", "/root/.ssh", "/etc/passwd", "/proc/1") if os.path.exists(path)]
    nets = [name for _, name in socket.if_nameindex() if name != "lo"]
    print("isolated" if not (seen or nets or os.getuid() == 0) else f"sees {seen + nets} as user {os.getuid()}")
else:
    if child:
        print("can start processes")
"""


class SandboxError(RuntimeError):
    """A model's code cannot be isolated on this machine: why (`given`), and what to do (`needed`)."""

    def __init__(self, given: str, needed: str) -> None:
        super().__init__(f"code that a model writes cannot be isolated: given {given}, needed {needed}")
        self.given, self.needed = given, needed


@dataclass(frozen=True)
class Limits:
    """Limits of a call: wall-clock `seconds`, `cpu_seconds`, memory in MiB, and output in bytes."""

    seconds: float
    cpu_seconds: int
    memory_mib: int
    max_output: int


@dataclass(frozen=True)
class Answer:
    """The output of some code; if it `failed`, a last line says why. `late`: it was killed at its deadline."""

    output: str
    failed: bool = False
    late: bool = False


def run_python(code: str, limits: Limits, wrapper: Sequence[str], stdin: str = "", *, errors: bool = True) -> Answer:
    """Run `code` in a process that the command `wrapper` isolates: that of `isolation()`, or () for none. `stdin` is
    its standard input. Without `errors`, its standard error, such as warnings, is not part of the output.

    Returns within `limits.seconds` plus the time of a kill. Can be called from many threads.
    """
    process = _start(code, stdin, limits, wrapper, errors)
    try:
        output, late = _listen(process, monotonic() + limits.seconds, limits.max_output)
    finally:
        status = _end(process)
    text = output[: limits.max_output].decode(errors="replace").rstrip("\n")
    too_much, trouble = len(output) > limits.max_output, ""
    late = not too_much and (late or _killed_by(signal.SIGALRM, status))
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
    # bubblewrap reports a signal of its child as 128 + its number, as a shell does.
    return status in (-number, 128 + number)


def isolation() -> tuple[str, ...]:
    """The command that isolates a process, found and tested once. Raises SandboxError if there is none."""
    command, reason = _find_isolation()
    if reason:
        works = "bubblewrap that works (apt install bubblewrap; a container must allow it user namespaces)"
        own = "sandbox=False (--no-sandbox, if it is the program's option), which lets that code do what you can do"
        raise SandboxError(reason, f"{works}, or {own}")
    return command


@lru_cache(maxsize=1)
def _find_isolation() -> tuple[tuple[str, ...], str]:
    """(the command, ""), or ((), the reason why there is none)."""
    path = shutil.which("bwrap")
    if path is None:
        return (), "no bubblewrap (bwrap) on the PATH"
    if platform.machine() not in _ARCHITECTURES:
        return (), f"a processor ({platform.machine()}) whose system calls are not known here"
    # Root needs no user namespace, and can become another user inside: limits do not apply to root's own processes.
    namespaces = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
    rights = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    kind = (*namespaces, *rights) if os.getuid() == 0 else ("--unshare-all",)
    prefix = Path(sys.base_prefix)
    # In folders that others share, only the interpreter's own parts.
    own = [prefix / "bin", prefix / "lib"] if str(prefix) in ("/usr", "/usr/local") else [prefix]
    binds = list[str]()
    for folder in filter(Path.exists, (*map(Path, _SYSTEM), *own)):
        # The parent folders: bubblewrap would make them so that only root could enter.
        for above in reversed(folder.parents[:-1]):
            binds += ["--perms", "0755", "--dir", str(above)]
        binds += ["--ro-bind", str(folder), str(folder)]
    binds += ["--perms", "0755", "--dir", "/dev", "--dev-bind", os.devnull, os.devnull]
    command = (path, *kind, "--die-with-parent", "--new-session", *binds)
    tried = run_python(_PROBE, Limits(20.0, 10, 256, 1000), command)
    if tried.late:
        return (), "bubblewrap that does not answer"
    return (command, "") if tried.output == "isolated" else ((), f"bubblewrap that says: {tried.output}")


# AUDIT_ARCH of linux/audit.h by machine.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# By name: the number on x86_64 and on aarch64, -1 if there is none. These calls make memory that belongs to no process,
# look into other processes, or widen what an attack can reach.
_REFUSED_CALLS = {
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "unshare": (272, 97),
    "setns": (308, 268),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "fork": (57, -1),
    "vfork": (58, -1),
    # It can give a thread descriptors of its own.
    "close_range": (436, 436),
}
# The call that starts processes, or threads if it has these flags: in the same process, and with its table of
# descriptors, since their limit is per table. And the newer call, whose flags a filter cannot see: if that is missing
# (ENOSYS), the C library uses the older one.
_CLONE, _CLONE_THREAD_FILES = (56, 220), 0x00010000 | 0x00000400
_CLONE3 = 435


def _call_filter() -> bytes:
    """A seccomp program: system calls of another architecture, `_REFUSED_CALLS` and calls that start a process fail
    with EPERM; all others are allowed.

    An instruction is (code, jump if true, jump if false, constant); see seccomp(2) and linux/bpf_common.h.
    """
    load, equal, at_least, mask, give = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    arch = _ARCHITECTURES[platform.machine()]
    column = list(_ARCHITECTURES).index(platform.machine())
    calls = [numbers[column] for numbers in _REFUSED_CALLS.values() if numbers[column] >= 0]
    count = len(calls)
    # The number of a call is at 0, the architecture at 4, the first argument at 16. The last three instructions are the
    # targets of the jumps.
    program = [(load, 0, 0, 4), (equal, 0, count + 8, arch), (load, 0, 0, 0), (at_least, count + 6, 0, 0x40000000)]
    program += [(equal, count - index + 5, 0, call) for index, call in enumerate(calls)]
    program += [(equal, 4, 0, _CLONE3), (equal, 0, 5, _CLONE[column]), (load, 0, 0, 16)]
    program += [(mask, 0, 0, _CLONE_THREAD_FILES), (equal, 2, 1, _CLONE_THREAD_FILES)]
    program += [(give, 0, 0, unknown), (give, 0, 0, refuse), (give, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _start(code: str, stdin: str, limits: Limits, wrapper: Sequence[str], errors: bool) -> "subprocess.Popen[bytes]":
    """Start a process that runs `code`, in a session of its own, so that all of it can be killed."""
    # The alarm, one second after the deadline, is for a process whose parent has died.
    user = next(_USERS) if wrapper and os.getuid() == 0 else -1
    numbers = (limits.cpu_seconds, limits.memory_mib, math.ceil(limits.seconds) + 1, user, int(not wrapper))
    given = stdin.encode(errors="replace")
    with ExitStack() as files:
        source, entry = _file(files, code.encode(errors="replace")), _file(files, given)
        passed, isolated = [source], list[str]()
        if wrapper:
            # A copy, since bubblewrap reads the file to its end, and the process's own input must begin at the start.
            named, calls = _file(files, given), _file(files, _call_filter())
            passed += [named, calls]
            isolated = [*wrapper, "--perms", "0444", "--ro-bind-data", str(named), "/dev/stdin"]
            isolated += ["--remount-ro", "/", "--chdir", "/", "--seccomp", str(calls), "--"]
        child = [os.path.realpath(sys.executable), "-I", "-S", "-c", _CHILD.read_text()]
        # The folder is removed once the process has entered it: nothing is left, and nothing can be written there.
        folder = files.enter_context(tempfile.TemporaryDirectory(prefix="penstock-"))
        return subprocess.Popen(
            [*isolated, *child, *map(str, (source, *numbers, int(errors)))],
            stdin=entry,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/" if wrapper else folder,
            env=_SET | {name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            start_new_session=True,
            pass_fds=passed,
        )


def _file(files: ExitStack, content: bytes) -> int:
    """A read-only descriptor of a file without a name, at its beginning. With a writable one the code could fill the
    disk (fallocate) despite the limit on file sizes."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        descriptor = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)
    files.callback(os.close, descriptor)
    return descriptor


def _listen(process: "subprocess.Popen[bytes]", deadline: float, max_output: int) -> tuple[bytes, bool]:
    """(the output of a process until it ends, has written more than `max_output` bytes, or its deadline passes; whether
    the deadline has passed)."""
    assert process.stdout is not None
    # The end of the process counts, not that of its output: a child of it might keep that open.
    poll, output, closed = select.poll(), b"", False
    poll.register(process.stdout, select.POLLIN)
    while len(output) <= max_output:
        left = max(0.0, deadline - monotonic())
        # Checked after the clock: a process that has ended is not late, even if this thread had to wait. It stays a
        # zombie (WNOWAIT), so that its process group's number is not reused before the group is killed.
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        heard = not closed and bool(poll.poll(0 if ended else 1000 * min(left, _GLANCE_S)))
        if heard:
            piece = os.read(process.stdout.fileno(), 1 << 16)
            output, closed = output + piece, not piece
        if not left or (ended and not heard):
            return output, not ended
        if closed and not ended:
            sleep(min(left, _PAUSE_S))
    return output, False


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Kill what is left of a process and of its children. Return its exit status."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    process.stdout.close()
    return process.wait()


def wrapper_of(sandbox: bool, who: str) -> tuple[str, ...]:
    """The wrapper of a call's code: that of `isolation()`; without a sandbox () and a warning of the run."""
    if not sandbox:
        text = f"{who}: code that the model writes runs without a sandbox, with your rights"
        warnings.warn(text, NodeWarning, stacklevel=2)
        return ()
    # Threads of several groups may call this at once: one looks for the sandbox, the others wait for its result.
    with _FIRST_LOOK:
        return isolation()


def isolated(call: Call) -> None:
    """Requirement of running a model's code: bubblewrap on the machine that starts the run, unless sandbox=False."""
    if call.context is not None and call.options.get("sandbox", True):
        try:
            isolation()
        except SandboxError as error:
            raise call.lack(error.given, error.needed, "sandbox", code="no-sandbox") from None


def described_isolation() -> tuple[bool, str]:
    """(True if code is isolated on this machine, by what or why not)."""
    _, reason = _find_isolation()
    return not reason, reason or f"bubblewrap ({shutil.which('bwrap')}) isolates code: no network, files, processes"
