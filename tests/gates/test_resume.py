"""A run that was stopped or killed and goes on ends with the bits of one that was left alone; no group counts twice."""

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.event_log import read_log
from penstock.runtime.record.folder import RunFolder, latest_checkpoint

from .plain import toy_loop
from .replaying import replayed
from .running import (
    FAULTS,
    Line,
    Running,
    assert_equal_bits,
    final_state,
    make_run,
    rows,
    run_here,
    run_to_end,
    segments_of,
    status_here,
    summary,
    with_updates,
)

pytestmark = pytest.mark.timeout(480)
ENDLESS, MORE, BATCH = 100_000, 10, 4
"""Updates of a run that is not to end before it is stopped, whatever holds up the test, and those after a resume."""
SLOW = {"generate_ms": 40.0, "score_ms": 2.0, "update_ms": 20.0, "sync_ms": 0.0, "jitter_ms": 20.0}


def toy_run(path: Path, lag: int, checkpoint_every: int = 0) -> Path:
    flags = RunOptions(
        updates=ENDLESS,
        batch=BATCH,
        slots=16,
        deadline=60.0,
        versions="pinned" if lag else "free",
        checkpoint_every=checkpoint_every,
    )
    return make_run(path, "toy", {"lag": lag, **SLOW}, flags)


def assert_whole(folder: Path, lag: int, updates: int) -> None:
    """The end of a run that nobody disturbed."""
    assert summary(folder)["status"] == "done"
    assert summary(folder)["fates"] == {"consumed": updates * BATCH, "dropped": 0, "failed": 0}
    assert [row["update"] for row in rows(folder)] == list(range(updates))
    assert_equal_bits(final_state(folder, updates), toy_loop(updates, BATCH, lag=lag))


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
def test_an_interrupted_run_goes_on_exactly(tmp_path: Path, lag: int) -> None:
    folder = toy_run(tmp_path / "r", lag)
    with Running(folder) as running:
        running.until_update(3)
        running.interrupt()
        assert running.wait() == 130
    done = summary(folder)
    assert done["status"] == "stopped"
    assert done["updates"] >= 3
    assert (folder / "checkpoints" / f"{done['updates']:08d}" / "cut.json").is_file()
    assert done["groups"] == done["updates"] * BATCH
    run_to_end(with_updates(folder, done["updates"] + MORE))
    assert_whole(folder, lag, done["updates"] + MORE)
    assert [segment.facts["cut"] for segment in read_log(folder / "events.log")] == [None, done["updates"]]
    assert [stage.stage for stage in replayed(folder)] == ["train", "train", "save"]


@pytest.mark.slow
def test_a_run_that_is_interrupted_while_it_starts_goes_on_from_nothing(tmp_path: Path) -> None:
    folder = toy_run(tmp_path / "r", 0)
    with Running(folder) as running:
        running.until_line(lambda line: True, "the controller listens, and nobody has joined it")
        running.interrupt()
        assert running.wait() == 130
    assert summary(folder)["status"] == "stopped"
    assert rows(folder) == []
    run_to_end(with_updates(folder, MORE))
    assert_whole(folder, 0, MORE)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_model_with_its_optimizer_goes_on_exactly(tmp_path: Path, lag: int) -> None:
    """In one process, interrupted twice, with a checkpoint in between."""
    flags = RunOptions(
        updates=8, batch=2, max_tokens=4, slots=16, data="arithmetic", versions="pinned", checkpoint_every=3
    )
    options = {"lag": lag, "samples": 4}
    whole, parted = (make_run(tmp_path / name, f"{FAULTS}digits", options, flags) for name in ("whole", "parted"))
    run_here(whole)
    for update in (1, 4):
        assert status_here(parted, partial(interrupt_at, update))[0] == "stopped"
        assert [row["update"] for row in rows(parted)] == list(range(summary(parted)["updates"]))
        assert summary(parted)["updates"] > update
    run_here(parted)
    assert_equal_bits(final_state(parted, 8), final_state(whole, 8))
    assert figures(parted) == figures(whole)
    assert summary(parted)["fates"] == summary(whole)["fates"] == {"consumed": 16, "dropped": 0, "failed": 0}
    replayed(parted)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_that_had_ended_and_is_extended_is_a_longer_one_at_lag_zero_only(tmp_path: Path, lag: int) -> None:
    """With a lag its last checkpoint has no older weights, so the next groups are sampled with the newest ones."""
    flags = RunOptions(updates=4, batch=BATCH, slots=16, versions="pinned")
    folder = make_run(tmp_path / "r", "toy", {"lag": lag, "generate_ms": 0.0, "update_ms": 0.0}, flags)
    run_here(with_updates(folder, 2))
    run_here(with_updates(folder, 4))
    assert [row["lag_max"] for row in rows(folder)] == ([0, 0, 0, 0] if lag == 0 else [0, 1, 0, 1])
    if lag == 0:
        assert_equal_bits(final_state(folder, 4), toy_loop(4, BATCH, lag=0))


def figures(folder: Path) -> list[dict[str, Any]]:
    """The rows without what is a time."""
    times = {"time_s", "seconds", "update_s", "sync_s", "generate_tokens_per_s", "train_tokens_per_s", "pools"}
    return [{name: value for name, value in row.items() if name not in times} for row in rows(folder)]


def interrupt_at(update: int, line: Line) -> None:
    if line.get("kind") == "row" and line["row"]["update"] == update:
        os.kill(os.getpid(), signal.SIGINT)


def test_a_run_folder_that_is_moved_meanwhile_ends_the_run_and_what_is_put_in_its_place_is_left_alone(
    tmp_path: Path,
) -> None:
    folder, moved = toy_run(tmp_path / "r", 0, checkpoint_every=1), tmp_path / "moved"

    def move(line: Line) -> None:
        if line.get("kind") == "row" and line["row"]["update"] == 3:
            folder.rename(moved)
            (folder / "checkpoints").mkdir(parents=True)
            (folder / "processes.json").write_text("another run's")

    with pytest.raises(RecordError, match=f"{folder}: the run folder was moved to {moved} while the run went on"):
        status_here(folder, move)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "processes.json"]
    assert list((folder / "checkpoints").iterdir()) == []
    cut = latest_checkpoint(RunFolder.open(moved))
    assert cut is not None
    assert not (moved / "processes.json").exists()
    run_here(with_updates(moved, cut.update + 2))
    assert_whole(moved, 0, cut.update + 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_run_whose_folder_goes_away_ends_with_that_and_makes_none_again(tmp_path: Path, how: str) -> None:
    folder, moved = toy_run(tmp_path / "r", 0, checkpoint_every=1), tmp_path / "moved"
    with Running(folder) as running:
        running.until_update(3)
        folder.rename(moved)
        if how == "removed":
            shutil.rmtree(moved, ignore_errors=True)
        assert running.wait() == 1
    assert f"{folder}: the run folder was " in running.errors  # moved, if it was looked for between the two steps
    assert not folder.exists()
    assert how == "removed" or moved.is_dir()
    assert not (moved / "keys").exists()


@pytest.mark.slow
def test_a_checkpoint_that_a_stop_cannot_wait_for_leaves_the_one_before(tmp_path: Path) -> None:
    flags = RunOptions(updates=ENDLESS, batch=2, slots=16, deadline=60.0, checkpoint_every=1)
    folder = make_run(tmp_path / "r", f"{FAULTS}exports_slowly", {}, flags)
    with Running(folder) as running:
        running.until(lambda: [*(folder / "checkpoints").glob("00000002-*/policy/half")], "the second one was begun")
        running.interrupt()
        assert running.wait() == 130
    cut = latest_checkpoint(RunFolder.open(folder))
    assert cut is not None
    assert cut.update == 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["00000001"]


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    folder = toy_run(tmp_path / "r", 0, checkpoint_every=2)
    with Running(folder) as running:
        running.until_update(5)
        assert segments_of(running.run, folder) != []
        running.kill()  # nobody is left to remove them
    cut = latest_checkpoint(RunFolder.open(folder))
    assert cut is not None
    assert cut.update in range(2, len(rows(folder)) + 1, 2)
    run_to_end(with_updates(folder, cut.update + MORE))
    assert segments_of(running.run, folder) == []  # a later start has, or one of another run
    assert_whole(folder, 0, cut.update + MORE)
    first, second = read_log(folder / "events.log")
    assert first.ended is None
    assert second.facts["cut"] == cut.update
    replayed(folder)
