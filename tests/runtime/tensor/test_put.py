"""Weights put into another process's memory: equal, nothing left behind, and never a hang."""

import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from penstock.runtime.tensor import one_sided as memories
from penstock.runtime.tensor.buffers import copy_elements
from penstock.runtime.tensor.digest import ChecksumError, digest
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.one_sided import MappedMemory, OneSidedTransport, Place, SharedMemory
from penstock.runtime.tensor.process_group import TransportError
from penstock.runtime.tensor.shm import SHM, SegmentError, sweep
from penstock.runtime.tensor.weight_sync import SyncError, WeightPublisher, WeightReceiver
from tests.forks import Forked

from .peer import CHANNEL, Policy, hurry, published, receive
from .put_peer import Opening, exported
from .test_bridge import Peer

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[3]


class PutPeer(Peer):
    def __init__(self, side: str, folder: Path, timeout: float, device: str) -> None:
        self.process = Forked("tests.runtime.tensor.put_peer:main", side, str(folder), str(timeout), device)
        assert self.read() == {"started": True}

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.read()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A folder named as a run; what the run leaves in shared memory is swept, as at the next start."""
    folder = tmp_path / f"put{secrets.token_hex(6)}"
    folder.mkdir()
    yield folder
    sweep(folder.name)
    assert not list(SHM.glob(f"penstock-{folder.name}-*"))


@pytest.fixture
def other(run: Path) -> Iterator[Any]:
    peers: list[PutPeer] = []

    def start(side: str, timeout: float = 60.0, device: str = "cpu") -> PutPeer:
        peers.append(PutPeer(side, run, timeout, device))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=ON_A_GPU)])


def source(run: Path, timeout: float = 60.0, device: str = "cpu") -> tuple[Policy, WeightPublisher, Opening]:
    policy, bridge = Policy(device=device), ReplicaLink(CHANNEL, FileStore(str(run / "bridge")), timeout=timeout)
    return policy, WeightPublisher(CHANNEL, policy, device=device), Opening(bridge, "source", None, device)


def destination(run: Path, timeout: float = 60.0, device: str = "cpu") -> tuple[WeightReceiver, Opening]:
    memory, bridge = exported(run.name, device), ReplicaLink(CHANNEL, FileStore(str(run / "bridge")), timeout=timeout)
    return WeightReceiver(CHANNEL, allocate=memory, device=device), Opening(bridge, "destination", memory, device)


@DEVICES
def test_each_version_arrives_equal_and_both_halves_are_used(run: Path, other: Any, device: str) -> None:
    peer = other("destination", device=device)
    policy, publisher, transport = source(run, device=device)
    for version in (0, 1, 2, 5):
        policy.advance(version)
        facts = published(publisher, version)
        expected = digest(policy.tensors)
        peer.tell(**facts)
        policy.advance(99)
        publisher.send(version, transport)
        assert peer.read() == {"version": version, "digest": expected}
    assert isinstance(transport.transport, OneSidedTransport)
    assert len(list(SHM.glob(f"penstock-{run.name}-*"))) == (device == "cpu")


def test_a_sender_that_dies_while_it_writes_leaves_the_live_version_as_it_was(run: Path, other: Any) -> None:
    peer = other("source")
    receiver, transport = destination(run)
    facts = peer.ask(publish=0)
    peer.tell(send=0)
    receive(receiver, facts, transport)
    receiver.swap(0)
    assert peer.read() == {"sent": 0, "way": "OneSidedTransport"}
    live = digest(receiver.weights.tensors)
    peer.tell(die=True)
    facts = peer.ask(publish=1)
    peer.tell(send=1)
    with pytest.raises(TransportError, match=r"version 1: the word that all is written from source rank 0 failed"):
        receive(receiver, facts, transport)
    assert (receiver.weights.version, digest(receiver.weights.tensors)) == (0, live)
    with pytest.raises(SyncError, match="swap to version 1"):
        receiver.swap(1)


def test_a_receiver_that_dies_while_it_is_written_fails_the_send(run: Path, other: Any, monkeypatch: Any) -> None:
    peer = other("destination")
    _, publisher, transport = source(run)
    peer.tell(**published(publisher, 0))

    def kill_then_copy(target: torch.Tensor, piece: torch.Tensor) -> None:
        if peer.process.poll() is None:
            peer.process.kill()
            peer.process.wait(20)
        copy_elements(target, piece)

    monkeypatch.setattr(memories, "copy_elements", kill_then_copy)
    with pytest.raises(TransportError, match=r"version 0: .*to destination rank 0 failed"):
        publisher.send(0, transport)
    with pytest.raises(TransportError, match="the link is broken"):
        publisher.send(0, transport)


@DEVICES
def test_a_receiver_that_hangs_fails_the_send_within_the_timeout(run: Path, other: Any, device: str) -> None:
    peer = other("destination", device=device)
    policy, publisher, transport = source(run, device=device)
    peer.tell(**published(publisher, 0))
    publisher.send(0, transport)
    assert peer.read()["version"] == 0
    policy.advance(1)
    publisher.publish(1)
    peer.process.halt()
    hurry(transport.transport, 2)
    said = r"version 1: the offer of a shadow to destination rank 0 failed after \d+\.\d s: .*Timed out waiting 2000ms"
    with pytest.raises(TransportError, match=said):
        publisher.send(1, transport)


@DEVICES
def test_another_version_than_is_awaited_is_an_error_on_both_sides(run: Path, other: Any, device: str) -> None:
    peer = other("source", device=device)
    receiver, transport = destination(run, device=device)
    peer.ask(publish=0)
    facts = peer.ask(publish=1)
    peer.tell(send=0)
    with pytest.raises(ChecksumError, match=r"source rank 0 sent \{'version': 0, .*needed \{'version': 1"):
        receive(receiver, facts, transport)
    answer = peer.read()
    assert answer["error"] == "ChecksumError"
    assert "destination rank 0 sent {'version': 1" in answer["text"]
    assert receiver.weights.version == -1


def test_a_version_that_comes_twice_is_refused(run: Path, other: Any) -> None:
    peer = other("source")
    receiver, transport = destination(run)
    facts = peer.ask(publish=3)
    peer.tell(send=3)
    receive(receiver, facts, transport)
    with pytest.raises(SyncError, match="receive version 3: live: -1, arrived: 3"):
        receive(receiver, facts, transport)
    receiver.swap(3)
    with pytest.raises(SyncError, match="receive version 3: live: 3"):
        receive(receiver, facts, transport)


LATE = "cuda:0 is not through with the work of this process after 1 s"


@pytest.mark.parametrize(
    ("side", "said"), [("destination", "no shadow is free"), ("source", "the writing of the shadow")]
)
def test_a_gpu_that_is_late_is_named_with_the_version(run: Path, monkeypatch: Any, side: str, said: str) -> None:
    def late(*given: Any) -> None:
        raise RuntimeError(LATE)

    (_, publisher, sending), (receiver, receiving) = source(run), destination(run)

    def sync(version: int) -> tuple[Future[Any], Future[Any]]:
        facts = published(publisher, version)
        with ThreadPoolExecutor(2) as threads:
            sent = threads.submit(publisher.send, version, sending)
            return sent, threads.submit(receive, receiver, facts, receiving)

    for end in sync(0):
        end.result()
    receiver.swap(0)
    if side == "source":
        monkeypatch.setattr(MappedMemory, "write", late)
        hurry(receiving.transport, 2)
        blamed, other = sync(1)
    else:
        monkeypatch.setattr(SharedMemory, "wait_idle", late)
        hurry(sending.transport, 2)
        other, blamed = sync(1)
    with pytest.raises(TransportError, match=rf"version 1: {said}.*{LATE}"):
        blamed.result()
    with pytest.raises(TransportError, match="version 1"):
        other.result()
    assert receiver.weights.version == 0


def test_a_place_outside_its_segment_is_refused(run: Path) -> None:
    memory = SharedMemory(run.name, "owner")
    buffer = memory(4096)
    place = memory.place(buffer[1024:])
    assert place.offset == 1024
    mapped, like = MappedMemory(), torch.empty(16, 32, dtype=torch.int16)
    mapped.view(place, like, (32, 1)).fill_(7)
    assert buffer[1024:2048].view(torch.int16).eq(7).all()
    for bad, strides in ((Place(place.segment, 4000), (32, 1)), (place, (4096, 1)), (place, (-1, 1))):
        with pytest.raises(SegmentError, match="is not in the 4096 bytes"):
            mapped.view(bad, like, strides)
    with pytest.raises(SegmentError, match="in none of its segments"):
        memory.place(torch.zeros(3))
    mapped.close()
    memory.close()
