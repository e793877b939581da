"""Weights between real processes: equal, on the loopback only, and never a hang when the other side fails."""

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore

from penstock.runtime.tensor.digest import ChecksumError, digest
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.process_group import Message, Transport, TransportError
from penstock.runtime.tensor.weight_sync import Moved, WeightPublisher, WeightReceiver
from tests.forks import Forked

from .peer import CHANNEL, Policy, hurry, published, receive

pytestmark = pytest.mark.timeout(300)


class Peer:
    """The other process, answering line by line."""

    def __init__(self, side: str, path: Path, timeout: float) -> None:
        self.process = Forked("tests.runtime.tensor.peer:main", side, str(path), str(timeout))

    def tell(self, **order: Any) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        self.process.end()


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Any]:
    """Start the other side and join it: `peers(side, timeout) -> (peer, our transport)`."""
    others: list[Peer] = []
    transports: list[Transport] = []

    def join(side: str, timeout: float = 60.0) -> tuple[Peer, Transport]:
        path = tmp_path / f"bridge-{len(others)}"
        others.append(Peer(side, path, timeout))
        assert others[-1].read() == {"started": True}
        ours = ReplicaLink(CHANNEL, FileStore(str(path)), timeout=timeout).open(
            "destination" if side == "source" else "source"
        )
        transports.append(ours)
        assert others[-1].read() == {"open": True}
        return others[-1], ours

    yield join
    for transport in transports:
        transport.close()
    for other in others:
        other.end()


def test_each_version_arrives_equal_whatever_the_optimizer_does_meanwhile(peers: Any) -> None:
    peer, transport = peers("destination")
    policy = Policy()
    publisher = WeightPublisher(CHANNEL, policy, wire="bfloat16")
    for version in (0, 1, 2, 5):
        policy.advance(version)
        facts = published(publisher, version)
        expected = {k: (v.bfloat16() if v.is_floating_point() else v).clone() for k, v in policy.tensors.items()}
        live = {k: expected[k].to(v.dtype) for k, v in policy.tensors.items()}
        peer.tell(**facts)
        policy.advance(99)
        moved = publisher.send(version, transport)
        answer = peer.read()
        assert answer == {"version": version, "digest": digest(live), "bytes": moved.nbytes}
        assert moved.nbytes == sum(t.nbytes for t in expected.values())


def test_nothing_listens_beyond_loopback(peers: Any) -> None:
    peer, _ = peers("destination")
    listening = [
        connection.laddr.ip
        for process in (psutil.Process(), psutil.Process(peer.process.pid))
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert all(ip == "::1" or ip.startswith("127.") for ip in listening)


def test_the_main_thread_computes_while_a_version_arrives(peers: Any) -> None:
    peer, transport = peers("source")
    receiver = WeightReceiver(CHANNEL)
    results: queue.Queue[Moved | Exception] = queue.Queue()
    policy = Policy()
    policy.advance(3)
    publisher = WeightPublisher(CHANNEL, policy)
    receiver.describe(publisher.description)
    receiver.start(3, publisher.publish(3), transport, results.put)
    assert sum(range(100_000)) == 4_999_950_000  # the source has not been told yet: a wait with the lock would hang
    assert receiver.weights.version == -1
    peer.tell(version=3)
    assert isinstance(results.get(timeout=60), Moved)
    receiver.swap(3)
    assert receiver.weights.version == 3
    assert all(torch.equal(receiver.weights.tensors[name], t) for name, t in policy.tensors.items())


def test_a_stale_version_on_the_wire_is_named_and_breaks_the_bridge(peers: Any) -> None:
    peer, transport = peers("source")
    policy = Policy()
    policy.advance(2)
    facts = published(WeightPublisher(CHANNEL, policy), 2)
    peer.tell(version=1)
    receiver = WeightReceiver(CHANNEL)
    with pytest.raises(ChecksumError, match=r"source rank 0 sent \{'version': 1, .*needed \{'version': 2"):
        receive(receiver, facts, transport)
    with pytest.raises(TransportError, match="the link is broken: source rank 0 sent"):
        receive(receiver, facts, transport)


def test_a_receiver_that_dies_fails_the_send_by_name(peers: Any) -> None:
    peer, transport = peers("destination")
    policy = Policy(large=40_000_000)
    publisher = WeightPublisher(CHANNEL, policy)
    publisher.publish(0)
    results: queue.Queue[Moved | Exception] = queue.Queue()
    publisher.start(0, transport, 1, results.put)
    peer.process.kill()
    error = results.get(timeout=60)
    assert isinstance(error, TransportError)
    assert f"{CHANNEL}: version 0: " in str(error)
    assert "to destination rank 0 failed" in str(error)
    with pytest.raises(TransportError, match="the link is broken"):
        publisher.send(0, transport)


def kill_after_the_header(monkeypatch: Any, transport: Any, peer: Peer) -> None:
    """The first wait is for that; then all is under way, and what is half way ends with the deadline alone."""
    wait = Message.wait

    def wait_then_kill(message: Message) -> Tensor:
        found = wait(message)
        if message._connection is transport._connection:
            peer.process.kill()
            hurry(transport, 2)
        return found

    monkeypatch.setattr(Message, "wait", wait_then_kill)


def test_a_receiver_that_dies_while_bytes_flow_names_the_tensor(peers: Any, monkeypatch: Any) -> None:
    peer, transport = peers("destination")
    publisher = WeightPublisher(CHANNEL, Policy(large=40_000_000))
    peer.tell(**published(publisher, 0))
    kill_after_the_header(monkeypatch, transport, peer)
    with pytest.raises(TransportError, match=r"version 0: embed \[\d+:\d+\] to destination rank 0 failed"):
        publisher.send(0, transport)


def test_a_sender_that_dies_fails_the_receive_and_the_live_version_stays(peers: Any) -> None:
    peer, transport = peers("source")
    receiver = WeightReceiver(CHANNEL)
    peer.tell(version=0)
    receive(receiver, peer.read()["facts"], transport)
    receiver.swap(0)
    live = digest(receiver.weights.tensors)
    policy = Policy()
    policy.advance(1)
    results: queue.Queue[Moved | Exception] = queue.Queue()
    receiver.start(1, published(WeightPublisher(CHANNEL, policy), 1)["digests"], transport, results.put)
    peer.process.kill()
    error = results.get(timeout=60)
    assert isinstance(error, TransportError)
    assert f"{CHANNEL}: version 1: the header from source rank 0 failed" in str(error)
    assert (receiver.weights.version, digest(receiver.weights.tensors)) == (0, live)


def test_a_receiver_that_hangs_fails_the_send_within_the_timeout(peers: Any) -> None:
    peer, transport = peers("destination")
    publisher = WeightPublisher(CHANNEL, Policy(large=40_000_000))
    publisher.publish(0)
    peer.process.halt()
    hurry(transport, 2)
    said = r"version 0: the header to destination rank 0 failed after \d+\.\d s: .*Timed out waiting 2000ms"
    with pytest.raises(TransportError, match=said):
        publisher.send(0, transport)


def test_a_replica_killed_half_way_breaks_its_own_bridge_alone_and_comes_back_on_a_new_one(
    peers: Any, monkeypatch: Any
) -> None:
    (first, broken), (second, sound) = peers("destination"), peers("destination")
    publisher = WeightPublisher(CHANNEL, Policy(large=40_000_000))
    first.tell(**published(publisher, 0))
    publisher.send(0, broken)
    assert first.read()["version"] == 0
    facts = published(publisher, 1)
    first.tell(**facts)
    kill_after_the_header(monkeypatch, broken, first)
    with pytest.raises(TransportError, match=r"version 1: embed \[\d+:\d+\] to destination rank 0 failed"):
        publisher.send(1, broken)
    third, rebuilt = peers("destination")
    for peer, transport in ((second, sound), (third, rebuilt)):
        peer.tell(**facts)
        publisher.send(1, transport)
        assert peer.read()["version"] == 1
    with pytest.raises(TransportError, match="the link is broken"):
        publisher.send(1, broken)


def test_a_peer_that_never_comes_is_an_error_with_the_deadline(tmp_path: Path) -> None:
    bridge = ReplicaLink(CHANNEL, FileStore(str(tmp_path / "bridge")), destinations=2, timeout=1)
    absent = "not there: destination rank 0, destination rank 1"
    with pytest.raises(
        TransportError,
        match=rf"source rank 0: the connection of 3 ranks is not complete after \d+\.\d s of 1 s: {absent}",
    ):
        bridge.open("source")


def test_what_a_machine_lacks_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="given backend 'cuda_ipc', needed one of gloo, nccl"):
        ReplicaLink(CHANNEL, HashStore(), backend="cuda_ipc")  # type: ignore[arg-type]
    lacks = {"192.0.2.1": ReplicaLink(CHANNEL, HashStore(), destinations=0, address="192.0.2.1")}
    if not torch.distributed.is_nccl_available():
        lacks["given nccl, which torch .* needed gloo"] = ReplicaLink(CHANNEL, HashStore(), backend="nccl")
    for text, bridge in lacks.items():
        with pytest.raises(TransportError, match=rf"not complete after [0-5]?\d\.\d s of 60\.0 s: .*{text}"):
            bridge.open("source")
