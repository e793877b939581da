"""A weight sync: order, checksums and swap; each element arrives in place for all meshes and wire formats."""

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.graph.protocols import Axes, Carried
from penstock.runtime.tensor.buffers import DoubleBuffer, Shards, allocate
from penstock.runtime.tensor.digest import ChecksumError, Checksums, alone, digest, hashed_tensors
from penstock.runtime.tensor.layout import Copy, Layout, LayoutError, Mesh, Region, sharded
from penstock.runtime.tensor.one_sided import OneSidedTransport, SharedMemory
from penstock.runtime.tensor.process_group import TransportError
from penstock.runtime.tensor.quantise import ConversionError, Converter, dequantise
from penstock.runtime.tensor.send_recv import BucketSizes
from penstock.runtime.tensor.shm import sweep
from penstock.runtime.tensor.weight_sync import (
    LocalTransport,
    Moved,
    SyncError,
    WeightPublisher,
    WeightReceiver,
    sync_in_process,
)
from penstock.runtime.tensor.wire_format import FORMATS, SCALE, converted
from tests.runtime.control.sockets import until

from .peer import CHANNEL, Policy, published, receive
from .replicas import RULES, RUN, SHAPES, Both, ShardedPolicy, sound, wholes

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _no_segments_left() -> Any:
    yield
    sweep(RUN)


# In one process ----------------------------------------------------------------------------------------------


def sides(**options: Any) -> tuple[Policy, WeightPublisher, WeightReceiver]:
    policy = Policy(large=1000)
    policy.tensors["other"] = torch.ones(7)
    assert isinstance(policy, Carried)
    publisher, receiver = WeightPublisher(CHANNEL, policy, **options), WeightReceiver(CHANNEL)
    receiver.describe(publisher.description)
    return policy, publisher, receiver


def arrive(policy: Policy, publisher: WeightPublisher, receiver: WeightReceiver, version: int) -> Moved:
    policy.advance(version)
    return sync_in_process(publisher, receiver, version, publisher.publish(version))


def sync(policy: Policy, publisher: WeightPublisher, receiver: WeightReceiver, version: int) -> None:
    arrive(policy, publisher, receiver, version)
    receiver.swap(version)


def test_live_weights_do_not_change_while_the_next_version_arrives() -> None:
    policy, publisher, receiver = sides()
    weights, before = receiver.weights, dict[str, int]()
    assert (weights.version, dict(weights.tensors)) == (-1, {})
    for version in (0, 1, 2, 7):
        moved = arrive(policy, publisher, receiver, version)
        assert moved.nbytes == sum(t.nbytes for t in policy.tensors.values())
        assert digest(weights.tensors) == before
        receiver.swap(version)
        assert receiver.weights is weights
        assert weights.version == version
        before = digest(policy.tensors)
        assert digest(weights.tensors) == before


def test_fused_tensors_lie_one_after_the_other_in_both_buffers() -> None:
    entries = [(name, (rows, 16), "float32") for name, rows in (("q", 4), ("other", 3), ("k", 2), ("v", 2), ("odd", 1))]
    layout = Layout.whole([*entries, ("small", (3,), "float32"), ("next", (3,), "float32")], 1)
    fused = (("q", "k", "v"), ("small", "next"), ("absent", "odd"))
    buffer = DoubleBuffer(layout, fused=fused)
    spans = []
    for shards in (buffer.live, buffer.shadow):
        begins = {name: shard.tensor.data_ptr() for name, shard in shards.items()}
        assert begins["k"] == begins["q"] + 4 * 64
        assert begins["v"] == begins["k"] + 2 * 64
        # A tensor after one that does not end at a cache line's end starts a new line.
        assert begins["next"] > begins["small"] + 12
        assert all(begin % 64 == 0 for begin in begins.values())
        spans += [(shard.tensor.data_ptr(), shard.tensor.data_ptr() + shard.tensor.nbytes) for shard in shards.values()]
    assert len(spans) == 14
    assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(spans)))


@pytest.mark.parametrize("wire", ["", "bfloat16", "int8"])
def test_fused_tensors_lie_one_after_the_other_whatever_the_wire(wire: str) -> None:
    policy = Policy(large=10)
    policy.tensors = {"q": torch.ones(4, 16), "bias": torch.ones(4), "k": torch.ones(2, 16)}
    publisher = WeightPublisher(CHANNEL, policy, wire=wire)
    receiver = WeightReceiver(CHANNEL, fused=[("q", "k")])
    receiver.describe(publisher.description)
    for version in range(2):  # one for each buffer
        sync_in_process(publisher, receiver, version, publisher.publish(version))
        receiver.swap(version)
        found = receiver.weights.tensors
        assert found["q"].dtype == torch.float32
        assert found["k"].data_ptr() == found["q"].data_ptr() + found["q"].nbytes


def test_the_wire_dtype_converts_floating_point_only() -> None:
    policy, publisher, receiver = sides(wire="bfloat16")
    sync(policy, publisher, receiver, 0)
    expected = {n: t.bfloat16().to(t.dtype) if t.is_floating_point() else t for n, t in policy.tensors.items()}
    assert digest(receiver.weights.tensors) == digest(expected)


def test_dtypes_that_do_not_travel_are_named_before_anything_moves() -> None:
    policy = Policy(large=10)
    policy.tensors["phase"] = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(LayoutError, match=r"phase \(complex64\); needed one of bool"):
        WeightPublisher(CHANNEL, policy)
    with pytest.raises(LayoutError, match="given 'float99'"):
        WeightPublisher(CHANNEL, Policy(), wire="float99")


class Damaged(LocalTransport):
    """A transport that makes one error."""

    def __init__(self, damage: Callable[[Shards], None], skip: str) -> None:
        super().__init__(CHANNEL)
        self._damage, self._skip = damage, skip

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        moved = super().receive(version, [c for c in copies if c.tensor != self._skip], parts)
        self._damage(parts)
        return moved


def swap_tensors(parts: Shards) -> None:
    a, b = parts["norm"].tensor, parts["other"].tensor
    saved = a.clone()
    a.copy_(b)
    b.copy_(saved)


def exchange(tensor: Tensor, i: int, j: int) -> None:
    tensor[[i, j]] = tensor[[j, i]]


@pytest.mark.parametrize(
    ("damage", "skip", "named"),
    [
        (lambda parts: parts["embed"].tensor.view(torch.int16)[500].bitwise_xor_(4), "", ["embed"]),
        (lambda parts: None, "matrix", ["matrix"]),
        (swap_tensors, "", ["norm", "other"]),
        (lambda parts: exchange(parts["embed"].tensor, 3, 400), "", ["embed"]),
    ],
    ids=["flipped bit", "skipped tensor", "swapped tensors", "swapped elements"],
)
def test_what_goes_wrong_on_the_way_is_caught_and_never_live(
    damage: Callable[[Shards], None], skip: str, named: list[str]
) -> None:
    policy, publisher, receiver = sides()
    sync(policy, publisher, receiver, 0)
    before = digest(receiver.weights.tensors)
    policy.advance(1)
    digests, transport = publisher.publish(1), Damaged(damage, skip)
    publisher.send(1, transport)
    with pytest.raises(ChecksumError, match=rf"version 1 \({CHANNEL}, destination rank 0\)") as caught:
        receiver.receive(1, digests, transport)
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == named
    assert digest(receiver.weights.tensors) == before
    with pytest.raises(SyncError, match="swap to version 1: live: 0, arrived: None"):
        receiver.swap(1)
    sync_in_process(publisher, receiver, 1, digests)
    receiver.swap(1)


def test_a_stale_version_proof_or_label_is_refused() -> None:
    policy, publisher, receiver = sides(keep=2)
    policy.advance(5)
    old, stale = publisher.publish(0), publisher._snapshots[0]
    policy.advance(1)
    digests = publisher.publish(1)
    with pytest.raises(ChecksumError, match=r"version 1 .*5 of 6 tensors differ"):  # the flags are true in both
        sync_in_process(publisher, receiver, 1, old)
    transport = LocalTransport(CHANNEL)
    publisher.send(0, transport)
    with pytest.raises(TransportError, match=r"version 1: embed \[0:1000\] was not sent"):
        receiver.receive(1, digests, transport)
    publisher.send(1, transport)
    transport._sent = {(1, copy): stale.parts[copy.tensor].cut(copy.region) for _, copy in transport._sent}
    with pytest.raises(ChecksumError, match=r"version 1 .*5 of 6 tensors differ"):
        receiver.receive(1, digests, transport)


def test_versions_come_once_and_in_order() -> None:
    policy, publisher, receiver = sides(keep=5)
    with pytest.raises(SyncError, match="swap to version 0: live: -1, arrived: None"):
        receiver.swap(0)
    sync(policy, publisher, receiver, 3)
    with pytest.raises(SyncError, match="publish version 3"):
        publisher.publish(3)
    before, digests = digest(receiver.weights.tensors), publisher.publish(4)
    sync_in_process(publisher, receiver, 4, digests)
    with pytest.raises(SyncError, match="receive version 4: live: 3, arrived: 4"):
        sync_in_process(publisher, receiver, 4, digests)
    for other in (3, 5):
        with pytest.raises(SyncError, match=f"swap to version {other}: live: 3, arrived: 4"):
            receiver.swap(other)
    assert (receiver.weights.version, digest(receiver.weights.tensors)) == (3, before)
    receiver.swap(4)
    for old in (3, 4):
        with pytest.raises(SyncError, match=f"receive version {old}: live: 4"):
            sync_in_process(publisher, receiver, old, digests)
    with pytest.raises(SyncError, match="swap to version 4: live: 4, arrived: None"):
        receiver.swap(4)
    assert digest(receiver.weights.tensors) == digests


def test_old_versions_are_let_go_but_not_while_they_are_sent() -> None:
    policy, publisher, receiver = sides(keep=2)
    blocked, go = threading.Event(), threading.Event()

    class Slow(LocalTransport):
        def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
            blocked.set()
            assert go.wait(30)
            return super().send(version, copies, parts)

    policy.advance(0)
    digests, results, transport = publisher.publish(0), queue.Queue[Moved | Exception](), Slow(CHANNEL)
    publisher.start(0, transport, 1, results.put)
    assert blocked.wait(30)
    for version in (1, 2, 3, 4):
        policy.advance(version)
        publisher.publish(version)
    go.set()
    assert isinstance(results.get(timeout=30), Moved)
    receiver.receive(0, digests, transport)
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
    _, publisher, receiver = sides()
    digests, results = publisher.publish(0), queue.Queue[Moved | Exception]()
    receiver.start(0, digests, LocalTransport(CHANNEL), results.put)
    assert isinstance(results.get(timeout=30), TransportError)
    sync_in_process(publisher, receiver, 0, digests)


def test_weights_that_change_or_are_not_described_are_refused() -> None:
    policy, publisher, receiver = sides(keep=2)
    sync(policy, publisher, receiver, 0)
    policy.tensors["norm"] = torch.zeros(8)
    del policy.tensors["step"]
    with pytest.raises(LayoutError, match=r"(?s)norm: given torch.Size\(\[8\]\), needed .*step: given nothing"):
        publisher.publish(1)
    with pytest.raises(LayoutError, match="changed during the run"):
        receiver.describe(WeightPublisher(CHANNEL, policy).description)
    with pytest.raises(SyncError, match="receive version 0: live: -1, the sender has not described its weights"):
        sync_in_process(publisher, WeightReceiver(CHANNEL), 0, {})


def test_several_ranks_share_the_sending_and_each_receiver_has_all() -> None:
    policy = Policy(large=1000)
    publishers = [WeightPublisher(CHANNEL, policy, rank=rank, ranks=2) for rank in range(2)]
    digests = [publisher.publish(0) for publisher in publishers]
    assert digests[0] == digests[1]
    for rank in range(3):
        transport = LocalTransport(CHANNEL)
        assert all(publisher.send(0, transport, 3).nbytes for publisher in publishers)
        receiver = WeightReceiver(CHANNEL, rank=rank, ranks=3)
        receiver.describe(publishers[0].description)
        receiver.receive(0, digests[0], transport)
        receiver.swap(0)
        assert digest(receiver.weights.tensors) == digest(policy.tensors)


# Which tensors are hashed, and by which rank ------------------------------------------------------------------

NAMES = [f"model.layers.{k}.weight" for k in range(400)]


def test_a_sample_follows_from_the_version_alone_and_is_never_empty() -> None:
    assert hashed_tensors("full", 3, NAMES) == tuple(NAMES)
    assert hashed_tensors("off", 3, NAMES) == hashed_tensors("sampled", 0, []) == ()
    samples = [hashed_tensors("sampled", version, NAMES) for version in range(60)]
    assert samples == [hashed_tensors("sampled", version, list(NAMES)) for version in range(60)]
    assert len(set(samples)) == 60
    assert all(20 < len(sample) < 90 for sample in samples)
    assert {name for sample in samples for name in sample} == set(NAMES)
    assert all(hashed_tensors("sampled", version, NAMES[:2]) for version in range(50))


@pytest.mark.parametrize("axes", [(("tp", 4),), (("dp", 2), ("tp", 2)), (("dp", 4),)])
def test_each_distinct_region_is_counted_once(axes: Axes) -> None:
    """The sums of all ranks' shards add up to the whole tensors' digests, with or without replicas."""
    shapes, mesh = {"a": (40, 30), "b": (7, 64), "c": (5,)}, Mesh(axes)
    layout = sharded([(n, s, "float32") for n, s in shapes.items()], mesh, {"a": (0, 0), "b": (1, 2), "c": None})
    made = {name: torch.randn(shape) for name, shape in shapes.items()}
    total = torch.zeros(len(shapes), 1, dtype=torch.int64)
    for rank in range(mesh.size):
        held = allocate(layout, rank, "cpu")
        for name, part in held.items():
            part.tensor.copy_(made[name][part.region.slices(Region.whole(shapes[name]))])
        Checksums(layout, rank, total.add_).digests(held, list(shapes))
    assert Checksums(layout, 0, total.add).digests({}, list(shapes)) == digest(made)


def test_digests_of_other_tensors_than_are_hashed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ChecksumError, match="unknown tensors: d"):
        Checksums(Layout.whole([("a", (2,), "float32")]), 0, alone).check({}, {"d": 1}, 3, "here to there")
    _, publisher, receiver = sides()
    digests = publisher.publish(0)
    del digests["matrix"]
    with pytest.raises(ChecksumError, match=r"a proof \(full\) that differs in matrix"):
        sync_in_process(publisher, receiver, 0, digests)


# Between replicas of several ranks ---------------------------------------------------------------------------

MESHES: list[tuple[Axes, Axes]] = [
    ((("fsdp", 2),), (("tp", 2),)),
    ((("fsdp", 2), ("tp", 2)), (("tp", 2),)),
    ((("replica", 2), ("fsdp", 2)), (("tp", 4),)),
    ((("fsdp", 4),), (("dp", 2), ("tp", 2))),
    ((("pp", 2), ("fsdp", 2)), (("tp", 2),)),
    ((("fsdp", 3),), (("tp", 1),)),
    ((("fsdp", 1),), (("tp", 2),)),
    ((("ep", 2),), (("ep", 4),)),
    ((("fsdp", 2), ("ep", 2)), (("tp", 2),)),
    ((("pp", 2), ("ep", 2)), (("tp", 1),)),
    ((("ep", 2), ("tp", 2)), (("ep", 2),)),
]
SHARED = pytest.mark.parametrize("shared", [False, True], ids=["messages", "shared memory"])


@SHARED
@pytest.mark.parametrize(("source", "target"), MESHES)
def test_every_rank_gets_its_part_of_each_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Axes, target: Axes, shared: bool
) -> None:
    # There are more messages than staging buffers.
    sizes = BucketSizes(1 << 20, 1 << 16, slots=3)
    monkeypatch.setattr("penstock.runtime.tensor.send_recv.GLOO_SIZES", sizes)
    both = Both(tmp_path, source, target, shared)
    for version in (0, 1, 4):
        sound(both.move(version, both.publish(version)))
        both.check(version)
    assert {isinstance(d.opened, OneSidedTransport) for d in both.destinations} == {shared}


@SHARED
@pytest.mark.parametrize("proof", ["sampled", "off"])
def test_other_proofs_move_the_same(tmp_path: Path, proof: str, shared: bool) -> None:
    both = Both(tmp_path, *MESHES[0], shared, proof=proof)
    facts = both.publish(0)
    assert facts["description"]["proof"] == proof
    assert len(facts["digests"]) in ({0} if proof == "off" else range(1, len(SHAPES)))
    sound(both.move(0, facts))
    both.check(0)


def flip(name: str, parts: Any) -> None:
    parts[name].tensor.view(torch.int16).view(-1)[7] ^= 64


@SHARED
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("damage", "named", "ranks"),
    [
        (partial(flip, "q.weight"), "q.weight", "by ranks 0, 1"),
        (lambda parts: exchange(parts["o.weight"].tensor[7], 3, 400), "o.weight", "by ranks 0, 1"),
        (partial(flip, "norm.weight"), "norm.weight", "by rank {}"),  # both ranks hold it
    ],
    ids=["flipped bit", "swapped elements", "replicated"],
)
def test_damage_on_any_rank_is_caught_on_all_and_never_live(
    tmp_path: Path, damage: Callable[[Any], None], named: str, ranks: str, rank: int, shared: bool
) -> None:
    both = Both(tmp_path, *MESHES[0], shared)
    sound(both.move(0, both.publish(0)))
    both.destinations[rank].damage = damage
    results = both.move(1, both.publish(1))[2:]
    assert [type(result) for result in results] == [ChecksumError, ChecksumError]
    for own, error in enumerate(results):
        head, *lines = str(error).splitlines()
        assert (
            f"version 1 ({CHANNEL}, destination rank {own} from source ranks 0, 1): 1 of {len(SHAPES)} tensors differ"
            in head
        )
        assert [line.split(":")[0].strip() for line in lines] == [named]
        assert lines[0].endswith(ranks.format(rank))
    both.check(0)


def test_swapped_shards_are_caught(tmp_path: Path) -> None:
    both = Both(tmp_path, *MESHES[0], False)
    arrived: dict[int, Any] = {}
    both_arrived = threading.Barrier(2, timeout=30)

    def swap_with_the_other(rank: int, parts: Any) -> None:
        arrived[rank] = parts["q.weight"].tensor.clone()
        both_arrived.wait()
        parts["q.weight"].tensor.copy_(arrived[1 - rank])

    for rank, destination in enumerate(both.destinations):
        destination.damage = partial(swap_with_the_other, rank)
    results = both.move(0, both.publish(0))[2:]
    assert all(isinstance(result, ChecksumError) and "q.weight: sent" in str(result) for result in results)


def test_layouts_that_do_not_fit_are_refused_before_anything_moves() -> None:
    class Other(ShardedPolicy):
        def sharding(self) -> Any:
            made = super().sharding()
            return type(made)(made.mesh, made.shapes, made.rules, {**RULES, "q.weight": (0, 3)}, made.stages)

    publisher, transport = WeightPublisher(CHANNEL, Other((("fsdp", 1),), 0)), LocalTransport(CHANNEL)
    facts = published(publisher, 0)
    with pytest.raises(LayoutError, match=r"q.weight: 3 units"):
        publisher.send(0, transport, mesh=(("tp", 2),))
    with pytest.raises(LayoutError, match=r"q.weight: 3 units"):
        receive(WeightReceiver(CHANNEL, mesh=(("tp", 2),), add=lambda t: t), facts, transport)
    assert not transport._sent


def test_parts_without_a_sum_over_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks, needed `add`"):
        WeightPublisher(CHANNEL, ShardedPolicy((("fsdp", 2),), 0), ranks=2)
    with pytest.raises(ValueError, match="ep 2, needed `add`"):
        WeightReceiver(CHANNEL, mesh=(("ep", 2),))
    with pytest.raises(LayoutError, match="given 2 ranks, needed the replica's 1"):
        WeightPublisher(CHANNEL, ShardedPolicy((("fsdp", 2),), 0))


def test_without_room_in_shared_memory_weights_come_as_messages(tmp_path: Path) -> None:
    both, warned = Both(tmp_path, *MESHES[0], True), list[str]()
    missing, destination = tmp_path / "no such folder", both.destinations[1]
    destination.memory = destination.receiver._allocate = SharedMemory(RUN, "none", [missing], warned.append)
    sound(both.move(0, both.publish(0)))
    both.check(0)
    assert not any(isinstance(d.opened, OneSidedTransport) for d in both.destinations)
    (text,) = warned
    assert f"{missing}: No such file or directory, no such folder" in text
    assert "weights come as messages" in text


@SHARED
def test_no_version_is_torn_whatever_an_optimizer_does_while_it_travels(tmp_path: Path, shared: bool) -> None:
    """The optimizer writes into the weights all the time, except while a version is published."""
    both = Both(tmp_path, *MESHES[0], shared)
    publishing, over = threading.Lock(), threading.Event()
    writes = 0

    def optimize() -> None:
        nonlocal writes
        while not over.is_set():
            with publishing:
                for source in both.sources:
                    for tensor in source.policy.tensors.values():
                        tensor.fill_(writes % 7)
                writes += 1

    thread = threading.Thread(target=optimize, daemon=True)
    thread.start()
    try:
        for version in range(12):
            with publishing:
                facts = both.publish(version)
                before = writes
            until(lambda: over.wait(0.001) or writes > before)  # noqa: B023 - called here
            sound(both.move(version, facts))
            both.check(version)
    finally:
        over.set()
        thread.join(30)


# In a wire format --------------------------------------------------------------------------------------------

QUANTISED = ("q.weight", "k.weight", "o.weight", *(name for name in SHAPES if ".experts." in name))
WIRES = pytest.mark.parametrize("wire", list(FORMATS))


@SHARED
@WIRES
@pytest.mark.parametrize(
    ("source", "target"), [MESHES[0], MESHES[1], MESHES[8], ((("fsdp", 3),), (("dp", 2), ("ep", 2)))]
)
def test_what_arrives_is_the_quantised_gathered_tensor_to_the_bit_and_back_in_floats(
    tmp_path: Path, source: Axes, target: Axes, wire: str, shared: bool
) -> None:
    both = Both(tmp_path, source, target, shared, wire=wire)
    for version in (0, 3):
        sound(both.move(version, both.publish(version)))
        floats = wholes(version)
        layout = Layout.whole((n, t.shape, str(t.dtype).removeprefix("torch.")) for n, t in floats.items())
        whole = allocate(converted(layout, wire), 0, "cpu")  # the result of one rank that has everything
        Converter(layout, converted(layout, wire), 0).convert(floats, whole)
        assert {name.removesuffix(SCALE) for name in whole if name.endswith(SCALE)} == set(QUANTISED)
        for name in QUANTISED:
            dequantise(whole[name].tensor, whole[name].region, whole[name + SCALE].tensor, FORMATS[wire], floats[name])
        for destination, expected in zip(both.destinations, both.parts(floats), strict=True):
            arena = destination.receiver._arena
            assert arena is not None
            assert {name for name in arena.live if not name.endswith(SCALE)} == expected.keys()
            for name, part in arena.live.items():
                sent = whole[name].cut(part.region)
                assert part.tensor.dtype == sent.dtype
                assert digest({"": part.tensor.contiguous()}) == digest({"": sent.contiguous()}), name
            assert digest(dict(destination.receiver.weights.tensors)) == digest(expected)


@SHARED
@WIRES
@pytest.mark.parametrize(("source", "target"), [MESHES[0], MESHES[1], ((("fsdp", 3),), (("dp", 2), ("tp", 2)))])
def test_readers_of_a_precision_have_the_parts_that_were_proved_and_no_floats_of_them(
    tmp_path: Path, source: Axes, target: Axes, wire: str, shared: bool
) -> None:
    """Each of two ranks has slices of what one rank would have: a row has one scale, however its columns are sharded on
    either side."""
    both = Both(tmp_path, source, target, shared, wire=wire, restores=False)
    sound(both.move(0, both.publish(0)))
    floats = wholes(0)
    layout = Layout.whole((n, t.shape, str(t.dtype).removeprefix("torch.")) for n, t in floats.items())
    whole = allocate(converted(layout, wire), 0, "cpu")
    Converter(layout, converted(layout, wire), 0).convert(floats, whole)
    for destination in both.destinations:
        receiver = destination.receiver
        arena = receiver._arena
        assert arena is not None
        assert receiver._restorer is None
        assert receiver.weights.tensors.keys() == whole.keys() >= {name + SCALE for name in QUANTISED}
        for name, tensor in receiver.weights.tensors.items():
            assert tensor.data_ptr() == arena.live[name].tensor.data_ptr()
            sent = whole[name].cut(arena.live[name].region)
            assert (tensor.dtype, digest({"": tensor.contiguous()})) == (sent.dtype, digest({"": sent.contiguous()}))


def test_live_floats_stay_while_the_next_version_is_restored(tmp_path: Path) -> None:
    both = Both(tmp_path, *MESHES[0], False, wire="int8")
    sound(both.move(0, both.publish(0)))
    receiver = both.destinations[0].receiver
    before = digest(dict(receiver.weights.tensors))
    swaps = [destination.receiver.swap for destination in both.destinations]
    for destination in both.destinations:
        destination.receiver.swap = lambda version: None  # type: ignore[method-assign]
    sound(both.move(1, both.publish(1)))
    assert digest(dict(receiver.weights.tensors)) == before
    for swap in swaps:
        swap(1)
    assert digest(dict(receiver.weights.tensors))["q.weight"] != before["q.weight"]


@WIRES
def test_a_flipped_scale_is_caught_on_all_ranks_and_never_live(tmp_path: Path, wire: str) -> None:
    both = Both(tmp_path, *MESHES[0], False, wire=wire)
    sound(both.move(0, both.publish(0)))
    both.destinations[1].damage = partial(flip, "o.weight.scale")
    results = both.move(1, both.publish(1))[2:]
    assert [type(result) for result in results] == [ChecksumError, ChecksumError]
    assert all("o.weight.scale: sent" in str(result) for result in results)
    assert {destination.receiver.weights.version for destination in both.destinations} == {0}


def test_weights_that_the_format_cannot_hold_are_refused_by_name() -> None:
    policy = ShardedPolicy((("fsdp", 1),), 0)
    publisher = WeightPublisher(CHANNEL, policy, wire="int8")
    policy.tensors["q.weight"][5, 6] = torch.inf
    with pytest.raises(ConversionError, match=r"q\.weight: row 5 has inf or NaN"):
        publisher.publish(0)
