"""The RayJob example: Kubernetes accepts its Pods, and `penstock run` accepts its command."""

import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from penstock.graph import Program, load
from penstock.runtime.cli.parse import parse

MANIFEST = Path(__file__).resolve().parents[3] / "docs" / "examples" / "rayjob.yaml"
VERSION = "1.34"
"""The Kubernetes version whose schemas are used."""


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    return read


def templates(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


def test_the_pods_of_the_rayjob_are_pods(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    for template in templates(job):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, **template}
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_the_command_of_the_rayjob_asks_for_the_nodes_that_it_has_in_a_folder_that_all_see(job: dict[str, Any]) -> None:
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["penstock", "run"]
    program = load(words[2])
    assert isinstance(program, Program)
    flags = parse(program, "run", words[2], words[3:]).flags
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (flags.on, flags.agents) == ("ray", sum(group["replicas"] for group in workers))
    assert flags.resume == "auto"
    for template in templates(job):
        mounts = [mount["mountPath"] for one in template["spec"]["containers"] for mount in one["volumeMounts"]]
        assert any(Path(flags.out).is_relative_to(path) for path in mounts)
