"""A run that loses a process which it needs goes on by itself from its last checkpoint (`--restarts`)."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from penstock.runtime.record.event_log import read_segments
from penstock.runtime.record.folder import RunFolder

from .running import (
    DEADLINE_S,
    ENDLESS,
    FAULTS,
    HELD,
    assert_all_consumed,
    assert_equal_bits,
    final_state,
    holding,
    make_run,
    num_rows,
    penstock,
    replayed,
    run_here,
    summary,
    toy_flags,
    until,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
PENSTOCK = (sys.executable, "-m", "penstock.runtime.cli.main")
BATCH, UPDATES = 2, 24
COMMON = ("--lag", "1", "--versions", "pinned", "--batch", str(BATCH), "--seed", "5", "--plain")


@contextmanager
def started(*words: str) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([*PENSTOCK, *words], stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def trainer(parents: list["subprocess.Popen[bytes]"]) -> list[psutil.Process]:
    """Return the trainer's ranks among the descendants of these commands."""
    found: list[psutil.Process] = []
    for parent in parents:
        try:
            children = psutil.Process(parent.pid).children(recursive=True)
            found += [each for each in children if each.name() == "trainer/0.0"]
        except psutil.NoSuchProcess:
            continue
    return found


def has_rows(folder: Path, count: int) -> bool:
    return num_rows(folder) >= count


@pytest.mark.parametrize("on", ["one host", "agents"])
def test_a_trainer_that_is_killed_twice_is_started_again_and_the_run_has_the_bits_of_one_that_was_not(
    tmp_path: Path, on: str
) -> None:
    """Agents with a ticket enrol again by themselves."""
    folder, num_agents = tmp_path / "r", 2 * (on == "agents")
    at = 3, 8
    holds = holding(tmp_path / "holds", *at)
    words = [HELD, "--holds", str(holds), *COMMON, "--updates", str(UPDATES), "--checkpoint-every", "5"]
    words += ["--restarts", "2", "--out", str(folder)]
    words += ["--on", "agents", "--agents", str(num_agents)] if num_agents else []
    with ExitStack() as stack:
        run = stack.enter_context(started("run", *words))
        ticket = str(folder / "ticket.json")
        agents = [stack.enter_context(started("agent", "--ticket", ticket)) for _ in range(num_agents)]
        for update in at:
            (rank,) = until(partial(trainer, agents or [run]), "the trainer is there")
            until(partial(has_rows, folder, update), f"{update} updates were done")
            rank.kill()
            rank.wait(DEADLINE_S)
            (holds / str(update)).unlink()
        assert run.wait(DEADLINE_S) == 0
        assert [agent.wait(DEADLINE_S) for agent in agents] == [0] * num_agents
    assert summary(folder)["status"] == "done"
    assert_all_consumed(folder, UPDATES * BATCH)
    assert len(read_segments(folder / "events.log")[0]) == 3
    flags = toy_flags(updates=UPDATES, batch=BATCH, versions="pinned", seed=5)
    whole = run_here(make_run(tmp_path / "whole", "toy", {"lag": 1}, flags))
    assert_equal_bits(final_state(folder, UPDATES), final_state(whole, UPDATES))
    replayed(folder)


def test_agents_of_a_run_with_free_slots_enrol_for_its_restart(tmp_path: Path) -> None:
    """They get no free slot of the run that has ended."""
    folder, holds = tmp_path / "r", holding(tmp_path / "holds", 3)
    words = [HELD, "--holds", str(holds), *COMMON, "--updates", "8", "--checkpoint-every", "2", "--restarts", "1"]
    words += ["--on", "agents", "--agents", "2", "--generators", "1..3", "--lost-replica", "replace"]
    words += ["--out", str(folder)]
    with ExitStack() as stack:
        run = stack.enter_context(started("run", *words))
        ticket = str(folder / "ticket.json")
        agents = [stack.enter_context(started("agent", "--ticket", ticket)) for _ in range(2)]
        (rank,) = until(partial(trainer, agents), "the trainer is there")
        until(partial(has_rows, folder, 3), "3 updates were done")
        rank.kill()
        rank.wait(DEADLINE_S)
        (holds / "3").unlink()
        assert run.wait(DEADLINE_S) == 0
        assert [agent.wait(DEADLINE_S) for agent in agents] == [0, 0]
    assert summary(folder)["status"] == "done"
    assert len(read_segments(folder / "events.log")[0]) == 2


def test_what_a_restart_does_not_mend_ends_the_run(tmp_path: Path) -> None:
    """A node's error would only come again. A loss after the last restart ends the run, too."""
    folder = tmp_path / "raises"
    words = ("--updates", "3", "--batch", "2", "--plain", "--out")
    done = penstock("run", f"{FAULTS}raises", "--update", "1", "--restarts", "3", *words, str(folder))
    assert (done.returncode, summary(folder)["cause"]) == (1, "node")
    assert len(read_segments(folder / "events.log")[0]) == 1
    lost = tmp_path / "lost"
    with started("run", "toy", *COMMON, "--updates", str(ENDLESS), "--restarts", "1", "--out", str(lost)) as run:
        for _ in range(2):
            (rank,) = until(partial(trainer, [run]), "the trainer is there")
            rank.kill()
            rank.wait(DEADLINE_S)
        assert run.wait(DEADLINE_S) == 1
    assert summary(lost)["cause"] == "rank-died"
    assert RunFolder.open(lost).read_json("summary.json")["status"] == "failed"
