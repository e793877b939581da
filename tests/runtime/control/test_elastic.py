"""Replicas of generators and scorers that die during a run: the run continues, their groups start again, and the
replicas are restarted.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from time import sleep
from typing import Any

import psutil
import pytest
from torch import Tensor

from penstock.graph import load, trace
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.record.event_log import read_segments
from penstock.runtime.schedule.compile import Tables, check_rules
from tests.gates.running import (
    DEADLINE_S,
    ENDLESS,
    LARGE,
    ONE_HOST,
    TWO_NAMES,
    Line,
    Running,
    assert_all_consumed,
    assert_equal_bits,
    delays,
    final_state,
    make_run,
    num_rows,
    penstock,
    replayed,
    rows,
    run_here,
    summary,
    toy_flags,
    until,
)
from tests.halt import halt

pytestmark = pytest.mark.timeout(300)

BATCH, LAG = 4, 2
PINNED: dict[str, Any] = {"batch": BATCH, "versions": "pinned", "lost_replica": "replace"}


def comings(folder: Path) -> list[tuple[str, str]]:
    """The events of replicas that left or joined, from the summary."""
    return [(one["replica"], one["event"]) for one in summary(folder).get("replicas", [])]


def undisturbed(path: Path, program: str, options: Mapping[str, Any], updates: int) -> Mapping[str, Tensor]:
    """Return the end state of a run in one process, where no replica can be lost."""
    flags = toy_flags(updates=updates, batch=BATCH, versions="pinned")
    return final_state(run_here(make_run(path, program, options, flags, generators=2)), updates)


def kill(running: Running, replica: str, rank: int = 0) -> None:
    """Send SIGKILL to a rank of a replica."""
    (pid,) = running.pids(lambda process: process.name() == f"{replica}.{rank}")
    os.kill(pid, signal.SIGKILL)


def until_again(running: Running, replica: str, times: int, where: str = " rank 0") -> None:
    """Wait until a lost replica has rejoined this many times."""

    def came(line: Line) -> bool:
        return line.get("kind") == "note" and line["text"] == f"{replica}{where} has rejoined"

    running.until(lambda: len([line for line in list(running.lines) if came(line)]) >= times, f"{replica} came again")


def assert_as_if_nothing_had_happened(folder: Path, updates: int, bits: Mapping[str, Tensor]) -> None:
    assert_all_consumed(folder, updates * BATCH)
    assert [row["update"] for row in rows(folder)] == list(range(updates))
    assert_equal_bits(final_state(folder, updates), bits)
    assert replayed(folder)[-1].outcomes["consumed"] == updates * BATCH


def test_a_generator_killed_in_mid_response_comes_again_and_the_run_has_the_bits_of_one_that_was_left_alone(
    tmp_path: Path,
) -> None:
    """Its groups need the versions that they started with, while the other generator has newer ones."""
    updates, slow = 12, {"lag": LAG, **delays(generate=200.0, update=20.0)}
    folder = make_run(tmp_path / "r", "toy", slow, toy_flags(updates=updates, **PINNED), generators=2)
    with Running(folder) as running:
        for update, replica in [(2, "generator/1"), (5, "generator/0")]:
            running.until_update(update)
            kill(running, replica)
            until_again(running, replica, 1)
        assert running.wait() == 0, running.errors
    gone = ["generator/1", "generator/0"]
    assert comings(folder) == [(replica, event) for replica in gone for event in ("lost", "joined")]
    bits = undisturbed(tmp_path / "u", "toy", {"lag": LAG, **delays()}, updates)
    assert_as_if_nothing_had_happened(folder, updates, bits)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "generators"), [("", 2), ("messages", 1)])
def test_a_generator_killed_in_mid_sync_leaves_the_trainer_at_work_and_gets_all_weights_when_it_comes_again(
    tmp_path: Path, way: str, generators: int
) -> None:
    """It dies when half of a version has been transferred, through shared memory or as messages."""
    mark, updates = tmp_path / "half", 8
    options = {"lag": LAG, "way": way}
    flags = toy_flags(updates=updates, **PINNED)
    folder = make_run(tmp_path / "r", LARGE, {**options, "mark": str(mark), "at": 3}, flags, generators=generators)
    with Running(folder) as running:
        running.until(mark.exists, "half of a version was through")
        kill(running, "generator/0")
        mark.with_suffix(".go").touch()
        assert running.wait() == 0, running.errors
    assert comings(folder)[0] == ("generator/0", "lost")
    assert_as_if_nothing_had_happened(folder, updates, undisturbed(tmp_path / "u", LARGE, options, updates))


@pytest.mark.slow
def test_the_only_generator_killed_at_lag_0_and_at_a_checkpoint_comes_again(tmp_path: Path) -> None:
    """It has two ranks that decode together: if one dies, both are lost, and both are restarted."""
    updates, options = 10, {"lag": 0, **delays(generate=60.0, update=5.0)}
    flags = toy_flags(updates=updates, checkpoint_every=1, **PINNED)
    folder = make_run(tmp_path / "r", "toy", options, flags, meshes=("generator=tp2",))
    with Running(folder) as running:
        running.until_update(2)
        kill(running, "generator/0", rank=1)
        until_again(running, "generator/0", 1, where=" on host local")
        running.until_update(5)
        kill(running, "scorer/0")
        assert running.wait() == 0, running.errors
    assert comings(folder)[:3] == [("generator/0", "lost"), ("generator/0", "joined"), ("scorer/0", "lost")]
    bits = undisturbed(tmp_path / "u", "toy", {"lag": 0, **delays()}, updates)
    assert_as_if_nothing_had_happened(folder, updates, bits)


@pytest.mark.slow
def test_a_trainer_that_dies_ends_the_run_all_the_same(tmp_path: Path) -> None:
    flags = toy_flags(updates=1000, lost_replica="replace")
    folder = make_run(tmp_path / "r", "toy", delays(), flags, generators=2)
    with Running(folder) as running:
        running.until_update(1)
        kill(running, "trainer/0")
        assert running.wait() == 1
    assert running.cause == "rank-died"
    assert "trainer/0 rank 0 died: killed by SIGKILL" in running.errors


THREE = Cluster(
    hosts=(Host(name="a", cores=1), *(Host(name=name, cores=1, agent="external") for name in "bc")),
    pools={"generator": ("b", "c")},
)


@contextmanager
def agent_of(running: Running, host: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start an agent for a host of the cluster file, and end it afterwards."""
    line = running.until_line(lambda line: line.get("host") == host, f"the agent of host {host} was asked for")
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "agent", line["join"]]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_host_may_come_late_leave_and_come_back(tmp_path: Path) -> None:
    """With a range of generators, the run begins with one, and uses a second one while its host's agent is there."""
    options = {"lag": LAG, **delays(generate=100.0, update=20.0)}
    flags = toy_flags(updates=ENDLESS, first_generators=1, grace=60.0, **PINNED)
    folder = make_run(tmp_path / "r", "toy", options, flags, generators=2, cluster=THREE)
    with Running(folder) as running, agent_of(running, "b"):
        running.until_update(2)
        with agent_of(running, "c") as late:
            running.until_line(
                lambda line: "generator/1 rank 0 on host c has joined" in line.get("text", ""), "it came"
            )
            seen = num_rows(folder)
            running.until_update(seen + 3)
            late.terminate()
            assert late.wait(60) == 0
        running.until_line(lambda line: "generator/1 rank 0 on host c is lost" in line.get("text", ""), "it went")
        with agent_of(running, "c"):
            until_again(running, "generator/1", 1, where=" rank 0 on host c")
            running.until_update(num_rows(folder) + 3)
            running.interrupt()
            assert running.wait() == 130, running.errors
    assert comings(folder) == [("generator/1", event) for event in ("joined", "lost", "joined")]
    updates = summary(folder)["updates"]
    bits = undisturbed(tmp_path / "u", "toy", {"lag": LAG, **delays()}, updates)
    assert_as_if_nothing_had_happened(folder, updates, bits)


@pytest.mark.slow
def test_a_hosts_agent_that_is_killed_has_a_successor_at_once_and_one_that_was_stopped_ends(tmp_path: Path) -> None:
    options = {"lag": LAG, **delays(generate=100.0, update=20.0)}
    flags = toy_flags(updates=ENDLESS, grace=60.0, **PINNED)
    folder = make_run(tmp_path / "r", "toy", options, flags, generators=2, cluster=THREE)
    with Running(folder) as running, agent_of(running, "b"), agent_of(running, "c") as first:
        running.until_update(2)
        first.kill()
        first.wait()
        with agent_of(running, "c") as second:
            until_again(running, "generator/1", 1, where=" rank 0 on host c")
            running.until_update(num_rows(folder) + 3)
            halt(second)
            running.until_line(lambda line: "no heartbeat" in line.get("text", ""), "its silence was noticed")
            with agent_of(running, "c"):
                until_again(running, "generator/1", 2, where=" rank 0 on host c")
                second.send_signal(signal.SIGCONT)
                assert second.wait(60) == 1
                # Its end has not taken the socket of its successor, whose ranks still find it.
                os.kill(running.until_ready()["pools"]["generator"][1], signal.SIGKILL)
                until_again(running, "generator/1", 3, where=" rank 0 on host c")
                running.interrupt()
                assert running.wait() == 130, running.errors
    updates = summary(folder)["updates"]
    bits = undisturbed(tmp_path / "u", "toy", {"lag": LAG, **delays()}, updates)
    assert_as_if_nothing_had_happened(folder, updates, bits)


@pytest.mark.slow
def test_an_update_that_is_about_to_read_what_a_dead_host_has_gives_its_groups_back(tmp_path: Path) -> None:
    """Meanwhile another update is running. The trainer's two ranks read half a batch each: neither starts. Either the
    read or the weight sync to the dead host fails first; no bit depends on which."""
    updates, options = 12, {"lag": LAG, **delays(generate=20.0, update=300.0)}
    flags = toy_flags(updates=updates, **{**PINNED, "deadline": 12.0})
    meshes = ("trainer=dp2",)
    folder = make_run(tmp_path / "r", "toy", options, flags, generators=2, cluster=THREE, meshes=meshes)
    with Running(folder) as running, agent_of(running, "b"), agent_of(running, "c") as agent:
        running.until_update(4)
        agent.kill()
        assert running.wait() == 0, running.errors
    assert comings(folder) == [("generator/1", "lost")]
    bits = undisturbed(tmp_path / "u", "toy", {"lag": LAG, **delays()}, updates)
    assert_as_if_nothing_had_happened(folder, updates, bits)


def test_in_one_process_too_a_sender_keeps_the_versions_that_replicas_may_go_back_to(tmp_path: Path) -> None:
    flags = toy_flags(updates=6, **PINNED)
    assert len(rows(run_here(make_run(tmp_path, "toy", {"lag": 3}, flags, generators=3)))) == 6


def config(program: str, options: Mapping[str, Any], **flags: Any) -> RunConfig:
    found = RunOptions(lost_replica="replace", device="cpu", **flags)
    cluster = Cluster(hosts=(Host(name="local", cores=4),)) if flags else ONE_HOST
    return RunConfig.make(trace(load(program), options), None, cluster, found)


def test_what_cannot_be_lost_is_refused_by_name() -> None:
    learner = config("sft", {}, data="arithmetic")
    with pytest.raises(ValueError, match=r"--lost-replica replace: given pool trainer \(it holds policy\)"):
        check_rules(Tables(learner.graph, learner.plan), learner.rules(0))
    with pytest.raises(ValueError, match="--first-generators: given 3; needed at most --generators, 2"):
        config("toy", {}, generators=2, first_generators=3)
    assert config("toy", {}, generators=2).elastic == {"generator/0", "generator/1", "scorer/0"}


@contextmanager
def enrolled(ticket: Path, home: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start an agent with a ticket, and end it afterwards."""
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "agent", "--ticket", str(ticket)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True, cwd=home)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_an_agent_with_a_ticket_that_comes_late_takes_a_free_slot_and_so_does_the_one_after_it(tmp_path: Path) -> None:
    """The run needs two agents to begin, and has a slot for a third. The third joins, is ended, and is replaced."""
    folder, ms = tmp_path / "r", {"generate": "300", "score": "0", "update": "20", "sync": "0"}
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", "toy", "--lag", str(LAG), "--plain", "--seed"]
    command += ["0", "--batch", str(BATCH), "--slots", "16", "--updates", str(ENDLESS), "--versions", "pinned"]
    command += [
        "--lost-replica",
        "replace",
        "--grace",
        "60",
        "--generators",
        "1..2",
        "--on",
        "agents",
        "--out",
        str(folder),
    ]
    command += [word for name, value in ms.items() for word in (f"--{name}-ms", value)]
    ticket = folder / "ticket.json"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as run, ExitStack() as stack:
        stack.callback(run.kill)

        def wait(look: Callable[[], object], what: str) -> None:
            until(lambda: look() or run.poll() is not None, what)
            assert run.poll() is None

        def came(times: int) -> bool:
            stages = [stage for segment in read_segments(folder / "events.log")[0] for stage in segment.stages]
            return sum(b"ReplicaJoined" in step.event for stage in stages for step in stage.steps) >= times

        def more_than(updates: int) -> bool:
            return num_rows(folder) > updates

        for _ in range(2):
            stack.enter_context(enrolled(ticket, tmp_path))
        wait(partial(more_than, 1), "two updates with one generator")
        for times in (1, 2):
            late = stack.enter_context(enrolled(ticket, tmp_path))
            wait(partial(came, times), "the third agent's generator came")
            wait(partial(more_than, num_rows(folder) + 2), "updates with two generators")
            if times == 1:
                late.terminate()
                assert late.wait(60) == 0
        run.terminate()
        assert run.wait(DEADLINE_S) == 75
    assert comings(folder) == [("generator/1", event) for event in ("joined", "lost", "joined")]
    said = penstock("watch", str(folder), "--once")
    assert not (folder / "report.html").exists()  # the run was preempted
    assert penstock("report", str(folder)).returncode == 0
    assert "generator/1 lost" in (folder / "report.html").read_text()
    assert ("generator/1 rank 0 on host agent-2 is lost" in said.stdout, said.returncode) == (True, 0)
    updates = summary(folder)["updates"]
    bits = undisturbed(tmp_path / "u", "toy", {"lag": LAG, **delays()}, updates)
    assert_as_if_nothing_had_happened(folder, updates, bits)


# The fork server of host b, which forked all its ranks.
FORKS = "forks"


def of_name(process: psutil.Process, name: str) -> bool:
    parent = process.parent()
    if name != FORKS or parent is None:
        return str(process.name()) == name
    return "penstock.runtime.control.worker" in process.cmdline() and "/b.json" in " ".join(parent.cmdline())


@pytest.mark.slow
@pytest.mark.skipif("PENSTOCK_KILLS" not in os.environ, reason="a search: PENSTOCK_KILLS says how many are killed")
def test_ranks_that_are_killed_at_random_times_change_no_bit(tmp_path: Path) -> None:
    """PENSTOCK_SEED determines which processes are killed, and when."""
    kills, seed = int(os.environ["PENSTOCK_KILLS"]), int(os.environ.get("PENSTOCK_SEED", "0"))
    rng, updates, meshes = Random(seed), 12 * kills, ("generator=tp2",) * (seed % 2)
    options = {"lag": LAG, **delays(generate=40.0, score=5.0, update=60.0)}
    flags = toy_flags(updates=updates, checkpoint_every=4, **PINNED)
    # The generators are on another host name: their values are lost with them, not kept in shared memory.
    folder = make_run(tmp_path / "r", "toy", options, flags, generators=2, cluster=TWO_NAMES, meshes=meshes)
    ranks = [f"{replica}.{rank}" for replica in ("generator/0", "generator/1") for rank in range(1 + len(meshes))]
    with Running(folder) as running:
        running.until_update(1)
        for number in range(kills):
            running.until_update(min(updates - 1, rng.randrange(10 * number, 10 * number + 10)))
            sleep(rng.uniform(0.0, 0.2))
            name = rng.choice([*ranks, "scorer/0.0", FORKS])
            # A rank killed just before may not exist again, or not be ready yet; then it dies once more.
            for pid in running.pids(lambda process: of_name(process, name)):  # noqa: B023 - called here
                os.kill(pid, signal.SIGKILL)
        assert running.wait() == 0, running.errors
    assert any(event == "lost" for _, event in comings(folder)), f"seed {seed}"
    bits = undisturbed(tmp_path / "u", "toy", {"lag": LAG, **delays()}, updates)
    assert_as_if_nothing_had_happened(folder, updates, bits)
