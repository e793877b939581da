"""Agents and their ranks: how they start, end with their parent, and are reported."""

import errno
import importlib
import json
import os
import platform
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

import pytest
import zmq

from penstock.host import private_folder
from penstock.runtime.cluster import endpoints
from penstock.runtime.control import sockets
from penstock.runtime.control.agent import ALONE, serve
from penstock.runtime.control.messages import AgentReady, End, Exited, Goodbye, Hello, Launch, Leaving, Note, Ready
from penstock.runtime.control.process import (
    PARENT,
    describe_exit,
    die_with_parent,
    huge_pages,
    keep_newest,
    kill,
    processes_of,
    read_line,
    start,
    sweep_processes,
    tail,
)
from penstock.runtime.control.rendezvous import INTERVAL
from penstock.runtime.control.signals import (
    ONE_SIGNAL_S,
    PREEMPTED,
    PREEMPTIONS,
    STOPS,
    Preempted,
    StopRequest,
    carry_on,
    interrupt,
    on_stop,
    output_closed,
    stop_if_output_closes,
    wait_handing_on,
)
from penstock.runtime.control.worker import NEEDED
from penstock.runtime.tensor.shm import SHM, sweep

from .sockets import RANKS, Bench, bench, stranger, until

# An agent starts ranks and reports their deaths; no rank outlives it.


pytestmark = pytest.mark.timeout(300)
LOG_BYTES = 100_000
AGENT = str(Path(__file__).with_name("fake_agent.py"))
M = TypeVar("M")
ON_B = dict.fromkeys(RANKS, "b")


@contextmanager
def agent(
    b: Bench, *worker: str, leave: float = 3.0, mode: str = "", **changes: Any
) -> Iterator["subprocess.Popen[bytes]"]:
    """The agent of host "b". Its ranks are fakes in this `mode`, or run the program `worker`; they have `leave` seconds
    to end after a goodbye. Everything is ended and removed afterwards.
    """
    path = b.folder / "b.json"
    changes.get("join", b.join("b")).write(path)
    given = {"FAKE_LEAVE_S": str(leave), "FAKE_RANK": mode, "FAKE_LOG_BYTES": str(LOG_BYTES)}
    process = start([AGENT, str(path), *worker], b.keys.server.run, environment=given, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        kill(process)
        process.communicate()
        sweep_processes(b.keys.server.run)
        sweep(b.keys.server.run)


def heard(b: Bench, kind: type[M]) -> M:
    """Wait for the next message of a kind."""

    def look() -> M | None:
        found = next((m for _, m in b.heard if isinstance(m, kind)), None)
        if found is None:
            b.hear()
        return found

    message: M = until(look)
    b.heard = [(peer, m) for peer, m in b.heard if m is not message]
    return message


@pytest.fixture
def b(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path, ranks=ON_B) as made:
        yield made


def test_an_agent_joins_and_starts_ranks_with_their_name_and_threads(b: Bench) -> None:
    with agent(b) as process:
        assert heard(b, Hello).role == "agent"
        assert heard(b, AgentReady) == AgentReady("b", process.pid)
        assert b.server.send("agent:b", Launch("generator/1", 2, 5))
        ready = heard(b, Ready)
        assert (ready.replica, ready.rank) == ("generator/1", 2)
        told = json.loads(heard(b, Note).text)
        environment = told["environment"]
        assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "5"
        assert (b.folder / "logs" / "generator-1-2.err").read_text() == "said by a rank\n"
        said = json.dumps(told) + (Path("/proc") / str(process.pid) / "cmdline").read_text()
        assert b.keys.server.token not in said


@pytest.mark.parametrize("chosen", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}], ids=str)
def test_threads_that_wait_for_each_other_spin_shortly_unless_the_user_has_chosen(
    b: Bench, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str]
) -> None:
    names = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    with agent(b):
        heard(b, AgentReady)
        assert b.server.send("agent:b", Launch("generator/1", 2, 5))
        environment = json.loads(heard(b, Note).text)["environment"]
        assert {name: environment[name] for name in names & set(environment)} == (chosen or {"GOMP_SPINCOUNT": "1000"})


def test_no_segment_outlives_an_agent_nor_one_that_was_killed_before_it(b: Bench) -> None:
    """The launcher sweeps only its own host. Another run may hold a segment's lock for a moment to remove it."""
    dead = SHM / f"penstock-dead{b.keys.server.run}-generator.0.0-0"
    dead.touch()  # no process holds its lock
    with agent(b) as process:
        heard(b, AgentReady)
        until(lambda: not dead.exists())
        assert b.server.send("agent:b", Launch("generator/0", 0))
        pid = heard(b, Ready).pid
        left = SHM / f"penstock-{b.keys.server.run}-generator.0.0-0"
        assert left.exists()
        os.kill(pid, signal.SIGKILL)
        heard(b, Exited)
        assert b.server.send("agent:b", Goodbye("done"))
        assert until(lambda: b.hear() is not None and process.poll() is not None)
        until(lambda: not left.exists())


def test_a_rank_that_raises_is_told_of_with_its_status_and_the_tail_of_its_stderr(b: Bench) -> None:
    with agent(b, mode="raise"):
        heard(b, AgentReady)
        b.server.send("agent:b", Launch("scorer/0", 0))
        exited = heard(b, Exited)
        assert (exited.replica, exited.rank, exited.status, exited.signal) == ("scorer/0", 0, 1, 0)
        assert exited.tail.splitlines()[-1] == "MemoryError: no room for a model"


def test_ranks_share_imports_but_no_randomness_nor_session(b: Bench) -> None:
    with agent(b) as process:
        heard(b, AgentReady)
        told = []
        for index in range(2):
            b.server.send("agent:b", Launch("generator/0", index))
            pid = heard(b, Ready).pid
            told.append(json.loads(heard(b, Note).text))
            assert told[-1]["session"] == pid
            assert (Path("/proc") / str(pid) / "comm").read_text() == f"generator/0.{index}\n"
        assert told[0]["parent"] == told[1]["parent"] != process.pid
        assert told[0]["loaded"] == told[1]["loaded"]
        assert told[0]["drawn"] != told[1]["drawn"]


def test_ranks_end_with_what_forked_them_and_are_told_of_and_the_next_one_is_forked_by_another(b: Bench) -> None:
    with agent(b, mode="deaf") as process:
        heard(b, AgentReady)
        for index in range(2):
            b.server.send("agent:b", Launch("generator/0", index))
            heard(b, Ready)
        forks = json.loads(heard(b, Note).text)["parent"]
        os.kill(forks, signal.SIGKILL)
        exits = [heard(b, Exited) for _ in range(2)]
        assert sorted((one.rank, one.pid, one.signal, one.forks) for one in exits) == [
            (rank, forks, signal.SIGKILL, True) for rank in range(2)
        ]
        until(lambda: processes_of(b.keys.server.run) == [process.pid])
        b.server.send("agent:b", Launch("generator/0", 2))
        assert heard(b, Ready).rank == 2


def test_a_rank_that_cannot_be_forked_is_told_of_with_what_was_said_instead(b: Bench, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ImportError('libtorch_cpu.so: cannot allocate memory')\n")
    with agent(b, str(broken)) as process:
        heard(b, AgentReady)
        for index in range(2):  # the second rank finds that the fork server has ended
            b.server.send("agent:b", Launch("generator/0", index))
            exited = heard(b, Exited)
            assert (exited.replica, exited.rank, exited.status) == ("generator/0", index, 1)
            assert exited.tail.endswith("ImportError: libtorch_cpu.so: cannot allocate memory")
        assert process.poll() is None


NO_MEMORY = """
def fork():
    raise OSError(12, "Cannot allocate memory")
os.fork = fork
"""
KILLED_AT_BIRTH = "os.setsid = lambda: os.kill(os.getpid(), 9)"
TOLD_AT_BIRTH = """
from penstock.runtime.control.signals import STOPS, ignore_stop_signals
ignore_stop_signals()
def told(begin=os.setsid):
    for number in STOPS:
        os.kill(os.getpid(), number)
    begin()
os.setsid = told
"""


def odd(folder: Path, changes: str) -> str:
    """Write a program that forks fake ranks after these `changes` to its modules."""
    path = folder / "odd.py"
    begin = f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import fake_rank"
    path.write_text(f"{begin}\n{changes}\nfake_rank.serve_forks(fake_rank.main)\n")
    return str(path)


def test_a_rank_that_is_killed_at_its_birth_is_told_of(b: Bench, tmp_path: Path) -> None:
    with agent(b, odd(tmp_path, KILLED_AT_BIRTH)):
        heard(b, AgentReady)
        for index in range(2):
            b.server.send("agent:b", Launch("generator/0", index))
            exited = heard(b, Exited)
            assert (exited.replica, exited.rank, exited.signal) == ("generator/0", index, 9)
            assert exited.pid > 0


def test_a_rank_that_an_engine_tells_to_end_at_its_birth_lives(b: Bench, tmp_path: Path) -> None:
    with agent(b, odd(tmp_path, TOLD_AT_BIRTH)):
        heard(b, AgentReady)
        b.server.send("agent:b", Launch("generator/0", 0))
        assert heard(b, Ready).replica == "generator/0"


def test_a_host_without_memory_for_a_rank_says_so(b: Bench, tmp_path: Path) -> None:
    with agent(b, odd(tmp_path, NO_MEMORY)):
        heard(b, AgentReady)
        b.server.send("agent:b", Launch("generator/0", 0))
        exited = heard(b, Exited)
        assert (exited.replica, exited.rank, exited.status) == ("generator/0", 0, 1)
        assert "Cannot allocate memory" in exited.tail


@contextmanager
def real_agent(b: Bench, grace: float = 60.0) -> Iterator["subprocess.Popen[bytes]"]:
    """The agent of host "b" with real ranks, after it has joined."""
    replace(b.join("b"), grace=grace).write(b.folder / "b.json")
    command = [sys.executable, "-m", "penstock.runtime.control.agent", str(b.folder / "b.json")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        heard(b, AgentReady)
        b.heard.clear()
        yield process
    finally:
        process.kill()
        process.wait()


def assert_ends(b: Bench, process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """The agent reports the signal that ends it, and ends."""
    note = heard(b, Note)
    assert note.level == "error"
    assert number.name in note.text
    until(lambda: b.hear() is not None and process.poll() is not None)
    assert process.returncode == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_agent_that_is_told_to_end_says_so_before_its_ranks_deaths(tmp_path: Path, number: signal.Signals) -> None:
    with bench(tmp_path, ranks=ON_B) as b, real_agent(b) as process:
        process.send_signal(number)
        assert_ends(b, process, number)


@pytest.mark.parametrize("number", PREEMPTIONS)
def test_an_agent_whose_host_is_taken_away_says_so_and_its_ranks_live_until_a_goodbye(
    tmp_path: Path, number: signal.Signals
) -> None:
    with bench(tmp_path, ranks=ON_B) as b, real_agent(b) as process:
        b.server.send("agent:b", Launch("generator/0", 0))
        heard(b, Hello)
        process.send_signal(number)
        assert heard(b, Leaving) == Leaving("b", 60.0)
        ranks = [pid for pid in processes_of(b.keys.server.run) if pid != process.pid]
        for pid in ranks:  # a cluster manager may signal all processes of a host
            os.kill(pid, number)
        before = b.server.tracker.last("agent:b")
        until(lambda: b.hear() is not None and b.server.tracker.last("agent:b") > before + INTERVAL)
        assert [message for _, message in b.heard if isinstance(message, Exited | Note)] == []
        for peer in b.server.peers:
            b.server.send(peer, Goodbye("stopped"))
        assert process.wait(60) == 0
        assert processes_of(b.keys.server.run) == []


def test_an_agent_ends_with_its_grace_and_at_a_second_sigterm(tmp_path: Path) -> None:
    with bench(tmp_path, ranks=ON_B) as b, real_agent(b, grace=0.2) as process:
        process.send_signal(signal.SIGUSR1)
        assert heard(b, Leaving).grace == 0.2
        assert_ends(b, process, signal.SIGUSR1)
    (tmp_path / "again").mkdir()
    with bench(tmp_path / "again", ranks=ON_B) as b, real_agent(b) as process:
        process.send_signal(signal.SIGTERM)
        heard(b, Leaving)
        sleep(2 * ONE_SIGNAL_S)
        process.send_signal(signal.SIGTERM)
        assert_ends(b, process, signal.SIGTERM)


def test_of_what_a_rank_prints_without_end_the_newest_is_kept(b: Bench) -> None:
    with agent(b, mode="loud"):
        heard(b, AgentReady)
        b.server.send("agent:b", Launch("generator/0", 0))
        heard(b, Ready)
        logs = [b.folder / "logs" / f"generator-0-0.{kind}" for kind in ("out", "err")]
        until(lambda: all("[penstock]" in log.read_text() for log in logs))
        assert not any("line 0\n" in log.read_text() for log in logs)
        # It is trimmed at its end, too: the rank may have printed more since the agent last looked.
        until(lambda: all(log.stat().st_size > LOG_BYTES for log in logs))
        b.server.send("agent:b", End("generator/0", 0))
        heard(b, Exited)
        assert all(log.stat().st_size < LOG_BYTES for log in logs)


def test_a_rank_that_is_killed_is_told_of_with_the_signal_alone_whatever_it_had_printed(b: Bench) -> None:
    with agent(b):
        heard(b, AgentReady)
        b.server.send("agent:b", Launch("generator/0", 0))
        pid = heard(b, Ready).pid
        os.kill(pid, signal.SIGKILL)
        exited = heard(b, Exited)
        assert (exited.pid, exited.status, exited.signal) == (pid, 0, 9)
        assert exited.reason == f"killed by SIGKILL (pid {pid})"


def test_a_rank_that_raised_before_it_was_killed_is_told_of_with_its_traceback(b: Bench) -> None:
    with agent(b, mode="raised"):
        heard(b, AgentReady)
        b.server.send("agent:b", Launch("generator/0", 0))
        os.kill(heard(b, Ready).pid, signal.SIGKILL)
        assert heard(b, Exited).tail.splitlines()[-1] == "MemoryError: no room for a model"


# An agent that sees one more process killed by the kernel each time it asks.
SHORT_OF_MEMORY = f"""
from itertools import count
from runpy import run_path
from penstock.runtime.control import agent

agent.memory_kills = count(5).__next__
run_path({AGENT!r}, run_name="__main__")
"""


def test_a_rank_that_is_killed_where_memory_runs_out_is_told_of_with_the_lack(
    b: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = b.folder / "agent.py"
    program.write_text(SHORT_OF_MEMORY)
    monkeypatch.setitem(globals(), "AGENT", str(program))
    with agent(b):
        heard(b, AgentReady)
        b.server.send("agent:b", Launch("generator/0", 0))
        pid = heard(b, Ready).pid
        os.kill(pid, signal.SIGKILL)
        _, told = heard(b, Exited).reason.split("\n", 1)
        assert told.startswith("given ")
        assert "needed more: its OOM killer has ended 1 process " in told


@pytest.mark.parametrize(("mode", "leave"), [("", 60.0), ("deaf", 0.5), ("family", 0.5)])
def test_a_goodbye_ends_the_agent_and_its_ranks_willing_or_not(b: Bench, mode: str, leave: float) -> None:
    with agent(b, leave=leave, mode=mode) as process:
        heard(b, AgentReady)
        b.server.send("agent:b", Launch("generator/0", 0))
        heard(b, Ready)
        for peer in b.server.peers:
            b.server.send(peer, Goodbye("done"))
        assert process.wait(60) == 0
        if mode == "family":  # a rank's child is killed with it, and nobody waits for its end
            until(lambda: not processes_of(b.keys.server.run))
        assert processes_of(b.keys.server.run) == []
        assert heard(b, Exited).signal == (9 if mode else 0)


def test_an_agent_whose_controller_is_gone_ends_its_ranks_and_says_so(b: Bench) -> None:
    with agent(b, mode="deaf") as process:
        heard(b, AgentReady)
        b.server.send("agent:b", Launch("generator/0", 0))
        heard(b, Ready)
        b.server.close()
        assert process.wait(30) == 1
        assert process.stderr is not None
        assert b"is gone" in process.stderr.read()
        assert processes_of(b.keys.server.run) == []


def test_ranks_die_with_their_agent_and_leave_no_segment(b: Bench) -> None:
    with agent(b, mode="deaf") as process:
        heard(b, AgentReady)
        for index in range(2):
            b.server.send("agent:b", Launch("generator/0", index))
            heard(b, Ready)
        assert len(processes_of(b.keys.server.run)) == 4  # with the agent and the fork server
        segments = [*SHM.glob(f"penstock-{b.keys.server.run}-*")]
        assert segments
        process.kill()
        until(lambda: processes_of(b.keys.server.run) == [])
        # A segment that is locked for a moment is being removed by another run's agent.
        until(lambda: not any(each.exists() for each in segments))


def test_a_live_agent_is_not_late(b: Bench) -> None:
    with agent(b):
        heard(b, AgentReady)
        before = b.server.tracker.last("agent:b")
        until(lambda: b.hear() is not None and b.server.tracker.last("agent:b") > before)


def test_an_agent_that_has_no_run_folder_says_what_it_needs(
    b: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.json"
    replace(b.join("b"), folder="/no/such/run").write(path)
    assert serve(path) == 2
    said = capsys.readouterr().err
    assert said.startswith("penstock agent: host b has no /no/such/run: needed a file system that the hosts share, or ")
    assert "(--folder)" in said
    assert not b.hear()  # it has not joined


@pytest.mark.parametrize("there", ["no place", "a file", "a file as its logs"])
def test_an_agent_that_cannot_make_its_own_folder_says_which(
    b: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str
) -> None:
    path, own = tmp_path / "b.json", Path("/proc/nope") if there == "no place" else tmp_path / "own"
    b.join("b").write(path)
    if there == "a file":
        own.touch()
    if there == "a file as its logs":
        own.mkdir()
        (own / "logs").touch()
    assert serve(path, own) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"penstock agent: given --folder {own}: ")
    assert said.endswith("; needed a folder that can be made and written to\n")


def test_an_agent_whose_folder_for_sockets_is_anothers_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoints, "private_folder", lambda temporary: private_folder(tmp_path))
    (tmp_path / f"penstock-{os.geteuid()}").mkdir(mode=0o755)
    with bench(tmp_path, "tcp://127.0.0.1:0", ranks=ON_B) as b:
        b.join("b").write(tmp_path / "b.json")
        assert serve(tmp_path / "b.json", tmp_path / ("x" * 120)) == 1
    assert capsys.readouterr().err.startswith(f"penstock agent: {tmp_path}/penstock-{os.geteuid()}: given owner ")


def test_an_agent_whose_controller_does_not_take_what_it_is_told_ends_and_says_so(
    b: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The send queue holds one message, its Hello. Later messages would be lost, and nobody would know."""
    monkeypatch.setitem(sockets._OPTIONS, zmq.SNDHWM, 1)
    monkeypatch.setattr(sockets, "JOIN_S", 3.0)
    join = replace(b.join("b"), endpoint=f"ipc://{b.folder}/nobody.sock")
    join.write(b.folder / "b.json")
    assert serve(b.folder / "b.json") == 1
    assert "the send queue is full" in capsys.readouterr().err


def test_an_agent_with_another_key_is_refused_and_says_so(tmp_path: Path) -> None:
    with bench(tmp_path, "tcp://127.0.0.1:0") as b, agent(b, join=stranger(b.join("b"))) as process:
        until(lambda: b.hear() == [] and process.poll() is not None)
        assert process.returncode == 1
        assert process.stderr is not None
        assert b"does not know the key of host 'b'" in process.stderr.read()
        assert b.server.counts["refused"] >= 1


# A fork server must be safe to fork from; the tests above are about the ranks.


MODULES = ("penstock.nodes.policy", "penstock.nodes.generate", "penstock.nodes.learn.update", "penstock.nodes.score")

SCRIPT = """
import importlib, json, os, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
import torch
print(json.dumps({"threads": len(os.listdir("/proc/self/task")), "cuda": torch.cuda.is_initialized()}))
"""


def test_what_ranks_need_starts_no_thread_and_touches_no_device_when_it_is_imported() -> None:
    command, environment = [sys.executable, "-c", SCRIPT, NEEDED, *MODULES], {**os.environ, **ALONE}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    assert json.loads(done.stdout) == {"threads": 1, "cuda": False}


# Children end with their parent and leave nothing behind.


SLEEP = ("-c", "import time; time.sleep(1000)")
TETHERED = "from penstock.runtime.control.process import die_with_parent; die_with_parent()\n"


def test_a_child_dies_with_its_parent() -> None:
    run = f"t{os.getpid()}a"
    parent = (
        "import sys, time\n"
        "from penstock.runtime.control.process import start\n"
        f"start(['-c', {TETHERED + 'import time; time.sleep(1000)'!r}], {run!r})\n"
        "print('started', flush=True)\n"
        "time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        until(lambda: len(processes_of(run)) == 1)
        process.kill()
    until(lambda: not processes_of(run))


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    environment = {**os.environ, PARENT: "1000000000"}
    child = subprocess.run([sys.executable, "-c", TETHERED + "print('alive')"], env=environment, capture_output=True)
    assert (child.returncode, child.stdout) == (1, b"")


def test_a_process_that_was_not_started_here_is_not_tied_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT, raising=False)
    die_with_parent()
    reader, writer = os.pipe()
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_killing_a_child_ends_what_it_has_started() -> None:
    run = f"t{os.getpid()}b"
    child = start(["-c", "import subprocess; subprocess.run(['sleep', '1000'])"], run)
    until(lambda: len(processes_of(run)) == 2)
    kill(child)
    child.wait()
    until(lambda: not processes_of(run))
    kill(child)  # it has ended: its pid may be another process's now


def test_the_sweep_finds_what_left_its_session_and_spares_other_runs() -> None:
    run, other = f"t{os.getpid()}c", f"t{os.getpid()}cc"
    leaver = start(["-c", "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"], run)
    spared = start(SLEEP, other)
    until(lambda: len(processes_of(other)) == 1)
    leaver.wait()
    until(lambda: len(processes_of(run)) == 1)
    assert sweep_processes(run) == []
    assert processes_of(other) == [spared.pid]
    kill(spared)
    spared.wait()


def test_an_exit_is_described_by_signal_or_status() -> None:
    died = start(["-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], "t1")
    failed = start(["-c", "raise SystemExit(3)"], "t1")
    died.wait()
    failed.wait()
    assert describe_exit(died) == f"killed by {signal.Signals.SIGSEGV.name}"
    assert describe_exit(failed) == "exit status 3"


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "a.err"
    assert tail(log) == ""
    log.write_bytes(b"first\n" + b"\xff long" * 2000 + b"\n" + b"".join(b"line %d\n" % k for k in range(20)))
    assert tail(log).splitlines() == [f"line {k}" for k in range(8, 20)]


def test_a_log_that_is_too_long_keeps_its_newest_lines_and_says_so(tmp_path: Path) -> None:
    path, lines = tmp_path / "log", [f"line {number}" for number in range(10_000)]
    path.write_text("\n".join([*lines, ""]))
    size = path.stat().st_size
    keep_newest(path, size)
    assert path.stat().st_size == size
    with path.open("a") as rank:
        keep_newest(path, 10_000)
        rank.write("what it goes on to say\n")
    first, *kept, last = path.read_text().splitlines()
    assert first.startswith("[penstock]")
    assert (kept, last) == (lines[-len(kept) :], "what it goes on to say")
    assert 4_900 < sum(len(line) + 1 for line in kept) <= 5_000
    keep_newest(tmp_path / "none", 10_000)  # a rank may have no log yet


def test_a_line_that_is_no_json_object_is_none() -> None:
    assert read_line(b'{"type": "x"}') == {"type": "x"}
    assert [read_line(line) for line in (b"hello", b"3", b"[1]", b"\xff", b"")] == [None] * 5


# Freed memory stays with the process.


_WORK = """
import ctypes, resource, threading, torch
from statistics import median
from penstock.runtime.control.process import keep_freed_memory
if {keep}:
    keep_freed_memory()
def work():
    for _ in range(5):
        [torch.empty(2_000_000).fill_(1.0) for _ in range(8)]
def in_a_thread():
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    in_a_thread()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would be few faults
for _ in range(6):  # in which a heap grows to what its threads take at once
    faults()
print(median(faults() for _ in range(9)))  # it may still grow in some of them, or be kept by chance
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_memory_that_is_used_again_is_not_faulted_in_again() -> None:
    faults = {
        keep: float(subprocess.check_output([sys.executable, "-c", _WORK.format(keep=keep)], timeout=300))
        for keep in (True, False)
    }
    assert 10 * faults[True] < faults[False], faults


_HUGE = """
import ctypes, re
from pathlib import Path
ctypes.CDLL(None).mallopt(-3, 32 << 20)  # as `keep_freed_memory` does
taken = bytearray(24 << 20)
print(int(re.search(r"AnonHugePages:\\s+(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1]))
"""
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not _PAGES.exists() or "[never]" in _PAGES.read_text(), reason="a kernel without huge pages")
@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="a C library without huge pages")
def test_what_ranks_allocate_has_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def huge_kb() -> int:
        child = start(["-c", _HUGE], "t1", environment=huge_pages(), stdout=subprocess.PIPE)
        found, _ = child.communicate(timeout=60)
        return int(found)

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert huge_kb() > 16 << 10
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
    assert huge_pages()["GLIBC_TUNABLES"].startswith("glibc.malloc.tcache_count=7:")
    assert huge_kb() > 16 << 10
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert huge_pages() == {}
    assert huge_kb() == 0 or "[always]" in _PAGES.read_text()


def test_all_that_asks_to_stop_calls_the_act_and_is_given_back() -> None:
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in STOPS}
    with on_stop(lambda number, frame: heard.append(number)):
        for number in STOPS:
            signal.raise_signal(number)
    assert heard == list(STOPS)
    assert {number: signal.getsignal(number) for number in STOPS} == before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_stop(interrupt):
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_polite_kill_can_be_like_ctrl_c_or_come_too_late() -> None:
    with pytest.raises(Preempted), on_stop(interrupt, (signal.SIGTERM,)):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), on_stop(interrupt):
        signal.raise_signal(signal.SIGINT)
    with on_stop(carry_on):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "after", "raised"),
    [(signal.SIGTERM, signal.SIGHUP, Preempted), (signal.SIGINT, signal.SIGTERM, KeyboardInterrupt)],
)
def test_an_interrupt_waits_until_what_is_imported_is_imported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    after: signal.Signals,
    raised: type[BaseException],
) -> None:
    """Of two interrupts during the import, the first one counts."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "interrupted.py").write_text(f"""import os, time
os.kill(os.getpid(), {number:d})
os.kill(os.getpid(), {after:d})
time.sleep(0.1)  # the interrupt comes again, and waits again
done = True
""")
    found = []

    def interrupted() -> None:
        found.append(importlib.import_module("interrupted").done)
        signal.sigtimedwait((), 60.0)  # the interrupt comes here

    with pytest.raises(raised) as told, on_stop(interrupt):
        interrupted()
    sys.modules.pop("interrupted")
    assert (type(told.value), found) == (raised, [True])


def test_what_has_asked_for_the_end_is_handed_on_and_a_child_that_hears_nothing_yet_ends_as_asked() -> None:
    stop_request = StopRequest()
    stop_request.hear(signal.SIGTERM)
    assert (
        wait_handing_on(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]), stop_request)
        == PREEMPTED
    )


LEAVING = """
import multiprocessing, os, signal, subprocess, sys, time
from penstock.runtime.control.signals import STOPS, fork_leaving_end, ignore_stop_signals
ignore_stop_signals()
if "as a rank" in sys.argv and (rank := fork_leaving_end()):
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]))
for number in STOPS:
    os.kill(os.getpid(), number)
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
forked.start()
started = subprocess.Popen(["sleep", "1000"])
forked.terminate()
started.terminate()
forked.join()
print(forked.exitcode, started.wait())
"""


@pytest.mark.parametrize("whose", ["its own", "as a rank"])
def test_a_process_whose_end_its_parent_decides_hears_no_signal_and_what_it_starts_does(whose: str) -> None:
    command = [sys.executable, "-c", LEAVING, whose]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (found.stdout.split(), found.stderr) == (["-15", "-15"], "")


def test_a_pipe_without_a_reader_is_told_from_one_with() -> None:
    read, write = os.pipe()
    assert not output_closed(write)
    os.close(read)
    assert output_closed(write)
    os.close(write)


def test_a_terminal_that_is_gone_is_told_from_one_that_is_there() -> None:
    master, slave = pty.openpty()
    assert not output_closed(slave)
    os.close(master)
    assert output_closed(slave)
    os.close(slave)


def test_a_display_is_lost_once_and_still_hears_all() -> None:
    heard: list[dict[str, Any]] = []
    lost: list[int] = []

    def tell(line: dict[str, Any]) -> None:
        heard.append(line)
        raise OSError(errno.EIO, "the terminal is gone")

    told = stop_if_output_closes(tell, lambda: lost.append(1))
    for number in range(3):
        told({"number": number})
    assert (len(heard), len(lost)) == (3, 1)
