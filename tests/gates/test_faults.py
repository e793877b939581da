"""Whatever dies, stops or hangs, a run ends by itself, says who it was, and leaves nothing behind."""

import os
import signal
from pathlib import Path
from time import sleep

import pytest

from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.control.sockets import SILENCE

from .running import FAULTS, ONE_HOST, Options, Running, make_run, rows, summary

pytestmark = pytest.mark.timeout(400)
LONG: Options = {"lag": 1, "generate_ms": 20.0, "score_ms": 2.0, "update_ms": 10.0, "sync_ms": 0.0}
POOLS = ("generator", "scorer", "trainer")


def long_run(path: Path, deadline: float = 60.0, cluster: Cluster = ONE_HOST) -> Path:
    """A run that does not end by itself while a test lasts."""
    flags = RunOptions(updates=100_000, batch=4, slots=16, deadline=deadline)
    return make_run(path, "toy", LONG, flags, cluster=cluster)


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_a_killed_rank_ends_the_run(tmp_path: Path, pool: str) -> None:
    folder = long_run(tmp_path / "r")
    with Running(folder) as running:
        pid = running.until_ready()["pools"][pool][0]
        running.until_update(1)
        os.kill(pid, signal.SIGKILL)
        assert running.wait() == 1
    assert f"{pool}/0 rank 0 died: killed by SIGKILL (pid {pid})" in running.errors
    assert (summary(folder)["status"], summary(folder)["cause"]) == ("failed", "rank-died")
    assert f"{pool}/0 rank 0 died" in summary(folder)["error"]


@pytest.mark.slow
def test_a_killed_agent_ends_the_run(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "r")
    with Running(folder) as running:
        running.until_update(1)
        os.kill(running.agent(), signal.SIGKILL)
        assert running.wait() == 1
    assert running.cause == summary(folder)["cause"] == "agent-died"
    for pool in POOLS:
        assert f"{pool}/0 rank 0" in running.errors
    assert summary(folder)["status"] == "failed"


@pytest.mark.slow
def test_a_killed_controller_ends_the_run(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "r")
    with Running(folder) as running:
        pid = running.until_ready()["controller"]
        running.until_update(1)
        os.kill(pid, signal.SIGKILL)
        assert running.wait() == 1
    assert running.cause == "controller"
    assert f"the controller (pid {pid}) ended: killed by SIGKILL" in running.errors


@pytest.mark.slow
def test_a_rank_killed_while_it_starts_ends_the_run(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "r")
    with Running(folder) as running:

        def ranks() -> list[int]:
            return running.pids(lambda process: process.name().endswith("/0.0"))

        os.kill(running.until(ranks, "a rank was started")[0], signal.SIGKILL)
        assert running.wait() == 1
    assert running.cause == "rank-died"
    assert "rank 0 died: killed by SIGKILL" in running.errors


@pytest.mark.slow
def test_a_stopped_rank_is_found_by_the_deadline_of_its_firing(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "r", deadline=3.0)
    with Running(folder) as running:
        pid = running.until_ready()["pools"]["trainer"][0]
        running.until_update(1)
        os.kill(pid, signal.SIGSTOP)
        assert running.wait() == 1
    assert "trainer/0" in running.errors  # in an update, or as the source of a transfer
    assert "rank 0" in running.errors
    assert running.cause in ("overdue", "transfer")


@pytest.mark.slow
def test_a_stopped_rank_is_found_by_its_silence(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "r", deadline=600.0)
    with Running(folder) as running:
        pid = running.until_ready()["pools"]["scorer"][0]
        running.until_update(1)
        os.kill(pid, signal.SIGSTOP)
        assert running.wait() == 1
    assert running.cause == "silent"
    assert "no sign of life from scorer/0 rank 0" in running.errors


@pytest.mark.slow
def test_a_stopped_agent_is_found_by_its_silence(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "r")
    with Running(folder) as running:
        running.until_update(1)
        os.kill(running.agent(), signal.SIGSTOP)
        assert running.wait() == 1
    assert running.cause == "silent"
    assert "no sign of life from the agent of host local" in running.errors


@pytest.mark.slow
@pytest.mark.parametrize("bind", ["", "127.0.0.1:0"])
def test_a_controller_that_was_stopped_goes_on_and_blames_no_process(tmp_path: Path, bind: str) -> None:
    cluster = Cluster(hosts=(Host(name="local", cores=2),), bind=bind)
    folder = long_run(tmp_path / "r", deadline=10.0, cluster=cluster)
    with Running(folder) as running:
        pid = running.until_ready()["controller"]
        running.until_update(1)
        os.kill(pid, signal.SIGSTOP)
        sleep(SILENCE + 5.0)
        os.kill(pid, signal.SIGCONT)
        running.until_update(len(rows(folder)) + 3)
        running.interrupt()
        assert running.wait() == 130, running.errors


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_ends_a_run_whose_trainer_hangs(tmp_path: Path, interrupts: int) -> None:
    mark = tmp_path / "mark"
    flags = RunOptions(updates=9, batch=2, slots=16)
    folder = make_run(tmp_path / "r", f"{FAULTS}stuck", {"mark": str(mark)}, flags)
    with Running(folder) as running:
        running.until(mark.exists, "the third update began")
        for _ in range(interrupts):
            running.interrupt()
        assert running.wait() == 130
    assert len(rows(folder)) == 2
    assert interrupts == 2 or "no checkpoint within" in summary(folder)["error"]


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "firing"), [("generator", 3), ("scorer", 3), ("trainer", 2)])
def test_a_hung_node_meets_its_deadline(tmp_path: Path, pool: str, firing: int) -> None:
    node = {"generator": "generate", "scorer": "score", "trainer": "update"}[pool]
    flags = RunOptions(updates=9, batch=2, slots=16, deadline=3.0)
    folder = make_run(tmp_path / "r", f"{FAULTS}hangs", {node: firing}, flags)
    with Running(folder) as running:
        assert running.wait() == 1
    assert running.cause == "overdue"
    assert f"no answer from {pool}/0 rank 0" in running.errors
    assert f"{pool}/0 rank 0 is at failing_{node}[{firing}]" in running.errors
    assert summary(folder)["status"] == "failed"
