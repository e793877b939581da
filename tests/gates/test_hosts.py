"""Runs over several hosts, which share only a network and, in some tests, a file system. Agents join over TCP with
CURVE; the controller counts and drops messages of all others.
"""

import ipaddress
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from msgspec import structs

from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.messages import MAX_BYTES, Heartbeat, Hello, pack
from penstock.runtime.control.security import Join, Keys
from penstock.runtime.record.checkpoints import latest_checkpoint
from penstock.runtime.record.folder import RunFolder

from .agents import HOSTS, Agents, asked_for, spread
from .network import Network
from .plain import toy_loop
from .running import (
    DEADLINE_S,
    ENDLESS,
    FAULTS,
    Running,
    assert_equal_bits,
    assert_nothing_is_left,
    delays,
    final_state,
    make_run,
    passed_on,
    printed,
    rows,
    run_here,
    run_to_failure,
    summary,
    toy_flags,
    with_updates,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
TWO_HOSTS = Cluster(
    hosts=(Host(name="a", cores=1), Host(name="b", cores=1, agent="external")), pools={"generator": "b"}
)
QUICK = {"lag": 0, **delays(generate=10.0, score=1.0, update=10.0)}


def agent(join: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "penstock.runtime.control.agent", str(join)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def with_another_key(join: Path) -> Path:
    """Write a copy of the join file with a key that the controller does not know."""
    pair = Keys.make("other", "tcp://127.0.0.1:0", ["b"]).hosts["b"]
    path = join.with_name("stranger.json")
    replace(Join.read(join), public=pair.public, secret=pair.secret).write(path)
    return path


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def listening(processes: list[psutil.Process]) -> set[str]:
    """Return all local addresses at which one of the processes listens."""
    found = [c for p in processes for c in p.net_connections("inet")]
    return {c.laddr.ip for c in found if c.laddr and (c.status == psutil.CONN_LISTEN or c.type == socket.SOCK_DGRAM)}


def test_an_agent_of_another_host_joins_over_tcp_and_a_wrong_key_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", "toy", QUICK, toy_flags(updates=3), generators=2, cluster=TWO_HOSTS)
    with Running(folder) as running:
        line = asked_for(running, "b")
        assert line["endpoint"].startswith("tcp://127.0.0.1:")
        stranger = agent(with_another_key(Path(line["join"])))
        _, said = stranger.communicate(timeout=DEADLINE_S)
        assert stranger.returncode == 1
        assert "does not know the key of host 'b'" in said
        host, _, port = line["endpoint"].removeprefix("tcp://").rpartition(":")
        for _ in range(5):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(secrets.token_bytes(3000))
        joined = agent(Path(line["join"]))
        assert running.wait() == 0, running.errors
        assert joined.wait(DEADLINE_S) == 0, joined.communicate()
        joined.communicate()
    assert summary(folder)["dropped_frames"]["refused"] >= 1
    assert any("a key that is not on the list" in note for note in running.notes)
    assert len(rows(folder)) == 3
    assert_equal_bits(final_state(folder, 3), toy_loop(3, 4))
    assert_nothing_is_left(folder, running.run)


def test_a_port_that_was_taken_since_it_was_tried_is_said_by_the_controller_alone(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster = TWO_HOSTS.model_copy(update={"bind": bind})
        folder = make_run(tmp_path / "r", "toy", QUICK, toy_flags(updates=1), cluster=cluster)
        with Running(folder) as running:
            assert running.wait() == 1
    assert running.errors.startswith(f"cannot listen on tcp://{bind}: the port is in use; ")
    assert len(running.errors.splitlines()) == 1


def test_no_process_of_a_run_listens_beyond_loopback_and_the_controller_has_no_torch(tmp_path: Path) -> None:
    """The program is a user's own file, which imports torch in its first lines."""
    folder = make_run(tmp_path / "r", f"{FAULTS}raises", {}, toy_flags(updates=ENDLESS), cluster=TWO_HOSTS)
    with Running(folder) as running:
        joined = agent(Path(asked_for(running, "b")["join"]))
        running.until_update(2)
        processes = tree(running.process.pid) + tree(joined.pid)
        addresses = listening(processes)
        torch = [p.pid for p in processes if "libtorch" in Path(f"/proc/{p.pid}/maps").read_text()]
        ranks = {pid for pids in running.until_ready()["pools"].values() for pid in pids}
        forking = {p.pid for p in processes if "penstock.runtime.control.worker" in p.cmdline()} - ranks
        running.interrupt()
        assert running.wait() == 130
        joined.communicate(timeout=DEADLINE_S)
    assert len(processes) == 9  # launcher, controller, two agents, two workers that fork, three ranks
    assert addresses != set()
    assert [ip for ip in addresses if not ipaddress.ip_address(ip).is_loopback] == []
    assert (len(ranks), len(forking)) == (3, 2)
    assert set(torch) == ranks | forking


def test_an_agent_of_another_host_that_dies_ends_the_run(tmp_path: Path) -> None:
    """No process of the run is its parent. Its ranks die with it: a broken transfer or missing heartbeats show that."""

    def kill_the_agent(running: Running) -> None:
        joined = agent(Path(asked_for(running, "b")["join"]))
        running.until_update(1)
        joined.kill()
        joined.communicate(timeout=DEADLINE_S)

    folder = make_run(tmp_path / "r", "toy", QUICK, toy_flags(updates=ENDLESS), cluster=TWO_HOSTS)
    errors, _ = run_to_failure(folder, kill_the_agent)
    assert "generator/0" in errors
    assert "rank 0" in errors


@contextmanager
def raw(join: Join, linger_ms: int = 60_000) -> Iterator["zmq.Socket[bytes]"]:
    """Open a socket that sends anything. At the end it waits `linger_ms` at most until all of it is sent."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as one:
        one.setsockopt(zmq.LINGER, linger_ms)
        one.connect(join.endpoint)
        yield one


def test_garbage_on_the_controllers_socket_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", "toy", QUICK, toy_flags(updates=ENDLESS))
    with Running(folder) as running:
        running.until_update(2)
        join = Join.read(folder / "keys" / "local.json")
        beat = Hello("heartbeat", "scorer/0", 0, os.getpid(), "local", join.token)
        with raw(join) as one:
            for _ in range(50):
                one.send(secrets.token_bytes(200))
            one.send_multipart([b"", b"two", b"frames"])
            one.send(pack(beat, 1)[:-7])
            one.send(bytes(MAX_BYTES + 1))
            one.send(pack(Hello("rank", "generator/0", 0, 1, "local", "0" * 32), 1))
            one.send(pack(Heartbeat(), 1))
        with raw(join) as one:
            one.send(pack(structs.replace(beat, role="rank"), 1))
        with raw(join) as one:
            for message in (beat, Heartbeat(), Heartbeat()):
                one.send(pack(message, 1))
        with raw(join, linger_ms=2000) as one:  # its connection is cut again and again
            one.send(bytes(MAX_BYTES * 8))
        counted = "dropped (2 duplicate, 52 malformed, 1 oversized, 4 unknown)"
        running.until(lambda: any(note.startswith(counted) for note in running.notes), "all of it was counted")
        running.until_update(len(rows(folder)) + 3)
        running.interrupt()
        assert running.wait() == 130, running.errors
    found = summary(folder)
    assert found["status"] == "stopped"
    assert found["updates"] == len(rows(folder))
    assert found["dropped_frames"] == {"malformed": 52, "oversized": 1, "unknown": 4, "duplicate": 2}


# Hosts in network namespaces of their own.


def cluster_of(network: Network, *hosts: str) -> Cluster:
    """Return a cluster with generators in turn on the other hosts, whose agents are external; all else on the first."""
    first, *others = (
        Host(name=name, cores=1, address=network.address[name], agent="external" if number else "local")
        for number, name in enumerate(hosts)
    )
    names = tuple(host.name for host in others)
    return Cluster(hosts=(first, *others), bind=f"{first.address}:0", pools={"generator": names})


UPDATES, BATCH, GENERATORS = 3, 6, 3


def learning(path: Path, **options: Any) -> Path:
    flags = toy_flags(updates=UPDATES, batch=BATCH, max_tokens=8, seed=3)
    return make_run(path, f"{FAULTS}digits", {}, flags, generators=GENERATORS, **options)


def test_a_run_over_three_hosts_has_the_bits_of_one_on_a_single_host(network: Network, tmp_path: Path) -> None:
    """Weights go from a to b, on to c and from there to b again; rollouts go to a, prompts from b to c."""
    alone = run_here(learning(tmp_path / "alone"))
    folder = learning(tmp_path / "apart", cluster=cluster_of(network, *HOSTS))
    with spread(network, folder) as (running, agents):
        assert running.wait() == 0, running.errors
        assert [agents.ended(host) for host in ("b", "c")] == [(0, ""), (0, "")]
    assert_equal_bits(final_state(folder, UPDATES), final_state(alone, UPDATES))
    assert summary(folder)["warnings"] == []
    assert [versions > 0 for versions in passed_on(folder, GENERATORS)] == [True, True, False]
    ranks = ["trainer-0-0", "scorer-0-0", *(f"generator-{index}-0" for index in range(GENERATORS))]
    said = {rank: printed(folder, rank) for rank in ranks}
    served = [one["answered"].get("served", 0) for one in said.values() if "answered" in one]
    assert sum(served) == sum(one["asked"].get("asked", 0) for one in said.values())
    assert [said[rank]["asked"]["asked"] for rank in ("scorer-0-0", "trainer-0-0")] == [UPDATES * BATCH] * 2
    assert [one["blocks"] for one in said.values()] == [0] * len(ranks)


def go_on(folder: Path, updates: int, network: Network, hidden: Path, own: Path) -> str:
    """Run up to `updates` on a and b, and return the errors. On b, `hidden` is empty and the run folder is `own`."""
    with Running(with_updates(folder, updates), network.on("a")) as running, Agents(network) as agents:
        line = asked_for(running, "b")
        join = own.with_suffix(".json")
        join.touch(0o600)
        join.write_bytes(Path(line["join"]).read_bytes())
        agents.start({**line, "join": str(join)}, "--folder", str(own), hidden=(hidden,))
        assert agents.ended("b") == (0, "")
        running.wait()
        return running.errors


def test_a_host_that_shares_no_files_keeps_its_part_of_a_checkpoint_and_goes_on_from_it(
    network: Network, tmp_path: Path
) -> None:
    shared, own, other = tmp_path / "shared", tmp_path / "own", tmp_path / "other"
    shared.mkdir()
    folder = make_run(
        shared / "r", "toy", {"lag": 0, **delays(1.0)}, toy_flags(), cluster=cluster_of(network, "a", "b")
    )
    assert go_on(folder, 2, network, shared, own) == ""
    missing = go_on(folder, 4, network, shared, other)
    assert "generator/0 rank 0 on host b could not start" in missing
    assert f"{other}/checkpoints/00000002/generator-0-0.safetensors" in missing
    assert go_on(folder, 4, network, shared, own) == ""
    assert_equal_bits(final_state(folder, 4), toy_loop(4, 4))
    saved = latest_checkpoint(RunFolder(folder))
    assert saved is not None
    assert saved.folder.name == "00000004"
    parts = [
        {path.name for path in (at / "checkpoints" / name).glob("*.safetensors")}
        for at, name in ((own, saved.written), (folder, saved.folder.name))
    ]
    assert parts == [{"generator-0-0.safetensors"}, {"trainer-0-0.safetensors", "scorer-0-0.safetensors"}]


def test_a_host_that_goes_away_ends_the_run_and_is_named_and_nothing_is_left(network: Network, tmp_path: Path) -> None:
    flags = toy_flags(updates=ENDLESS, max_tokens=8, seed=3)
    folder = make_run(tmp_path / "r", "aipo", {"lag": 0}, flags, generators=2, cluster=cluster_of(network, *HOSTS))
    with spread(network, folder) as (running, agents):
        running.until_update(2)
        assert {host: network.listening(host) for host in network.address} == {
            host: {address} for host, address in network.address.items()
        }
        network.cut("b")
        status, said = agents.ended("b")
        assert agents.ended("c") == (0, "")
        assert running.wait() == 1
    # Its heartbeat or its answer to a rank is missed first: both errors name host, replica and rank.
    for named in (r"host b\b", r"generator[/.]0\b", r"rank 0\b"):
        assert re.search(named, running.errors), running.errors
    assert status == 1
    assert said.startswith(f"penstock agent: the controller at tcp://{network.address['a']}:")
    assert "left" not in said
    assert len(rows(folder)) >= 2
