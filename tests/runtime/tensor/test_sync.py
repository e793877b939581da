"""The whole of a sync in one process: order, proof, swap, and every fault that the proof is there for."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.graph.protocols import Carried
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.digest import ChecksumError
from penstock.runtime.tensor.layout import Copy, LayoutError
from penstock.runtime.tensor.process_group import LocalTransport, TransportError
from penstock.runtime.tensor.weight_sync import Moved, SyncError, WeightPublisher, WeightReceiver, sync_in_process

from .peer import CHANNEL, Policy

pytestmark = pytest.mark.timeout(300)


def sides(**options: Any) -> tuple[Policy, WeightPublisher, WeightReceiver]:
    policy = Policy(large=1000)
    assert isinstance(policy, Carried)
    publisher, receiver = WeightPublisher(CHANNEL, policy, **options), WeightReceiver(CHANNEL)
    receiver.describe(publisher.description)
    return policy, publisher, receiver


def sync(policy: Policy, publisher: WeightPublisher, receiver: WeightReceiver, version: int) -> None:
    policy.advance(version)
    sync_in_process(publisher, receiver, version, publisher.publish(version))
    receiver.swap(version)


def live(receiver: WeightReceiver) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in receiver.weights.tensors.items()}


def test_versions_go_live_one_after_the_other_in_one_object() -> None:
    policy, publisher, receiver = sides()
    weights = receiver.weights
    assert (weights.version, dict(weights.tensors)) == (-1, {})
    for version in (0, 1, 2, 7):
        sync(policy, publisher, receiver, version)
        assert receiver.weights is weights
        assert weights.version == version
        assert all(torch.equal(weights.tensors[n], t) for n, t in policy.tensors.items())


def test_live_weights_do_not_change_while_the_next_version_arrives() -> None:
    policy, publisher, receiver = sides()
    sync(policy, publisher, receiver, 0)
    before = live(receiver)
    policy.advance(1)
    sync_in_process(publisher, receiver, 1, publisher.publish(1))
    assert all(torch.equal(receiver.weights.tensors[n], t) for n, t in before.items())
    receiver.swap(1)
    assert all(torch.equal(receiver.weights.tensors[n], t) for n, t in policy.tensors.items())


def test_the_wire_dtype_converts_floating_point_only() -> None:
    policy, publisher, receiver = sides(wire="bfloat16")
    sync(policy, publisher, receiver, 0)
    got = receiver.weights.tensors
    assert got["matrix"].dtype == torch.float32
    assert torch.equal(got["matrix"], policy.tensors["matrix"].bfloat16().float())
    assert got["step"].dtype == torch.int64
    as_sent = WeightReceiver(CHANNEL, restore=False)
    as_sent.describe(publisher.description)
    sync(policy, publisher, as_sent, 1)
    assert torch.equal(as_sent.weights.tensors["matrix"], policy.tensors["matrix"].bfloat16())
    assert as_sent.weights.tensors["matrix"].dtype == torch.bfloat16


def test_dtypes_that_do_not_travel_are_named_before_anything_moves() -> None:
    policy = Policy(large=10)
    policy.tensors["phase"] = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(LayoutError, match=r"phase \(complex64\); needed one of bool"):
        WeightPublisher(CHANNEL, policy)
    with pytest.raises(LayoutError, match="given 'float99'"):
        WeightPublisher(CHANNEL, Policy(), wire="float99")


def test_bytes_and_seconds_are_reported() -> None:
    policy, publisher, receiver = sides()
    moved = sync_in_process(publisher, receiver, 0, publisher.publish(0))
    assert moved.nbytes == sum(t.nbytes for t in policy.tensors.values())
    assert min(moved.wire_s, moved.prove_s) >= 0


class Damaged(LocalTransport):
    """A transport that does one thing wrong on its way."""

    def __init__(self, damage: Callable[[Shards], None], skip: str = "") -> None:
        super().__init__(CHANNEL)
        self._damage = damage
        self._skip = skip

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        moved = super().receive(version, [c for c in copies if c.tensor != self._skip], parts)
        self._damage(parts)
        return moved


def flip(parts: Shards) -> None:
    parts["embed"].tensor.view(torch.int16)[500] ^= 4


def swap_tensors(parts: Shards) -> None:
    a, b = parts["norm"].tensor, parts["other"].tensor
    saved = a.clone()
    a.copy_(b)
    b.copy_(saved)


def swap_elements(parts: Shards) -> None:
    parts["embed"].tensor[[3, 400]] = parts["embed"].tensor[[400, 3]]


def nothing(parts: Shards) -> None:
    """No damage."""


@pytest.mark.parametrize(
    ("damage", "skip", "named"),
    [
        (flip, "", ["embed"]),
        (nothing, "matrix", ["matrix"]),
        (swap_tensors, "", ["norm", "other"]),
        (swap_elements, "", ["embed"]),
    ],
    ids=["flipped bit", "skipped tensor", "swapped tensors", "swapped elements"],
)
def test_what_goes_wrong_on_the_way_is_caught_and_never_live(
    damage: Callable[[Shards], None], skip: str, named: list[str]
) -> None:
    policy, receiver = Policy(large=1000), WeightReceiver(CHANNEL)
    policy.tensors["other"] = torch.ones(7)
    publisher = WeightPublisher(CHANNEL, policy)
    receiver.describe(publisher.description)
    sync(policy, publisher, receiver, 0)
    before = live(receiver)
    policy.advance(1)
    digests = publisher.publish(1)
    transport = Damaged(damage, skip)
    publisher.send(1, transport)
    with pytest.raises(ChecksumError, match=rf"version 1 \({CHANNEL}, destination rank 0\)") as caught:
        receiver.receive(1, digests, transport)
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == named
    assert all(torch.equal(receiver.weights.tensors[n], t) for n, t in before.items())
    with pytest.raises(SyncError, match="swap to version 1: live: 0, arrived: None"):
        receiver.swap(1)
    sync_in_process(publisher, receiver, 1, digests)
    receiver.swap(1)


def test_stale_weights_under_a_new_label_are_caught() -> None:
    policy, publisher, receiver = sides()
    policy.advance(0)
    publisher.publish(0)
    stale = publisher._snapshots[0]
    policy.advance(1)
    digests = publisher.publish(1)
    transport = LocalTransport(CHANNEL)
    publisher.send(1, transport)
    transport._sent = {(1, copy): stale.parts[copy.tensor].cut(copy.region) for _, copy in transport._sent}
    with pytest.raises(ChecksumError, match=r"version 1 .*5 of 5 tensors differ"):
        receiver.receive(1, digests, transport)


def test_a_stale_version_or_proof_is_refused() -> None:
    policy, publisher, receiver = sides()
    policy.advance(5)
    old = publisher.publish(0)
    policy.advance(1)
    digests = publisher.publish(1)
    with pytest.raises(ChecksumError, match=r"version 1 .*4 of 5 tensors differ"):  # the flags are true in both
        sync_in_process(publisher, receiver, 1, old)
    transport = LocalTransport(CHANNEL)
    publisher.send(0, transport)
    with pytest.raises(TransportError, match=r"version 1: embed \[0:1000\] was not sent"):
        receiver.receive(1, digests, transport)


def test_only_the_version_that_arrived_goes_live_and_only_once() -> None:
    policy, publisher, receiver = sides()
    with pytest.raises(SyncError, match="swap to version 0: live: -1, arrived: None"):
        receiver.swap(0)
    sync(policy, publisher, receiver, 0)
    before = live(receiver)
    with pytest.raises(SyncError, match="swap to version 0: live: 0, arrived: None"):
        receiver.swap(0)
    policy.advance(2)
    sync_in_process(publisher, receiver, 2, publisher.publish(2))
    for other in (1, 3):
        with pytest.raises(SyncError, match=f"swap to version {other}: live: 0, arrived: 2"):
            receiver.swap(other)
    assert receiver.weights.version == 0
    assert all(torch.equal(receiver.weights.tensors[n], t) for n, t in before.items())
    receiver.swap(2)
    assert receiver.weights.version == 2
    assert all(torch.equal(receiver.weights.tensors[n], t) for n, t in policy.tensors.items())
    with pytest.raises(SyncError, match="swap to version 2: live: 2, arrived: None"):
        receiver.swap(2)
    assert all(torch.equal(receiver.weights.tensors[n], t) for n, t in policy.tensors.items())


def test_versions_come_once_and_in_order() -> None:
    policy, publisher, receiver = sides(keep=5)
    sync(policy, publisher, receiver, 3)
    with pytest.raises(SyncError, match="publish version 3"):
        publisher.publish(3)
    digests = publisher.publish(4)
    sync_in_process(publisher, receiver, 4, digests)
    with pytest.raises(SyncError, match="receive version 4: live: 3, arrived: 4"):
        sync_in_process(publisher, receiver, 4, digests)
    receiver.swap(4)
    with pytest.raises(SyncError, match="receive version 4: live: 4"):
        sync_in_process(publisher, receiver, 4, digests)
    with pytest.raises(SyncError, match="swap to version 5"):
        receiver.swap(5)


def test_old_versions_are_let_go_but_not_while_they_are_sent() -> None:
    policy, publisher, receiver = sides(keep=2)
    blocked, go = threading.Event(), threading.Event()

    class Slow(LocalTransport):
        def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
            blocked.set()
            assert go.wait(30)
            return super().send(version, copies, parts)

    policy.advance(0)
    digests = publisher.publish(0)
    expected = {name: tensor.clone() for name, tensor in policy.tensors.items()}
    results: queue.Queue[Moved | Exception] = queue.Queue()
    transport = Slow(CHANNEL)
    publisher.start(0, transport, 1, results.put)
    assert blocked.wait(30)
    for version in (1, 2, 3, 4):
        policy.advance(version)
        publisher.publish(version)
    go.set()
    assert isinstance(results.get(timeout=30), Moved)
    receiver.receive(0, digests, transport)
    receiver.swap(0)
    assert all(torch.equal(receiver.weights.tensors[n], t) for n, t in expected.items())
    with pytest.raises(SyncError, match=r"send version 2: only \[0, 3, 4\] are held \(keep=2\)"):
        publisher.send(2, LocalTransport(CHANNEL))
    publisher.publish(5)
    assert sorted(s.version for s in publisher._snapshots) == [3, 4, 5]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_last_versions_published_can_be_sent(keep: int) -> None:
    _, publisher, _ = sides(keep=keep)
    for version in range(8):
        publisher.publish(version)
        held = sorted(s.version for s in publisher._snapshots)
        assert held == list(range(max(0, version - keep + 1), version + 1))


def test_an_error_in_the_background_is_the_result() -> None:
    policy, publisher, receiver = sides()
    policy.advance(0)
    digests = publisher.publish(0)
    results: queue.Queue[Moved | Exception] = queue.Queue()
    receiver.start(0, digests, LocalTransport(CHANNEL), results.put)
    assert isinstance(results.get(timeout=30), TransportError)
    sync_in_process(publisher, receiver, 0, digests)


def test_weights_that_change_shape_or_name_are_refused() -> None:
    policy, publisher, receiver = sides()
    sync(policy, publisher, receiver, 0)
    policy.tensors["norm"] = torch.zeros(8)
    del policy.tensors["step"]
    with pytest.raises(LayoutError, match=r"(?s)norm: given torch.Size\(\[8\]\), needed .*step: given nothing"):
        publisher.publish(1)
    with pytest.raises(LayoutError, match="changed during the run"):
        receiver.describe(WeightPublisher(CHANNEL, policy).description)


def test_nothing_is_received_before_the_weights_are_described() -> None:
    _, publisher, _ = sides()
    with pytest.raises(SyncError, match="receive version 0: live: -1, the sender has not described its weights"):
        sync_in_process(publisher, WeightReceiver(CHANNEL), 0, publisher.publish(0))


def test_several_ranks_share_the_sending_and_each_receiver_has_all() -> None:
    policy = Policy(large=1000)
    policy.advance(0)
    publishers = [WeightPublisher(CHANNEL, policy, rank=rank, ranks=2) for rank in range(2)]
    digests = [publisher.publish(0) for publisher in publishers]
    assert digests[0] == digests[1]
    for rank in range(3):
        transport = LocalTransport(CHANNEL)
        sent = [publisher.send(0, transport, 3).nbytes for publisher in publishers]
        assert all(sent)
        receiver = WeightReceiver(CHANNEL, rank=rank, ranks=3)
        receiver.describe(publishers[0].description)
        receiver.receive(0, digests[0], transport)
        receiver.swap(0)
        assert all(torch.equal(receiver.weights.tensors[n], t) for n, t in policy.tensors.items())
