"""The tool runs code within hard limits, answers every call by its deadline, and leaves no process behind."""

import os
import platform
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest
import torch

from penstock.graph import NodeWarning
from penstock.graph.types import Rollouts
from penstock.nodes.environments import sandbox
from penstock.nodes.environments.python_tool import ToolTimeout, find_call, python_tool
from penstock.nodes.environments.sandbox import Answer, Limits, SandboxError, isolation
from tests.nodes.rollouts import random_rollouts

LIMITS = Limits(seconds=120.0, cpu_seconds=5, memory_mib=256, max_output=200)
SLEEP = "import time; print('begun', flush=True); time.sleep(3600)"


WRAPPER: tuple[str, ...] = ()
with suppress(SandboxError):
    WRAPPER = isolation()
isolated = pytest.mark.skipif(not WRAPPER, reason="no bubblewrap that works")
# Most promises hold without isolation, too.
run_python = partial(sandbox.run_python, wrapper=WRAPPER)
tool = partial(python_tool.fn, sandbox=bool(WRAPPER))


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = psutil.Process().children(recursive=True)
    yield
    assert set(psutil.Process().children(recursive=True)) <= set(before)


@pytest.fixture
def looked_for_anew() -> Iterator[None]:
    sandbox._find_isolation.cache_clear()
    yield
    sandbox._find_isolation.cache_clear()


def rollouts(*texts: str, finished: Any = None) -> Rollouts:
    count = len(texts)
    made = replace(random_rollouts([(1, 2)] * count), texts=texts, ordinals=(7,) * count)
    return replace(made, finished_N=torch.tensor(finished or [True] * count))


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2"),
        ("x = 3\nx * x", "9"),
        ("print('a'); 'b'", "a\n'b'"),
        ("None", ""),
        ("", ""),
        ("print('é')", "é"),
        ("import math, random, json, fractions\nmath.floor(math.pi)", "3"),
        ("import sys\nprint(1)\nsys.exit()", "1"),
        ("import threading\nt = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()", "1"),
    ],
)
def test_the_answer_is_what_is_printed_and_the_value_of_the_last_line(code: str, output: str) -> None:
    assert run_python(code, LIMITS) == Answer(output)


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("print(1)\n1 / 0", "ZeroDivisionError: division by zero"),
        ("(", "SyntaxError: '(' was never closed (<call>, line 1)"),
        ("[0] * 10**9", "MemoryError"),
        ("def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("input()", "EOFError: EOF when reading a line"),
        ("print('x' * 10_000)", "OutputError: more than 200 bytes"),
        ("while True: print('x')", "OutputError: more than 200 bytes"),
        ("import os; os._exit(3)", "SystemError: the process ended with status 3"),
        ("import sys; sys.exit(4)", "SystemError: the process ended with status 4"),
        ("import sys; sys.exit('no')", "no"),
    ],
)
def test_what_goes_wrong_is_the_last_line(code: str, last: str) -> None:
    answer = run_python(code, LIMITS)
    assert (answer.output.splitlines()[-1], answer.failed, answer.late) == (last, True, False)
    assert len(answer.output) < 300


def test_computing_without_end_meets_its_limit() -> None:
    answer = run_python("while True: pass", Limits(60.0, 1, 256, 200))
    assert answer == Answer("TimeoutError: more than 1 s of computing", failed=True)


def passes(monkeypatch: pytest.MonkeyPatch, deadline: Callable[["subprocess.Popen[bytes]"], Any]) -> None:
    """Let the deadline of a call pass when this function of its process returns, and no earlier."""
    listen = sandbox._listen

    def listen_then(process: "subprocess.Popen[bytes]", _: float, max_output: int) -> tuple[bytes, bool]:
        deadline(process)
        return listen(process, monotonic(), max_output)

    monkeypatch.setattr(sandbox, "_listen", listen_then)


def test_what_a_late_call_has_written_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    passes(monkeypatch, lambda process: select.select([process.stdout], [], [], 60))
    answer = run_python(SLEEP, LIMITS)
    assert answer == Answer("begun\nTimeoutError: no end within 120 s", failed=True, late=True)


def test_a_call_that_has_ended_is_not_late_however_late_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    passes(monkeypatch, lambda process: os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT))
    assert run_python("1 + 1", LIMITS) == Answer("2")
    assert run_python("print('x' * 10_000)", LIMITS).output.endswith("OutputError: more than 200 bytes")
    # Here the call's own alarm ends it.
    late = run_python("import time; time.sleep(3600)", Limits(0.5, 5, 256, 200))
    assert late == Answer("TimeoutError: no end within 0.5 s", failed=True, late=True)


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd').read()",
        "open('here', 'w')",
        "import os; os.listdir('/home')",
        "import socket; socket.create_connection(('127.0.0.1', 1), 5)",
        "import os; os.kill(THIS_PROCESS, 9)",
    ],
)
def test_files_network_and_other_processes_are_out_of_reach(code: str) -> None:
    answer = run_python(code.replace("THIS_PROCESS", str(os.getpid())), LIMITS)
    assert answer.failed
    assert "Error: " in answer.output


@isolated
def test_of_the_system_s_folder_only_what_an_interpreter_needs_is_there() -> None:
    """Containers have programs and their data in other folders of it, such as /usr/src/app."""
    answer = run_python("import os; ' '.join(os.listdir('/usr'))", LIMITS)
    own = {part for part in Path(sys.base_prefix).parts[2:3] if sys.base_prefix.startswith("/usr/")}
    assert set(answer.output.strip("'").split()) <= {"bin", "lib", "lib64", "local", "share", *own}
    assert "lib" in answer.output


def test_without_a_sandbox_accidents_are_stopped() -> None:
    for code in ("import os; os.fork()", "import subprocess; subprocess.run(['true'])", "import ctypes"):
        assert "is not allowed here" in sandbox.run_python(code, LIMITS, ()).output


CALL_C = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"
"""Past the audit hook, and all else that is Python's own."""
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine(), -1)
POSIX_SPAWN = "PermissionError: [Errno 1] Operation not permitted: '/bin/true'"
ALIEN = 0x10000 | 0x800 | 0x100
"""The flags of a thread that does not share its process's descriptors."""
START_THREADS = """import threading
threading.stack_size(1 << 22)
end = threading.Event()
workers = [threading.Thread(target=end.wait) for _ in range(24)]
[worker.start() for worker in workers], end.set(), [worker.join() for worker in workers]
len(bytearray(32 << 20)) >> 20
"""
THREADS_OF_MEMORY = """import threading
kept = []
def keep():
    try:
        kept.append(bytearray(100 << 20))
    except MemoryError:
        pass
workers = [threading.Thread(target=keep) for _ in range(3)]
[worker.start() for worker in workers], [worker.join() for worker in workers]
len(kept) < 3
"""
"""Threads share one memory of 256 MiB."""


@isolated
@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("import os\nos.fork()", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os\nos.posix_spawn('/bin/true', ['true'], {})", POSIX_SPAWN),
        (CALL_C + "c.fork(), ctypes.get_errno()", "(-1, 1)"),
        (CALL_C + "c.vfork(), ctypes.get_errno()", "(-1, 1)"),
        # System calls by number: clone and clone3.
        (CALL_C + f"c.syscall({CLONE}, 17, 0, 0, 0, 0), ctypes.get_errno()", "(-1, 1)"),
        (CALL_C + "c.syscall(435, b'\\0' * 64, 64), ctypes.get_errno()", "(-1, 38)"),
        # A descriptor table of its own would have a limit of its own: clone, and unshare within close_range.
        (CALL_C + f"c.syscall({CLONE}, {ALIEN}, 0, 0, 0, 0), ctypes.get_errno()", "(-1, 1)"),
        (CALL_C + "c.syscall(436, 60, 63, 2), ctypes.get_errno()", "(-1, 1)"),
        (CALL_C + "c.fallocate(0, 1, ctypes.c_long(0), ctypes.c_long(1 << 20)), ctypes.get_errno()", "(-1, 9)"),
        (THREADS_OF_MEMORY, "True"),
        (CALL_C + "c.shmget(0, 1 << 30, 0o1600), ctypes.get_errno()", "(-1, 1)"),
        (CALL_C + "c.msgget(0, 0o1600), ctypes.get_errno()", "(-1, 1)"),
        (CALL_C + "c.unshare(0x10000000), ctypes.get_errno()", "(-1, 1)"),
        ("import os\nos.memfd_create('m')", "PermissionError: [Errno 1] Operation not permitted"),
        ("import mmap\nlen(mmap.mmap(-1, 300 << 20))", "OSError: [Errno 12] Cannot allocate memory"),
        ("kept = [bytearray(100 << 20) for _ in range(3)]", "MemoryError"),
        ("import os\nos.setuid(0)", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os\nos.path.exists('/etc/passwd'), os.path.exists('/proc'), os.path.exists('/tmp')", "(False,) * 3"),
        ("import socket\n[name for _, name in socket.if_nameindex()]", "['lo']"),
    ],
)
def test_the_limits_are_those_of_the_whole_call_whoever_starts_it(code: str, output: str) -> None:
    """There is no second process, and no memory outside a process: the limits of one process are those of the call."""
    answer = run_python(code, LIMITS)
    assert answer.output == (repr(eval(output)) if output.startswith("(False") else output)


@pytest.mark.parametrize("wrapper", [pytest.param(WRAPPER, marks=isolated), ()])
def test_threads_take_what_they_need_and_the_input_can_only_be_read(wrapper: tuple[str, ...]) -> None:
    assert sandbox.run_python(START_THREADS, LIMITS, wrapper) == Answer("32")
    written = sandbox.run_python("import os\nos.write(0, b'x')", LIMITS, wrapper, "x")
    assert written.output == "OSError: [Errno 9] Bad file descriptor"


@isolated
@pytest.mark.skipif(os.getuid() != 0, reason="another user's calls have namespaces of their own")
def test_calls_of_root_have_limits_on_threads_of_their_own() -> None:
    """The kernel counts threads by user."""
    first, second = (run_python("import os\nos.getuid()", LIMITS).output for _ in range(2))
    assert len({first, second, "0"}) == 3


@pytest.mark.parametrize("wrapper", [pytest.param(WRAPPER, marks=isolated), ()])
def test_a_limit_that_is_lower_already_stays(wrapper: tuple[str, ...]) -> None:
    code = f"""
import resource
from penstock.nodes.environments import sandbox
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
code = "import resource\\nresource.getrlimit(resource.RLIMIT_NOFILE)"
print(sandbox.run_python(code, sandbox.Limits(60.0, 5, 256, 200), {wrapper!r}).output)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout == "(60, 60)\n", found.stderr


def test_a_child_of_a_call_does_not_outlive_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This holds even if its start is not refused and it keeps the output open."""
    (tmp_path / "child.py").write_text(sandbox._CHILD.read_text().replace("if _guarded:", "if False:"))
    monkeypatch.setattr(sandbox, "_call_filter", lambda: struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
    monkeypatch.setattr(sandbox, "_CHILD", tmp_path / "child.py")
    answer = run_python("import os, time\nif os.fork() == 0: time.sleep(60)\nprint('parent')", LIMITS)
    assert answer == Answer("parent")


def test_nothing_of_this_process_s_environment_is_handed_on_but_the_run_s_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    monkeypatch.setenv("PENSTOCK_RUN", "r1")
    answer = run_python("import os; sorted(os.environ.items())", LIMITS)
    assert "A_SECRET" not in answer.output
    assert "('PENSTOCK_RUN', 'r1')" in answer.output


NOTHING_ISOLATES = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


@pytest.mark.usefixtures("looked_for_anew")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, r"no bubblewrap \(bwrap\)"),
        ("#!/bin/sh\necho no namespaces here >&2\nexit 1\n", "bubblewrap that says: no namespaces here"),
        (NOTHING_ISOLATES, r"bubblewrap that says: \S"),
    ],
)
def test_code_is_refused_where_isolation_is_missing_or_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, reason: str
) -> None:
    path = tmp_path / "bwrap"
    if script is not None:
        path.write_text(script)
        path.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: None if script is None else str(path))
    for _ in range(2):
        with pytest.raises(SandboxError, match=rf"cannot be isolated: given ({reason}).*, needed .*sandbox=False"):
            python_tool.fn(rollouts("<python>1+1</python>"))
    with pytest.warns(NodeWarning, match="runs without a sandbox"):
        replies, _ = python_tool.fn(rollouts("<python>1+1</python>"), sandbox=False)
    assert replies.texts == ("<output>2</output>",)


def test_the_last_whole_call_of_a_turn_counts() -> None:
    assert find_call("95") is None
    assert find_call("<python>1") is None
    assert find_call("a <python>1\n2</python> b <python>3</python> c <python>4") == "3"
    assert find_call("<python>1<python>2</python>") == "2"


def test_rows_with_a_call_are_answered_and_the_others_are_done() -> None:
    texts = ("<python>1+1</python>", "2", "<python>1/0</python>", "<python>1+1</python>")
    replies, metrics = tool(rollouts(*texts, finished=[True, True, True, False]), seconds=LIMITS.seconds)
    assert replies.texts == ("<output>2</output>", "", "<output>ZeroDivisionError: division by zero</output>", "")
    assert replies.done_N.tolist() == [False, True, False, True]
    assert not replies.done
    assert replies.roles == ("tool",) * 4
    assert metrics == {"tool_calls": 0.5, "tool_errors": 0.5}
    replies, metrics = tool(rollouts("1", "2"))
    assert replies.done
    assert (metrics["tool_calls"], metrics["tool_errors"].count) == (0.0, 0)


def test_equal_code_is_run_once_and_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls that wait for each other end only if they run at once."""
    meet, run = threading.Barrier(3, timeout=20), list[str]()

    def met(code: str, limits: Limits, wrapper: tuple[str, ...]) -> Answer:
        meet.wait()
        run.append(code)
        return Answer(code)

    monkeypatch.setattr("penstock.nodes.environments.python_tool.run_python", met)
    replies, _ = tool(rollouts(*(f"<python>{i}</python>" for i in (0, 1, 2, 1))), workers=3)
    assert sorted(run) == ["0", "1", "2"]
    assert replies.texts == tuple(f"<output>{i}</output>" for i in (0, 1, 2, 1))


def test_a_hung_tool_is_answered_or_fails_its_firing_by_name() -> None:
    hung = rollouts("1", f"<python>{SLEEP}</python>")
    replies, metrics = tool(hung, seconds=0.5)
    assert replies.texts[1].endswith("TimeoutError: no end within 0.5 s</output>")
    assert metrics == {"tool_calls": 0.5, "tool_errors": 1.0}
    with pytest.raises(ToolTimeout, match=r"python_tool, group 7, row 1: given no end .* within 0.5 s.*sleep\(3600\)"):
        tool(hung, seconds=0.5, on_timeout="fail")


def test_a_call_whose_caller_is_killed_ends_by_itself() -> None:
    """No process is left to kill it: the alarm in its own process does."""
    code = f"""
import os, signal
from penstock.nodes.environments import sandbox

def killed(process, *_):
    process.stdout.read(1)  # the call has begun
    os.kill(os.getpid(), signal.SIGKILL)

sandbox._listen = killed
sandbox.run_python({SLEEP!r}, sandbox.Limits(0.5, 5, 256, 200), {WRAPPER!r})
"""
    environment = {**os.environ, "PENSTOCK_RUN": f"tool-{os.getpid()}"}
    caller = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, timeout=60)
    assert caller.returncode == -signal.SIGKILL
    end = monotonic() + 60
    while marked(environment["PENSTOCK_RUN"]):
        assert monotonic() < end
        sleep(0.02)


def marked(run: str) -> list[int]:
    """Return the processes that carry a run's mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("PENSTOCK_RUN") == run and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
