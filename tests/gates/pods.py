"""The Pods of a JobSet on this machine. They run the commands of its manifests; a test instrument replaces `kubectl`,
since there is no API server here.

A Pod is a host of `network`. It sees the files that its manifest mounts, and of this machine only the system, Python
and the repository. All containers run as the user of the manifest. The policies of the manifest decide what follows
the end of a Pod. This is not Kubernetes: Pods run until they end, there is one of each number, and nothing is
scheduled.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from .network import Network
from .running import until

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("controller-0", "agents-0", "agents-1")
"""Hosts of the network, named by a Pod's job and number."""

# A test instrument, not kubectl. It hands what is created to the test, and shows the logs of the test's Pods.
INSTRUMENT = '''#!{python}
"""A test instrument, not kubectl: hands manifests to the test that has made it, and shows the log of its Pods."""
import json, pathlib, sys, time, yaml
folder, words = pathlib.Path(__file__).parent, sys.argv[1:]
state = folder / "state"
if words[0] == "create":
    document = yaml.safe_load(sys.stdin)
    part = folder / "part"
    part.write_text(json.dumps(document))
    part.rename(folder / (document["kind"] + ".json"))
    print(json.dumps({{"metadata": {{"uid": "of-a-test"}}}}))
elif words[0] == "logs":
    logs = sorted(folder.glob("*-controller-0.log"))
    if not logs:
        sys.exit("there is no Pod that runs")
    ended = logs[-1].with_suffix(".ended")
    part, number = "", 0
    with logs[-1].open() as log:
        while True:
            over = ended.exists()
            *lines, part = (part + log.read()).split("\\n")
            for line in lines:  # a line's number is its time
                print(f"2026-01-01T00:00:00.{{number:09}}Z {{line}}", flush=True)
                number += 1
            if over:
                break
            time.sleep(0.05)
elif words[:2] == ["get", "jobset"]:
    print(state.read_text() if state.exists() else "")
elif words[:2] == ["get", "pods"]:
    items = []
    for log in folder.glob("*-controller-0.log"):
        start = int(log.name.partition("-")[0])
        labels = {{"jobset.sigs.k8s.io/replicatedjob-name": "controller"}}
        metadata = {{"name": log.stem, "labels": labels, "creationTimestamp": f"2026-01-01T00:00:{{start:02}}Z"}}
        phase = "Failed" if log.with_suffix(".ended").exists() else "Running"
        items.append({{"metadata": metadata, "status": {{"phase": phase}}}})
    print(json.dumps({{"items": items}}))
else:
    sys.exit(f"this is a test instrument, not kubectl, and does not know {{words}}")
'''

# Makes the root folder of a Pod: an empty folder with bind mounts of the folders that all Pods see.
MAKE_ROOT = r"""
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=0755 tmpfs "$AT"
for path in bin sbin lib lib64; do
    if [ -h "/$path" ]; then cp -P "/$path" "$AT/$path"; elif [ -d "/$path" ]; then SEEN="$SEEN /$path"; fi
done
for path in /usr /etc /dev /proc $SEEN; do mkdir -p "$AT$path"; mount --rbind "$path" "$AT$path"; done
mkdir -p "$AT/tmp" && chmod 1777 "$AT/tmp"
mount --bind "$NAMES" "$AT/etc/hosts"
"""


@dataclass
class Pod:
    """A Pod that runs or has ended. `process` is the parent of its host's first process."""

    job: str
    host: str
    process: "subprocess.Popen[bytes]"

    def terminate(self) -> None:
        """Send SIGTERM to the first process of the container, as kubelet does first when a Pod is taken away."""
        [first] = psutil.Process(self.process.pid).children()
        [main] = first.children()
        main.send_signal(signal.SIGTERM)

    def end(self) -> bool:
        """Ask it to end, and return True if it has. A Pod that has just begun may have no process yet for a signal."""
        with suppress(psutil.NoSuchProcess, ValueError):
            self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        return self.process.returncode is not None


class Pods:
    """The Pods that `penstock run … --on kubernetes` creates under `environment`; the volume claim is `claim`."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.network, self._folder = network, folder / "cluster"
        self.claim = folder / "claim"
        for made in (self._folder, self.claim, self._folder / "root"):
            made.mkdir()
        # `fsGroup` gives a claim to root and to the Pods' group.
        os.chown(self.claim, 0, 1000)
        self.claim.chmod(0o2775)
        instrument = self._folder / "kubectl"
        instrument.write_text(INSTRUMENT.format(python=sys.executable))
        instrument.chmod(0o700)
        self.environment = {**os.environ, "PATH": f"{self._folder}:{os.environ['PATH']}"}
        self.running: list[Pod] = []
        self.statuses: list[tuple[str, int]] = []
        """Job and exit status of all Pods that have ended, in the order of their ends."""
        self.starts, self.successors = 0, 0
        """The number of starts of all Pods together, and of Pods alone."""
        self._jobset: dict[str, Any] = {}

    def __enter__(self) -> "Pods":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pod in self.running:
            pod.process.kill()  # and with it its whole pid namespace
            pod.process.wait()

    def await_jobset(self) -> None:
        """Wait until a JobSet and its Secret are created, and start its Pods."""
        created = [self._folder / f"{kind}.json" for kind in ("JobSet", "Secret")]
        until(lambda: all(path.exists() for path in created), "a JobSet and its Secret were created")
        self._jobset = json.loads((self._folder / "JobSet.json").read_text())
        secret = json.loads((self._folder / "Secret.json").read_text())
        assert secret["metadata"]["name"] == self._jobset["metadata"]["name"]
        self._secret = secret["stringData"]
        self.start()

    def start(self) -> None:
        """Start all Pods of the JobSet, the first time or again."""
        self.starts += 1
        for job in self._jobset["spec"]["replicatedJobs"]:
            for number in range(job["template"]["spec"]["completions"]):
                self._start(job["name"], number)

    def step(self) -> str:
        """Treat Pods that have ended as the JobSet says, and return its state: "", Completed or Failed."""
        jobs = {one["name"]: one["template"]["spec"] for one in self._jobset["spec"]["replicatedJobs"]}
        for pod in [pod for pod in self.running if pod.process.poll() is not None]:
            status = pod.process.returncode
            self.running.remove(pod)
            self.statuses.append((pod.job, status))
            (self._folder / f"{self.starts}-{pod.host}.ended").touch()
            rules = jobs[pod.job]["podFailurePolicy"]["rules"]
            found = [rule["action"] for rule in rules if status in rule.get("onExitCodes", {}).get("values", ())]
            if status == 0 and pod.job in self._jobset["spec"]["successPolicy"]["targetReplicatedJobs"]:
                return self._end("Completed")
            if found == ["FailJob"]:
                [rule] = self._jobset["spec"]["failurePolicy"]["rules"]
                assert (rule["onJobFailureReasons"], rule["action"]) == (
                    ["PodFailurePolicy"],
                    "RestartJobSetAndIgnoreMaxRestarts",
                )
                self._clear()
                self.start()
                return ""
            if found == ["Ignore"]:
                self.successors += 1
                self._start(pod.job, int(pod.host.rpartition("-")[2]))
            elif status and pod.job in self._jobset["spec"]["successPolicy"]["targetReplicatedJobs"]:
                return self._end("Failed")
            elif status:  # it counts, such as an agent that has waited too long for the controller
                ended = [one for one in self.statuses if one[0] == pod.job and one[1] not in (0, 75)]
                assert len(ended) <= jobs[pod.job]["backoffLimit"], self.logs()
                self._start(pod.job, int(pod.host.rpartition("-")[2]))
        return ""

    def pod(self, host: str) -> Pod:
        [found] = [pod for pod in self.running if pod.host == host]
        return found

    def logs(self) -> str:
        return "\n".join(f"{path.name}\n{path.read_text()}" for path in sorted(self._folder.glob("*.log")))

    def _end(self, state: str) -> str:
        self._clear()
        (self._folder / "state").write_text(state)
        return state

    def _clear(self) -> None:
        """Delete the other Pods."""
        for pod in self.running:
            until(pod.end, f"the end of {pod.host}")
            self.statuses.append((pod.job, pod.process.returncode))
            (self._folder / f"{self.starts}-{pod.host}.ended").touch()
        self.running = []

    def _start(self, job: str, number: int) -> None:
        [found] = [one for one in self._jobset["spec"]["replicatedJobs"] if one["name"] == job]
        spec = found["template"]["spec"]["template"]["spec"]
        host, name = f"{job}-{number}", self._jobset["metadata"]["name"]
        [keys], [main] = spec["initContainers"], spec["containers"]
        security = spec["securityContext"]
        user, group = security["runAsUser"], security["runAsGroup"]
        place = self._folder / "root"
        names = self._folder / "hosts"
        subdomain = self._jobset["spec"]["network"]["subdomain"]
        if not names.exists():  # write it once: other Pods have it mounted
            names.write_text(
                f"127.0.0.1 localhost\n{self.network.address['controller-0']} {name}-controller-0-0.{subdomain}\n"
            )
        mounts = {one["name"]: one["mountPath"] for one in keys["volumeMounts"] + main["volumeMounts"]}
        lines = [MAKE_ROOT]
        for volume in spec["volumes"]:
            path = f"{place}{mounts[volume['name']]}"
            if volume["name"] == "shm":
                lines.append(f"chmod 1777 {path}")  # the host's own /dev/shm, which is searched at the end
                continue
            lines.append(f"mkdir -p {path}")
            if "persistentVolumeClaim" in volume:
                lines.append(f"mount --bind {shlex.quote(str(self.claim))} {path}")
            else:
                lines.append(f"mount -t tmpfs tmpfs {path} && chown 0:{group} {path} && chmod 2777 {path}")
            for item in volume.get("secret", {}).get("items", ()):
                text, file = shlex.quote(self._secret[item["key"]]), f"{path}/{item['path']}"
                # kubelet sets this mode where there is an fsGroup, whatever the manifest says.
                lines.append(f"printf %s {text} > {file} && chown 0:{group} {file} && chmod 0440 {file}")
        variables = {"POD_IP": self.network.address[host], "HOME": "/tmp", "PYTHONPATH": f"{ROOT}/src"}
        variables["PATH"] = f"{Path(sys.prefix).resolve()}/bin:/usr/bin:/bin"
        variables["JOB_COMPLETION_INDEX"] = str(number)  # every Pod of an indexed Job has it
        for one in main.get("env", ()):
            if "value" in one:
                variables[one["name"]] = one["value"]
        inside = f"chroot --userspec={user}:{group} --groups={group} {place} env -C /tmp -i"
        inside += "".join(f" {key}={shlex.quote(value)}" for key, value in variables.items())
        for container, how in ((keys, ""), (main, "exec ")):
            words = [re.sub(r"(?<!\$)\$\((\w+)\)", lambda m: variables[m[1]], word) for word in container["command"]]
            lines.append(f"{how}{inside} {shlex.join(word.replace('$$(', '$(') for word in words)}")
        script = self._folder / f"{self.starts}-{host}.sh"
        script.write_text("\n".join(lines) + "\n")
        seen = {str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix, ROOT)}
        environment = {
            **os.environ,
            "AT": str(place),
            "SEEN": " ".join(sorted(seen)),
            "WORK": "/run",
            "NAMES": str(names),
        }
        with (self._folder / f"{self.starts}-{host}.log").open("wb") as log:
            command = [*self.network.on(host), "sh", str(script)]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.running.append(Pod(job, host, process))
