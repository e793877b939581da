"""Syncs that send what changed: the bits of dense ones, from the predecessor or in full, and proved as any other."""

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from penstock.graph.protocols import Axes
from penstock.runtime.tensor import delta
from penstock.runtime.tensor.delta import NONE, DeltaTransport
from penstock.runtime.tensor.digest import ChecksumError
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.one_sided import OneSidedTransport
from penstock.runtime.tensor.process_group import TransportError
from penstock.runtime.tensor.shm import sweep

from .peer import hurry
from .replicas import CHANNEL, RUN, Both, ShardedPolicy, sound, together, wholes

pytestmark = pytest.mark.timeout(300)

SOURCE: Axes = (("fsdp", 2),)
TARGET: Axes = (("tp", 2),)


@pytest.fixture(autouse=True)
def _no_segments_left() -> Any:
    yield
    sweep(RUN)


def moved_on(version: int) -> dict[str, Tensor]:
    """Weights of which one element in a hundred changes in each version."""
    tensors = wholes(0)
    for step in range(1, version + 1):
        generator = torch.Generator().manual_seed(step)
        for tensor in tensors.values():
            if tensor.is_floating_point():
                changed = torch.rand(tensor.shape, generator=generator) < 0.01
                tensor[changed] += 1
    tensors["step"] = torch.tensor(version)
    return tensors


class Slow(ShardedPolicy):
    """A policy that changes little."""

    def advance(self, version: int) -> None:
        made = moved_on(version)
        self.tensors = {n: made[n][tuple(map(slice, b.start, b.stop))].clone() for n, b in self.regions.items()}


def both_of(
    folder: Path, from_mesh: Axes = SOURCE, to_mesh: Axes = TARGET, shared: bool = False, **options: Any
) -> Both:
    both = Both(folder, from_mesh, to_mesh, shared, **options)
    for source in both.sources:
        source.policy.__class__ = Slow
    return both


def sync(both: Both, version: int) -> int:
    """Move a version and check each bit of it; the bytes received."""
    sound(both.move(version, both.publish(version)))
    for destination, expected in zip(both.destinations, both.parts(moved_on(version)), strict=True):
        weights = destination.receiver.weights
        assert weights.version == version
        assert [n for n, t in expected.items() if not torch.equal(weights.tensors[n], t)] == []
    return sum(destination.nbytes for destination in both.destinations)


def test_a_chain_with_a_gap_and_a_resync_is_the_dense_one_to_the_bit(tmp_path: Path) -> None:
    both = both_of(tmp_path, delta=4)
    full, *later = [sync(both, version) for version in (0, 1, 2, 4, 5, 6)]
    assert all(isinstance(destination.opened, DeltaTransport) for destination in both.destinations)
    assert [nbytes < full / 8 for nbytes in later] == [True, True, True, False, True]


def test_wire_formats_travel_as_deltas_too(tmp_path: Path) -> None:
    both = both_of(tmp_path, delta=4, wire="int8")
    found = []
    for version in (0, 1, 2):
        sound(both.move(version, both.publish(version)))
        found.append(sum(destination.nbytes for destination in both.destinations))
    assert all(nbytes < found[0] for nbytes in found[1:])


@pytest.mark.parametrize("side", ["sources", "destinations"])
def test_whoever_lost_the_predecessor_makes_the_next_sync_full(tmp_path: Path, side: str) -> None:
    both = both_of(tmp_path, delta=8)
    full, small = sync(both, 0), sync(both, 1)
    for rank in getattr(both, side):
        way = rank.transport if side == "sources" else rank.opened
        assert isinstance(way, DeltaTransport)
        for kept in way._kept.values():
            kept.version = NONE
    lost, again = sync(both, 2), sync(both, 3)
    assert lost == full
    assert max(small, again) < full / 8


def test_a_predecessor_that_is_not_what_it_seems_is_caught_by_the_proof(tmp_path: Path) -> None:
    both = both_of(tmp_path, delta=8)
    sync(both, 0)
    way = both.destinations[0].opened
    assert isinstance(way, DeltaTransport)
    for kept in way._kept.values():
        kept.buffers[0].view(torch.uint8)[:2] ^= 1
    results = both.move(1, both.publish(1))[2:]
    assert all("tensors differ" in str(result) for result in results)
    assert {destination.receiver.weights.version for destination in both.destinations} == {0}


def test_a_delta_of_another_version_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = both_of(tmp_path, (("fsdp", 1),), (("tp", 1),), delta=8)
    sync(both, 0)
    (source,), (destination,) = both.sources, both.destinations
    assert isinstance(destination.opened, DeltaTransport)
    answer, said = delta._answer, count()

    def of_another(version: int, predecessor: int, own: Any) -> Tensor:
        return answer(version, predecessor + (next(said) == 0), own)  # the source speaks first

    monkeypatch.setattr(delta, "_answer", of_another)
    hurry(source.transport, 2)
    _, refused = both.move(1, both.publish(1))
    assert isinstance(refused, ChecksumError)
    assert "sent {'version': 1, 'predecessor': 1" in str(refused)
    assert [kept.version for kept in destination.opened._kept.values()] == [0]


def test_a_receiver_that_awaits_another_version_fails_both_sides_by_name(tmp_path: Path) -> None:
    both = both_of(tmp_path, delta=8)
    sync(both, 0)
    facts = both.publish(1)
    both.publish(2)
    sends = [partial(source.send, 2) for source in both.sources]
    results = together(*sends, *(partial(d.sync, 1, facts) for d in both.destinations))
    assert all("version" in str(result) and isinstance(result, RuntimeError) for result in results)


def test_shared_memory_is_written_into_as_without_deltas(tmp_path: Path) -> None:
    both = both_of(tmp_path, shared=True, delta=8)
    assert sync(both, 0) == sync(both, 1)
    assert all(isinstance(destination.opened, OneSidedTransport) for destination in both.destinations)


def test_deltas_over_nccl_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="given delta=4 over nccl"):
        ReplicaLink(CHANNEL, HashStore(), backend="nccl", delta=4)


def test_a_broken_bridge_stays_broken(tmp_path: Path) -> None:
    both = both_of(tmp_path, delta=8)
    sync(both, 0)
    for destination in both.destinations:
        assert destination.opened is not None
        destination.opened.close()
    results = together(*(partial(d.sync, 1, both.publish(1)) for d in both.destinations[:1]))
    assert isinstance(results[0], TransportError)
