"""A sync between replicas of several ranks: every element where it belongs, whatever the meshes, and proved."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.graph.protocols import Axes
from penstock.runtime.tensor.digest import ChecksumError
from penstock.runtime.tensor.layout import LayoutError
from penstock.runtime.tensor.one_sided import OneSidedTransport, SharedMemory
from penstock.runtime.tensor.process_group import LocalTransport
from penstock.runtime.tensor.shm import sweep
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver
from tests.runtime.control.sockets import until

from .peer import published, receive
from .replicas import CHANNEL, RULES, RUN, SHAPES, Both, ShardedPolicy, sound

pytestmark = pytest.mark.timeout(300)

MESHES: list[tuple[Axes, Axes]] = [
    ((("fsdp", 2),), (("tp", 2),)),
    ((("fsdp", 2), ("tp", 2)), (("tp", 2),)),
    ((("replica", 2), ("fsdp", 2)), (("tp", 4),)),
    ((("fsdp", 4),), (("dp", 2), ("tp", 2))),
    ((("pp", 2), ("fsdp", 2)), (("tp", 2),)),
    ((("fsdp", 3),), (("tp", 1),)),
    ((("fsdp", 1),), (("tp", 2),)),
]


@pytest.fixture(autouse=True)
def _no_segments_left() -> Any:
    yield
    sweep(RUN)


@pytest.mark.parametrize("shared", [False, True], ids=["messages", "shared memory"])
@pytest.mark.parametrize(("source", "target"), MESHES)
def test_every_rank_gets_its_part_of_each_version(tmp_path: Path, source: Axes, target: Axes, shared: bool) -> None:
    both = Both(tmp_path, source, target, shared)
    for version in (0, 1, 4):
        sound(both.move(version, both.publish(version)))
        both.check(version)
    assert {isinstance(d.opened, OneSidedTransport) for d in both.destinations} == {shared}


@pytest.mark.parametrize("shared", [False, True], ids=["messages", "shared memory"])
@pytest.mark.parametrize("proof", ["sampled", "off"])
def test_other_proofs_move_the_same(tmp_path: Path, proof: str, shared: bool) -> None:
    both = Both(tmp_path, *MESHES[0], shared, proof=proof)
    facts = both.publish(0)
    assert facts["description"]["proof"] == proof
    assert len(facts["digests"]) in ({0} if proof == "off" else range(1, len(SHAPES)))
    sound(both.move(0, facts))
    both.check(0)


def flip(parts: Any) -> None:
    parts["q.weight"].tensor.view(torch.int16)[5, 6] ^= 1


def swap_elements(parts: Any) -> None:
    row = parts["o.weight"].tensor[7]
    row[[3, 400]] = row[[400, 3]]


def flip_a_replicated_one(parts: Any) -> None:
    parts["norm.weight"].tensor.view(torch.int16)[7] ^= 64


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("damage", "named", "ranks"),
    [
        (flip, "q.weight", "by ranks 0, 1"),
        (swap_elements, "o.weight", "by ranks 0, 1"),
        (flip_a_replicated_one, "norm.weight", "by rank {}"),
    ],
)
@pytest.mark.parametrize("shared", [False, True], ids=["messages", "shared memory"])
def test_damage_on_any_rank_is_caught_on_all_and_never_live(
    tmp_path: Path, damage: Callable[[Any], None], named: str, ranks: str, rank: int, shared: bool
) -> None:
    both = Both(tmp_path, *MESHES[0], shared)
    sound(both.move(0, both.publish(0)))
    both.destinations[rank].damage = damage
    results = both.move(1, both.publish(1))[2:]
    assert [type(result) for result in results] == [ChecksumError, ChecksumError]
    for own, error in enumerate(results):
        lines = str(error).splitlines()
        assert (
            f"version 1 ({CHANNEL}, destination rank {own} from source ranks 0, 1): 1 of 7 tensors differ" in lines[0]
        )
        assert [line.split(":")[0].strip() for line in lines[1:]] == [named]
        assert lines[1].endswith(ranks.format(rank))
    both.check(0)


def test_swapped_shards_are_caught(tmp_path: Path) -> None:
    both = Both(tmp_path, *MESHES[0], False)
    arrived: dict[int, Any] = {}
    both_arrived = threading.Barrier(2, timeout=30)

    def exchange(rank: int, parts: Any) -> None:
        arrived[rank] = parts["q.weight"].tensor.clone()
        both_arrived.wait()
        parts["q.weight"].tensor.copy_(arrived[1 - rank])

    for rank, destination in enumerate(both.destinations):
        destination.damage = partial(exchange, rank)
    results = both.move(0, both.publish(0))[2:]
    assert all(isinstance(result, ChecksumError) and "q.weight: sent" in str(result) for result in results)


def test_a_proof_that_leaves_tensors_out_is_refused(tmp_path: Path) -> None:
    both = Both(tmp_path, *MESHES[6], False)
    facts = both.publish(0)
    del facts["digests"]["q.weight"]
    results = both.move(0, facts)
    assert "a proof (full) that differs in q.weight" in str(results[1])


def test_layouts_that_do_not_fit_are_refused_before_anything_moves() -> None:
    class Other(ShardedPolicy):
        def sharding(self) -> Any:
            made = super().sharding()
            return type(made)(made.mesh, made.shapes, made.rules, {**RULES, "q.weight": (0, 3)}, made.stages)

    policy = Other((("fsdp", 1),), 0)
    publisher = WeightPublisher(CHANNEL, policy)
    facts = published(publisher, 0)
    transport = LocalTransport(CHANNEL)
    with pytest.raises(LayoutError, match=r"q.weight: 3 units"):
        publisher.send(0, transport, mesh=(("tp", 2),))
    with pytest.raises(LayoutError, match=r"q.weight: 3 units"):
        receive(WeightReceiver(CHANNEL, mesh=(("tp", 2),), add=lambda t: t), facts, transport)
    assert not transport._sent


def test_parts_without_a_sum_over_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks, needed `add`"):
        WeightPublisher(CHANNEL, ShardedPolicy((("fsdp", 2),), 0), ranks=2)
    with pytest.raises(ValueError, match="tp 2, needed `add`"):
        WeightReceiver(CHANNEL, mesh=(("tp", 2),))
    with pytest.raises(LayoutError, match="given 2 ranks, needed the replica's 1"):
        WeightPublisher(CHANNEL, ShardedPolicy((("fsdp", 2),), 0))


def test_without_room_in_shared_memory_weights_come_as_messages(tmp_path: Path) -> None:
    both = Both(tmp_path, *MESHES[0], True)
    missing = tmp_path / "no such folder"
    destination = both.destinations[1]
    warned: list[str] = []
    destination.memory = SharedMemory(RUN, "none", [missing], warned.append)
    destination.receiver._allocate = destination.memory
    sound(both.move(0, both.publish(0)))
    both.check(0)
    assert not any(isinstance(d.opened, OneSidedTransport) for d in both.destinations)
    (text,) = warned
    assert f"{missing}: No such file or directory, no such folder" in text
    assert "bytes" in text
    assert "weights come as messages" in text


@pytest.mark.parametrize("shared", [False, True], ids=["messages", "shared memory"])
def test_no_version_is_torn_whatever_an_optimizer_does_while_it_travels(tmp_path: Path, shared: bool) -> None:
    """The optimizer writes into the weights without a pause, but for the moments of publishing."""
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
