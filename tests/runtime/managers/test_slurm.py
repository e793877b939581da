"""What is refused of Slurm before anything is started, and batch scripts; `tests/gates/test_slurm.py` has real jobs."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.runtime.control.agents import AgentsError
from penstock.runtime.managers.slurm import SlurmAgents
from penstock.runtime.managers.slurm_jobs import Job

TWO = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n1,n2"}


@pytest.mark.parametrize(
    ("count", "environment", "named"),
    [
        (None, {}, ["SLURM_JOB_ID", "sbatch", "salloc", "--submit"]),
        (3, TWO, ["--agents 3", "2 nodes", "n1,n2", "--nodes 3"]),
        (None, {**TWO, "SLURM_STEP_NUM_TASKS": "8"}, ["8 launchers", "srun"]),
        (None, {**TWO, "SLURM_JOB_NODELIST": "n[1-2]", "PATH": ""}, ["scontrol"]),
    ],
)
def test_what_is_no_allocation_for_these_agents_is_refused_with_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, count: int | None, environment: Mapping[str, str], named: list[str]
) -> None:
    monkeypatch.setenv("PATH", environment.get("PATH", "/usr/bin"))
    with pytest.raises(AgentsError) as refused:
        SlurmAgents(count, environment)
    assert [word for word in named if word not in str(refused.value)] == []


def test_an_allocation_has_as_many_agents_as_nodes_or_as_are_asked_for() -> None:
    assert (SlurmAgents(None, TWO).slots, SlurmAgents(1, TWO).slots) == (2, 1)


@pytest.mark.parametrize("options", [(), ("--nodes", "2"), ("-N2", "--array=0-3"), ("--comment", "a 'b' $c")])
def test_a_batch_script_is_one_whatever_words_and_folder_are(options: tuple[str, ...]) -> None:
    words, folder = ("run", "toy", "--system", "it's $HOME\n`date`"), Path("/runs/a 'b' $c")
    job = Job("toy", words, folder, options, nodes=3)
    checked = subprocess.run(["bash", "-n"], input=job.text(), capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")
    given = [line for line in job.text().splitlines() if line.startswith("#SBATCH")]
    nodes = [line for line in given if line.startswith(("#SBATCH --nodes", "#SBATCH -N"))]
    assert nodes == [
        {"--nodes": "#SBATCH --nodes 2", "-N2": "#SBATCH -N2"}.get("".join(options[:1]), "#SBATCH --nodes 3")
    ]
    assert ("--seed" in job.text()) is job.array is ("--array=0-3" in options)


@pytest.mark.parametrize("options", [("4",), ("--output", "o"), ("-oo",), ("--wrap=true",), ("--comment", "a\nb")])
def test_options_of_sbatch_that_are_the_scripts_own_or_cannot_stand_in_it_are_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"given .*needed"):
        Job("toy", ("run", "toy"), Path("/runs/a"), options)
