"""Slurm on this machine: a slurmctld and three slurmds, each in a network namespace, with its own address, `/dev/shm`
and pids. Needs root, Linux, iproute2, and apt-get with Debian's packages; nothing is installed.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from .network import Network
from .running import until

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libmunge2", "libhwloc15", "liblua5.1-0")
NODES = "n1", "n2", "n3"
# The host of slurmctld, where users submit jobs.
LOGIN = "login"
LIMIT_S = 60.0
"""Seconds for a command of apt-get or of Slurm."""
# Seconds that a preempted job and a cancelled job have until SIGKILL.
GRACE_S, KILL_WAIT_S = 20, 20

# As in a cluster, but without munge and cgroups, and with seconds in the place of minutes. Credentials live longer than
# a process may be suspended on a busy machine; a requeued job waits until its former credentials have expired.
CONF = """
ClusterName=test
SlurmctldHost={hostname}({login})
AuthType=auth/none
AuthInfo=cred_expire=15
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd.%n.log
PluginDir={root}/usr/lib/x86_64-linux-gnu/slurm-wlm
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=120
KillWait={kill_wait}
MinJobAge=600
SchedulerParameters=batch_sched_delay=0,sched_interval=1
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=INFINITE PriorityTier=1 GraceTime={grace} PreemptMode=REQUEUE
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


class Unavailable(Exception):
    """Slurm is not possible here; the text says why."""


def unpacked(folder: Path) -> Path:
    """Unpack Debian's packages of Slurm in a folder, and return their root. Raises Unavailable."""
    root, packages = folder / "root", folder / "packages"
    for command in ("apt-get", "dpkg", "nsenter"):
        if shutil.which(command) is None:
            raise Unavailable(f"needs {command}")
    if os.geteuid():
        raise Unavailable("needs root")
    packages.mkdir()
    packages.chmod(0o755)
    download = "apt-get", "download", *PACKAGES
    if why := _fails(packages, *download):
        # apt-get may lack a package index.
        why = _fails(packages, "apt-get", "update") or _fails(packages, *download)
    if why:
        raise Unavailable(why)
    for package in packages.iterdir():
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True, timeout=LIMIT_S)
    return root


def _fails(folder: Path, *words: str) -> str:
    """Run a command, and return why it fails; "" if it does not."""
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"{' '.join(words)} did not end within {LIMIT_S:.0f} s"
    return f"{' '.join(words)}: {done.stderr.strip()[-400:]}" if done.returncode else ""


class Slurm:
    """The cluster. `say` runs a command of Slurm on the login host; `kill` switches a host off."""

    def __init__(self, network: Network, root: Path, folder: Path) -> None:
        self.network, self.root, self.folder = network, root, folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Slurm":
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        nodes = (
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr={self.network.address[node]} "
            f"Port={17001 + number} CPUs=2 RealMemory=4000"
            for number, node in enumerate(NODES)
        )
        self.conf.write_text(
            CONF.format(
                hostname=socket.gethostname(),
                login=self.network.address[LOGIN],
                folder=self.folder,
                root=self.root,
                kill_wait=KILL_WAIT_S,
                grace=GRACE_S,
                nodes="\n".join(nodes),
            )
        )
        try:
            self._start(LOGIN, "slurmctld-wlm", "-c", "-D", "-f", str(self.conf))
            for node in NODES:
                self.start(node)
            until(
                lambda: self.say("sinfo", "-h", "-t", "idle", "-o", "%D", "-p", "main").strip() == "3",
                "three idle nodes",
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for name in [*self._daemons]:
            self.kill(name)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of users, with the paths of Slurm's programs and of the cluster's configuration."""
        libraries = self.root / "usr/lib/x86_64-linux-gnu"
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return own | {
            "PATH": f"{self.root}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries}:{libraries}/slurm-wlm",
            "SLURM_CONF": str(self.conf),
        }

    def start(self, node: str) -> None:
        """Switch a node on."""
        step = f"{self.root}/usr/sbin/slurmstepd-wlm"
        self._start(node, "slurmd-wlm", "-D", "-f", str(self.conf), "-N", node, "-d", step)

    def kill(self, name: str) -> None:
        """Switch a host off. All its processes die at once with the first process of its pid namespace."""
        with suppress(ProcessLookupError):
            for process in psutil.Process(self._daemons[name].pid).children():
                process.kill()
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def on_login(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` on the login host."""
        return ["nsenter", f"--net=/run/netns/{self.network.namespace(LOGIN)}", *words]

    def say(self, *words: str, limit: float = LIMIT_S) -> str:
        """Run a command, such as one of Slurm, on the login host, and return its output."""
        given = self.environment
        done = subprocess.run(self.on_login(words), env=given, capture_output=True, text=True, timeout=limit)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says about a job."""
        words = self.say("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _start(self, host: str, program: str, *words: str) -> None:
        enter = ["nsenter", f"--net=/run/netns/{self.network.namespace(host)}"]
        # The daemon is the first process of its own pid namespace: all others there end with it.
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        command = [*enter, *apart, "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
        with (self.folder / f"{host}.out").open("ab") as out:
            self._daemons[host] = subprocess.Popen(
                [*command, f"{self.root}/usr/sbin/{program}", *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
