"""A run as a JobSet of Kubernetes: one Pod with the launcher and its controller, N Pods with an agent each.

`manifests` is pure: what Kubernetes is given, as plain data. `create` and `follow` hand it to `kubectl`.

What starts again, and what counts:

- An agent's Pod that is taken away (the condition DisruptionTarget: preempted, drained, evicted), or that ends with 75
  (taken away, and its run goes on without it; or there is no launcher, or no controller any more), gets a successor of
  its own, uncounted. It enrols with the ticket of the
  Secret, which stays the same.
- The controller's Pod that is taken away, or that ends with 75 (a checkpoint was made: requeue me), restarts the whole
  JobSet, uncounted. All Pods are new, since an agent that has heard the run's goodbye has ended well and would not be
  started again by itself; `--resume auto` goes on from the last checkpoint.
- After any other failure of the controller's Pod the JobSet has failed: starting again what can be is the run's own
  (`--restarts`, among the words of its command).

The ticket: files of a Secret are root's, and the group of `fsGroup` may read them, whatever mode is asked for. So a
first container of each Pod copies them, with mode 0400 and the user that penstock runs as, into memory.
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

from penstock.runtime.control.signals import PREEMPTED, nobody_reads
from penstock.runtime.record.errors import visible

API = "jobset.x-k8s.io/v1alpha2"
CONTROLLER, AGENTS = "controller", "agents"
# Where each Pod has the claim, and the run folder in it.
RUNS = "/runs"
# Where a Pod's own copies of the Secret's files are.
KEYS = "/run/penstock"
TICKET, DESK = "ticket.json", "desk.json"
# Where agents enrol, at the controller's Pod.
PORT = 5555
# What the launcher and its controller are given: they trace the program with torch, and compute nothing.
CONTROLLER_CPU, CONTROLLER_MEMORY = "2", "4Gi"
# What copying a file takes; a namespace may ask for limits of all that runs in it.
COPY = {"cpu": "100m", "memory": "64Mi"}
# The user and group that everything runs as.
USER = 1000
# Of a JobSet's name: its Pods' host names, <name>-controller-0-0, have 63 at most, their own names five more.
LONGEST_NAME = 40
# Seconds for which what has ended is kept, with its logs and its Secret: a week.
KEPT_S = 7 * 24 * 3600
# Seconds that a Pod has beyond the run's grace, to end with a status of its own before it is killed.
MARGIN_S = 5
# Seconds for an answer of kubectl, between two looks at a JobSet, and without an answer until it is followed no longer.
ANSWER_S, LOOK_S, DEAF_S = 60.0, 3.0, 600.0
# The time at the beginning of a line of a log, in nanoseconds, as Kubernetes writes it.
_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ")


class KubernetesError(RuntimeError):
    """kubectl is missing, or has not done what it was asked for: says what it said, and what is needed. `gone`: the
    JobSet is not there any more."""

    gone = False


@dataclass(frozen=True)
class KubernetesRun:
    """What a run asks of Kubernetes. `words` are those of `penstock run` that are the run's own: the program and its
    flags. `out` is the run folder as Pods see it. `environment` is a Secret with variables of all Pods.
    `gpus`, `cpus` and `memory` are each agent's, `grace` is in seconds, and so is `wait`, for which agents wait for the
    desk. Raises ValueError for what Kubernetes would refuse."""

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
        """Where agents enrol, however often the controller's Pod is a new one: its name in the cluster's DNS."""
        return f"{self.name}-{CONTROLLER}-0-0.{self.name}:{PORT}"


def job_name(program: str, suffix: str) -> str:
    """A JobSet's name for a program as a user calls it: an import path, or a file."""
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
    # A Job that a rule of `podFailurePolicy` has failed is one that was taken away; see above.
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
            # The headless service, by which Pods find the controller before it is ready.
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
    """A replicated job of the JobSet. Its Pods have numbers, and with them names in the DNS."""
    template = {"metadata": {"labels": {"app.kubernetes.io/name": "penstock"}}, "spec": _pod(workload, name, container)}
    spec = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        # Pods that fail otherwise. One controller at a time has the run folder: a new one comes with new agents.
        "backoffLimit": 0 if name == CONTROLLER else max(6, pods),
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": template,
    }
    # An agent waits for the desk (--wait) from when the launcher begins: not for its Pod to be scheduled, but while it
    # downloads and traces.
    after = {} if name == CONTROLLER else {"dependsOn": [{"name": CONTROLLER, "status": "Ready"}]}
    return {"name": name, "replicas": 1, **after, "template": {"spec": spec}}


def _pod(workload: KubernetesRun, name: str, container: dict[str, Any]) -> dict[str, Any]:
    # Nobody has more than it needs: agents never see the desk's secret key.
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
        # One folder for all Pods: what one of them builds or downloads, the others read.
        "env": [{"name": "XDG_CACHE_HOME", "value": f"{RUNS}/.cache"}, *container.get("env", ())],
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": ceil(workload.grace) + MARGIN_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # A first process of its own, which reaps what ranks leave behind.
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
            # Values go through shared memory, of which containers have 64 MB otherwise.
            {"name": "shm", "emptyDir": memory},
        ],
    }


def _controller(workload: KubernetesRun) -> dict[str, Any]:
    command = ["penstock", "run", *workload.words, "--out", workload.folder, "--resume", "auto", "--plain"]
    command += ["--grace", f"{workload.grace:g}", "--on", AGENTS, "--agents", str(workload.agents)]
    command += ["--bind", f"\0(POD_IP):{PORT}", "--ticket-keys", f"{KEYS}/{DESK}"]
    given = {"cpu": CONTROLLER_CPU, "memory": CONTROLLER_MEMORY}
    return {
        # Kubernetes puts a variable in the place of $(NAME), and $( in that of $$(.
        "command": [word.replace("$(", "$$(").replace("\0(", "$(") for word in command],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "resources": {"requests": given, "limits": given},
    }


def _agent(workload: KubernetesRun) -> dict[str, Any]:
    given = {"cpu": str(workload.cpus), "memory": workload.memory}
    if workload.gpus:
        given["nvidia.com/gpu"] = str(workload.gpus)
    return {
        # A Pod that has ended with 0 would have no successor.
        "command": ["penstock", "agent", "--ticket", f"{KEYS}/{TICKET}", "--wait", f"{workload.wait:g}", "--requeue"],
        "resources": {"requests": given, "limits": given},
    }


def as_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """What `kubectl apply -f` reads."""
    import yaml  # a third of the time that a start takes, which only this needs

    # No aliases: equal parts are written out, so that each Pod can be read alone.
    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    return yaml.dump_all(documents, Dumper=dumper, sort_keys=False, width=120, explicit_start=True)


# By kubectl -----------------------------------------------------------------------------------------------


def create(workload: KubernetesRun, secrets: Mapping[str, str]) -> None:
    """Have Kubernetes start the run. The Secret is the JobSet's own: it goes when that is deleted. Raises
    KubernetesError, and then nothing is left."""
    secret, jobset = manifests(workload, secrets)
    # In this order, since an owner has to be there first. Pods wait for a Secret that is not there yet.
    made = json.loads(_kubectl(workload, ["create", "-f", "-", "-o", "json"], as_yaml([jobset])))
    owner = {"apiVersion": API, "kind": "JobSet", "name": workload.name, "uid": made["metadata"]["uid"]}
    secret["metadata"]["ownerReferences"] = [owner]
    try:
        _kubectl(workload, ["create", "-f", "-"], as_yaml([secret]))
    except KubernetesError:
        _kubectl(workload, ["delete", "jobset", workload.name, "--wait=false"])
        raise


def follow(workload: KubernetesRun, deadline: float, tell: Callable[[str], None]) -> bool:
    """Show the controller's log on standard output, each line once, through all restarts, until the run has ended:
    whether it is done. `tell` hears what Pods wait for. Raises KubernetesError if no controller runs within `deadline`
    seconds, or if Kubernetes does not answer for DEAF_S, and BrokenPipeError if nobody reads on; the JobSet stays."""
    log = _Log(workload)
    seen, until, deaf = "", monotonic() + deadline, 0.0
    while True:
        ended, trouble = "", None
        try:
            # In this order: where a run has ended, so has its log.
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
        if nobody_reads(1):
            raise BrokenPipeError("standard output")
        now = monotonic()
        if trouble is not None:
            # Asking again would not help where something is not there or not allowed.
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
    """The logs of the controller's Pods, of which nothing is shown twice."""

    def __init__(self, workload: KubernetesRun) -> None:
        self._workload = workload
        # Of the Pod shown last: its name, and the time of its last line that was shown, as Kubernetes wrote it.
        self._pod, self._last = "", b""
        self._whole = False

    def show(self, pod: dict[str, Any]) -> bool:
        """Show the rest of this Pod's log, as long as it runs: what it does has deadlines of its own. False if all
        of it was shown already. Raises KubernetesError if kubectl ends otherwise than the log."""
        name, over = pod["metadata"]["name"], pod["status"]["phase"] in ("Succeeded", "Failed")
        # Each Pod has times of its own: the next one's machine may have a clock that is behind.
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
        # A log may end early, with its connection: only what was over before has been read to its end.
        self._whole = over
        return True

    def _copy(self, lines: Iterable[bytes], over: bool) -> None:
        """To standard output, without times. kubectl begins with all of the second that it is told to begin at."""
        last, old = _time(self._last), False
        for line in lines:
            # Cut off in the middle, it comes again as a whole.
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
    """Of the beginning of a line: seconds and, as digits, nanoseconds. Times compare as these do; none is the first."""
    if not (found := _TIME.match(line)):
        return 0.0, b""
    return datetime.fromisoformat((found[1] + found[3]).decode()).timestamp(), (found[2] or b"").ljust(9, b"0")


def hints(workload: KubernetesRun) -> str:
    """How to look at the JobSet, and how to end it."""
    place = f" -n {workload.namespace}" if workload.namespace else ""
    return f"kubectl describe jobset,pods{place} (all), kubectl delete jobset{place} {workload.name} (end it)"


def _pods(workload: KubernetesRun) -> list[dict[str, Any]]:
    """The JobSet's."""
    selected = ["get", "pods", "-l", f"jobset.sigs.k8s.io/jobset-name={workload.name}", "-o", "json"]
    return [{"status": {}, **pod} for pod in json.loads(_kubectl(workload, selected))["items"]]


def _controllers(pods: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The controller's Pod, the newest if there are several."""
    label = "jobset.sigs.k8s.io/replicatedjob-name"
    found = [pod for pod in pods if pod["metadata"].get("labels", {}).get(label) == CONTROLLER]
    return max(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)


def _state(pods: Sequence[dict[str, Any]]) -> str:
    """What these Pods are at, in words."""
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
    """What kubectl says to these words. Manifests have secrets: they go through its standard input."""
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
    """What kubectl has said when it ended with this exit status."""
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
