"""A node that raises is named with its group and traceback. It fails the run, or is counted as failed; never a zero."""

from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.control.run_config import RunOptions

from .replaying import replayed
from .running import (
    FAULTS,
    Running,
    assert_equal_bits,
    final_state,
    make_run,
    rows,
    run_here,
    run_to_end,
    status_here,
    summary,
)

pytestmark = pytest.mark.timeout(400)
UPDATES, BATCH = 4, 3


def flags(**others: Any) -> RunOptions:
    return RunOptions(updates=UPDATES, batch=BATCH, slots=16, deadline=60.0, **others)


@pytest.mark.parametrize(("node", "firing"), [("generate", 4), ("score", 4), ("update", 1)])
def test_a_node_that_raises_fails_the_run(tmp_path: Path, node: str, firing: int) -> None:
    folder = make_run(tmp_path / "r", f"{FAULTS}raises", {node: firing}, flags())
    assert status_here(folder)[0] == "failed"
    error = summary(folder)["error"]
    assert f"FakeError: failing_{node}[{firing}] was told to raise" in error
    assert "programs_for_gates" in error  # the traceback, with the file and line that raised


def test_a_reward_function_that_raises_fails_the_run_with_its_traceback(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", f"{FAULTS}faulty_reward", {"bad": 5}, flags())
    with Running(folder) as running:
        assert running.wait() == 1
    for error in (running.errors, summary(folder)["error"]):
        assert "faulty_score[5] on scorer/0 rank 0" in error
        assert "in divide" in error
        assert "ZeroDivisionError" in error
    assert summary(folder)["status"] == "failed"
    assert summary(folder)["fates"].get("failed", 0) <= 1
    assert len(rows(folder)) < 2  # group 5 is of the second update, which never was


def test_a_checkpoint_that_cannot_be_written_fails_the_run_with_its_traceback(tmp_path: Path) -> None:
    """It is no node that raises; in one process, and by a rank."""
    folder = make_run(tmp_path / "here", f"{FAULTS}spoils", {"spoil": "state"}, RunOptions(updates=1, batch=2))
    status, lines = status_here(folder)
    assert (status, summary(folder)["status"], summary(folder)["updates"]) == ("failed", "failed", 1)
    assert lines[-1]["kind"] == "error"
    for error in (summary(folder)["error"], lines[-1]["text"]):
        assert "in write_shard" in error
        assert "AttributeError: 'str' object" in error
    assert list((folder / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_a_full_disk_at_a_checkpoint_is_said_with_its_traceback_by_the_rank(tmp_path: Path) -> None:
    folder = make_run(
        tmp_path / "r", f"{FAULTS}spoils", {"spoil": "disk"}, RunOptions(updates=1, batch=2, deadline=60.0)
    )
    with Running(folder) as running:
        assert running.wait() == 1
    log = (folder / "logs" / "trainer-0-0.err").read_text()
    for error in (running.errors, summary(folder)["error"], log):
        assert "in write_shard" in error
        assert "StateError: " in error
        assert "File too large" in error
    assert "trainer/0 rank 0 failed at Save:" in running.errors
    assert summary(folder)["status"] == "failed"
    assert list((folder / "checkpoints").iterdir()) == []


def test_the_first_group_may_raise_as_well(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", f"{FAULTS}faulty_reward", {"bad": 0}, flags(retries=1))
    assert status_here(folder)[0] == "failed"
    assert "faulty_score[0]" in summary(folder)["error"]
    assert rows(folder) == []


@pytest.mark.parametrize("retries", [0, 2])
def test_a_group_that_is_replaced_is_counted_as_failed(tmp_path: Path, retries: int) -> None:
    used = flags(on_failure="replace", retries=retries)
    folder = make_run(tmp_path / "r", f"{FAULTS}faulty_reward", {"bad": 5}, used)
    status, _ = status_here(folder)
    assert status == "done", summary(folder)["error"]
    assert summary(folder)["fates"] == {"consumed": UPDATES * BATCH, "dropped": 0, "failed": 1}
    assert [row["groups"] for row in rows(folder)] == [BATCH] * UPDATES
    assert all(row["reward_mean"] != 0 for row in rows(folder))
    assert replayed(folder)[0].outcomes["failed"] == 1


def engine_flags(**others: Any) -> RunOptions:
    return flags(max_tokens=6, data="arithmetic", **others)


@pytest.mark.parametrize("bad", [1, 4])
def test_groups_of_a_step_that_raises_are_tried_again_to_the_same_bits(tmp_path: Path, bad: int) -> None:
    whole = make_run(tmp_path / "w", f"{FAULTS}faulty_steps", {}, engine_flags())
    folder = make_run(tmp_path / "r", f"{FAULTS}faulty_steps", {"bad": bad}, engine_flags(retries=1))
    assert_equal_bits(final_state(run_here(folder), UPDATES), final_state(run_here(whole), UPDATES))
    assert summary(folder)["fates"] == {"consumed": UPDATES * BATCH, "dropped": 0, "failed": 0}


def test_groups_of_a_step_that_raises_are_replaced_and_never_answered(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", f"{FAULTS}faulty_steps", {"bad": 2}, engine_flags(on_failure="replace"))
    fates = summary(run_here(folder))["fates"]
    assert fates["consumed"] == UPDATES * BATCH
    assert 1 <= fates["failed"] <= BATCH
    assert replayed(folder)[0].outcomes == fates


def test_a_rank_goes_on_after_a_step_that_raised(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", f"{FAULTS}faulty_steps", {"bad": 2, "lag": 1}, engine_flags(retries=1))
    assert summary(run_to_end(folder))["fates"] == {"consumed": UPDATES * BATCH, "dropped": 0, "failed": 0}
