"""Runs on a Slurm of three nodes (`slurm`): its allocations, its preemptions, its cancelled jobs, its dead nodes."""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any

import pytest

from penstock.runtime.control.messages import read_record
from penstock.runtime.record.checkpoints import latest_checkpoint
from penstock.runtime.record.event_log import read_segments
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.schedule.events import Swapped

from .network import Network, why_not
from .running import (
    DEADLINE_S,
    ENDLESS,
    HELD,
    assert_all_consumed,
    assert_equal_bits,
    final_state,
    holding,
    make_run,
    num_rows,
    replayed,
    run_here,
    summary,
    toy_flags,
    until,
)
from .slurm import LOGIN, NODES, Slurm, Unavailable, unpacked

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
PENSTOCK = (sys.executable, "-m", "penstock.runtime.cli.main")
BATCH, SEED, LAG = 2, 5, 1
# The states of a job that has ended and freed its nodes.
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    try:
        root = unpacked(folder)
    except Unavailable as reason:
        pytest.skip(f"Slurm: {reason}")
    with Network(*NODES, LOGIN) as network, Slurm(network, root, folder / "cluster") as found:
        yield found


def words(out: Path, updates: int, *program: str) -> list[str]:
    """Return the words of a pinned run of fake nodes, by default of toy, with a checkpoint after every two updates."""
    given = {"lag": LAG, "versions": "pinned", "updates": updates, "batch": BATCH, "seed": SEED, "out": out}
    given["checkpoint-every"] = 2
    named = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return ["run", *(program or ("toy",)), *named, "--plain", "--on", "slurm"]


def alone(path: Path, updates: int) -> Any:
    """Do the same run on one host, undisturbed, and return its last state."""
    flags = toy_flags(updates=updates, batch=BATCH, versions="pinned", seed=SEED)
    return final_state(run_here(make_run(path, "toy", {"lag": LAG}, flags)), updates)


class Submitted:
    """A submitted run: the command that follows it, its job and its folder."""

    def __init__(self, slurm: Slurm, name: str, folder: Path, process: "subprocess.Popen[str]") -> None:
        self.slurm, self.name, self.folder, self.process = slurm, name, folder, process
        self.job = until(self._number, "the job was submitted")

    def _number(self) -> str:
        # The queue is this test's own: no other job of this name is in it.
        return self.slurm.say("squeue", "-h", "-n", self.name, "-o", "%A").strip()

    def until_update(self, number: int) -> dict[str, str]:
        """Wait until `number` updates are done, and return the state of the job."""
        until(lambda: num_rows(self.folder) >= number, f"update {number} of job {self.job}")
        return self.slurm.state(self.job)

    def wait(self) -> tuple[int, str]:
        """Wait for the command, and return its exit status and the output of the job."""
        self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, self.said

    @property
    def said(self) -> str:
        """The output of the job so far."""
        return (self.folder / "job.out").read_text()


@contextmanager
def submitted(slurm: Slurm, folder: Path, updates: int, program: Sequence[str]) -> Iterator[Submitted]:
    """Submit a run on two nodes of its own."""
    command = [*PENSTOCK, *words(folder, updates, *program), "--submit", "--", "--nodes", "2", "--exclusive"]
    name = program[0].rpartition(":")[2]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        slurm.on_login(command), env=slurm.environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield Submitted(slurm, name, folder, process)
    finally:
        # End what a failed test has left.
        slurm.say("scancel", "--name", name)
        process.kill()
        process.communicate()
        until(lambda: not slurm.say("squeue", "-h", "-n", name).strip(), "the job has gone")


def is_live(folder: Path, version: int) -> bool:
    """True if a generator has begun to sample with this version of the weights."""
    stages = [stage for segment in read_segments(folder / "events.log")[0] for stage in segment.stages]
    events = [read_record(step.event) for stage in stages for step in stage.steps]
    return any(isinstance(event, Swapped) and event.version == version for event in events)


def ended(slurm: Slurm, job: str) -> dict[str, str]:
    """Wait until a job has ended, and return its state."""
    until(lambda: slurm.state(job)["JobState"] in ENDED, f"job {job} has ended")
    return slurm.state(job)


def test_two_runs_of_one_user_at_once_on_three_nodes_have_the_bits_of_one_host(slurm: Slurm, tmp_path: Path) -> None:
    """One runs from a batch script, the other by salloc, with its launcher on the login host."""
    first, second = tmp_path / "r1", tmp_path / "r2"
    command = f"exec {shlex.join([*PENSTOCK, *words(first, 6)])}"
    said = tmp_path / "said"
    job = slurm.say("sbatch", "--parsable", "--nodes", "3", "--output", str(said), "--wrap", command).strip()
    until(lambda: (first / "ticket.json").exists(), "the first run waits for its agents")
    slurm.say("salloc", "--nodes", "3", *PENSTOCK, *words(second, 6), limit=DEADLINE_S)
    done = ended(slurm, job)
    assert (done["JobState"], done["ExitCode"], done["NumNodes"]) == ("COMPLETED", "0:0", "3"), said.read_text()
    whole = alone(tmp_path / "alone", 6)
    for folder in (first, second):
        assert_equal_bits(final_state(folder, 6), whole)
        assert_all_consumed(folder, 6 * BATCH)
        assert summary(folder)["warnings"] == []
        assert not (folder / "ticket.json").exists()


def test_a_run_that_is_preempted_goes_on_on_other_nodes_with_the_bits_of_one_that_was_not(
    slurm: Slurm, tmp_path: Path
) -> None:
    folder, updates = tmp_path / "r", 40
    # The second hold is for a controller that learns of the preemption late.
    holds = holding(tmp_path / "holds", 20, 25)
    with submitted(slurm, folder, updates, [HELD, "--holds", str(holds)]) as run:
        was = run.until_update(3)["NodeList"]
        taken = (
            "--partition",
            "high",
            "--nodelist",
            "n1",
            "--exclusive",
            "--wrap",
            "sleep 600",
            "--output",
            "/dev/null",
        )
        high = slurm.say("sbatch", "--parsable", *taken).strip()
        try:
            until(lambda: "is preempted" in run.said, "the job was told")
            (holds / "20").unlink()
            until(lambda: slurm.state(high)["JobState"] == "RUNNING", "the node was taken")
            (holds / "25").unlink()
            status, said = run.wait()
        finally:
            slurm.say("scancel", high)
        done = slurm.state(run.job)
    assert (status, done["JobState"], done["Restarts"]) == (0, "COMPLETED", "1"), said
    assert (was, done["NodeList"]) == ("n[1-2]", "n[2-3]")
    assert_equal_bits(final_state(folder, updates), alone(tmp_path / "alone", updates))
    assert_all_consumed(folder, updates * BATCH)
    replayed(folder)


def test_a_run_whose_node_dies_names_it_and_goes_on_without_it_with_the_same_bits(slurm: Slurm, tmp_path: Path) -> None:
    folder, updates = tmp_path / "r", 40
    holds = holding(tmp_path / "holds", 8)
    with submitted(slurm, folder, updates, [HELD, "--holds", str(holds)]) as run:
        assert run.until_update(8)["NodeList"] == "n[1-2]"
        # Then no weights are in transit, nor will be soon: a transfer that fails would name ranks, but no host.
        until(lambda: is_live(folder, 8), "the generator has the newest weights")
        slurm.kill("n2")
        try:
            until(lambda: "host n2" in run.said, "the loss was told")
            (holds / "8").unlink()
            until(lambda: slurm.state(run.job)["ExcNodeList"] == "n2", "the run does without the node")
            # Slurm starts the job again in any case, and learns of the dead node later. Tell it after the second of the
            # requeue, in which it would kill the job that starts again ("credential revoked").
            second = int(time())
            until(lambda: int(time()) > second, "the second of the requeue is over")
            slurm.say("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=off")
            status, said = run.wait()
            done = slurm.state(run.job)
        finally:
            slurm.start("n2")
    assert (status, done["JobState"], done["NodeList"], done["ExcNodeList"]) == (0, "COMPLETED", "n[1,3]", "n2"), said
    assert "host n2" in said
    assert_equal_bits(final_state(folder, updates), alone(tmp_path / "alone", updates))


def test_ctrl_c_leaves_a_job_usr1_requeues_it_and_scancel_has_it_make_a_checkpoint(
    slurm: Slurm, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    with submitted(slurm, folder, ENDLESS, ["toy", "--update-ms", "150"]) as run:
        run.until_update(1)
        run.process.send_signal(signal.SIGINT)
        told, _ = run.process.communicate(timeout=DEADLINE_S)
        assert (run.process.returncode, f"scancel {run.job}" in told) == (130, True), told
        # Slurm sends this signal before the time limit.
        slurm.say("scancel", "--batch", "--signal", "USR1", run.job)
        until(lambda: slurm.state(run.job)["Restarts"] == "1", "the job was requeued")
        before = num_rows(folder)
        assert run.until_update(before + 2)["JobState"] == "RUNNING"
        slurm.say("scancel", run.job)
        done = ended(slurm, run.job)
        until(lambda: (folder / "summary.json").exists(), "the run has ended")
    assert (done["JobState"], done["Restarts"]) == ("CANCELLED", "1")
    saved = latest_checkpoint(RunFolder.open(folder))
    assert saved is not None
    assert saved.update == summary(folder)["updates"] >= 3
    assert summary(folder)["cause"] == "preempted"


def test_each_task_of_an_array_is_a_run_with_its_own_seed(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "seeds"
    command = [*PENSTOCK, "run", "toy", "--updates", "2", "--batch", "2", "--out", str(folder), "--on", "slurm"]
    tasks = ("--array", "3-4", "--nodes", "1")
    script = slurm.say(*command, "--submit", "--dry-run", "--", *tasks)
    assert not folder.exists()
    (tmp_path / "job.sh").write_text(script)
    slurm.say("sbatch", "--test-only", str(tmp_path / "job.sh"))
    slurm.say(*command, "--submit", "--", *tasks, limit=DEADLINE_S)
    assert (folder / "job.sh").read_text() == script
    for seed in (3, 4):
        assert json.loads((folder / str(seed) / "config.json").read_text())["flags"]["seed"] == seed
        assert_all_consumed(folder / str(seed), 4)
