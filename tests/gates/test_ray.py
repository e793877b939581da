"""Runs on a real Ray cluster of three nodes: they have the bits of a run on one host, whatever becomes of their actors,
and keep nothing of the cluster.
"""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.agents import AgentsError
from penstock.runtime.managers.ray import RayAgents

from .network import why_not
from .ray_cluster import ADDRESS, CLIENT_PORT, RayCluster, ray_cluster
from .running import (
    DEADLINE_S,
    HELD,
    LARGE,
    assert_all_consumed,
    assert_equal_bits,
    final_state,
    holding,
    make_run,
    num_rows,
    replayed,
    rows,
    run_here,
    run_to_end,
    summary,
    toy_flags,
    until,
)

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
UPDATES, BATCH, LAG = 8, 4, 2
OPTIONS = ["--versions", "pinned", "--lag", str(LAG), "--batch", str(BATCH), "--updates", str(UPDATES), "--seed", "5"]
TOY = ["toy", *OPTIONS, "--score-ms", "0", "--sync-ms", "0", "--update-ms", "20"]
HOSTS = tuple(Host(name=name, cores=1) for name in "ab")
ENDLESS = "100000"
FAST = ["--generate-ms", "0"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    pytest.importorskip("ray")
    if reason := why_not():
        pytest.skip(reason)
    with ray_cluster(3) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Assert that placement groups and agents are gone, however a run has ended."""
    yield
    if "cluster" in request.fixturenames:
        cluster: RayCluster = request.getfixturevalue("cluster")
        assert cluster.groups() == []
        assert cluster.agents() == {}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do the same run on this host, in one process, with two generators."""
    flags = toy_flags(updates=UPDATES, batch=BATCH, versions="pinned", seed=5)
    return run_here(make_run(tmp_path_factory.mktemp("alone") / "r", "toy", {"lag": LAG}, flags, generators=2))


def end(running: "subprocess.Popen[str]") -> tuple[int, str]:
    """Wait for a command, and return its exit status and its stderr."""
    try:
        _, said = running.communicate(timeout=DEADLINE_S)
    finally:
        running.kill()
    return running.returncode, said


def until_it(running: "subprocess.Popen[str]", look: Callable[[], Any], what: str) -> None:
    """Wait until `look` is true. Fails if the run ends before."""
    until(lambda: look() or running.poll() is not None, what)
    assert running.poll() is None or look(), end(running)


def comings(folder: Path) -> list[tuple[str, str]]:
    return [(one["replica"], one["event"]) for one in summary(folder).get("replicas", [])]


def test_a_run_on_three_nodes_has_the_bits_of_one_on_this_host(
    cluster: RayCluster, alone: Path, tmp_path: Path
) -> None:
    ticket = tmp_path / "r" / "ticket.json"
    running = cluster.penstock("run", *TOY, *FAST, "--out", str(ticket.parent))
    until_it(running, ticket.exists, "the ticket was written")
    token = re.search(r'"token": "(\w+)"', ticket.read_text())
    assert token
    until_it(running, lambda: len(cluster.agents()) == 3, "there are three agents")
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert token[1] not in shown
    status, said = end(running)
    assert status == 0, said
    assert_all_consumed(tmp_path / "r", UPDATES * BATCH)
    assert_equal_bits(final_state(tmp_path / "r", UPDATES), final_state(alone, UPDATES))


def test_a_cluster_that_is_too_small_is_told_by_what_was_asked_and_what_there_is(
    cluster: RayCluster, tmp_path: Path
) -> None:
    running = cluster.penstock("run", *TOY, "--agents", "5", "--startup-deadline", "8", "--out", str(tmp_path / "r"))
    status, said = end(running)
    assert status == 1
    assert re.search(r"CPU: .*\b5\b.*\b3\b", said), said
    assert not (tmp_path / "r").exists()


def test_an_actor_that_dies_in_mid_response_is_replaced_and_its_groups_are_done_again(
    cluster: RayCluster, alone: Path, tmp_path: Path
) -> None:
    """It holds the only generator: the run goes on when another actor has come."""
    # The first group of update 3: while it waits, the run cannot end.
    folder, holds = tmp_path / "r", holding(tmp_path / "holds", held := f"group {3 * BATCH}")
    words = (HELD, "--holds", str(holds), *OPTIONS, "--lost-replica", "replace")
    running = cluster.penstock("run", *words, "--agents", "2", "--out", str(folder))
    until_it(running, lambda: num_rows(folder) >= 3, "three updates are done")
    lost = cluster.agents()[1]
    cluster.kill_actor(1)
    until(lambda: not lost.is_running(), "the agent has ended with its actor")
    (holds / held).unlink()
    status, said = end(running)
    assert status == 0, said
    assert comings(folder) == [("generator/0", "lost"), ("generator/0", "joined")]
    assert_all_consumed(folder, UPDATES * BATCH)
    assert replayed(folder)[-1].outcomes["consumed"] == UPDATES * BATCH
    assert_equal_bits(final_state(folder, UPDATES), final_state(alone, UPDATES))


def test_after_an_actors_death_in_mid_sync_the_run_goes_on(cluster: RayCluster, tmp_path: Path) -> None:
    """The actor dies when half of a version is sent. An update may be about to read its values."""
    mark, options = tmp_path / "half", {"lag": LAG, "way": "messages"}
    # On a busy machine it takes long until another actor comes, and with it the only generator.
    common: dict[str, Any] = {"updates": UPDATES, "batch": BATCH, "versions": "pinned", "deadline": DEADLINE_S}
    flags = toy_flags(**common, lost_replica="replace")
    troubled, nodes = {**options, "mark": str(mark), "at": 3}, Cluster(hosts=HOSTS, pools={"generator": "b"})
    folder = make_run(tmp_path / "r", LARGE, troubled, flags, cluster=nodes)
    running = cluster.penstock("resume", str(folder), "--agents", "2")
    until_it(running, mark.exists, "half of a version was through")
    cluster.kill_actor(1)
    mark.with_suffix(".go").touch()
    status, said = end(running)
    assert status == 0, said
    assert_all_consumed(folder, UPDATES * BATCH)
    whole = run_to_end(make_run(tmp_path / "whole", LARGE, options, toy_flags(**common)))
    assert_equal_bits(final_state(folder, UPDATES), final_state(whole, UPDATES))
    replayed(folder)


def test_a_run_that_cannot_do_without_it_ends_with_the_reason_of_the_actors_death(
    cluster: RayCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    running = cluster.penstock(
        "run", "toy", "--updates", ENDLESS, "--generate-ms", "20", "--agents", "2", "--out", str(folder)
    )
    until_it(running, lambda: rows(folder), "an update is done")
    cluster.kill_actor(0)
    status, said = end(running)
    assert status == 1
    assert summary(folder)["cause"] == "agent-died"
    assert "actor" in summary(folder)["error"], said


def test_a_connection_whose_process_dies_on_the_cluster_is_made_anew(
    cluster: RayCluster, alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    until(lambda: not cluster.client_servers(), "Ray has ended the processes of clients before")
    running = cluster.penstock("run", *TOY, *FAST, "--out", str(folder), address=f"ray://{ADDRESS}:{CLIENT_PORT}")
    until_it(running, cluster.client_servers, "Ray has started a process for its client")
    for server in cluster.client_servers():
        server.kill()
    status, said = end(running)
    assert status == 0, said
    assert_equal_bits(final_state(folder, UPDATES), final_state(alone, UPDATES))


def test_two_runs_at_once_one_from_outside_are_on_nodes_of_their_own(
    cluster: RayCluster, alone: Path, tmp_path: Path
) -> None:
    folders, outside = [tmp_path / "one", tmp_path / "two"], f"ray://{ADDRESS}:{CLIENT_PORT}"
    first = cluster.penstock("run", *TOY, *FAST, "--agents", "1", "--generators", "2", "--out", str(folders[0]))
    second = cluster.penstock("run", *TOY, *FAST, "--agents", "2", "--out", str(folders[1]), address=outside)
    for running in (first, second):
        status, said = end(running)
        assert status == 0, said
    for folder in folders:
        assert_equal_bits(final_state(folder, UPDATES), final_state(alone, UPDATES))


def test_a_run_that_is_stopped_while_it_waits_for_nodes_keeps_none(cluster: RayCluster, tmp_path: Path) -> None:
    running = cluster.penstock("run", *TOY, "--agents", "5", "--out", str(tmp_path / "r"))
    until_it(running, lambda: cluster.groups(), "it has asked for nodes")
    running.send_signal(signal.SIGTERM)
    assert end(running)[0] == 75


def test_a_launcher_that_is_killed_keeps_no_nodes(cluster: RayCluster, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    running = cluster.penstock(
        "run", "toy", "--updates", ENDLESS, "--generate-ms", "20", "--agents", "2", "--out", str(folder)
    )
    until_it(running, lambda: rows(folder), "an update is done")
    running.kill()
    running.communicate(timeout=DEADLINE_S)
    until(lambda: not cluster.groups() and not cluster.agents(), "the nodes are free")


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("penstock.runtime.managers.ray.CONNECT_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("RAY_ADDRESS", where := f"ray://127.0.0.1:{mute.getsockname()[1]}")
        with pytest.raises(AgentsError, match=rf"{where} .*RAY_ADDRESS"):
            RayAgents(None)


@pytest.mark.parametrize("client", ["", "ray://"])
def test_an_address_at_which_nothing_listens_is_told_by_the_connection(
    monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("penstock.runtime.managers.ray.CONNECT_S", DEADLINE_S)
    monkeypatch.setenv("RAY_ADDRESS", f"{client}127.0.0.1:9")
    with pytest.raises(AgentsError, match=r"\n.*127\.0\.0\.1\b.* to 127\.0\.0\.1:9\b"):
        RayAgents(None)


def test_a_host_of_a_cluster_that_no_name_server_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("penstock.runtime.managers.ray.CONNECT_S", DEADLINE_S)
    monkeypatch.setenv("RAY_ADDRESS", "ray://nowhere.invalid:10001")
    with pytest.raises(AgentsError, match=r"\n.*'nowhere\.invalid'"):
        RayAgents(None)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AgentsError, match=r"penstock\[ray\]"):
        RayAgents(None)
