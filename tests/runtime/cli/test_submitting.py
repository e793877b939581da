"""Runs that are submitted to a cluster manager as a job: what it receives, and how the command ends.

`tests/runtime/managers/test_kubernetes.py` tests the JobSet itself."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.runtime.cli.main import main
from penstock.runtime.control.security import DeskKeys, Ticket
from tests.runtime.managers.kubectl import Kubectl, line, pods

from .conftest import Output, Patch, Say

JOB = ("--on", "kubernetes", "--image", "registry.example/p:1", "--claim", "runs", "--agents", "3")
MADE = (0, json.dumps({"metadata": {"uid": "u-1"}}), "")
WELL = (0, "", "")
RUNS = pods("toy-controller-0-0-x", "Running")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: Patch) -> Kubectl:
    monkeypatch.setenv("PATH", str(tmp_path))
    return Kubectl(tmp_path)


def read(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    secret, jobset = yaml.safe_load_all(text)
    assert (secret["kind"], jobset["kind"]) == ("Secret", "JobSet")
    return secret, jobset


def command(jobset: dict[str, Any], job: str) -> list[str]:
    found = {one["name"]: one["template"]["spec"]["template"]["spec"] for one in jobset["spec"]["replicatedJobs"]}
    words: list[str] = found[job]["containers"][0]["command"]
    return words


def option(words: list[str], name: str) -> str:
    assert words.count(name) == 1
    return words[words.index(name) + 1]


def test_a_dry_run_prints_what_kubectl_takes_and_calls_nothing(say: Say, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", "")
    said = say("run", "toy", *JOB, "--gpus-per-agent", 4, "--memory-per-agent", "64Gi", "--dry-run")
    secret, jobset = read(said)
    assert secret["metadata"] == jobset["metadata"]
    text = secret["stringData"]
    (tmp_path / "desk").write_text(text["desk.json"])
    (tmp_path / "desk").chmod(0o600)
    keys = DeskKeys.read(tmp_path / "desk")
    (tmp_path / "ticket").write_text(text["ticket.json"])
    (tmp_path / "ticket").chmod(0o600)
    ticket = Ticket.read(tmp_path / "ticket")
    assert ticket == keys.ticket(ticket.endpoint)
    agents = jobset["spec"]["replicatedJobs"][1]["template"]["spec"]
    assert agents["parallelism"] == 3
    [agent] = agents["template"]["spec"]["containers"]
    assert agent["image"] == "registry.example/p:1"
    assert agent["resources"]["limits"] == {"cpu": "2", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["desk", "ticket"]


def test_a_dry_run_in_json_is_a_list_for_kubectl(say: Say) -> None:
    found = json.loads(say("run", "toy", *JOB, "--dry-run", "--json"))
    assert (found["apiVersion"], found["kind"]) == ("v1", "List")
    assert [one["kind"] for one in found["items"]] == ["Secret", "JobSet"]


def test_each_job_has_a_name_and_a_secret_of_its_own(say: Say) -> None:
    (one, first), (other, second) = (read(say("run", "toy", *JOB, "--dry-run")) for _ in range(2))
    assert first["metadata"]["name"] != second["metadata"]["name"]
    assert one["stringData"] != other["stringData"]
    assert option(command(first, "controller"), "--out") != option(command(second, "controller"), "--out")


def test_the_job_has_the_words_of_the_run_and_none_of_the_jobs_own(say: Say, tmp_path: Path) -> None:
    (tmp_path / "flags.toml").write_text('updates = 7\nplace = ["generator=1-2"]\nimage = "from.file/p:2"\n')
    mine = (*JOB, "--env-secret", "tokens", "--out", "/runs/mine")
    own = ["--batch", "4", "--update-ms=5", "--generators", "1..2", "--lost-replica", "replace", "--grace", "20"]
    there = ["--data", "/runs/there.jsonl", "--plan", "none", "--plain", "--resume", "never", "--json"]
    said = say("run", "toy", *own, *there, "--config", "flags.toml", *mine, "--dry-run", "--json")
    words = command(json.loads(said)["items"][1], "controller")
    assert words[:3] == ["penstock", "run", "toy"]
    assert "--env-secret" not in words
    for name, value in (("--batch", "4"), ("--updates", "7"), ("--grace", "20"), ("--out", "/runs/mine")):
        assert option(words, name) == value
    assert {"--update-ms=5", "--first-generators=1", "generator=1-2", "/runs/there.jsonl", "none"} <= set(words)
    assert (option(words, "--on"), option(words, "--resume"), option(words, "--agents")) == ("agents", "auto", "3")
    assert not {"--config", "--image", "--claim", "--dry-run", "never", "from.file/p:2"} & set(words)
    assert words.count("--plain") == 1


def test_the_words_of_the_job_are_a_run_that_can_be(say: Say, capsys: Output) -> None:
    """Run the controller Pod's command with a local address and folder: it waits for its agents."""
    words = command(read(say("run", "toy", "--updates", 3, *JOB, "--dry-run"))[1], "controller")
    for name, value in (("--out", "here"), ("--bind", "127.0.0.1:0"), ("--startup-deadline", "0.2")):
        words[words.index(name) + 1] = value
    at = words.index("--ticket-keys")
    with pytest.raises(SystemExit) as leaving:
        main([*words[1:at], *words[at + 2 :]])
    assert leaving.value.code == 1
    assert "--startup-deadline" in capsys.readouterr().err


@pytest.mark.parametrize(("state", "status"), [("Completed", 0), ("Failed", 1)])
def test_a_job_is_created_and_followed_to_its_end(
    here: None, kubectl: Kubectl, capfd: pytest.CaptureFixture[str], state: str, status: int
) -> None:
    kubectl.answer(
        {
            "create": [MADE, WELL],
            "logs": [(0, line("01", "update 1"), "")],
            "terminalState": [(0, state, "")],
            "get pods": [RUNS],
        }
    )
    with pytest.raises(SystemExit) as leaving:
        main(["run", "toy", *JOB, "--namespace", "team"])
    assert leaving.value.code == status
    captured = capfd.readouterr()
    assert captured.out == "update 1\n"
    assert ("kubectl delete jobset -n team toy-" in captured.err) is (state == "Failed")
    assert [words[2] for words, _ in kubectl.calls] == ["create", "create", "get", "get", "logs"]
    assert all(words[:2] == ["--namespace", "team"] for words, _ in kubectl.calls)


def test_what_kubectl_refuses_ends_the_command(here: None, kubectl: Kubectl, capsys: Output) -> None:
    kubectl.answer({"create": [(1, "", "Forbidden")]})
    with pytest.raises(SystemExit) as leaving:
        main(["run", "toy", *JOB])
    assert leaving.value.code == 1
    assert "Forbidden" in capsys.readouterr().err


def test_a_job_that_cannot_be_followed_goes_on_and_one_that_is_deleted_does_not(
    here: None, kubectl: Kubectl, capsys: Output
) -> None:
    for said, goes_on in (("(Forbidden): no", True), ('(NotFound): jobsets.jobset.x-k8s.io "toy-1" not found', False)):
        kubectl.answer({"create": [MADE, WELL], "terminalState": [(1, "", f"Error from server {said}")]})
        with pytest.raises(SystemExit) as leaving:
            main(["run", "toy", *JOB])
        assert leaving.value.code == 1
        told = capsys.readouterr().err
        assert said in told
        assert ("kubectl delete jobset toy-" in told) is goes_on


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_ctrl_c_leaves_the_job_and_says_how_to_end_it(tmp_path: Path, number: signal.Signals, status: int) -> None:
    kubectl = Kubectl(tmp_path)
    log = line("01", "update 1")
    kubectl.answer({"create": [MADE, WELL], "logs": [(0, log, "", 60.0)], "terminalState": [WELL], "get pods": [RUNS]})
    words = [sys.executable, "-m", "penstock.runtime.cli.main", "run", "toy", *JOB]
    environment = {**os.environ, "PATH": str(tmp_path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "update 1\n"
        running.send_signal(number)
        _, said = running.communicate(timeout=30)
    assert running.returncode == status
    assert "kubectl delete jobset toy-" in said
    assert "Traceback" not in said
    assert not any("delete" in words for words, _ in kubectl.calls)


def test_a_job_whose_log_nobody_reads_is_left(tmp_path: Path) -> None:
    kubectl = Kubectl(tmp_path)
    log = line("01", "update")
    kubectl.answer({"create": [MADE, WELL], "logs": [(0, log, "", 0.1)], "terminalState": [WELL], "get pods": [RUNS]})
    words = [sys.executable, "-m", "penstock.runtime.cli.main", "run", "toy", *JOB]
    environment = {**os.environ, "PATH": str(tmp_path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        running.stdout.close()
        assert running.wait(timeout=60) == 141
        assert running.stderr is not None
        assert "Traceback" not in running.stderr.read()


def test_a_job_of_slurm_whose_output_nobody_reads_is_left_and_no_fault_of_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    texts = {
        "sbatch": "echo 17",
        "scontrol": f"echo update >> {folder}/job.out; echo JobId=17 JobState=RUNNING NodeList=n1",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    words = [sys.executable, "-m", "penstock.runtime.cli.main", "run", "toy", "--out", str(folder)]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    pipe = subprocess.PIPE
    command = [*words, "--on", "slurm", "--submit"]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as running:
        assert running.stdout is not None
        running.stdout.close()
        assert running.wait(timeout=60) == 141
        assert running.stderr is not None
        said = running.stderr.read()
    assert "job 17 goes on" in said
    assert "scancel 17" in said
    assert "Traceback" not in said
