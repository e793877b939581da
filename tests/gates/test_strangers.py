"""Agents on several hosts join over TCP with CURVE; whoever else talks to the controller is counted and dropped."""

import ipaddress
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import zmq
from msgspec import structs

from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.messages import MAX_BYTES, Heartbeat, Hello, pack
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.control.security import Join, Keys

from .plain import toy_loop
from .running import (
    FAULTS,
    Options,
    Running,
    assert_equal_bits,
    assert_nothing_is_left,
    final_state,
    make_run,
    rows,
    summary,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
TWO_HOSTS = Cluster(
    hosts=(Host(name="a", cores=1), Host(name="b", cores=1, agent="external")), pools={"generator": "b"}
)
QUICK: Options = {"lag": 0, "generate_ms": 10.0, "score_ms": 1.0, "update_ms": 10.0, "sync_ms": 0.0}


def agent(join: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "penstock.runtime.control.agent", str(join)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def with_another_key(join: Path) -> Path:
    """The same file for a key that the controller does not know."""
    pair = Keys.make("other", "tcp://127.0.0.1:0", ["b"]).hosts["b"]
    path = join.with_name("stranger.json")
    replace(Join.read(join), public=pair.public, secret=pair.secret).write(path)
    return path


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def listening(processes: list[psutil.Process]) -> set[str]:
    """Every local address at which one of them can be reached from elsewhere."""
    found = [c for p in processes for c in p.net_connections("inet")]
    return {c.laddr.ip for c in found if c.laddr and (c.status == psutil.CONN_LISTEN or c.type == socket.SOCK_DGRAM)}


def test_an_agent_of_another_host_joins_over_tcp_and_a_wrong_key_is_refused(tmp_path: Path) -> None:
    flags = RunOptions(updates=3, batch=4, slots=16, deadline=60.0)
    folder = make_run(tmp_path / "r", "toy", QUICK, flags, generators=2, cluster=TWO_HOSTS)
    with Running(folder) as running:
        line = running.until_line(lambda line: line.get("kind") == "external", "a host's agent was asked for")
        assert line["host"] == "b"
        assert line["endpoint"].startswith("tcp://127.0.0.1:")
        stranger = agent(with_another_key(Path(line["join"])))
        _, said = stranger.communicate(timeout=60)
        assert stranger.returncode == 1
        assert "does not know the key of host 'b'" in said
        throw_bytes_at(line["endpoint"])
        joined = agent(Path(line["join"]))
        assert running.wait() == 0, running.errors
        assert joined.wait(30) == 0, joined.communicate()
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
        folder = make_run(tmp_path / "r", "toy", QUICK, RunOptions(updates=1, batch=4), cluster=cluster)
        with Running(folder) as running:
            assert running.wait() == 1
    assert running.errors.startswith(f"cannot listen on tcp://{bind}: the port is in use; ")
    assert len(running.errors.splitlines()) == 1


def throw_bytes_at(endpoint: str) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(secrets.token_bytes(3000))


def test_no_process_of_a_run_listens_beyond_loopback_and_the_controller_has_no_torch(tmp_path: Path) -> None:
    """The program is a user's own file, which imports torch in its first lines."""
    flags = RunOptions(updates=100_000, batch=4, slots=16, deadline=60.0)
    folder = make_run(tmp_path / "r", f"{FAULTS}raises", {}, flags, cluster=TWO_HOSTS)
    with Running(folder) as running:
        join = running.until_line(lambda line: line.get("kind") == "external", "an agent was asked for")["join"]
        joined = agent(Path(join))
        running.until_update(2)
        processes = tree(running.process.pid) + tree(joined.pid)
        addresses = listening(processes)
        torch = [p.pid for p in processes if "libtorch" in Path(f"/proc/{p.pid}/maps").read_text()]
        ranks = {pid for pids in running.until_ready()["pools"].values() for pid in pids}
        forking = {p.pid for p in processes if "penstock.runtime.control.worker" in p.cmdline()} - ranks
        running.interrupt()
        assert running.wait() == 130
        joined.communicate(timeout=30)
    assert len(processes) == 9  # launcher, controller, two agents with what forks, three ranks
    assert addresses != set()
    assert [ip for ip in addresses if not ipaddress.ip_address(ip).is_loopback] == []
    assert (len(ranks), len(forking)) == (3, 2)
    assert set(torch) == ranks | forking


def test_an_agent_of_another_host_that_dies_ends_the_run(tmp_path: Path) -> None:
    """Nobody here is its parent: its ranks die with it, and a broken transfer or their silence tells."""
    flags = RunOptions(updates=100_000, batch=4, slots=16, deadline=60.0)
    folder = make_run(tmp_path / "r", "toy", QUICK, flags, cluster=TWO_HOSTS)
    with Running(folder) as running:
        join = running.until_line(lambda line: line.get("kind") == "external", "an agent was asked for")["join"]
        joined = agent(Path(join))
        running.until_update(1)
        joined.kill()
        joined.communicate(timeout=30)
        assert running.wait() == 1
    assert "generator/0" in running.errors
    assert "rank 0" in running.errors


@contextmanager
def raw(join: Join) -> Iterator["zmq.Socket[bytes]"]:
    """A socket that says whatever it is told to."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as one:
        one.setsockopt(zmq.LINGER, 2000)
        one.connect(join.endpoint)
        yield one


def test_garbage_on_the_controllers_socket_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    flags = RunOptions(updates=100_000, batch=4, slots=16, deadline=60.0)
    folder = make_run(tmp_path / "r", "toy", QUICK, flags)
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
            one.send(pack(Heartbeat("scorer/0", 0, 0.0), 1))
        with raw(join) as one:
            one.send(pack(structs.replace(beat, role="rank"), 1))
        with raw(join) as one:
            for message in (beat, Heartbeat("scorer/0", 0, 0.0), Heartbeat("scorer/0", 0, 0.0)):
                one.send(pack(message, 1))
        with raw(join) as one:
            one.send(bytes(MAX_BYTES * 8))
        counted = "dropped (2 duplicate, 52 malformed, 1 oversized, 4 unknown)"
        running.until(lambda: any(note.startswith(counted) for note in running.notes), "all of it was counted")
        running.until_update(len(rows(folder)) + 3)
        running.interrupt()
        assert running.wait() == 130, running.errors
    found = summary(folder)
    assert found["status"] == "stopped"
    assert found["updates"] == len(rows(folder))
    assert found["dropped_frames"] == {
        "malformed": 52,
        "oversized": 1,
        "unknown": 4,
        "duplicate": 2,
    }
