"""A launcher in its own process: python fake_launch.py FOLDER RUN MODE HOSTS…; it prints its lines to stdout."""

import json
import sys
from pathlib import Path
from typing import Any

from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.launcher import Launcher

HERE = Path(__file__).parent


def launcher(
    folder: Path, run: str, mode: str, cluster: Cluster, tell: Any, grace: float = 60.0, **environment: str
) -> Launcher:
    """Return a launcher of the fake controller and of agents with fake ranks."""
    told = {"FAKE_CONTROLLER": mode, "FAKE_HOSTS": " ".join(host.name for host in cluster.hosts), **environment}
    commands = [(str(HERE / name),) for name in ("fake_controller.py", "fake_agent.py")]
    controller, agent = commands
    return Launcher(folder, run, cluster, tell, grace=grace, environment=told, controller=controller, agent=agent)


if __name__ == "__main__":
    path, run, mode, *names = sys.argv[1:]
    hosts = tuple(Host(name=name, cores=1) for name in names)
    tell = lambda line: print(json.dumps(line), flush=True)  # noqa: E731
    sys.exit(launcher(Path(path), run, mode, Cluster(hosts=hosts), tell).run())
