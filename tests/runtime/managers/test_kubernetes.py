"""Manifests of a run for Kubernetes, against the schemas of JobSet and of Kubernetes itself.

The tests have no API server: `kubectl` is an instrument, an executable that records its arguments and answers as a
cluster would. The schema of JobSet is read from the shared data, if they exist.
"""

import copy
import json
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from penstock.runtime.cli.flags import AgentFlags, read_flags
from penstock.runtime.control.security import DeskKeys, KeyFileError, Ticket
from penstock.runtime.managers.kubernetes import (
    AGENTS,
    CONTROLLER,
    DESK,
    TICKET,
    KubernetesError,
    KubernetesRun,
    as_yaml,
    create,
    follow,
    job_name,
    manifests,
)

from .kubectl import Kubectl, line
from .kubectl import pods as controller

ROOT = Path(__file__).resolve().parents[3]
CRD = ROOT.parent / "shared" / "data" / "jobset" / "jobset.x-k8s.io_jobsets.yaml"
VERSION = "1.34"
"""The Kubernetes version whose schemas are used."""
WORDS = ("aipo", "--updates", "20", "--system", "count $(POD_IP) and ${HOME}")


def workload(**changes: Any) -> KubernetesRun:
    given: dict[str, Any] = {"name": "aipo-1f", "image": "registry.example/penstock:1", "agents": 3, "claim": "runs"}
    return KubernetesRun(**{**given, "words": WORDS, **changes})


def keys(asked: KubernetesRun) -> dict[str, str]:
    made = DeskKeys.make(asked.name)
    return {TICKET: made.ticket(asked.endpoint).text(), DESK: made.text()}


WORKLOADS = {
    "smallest": workload(agents=1),
    "with all": workload(
        gpus=8, cpus=96, memory="1.5Ti", namespace="team", environment="t", grace=25.5, out="/runs/a/b"
    ),
}
each = pytest.mark.parametrize("asked", WORKLOADS.values(), ids=WORKLOADS)


def strict(schema: Any) -> Any:
    """Return the schema with unknown keys forbidden: a cluster drops them silently."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    closed = "properties" in made and "additionalProperties" not in made
    if closed and not made.get("x-kubernetes-preserve-unknown-fields") and isinstance(made["properties"], dict):
        made["additionalProperties"] = False
    return made


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    if not CRD.exists():
        pytest.skip(f"{CRD} is not here: the schema of JobSet")
    versions = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    schema = next(one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1alpha2")
    return jsonschema.Draft7Validator(strict(schema))


def read(asked: KubernetesRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifests as a cluster reads them."""
    secret, jobset = yaml.safe_load_all(as_yaml(manifests(asked, keys(asked))))
    return secret, jobset


def jobs(jobset: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one["template"]["spec"] for one in jobset["spec"]["replicatedJobs"]}


def pods(jobset: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: job["template"]["spec"] for name, job in jobs(jobset).items()}


def faults(validator: jsonschema.Draft7Validator, jobset: dict[str, Any]) -> list[str]:
    """Return the errors by JobSet's schema, without `metadata`, which belongs to Kubernetes' own schemas."""
    return [error.message for error in validator.iter_errors({**jobset, "metadata": {}})]


@each
def test_a_jobset_is_what_its_schema_says(validator: jsonschema.Draft7Validator, asked: KubernetesRun) -> None:
    assert faults(validator, read(asked)[1]) == []


WRONG: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "a key of a JobSet": (("spec", "networks"), {}),
    "a policy": (("spec", "successPolicy", "operator"), "Some"),
    "an action": (("spec", "failurePolicy", "rules", 0, "action"), "Restart"),
    "a key of a job": (("spec", "replicatedJobs", 0, "template", "spec", "completion"), "Indexed"),
    "a key of a container": (
        ("spec", "replicatedJobs", 1, "template", "spec", "template", "spec", "containers", 0, "resource"),
        {},
    ),
    "a number": (("spec", "replicatedJobs", 1, "template", "spec", "parallelism"), "3"),
}


@pytest.mark.parametrize(("path", "value"), WRONG.values(), ids=WRONG)
def test_a_wrong_key_or_value_is_found(
    validator: jsonschema.Draft7Validator, path: tuple[str | int, ...], value: object
) -> None:
    broken = copy.deepcopy(read(workload())[1])
    inner: Any = broken
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert len(faults(validator, broken)) == 1


@each
def test_the_secret_the_jobs_and_the_pods_are_what_kubernetes_knows(asked: KubernetesRun) -> None:
    secret, jobset = read(asked)
    kubernetes_validate.validate(secret, VERSION, strict=True)
    for name, job in jobs(jobset).items():
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job}
        kubernetes_validate.validate(whole, VERSION, strict=True)
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": job["template"]["spec"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)
        pod["spec"] = {**pod["spec"], "shareProcessNamespaces": True}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(pod, VERSION, strict=True)


@each
def test_pods_run_as_nobody_special(asked: KubernetesRun) -> None:
    """The requirements of the Pod Security Standard "restricted"."""
    for pod in pods(read(asked)[1]).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys()


@each
def test_what_is_taken_away_restarts_uncounted_and_the_rest_is_counted(asked: KubernetesRun) -> None:
    spec = read(asked)[1]["spec"]
    rules = {name: job["podFailurePolicy"]["rules"] for name, job in jobs({"spec": spec}).items()}
    for name, action in ((CONTROLLER, "FailJob"), (AGENTS, "Ignore")):
        assert {rule["action"] for rule in rules[name]} == {action}
        assert [rule["onExitCodes"]["values"] for rule in rules[name] if "onExitCodes" in rule] == [[75]]
        conditions = [one["type"] for rule in rules[name] for one in rule.get("onPodConditions", ())]
        assert conditions == ["DisruptionTarget"]
    [rule] = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert rule["targetReplicatedJobs"] == [CONTROLLER]
    assert spec["failurePolicy"]["maxRestarts"] == 0
    assert spec["successPolicy"]["targetReplicatedJobs"] == [CONTROLLER]
    for job in jobs({"spec": spec}).values():
        assert job["template"]["spec"]["restartPolicy"] == "Never"  # the policies above need it
        assert job["template"]["spec"]["terminationGracePeriodSeconds"] >= asked.grace


def test_the_ticket_names_the_controllers_pod_as_jobset_names_it() -> None:
    asked = workload()
    secret, jobset = read(asked)
    ticket = json.loads(secret["stringData"][TICKET])
    host, _, port = ticket["endpoint"].rpartition(":")
    # <jobset>-<replicated job>-<index of the job>-<index of the Pod>.<subdomain>
    assert host == f"{jobset['metadata']['name']}-{CONTROLLER}-0-0.{jobset['spec']['network']['subdomain']}"
    [container] = pods(jobset)[CONTROLLER]["containers"]
    assert f"$(POD_IP):{port}" in container["command"]
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True
    for job in jobs(jobset).values():
        assert job["completionMode"] == "Indexed"


def test_the_longest_name_has_room_for_what_kubernetes_adds() -> None:
    name = job_name(
        "/a/b/a_program_with_a_name_that_is_longer_than_names_of_pods.py:a_function_of_that_kind", "0123456"
    )
    asked = workload(name=name, agents=1000)
    assert len(f"{asked.name}-{CONTROLLER}-0-0-abcde") <= 63
    assert len(f"{asked.name}-{AGENTS}-0-999-abcde") <= 63
    assert job_name("aipo", "1f") == "aipo-1f"
    assert job_name("package.module:My_Program", "1f") == "my-program-1f"
    assert job_name("file.py:___", "1f") == "run-1f"


@each
def test_secrets_are_in_the_secret_alone_and_agents_have_no_secret_key(asked: KubernetesRun) -> None:
    secret, jobset = read(asked)
    desk = json.loads(secret["stringData"][DESK])
    assert desk["secret"] not in secret["stringData"][TICKET]
    for text in (desk["secret"], desk["token"]):
        assert text not in json.dumps(jobset)
    shown = {
        name: [item["key"] for volume in pod["volumes"] for item in volume.get("secret", {}).get("items", ())]
        for name, pod in pods(jobset).items()
    }
    assert shown == {CONTROLLER: [DESK], AGENTS: [TICKET]}


def test_the_ticket_is_copied_with_a_mode_that_is_not_refused(tmp_path: Path) -> None:
    """By the manifest's own command. Kubelet mounts files owned by root and readable by fsGroup's group."""
    asked = workload()
    secret, jobset = read(asked)
    pod = pods(jobset)[AGENTS]
    [copied] = pod["initContainers"]
    mounted, kept = (tmp_path / mount["name"] for mount in reversed(copied["volumeMounts"]))
    places = {mount["mountPath"]: str(tmp_path / mount["name"]) for mount in copied["volumeMounts"]}
    mounted.mkdir()
    kept.mkdir()
    (mounted / TICKET).write_text(secret["stringData"][TICKET])
    (mounted / TICKET).chmod(0o440)
    with pytest.raises(KeyFileError):
        Ticket.read(mounted / TICKET)
    words = list(copied["command"])
    # Replace the longer path first, since one path is a prefix of the other.
    for inside, outside in sorted(places.items(), reverse=True):
        words = [outside + word.removeprefix(inside) if word.startswith(inside) else word for word in words]
    for _ in range(2):  # it is copied again if the Pod's node restarts
        subprocess.run(words, check=True)
        assert stat.S_IMODE((kept / TICKET).stat().st_mode) == 0o400
    [agent] = pod["containers"]
    given = Path(agent["command"][agent["command"].index("--ticket") + 1])
    assert str(given.parent) == next(one["mountPath"] for one in agent["volumeMounts"] if one["name"] == "keys")
    assert Ticket.read(kept / given.name).endpoint == asked.endpoint


def test_agents_have_what_was_asked_for_them_and_shared_memory() -> None:
    pod = pods(read(workload(gpus=8, cpus=96, memory="1Ti"))[1])[AGENTS]
    [agent] = pod["containers"]
    assert agent["resources"]["limits"] == {"cpu": "96", "memory": "1Ti", "nvidia.com/gpu": "8"}
    assert agent["resources"]["requests"] == agent["resources"]["limits"]
    mounts = {mount["mountPath"]: mount["name"] for mount in agent["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert volumes[mounts["/runs"]]["persistentVolumeClaim"]["claimName"] == "runs"
    assert jobs(read(workload(agents=5))[1])[AGENTS]["parallelism"] == 5


def test_all_pods_have_the_environment_of_a_secret_of_the_users() -> None:
    for named, expected in (("tokens", [{"secretRef": {"name": "tokens"}}]), ("", None)):
        for pod in pods(read(workload(environment=named))[1]).values():
            [container] = pod["containers"]
            assert container.get("envFrom") == expected
            assert "envFrom" not in pod["initContainers"][0]


def test_agents_wait_for_the_desk_as_long_as_was_asked_for() -> None:
    [agent] = pods(read(workload(wait=1234.5))[1])[AGENTS]["containers"]
    flags = read_flags(AgentFlags, "agent", agent["command"][2:])
    assert (flags.wait, flags.requeue) == (1234.5, True)


def test_words_of_the_user_are_not_expanded_by_kubernetes() -> None:
    [container] = pods(read(workload())[1])[CONTROLLER]["containers"]
    assert container["command"][:2] == ["penstock", "run"]
    assert "count $$(POD_IP) and ${HOME}" in container["command"]


BAD = {
    "no image": {"image": ""},
    "an image with a blank": {"image": "a b"},
    "no claim": {"claim": ""},
    "no agents": {"agents": 0},
    "memory": {"memory": "much"},
    "namespace": {"namespace": "Team"},
    "a Secret": {"environment": "tokens_1"},
    "a name": {"name": "aipo_1"},
    "a folder elsewhere": {"out": "/home/me/run"},
    "a folder above": {"out": "/runs/../etc"},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_what_kubernetes_would_refuse_is_refused_with_its_flag(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"given .*needed"):
        workload(**change)


# kubectl ---------------------------------------------------------------------------------------------------


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    monkeypatch.setenv("PATH", str(tmp_path))
    return Kubectl(tmp_path)


MADE = (0, json.dumps({"metadata": {"uid": "u-1"}}), "")
WELL = (0, "", "")


def test_the_jobset_owns_its_secret_and_secrets_are_no_arguments(kubectl: Kubectl) -> None:
    kubectl.answer({"create": [MADE, WELL]})
    asked = workload(namespace="team")
    secrets = keys(asked)
    create(asked, secrets)
    (first, jobset), (second, secret) = kubectl.calls
    assert yaml.safe_load(jobset)["kind"] == "JobSet"
    [owner] = yaml.safe_load(secret)["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": asked.name, "uid": "u-1"}
    assert yaml.safe_load(secret)["stringData"] == secrets
    kubernetes_validate.validate(yaml.safe_load(secret), VERSION, strict=True)
    for words in (first, second):
        assert words[:2] == ["--namespace", "team"]
        assert not any(text in word for text in secrets.values() for word in words)


def test_a_secret_that_is_refused_takes_the_jobset_with_it(kubectl: Kubectl) -> None:
    kubectl.answer({"create": [MADE, (1, "", "forbidden")], "delete": [WELL]})
    with pytest.raises(KubernetesError, match="forbidden"):
        create(workload(), keys(workload()))
    assert kubectl.calls[-1][0][:3] == ["delete", "jobset", workload().name]


def test_a_cluster_without_jobset_none_at_all_and_a_machine_without_kubectl_are_told_what_is_needed(
    kubectl: Kubectl, tmp_path: Path
) -> None:
    kubectl.answer({"create": [(1, "", 'no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"')]})
    with pytest.raises(KubernetesError, match=r"needed JobSet in the cluster.*jobset\.sigs"):
        create(workload(), keys(workload()))
    kubectl.answer({"create": [(1, "", "dial tcp 127.0.0.1:8080: connect: connection refused")]})
    with pytest.raises(KubernetesError, match="needed a cluster that kubectl reaches"):
        create(workload(), keys(workload()))
    (tmp_path / "kubectl").unlink()
    with pytest.raises(KubernetesError, match="given no kubectl in PATH, needed it"):
        create(workload(), keys(workload()))


POD, NEXT = "aipo-1f-controller-0-0-x", "aipo-1f-controller-0-0-y"
COMPLETED = (0, "Completed", "")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.managers.kubernetes.LOOK_S", 0.01)


def logged(kubectl: Kubectl) -> list[tuple[str, bool]]:
    """The Pods whose logs were asked for, and whether only a part of each was."""
    return [
        (next(word for word in words if word.startswith("pod/")), "--since-time" in words)
        for words, _ in kubectl.calls
        if "logs" in words
    ]


def test_the_log_is_followed_through_restarts_until_the_jobset_has_ended(
    kubectl: Kubectl, fast: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """The clock of the next Pod's machine is behind."""
    waiting = controller(POD, "Pending", conditions=[{"status": "False", "reason": "Unschedulable", "message": "0/3"}])
    kubectl.answer(
        {
            "logs": [(0, line("41", "update 1"), ""), (0, line("11", "update 2"), "")],
            "terminalState": [WELL, WELL, WELL, COMPLETED],
            "get pods": [waiting, waiting, controller(POD, "Running"), controller(NEXT, "Running", 2)],
        }
    )
    told: list[str] = []
    assert follow(workload(), 30.0, told.append)
    assert capfd.readouterr().out == "update 1\nupdate 2\n"
    assert len(told) == 1
    assert "Unschedulable" in told[0]
    assert logged(kubectl) == [(f"pod/{POD}", False), (f"pod/{NEXT}", False)]


def test_each_line_of_a_log_is_shown_once_however_often_it_is_asked_for(
    kubectl: Kubectl, fast: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lines are whole even if the connection ends within one. The log of a Pod that had ended is not read again."""
    log = [line("07.5", "a 2026-01-01T00:00:09Z"), line("07.500000001", "b"), line("08.25", "c"), line("08.3", "end")]
    cut = "".join(log[:3])[:-2]
    whole = "".join(log)[:-1]
    kubectl.answer(
        {
            "logs": [(0, log[0], ""), (0, cut, ""), (1, cut, "EOF"), (0, whole, ""), (0, whole, "")],
            "terminalState": [*[WELL] * 6, COMPLETED],
            "get pods": [*[controller(POD, "Running")] * 4, controller(POD, "Succeeded")],
        }
    )
    told: list[str] = []
    assert follow(workload(), 30.0, told.append)
    assert capfd.readouterr().out == "a 2026-01-01T00:00:09Z\nb\nc\nend\n"
    assert logged(kubectl) == [(f"pod/{POD}", False), *[(f"pod/{POD}", True)] * 4]
    assert len(told) == 1
    assert "EOF" in told[0]


def test_a_cluster_that_does_not_answer_is_asked_again_for_some_minutes(
    kubectl: Kubectl, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = (1, "", "Unable to connect to the server")
    runs = controller(POD, "Running")
    kubectl.answer(
        {"logs": [WELL], "terminalState": [WELL, away, away, WELL, WELL, COMPLETED], "get pods": [runs, away, runs]}
    )
    told: list[str] = []
    assert follow(workload(), 30.0, told.append)
    assert len(told) == 1
    monkeypatch.setattr("penstock.runtime.managers.kubernetes.DEAF_S", 0.05)
    kubectl.answer({"terminalState": [away]})
    with pytest.raises(KubernetesError, match="Unable to connect"):
        follow(workload(), 30.0, told.append)


def test_what_asking_again_would_not_help_is_told_at_once(kubectl: Kubectl) -> None:
    deleted = (1, "", f'Error from server (NotFound): jobsets.jobset.x-k8s.io "{workload().name}" not found')
    for answer, gone in ((deleted, True), ((1, "", "Error from server (Forbidden): pods is forbidden"), False)):
        kubectl.answer({"terminalState": [answer]})
        with pytest.raises(KubernetesError) as raised:
            follow(workload(), 30.0, print)
        assert raised.value.gone is gone


def test_a_jobset_that_fails_is_told(kubectl: Kubectl) -> None:
    kubectl.answer({"logs": [WELL], "terminalState": [(0, "Failed", "")], "get pods": [controller(POD, "Failed")]})
    assert not follow(workload(), 30.0, print)


def test_how_a_run_has_ended_is_told_where_its_log_cannot_be_read(kubectl: Kubectl) -> None:
    over = controller(POD, "Succeeded")
    kubectl.answer({"logs": [(1, "", "no such node")], "terminalState": [COMPLETED], "get pods": [over]})
    assert follow(workload(), 30.0, print)


def test_a_controller_that_never_runs_is_not_waited_for_forever(kubectl: Kubectl, fast: None) -> None:
    kubectl.answer({"terminalState": [WELL], "get pods": [(0, json.dumps({"items": []}), "")]})
    with pytest.raises(KubernetesError, match="there are no Pods yet"):
        follow(workload(), 0.05, lambda _: None)
    assert not any("delete" in words for words, _ in kubectl.calls)
