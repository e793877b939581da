"""If a process dies, stops or hangs, or a node raises, the run ends by itself, says which and why, and leaves nothing.

A node that raises is named with its group and traceback. The run fails, or the group counts as failed, never as zero.
"""

import os
import re
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from penstock.runtime.cli.report import recorded_steps
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.messages import MAX_BYTES
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.control.sockets import SILENCE
from penstock.runtime.record.event_log import read_log
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.schedule.events import Abort, Done

from .running import (
    ENDLESS,
    FAULTS,
    GRACE_S,
    HELD,
    Running,
    assert_all_consumed,
    assert_equal_bits,
    delays,
    final_state,
    holding,
    make_run,
    model_flags,
    replayed,
    rows,
    run_here,
    run_to_end,
    run_to_failure,
    status_here,
    summary,
    toy_flags,
)

pytestmark = pytest.mark.timeout(400)
LONG = {"lag": 1, **delays(generate=20.0, score=2.0, update=10.0)}
MESH = ("generator=tp2",)
POOLS = ("generator", "scorer", "trainer")


def long_run(path: Path, deadline: float = 60.0, **more: Any) -> Path:
    return make_run(path, "toy", LONG, toy_flags(updates=ENDLESS, deadline=deadline), **more)


def rank_of(pool: str) -> Callable[[Running], int]:
    return lambda running: int(running.until_ready()["pools"][pool][0])


def controller(running: Running) -> int:
    return int(running.until_ready()["controller"])


def strike(running: Running, whom: Callable[[Running], int], number: signal.Signals) -> None:
    """Send a process the signal after the first update."""
    running.until_update(1)
    os.kill(whom(running), number)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["scorer", "trainer"])
def test_a_killed_rank_ends_the_run(tmp_path: Path, pool: str) -> None:
    errors, found = run_to_failure(long_run(tmp_path / "r"), partial(strike, whom=rank_of(pool), number=signal.SIGKILL))
    assert f"{pool}/0 rank 0 died: killed by SIGKILL (pid " in errors
    assert found["cause"] == "rank-died"
    assert f"{pool}/0 rank 0 died" in found["error"]


@pytest.mark.slow
def test_a_rank_killed_while_it_starts_ends_the_run(tmp_path: Path) -> None:
    def kill_the_first(running: Running) -> None:
        def ranks() -> list[int]:
            return running.pids(lambda process: process.name().endswith("/0.0"))

        os.kill(running.until(ranks, "a rank was started")[0], signal.SIGKILL)

    errors, found = run_to_failure(long_run(tmp_path / "r"), kill_the_first)
    assert (found["cause"], "rank 0 died: killed by SIGKILL" in errors) == ("rank-died", True)


def test_what_is_too_large_to_be_sent_is_named_with_its_node(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", f"{FAULTS}stuck", {"mark": "x" * MAX_BYTES}, toy_flags())
    errors, found = run_to_failure(folder)
    assert (found["cause"], "Traceback" in errors) == ("node", False)
    nodes = RunConfig.load(RunFolder.open(folder)).graph.nodes
    where = next(node.where for node in nodes if node.name == "stuck_update")
    for part in (f"{where}: 'stuck_update'", "given Setup of", "its config", f"needed at most {MAX_BYTES}"):
        assert part in errors


@pytest.mark.slow
def test_a_killed_agent_ends_the_run(tmp_path: Path) -> None:
    errors, found = run_to_failure(long_run(tmp_path / "r"), partial(strike, whom=Running.agent, number=signal.SIGKILL))
    assert (found["cause"], [pool for pool in POOLS if f"{pool}/0 rank 0" not in errors]) == ("agent-died", [])


@pytest.mark.slow
def test_a_killed_controller_ends_the_run(tmp_path: Path) -> None:
    """It cannot write a summary, so the launcher reports its end."""
    with Running(long_run(tmp_path / "r")) as running:
        strike(running, controller, signal.SIGKILL)
        assert running.wait() == 1
    assert running.cause == "controller"
    assert "the controller (pid " in running.errors
    assert "ended: killed by SIGKILL" in running.errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whom", "deadline", "named"),
    [
        (rank_of("scorer"), 600.0, "no heartbeat from scorer/0 rank 0"),
        (Running.agent, 60.0, "no heartbeat from the agent of host local"),
    ],
)
def test_a_stopped_rank_is_found_by_its_silence(
    tmp_path: Path, whom: Callable[[Running], int], deadline: float, named: str
) -> None:
    trouble = partial(strike, whom=whom, number=signal.SIGSTOP)
    errors, found = run_to_failure(long_run(tmp_path / "r", deadline), trouble)
    assert (found["cause"], named in errors) == ("silent", True)


@pytest.mark.slow
def test_a_stopped_rank_is_found_by_the_deadline_of_its_firing(tmp_path: Path) -> None:
    # Shorter than the heartbeat timeout, and longer than another process may be suspended until then.
    trouble = partial(strike, whom=rank_of("trainer"), number=signal.SIGSTOP)
    errors, found = run_to_failure(long_run(tmp_path / "r", 7.0), trouble)
    assert "trainer/0" in errors  # in an update, or as the source of a transfer
    assert "rank 0" in errors
    assert found["cause"] in ("overdue", "transfer")


@pytest.mark.slow
@pytest.mark.parametrize("bind", ["", "127.0.0.1:0"])
def test_a_controller_that_was_stopped_goes_on_and_blames_no_process(tmp_path: Path, bind: str) -> None:
    """The third update takes longer than the deadline, most of it while the controller is stopped."""
    cluster = Cluster(hosts=(Host(name="local", cores=2),), bind=bind)
    holds = holding(tmp_path / "holds", 2)
    flags = toy_flags(updates=5, deadline=10.0)
    folder = make_run(tmp_path / "r", HELD, {"holds": str(holds)}, flags, cluster=cluster)
    with Running(folder) as running:
        running.until_update(2)
        # Until no weights are being sent: a controller that is stopped in between leaves the sender alone.
        sleep(1.0)
        os.kill(controller(running), signal.SIGSTOP)
        sleep(SILENCE + 5.0)
        (holds / "2").unlink()
        os.kill(controller(running), signal.SIGCONT)
        assert running.wait() == 0, running.errors
    assert len(rows(folder)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_ends_a_run_whose_trainer_hangs(tmp_path: Path, interrupts: int) -> None:
    mark = tmp_path / "mark"
    folder = make_run(tmp_path / "r", f"{FAULTS}stuck", {"mark": str(mark)}, toy_flags(updates=9, batch=2, grace=4.5))
    # The launcher waits longer than the run's grace, of which the run keeps a second to report the missing checkpoint.
    with Running(folder, grace=GRACE_S) as running:
        running.until(mark.exists, "the third update began")
        for _ in range(interrupts):
            running.interrupt()
        assert running.wait() == 130
    assert len(rows(folder)) == 2
    assert interrupts == 2 or "no checkpoint within" in summary(folder)["error"]


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "node", "firing"), [("generator", "generate", 3), ("trainer", "update", 2)])
def test_a_hung_node_meets_its_deadline(tmp_path: Path, pool: str, node: str, firing: int) -> None:
    # Longer than a process that does not hang may be suspended: the first late process is named.
    flags = toy_flags(updates=9, batch=2, deadline=12.0)
    errors, found = run_to_failure(make_run(tmp_path / "r", f"{FAULTS}hangs", {node: firing}, flags))
    assert found["cause"] == "overdue"
    assert f"no answer from {pool}/0 rank 0" in errors
    assert f"{pool}/0 rank 0 is at failing_{node}[{firing}]" in errors


UPDATES, BATCH = 4, 3


@pytest.mark.parametrize(
    ("program", "options", "said"),
    [
        (
            "raises",
            {"generate": 4},
            ["failing_generate[4]: ", "FakeError: failing_generate[4] was told to raise", "programs_for_gates"],
        ),
        (
            "raises",
            {"score": 4},
            ["failing_score[4]", "FakeError: failing_score[4] was told to raise", "programs_for_gates"],
        ),
        (
            "raises",
            {"update": 1},
            ["failing_update[1]", "FakeError: failing_update[1] was told to raise", "programs_for_gates"],
        ),
        ("faulty_reward", {"bad": 0}, ["faulty_score[0]", "in divide", "ZeroDivisionError"]),
        # Here no node raises, but the checkpoint.
        ("spoils", {"spoil": "state"}, ["in save", "AttributeError: 'str' object"]),
    ],
)
def test_what_raises_fails_the_run_with_its_traceback(
    tmp_path: Path, program: str, options: dict[str, Any], said: list[str]
) -> None:
    updates = 1 if program == "spoils" else UPDATES
    flags = toy_flags(updates=updates, batch=BATCH, retries=1 if "bad" in options else 0)
    folder = make_run(tmp_path / "r", FAULTS + program, options, flags)
    status, lines = status_here(folder)
    assert (status, summary(folder)["status"], lines[-1]["kind"]) == ("failed", "failed", "error")
    for error in (summary(folder)["error"], lines[-1]["text"]):
        assert [words for words in said if words.rstrip(": ") not in error] == []
    assert len(rows(folder)) < 2  # group 4 belongs to the second update, which did not end
    assert list((folder / "checkpoints").iterdir()) == []


def test_a_reward_function_that_raises_fails_the_run_with_its_traceback(tmp_path: Path) -> None:
    flags = toy_flags(updates=UPDATES, batch=BATCH)
    errors, found = run_to_failure(folder := make_run(tmp_path / "r", f"{FAULTS}faulty_reward", {"bad": 5}, flags))
    for error in (errors, found["error"]):
        assert "faulty_score[5] on scorer/0 rank 0" in error
        assert "in divide" in error
        assert "ZeroDivisionError" in error
    assert found["fates"].get("failed", 0) <= 1
    assert len(rows(folder)) < 2  # group 5 belongs to the second update, which did not end


DOUBTED = 2 * BATCH + 1


def doubting_run(path: Path, *, meshes: Sequence[str] = (), **flags: Any) -> Path:
    """Make a run whose generator does not trust its results from the third update's second group on."""
    used = toy_flags(updates=ENDLESS, batch=BATCH, retries=3, **flags)
    return make_run(path, f"{FAULTS}doubting", {"doubt": DOUBTED}, used, meshes=meshes)


def assert_nothing_was_learnt_from_the_doubted(folder: Path) -> None:
    found = summary(folder)
    assert (found["status"], found["cause"]) == ("failed", "untrusted")
    assert re.fullmatch("generator/0 rank [01]: it computes with other weights", found["error"])
    assert found.get("retried", 0) == 0
    assert [row["update"] for row in rows(folder)] in ([], [0], [0, 1])
    (stage,) = replayed(folder)
    assert stage.outcomes["consumed"] <= 2 * BATCH
    events = [step.event for segment in read_log(folder / "events.log") for step in recorded_steps(segment.stages[0])]
    made = {e.firing.index for e in events if isinstance(e, Done) and e.firing.node == "doubting_generate"}
    assert max(made, default=0) < DOUBTED
    assert isinstance(events[-1], Abort)


@pytest.mark.parametrize(
    ("flags", "meshes"),
    [({"on_failure": "replace"}, ()), ({"lost_replica": "replace"}, ()), ({"lost_replica": "replace"}, MESH)],
)
def test_no_update_learns_from_a_generator_that_no_longer_trusts_its_results(
    tmp_path: Path, flags: dict[str, str], meshes: Sequence[str]
) -> None:
    """It is neither tried again nor replaced by another."""
    errors, found = run_to_failure(folder := doubting_run(tmp_path / "r", meshes=meshes, **flags))
    assert_nothing_was_learnt_from_the_doubted(folder)
    assert ("Traceback" in errors, "replicas" in found) == (False, False)


def test_no_update_learns_from_what_is_not_trusted_in_one_process_either(tmp_path: Path) -> None:
    status, lines = status_here(folder := doubting_run(tmp_path / "r"))
    assert (status, lines[-1]["code"]) == ("failed", "untrusted")
    assert_nothing_was_learnt_from_the_doubted(folder)


def test_an_address_that_a_host_does_not_have_is_said_in_a_line(tmp_path: Path) -> None:
    hosts = Host(name="a", cores=1), Host(name="b", cores=1, address="192.0.2.1")
    cluster = Cluster(hosts=hosts, pools={"generator": ("b",)})
    errors, _ = run_to_failure(long_run(tmp_path / "r", cluster=cluster))
    assert ("192.0.2.1" in errors, "host b" in errors, "Traceback" in errors) == (True, True, False)


@pytest.mark.slow
def test_a_full_disk_at_a_checkpoint_is_said_with_its_traceback_by_the_rank(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", f"{FAULTS}spoils", {"spoil": "disk"}, toy_flags(updates=1, batch=2))
    errors, found = run_to_failure(folder)
    for error in (errors, found["error"], (folder / "logs" / "trainer-0-0.err").read_text()):
        assert "in _write_state" in error
        assert "StateError: " in error
        assert "File too large" in error
    assert "trainer/0 rank 0 failed at Save:" in errors
    assert list((folder / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("retries", [0, 2])
def test_a_group_that_is_replaced_is_counted_as_failed(tmp_path: Path, retries: int) -> None:
    used = toy_flags(updates=UPDATES, batch=BATCH, on_failure="replace", retries=retries)
    folder = run_here(make_run(tmp_path / "r", f"{FAULTS}faulty_reward", {"bad": 5}, used))
    assert_all_consumed(folder, UPDATES * BATCH, failed=1)
    assert [row["groups"] for row in rows(folder)] == [BATCH] * UPDATES
    assert all(row["reward_mean"] != 0 for row in rows(folder))
    assert replayed(folder)[0].outcomes["failed"] == 1


def faulty_steps(path: Path, options: dict[str, int], **flags: Any) -> Path:
    """Make a run whose engine raises in step `bad`, for all groups that are in it."""
    return make_run(path, f"{FAULTS}faulty_steps", options, model_flags(updates=UPDATES, batch=BATCH, **flags))


@pytest.mark.parametrize("bad", [1, 4])
def test_groups_of_a_step_that_raises_are_tried_again_to_the_same_bits(tmp_path: Path, bad: int) -> None:
    whole, folder = faulty_steps(tmp_path / "w", {}), faulty_steps(tmp_path / "r", {"bad": bad}, retries=1)
    assert_equal_bits(final_state(run_here(folder), UPDATES), final_state(run_here(whole), UPDATES))
    assert_all_consumed(folder, UPDATES * BATCH)


def test_groups_of_a_step_that_raises_are_replaced_and_never_answered(tmp_path: Path) -> None:
    folder = run_here(faulty_steps(tmp_path / "r", {"bad": 2}, on_failure="replace"))
    fates = summary(folder)["fates"]
    assert fates["consumed"] == UPDATES * BATCH
    assert 1 <= fates["failed"] <= BATCH
    assert replayed(folder)[0].outcomes == fates


def test_a_rank_goes_on_after_a_step_that_raised(tmp_path: Path) -> None:
    assert_all_consumed(run_to_end(faulty_steps(tmp_path / "r", {"bad": 2, "lag": 1}, retries=1)), UPDATES * BATCH)
