"""What is refused of an allocation of Slurm before anything is started; `tests/gates/test_slurm.py` has real ones."""

from collections.abc import Mapping

import pytest

from penstock.runtime.control.agents import AgentsError
from penstock.runtime.managers.slurm import SlurmAgents

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
