"""A run that goes on after a stop or a kill ends with the bits of one that was not disturbed; no group counts twice.

A recorded run replays to the same commands; an edited log is refused, and the error names the record.
"""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import msgpack
import pytest

from penstock.graph.ir import Firing
from penstock.runtime.control.messages import read_record
from penstock.runtime.record import event_log
from penstock.runtime.record.checkpoints import SavedCheckpoint, latest_checkpoint
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.event_log import LogError, read_log
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.typed_json import Cut, require_shape
from penstock.runtime.schedule.events import Done, Saved
from penstock.runtime.schedule.replay import ReplayError

from .plain import toy_loop
from .programs_for_gates import WRITES_S
from .running import (
    ENDLESS,
    FAULTS,
    HELD,
    Line,
    Running,
    assert_all_consumed,
    assert_equal_bits,
    delays,
    figures,
    final_state,
    holding,
    interrupt_at,
    make_run,
    model_flags,
    replayed,
    rows,
    run_here,
    run_to_end,
    run_to_failure,
    segments_of,
    status_here,
    summary,
    toy_flags,
    with_updates,
)

pytestmark = pytest.mark.timeout(480)
LANGUAGE = Path(__file__).parents[1] / "programs_for_language.py"
# Updates after a resume.
MORE, BATCH = 10, 4
SLOW = {**delays(generate=40.0, score=2.0, update=20.0), "jitter_ms": 20.0}


def toy_run(path: Path, checkpoint_every: int = 0) -> Path:
    return make_run(path, "toy", {"lag": 0, **SLOW}, toy_flags(updates=ENDLESS, checkpoint_every=checkpoint_every))


def last_checkpoint(folder: Path) -> SavedCheckpoint:
    found = latest_checkpoint(RunFolder.open(folder))
    assert found is not None
    return found


def saved_before(folder: Path) -> list[int]:
    """Return the updates before which a checkpoint was written. One that is due while another is written is late."""
    steps = [step for segment in read_log(folder / "events.log") for stage in segment.stages for step in stage.steps]
    return sorted({event.update for event in (read_record(step.event) for step in steps) if isinstance(event, Saved)})


def assert_whole(folder: Path, updates: int) -> None:
    """Assert that a run has ended like one that was not disturbed."""
    assert summary(folder)["status"] == "done"
    assert_all_consumed(folder, updates * BATCH)
    assert [row["update"] for row in rows(folder)] == list(range(updates))
    assert_equal_bits(final_state(folder, updates), toy_loop(updates, BATCH))


@pytest.mark.slow
def test_an_interrupted_run_goes_on_exactly(tmp_path: Path) -> None:
    """This is at lag 0; test_preemption has a run with a lag."""
    folder = toy_run(tmp_path / "r")
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
    assert_whole(folder, done["updates"] + MORE)
    assert [segment.facts["cut"] for segment in read_log(folder / "events.log")] == [None, done["updates"]]
    assert [stage.stage for stage in replayed(folder)] == ["train", "train", "save"]


@pytest.mark.slow
def test_a_run_that_is_interrupted_while_it_starts_goes_on_from_nothing(tmp_path: Path) -> None:
    holds = holding(tmp_path / "holds", "start")
    folder = make_run(tmp_path / "r", HELD, {"lag": 0, "holds": str(holds)}, toy_flags(updates=MORE))
    with Running(folder) as running:
        running.until((folder / "keys" / "local.json").exists, "the controller listens")
        running.interrupt()
        assert running.wait() == 130
    assert summary(folder)["status"] == "stopped"
    assert rows(folder) == []
    (holds / "start").unlink()
    run_to_end(folder)
    assert_whole(folder, MORE)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_model_with_its_optimizer_goes_on_exactly(tmp_path: Path, lag: int) -> None:
    """In one process, interrupted twice, with a checkpoint in between."""
    flags = model_flags(updates=8, max_tokens=4, versions="pinned", checkpoint_every=3)
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
    told = (whole / "samples.jsonl").read_text()
    assert (parted / "samples.jsonl").read_text() == told
    assert [line["update"] for line in map(json.loads, told.splitlines())] == list(range(8))
    assert summary(parted)["fates"] == summary(whole)["fates"] == {"consumed": 16, "dropped": 0, "failed": 0}
    replayed(parted)


def test_a_run_whose_updates_take_what_is_ready_goes_on(tmp_path: Path) -> None:
    """Its checkpoint has groups with the deadlines that their weights have set."""
    flags = model_flags(updates=4, max_tokens=4, order="ready")
    folder = make_run(tmp_path / "r", f"{FAULTS}digits", {"lag": 2, "samples": 4}, flags)
    assert status_here(folder, partial(interrupt_at, 0))[0] == "stopped"
    saved = last_checkpoint(folder)
    require_shape(saved.cut, Cut, "the cut")
    assert saved.cut["reading"]
    run_here(folder)
    assert_all_consumed(folder, 4 * flags.batch)
    replayed(folder)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_that_had_ended_and_is_extended_is_a_longer_one_at_lag_zero_only(tmp_path: Path, lag: int) -> None:
    """With a lag, the last checkpoint of an ended run has no older weights: the next groups use the newest ones."""
    folder = make_run(tmp_path / "r", "toy", {"lag": lag, **delays()}, toy_flags(updates=4, versions="pinned"))
    run_here(with_updates(folder, 2))
    run_here(with_updates(folder, 4))
    assert [row["lag_max"] for row in rows(folder)] == ([0, 0, 0, 0] if lag == 0 else [0, 1, 0, 1])
    if lag == 0:
        assert_equal_bits(final_state(folder, 4), toy_loop(4, BATCH, lag=0))


def test_a_run_folder_that_is_moved_meanwhile_ends_the_run_and_what_is_put_in_its_place_is_left_alone(
    tmp_path: Path,
) -> None:
    folder, moved = toy_run(tmp_path / "r", checkpoint_every=1), tmp_path / "moved"

    def move(line: Line) -> None:
        if line.get("kind") == "row" and line["row"]["update"] == 3:
            folder.rename(moved)
            (folder / "checkpoints").mkdir(parents=True)
            (folder / "processes.json").write_text("another run's")

    with pytest.raises(RecordError, match=f"{folder}: the run folder was moved to {moved} while the run went on"):
        status_here(folder, move)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "processes.json"]
    assert list((folder / "checkpoints").iterdir()) == []
    cut = last_checkpoint(moved)
    assert not (moved / "processes.json").exists()
    run_here(with_updates(moved, cut.update + 2))
    assert_whole(moved, cut.update + 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_run_whose_folder_goes_away_ends_with_that_and_makes_none_again(tmp_path: Path, how: str) -> None:
    folder, moved = toy_run(tmp_path / "r", checkpoint_every=1), tmp_path / "moved"
    with Running(folder) as running:
        running.until_update(3)
        folder.rename(moved)
        if how == "removed":
            shutil.rmtree(moved, ignore_errors=True)
        assert running.wait() == 1
    assert f"{folder}: the run folder was " in running.errors  # "moved", if it was looked for between the two steps
    assert not folder.exists()
    assert how == "removed" or moved.is_dir()
    assert not (moved / "keys").exists()


@pytest.mark.slow
def test_a_checkpoint_that_a_stop_cannot_wait_for_leaves_the_one_before(tmp_path: Path) -> None:
    flags = toy_flags(updates=ENDLESS, batch=2, checkpoint_every=1, grace=1.0)
    folder = make_run(tmp_path / "r", f"{FAULTS}exports_slowly", {}, flags)
    with Running(folder) as running:
        running.until(lambda: [*(folder / "checkpoints").glob("00000002-*/policy/half")], "the second one was begun")
        running.interrupt()
        assert running.wait() == 130
    assert last_checkpoint(folder).update == 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["00000001"]


@pytest.mark.slow
def test_a_stop_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    flags = toy_flags(updates=ENDLESS, batch=2, grace=WRITES_S - 2.0)
    folder = make_run(tmp_path / "r", f"{FAULTS}writes_slowly", {}, flags)
    with Running(folder) as running:
        running.until_update(2)
        running.interrupt()
        assert running.wait() == 130
    assert (summary(folder)["status"], summary(folder)["error"]) == ("stopped", "stopped by the user")
    assert (last_checkpoint(folder).folder / "policy" / "whole").is_file()


@pytest.mark.slow
def test_a_run_keeps_its_newest_checkpoints_and_its_best_one_and_goes_on(tmp_path: Path) -> None:
    flags = toy_flags(updates=8, checkpoint_every=1, keep=2, keep_best="reward_mean")
    folder = run_to_end(make_run(tmp_path / "r", "toy", {"lag": 0, **SLOW}, flags))
    rewards = [row["reward_mean"] for row in rows(folder)]

    def kept() -> set[int]:
        return {int(path.name) for path in (folder / "checkpoints").iterdir()}

    saved = saved_before(folder)
    assert saved[-1] == 8
    assert kept() == {*saved[-2:], max(saved, key=lambda update: (rewards[update - 1], update))}
    run_to_end(with_updates(folder, 8 + MORE))
    assert kept() >= {saved_before(folder)[-2], 8 + MORE}
    assert len(kept()) <= 3
    assert_whole(folder, 8 + MORE)


@pytest.mark.slow
def test_a_metric_that_comes_late_is_no_unknown_one_and_one_that_never_comes_is_told_at_the_end(tmp_path: Path) -> None:
    program, options = f"{LANGUAGE}:clocks", {"every": 2, "look": 2, "watch_s": 3.0}  # longer than several updates
    late = run_to_end(make_run(tmp_path / "late", program, options, toy_flags(updates=8, keep_best="watched_sum")))
    assert [text for text in summary(late)["warnings"] if "--keep-best" in text] == []
    never = run_to_end(make_run(tmp_path / "never", program, options, toy_flags(updates=1, keep_best="watched")))
    assert len([text for text in summary(never)["warnings"] if "--keep-best" in text]) == 1


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    folder = toy_run(tmp_path / "r", checkpoint_every=2)
    with Running(folder) as running:
        running.until_update(5)
        running.until(lambda: [*(folder / "checkpoints").glob("????????/cut.json")], "a checkpoint was complete")
        assert segments_of(running.run, folder) != []
        running.kill()  # no process is left to remove them
    cut = last_checkpoint(folder)
    assert 2 <= cut.update <= len(rows(folder))
    run_to_end(with_updates(folder, cut.update + MORE))
    assert segments_of(running.run, folder) == []  # a later start, or one of another run, has removed them
    assert_whole(folder, cut.update + MORE)
    first, second = read_log(folder / "events.log")
    assert first.ended is None
    assert second.facts["cut"] == cut.update
    replayed(folder)


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_goes_on_from_a_damaged_part_ends_with_its_name_and_goes_on_without_it(
    tmp_path: Path, processes: bool
) -> None:
    flags = toy_flags(updates=4, checkpoint_every=2)
    folder = run_here(make_run(tmp_path / "r", "toy", {"lag": 0, **delays()}, flags))
    damaged = folder / "checkpoints" / "00000004"
    (part := damaged / "trainer-0-0.safetensors").write_bytes(part.read_bytes()[:-1])
    with_updates(folder, 6)
    error = run_to_failure(folder)[0] if processes else status_here(folder)[1][-1]["text"]
    assert f"{part}: not a readable state" in error
    assert f"without the folder {damaged} a resume begins with update 2" in error
    assert summary(folder)["cause"] == "checkpoint"
    damaged.rename(tmp_path / "damaged")
    run_here(folder)
    assert_whole(folder, 6)
    replayed(folder)
    assert "update 2" in json.loads((folder / "trace.json").read_text())["otherData"]["note"]
    assert summary(folder)["warnings"] == []
    # The rows of an ended run may be deleted: then the next runs warn of what they do not know.
    (folder / "metrics.jsonl").unlink()
    run_here(with_updates(folder, 7))
    told = summary(folder)["warnings"]
    assert [warning for warning in told if f"{folder}/metrics.jsonl: given rows of 0" in warning]
    run_here(with_updates(folder, 8))
    assert summary(folder)["warnings"][: len(told)] == told  # of all launches


# A recorded run replays, and an edited log does not.


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do a run with processes, two generators and free versions: its decisions depend on the timing."""
    options = {"lag": 2, **delays(generate=10.0, score=1.0, update=8.0), "jitter_ms": 10.0}
    path = tmp_path_factory.mktemp("replay") / "r"
    return run_to_end(make_run(path, "toy", options, toy_flags(updates=8), generators=2))


def frames(data: bytes | bytearray) -> list[tuple[int, int]]:
    """Return start and end of each record's payload."""
    found, at = [], len(event_log.MAGIC)
    while at < len(data):
        (length,) = event_log.LENGTH.unpack_from(data, at)
        found.append((at + event_log.HEAD, at + event_log.HEAD + length))
        at = found[-1][1] + event_log.CHAIN
    return found


def test_a_recorded_run_replays_to_identical_commands(recorded: Path) -> None:
    train, save = replayed(recorded)
    assert (train.stage, train.updates, train.outcomes["consumed"]) == ("train", 8, 32)
    assert train.finish is not None
    assert train.finish.status == "done"
    assert train.commands > train.updates
    assert (save.stage, save.updates) == ("save", 0)


@pytest.mark.parametrize("how", ["a changed byte", "a missing record", "two swapped records"])
def test_an_edited_log_is_refused_and_the_record_named(recorded: Path, tmp_path: Path, how: str) -> None:
    content = bytearray((recorded / "events.log").read_bytes())
    (a, b), (c, d) = ((s - event_log.HEAD, e + event_log.CHAIN) for s, e in frames(content)[20:22])
    if how == "a changed byte":
        content[a + event_log.HEAD + 3] ^= 1
    else:
        content[a:d] = content[c:d] + (content[a:b] if how == "two swapped records" else b"")
    (tmp_path / "events.log").write_bytes(content)
    with pytest.raises(LogError, match="record 20 does not follow"):
        replayed(tmp_path)


def test_an_edited_log_with_a_chain_made_anew_is_refused_by_its_decisions(recorded: Path, tmp_path: Path) -> None:
    """With a valid chain, the scheduler must still decide what the log says."""
    content = (recorded / "events.log").read_bytes()
    records = [msgpack.unpackb(content[start:end]) for start, end in frames(content)]
    steps = [(record, read_record(record[2])) for record in records if record[0] == "event"]
    done = {event.firing: record for record, event in steps if isinstance(event, Done)}
    made, scored = done[Firing("fake_generate", 9)], done[Firing("fake_score", 9)]
    made[2], scored[2] = scored[2], made[2]  # one needs the other: independent events may come in any order
    path = tmp_path / "events.log"
    writer = event_log.LogWriter(path)
    for record in records:
        writer._append(*record)
    writer.close()
    assert len(read_log(path)) == 1
    with pytest.raises(ReplayError) as error:
        replayed(tmp_path)
    assert re.match(r"record \d+, at ", str(error.value))
