"""Runs on a real Ray cluster of three nodes: the bits of a run on one host, whatever becomes of its actors, and nothing
of the cluster is kept.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtime.control.agents import AgentsError
from penstock.runtime.managers.ray import RayAgents

from .network import why_not
from .ray_cluster import RayCluster, ray_cluster
from .running import (
    DEADLINE_S,
    assert_all_consumed,
    assert_equal_bits,
    final_state,
    penstock,
    summary,
    until,
)

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
UPDATES, BATCH = 8, 4
WORDS = ["--versions", "pinned", "--lag", "2", "--batch", str(BATCH), "--seed", "5"]
TOY = ["toy", *WORDS, "--updates", str(UPDATES), "--score-ms", "0", "--sync-ms", "0", "--update-ms", "20"]
FAST, SLOW = ["--generate-ms", "0"], ["--generate-ms", "200"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    pytest.importorskip("ray")
    if reason := why_not():
        pytest.skip(reason)
    with ray_cluster(3) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Groups and agents go, however a run has ended."""
    yield
    if "cluster" in request.fixturenames:
        cluster: RayCluster = request.getfixturevalue("cluster")
        assert cluster.groups() == []
        assert cluster.agents() == {}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on this host, with two generators."""
    folder = tmp_path_factory.mktemp("alone") / "r"
    done = penstock("run", *TOY, *FAST, "--generators", "2", "--out", str(folder), "--plain")
    assert done.returncode == 0, done.stderr
    return folder


def end(running: "subprocess.Popen[str]") -> tuple[int, str]:
    """The exit status, and what was said on stderr."""
    try:
        _, said = running.communicate(timeout=DEADLINE_S)
    finally:
        running.kill()
    return running.returncode, said


def comings(folder: Path) -> list[tuple[str, str]]:
    return [(one["replica"], one["event"]) for one in summary(folder).get("replicas", [])]


def test_a_run_on_three_nodes_has_the_bits_of_one_on_this_host(
    cluster: RayCluster, alone: Path, tmp_path: Path
) -> None:
    running = cluster.run(*TOY, *FAST, "--out", str(tmp_path / "r"))
    until(lambda: len(cluster.agents()) == 3 or running.poll() is not None, "there are three agents")
    token = re.search(r'"token": "(\w+)"', (tmp_path / "r" / "ticket.json").read_text())
    assert token
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert token[1] not in shown
    status, said = end(running)
    assert status == 0, said
    assert_all_consumed(tmp_path / "r", UPDATES * BATCH)
    assert_equal_bits(final_state(tmp_path / "r", UPDATES), final_state(alone, UPDATES))


def test_a_cluster_that_is_too_small_is_told_by_what_was_asked_and_what_there_is(
    cluster: RayCluster, tmp_path: Path
) -> None:
    running = cluster.run(*TOY, "--agents", "5", "--startup-deadline", "2", "--out", str(tmp_path / "r"))
    status, said = end(running)
    assert status == 1
    assert re.search(r"CPU: .*\b5\b.*\b3\b", said), said
    assert not (tmp_path / "r").exists()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AgentsError, match=r"penstock\[ray\]"):
        RayAgents(None)
