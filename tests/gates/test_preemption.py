"""A run that an engine takes away (SIGTERM, SIGUSR1) is stopped with a checkpoint within its grace, ends with status 75
and, started again, with the bits of a run that nobody disturbed.
"""

import signal
from pathlib import Path

import pytest

from penstock.runtime.record.checkpoints import latest_checkpoint
from penstock.runtime.record.folder import RunFolder

from .running import (
    ENDLESS,
    FAULTS,
    ONE_HOST,
    TWO_NAMES,
    Running,
    assert_all_consumed,
    assert_equal_bits,
    delays,
    final_state,
    make_run,
    replayed,
    rows,
    run_here,
    run_to_end,
    summary,
    toy_flags,
    with_updates,
)

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
MORE, BATCH, GRACE = 5, 4, 60.0
SLOW = {**delays(generate=20.0, score=2.0, update=20.0), "jitter_ms": 10.0}


def agents(running: Running) -> list[int]:
    return running.pids(lambda process: "penstock.runtime.control.agent" in process.cmdline())


def last_update(folder: Path) -> int:
    saved = latest_checkpoint(RunFolder.open(folder))
    return saved.update if saved else 0


@pytest.mark.parametrize("who", ["launcher", "agent"])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_run_that_is_preempted_and_started_again_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, who: str, lag: int
) -> None:
    flags = toy_flags(updates=ENDLESS, versions="pinned", grace=GRACE)
    cluster = ONE_HOST if who == "launcher" else TWO_NAMES
    folder = make_run(tmp_path / "r", "toy", {"lag": lag, **SLOW}, flags, cluster=cluster)
    with Running(folder) as running:
        running.until_update(3)
        if who == "launcher":
            running.signal(signal.SIGTERM)
        else:
            running.signal(signal.SIGTERM, agents(running)[1])
        assert running.wait() == 75, running.errors
    done = summary(folder)
    assert (done["status"], done["cause"]) == ("stopped", "preempted")
    assert last_update(folder) == done["updates"] >= 3
    updates = done["updates"] + MORE
    run_to_end(with_updates(folder, updates))
    assert_all_consumed(folder, updates * BATCH)
    whole = make_run(tmp_path / "whole", "toy", {"lag": lag, **SLOW}, toy_flags(updates=updates, versions="pinned"))
    assert_equal_bits(final_state(folder, updates), final_state(run_here(whole), updates))
    replayed(folder)


def test_a_run_that_is_preempted_while_it_starts_goes_on_from_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", "toy", {"lag": 0, **SLOW}, toy_flags(updates=ENDLESS))
    with Running(folder) as running:
        running.until_line(lambda line: True, "the controller listens, and nobody has joined it")
        running.signal(signal.SIGUSR1)
        assert running.wait() == 75
    assert (summary(folder)["cause"], rows(folder)) == ("preempted", [])
    run_to_end(with_updates(folder, MORE))
    assert_all_consumed(folder, MORE * BATCH)


def test_an_engine_that_comes_while_a_checkpoint_is_written_is_given_no_longer_than_its_grace(tmp_path: Path) -> None:
    flags = toy_flags(updates=ENDLESS, batch=2, checkpoint_every=1, grace=1.0)
    folder = make_run(tmp_path / "r", f"{FAULTS}exports_slowly", {}, flags)
    with Running(folder) as running:
        running.until(lambda: [*(folder / "checkpoints").glob("00000002-*/policy/half")], "the second one was begun")
        running.signal(signal.SIGTERM)
        assert running.wait() == 75
    assert last_update(folder) == 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["00000001"]


def test_a_checkpoint_that_is_whole_within_the_grace_is_waited_for(tmp_path: Path) -> None:
    flags = toy_flags(updates=ENDLESS, batch=2, grace=GRACE)
    folder = make_run(tmp_path / "r", f"{FAULTS}writes_slowly", {}, flags)
    with Running(folder) as running:
        running.until_update(2)
        running.signal(signal.SIGTERM)
        assert running.wait() == 75
    assert (folder / "checkpoints" / f"{last_update(folder):08d}" / "policy" / "whole").is_file()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGHUP, 130)])
def test_a_trainer_that_hangs_holds_nobody_up(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """At the end of the grace everything has ended, with the status of who wanted it."""
    mark = tmp_path / "mark"
    flags = toy_flags(updates=9, batch=2, grace=1.0)
    folder = make_run(tmp_path / "r", f"{FAULTS}stuck", {"mark": str(mark)}, flags)
    with Running(folder) as running:
        running.until(mark.exists, "the third update began")
        running.signal(number)
        assert running.wait() == status
    assert len(rows(folder)) == 2


def test_a_host_that_is_gone_before_its_time_is_a_preemption_too(tmp_path: Path) -> None:
    """The engine says that it takes a host, and kills the agent before a checkpoint is made."""
    mark = tmp_path / "mark"
    flags = toy_flags(updates=9, batch=2, grace=GRACE)
    folder = make_run(tmp_path / "r", f"{FAULTS}stuck", {"mark": str(mark)}, flags)
    with Running(folder) as running:
        running.until(mark.exists, "the third update began")
        running.signal(signal.SIGTERM, running.agent())
        running.until(lambda: any("stopping" in n or "taken away" in n for n in running.notes), "it was heard")
        running.signal(signal.SIGKILL, running.agent())
        assert running.wait() == 75, running.errors
    assert (summary(folder)["status"], summary(folder)["cause"]) == ("stopped", "preempted")
