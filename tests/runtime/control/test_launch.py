"""However a run ends, its exit status is right, it says who died, and it leaves nothing behind."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest

from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control import launcher as launcher_module
from penstock.runtime.control import signals
from penstock.runtime.control.process import processes_of, start, sweep_processes
from penstock.runtime.record.checkpoints import begin_checkpoint, complete_checkpoint
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.tensor.shm import sweep
from tests.halt import until_it_stands

from .fake_launch import HERE, launcher
from .sockets import until

pytestmark = pytest.mark.timeout(300)
LOCAL = Cluster(hosts=(Host(name="local", cores=1),))
NUMBERS = count()
Line = dict[str, Any]


class Run:
    """A launched run of fakes; `when` maps a line's kind to a function called with each such line."""

    def __init__(
        self, folder: Path, mode: str, cluster: Cluster = LOCAL, grace: float = 60.0, **environment: str
    ) -> None:
        self.id = f"t{os.getpid()}n{next(NUMBERS)}"
        self.folder, self.lines = folder, list[Line]()
        self.when: dict[str, Callable[[Line], None]] = {}
        self.launcher = launcher(folder, self.id, mode, cluster, self._hear, grace, **environment)

    def _hear(self, line: Line) -> None:
        self.lines.append(line)
        if act := self.when.get(line["kind"]):
            act(line)

    def run(self) -> int:
        status = self.launcher.run()
        assert_nothing_is_left(self.folder, self.id)
        return status

    def said(self, kind: str) -> Line:
        return next(line for line in self.lines if line["kind"] == kind)

    def pid(self, name: str) -> int:
        return int(self.said("ready")["pids"][name])


def assert_nothing_is_left(folder: Path, run: str) -> None:
    assert processes_of(run) == []
    assert list(Path("/dev/shm").glob(f"penstock-{run}-*")) == []
    assert [p.name for p in folder.iterdir()] == ["logs"]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be suspended for seconds: only tests that shorten these deadlines may meet them."""
    monkeypatch.setattr(launcher_module, "LOST_S", 60.0)
    monkeypatch.setattr(signals, "ONE_SIGNAL_S", 60.0)


def signalling(number: int, times: int = 1) -> Callable[[Line], None]:
    """Send a signal to the launcher."""

    def act(line: Line) -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    return act


interrupt = signalling(signal.SIGINT)


def killing(name: str, number: int = signal.SIGKILL) -> Callable[[Line], None]:
    """Send a signal to the controller, an agent or a rank."""
    return lambda line: os.kill(line["controller"] if name == "controller" else line["pids"][name], number)


def test_a_run_that_is_done_ends_with_0_and_all_lines_are_handed_on(tmp_path: Path) -> None:
    before, run = signal.getsignal(signal.SIGINT), Run(tmp_path, "done")
    assert run.run() == 0
    assert [line["kind"] for line in run.lines] == ["note", "status", "row", "ready"]
    assert run.said("note")["text"] == "a library says hello"
    logs = {"agent-local.err", "controller.err", "local-pool-0-0.err", "local-pool-0-0.out", "ranks-local.err"}
    assert {path.name for path in (tmp_path / "logs").iterdir()} == logs
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_asks_the_controller_to_stop_and_ends_with_130(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait")
    run.when["ready"] = interrupt
    assert run.run() == 130
    assert run.said("told")["line"] == "stop"
    assert any("there is no checkpoint yet" in line.get("text", "") for line in run.lines)


@pytest.fixture
def written_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose grace period ends while its controller writes a checkpoint."""
    run, later = Run(tmp_path, "writing"), 0.0

    def over_the_grace(line: Line) -> None:
        nonlocal later
        later = run.launcher.grace + 10.0

    monkeypatch.setattr(launcher_module, "monotonic", lambda: monotonic() + later)
    run.when["writing"] = over_the_grace
    return run


def test_a_controller_that_is_writing_a_checkpoint_is_waited_for(written_late: Run) -> None:
    written_late.when["ready"] = interrupt
    assert written_late.run() == 130
    assert written_late.said("written")


def test_an_engine_waits_for_no_checkpoint_beyond_the_grace(written_late: Run) -> None:
    written_late.when["ready"] = signalling(signal.SIGTERM)
    assert written_late.run() == 75
    assert [line for line in written_late.lines if line["kind"] == "written"] == []


@pytest.mark.parametrize("number", signals.PREEMPTIONS)
def test_an_engine_that_takes_the_machine_is_told_from_the_user(tmp_path: Path, number: signal.Signals) -> None:
    run = Run(tmp_path, "wait")
    run.when["ready"] = signalling(number, times=3)
    assert run.run() == 75
    assert run.said("told")["line"] == f"preempt {number.name}"


def test_a_second_sigterm_ends_everything_at_once_and_the_status_is_still_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "ONE_SIGNAL_S", -1.0)
    run = Run(tmp_path, "deaf", grace=1000.0, FAKE_RANK="deaf")
    run.when["ready"] = signalling(signal.SIGTERM, times=2)
    assert run.run() == 75


def test_a_sigterm_that_follows_a_sigusr1_cuts_nothing_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ONE_SIGNAL_S", -1.0)
    run = Run(tmp_path, "wait")

    def both(line: Line) -> None:
        signalling(signal.SIGUSR1)(line)
        signalling(signal.SIGTERM)(line)

    run.when["ready"] = both
    assert run.run() == 75
    assert run.said("told")["line"] == "preempt SIGUSR1"


def test_the_user_who_was_first_is_not_taken_for_an_engine(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait")

    def both(line: Line) -> None:
        interrupt(line)
        signalling(signal.SIGTERM)(line)

    run.when["ready"] = both
    assert run.run() == 130


def test_an_engine_that_signals_all_processes_of_a_host_ends_none_of_them_before_its_time(tmp_path: Path) -> None:
    """Except ranks, which are fakes here. The controller survives."""
    run = Run(tmp_path, "wait")

    def all_at_once(line: Line) -> None:
        os.kill(line["controller"], signal.SIGTERM)
        signalling(signal.SIGTERM)(line)

    run.when["ready"] = all_at_once
    assert run.run() == 75
    assert run.said("told")["line"] == "preempt SIGTERM"


def test_ctrl_c_is_heard_while_the_controller_never_stops_talking(tmp_path: Path) -> None:
    run = Run(tmp_path, "flood")
    notes = count()

    def note(line: Line) -> None:
        run.lines.pop()
        if next(notes) == 20:
            interrupt(line)

    run.when["note"] = note
    assert run.run() == 130


def test_a_controller_that_is_held_up_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a file system that does not answer. It continues when it can."""
    run, pids = Run(tmp_path, "wait"), list[int]()

    def stop(line: Line) -> None:
        pids.append(line["controller"])
        os.kill(pids[0], signal.SIGSTOP)
        until_it_stands(pids[0])  # before that, the note would say that it hangs
        monkeypatch.setattr(launcher_module, "QUIET_S", 0.2)

    def go_on(line: Line) -> None:
        if pids and f"(process {pids[0]}) is stopped" in line["text"]:
            os.kill(pids[0], signal.SIGCONT)
            interrupt(line)

    run.when |= {"ready": stop, "note": go_on}
    assert run.run() == 130


@pytest.mark.parametrize("number", [signal.SIGSTOP, 0], ids=["stopped", "hung"])
def test_a_controller_that_is_silent_for_too_long_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = Run(tmp_path, "deaf", FAKE_RANK="deaf")

    def begin(line: Line) -> None:
        if number:
            os.kill(line["controller"], number)
            until_it_stands(line["controller"])
        monkeypatch.setattr(launcher_module, "QUIET_S", 0.2)  # only now: at its start it may wait for a disk

    def told(line: Line) -> None:
        if "not answered for 0.2 s" in line["text"]:
            run.launcher.deadline = 1.0

    run.when |= {"ready": begin, "note": told}
    assert run.run() == 1
    pid = run.said("ready")["controller"]
    notes = [line["text"] for line in run.lines if line["kind"] == "note" and f"(process {pid})" in line["text"]]
    assert len(notes) == 1
    error = run.said("error")
    assert error["code"] == "controller"
    assert f"(process {pid}) {'is stopped' if number else 'hangs'}" in error["text"]
    assert "not answered for 1 s" in error["text"]


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "LEAVE_S", 1000.0)
    run = Run(tmp_path, "deaf", grace=1000.0, FAKE_RANK="deaf")

    def twice(line: Line) -> None:
        interrupt(line)
        interrupt(line)

    run.when["ready"] = twice
    assert run.run() == 130


@pytest.mark.parametrize(
    ("act", "status"),
    [(interrupt, 130), (signalling(signal.SIGTERM), 75), (killing("agent:local"), 1)],
    ids=["user", "engine", "dead agent"],
)
def test_a_controller_that_does_not_heed_a_stop_or_a_dead_agent_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Line], None], status: int
) -> None:
    monkeypatch.setattr(launcher_module, "LOST_S", 0.3)
    run = Run(tmp_path, "deaf", grace=0.3, FAKE_RANK="deaf")
    run.when["ready"] = act
    assert run.run() == status


DEATHS = {
    "controller": ("controller", signal.SIGKILL, "the controller (pid 0) ended: killed by SIGKILL, last seen in"),
    "rank": ("local-pool/0", signal.SIGKILL, "local-pool/0 rank 0 died: killed by SIGKILL"),
    "rank that ends itself": ("local-pool/0", signal.SIGTERM, "local-pool/0 rank 0 died: "),
}


@pytest.mark.parametrize(("name", "number", "said"), DEATHS.values(), ids=DEATHS)
def test_a_death_ends_the_run_and_is_told_once_with_its_name(tmp_path: Path, name: str, number: int, said: str) -> None:
    run = Run(tmp_path, "deaf" if name == "controller" else "wait", FAKE_RANK="deaf" if name == "controller" else "")
    run.when["ready"] = killing(name, number)
    assert run.run() == 1
    (text,) = [line["text"] for line in run.lines if line["kind"] == "error"]
    assert text.startswith(said.replace("pid 0", f"pid {run.said('ready')['controller']}"))
    assert name != "controller" or "stage 'train', update 3 of 9; trainer at update[3]" in text


def test_a_dead_agent_is_named_to_the_controller_and_its_ranks_die(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait", FAKE_RANK="deaf")
    run.when["ready"] = killing("agent:local")
    assert run.run() == 1
    assert run.said("told")["line"] == "agent local 0 killed by SIGKILL"


def test_a_controller_that_raises_is_reported_with_the_end_of_its_traceback(tmp_path: Path) -> None:
    run = Run(tmp_path, "raise")
    assert run.run() == 1
    assert run.said("error")["text"].endswith("RuntimeError: no such graph")


def test_a_display_that_fails_leaves_nothing_behind_either(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait")

    def fail(line: Line) -> None:
        raise KeyError("a fault of the display")

    run.when["ready"] = fail
    with pytest.raises(KeyError):
        run.run()


@pytest.mark.parametrize("error", [BrokenPipeError("nobody reads"), OSError(errno.EIO, "the terminal is gone")])
def test_output_that_nobody_reads_is_a_wish_to_stop(tmp_path: Path, error: OSError) -> None:
    run = Run(tmp_path, "wait")

    def fail(line: Line) -> None:
        raise error

    run.when["ready"] = run.when["told"] = run.when["note"] = fail
    assert run.run() == 130
    assert run.said("told")["line"] == "stop stopped, since its output cannot be written"


def test_a_controller_hears_that_it_was_not_the_user_who_stopped_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "output_closed", lambda descriptor: descriptor == 1)
    run = Run(tmp_path, "wait")
    run.when["ready"] = interrupt
    assert run.run() == 130
    assert run.said("told")["line"] == "stop stopped, since its output was closed"


def test_a_terminal_that_closes_is_one_wish_of_the_user_however_often_it_says_so(tmp_path: Path) -> None:
    """If it counted as a second Ctrl-C, the controller would be killed before it could report the stop request."""
    run = Run(tmp_path, "wait")
    run.when["ready"] = signalling(signal.SIGHUP, times=3)
    assert run.run() == 130
    assert run.said("told")["line"] == "stop"


def test_a_stop_says_where_a_resume_would_begin(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    complete_checkpoint(folder, begin_checkpoint(folder, "r", 7), {}, {})
    run = Run(tmp_path, "wait")
    run.when["ready"] = interrupt
    assert run.launcher.run() == 130
    notes = [line["text"] for line in run.lines if line["kind"] == "note"]
    assert "the last checkpoint is that of update 7" in notes[-1]


def test_a_failure_during_a_stop_is_a_failure(tmp_path: Path) -> None:
    run = Run(tmp_path, "fail")
    run.when["ready"] = interrupt
    assert run.run() == 1
    assert run.said("error")["text"] == "the disk is full"


def test_two_agents_join_over_tcp_on_loopback_alone(tmp_path: Path) -> None:
    hosts = (Host(name="a", cores=1), Host(name="b", cores=1))
    run = Run(tmp_path, "wait", Cluster(hosts=hosts, bind="127.0.0.1:0"))
    listening: list[str] = []

    def look(line: Line) -> None:
        for pid in (line["controller"], *line["pids"].values()):
            found = psutil.Process(pid).net_connections("inet")
            listening.extend(c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN)
        interrupt(line)

    run.when["ready"] = look
    assert run.run() == 130
    assert sorted(run.said("ready")["pids"]) == ["a-pool/0", "agent:a", "agent:b", "b-pool/0"]
    assert listening == ["127.0.0.1"]


def test_an_external_agent_joins_with_the_file_that_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, "done", Cluster(hosts=(Host(name="a", cores=1), Host(name="b", cores=1, agent="external"))))
    agents: list[subprocess.Popen[bytes]] = []
    outside = f"{run.id}outside"
    run.when["external"] = lambda line: agents.append(start([str(HERE / "fake_agent.py"), line["join"]], outside))
    assert run.launcher.run() == 0
    assert run.said("external")["host"] == "b"
    assert agents[0].wait(60) == 0
    assert sweep_processes(outside) == []
    assert_nothing_is_left(tmp_path, run.id)


def test_a_port_in_use_is_a_failure_that_names_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        run = Run(tmp_path, "done", Cluster(hosts=(Host(name="a", cores=1),), bind=bind))
        assert run.run() == 1
    assert f"cannot listen on tcp://{bind}: the port is in use" in run.said("error")["text"]


def test_all_processes_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    run = f"t{os.getpid()}killed"
    command = [sys.executable, str(HERE / "fake_launch.py"), str(tmp_path), run, "deaf", "a", "b"]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while json.loads(process.stdout.readline())["kind"] != "ready":
                pass
            found = len(processes_of(run))
            process.kill()
        assert found == 7  # including the fork server of each agent
        until(lambda: processes_of(run) == [])
    finally:
        sweep_processes(run)
        sweep(run)
