"""How the driver of a Ray cluster is started and queried, with a stand-in for the package `ray`."""

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.runtime.control.agents import AgentsError
from penstock.runtime.managers.ray import RayAgents

# The parts of Ray that the driver imports. `init` raises the errors in `failures.txt`, one per connection.
RAY = """
import builtins
from pathlib import Path

from . import exceptions

HERE = Path(__file__).parent

def init(**_):
    first, *others = (HERE / "failures.txt").read_text().splitlines() or [""]
    (HERE / "failures.txt").write_text("\\n".join(others))
    with (HERE / "connections.txt").open("a") as file:
        file.write(".")
    if first:
        kind, _, text = first.partition(" ")
        raise getattr(builtins, kind)(text)

def nodes():
    return [{"Alive": True, "NodeID": "a", "NodeManagerHostname": "a", "Resources": {"CPU": 2.0}}]

def shutdown():
    pass
"""
FILES = {
    "__init__.py": RAY,
    "exceptions.py": "class RayError(Exception):\n    pass\n",
    "util/__init__.py": "get_node_ip_address = placement_group_table = None\n",
    "util/placement_group.py": "PlacementGroup = placement_group = remove_placement_group = None\n",
    "util/scheduling_strategies.py": "PlacementGroupSchedulingStrategy = None\n",
}
# Ray's errors for a client whose server process died at its start, and for incompatible versions.
DIED = "ConnectionAbortedError Initialization failure from server: Starting Ray client server failed."
OTHER = "RuntimeError Version mismatch: the cluster was started with Python 3.9"

Connections = Callable[..., int]


@pytest.fixture
def connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connections]:
    """Return a function that sets the errors of the next connections, and returns the number of connections so far."""
    for name, text in FILES.items():
        path = tmp_path / "ray" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    # Add the folders of this process's sys.path, so that its children find the same modules.
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setattr("penstock.runtime.managers.ray.find_spec", lambda name: name)

    def told(*failures: str) -> int:
        if failures:
            (tmp_path / "ray" / "failures.txt").write_text("\n".join(failures))
        made = tmp_path / "ray" / "connections.txt"
        return len(made.read_text()) if made.exists() else 0

    with socket.create_server(("127.0.0.1", 0)) as head:
        monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{head.getsockname()[1]}")
        yield told


def test_a_connection_whose_process_on_the_cluster_has_died_is_made_anew_as_soon_as_ray_says_so(
    connections: Connections,
) -> None:
    connections(*[DIED] * 5)
    agents = RayAgents(None)
    agents.stop()
    assert (agents.slots, connections()) == (1, 6)


def test_a_connection_that_fails_each_time_is_told_with_what_ray_says(connections: Connections) -> None:
    connections(*[DIED] * 7)
    with pytest.raises(AgentsError, match="Starting Ray client server failed"):
        RayAgents(None)
    assert connections() == 6


def test_what_another_connection_cannot_mend_is_told_at_once(connections: Connections) -> None:
    connections(OTHER)
    with pytest.raises(AgentsError, match="Version mismatch"):
        RayAgents(None)
    assert connections() == 1


def test_a_driver_that_cannot_be_started_is_told(connections: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(AgentsError, match=r"--on ray: .*/nowhere/python"):
        RayAgents(None)
