"""A run that is preempted (SIGTERM, SIGUSR1) writes a checkpoint within its grace and ends with status 75. Started
again, it ends with the bits of a run that was not disturbed.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.record.checkpoints import latest_checkpoint
from penstock.runtime.record.folder import RunFolder

from .running import (
    DEADLINE_S,
    ENDLESS,
    FAULTS,
    HELD,
    ONE_HOST,
    TWO_NAMES,
    Running,
    assert_all_consumed,
    assert_equal_bits,
    delays,
    final_state,
    holding,
    make_run,
    num_rows,
    penstock,
    replayed,
    rows,
    run_here,
    run_to_end,
    summary,
    toy_flags,
    until,
    with_updates,
)

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
PENSTOCK = (sys.executable, "-m", "penstock.runtime.cli.main")
MORE, BATCH = 5, 4
SLOW = {**delays(generate=20.0, score=2.0, update=20.0), "jitter_ms": 10.0}


def agents(running: Running) -> list[int]:
    return running.pids(lambda process: "penstock.runtime.control.agent" in process.cmdline())


def last_update(folder: Path) -> int:
    saved = latest_checkpoint(RunFolder.open(folder))
    return saved.update if saved else 0


@pytest.mark.parametrize(("who", "lag"), [("launcher", 0), ("agent", 2)])
def test_a_run_that_is_preempted_and_started_again_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, who: str, lag: int
) -> None:
    flags = toy_flags(updates=ENDLESS, versions="pinned")
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
    holds = holding(tmp_path / "holds", "start")
    folder = make_run(tmp_path / "r", HELD, {"lag": 0, "holds": str(holds)}, toy_flags(updates=MORE))
    with Running(folder) as running:
        running.until((folder / "keys" / "local.json").exists, "the controller listens")
        running.signal(signal.SIGUSR1)
        assert running.wait() == 75
    assert (summary(folder)["cause"], rows(folder)) == ("preempted", [])
    (holds / "start").unlink()
    run_to_end(folder)
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
    flags = toy_flags(updates=ENDLESS, batch=2)
    folder = make_run(tmp_path / "r", f"{FAULTS}writes_slowly", {}, flags)
    with Running(folder) as running:
        running.until_update(2)
        running.signal(signal.SIGTERM)
        assert running.wait() == 75
    assert (folder / "checkpoints" / f"{last_update(folder):08d}" / "policy" / "whole").is_file()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGHUP, 130)])
def test_a_trainer_that_hangs_holds_nobody_up(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """At the end of the grace all processes have ended, with the exit status of that signal."""
    mark = tmp_path / "mark"
    flags = toy_flags(updates=9, batch=2, grace=1.0)
    folder = make_run(tmp_path / "r", f"{FAULTS}stuck", {"mark": str(mark)}, flags)
    with Running(folder) as running:
        running.until(mark.exists, "the third update began")
        running.signal(number)
        assert running.wait() == status
    assert num_rows(folder) == 2


def test_a_host_that_is_gone_before_its_time_is_a_preemption_too(tmp_path: Path) -> None:
    """The cluster manager announces that it takes a host, and kills the agent before there is a checkpoint."""
    mark = tmp_path / "mark"
    flags = toy_flags(updates=9, batch=2)
    folder = make_run(tmp_path / "r", f"{FAULTS}stuck", {"mark": str(mark)}, flags)
    with Running(folder) as running:
        running.until(mark.exists, "the third update began")
        running.signal(signal.SIGTERM, running.agent())
        running.until(lambda: any("stopping" in n or "is preempted" in n for n in running.notes), "it was heard")
        running.signal(signal.SIGKILL, running.agent())
        assert running.wait() == 75, running.errors
    assert (summary(folder)["status"], summary(folder)["cause"]) == ("stopped", "preempted")


def test_a_run_that_is_given_other_hosts_goes_on_there_with_the_bits_of_one_that_stayed(tmp_path: Path) -> None:
    flags = toy_flags(updates=9, versions="pinned")
    folder = make_run(tmp_path / "r", "toy", {"lag": 1, **SLOW}, flags, cluster=TWO_NAMES)
    with Running(folder) as running:
        running.until_update(2)
        running.signal(signal.SIGTERM, agents(running)[0])
        assert running.wait() == 75, running.errors
    others = tmp_path / "others.toml"
    others.write_text('bind = "127.0.0.1:0"\n' + "".join(f'[[hosts]]\nname = "{n}"\ncores = 1\n' for n in ("n7", "n8")))
    done = penstock("resume", str(folder), "--cluster", str(others), "--plain")
    assert done.returncode == 0, done.stderr
    assert "a new plan is made" not in done.stdout
    plan = RunConfig.load(RunFolder.open(folder)).plan
    assert {replica.name: replica.hosts for replica in plan.replicas} == {
        "generator/0": ("n8",), "scorer/0": ("n7",), "trainer/0": ("n7",)
    }  # fmt: skip
    whole = make_run(tmp_path / "whole", "toy", {"lag": 1, **SLOW}, toy_flags(updates=9, versions="pinned"))
    assert_equal_bits(final_state(folder, 9), final_state(run_here(whole), 9))
    replayed(folder)


def test_one_command_is_all_that_a_job_needs_that_is_taken_away_and_given_back(tmp_path: Path) -> None:
    """From the command line: two preemptions, one of them before there is a run, and the bits of an undisturbed run."""
    folder, said = tmp_path / "r", tmp_path / "said"
    holds = holding(tmp_path / "holds", 0, 2, 5)
    command = [HELD, "--holds", str(holds), "--lag", "1", "--versions", "pinned", "--updates", "40", "--batch", "2"]
    command += ["--seed", "5", "--plain", "--grace", "60", "--resume", "auto", "--out", str(folder)]
    early = subprocess.Popen([*PENSTOCK, "run", *command])
    until(lambda: handles(early.pid, signal.SIGTERM), "the command hears signals")
    early.send_signal(signal.SIGTERM)
    assert early.wait(DEADLINE_S) == 75
    assert rows(folder) == []
    (holds / "0").unlink()
    with said.open("wb") as out:
        first = subprocess.Popen([*PENSTOCK, "run", *command], stdout=out, stderr=subprocess.STDOUT)
    until(lambda: num_rows(folder) >= 2, "two updates are done")
    first.send_signal(signal.SIGUSR1)
    until(lambda: "stopping within" in said.read_text(), "the signal was heard")
    (holds / "2").unlink()
    assert first.wait(DEADLINE_S) == 75
    (holds / "5").unlink()
    done = num_rows(folder)
    assert 2 <= done < 40
    second = penstock("run", *command)
    assert second.returncode == 0, second.stderr
    again = penstock("run", *command)
    assert (again.returncode, "all 40 updates are done" in again.stdout) == (0, True)
    flags = toy_flags(updates=40, batch=2, versions="pinned", seed=5)
    whole = run_here(make_run(tmp_path / "whole", "toy", {"lag": 1}, flags))
    assert_equal_bits(final_state(folder, 40), final_state(whole, 40))
    assert_all_consumed(folder, 80)


def handles(pid: int, number: int) -> bool:
    """True if the process catches the signal."""
    (caught,) = re.findall(r"(?m)^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> (number - 1) & 1)
