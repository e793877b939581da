"""A rank that dies, stops or hangs while weights are half-way: the run ends by itself, and says who and what it was."""

import os
import signal
from pathlib import Path

import pytest

from penstock.runtime.control.run_config import RunOptions

from .running import HERE, Running, make_run, rows, run_to_end, summary

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
LARGE = f"{HERE / 'program_with_large_weights.py'}:large"
BATCH, AT = 4, 2
WAYS = ("", "messages")


def half_way(path: Path, way: str, deadline: float = 60.0) -> tuple[Path, Path]:
    """A run whose sender stops in the middle of version 2, and the file that says so."""
    mark = path / "half"
    flags = RunOptions(updates=100_000, batch=BATCH, slots=16, deadline=deadline, versions="pinned")
    return make_run(path / "r", LARGE, {"way": way, "mark": str(mark), "at": AT}, flags), mark


def until_half_way(running: Running, mark: Path) -> None:
    """And one more update has had its groups, which the generator made with the version before."""
    running.until(mark.exists, "half of version 2 was through")
    running.until_update(AT + 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pool", ["trainer", "generator"])
def test_a_rank_killed_while_weights_are_half_way_is_named_with_the_version(
    tmp_path: Path, way: str, pool: str
) -> None:
    folder, mark = half_way(tmp_path, way)
    with Running(folder) as running:
        (pid,) = running.until_ready()["pools"][pool]
        until_half_way(running, mark)
        os.kill(pid, signal.SIGKILL)
        mark.with_suffix(".go").touch()
        assert running.wait() == 1
    error = summary(folder)["error"]
    assert summary(folder)["cause"] == "rank-died"
    assert f"{pool}/0 rank 0 died: killed by SIGKILL (pid {pid})" in error
    assert f"version {AT} of policy>generator from trainer/0 to generator/0, which has {AT - 1}" in error


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pool", ["trainer", "generator"])
def test_a_rank_stopped_while_weights_are_half_way_is_named_within_the_deadline(
    tmp_path: Path, way: str, pool: str
) -> None:
    folder, mark = half_way(tmp_path, way, deadline=8.0)
    with Running(folder) as running:
        (pid,) = running.until_ready()["pools"][pool]
        until_half_way(running, mark)
        os.kill(pid, signal.SIGSTOP)
        mark.with_suffix(".go").touch()
        assert running.wait() == 1
    error = summary(folder)["error"]
    assert f"{pool}/0 rank 0" in error or "policy>generator from trainer/0 to generator/0: " in error
    assert pool == "generator" or "source rank 0" in error or "trainer/0 rank 0" in error
    assert f"version {AT}" in error or f"policy>generator {AT}" in error


@pytest.mark.parametrize("way", WAYS)
def test_a_transfer_that_stands_still_is_named_by_its_receiver(tmp_path: Path, way: str) -> None:
    """Both ranks are alive, and send heartbeats."""
    folder, mark = half_way(tmp_path, way, deadline=4.0)
    with Running(folder) as running:
        until_half_way(running, mark)
        assert running.wait() == 1
    error = summary(folder)["error"]
    assert "policy>generator" in error
    assert "trainer/0" in error
    assert "generator/0" in error
    assert len(rows(folder)) >= AT + 1


def test_weights_for_which_there_is_no_room_come_as_messages_and_the_user_is_told(tmp_path: Path) -> None:
    flags = RunOptions(updates=5, batch=BATCH, slots=16, deadline=60.0)
    folder = make_run(tmp_path / "r", LARGE, {"way": "no room"}, flags)
    with Running(folder) as running:
        assert running.wait() == 0, running.errors
    (note,) = [note for note in running.notes if "segment" in note]
    assert "generator.0.0.policy.generator: no room for segment" in note
    assert "of 33555456 bytes (/dev/shm: File too large, " in note
    assert "bytes free); weights come as messages" in note
    assert summary(folder)["warnings"] == [note]


def test_weights_that_fit_are_no_matter_for_a_warning(tmp_path: Path) -> None:
    folder = run_to_end(
        make_run(tmp_path / "r", LARGE, {}, RunOptions(updates=3, batch=BATCH, slots=16, deadline=60.0))
    )
    assert summary(folder)["warnings"] == []
