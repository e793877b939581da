"""A run as a JobSet of Kubernetes: one Pod with the launcher and its controller, N Pods with an agent each.

`manifests` is pure: it makes what Kubernetes is given, as plain data. `create` hands it to `kubectl`, and `follow`
follows the run.

What is restarted, and whether that counts:

- An agent's Pod gets a successor, uncounted, if it is taken away (the condition DisruptionTarget: preempted, drained,
  evicted), or ends with 75 (taken away, and its run goes on without it; or there is no launcher, or no controller any
  more). The successor enrols with the ticket of the Secret, which stays the same.
- The whole JobSet is restarted, uncounted, if the controller's Pod is taken away, or ends with 75 (a checkpoint was
  made: requeue me). All Pods are new, since an agent that got the run's goodbye has ended with success and would not be
  restarted alone; `--resume auto` continues from the last checkpoint.
- After any other failure of the controller's Pod the JobSet has failed: the run itself restarts what can be restarted
  (`--restarts`, among the words of its command).

The ticket: files of a Secret belong to root, and the group of `fsGroup` may read them, whatever mode is asked for. So
an init container of each Pod copies them into memory, with mode 0400 and for the user that penstock runs as.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from time import monotonic, sleep
from typing import Any

from penstock.runtime.control.signals import PREEMPTED, output_closed
from penstock.runtime.record.errors import visible

API = "jobset.x-k8s.io/v1alpha2"
CONTROLLER, AGENTS = "controller", "agents"
# Where each Pod mounts the claim, which has the run folder.
RUNS = "/runs"
# Where a Pod has its copies of the Secret's files.
KEYS = "/run/penstock"
TICKET, DESK = "ticket.json", "desk.json"
# The port of the controller's Pod where agents enrol.
PORT = 5555
# Resources of the launcher and its controller: they trace the program with torch, and compute nothing.
CONTROLLER_CPU, CONTROLLER_MEMORY = "2", "4Gi"
# Resources of the container that copies a file; a namespace may require limits for all containers.
COPY = {"cpu": "100m", "memory": "64Mi"}
# The user and group of all processes.
USER = 1000
# Most characters of a JobSet's name: its Pods' host names, <name>-controller-0-0, may have 63, and Pods' own names have
# five more.
LONGEST_NAME = 40
# Seconds for which an ended JobSet is kept, with its logs and its Secret: a week.
KEPT_S = 7 * 24 * 3600
# Seconds that a Pod has beyond the run's grace period, to end with its own exit status before it is killed.
MARGIN_S = 5
# Seconds for an answer of kubectl; between two looks at a JobSet; without an answer until `follow` gives up.
ANSWER_S, LOOK_S, DEAF_S = 60.0, 3.0, 600.0
# The time at the beginning of a line of a log, in nanoseconds, as Kubernetes writes it.
_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ")


class KubernetesError(RuntimeError):
    """kubectl is missing, or has failed. The text has its output, and what is needed. `gone`: the JobSet does not exist
    any more."""

    gone = False


@dataclass(frozen=True)
class KubernetesRun:
    """What a run asks of Kubernetes. `words` are the run's own arguments of `penstock run`: the program and its flags.
    `out` is the run folder as Pods see it. `environment` is a Secret with environment variables for all Pods. `gpus`,
    `cpus` and `memory` are for each agent. `grace` is in seconds; agents wait for the desk for `wait` seconds. Raises
    ValueError for values that Kubernetes would refuse."""

    name: str
    image: str
    agents: int
    claim: str
    words: tuple[str, ...]
    out: str = ""
    namespace: str = ""
    environment: str = ""
    gpus: int = 0
    cpus: int = 2
    memory: str = "8Gi"
    grace: float = 60.0
    wait: float = 900.0

    def __post_init__(self) -> None:
        label = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
        if not re.fullmatch(label, self.name) or len(self.name) > LONGEST_NAME:
            needed = f"needed lower-case letters, digits and '-', {LONGEST_NAME} at most"
            raise ValueError(f"the JobSet's name: given {self.name!r}, {needed}")
        if not self.image or re.search(r"\s", self.image):
            raise ValueError(f"--image: given {self.image!r}, needed a container image that has penstock")
        if self.agents < 1:
            raise ValueError(f"--agents: given {self.agents}, needed how many Pods with an agent there are to be")
        if not re.fullmatch(label, self.claim):
            needed = "needed a PersistentVolumeClaim that all Pods can mount: the run folder is in it"
            raise ValueError(f"--claim: given {self.claim!r}, {needed}")
        if self.namespace and not re.fullmatch(label, self.namespace):
            raise ValueError(f"--namespace: given {self.namespace!r}, needed the name of a namespace")
        if self.environment and not re.fullmatch(rf"{label}(\.{label})*", self.environment):
            raise ValueError(f"--env-secret: given {self.environment!r}, needed the name of a Secret")
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?([kMGTP]|[KMGTP]i)?", self.memory):
            needed = "needed a quantity of Kubernetes, such as 64Gi"
            raise ValueError(f"--memory-per-agent: given {self.memory!r}, {needed}")
        if not self.folder.startswith(f"{RUNS}/") or ".." in self.folder.split("/"):
            needed = f"needed a folder in {RUNS}, where Pods have the claim {self.claim}"
            raise ValueError(f"--out: given {self.out!r}, {needed}")

    @property
    def folder(self) -> str:
        return self.out or f"{RUNS}/{self.name}"

    @property
    def endpoint(self) -> str:
        """Where agents enrol: the name of the controller's Pod in the cluster's DNS, which a new Pod keeps."""
        return f"{self.name}-{CONTROLLER}-0-0.{self.name}:{PORT}"


def job_name(program: str, suffix: str) -> str:
    """A JobSet's name, from a program as the user gives it: an import path, or a file."""
    last = program.rpartition(":")[2].rpartition("/")[2].rpartition(".")[2]
    stem = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[: LONGEST_NAME - len(suffix) - 1].strip("-")
    return f"{stem or 'run'}-{suffix}"


def manifests(workload: KubernetesRun, secrets: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A Secret and a JobSet. `secrets` has the texts of TICKET, for agents, and of DESK, for the controller."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(workload),
        "type": "Opaque",
        "immutable": True,
        "stringData": dict(secrets),
    }
    taken = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    requeue = {"onExitCodes": {"operator": "In", "values": [PREEMPTED]}}
    jobs = [
        _job(
            workload, CONTROLLER, 1, _controller(workload), [{"action": "FailJob", **one} for one in (requeue, taken)]
        ),
        _job(
            workload,
            AGENTS,
            workload.agents,
            _agent(workload),
            [{"action": "Ignore", **one} for one in (requeue, taken)],
        ),
    ]
    # A Job that failed by a rule of `podFailurePolicy` was taken away; see above.
    uncounted = {
        "name": "taken",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "targetReplicatedJobs": [CONTROLLER],
    }
    jobset = {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": _metadata(workload),
        "spec": {
            # The headless service by which Pods find the controller, even before it is ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": workload.name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [CONTROLLER]},
            "failurePolicy": {"maxRestarts": 0, "rules": [uncounted]},
            "ttlSecondsAfterFinished": KEPT_S,
            "replicatedJobs": jobs,
        },
    }
    return secret, jobset


def _metadata(workload: KubernetesRun) -> dict[str, Any]:
    place = {"namespace": workload.namespace} if workload.namespace else {}
    return {"name": workload.name, **place, "labels": {"app.kubernetes.io/name": "penstock"}}


def _job(
    workload: KubernetesRun, name: str, pods: int, container: dict[str, Any], rules: list[dict[str, Any]]
) -> dict[str, Any]:
    """A replicated job of the JobSet. Its Pods are numbered, and so have names in the DNS."""
    template = {"metadata": {"labels": {"app.kubernetes.io/name": "penstock"}}, "spec": _pod(workload, name, container)}
    spec = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        # For other failures of Pods. Only one controller may use the run folder: a new one comes with new agents.
        "backoffLimit": 0 if name == CONTROLLER else max(6, pods),
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": template,
    }
    # Agents start only after the launcher's Pod: their timeout for the desk (--wait) then covers its downloads and
    # tracing, but not its scheduling.
    after = {} if name == CONTROLLER else {"dependsOn": [{"name": CONTROLLER, "status": "Ready"}]}
    return {"name": name, "replicas": 1, **after, "template": {"spec": spec}}


def _pod(workload: KubernetesRun, name: str, container: dict[str, Any]) -> dict[str, Any]:
    # Each Pod gets only what it needs: agents never see the desk's secret key.
    shown = DESK if name == CONTROLLER else TICKET
    closed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    copied = f"{KEYS}-secret"
    keys = {"name": "keys", "mountPath": KEYS}
    memory: dict[str, Any] = {"medium": "Memory"}
    copy = {
        "name": "keys",
        "image": workload.image,
        "command": ["install", "-m", "0400", f"{copied}/{shown}", KEYS],
        "resources": {"requests": COPY, "limits": COPY},
        "securityContext": closed,
        "volumeMounts": [keys, {"name": "secret", "mountPath": copied, "readOnly": True}],
    }
    given = {"envFrom": [{"secretRef": {"name": workload.environment}}]} if workload.environment else {}
    mounts = [keys, {"name": "runs", "mountPath": RUNS}, {"name": "shm", "mountPath": "/dev/shm"}]
    main = {
        "name": name,
        "image": workload.image,
        "securityContext": closed,
        **container,
        **given,
        # One cache folder for all Pods: they share builds and downloads.
        "env": [{"name": "XDG_CACHE_HOME", "value": f"{RUNS}/.cache"}, *container.get("env", ())],
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": ceil(workload.grace) + MARGIN_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # The Pod's own first process reaps the children that ranks leave behind.
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [copy],
        "containers": [main],
        "volumes": [
            {
                "name": "secret",
                "secret": {
                    "secretName": workload.name,
                    "defaultMode": 0o400,
                    "items": [{"key": shown, "path": shown}],
                },
            },
            {"name": "keys", "emptyDir": memory},
            {"name": "runs", "persistentVolumeClaim": {"claimName": workload.claim}},
            # Values go through shared memory; by default containers have only 64 MB.
            {"name": "shm", "emptyDir": memory},
        ],
    }


def _controller(workload: KubernetesRun) -> dict[str, Any]:
    command = ["penstock", "run", *workload.words, "--out", workload.folder, "--resume", "auto", "--plain"]
    command += ["--grace", f"{workload.grace:g}", "--on", AGENTS, "--agents", str(workload.agents)]
    command += ["--bind", f"\0(POD_IP):{PORT}", "--ticket-keys", f"{KEYS}/{DESK}"]
    given = {"cpu": CONTROLLER_CPU, "memory": CONTROLLER_MEMORY}
    return {
        # Kubernetes replaces $(NAME) by a variable, and $$( by $(.
        "command": [word.replace("$(", "$$(").replace("\0(", "$(") for word in command],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "resources": {"requests": given, "limits": given},
    }


def _agent(workload: KubernetesRun) -> dict[str, Any]:
    given = {"cpu": str(workload.cpus), "memory": workload.memory}
    if workload.gpus:
        given["nvidia.com/gpu"] = str(workload.gpus)
    return {
        # --requeue: a Pod that ends with 0 would get no successor.
        "command": ["penstock", "agent", "--ticket", f"{KEYS}/{TICKET}", "--wait", f"{workload.wait:g}", "--requeue"],
        "resources": {"requests": given, "limits": given},
    }


def as_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """The documents as text for `kubectl apply -f`."""
    import yaml  # here, since it takes a third of the start-up time, and only this function needs it

    # No aliases: equal parts are repeated, so that each Pod can be read alone.
    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    return yaml.dump_all(documents, Dumper=dumper, sort_keys=False, width=120, explicit_start=True)


# By kubectl -----------------------------------------------------------------------------------------------


def create(workload: KubernetesRun, secrets: Mapping[str, str]) -> None:
    """Start the run in Kubernetes. The JobSet owns the Secret, which is deleted with it. Raises KubernetesError, and
    then nothing is left."""
    secret, jobset = manifests(workload, secrets)
    # The owner must exist first. Pods wait for a Secret that does not exist yet.
    made = json.loads(_kubectl(workload, ["create", "-f", "-", "-o", "json"], as_yaml([jobset])))
    owner = {"apiVersion": API, "kind": "JobSet", "name": workload.name, "uid": made["metadata"]["uid"]}
    secret["metadata"]["ownerReferences"] = [owner]
    try:
        _kubectl(workload, ["create", "-f", "-"], as_yaml([secret]))
    except KubernetesError:
        _kubectl(workload, ["delete", "jobset", workload.name, "--wait=false"])
        raise


def follow(workload: KubernetesRun, deadline: float, tell: Callable[[str], None]) -> bool:
    """Show the controller's log on standard output, each line once, through all restarts, until the run has ended.
    Return whether it is done. `tell` is called with what Pods wait for. Raises KubernetesError if no controller runs
    within `deadline` seconds, or if Kubernetes does not answer for DEAF_S; BrokenPipeError if standard output has no
    reader any more. In both cases the JobSet stays."""
    log = _Log(workload)
    seen, until, deaf = "", monotonic() + deadline, 0.0
    while True:
        ended, trouble = "", None
        try:
            # In this order: if the run has ended, its log is complete, too.
            ended = _kubectl(
                workload, ["get", "jobset", workload.name, "-o", "jsonpath={.status.terminalState}"]
            ).strip()
            pods = _pods(workload)
            pod = _controllers(pods)
            waits = pod is None or pod["status"].get("phase", "Pending") == "Pending"
            if pod is not None and not waits and log.show(pod):
                until = monotonic() + deadline
        except KubernetesError as error:
            trouble = error
        if ended:
            if trouble is not None:
                tell(f"the end of the controller's log is not shown: {trouble}")
            return ended == "Completed"
        if output_closed(1):
            raise BrokenPipeError("standard output")
        now = monotonic()
        if trouble is not None:
            # Do not ask again for something that does not exist or is not allowed.
            if trouble.gone or "(Forbidden)" in str(trouble) or (deaf and now - deaf > DEAF_S):
                raise trouble
            if not deaf:
                deaf = now
                tell(f"{trouble}; asking again for {DEAF_S:.0f} s")
        else:
            deaf = 0.0
            state = _state(pods)
            if waits and state != seen:
                seen = state
                tell(f"waiting for the controller's Pod: {state}")
            if now > until:
                given = f"given no Pod of the controller that runs within {deadline:.0f} s ({state})"
                raise KubernetesError(f"{given}; needed room for it, and an image that can be pulled")
        sleep(LOOK_S)


class _Log:
    """Shows the logs of the controller's Pods, each line once."""

    def __init__(self, workload: KubernetesRun) -> None:
        self._workload = workload
        # The Pod that was shown last, and the time of its last shown line, as Kubernetes wrote it.
        self._pod, self._last = "", b""
        self._whole = False

    def show(self, pod: dict[str, Any]) -> bool:
        """Show the rest of this Pod's log for as long as it runs; no timeout, since the run has its own deadlines.
        False if all of it was shown already. Raises KubernetesError if kubectl fails."""
        name, over = pod["metadata"]["name"], pod["status"]["phase"] in ("Succeeded", "Failed")
        # Times are compared only within a Pod: the next one's machine may have a slower clock.
        if name != self._pod:
            self._pod, self._last, self._whole = name, b"", False
        if self._whole:
            return False
        words = ["logs", "--follow", "--timestamps", f"pod/{name}", "--container", CONTROLLER]
        if self._last:
            words += ["--since-time", self._last.decode().strip()]
        with tempfile.TemporaryFile() as said:
            with subprocess.Popen(_words(self._workload, words), stdout=subprocess.PIPE, stderr=said) as following:
                assert following.stdout is not None
                try:
                    self._copy(following.stdout, over)
                except BaseException:
                    following.kill()
                    raise
            said.seek(0)
            if following.returncode:
                raise _refusal(words, following.returncode, said.read().decode(errors="replace"))
        # A log may end early, with its connection: it is complete only if the Pod had ended before it was read.
        self._whole = over
        return True

    def _copy(self, lines: Iterable[bytes], over: bool) -> None:
        """Print new lines, without times. kubectl repeats the lines of the second at which it is told to begin."""
        last, old = _time(self._last), False
        for line in lines:
            # A line that is cut off comes again as a whole.
            if not line.endswith(b"\n") and not over:
                return
            if begins := _TIME.match(line):
                old = _time(begins[0]) <= last
                line = line[begins.end() :]
                if not old:
                    self._last = begins[0]
            if not old:
                print(visible(line.decode(errors="replace").rstrip("\n")), flush=True)


def _time(line: bytes) -> tuple[float, bytes]:
    """The time at the beginning of a line: seconds and, as digits, nanoseconds, which compare like times. A line
    without a time compares as the first."""
    if not (found := _TIME.match(line)):
        return 0.0, b""
    return datetime.fromisoformat((found[1] + found[3]).decode()).timestamp(), (found[2] or b"").ljust(9, b"0")


def hints(workload: KubernetesRun) -> str:
    """Commands to look at the JobSet, and to end it."""
    place = f" -n {workload.namespace}" if workload.namespace else ""
    return f"kubectl describe jobset,pods{place} (all), kubectl delete jobset{place} {workload.name} (end it)"


def _pods(workload: KubernetesRun) -> list[dict[str, Any]]:
    """The JobSet's Pods."""
    selected = ["get", "pods", "-l", f"jobset.sigs.k8s.io/jobset-name={workload.name}", "-o", "json"]
    return [{"status": {}, **pod} for pod in json.loads(_kubectl(workload, selected))["items"]]


def _controllers(pods: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The controller's Pod, the newest if there are several."""
    label = "jobset.sigs.k8s.io/replicatedjob-name"
    found = [pod for pod in pods if pod["metadata"].get("labels", {}).get(label) == CONTROLLER]
    return max(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)


def _state(pods: Sequence[dict[str, Any]]) -> str:
    """The state of these Pods, for messages."""
    found = []
    for pod in pods:
        status = pod["status"]
        waits = [one["state"].get("waiting", {}) for one in status.get("containerStatuses", ()) if "state" in one]
        waits += [one for one in status.get("conditions", ()) if one.get("status") == "False"]
        why = next((f" ({one['reason']}: {one.get('message', '')})" for one in waits if "reason" in one), "")
        found.append(f"{pod['metadata']['name']} is {status.get('phase', 'not there yet')}{why}")
    return "; ".join(sorted(found)) or "there are no Pods yet"


def _words(workload: KubernetesRun, words: Sequence[str]) -> list[str]:
    return ["kubectl", *(["--namespace", workload.namespace] if workload.namespace else []), *words]


def _kubectl(workload: KubernetesRun, words: Sequence[str], given: str = "") -> str:
    """Run kubectl with these words, and return its output. Manifests have secrets, and go through standard input."""
    try:
        done = subprocess.run(_words(workload, words), input=given, capture_output=True, text=True, timeout=ANSWER_S)
    except FileNotFoundError:
        needed = "needed it, with access to a cluster (https://kubernetes.io/docs/tasks/tools), or --dry-run"
        raise KubernetesError(f"--on kubernetes: given no kubectl in PATH, {needed}") from None
    except subprocess.TimeoutExpired:
        raise KubernetesError(f"kubectl {' '.join(words)} has not answered within {ANSWER_S:.0f} s") from None
    if done.returncode:
        raise _refusal(words, done.returncode, done.stderr)
    return done.stdout


def _refusal(words: Sequence[str], status: int, said: str) -> KubernetesError:
    """The error for a kubectl that ended with this exit status and output."""
    needed = ""
    if "no matches for kind" in said:
        needed = "; needed JobSet in the cluster: https://jobset.sigs.k8s.io/docs/installation"
    elif re.search("connection refused|no such host|i/o timeout|[Uu]nable to connect", said):
        needed = "; needed a cluster that kubectl reaches (kubectl config current-context, kubectl cluster-info)"
    error = KubernetesError(
        f"kubectl {' '.join(words)} ended with exit status {status}: {' '.join(said.split())}{needed}"
    )
    error.gone = "(NotFound): jobsets" in said
    return error
