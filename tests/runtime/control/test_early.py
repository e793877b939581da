"""Processes started before a run exists are used by the run, or end."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.runtime.cli.tracing import ask_child
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.early import Early
from penstock.runtime.control.launcher import Launcher
from penstock.runtime.control.process import RUN, processes_of

from .fake_launch import HERE
from .sockets import until

pytestmark = pytest.mark.timeout(300)
CONTROLLER, AGENT = (str(HERE / "fake_controller.py"),), (str(HERE / "fake_agent.py"),)
LOCAL = Cluster(hosts=(Host(name="local", cores=1),))
FORKS = 3
"""The controller, the agent, and the fork server."""


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[Early]:
    for name, value in {"FAKE_CONTROLLER": "done", "FAKE_HOSTS": "local"}.items():
        monkeypatch.setenv(name, value)
    made = Early()
    yield made
    made.close()


def begun(early: Early) -> list[int]:
    early.begin([], AGENT, CONTROLLER)
    found: list[int] = until(lambda: len(found := processes_of(early.run)) == FORKS and found)
    return found


def words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def ended(pid: int) -> bool:
    """True also if its parent has not waited for it yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def launched(early: Early, folder: Path, cluster: Cluster = LOCAL) -> list[dict[str, Any]]:
    """Return the lines of a run that succeeds and leaves no process."""
    lines: list[dict[str, Any]] = []
    launcher = Launcher(
        folder, early.run, cluster, lines.append, grace=60.0, controller=CONTROLLER, agent=AGENT, early=early
    )
    assert launcher.run() == 0, lines
    assert processes_of(early.run) == []
    return lines


def ready(lines: list[dict[str, Any]]) -> set[int]:
    """Return the pids of the controller, the agents and the ranks."""
    (said,) = (line for line in lines if line["kind"] == "ready")
    return {said["controller"], *said["pids"].values()}


def test_a_run_takes_the_processes_that_wait_for_it(early: Early, tmp_path: Path) -> None:
    waiting = begun(early)
    assert len(ready(launched(early, tmp_path)) & set(waiting)) == 2  # the third one is the fork server
    assert "said by an early agent" in (tmp_path / "logs" / "agent-local.err").read_text()
    assert "said by a rank" in (tmp_path / "logs" / "local-pool-0-0.err").read_text()


def asked(early: Early, word: str, seconds: float, stdout: Path) -> tuple[int | None, dict[str, Any]]:
    """Return the exit status and output of a process forked before there is a run; its stdout is a file."""
    own = os.dup(1)
    with stdout.open("w") as file, os.fdopen(os.memfd_create("paper"), "r+") as paper:
        os.dup2(file.fileno(), 1)
        try:
            answer = early.ask("fake_rank:asked", [word], paper.fileno())
        finally:
            os.dup2(own, 1)
            os.close(own)
        status = answer(seconds)
        paper.seek(0)
        return status, json.loads(paper.read() or "{}")


def test_what_forks_ranks_forks_what_is_asked_for_before_a_run(early: Early, tmp_path: Path) -> None:
    begun(early)
    status, found = asked(early, "a word", 60.0, tmp_path / "stdout")
    assert (status, (tmp_path / "stdout").read_text()) == (7, "a word\n")
    assert found["environment"] == {**os.environ, RUN: early.run}  # the variable by which its children are found
    assert "fake_rank.py" in words(found["parent"])
    assert ready(launched(early, tmp_path))


def test_whoever_is_asked_for_ends_with_those_that_nobody_takes(early: Early, tmp_path: Path) -> None:
    waiting = begun(early)
    with pytest.raises(TimeoutError):
        asked(early, "wait", 0.5, tmp_path / "stdout")
    until(lambda: len(processes_of(early.run)) > len(waiting))
    early.close()
    assert processes_of(early.run) == []


def test_a_child_is_started_where_nothing_can_fork_it(early: Early) -> None:
    early.begin([], ("-c", "pass"), CONTROLLER)
    assert ask_child("operator:add", 1, 2, what="X", early=lambda: early) == 3


def test_a_child_of_a_command_is_forked_by_what_forks_ranks(early: Early) -> None:
    early.begin([])
    assert ask_child("os:getppid", what="X", early=lambda: early) in processes_of(early.run)


def test_a_child_whose_forker_dies_with_it_is_started_with_the_same_question(
    early: Early, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has read its question when the fork server dies."""
    (tmp_path / "deadly.py").write_text(
        "import os, signal\n"
        "def answer(file, word):\n"
        "    if not os.path.exists(file):\n"
        "        open(file, 'w').close()\n"
        "        os.kill(os.getppid(), signal.SIGKILL)\n"
        "        signal.pause()\n"
        "    return word\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    early.begin([])
    given = str(tmp_path / "once"), "a word"
    assert ask_child("deadly:answer", *given, what="X", early=lambda: early) == "a word"
    assert (tmp_path / "once").exists()


def test_what_a_child_has_started_ends_with_those_that_nobody_takes(early: Early) -> None:
    early.begin([])
    ask_child("os:system", "sleep 1000 &", what="X", early=lambda: early)
    # The shell that starts it ends at once. The child may be in the middle of exec, where it shows no environment.
    until(lambda: any(words(pid).startswith("sleep") for pid in processes_of(early.run)))
    early.close()
    assert processes_of(early.run) == []


def test_those_that_nobody_takes_end_with_what_they_have_started(early: Early) -> None:
    begun(early)
    early.close()
    assert processes_of(early.run) == []


def test_one_at_whose_start_an_interrupt_came_ends_too(early: Early, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        early.begin([], AGENT, CONTROLLER)
    early.close()
    assert processes_of(early.run) == []


def test_those_that_have_ended_are_started_again(early: Early, tmp_path: Path) -> None:
    for pid in (pids := begun(early)):
        os.kill(pid, signal.SIGKILL)
    until(lambda: all(ended(pid) for pid in pids))
    assert ready(launched(early, tmp_path))


def test_what_was_to_fork_ranks_and_has_ended_is_started_again(early: Early, tmp_path: Path) -> None:
    begun(early)
    # A process just forked still shows its parent's command line.
    (forks,) = until(lambda: [pid for pid in processes_of(early.run) if "fake_rank.py" in words(pid)])
    os.kill(forks, signal.SIGKILL)
    until(lambda: ended(forks))
    assert ready(launched(early, tmp_path))
