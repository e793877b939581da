"""What Slurm runs refuse before they start, and batch scripts; `tests/gates/test_slurm.py` runs real jobs.

Shell scripts stand in for Slurm's commands: for late or rare answers, and for GPUs.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.runtime.control.agents import AgentsError
from penstock.runtime.control.failure import MENDABLE
from penstock.runtime.control.signals import FAILED, PREEMPTED
from penstock.runtime.managers import slurm_jobs
from penstock.runtime.managers.slurm import SlurmAgents
from penstock.runtime.managers.slurm_jobs import Job, follow

TWO = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n1,n2"}


def instrument(path: Path, text: str) -> Path:
    """Write a shell script in place of a command."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


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


def test_what_srun_says_of_its_tasks_is_heard_after_the_run_folder_was_moved(tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    told = "srun: error: n2: task 1: Exited with exit code 3"
    instrument(tmp_path / "srun", f'until [ -d "{moved}" ]; do sleep 0.01; done; echo "{told}" >&2; exit 3')
    folder = tmp_path / "run"
    folder.mkdir()
    agents = SlurmAgents(None, {**TWO, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    agents.start(folder / "ticket.json", lambda text: None)
    try:
        assert agents.poll() == []
        folder.rename(moved)
        found: list[tuple[str, str]] = []
        until = time.monotonic() + 60
        while not found and time.monotonic() < until:
            found += agents.poll()
    finally:
        agents.stop()
    assert found == [("n2", "Exited with exit code 3")]


def test_srun_hears_nothing_of_the_gpus_and_tasks_that_other_steps_of_the_job_are_to_have(tmp_path: Path) -> None:
    instrument(tmp_path / "srun", "env > $(dirname $0)/heard")
    names = ("GPUS", "GPUS_PER_SOCKET", "TRES_BIND", "NTASKS_PER_CORE", "NTASKS_PER_SOCKET", "NTASKS_PER_TRES")
    others = {f"SLURM_{name}": "1" for name in (*names, "GPU_BIND", "NTASKS")}
    agents = SlurmAgents(None, {**TWO, **others, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    agents.start(tmp_path / "ticket.json", lambda text: None)
    agents.stop()
    heard = dict(line.partition("=")[::2] for line in (tmp_path / "heard").read_text().splitlines())
    assert TWO.items() <= heard.items()
    assert others.keys() & heard.keys() == set()


def requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, answer: str, **array: str) -> list[str]:
    """Run the script of job 17, with the command `run` and with `answer` from scontrol, and return what it requeues.
    Its folder has the summary of a run that lost a host."""
    folder = tmp_path / "run" / array.get("SLURM_ARRAY_TASK_ID", "")
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"cause": "agent-died", "wall_s": 1.0}')
    (tmp_path / "answer").write_text(answer)
    text = f'[ $1 = show ] && exec cat {tmp_path}/answer\necho "$2" $3 >> {tmp_path}/requeued'
    instrument(tmp_path / "scontrol", text)
    monkeypatch.setattr(sys, "executable", str(instrument(tmp_path / "python", f"cd {folder}\n{run}")))
    job = Job("toy", ("run", "toy"), tmp_path / "run", ("--array", "3-4") if array else ())
    environment = {**TWO, **array, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash"], input=job.text(), env=environment, text=True, timeout=60, stdout=subprocess.DEVNULL)
    found = tmp_path / "requeued"
    return found.read_text().split() if found.exists() else []


RUNNING = "JobId=17 JobName=toy Priority=1 JobState=RUNNING Reason=None\n"


@pytest.mark.parametrize("cause", [*MENDABLE, "node"])
def test_a_job_is_requeued_after_a_loss_that_another_start_may_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    run = f"""echo '{{"cause": "{cause}", "wall_s": 2.0}}' > summary.json; exit {FAILED}"""
    assert requeued(tmp_path, monkeypatch, run, RUNNING) == ["17"] * (cause in MENDABLE)


@pytest.mark.parametrize(("already", "excluded"), [("(null)", "n2"), ("n1", "n1,n2")])
@pytest.mark.parametrize("able", [True, False])
def test_a_job_is_requeued_without_the_node_that_it_has_lost_if_it_can_do_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, able: bool, already: str, excluded: str
) -> None:
    instrument(tmp_path / "sbatch", f'echo "$@" > {tmp_path}/asked\nexit {0 if able else 1}')
    run = f"""echo '{{"cause": "agent-died", "lost_host": "n2"}}' > summary.json; exit {FAILED}"""
    state = f"{RUNNING.strip()} ReqNodeList=(null) ExcNodeList={already} NodeList=n[1-2]\n"
    without = ["JobId=17", f"ExcNodeList={excluded}"]
    assert requeued(tmp_path, monkeypatch, run, state) == ["17", *without * able]
    assert (tmp_path / "asked").read_text().split() == ["--test-only", "--exclude", excluded, f"{tmp_path}/run/job.sh"]


def test_a_start_that_is_refused_is_not_requeued_for_what_ended_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requeued(tmp_path, monkeypatch, f"exit {FAILED}", RUNNING) == []


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "CANCELLED"])
def test_a_task_that_is_cancelled_is_not_requeued_since_another_of_its_array_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The last task of an array has the array's own number: an answer about that number describes all tasks."""
    tasks = {3: ("18", "RUNNING"), 4: ("17", state)}
    line = "JobId={} ArrayJobId=17 ArrayTaskId={} JobName=toy JobState={} Reason=None\n"
    answer = "".join(line.format(number, task, said) for task, (number, said) in tasks.items())
    array = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "4"}
    found = requeued(tmp_path, monkeypatch, f"exit {PREEMPTED}", answer, **array)
    assert found == ["17_4"] * (state == "RUNNING")


@pytest.mark.parametrize(("first", "done"), [("FAILED", False), ("COMPLETED", True)])
def test_an_array_whose_first_task_failed_has_failed_though_slurm_has_forgotten_that_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, done: bool
) -> None:
    line = "echo JobId={} ArrayJobId=17 ArrayTaskId={} JobState={}\n"
    early, late = line.format(18, 3, first) + line.format(17, 4, "RUNNING"), line.format(17, 4, "COMPLETED")
    again = f"mkdir {tmp_path}/asked 2>/dev/null"
    instrument(tmp_path / "scontrol", f"if {again}; then\n{early}else\n{late}fi")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_jobs, "LOOK_S", 0.01)
    told: list[str] = []
    job = Job("toy", ("run", "toy"), tmp_path, ("--array", "3-4"))
    assert follow(job, "17", told.append, lambda text: None) is done
    assert len(told) == 3  # each state is reported once
