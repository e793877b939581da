"""A Ray cluster on this machine, in a network namespace of its own, so that nothing outside can reach it: a head that
takes no actors, and nodes of one CPU each. Needs root, Linux and iproute2.

`python -m tests.gates.ray_cluster NODES` starts one and prints its address. For each line of stdin it prints the states
of the placement groups as JSON; when stdin closes, it ends the cluster. It is a process of its own, since Ray allows
one cluster in a process and handles the signals of that process.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent.parent
# The cluster's address in its namespace. Ray replaces 127.0.0.1 by another address of the machine, so loopback fails.
ADDRESS = "10.78.0.1"
# The port of Ray's client server, for `ray://`.
CLIENT_PORT = 10001
NAMESPACE = f"""
ip link set lo up && ip link add own type veth peer name other && ip link set other up && ip link set own up &&
ip addr add {ADDRESS}/24 dev own && ip route add default dev own && exec "$0" "$@"
"""
OBJECT_STORE_BYTES = 80 << 20
# The folder of Ray's files. It is short, since the paths of Ray's sockets are long; and it exists, since Ray does not
# make a folder for the file that has its address.
TEMPORARY = "/tmp"
# Seconds for the cluster to end.
END_S = 30.0
# Seconds that Ray gives a node to start, and the number of tries to start a cluster on a busy machine.
START_S, ATTEMPTS = 120, 2


class RayCluster:
    """A running cluster. A command that shall reach it begins with `where` and has this `environment`."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self.process, self.address = process, address
        self.where = ["nsenter", f"--net=/proc/{process.pid}/ns/net"]
        self.environment = {**os.environ, "RAY_ADDRESS": address, "TMPDIR": TEMPORARY}

    def groups(self) -> list[str]:
        """Return the states of the placement groups that are not removed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: list[str] = json.loads(self.process.stdout.readline())
        return [state for state in found if state != "REMOVED"]

    def agents(self) -> dict[int, psutil.Process]:
        """Return the agents of all runs, by their numbers in their runs. The parent of each is an actor."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "penstock.agent" in process.cmdline():
                    found[int(process.environ()["PENSTOCK_ORDER"])] = process
        return found

    def client_servers(self) -> list[psutil.Process]:
        """Return the processes that Ray has started for clients of `ray://`, one for each client."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "--mode=specific-server" in process.cmdline():
                    found.append(process)
        return found

    def kill_actor(self, number: int) -> None:
        """Send SIGKILL to the actor that holds an agent, and to no other process."""
        os.kill(self.agents()[number].ppid(), signal.SIGKILL)

    def penstock(self, *words: str, address: str = "") -> "subprocess.Popen[str]":
        """Start `penstock WORDS --on ray`; `address` replaces RAY_ADDRESS."""
        command = [*self.where, sys.executable, "-m", "penstock.runtime.cli.main", *words, "--on", "ray", "--plain"]
        pipe = subprocess.PIPE
        environment = {**self.environment, **({"RAY_ADDRESS": address} if address else {})}
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


@contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    for _ in range(ATTEMPTS):
        process = start(nodes)
        try:
            assert process.stdout is not None
            if address := process.stdout.readline().strip():
                yield RayCluster(process, address)
                return
        finally:
            end(process)
    raise AssertionError(f"no Ray cluster has started, {ATTEMPTS} times")


def start(nodes: int) -> "subprocess.Popen[str]":
    command = ["unshare", "--net", "sh", "-c", NAMESPACE, sys.executable, "-m", "tests.gates.ray_cluster", str(nodes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    environment.pop("RAY_ADDRESS", None)
    environment["RAY_raylet_start_wait_time_s"] = str(START_S)
    # Ray's default is 15: ranks would get what other tests leave of the cores, and a run would take four times as long.
    environment["RAY_worker_niceness"] = "0"
    environment["TMPDIR"] = TEMPORARY
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)


def end(process: "subprocess.Popen[str]") -> None:
    """End the cluster, and kill the processes that it has left."""
    assert process.stdout is not None
    assert process.stdin is not None
    children = psutil.Process(process.pid).children(recursive=True)
    process.stdin.close()
    try:
        with suppress(subprocess.TimeoutExpired):  # on a busy machine; no fault, since it is only a test instrument
            process.wait(END_S)
    finally:
        for child in children:
            if child.is_running():
                child.kill()
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.util import placement_group_table

    # Ray's own output goes to stderr, so that stdout has only ours.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with TemporaryDirectory(prefix="ray-", dir=TEMPORARY) as folder:
        given: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES}
        head = {
            "num_cpus": 0,
            "ray_client_server_port": CLIENT_PORT,
            "include_dashboard": False,
            "temp_dir": folder,
            **given,
        }
        # Ray 2.60 writes the address of a cluster with a `temp_dir` to its default folder, which it does not make.
        Path(TEMPORARY, "ray").mkdir(exist_ok=True)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(int(sys.argv[1])):
            cluster.add_node(wait=False, num_cpus=1, **given)
        cluster.wait_for_nodes()
        ray.init(cluster.address, log_to_driver=False)
        print(cluster.address, file=out, flush=True)
        for _ in sys.stdin:
            states = [table["state"] for table in placement_group_table().values()]
            print(json.dumps(states), file=out, flush=True)
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
