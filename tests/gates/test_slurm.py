"""Runs on a Slurm of three nodes (`slurm`): its allocations, its preemptions, its cancelled jobs, its dead nodes."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .network import Network, why_not
from .running import assert_all_consumed, assert_equal_bits, final_state, make_run, run_here, summary, toy_flags, until
from .slurm import LOGIN, NODES, Slurm, Unavailable, unpacked

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
PENSTOCK = (sys.executable, "-m", "penstock.runtime.cli.main")
BATCH, SEED, LAG = 2, 5, 1
# What a job is in when it has ended, and its nodes are free again.
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


def words(out: Path, updates: int, **delays: float) -> list[str]:
    """A pinned run of fake nodes."""
    options = [word for name, ms in delays.items() for word in (f"--{name}-ms", str(ms))]
    given = {"lag": LAG, "versions": "pinned", "updates": updates, "batch": BATCH, "seed": SEED, "out": out}
    named = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return ["run", "toy", *named, *options, "--plain", "--on", "slurm"]


def alone(path: Path, updates: int) -> Any:
    """The state of the same run on one host, that nobody has disturbed."""
    flags = toy_flags(updates=updates, batch=BATCH, versions="pinned", seed=SEED)
    return final_state(run_here(make_run(path, "toy", {"lag": LAG}, flags)), updates)


def ended(slurm: Slurm, job: str) -> dict[str, str]:
    """What is said of a job that has ended."""
    until(lambda: slurm.state(job)["JobState"] in ENDED, f"job {job} has ended")
    return slurm.state(job)


def test_two_runs_of_one_user_at_once_on_three_nodes_have_the_bits_of_one_host(slurm: Slurm, tmp_path: Path) -> None:
    folders, jobs = [tmp_path / "r1", tmp_path / "r2"], list[str]()
    for folder in folders:
        command = f"exec {shlex.join([*PENSTOCK, *words(folder, 6)])}"
        options = ("--parsable", "--nodes", "3", "--output", str(tmp_path / f"{folder.name}.out"), "--wrap", command)
        jobs.append(slurm.say("sbatch", *options).strip())
    until(lambda: all((folder / "ticket.json").exists() for folder in folders), "both runs wait for their agents")
    whole = alone(tmp_path / "alone", 6)
    for folder, job in zip(folders, jobs, strict=True):
        done = ended(slurm, job)
        said = (tmp_path / f"{folder.name}.out").read_text()
        assert (done["JobState"], done["ExitCode"], done["NumNodes"]) == ("COMPLETED", "0:0", "3"), said
        assert_equal_bits(final_state(folder, 6), whole)
        assert_all_consumed(folder, 6 * BATCH)
        assert summary(folder)["warnings"] == []
        assert not (folder / "ticket.json").exists()
