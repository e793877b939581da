"""Children of a run: they die with their parent, carry the run's mark, and leave nothing behind. Linux only.

A child is started in a session of its own, so that Ctrl-C in the terminal reaches only the launcher. Its arguments,
which every user of the machine can read, hold no secret: secrets are in files of mode 0600 (`security`).

One process per host forks the ranks. It has imported what each of them needs, since importing torch takes seconds. It
is a child of the agent, runs `serve_forks(main)`, and has a socket as its stdin. It has one thread and has used no
device. Before there is a run it can also fork the process that traces the program.
"""

import ctypes
import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from time import sleep
from typing import IO, NoReturn

import penstock
from penstock.runtime.control.messages import shortened, signal_name
from penstock.runtime.control.signals import fork_leaving_end
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import open_append, open_regular
from penstock.runtime.tensor.shm import SHM, sweep

# Environment variable of every process of a run: the run's id.
RUN = "PENSTOCK_RUN"
# Environment variable: the run folder on this host.
FOLDER = "PENSTOCK_FOLDER"
# Environment variable: the pid of the parent, with which the child must end.
PARENT = "PENSTOCK_PARENT"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # as in linux/prctl.h
_TAIL_LINES, _TAIL_BYTES = 12, 4000
# A sweep counts looks, not seconds: while the whole machine is suspended, killed processes have no time to end.
_LOOKS, _LOOK_S = 250, 0.02


# Run by another interpreter: makes this package importable there, but nothing else from its site-packages, such as
# torch. Arguments: the package's folder, a module of it, and that module's arguments.
_BORROWED = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from runpy import run_module
folder, module = sys.argv.pop(1), sys.argv.pop(1)
spec = spec_from_file_location("penstock", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["penstock"] = package = module_from_spec(spec)
spec.loader.exec_module(package)
run_module(module, run_name="__main__", alter_sys=True)
"""


def borrowed(module: str, *arguments: str) -> tuple[str, ...]:
    """The command with which another interpreter runs a module of this package, wherever the package is installed."""
    return ("-c", _BORROWED, str(Path(penstock.__file__).parent), module, *arguments)


def start(
    command: Sequence[str],
    run: str,
    *,
    python: str = "",
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
    passed: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start `python COMMAND…`, which must call `die_with_parent` first. It inherits the descriptors `passed`. Do not
    call this in a thread that ends before the child: the kernel takes the thread's end for the parent's. Raises OSError
    if there is no such `python`.
    """
    return subprocess.Popen(
        [python or sys.executable, "-P", *command],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **(environment or {}), RUN: run, PARENT: str(os.getpid())},
        start_new_session=True,
        pass_fds=passed,
    )


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Does nothing in a process that `start` did not start."""
    parent = os.environ.get(PARENT)
    if parent is not None:
        _die_with(int(parent))


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the kernel was asked


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value)


def kill(child: "subprocess.Popen[bytes]") -> None:
    """Send SIGKILL to a child and its descendants."""
    if child.poll() is None:  # a pid that has been waited for may be another process's by now
        kill_session(child.pid)


def kill_session(pid: int) -> None:
    """Send SIGKILL to a child that has not been waited for yet, and to its descendants."""
    with suppress(ProcessLookupError):
        # Each child leads its own session and process group, which its descendants share.
        os.killpg(pid, signal.SIGKILL)


def describe_exit(child: "subprocess.Popen[bytes]") -> str:
    """How a child ended, in a few words."""
    status = child.returncode
    if status < 0:
        return f"killed by {signal_name(-status)}"
    asked = f" ({signal_name(status - 128)})" if 128 < status < 160 else ""  # the shell's convention
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


def last_text(file: IO[bytes], limit: int) -> str:
    """The text of the last `limit` bytes of an open file."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
    return file.read().decode(errors="replace").strip()


def log_to(path: Path) -> None:
    """Redirect this process's stderr, a file in memory, to a log. The text so far is written to the log first."""
    with os.fdopen(open_append(path), "ab") as log:
        log.write(taken(2))
        log.flush()
        os.dup2(log.fileno(), 2)


def keep_newest(path: Path, most: int) -> None:
    """Cut a log of more than `most` bytes to the newest `most` / 2, after a line that says so. Processes may append
    meanwhile: what they write at that moment may be lost in part, or stand before that line."""
    with suppress(OSError, RecordError), os.fdopen(open_regular(path, os.O_RDWR | os.O_APPEND), "r+b", 0) as log:
        size = os.fstat(log.fileno()).st_size
        if size > most:
            kept = os.pread(log.fileno(), most // 2, size - most // 2)
            kept = kept[kept.find(b"\n") + 1 :]
            log.truncate(0)
            log.write(f"[penstock] older lines of this log are gone: it had more than {most} bytes\n".encode() + kept)


def taken(descriptor: int) -> bytes:
    """The content of a file in memory, which is empty afterwards."""
    found = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.ftruncate(descriptor, 0)
    return found


def processes_of(run: str) -> list[int]:
    """The pids on this host that carry the run's mark, without this process."""
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
    """Kill all processes of a run on this host. Return the pids left after some seconds (none, normally)."""
    quiet = 0
    left: list[int] = []
    for _ in range(_LOOKS):
        left = processes_of(run)
        quiet = 0 if left else quiet + 1
        if quiet == 2:  # twice: a process in the middle of `exec` shows no environment
            break
        # Some may fork meanwhile: the next look finds their children.
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


# Largest packet between an agent and its child that forks ranks.
PACKET_BYTES = 1 << 17


def serve_forks(main: Callable[[], None], preload: Sequence[str] = (), asks: int | None = None) -> None:
    """Import modules, then fork a rank for each order of the agent at stdin.

    First import `preload`, and do what is asked at the socket `asks` (`ask_to_fork`). The agent's first packet is [the
    run folder here, more modules to import, the log that stderr is to go to, or ""]. Then for each order [name of a
    rank, environment beside this process's, file of its stdout, file of its stderr] fork a process that calls `main`;
    an order [name] alone kills that rank. Tell the agent [name, pid, status] when a rank has ended. When the agent
    closes its side, or is gone, kill the remaining ranks, report them, and remove the shared-memory segments of dead
    runs on this host.
    """
    die_with_parent()
    gc.disable()  # imported objects stay: collections would take a tenth of the time of the imports
    for module in preload:
        import_module(module)
    if asks is not None:
        with socket.socket(fileno=asks) as asked:
            _fork_asked(asked)
    with socket.socket(fileno=os.dup(0)) as control:
        if not (opening := _order(control)):  # there is no run
            return
    os.environ[FOLDER], modules, log = json.loads(opening)
    if log:
        log_to(Path(log))
    for module in modules:
        import_module(module)
    # From here on this process sees the end of the agent at the socket, and must survive it to clean up.
    _prctl(_PR_SET_PDEATHSIG, 0)
    # Otherwise the first collection in each rank would write to, and so copy, every page. The garbage of the imports,
    # some MB, stays: collecting it would take a tenth of their time.
    gc.freeze()
    gc.enable()
    ranks: dict[int, tuple[str, int]] = {}  # name and pid by pidfd
    poller, listens = select.poll(), True
    with socket.socket(fileno=os.dup(0)) as control:
        poller.register(control, select.POLLIN)
        while listens or ranks:
            for descriptor, _ in poller.poll():
                if descriptor in ranks:
                    name, pid = ranks.pop(descriptor)
                    poller.unregister(descriptor)
                    os.close(descriptor)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with suppress(ConnectionError):  # the agent is gone
                        control.send(json.dumps([name, pid, status]).encode())
                elif packet := _order(control):
                    name, *launch = json.loads(packet)
                    if not launch:
                        for own, pid in ranks.values():
                            if own == name:
                                kill_session(pid)
                        continue
                    environment, *outputs = launch
                    parent = os.getpid()
                    try:
                        pid = fork_leaving_end()
                    except OSError:  # no memory, or too many processes: the agent reports this traceback
                        traceback.print_exc()
                        control.send(json.dumps([name, 0, 1]).encode())
                        continue
                    if pid == 0:
                        for inherited in (control.detach(), *ranks):
                            os.close(inherited)
                        whole = {**os.environ, **environment, PARENT: str(parent)}
                        _become(name, _opened(outputs), whole, parent, main)
                    pidfd = os.pidfd_open(pid)
                    ranks[pidfd] = name, pid
                    poller.register(pidfd, select.POLLIN)
                else:
                    poller.unregister(control)
                    listens = False
                    for _, pid in ranks.values():
                        kill_session(pid)
                        os.kill(pid, signal.SIGKILL)  # a process that was just forked leads no session yet
    sweep(None, (SHM, Path(os.environ[FOLDER])))


def _order(control: socket.socket) -> bytes:
    """The next packet; b"" if there will be none."""
    try:
        return control.recv(PACKET_BYTES)
    except ConnectionError:  # the other side closed with unread packets
        return b""


def ask_to_fork(control: socket.socket, function: str, words: Sequence[str], memfd: int) -> None:
    """Ask the process at the other end of a socket to fork one that calls `function(*words, memfd)` with this process's
    standard streams, environment, and file `memfd`. It answers with the exit status when that process has ended."""
    with os.fdopen(os.memfd_create("asked"), "w") as order:
        json.dump([function, *words], order)
        order.write("\n")
        json.dump(dict(os.environ), order)  # it may be larger than a packet
        order.flush()
        socket.send_fds(control, [b"asked"], [0, 1, 2, memfd, order.fileno()])


def _fork_asked(control: socket.socket) -> None:
    """Fork the process that `ask_to_fork` asks for, once, and answer; nothing if the other side closes the socket."""
    passed = socket.recv_fds(control, 8, 5)[1]
    if not passed:
        return
    *streams, memfd, order = passed
    with os.fdopen(order) as file:
        file.seek(0)
        function, *words = json.loads(file.readline())
        # The run's id, by which the descendants of the process are found.
        environment = {**json.loads(file.readline()), RUN: os.environ[RUN]}
    parent, pid = os.getpid(), None
    with suppress(OSError):  # no memory, or too many processes: the other side finds the socket closed
        pid = os.fork()
    if pid == 0:
        control.close()
        gc.freeze()
        gc.enable()
        _become("trace", streams, environment, parent, lambda: _call(function, *words, str(memfd)))
    for descriptor in (*streams, memfd):
        os.close(descriptor)
    if pid is not None:
        # There is nothing else to do meanwhile.
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(ConnectionError):  # the other side does not wait any more
            control.send(json.dumps(status).encode())


def _call(function: str, *words: str) -> None:
    """Call the function as a newly started process would: with all cores, and line-buffered on a terminal."""
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    if torch := sys.modules.get("torch"):
        said = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(said) if said.isdecimal() and int(said) else len(os.sched_getaffinity(0)))
    sys.exit(resolve_name(function)(*words))


def _opened(outputs: Sequence[str]) -> Iterator[int]:
    """Open the standard streams of a rank."""
    yield os.open(os.devnull, os.O_RDONLY)
    yield from map(open_append, map(Path, outputs))


def _become(
    name: str, streams: Iterable[int], environment: Mapping[str, str], parent: int, main: Callable[[], None]
) -> NoReturn:
    """In a forked process: set session, standard streams, environment, name and random state, call `main`, and exit."""
    status = 1
    try:
        os.setsid()
        _die_with(parent)
        for descriptor, opened in enumerate(streams):
            os.dup2(opened, descriptor)
            os.close(opened)
        os.environ.clear()
        os.environ.update(environment)
        _prctl(_PR_SET_NAME, name.encode())  # for ps and top, which show its first 15 bytes
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # as in a new process; the `random` module reseeds itself after a fork
        main()
        status = 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):  # an error message
            traceback.print_exc()
        else:
            status = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # as in malloc.h
_KEEP_BYTES = (1 << 31) - 1
_LARGEST_ON_HEAP = 32 << 20  # the largest value that glibc accepts


def keep_freed_memory() -> None:
    """Keep the memory that this process frees for reuse. Call it before threads start. Does nothing if the C library
    has no such setting.
    """
    # glibc returns the end of its heap to the kernel whenever enough of it is free, and the heaps of other threads as
    # soon as they are empty. Then each update has to get and clear pages again: 18,000 page faults and 8 % of the time
    # of an update of a model of 3 million parameters on a CPU. One heap for all threads is enough, since their
    # allocations are large and rare.
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        mallopt(_ARENA_MAX, 1)


def huge_pages() -> dict[str, str]:
    """Environment variables that make a program ask the kernel for huge pages. They have no effect if the kernel or C
    library has none; {} if the user has chosen already."""
    # An update walks over some hundred megabytes. The address translation of small pages takes 4 % of its time, and
    # 11 % of the time to sample 128 responses from a model of 25 million parameters.
    given = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" in given:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, (given, "glibc.malloc.hugetlb=1")))}


def short_spins() -> dict[str, str]:
    """Environment variables that limit how long OpenMP's threads spin while they wait for each other, before they
    sleep; {} if the user has chosen already."""
    # An update has a thread for each core while generators have half of the cores (placement). A thread that spins for
    # milliseconds, as by default, takes the core of the thread that it waits for: an update takes 1.3 times as long
    # (benchmarks/spinning.py). libgomp itself takes this count if one process has more threads than cores.
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
    return {} if chosen else {"GOMP_SPINCOUNT": "1000"}


# Exceptions of a node that count as its failure. SystemExit is one: `sys.exit` would end the run without a reason.
RAISED = (Exception, SystemExit)
OWN = ("penstock.", "__main__")
BETWEEN = ("torch.", "concurrent.futures.")


# Appended to an error of a GPU without free memory.
NEEDED_MEMORY = (
    "needed less memory on this GPU. An update takes less with a smaller --micro-tokens, --recompute layer or "
    "--optimizer-state host; generation with smaller --slots, --max-prompt or --max-tokens; each with a --mesh over "
    "more GPUs. `penstock plan` counts what fits"
)


def told(error: BaseException) -> str:
    """The traceback of an error; of a refusal only the message. An error of a GPU without free memory has the flags
    that need less.

    A refusal is an error that this package raises, with no user code in the traceback: a ValueError, a TypeError, or a
    class of its own that is raised `from None`. Its message says what was given and what is needed; the traceback would
    not help the user.
    """
    # The listed libraries may stand between two frames of ours: they are no user code.
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    alone = type(error).__module__.startswith("penstock.") and error.__suppress_context__ and error.__cause__ is None
    known = alone or isinstance(error, ValueError | TypeError)
    refused = known and bool(modules) and modules[-1].startswith(OWN)
    shown = refused and all(module.startswith(OWN + BETWEEN) for module in modules)
    text = "".join(traceback.format_exception_only(error) if shown else traceback.format_exception(error))
    if (torch := sys.modules.get("torch")) and isinstance(error, torch.OutOfMemoryError):
        text += f"{NEEDED_MEMORY}\n"
    text = shortened(text)
    return text.encode(errors="backslashreplace").decode()  # a lone surrogate cannot be encoded in a message
