"""Links between processes: weights arrive equal, failures name their culprit on any transport, and nothing hangs."""

import itertools
import math
import os
import queue
import random
import re
import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore

from penstock.runtime.tensor import cuda_ipc, one_sided
from penstock.runtime.tensor.buffers import Shard, copy_elements
from penstock.runtime.tensor.cuda_ipc import DeviceMemory, Export, OpenedMemory, finish, visible_devices
from penstock.runtime.tensor.digest import ChecksumError, digest
from penstock.runtime.tensor.layout import Copy, Region
from penstock.runtime.tensor.link import TRANSPORTS, ReplicaLink
from penstock.runtime.tensor.one_sided import Location, MappedMemory, OneSidedTransport, SharedMemory
from penstock.runtime.tensor.process_group import (
    AllReduce,
    Message,
    Pace,
    Transport,
    TransportError,
    interface_of,
    open_world,
)
from penstock.runtime.tensor.reshard import BUCKET
from penstock.runtime.tensor.send_recv import (
    GLOO_SIZES,
    BucketSizes,
    MessageTransport,
    Staging,
    divide,
    pack,
    rounds_of,
    unpack,
)
from penstock.runtime.tensor.shm import SHM, SegmentError, create_segment, open_segment, sweep
from penstock.runtime.tensor.weight_sync import Moved, SyncError, WeightPublisher, WeightReceiver

from .peer import CHANNEL, End, Peer, Policy, hurry, published, receive
from .replicas import sound, together

pytestmark = pytest.mark.timeout(300)
NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KINDS = pytest.mark.parametrize("kind", ["messages", "shm", pytest.param("cuda_ipc", marks=NEEDS_A_GPU)])


class Link:
    """Links between this process and others: each `join` starts a process with a folder and a link of its own."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.device = "cuda:0" if kind == "cuda_ipc" else "cpu"
        self.peers: list[Peer] = []
        self.ends: list[End] = []

    def join(self, side: str) -> tuple[Peer, End]:
        """Start a process on this side; return it and our end, which is on the other side."""
        folder = self.folder / f"put{secrets.token_hex(6)}"
        folder.mkdir()
        ours = End(folder, "destination" if side == "source" else "source", self.kind, self.device)
        self.ends.append(ours)
        self.peers.append(Peer("main", side, folder, self.kind, self.device))
        if self.kind == "messages":  # other transports are opened by the first sync
            self.peers[-1].tell(open=True)
            ours.open()
            assert self.peers[-1].read() == {"open": "MessageTransport"}
        return self.peers[-1], ours

    def receiver(self, end: End) -> WeightReceiver:
        return WeightReceiver(CHANNEL, allocate=end.memory, device=self.device)


@pytest.fixture
def links(tmp_path: Path) -> Iterator[Any]:
    made: list[Link] = []

    def make(kind: str) -> Link:
        made.append(Link(tmp_path, kind))
        return made[-1]

    yield make
    for ours in made:
        for end in ours.ends:
            end.close()
        for peer in ours.peers:
            peer.process.end()
        for folder in tmp_path.iterdir():
            sweep(folder.name)
            assert not list(SHM.glob(f"penstock-{folder.name}-*"))


@KINDS
def test_each_version_arrives_equal_whatever_the_optimizer_does_meanwhile(links: Any, kind: str) -> None:
    made = links(kind)
    peer, end = made.join("destination")
    policy = Policy(device=made.device)
    publisher = WeightPublisher(CHANNEL, policy, wire="bfloat16", device=made.device)
    for version in (0, 1, 2, 5):
        policy.advance(version)
        facts = published(publisher, version)
        expected = {k: (v.bfloat16() if v.is_floating_point() else v).clone() for k, v in policy.tensors.items()}
        live = {k: expected[k].to(v.dtype) for k, v in policy.tensors.items()}
        peer.tell(**facts)
        policy.advance(99)
        moved = publisher.send(version, end)
        assert peer.read() == {"version": version, "digest": digest(live), "bytes": moved.nbytes}
        assert moved.nbytes == sum(t.nbytes for t in expected.values())
    assert isinstance(end.opened, MessageTransport if kind == "messages" else OneSidedTransport)
    assert len(list(SHM.glob(f"penstock-{end.folder.name}-*"))) == (kind == "shm")


def test_nothing_listens_beyond_loopback(links: Any) -> None:
    peer, _ = links("messages").join("destination")
    listening = [
        connection.laddr.ip
        for process in (psutil.Process(), psutil.Process(peer.process.pid))
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert all(ip == "::1" or ip.startswith("127.") for ip in listening)


def test_the_main_thread_computes_while_a_version_arrives(links: Any) -> None:
    peer, end = links("messages").join("source")
    receiver, results = WeightReceiver(CHANNEL), queue.Queue[Moved | Exception]()
    facts = peer.ask(publish=3)
    receiver.describe(facts["description"])
    receiver.start(3, facts["digests"], end, results.put)
    assert sum(range(100_000)) == 4_999_950_000  # the source was not told to send yet: a wait with the GIL held hangs
    assert receiver.weights.version == -1
    peer.tell(send=3)
    assert isinstance(results.get(timeout=60), Moved)
    receiver.swap(3)
    assert digest(receiver.weights.tensors) == facts["digests"]


@KINDS
def test_another_version_than_is_awaited_is_named_and_breaks_the_link(links: Any, kind: str) -> None:
    made = links(kind)
    peer, end = made.join("source")
    receiver = made.receiver(end)
    peer.ask(publish=0)
    facts = peer.ask(publish=1)
    peer.tell(send=0)
    with pytest.raises(ChecksumError, match=r"source rank 0 sent \{'version': 0, .*needed \{'version': 1"):
        receive(receiver, facts, end)
    with pytest.raises(TransportError, match="the link is broken: source rank 0 sent"):
        receive(receiver, facts, end)
    if kind != "messages":
        answer = peer.read()
        assert (answer["error"], "destination rank 0 sent {'version': 1" in answer["text"]) == ("ChecksumError", True)
    assert receiver.weights.version == -1


@KINDS
def test_a_sender_that_dies_half_way_leaves_the_live_version_as_it_was(links: Any, kind: str) -> None:
    made = links(kind)
    peer, end = made.join("source")
    receiver, facts = made.receiver(end), peer.ask(publish=0)
    peer.tell(send=0)
    receive(receiver, facts, end)
    receiver.swap(0)
    assert peer.read() == {"sent": 0}
    live = digest(receiver.weights.tensors)
    peer.tell(die=True)
    facts = peer.ask(publish=1)
    peer.tell(send=1)
    with pytest.raises(TransportError, match=rf"{CHANNEL}: version 1: .* from source rank 0 failed"):
        receive(receiver, facts, end)
    assert (receiver.weights.version, digest(receiver.weights.tensors)) == (0, live)
    with pytest.raises(SyncError, match="swap to version 1"):
        receiver.swap(1)


def kill_half_way(monkeypatch: Any, end: End, peer: Peer) -> None:
    """Kill the peer while the first piece is written, or with messages after the wait for the header: all messages are
    in flight then, and an unfinished one ends only at the deadline.
    """
    wait, waits = Message.wait, itertools.count(1)

    def kill() -> None:
        if peer.process.poll() is None:
            peer.process.kill()
            peer.process.wait(20)

    def wait_then_kill(message: Message) -> Tensor:
        found = wait(message)
        # The first wait is for the version that the peer expects.
        if message._connection is end.opened._connection and next(waits) == 2:  # type: ignore[union-attr]
            kill()
            hurry(end.opened, 2)
        return found

    def kill_then_copy(target: Tensor, piece: Tensor) -> None:
        kill()
        copy_elements(target, piece)

    if isinstance(end.opened, MessageTransport):
        monkeypatch.setattr(Message, "wait", wait_then_kill)
    else:
        monkeypatch.setattr(one_sided, "copy_elements", kill_then_copy)


@pytest.mark.parametrize(
    ("kind", "lost"), [("messages", r"embed \[\d+:\d+\]"), ("shm", "the word that all is written|the header")]
)
def test_a_replica_killed_half_way_breaks_its_own_link_alone_and_comes_back_on_a_new_one(
    links: Any, monkeypatch: Any, kind: str, lost: str
) -> None:
    made = links(kind)
    (first, broken), (second, whole) = made.join("destination"), made.join("destination")
    publisher = WeightPublisher(CHANNEL, Policy(large=40_000_000))
    first.tell(**published(publisher, 0))
    publisher.send(0, broken)
    assert first.read()["version"] == 0
    facts = published(publisher, 1)
    first.tell(**facts)
    with monkeypatch.context() as patch:
        kill_half_way(patch, broken, first)
        with pytest.raises(TransportError, match=rf"version 1: ({lost}) to destination rank 0 failed"):
            publisher.send(1, broken)
    third, rebuilt = made.join("destination")
    for peer, end in ((second, whole), (third, rebuilt)):
        peer.tell(**facts)
        publisher.send(1, end)
        assert peer.read()["version"] == 1
    with pytest.raises(TransportError, match="the link is broken"):
        publisher.send(1, broken)


@KINDS
def test_a_receiver_that_hangs_fails_the_send_within_the_timeout(links: Any, kind: str) -> None:
    made = links(kind)
    peer, end = made.join("destination")
    policy = Policy(large=40_000_000, device=made.device)
    publisher = WeightPublisher(CHANNEL, policy, device=made.device)
    peer.tell(**published(publisher, 0))
    publisher.send(0, end)
    assert peer.read()["version"] == 0
    publisher.publish(1)
    peer.process.halt()
    hurry(end.opened, 2)
    what = "the header" if kind == "messages" else "the offer of a shadow"
    said = rf"version 1: {what} to destination rank 0 failed after \d+\.\d s: .*Timed out waiting 2000ms"
    with pytest.raises(TransportError, match=said):
        publisher.send(1, end)


LATE = "cuda:0 is not through with the work of this process after 1 s"


@pytest.mark.parametrize(
    ("side", "said"), [("destination", "no shadow is free"), ("source", "the writing of the shadow")]
)
def test_a_gpu_that_is_late_is_named_with_the_version(tmp_path: Path, monkeypatch: Any, side: str, said: str) -> None:
    folder = tmp_path / f"late{secrets.token_hex(6)}"
    folder.mkdir()
    sending, receiving = End(folder, "source", "shm"), End(folder, "destination", "shm")
    publisher, receiver = WeightPublisher(CHANNEL, Policy()), WeightReceiver(CHANNEL, allocate=receiving.memory)

    def late(*given: Any) -> None:
        raise RuntimeError(LATE)

    def sync(version: int) -> list[Any]:
        facts = published(publisher, version)
        return together(partial(publisher.send, version, sending), partial(receive, receiver, facts, receiving))

    sound(sync(0))
    receiver.swap(0)
    if side == "source":
        monkeypatch.setattr(MappedMemory, "write", late)
        hurry(receiving.opened, 2)
        blamed, other = sync(1)
    else:
        monkeypatch.setattr(SharedMemory, "wait_idle", late)
        hurry(sending.opened, 2)
        other, blamed = sync(1)
    assert all(isinstance(result, TransportError) and "version 1" in str(result) for result in (blamed, other))
    assert said in str(blamed)
    assert LATE in str(blamed)
    assert receiver.weights.version == 0
    sweep(folder.name)


# Rendezvous, and the choice of a transport ------------------------------------------------------------------


def test_a_peer_that_never_comes_is_named_and_what_a_machine_lacks_is_told_at_once() -> None:
    absent = ReplicaLink(CHANNEL, HashStore(), destinations=2, timeout=1)
    with pytest.raises(
        TransportError, match=r"not complete after \d+\.\d s of 1 s: not there: destination rank 0, destination rank 1"
    ):
        absent.open("source")
    lacks = {"192.0.2.1": ReplicaLink(CHANNEL, HashStore(), destinations=0, address="192.0.2.1")}
    for text, bridge in lacks.items():
        with pytest.raises(TransportError, match=rf"not complete after [0-5]?\d\.\d s of 60\.0 s: .*{text}"):
            bridge.open("source")


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"transport": "gloo"}, "given transport 'gloo', needed one of auto, shm, cuda_ipc, nccl, messages"),
        ({"transport": "shm", "direct": False}, "given transport 'shm', needed auto, nccl or messages here"),
        ({"delta": 4, "transport": "nccl"}, "given delta=4 over nccl, needed 0, or auto or messages"),
        ({"delta": -1}, "given delta=-1 .*needed 0 or more"),
    ],
)
def test_a_link_that_cannot_be_is_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"policy: {fault}"):
        ReplicaLink("policy", HashStore(), **options)
    assert TRANSPORTS == ("auto", "shm", "cuda_ipc", "nccl", "messages")


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    run = f"testways{os.getpid()}"
    found = SharedMemory(run, "destination")
    found(4096)
    yield found
    sweep(run)


def opened(choice: Any, memory: Any) -> list[Future[Transport]]:
    """Open both sides of a link, each in its thread."""
    both = ReplicaLink("policy>generator", HashStore(), timeout=20, transport=choice)
    with ThreadPoolExecutor(2) as threads:
        return [threads.submit(both.open, "source"), threads.submit(both.open, "destination", 0, memory)]


@pytest.mark.parametrize(
    ("choice", "kind"), [("auto", OneSidedTransport), ("shm", OneSidedTransport), ("messages", MessageTransport)]
)
def test_both_sides_use_the_transport_that_is_asked_for(memory: Any, choice: str, kind: type) -> None:
    assert {type(side.result()) for side in opened(choice, memory)} == {kind}


@pytest.mark.parametrize(
    ("choice", "shared", "why"),
    [
        ("cuda_ipc", True, "source rank 0 has its weights on no GPU"),
        ("nccl", True, "source rank 0 has its weights on no GPU"),
        ("shm", False, "destination rank 0 has no arena in shared memory"),
    ],
)
def test_a_transport_that_a_rank_cannot_use_is_refused_on_both_sides_with_its_name(
    memory: Any, choice: str, shared: bool, why: str
) -> None:
    for side in opened(choice, memory if shared else None):
        with pytest.raises(TransportError, match=f"given the transport {choice}, needed auto or messages: {why}"):
            side.result()


# Ranks of one replica ----------------------------------------------------------------------------------------


def adders(folder: Path, ranks: int) -> list[AllReduce]:
    """Return the ranks' all-reduces after they have connected, however long that took."""
    names = [f"rank {number}" for number in range(ranks)]
    made = [AllReduce("trainer", FileStore(str(folder / "sum")), rank, names, timeout=30) for rank in range(ranks)]
    sound(together(*(partial(add, torch.zeros(2, dtype=torch.int64)) for add in made)))
    return made


def test_every_rank_has_the_sum_mod_two_to_the_64_and_the_largest_magnitudes(tmp_path: Path) -> None:
    made, own = adders(tmp_path, 3), [torch.tensor([[2**62, rank], [rank, -rank]]) for rank in range(3)]
    magnitudes = [torch.tensor([[0.0, 1e-45], [3.5, math.inf]]) * k for k in (1.0, 0.5, 2.0)]
    magnitudes[1][1, 1] = 1.0
    for _ in range(2):
        for total in sound(together(*(partial(add, t) for add, t in zip(made, own, strict=True)))):
            assert total.tolist() == [[3 * 2**62 - 2**64, 3], [3, -3]]
        for largest in sound(together(*(partial(add.maximum, t) for add, t in zip(made, magnitudes, strict=True)))):
            assert torch.equal(largest, torch.stack(magnitudes).amax(0))


def test_a_rank_that_does_not_add_or_adds_another_sum_is_named(tmp_path: Path) -> None:
    made, zero = adders(tmp_path, 3), torch.zeros(2, dtype=torch.int64)
    for add in made:
        hurry(add, 2)
    first, second = together(partial(made[0], zero), partial(made[1], zero))
    assert isinstance(first, TransportError)
    assert "sum 2: the numbers from rank 2 failed" in str(first)
    assert "sum 2: the numbers from rank 0 failed" in str(second)
    (tmp_path / "again").mkdir()
    made = adders(tmp_path / "again", 2)
    hurry(made[1], 2)
    made[1]._calls += 1
    first, second = together(*(partial(add, zero) for add in made))
    assert "rank 1 sent {'sum': 3}, needed {'sum': 2}" in str(first)
    assert isinstance(second, TransportError)


def test_ranks_of_a_world_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as `open_world` sets it
    with pytest.raises(TransportError, match=r"rank 0: the 3 ranks .* not there: rank 1, rank 2"):
        open_world(HashStore(), [f"rank {number}" for number in range(3)], 0, timeout=0.2)


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("127.0.0.1", "lo"),
        ("[::1]", "lo"),
        ("10.0.0.1", "eth0"),
        ("[fd00::2]", "eth1"),
        # Gloo and NCCL would listen at the interface's first address, not at this one.
        ("10.8.0.1", "needed 10.0.0.1 "),
        ("fd00::1", "needed 10.0.0.1 "),
        ("10.0.0.9", "10.0.0.1 (eth0), "),
    ],
)
def test_a_replica_meets_at_the_interface_whose_first_address_is_the_hosts(
    monkeypatch: pytest.MonkeyPatch, address: str, interface: str
) -> None:
    has = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1", "10.8.0.1", "fd00::1"], "eth1": ["fd00::2", "fe80::2%eth1"]}
    families = {True: socket.AF_INET6, False: socket.AF_INET}
    made = {
        name: [SimpleNamespace(family=families[":" in each], address=each) for each in own] for name, own in has.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: made)
    if interface in has:
        assert interface_of(address) == interface
        return
    with pytest.raises(TransportError, match=re.escape(f"given the address {address}, ")) as told:
        interface_of(address)
    assert interface in str(told.value)


def test_a_rank_that_waits_for_one_that_hangs_waits_longer_than_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise this rank would be reported instead of the one that hangs."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    open_world(HashStore(), ["rank 0"], 0, timeout=60.0)
    try:
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert backend.options._timeout.total_seconds() == 120.0
    finally:
        dist.destroy_process_group()


def test_a_rank_alone_takes_what_there_is() -> None:
    waiting = deque([1, 2, 3])
    assert Pace(together=False).take(waiting, busy=False) == [1, 2, 3]
    assert not waiting


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_make_the_same_steps_with_the_same_orders(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand in for ranks. Orders reach each at its own time and keep each busy for its own number of steps, as
    work that depends on the clock does; some ranks finish at once."""
    ranks, orders = 3, 40
    barrier, given = threading.Barrier(ranks, timeout=30), dict[int, Tensor]()
    histories: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]

    def all_reduce(tensor: Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MIN
        given[threading.get_ident()] = tensor.clone()
        barrier.wait()
        tensor.copy_(torch.stack(list(given.values())).amin(0))
        barrier.wait()

    def rank(index: int) -> None:
        draw, pace, left = random.Random(seed * 100 + index), Pace(together=True), 0
        waiting, arrived = deque[int](), 0
        while sum(map(len, histories[index])) < orders or left or pace.busy:
            for _ in range(draw.choice([0, 0, 0, 1, 2, 5])):
                if arrived < orders:
                    waiting.append(arrived)
                    arrived += 1
            taken = pace.take(waiting, left > 0)
            if taken:
                histories[index].append(tuple(taken))
            left = draw.randrange(6) if taken else max(0, left - 1)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    sound(together(*(partial(rank, index) for index in range(ranks))))
    assert histories[0] == histories[1] == histories[2]
    assert sum(histories[0], ()) == tuple(range(orders))


# Pieces as messages ------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
SHAPE = (3000, 2000)
LEFT = Region((0, 0), (3000, 1000))  # half of the columns: strided in the whole tensor, contiguous in a shard


def test_a_large_piece_is_cut_alike_on_both_sides_whichever_has_it_strided() -> None:
    source = {"t": Shard(Region.whole(SHAPE), torch.arange(6e6).view(SHAPE))}
    target = {"t": Shard(LEFT, torch.zeros(LEFT.shape))}
    copies = [Copy("t", 0, 0, LEFT)]
    sent, received = (
        [bucket for own in rounds_of(copies, parts, CPU, Staging(2), GLOO_SIZES) for bucket in own]
        for parts in (source, target)
    )
    assert [p.copies for p in sent] == [p.copies for p in received]
    assert [p.slot for p in sent] == [k % 2 for k in range(len(sent))]
    # The last message has the small remainder.
    assert [p.slot for p in received] == [None] * len(received)
    assert all(p.buffer.nbytes <= BUCKET for p in sent)
    for out, into in zip(sent, received, strict=True):
        pack(out)
        into.buffer.copy_(out.buffer)
    assert torch.equal(target["t"].tensor, source["t"].tensor[:, :1000])


@pytest.mark.parametrize("limit", [2, None])
def test_staging_buffers_take_turns_up_to_a_limit_and_are_as_large_as_they_must_be(limit: Any) -> None:
    parts, staging = {"t": Shard(Region.whole(SHAPE), torch.zeros(SHAPE))}, Staging(limit)
    for _ in range(2):
        made = rounds_of([Copy("t", 0, 0, LEFT)], parts, CPU, staging, GLOO_SIZES)
    for bucket in (bucket for own in made for bucket in own):
        bucket.buffer.view(torch.float32).fill_(7.0)
        unpack(bucket)
    sizes = [buffer.nbytes for buffer in staging.buffers.values()]
    assert len(sizes) == (limit or len(made))
    assert LEFT.size * 4 <= sum(sizes) + BUCKET * (len(made) - len(sizes))
    assert max(sizes) <= BUCKET
    assert (parts["t"].tensor[:, :1000] == 7.0).all()
    assert (parts["t"].tensor[:, 1000:] == 0.0).all()


def test_the_messages_of_a_round_have_places_of_their_own_in_its_staging_buffer() -> None:
    wide = {name: torch.randn(8, 6) for name in "abc"}
    shards = {name: Shard(Region.whole((8, 3)), t[:, :3]) for name, t in wide.items()}
    copies = [Copy(name, 0, 0, Region.whole((8, 3))) for name in "abc"]
    (own,) = rounds_of(copies, shards, CPU, Staging(2), BucketSizes(large=96, full=300, slots=2))
    assert len(own) == 3
    for bucket in own:
        pack(bucket)
    expected = {name: t[:, :3].clone() for name, t in wide.items()}
    for t in wide.values():
        t.zero_()
    for bucket in own:
        unpack(bucket)
    assert all(torch.equal(wide[name][:, :3], t) for name, t in expected.items())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 6), max_size=3), st.sampled_from([1, 2, 8])), min_size=1, max_size=6),
    st.integers(8, 60),
    st.integers(1, 60),
)
def test_rounds_have_every_element_once_and_are_full_and_large_pieces_travel_alone(
    tensors: list[tuple[list[int], int]], full: int, large: int
) -> None:
    copies = [Copy(str(k), 0, 0, Region.whole(shape)) for k, (shape, _) in enumerate(tensors)]
    itemsizes = {str(k): itemsize for k, (_, itemsize) in enumerate(tensors)}
    rounds = divide(copies, itemsizes, BucketSizes(large, full, 2))
    found: dict[str, list[tuple[int, ...]]] = {name: [] for name in itemsizes}
    sums = []
    for messages in rounds:
        sizes = [[copy.region.size * itemsizes[copy.tensor] for copy in message] for message in messages]
        sums.append(sum(map(sum, sizes)))
        assert all(len(each) == 1 for each in sizes if max(each) >= large)
        assert sum(max(each) < large for each in sizes) <= 1
        for copy in (copy for message in messages for copy in message):
            found[copy.tensor] += itertools.product(*map(range, copy.region.start, copy.region.stop))
    for copy in copies:
        elements = list(itertools.product(*map(range, copy.region.start, copy.region.stop)))
        assert sorted(found[copy.tensor]) == elements
    assert max(sums) <= full
    # A round ends only when the next slab of a piece does not fit: no two neighbours fit in one round.
    slabs = [math.prod(shape) * itemsize // next((n for n in shape if n > 1), 1) for shape, itemsize in tensors]
    assert max(slabs) > full or all(a + b > full for a, b in itertools.pairwise(sums))


# Memory that others write ------------------------------------------------------------------------------------


class HostBlocks:
    """CUDA's driver in host memory: a block is mapped again each time it is opened."""

    run = f"testblocks{os.getpid()}"

    def __init__(self) -> None:
        self.made = 0

    def export(self, nbytes: int) -> tuple[Export, Tensor]:
        segment = create_segment(f"penstock-{self.run}-owner-{self.made}", nbytes, [SHM])
        self.made += 1
        handle = segment.name.encode().ljust(64, b"\0")
        return Export(0, handle, nbytes), torch.frombuffer(segment.view, dtype=torch.uint8)

    def open(self, block: Export) -> Tensor:
        segment = open_segment(block.handle.rstrip(b"\0").decode(), [SHM], writable=True)
        return torch.frombuffer(segment.view, dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch: Any) -> Iterator[HostBlocks]:
    found = HostBlocks()
    monkeypatch.setattr(cuda_ipc, "_driver", lambda index: found)
    yield found
    sweep(found.run)


@pytest.mark.parametrize("kind", ["shm", "cuda_ipc"])
def test_what_is_written_through_a_place_is_in_the_owners_memory_and_nothing_beside_it(
    driver: HostBlocks, kind: str
) -> None:
    shm = kind == "shm"
    memory = SharedMemory(driver.run, "owner") if shm else DeviceMemory("cuda:0", "owner", 1.0)
    mapped = MappedMemory() if shm else OpenedMemory(1.0)
    first, second = memory(4096), memory(8192)
    assert memory.shared
    like = torch.empty(16, 8, dtype=torch.bfloat16)
    for buffer, offset in ((first, 1024), (second, 512), (second, 4096)):
        mapped.view(memory.place(buffer[offset:]), like, (16, 1)).fill_(3)
        rows = buffer[offset : offset + 512].view(torch.bfloat16).view(16, 16)
        assert rows[:, :8].eq(3).all()
        assert not rows[:, 8:].any()
    assert (int(first.count_nonzero()), int(second.count_nonzero())) == (256, 512)  # a 3 is 0x4040
    place = memory.place(first[1024:])
    for bad, strides in ((place._replace(offset=4000), (16, 1)), (place, (4096, 1)), (place, (-1, 1))):
        with pytest.raises(SegmentError, match="is not in the 4096 bytes"):
            mapped.view(bad, like, strides)
    with pytest.raises(SegmentError, match="owner: a tensor of 12 bytes is in none of its segments"):
        memory.place(torch.zeros(3))
    mapped.close()
    memory.close()


def test_where_the_driver_exports_nothing_memory_is_torchs_and_the_user_is_told(driver: Any, monkeypatch: Any) -> None:
    def refuse(nbytes: int) -> None:
        raise RuntimeError("cuIpcGetMemHandle on cuda:0: operation not supported (801)")

    monkeypatch.setattr(driver, "export", refuse)
    told: list[str] = []
    memory = DeviceMemory("cpu", "generator.0", 1.0, told.append)
    assert memory(4096).nbytes == 4096
    assert not memory.shared
    assert told == [f"generator.0: {memory.refused}; weights come as messages through the host, which is slower"]


HANDLE = bytes(range(64))


def test_a_block_is_found_by_its_name_alone() -> None:
    block = Export(3, HANDLE, 4 << 30)
    assert Export.parse(block.name()) == block
    for name in (
        "penstock-run-owner-0",
        Export(0, HANDLE[1:], 1).name(),
        Export(0, HANDLE, 1).name() + "\n",
        f"cuda:-1/{HANDLE.hex()}/1",
        f"cuda:0/{HANDLE.hex()}/{'9' * 16}",
        f"cuda:0/{'zz' * 64}/1",
    ):
        with pytest.raises(SegmentError, match="needed the name of a GPU's block"):
            OpenedMemory(1.0).view(Location(name, 0), torch.zeros(1), (1,))


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="needs a machine without a GPU")
def test_without_a_gpu_there_is_none_to_compare() -> None:
    assert visible_devices() == 0


@NEEDS_A_GPU
def test_a_block_of_a_gpu_is_zero_and_is_not_opened_by_its_own_process() -> None:
    memory = DeviceMemory("cuda:0", "owner", 30.0)
    buffer = memory(4096)
    assert (memory.shared, buffer.nbytes, int(buffer.count_nonzero())) == (True, 4096, 0)
    place = memory.place(buffer[1024:])
    assert (place.offset, Export.parse(place.segment).nbytes) == (1024, 2 << 20)
    with pytest.raises(SegmentError, match=r"a block of 2097152 bytes on cuda:0: cuIpcOpenMemHandle_v2 on cuda:0"):
        OpenedMemory(1.0).view(memory.place(buffer), buffer, (1,))


@NEEDS_A_GPU
def test_a_gpu_that_is_busy_for_longer_than_the_deadline_is_named() -> None:
    torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"cuda:0 is not through with the work of this process after 0.05 s"):
        finish(torch.cuda.current_stream(), 0.05)
    finish(torch.cuda.current_stream(), 60.0)


@NEEDS_A_GPU
def test_a_gpu_has_the_memory_of_a_receiver_that_has_ended_back_when_its_senders_link_is_closed(links: Any) -> None:
    made = links("cuda_ipc")
    peer, end = made.join("destination")
    publisher = WeightPublisher(CHANNEL, Policy(large=1 << 28, device=made.device), device=made.device)
    facts = published(publisher, 0)
    before, _ = torch.cuda.mem_get_info()
    peer.tell(**facts)
    publisher.send(0, end)
    assert peer.read()["version"] == 0
    assert torch.cuda.mem_get_info()[0] < before - (1 << 30)
    peer.process.kill()
    peer.process.wait(20)
    end.close()
    assert torch.cuda.mem_get_info()[0] > before - (1 << 28)
