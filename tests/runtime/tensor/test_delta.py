"""Delta syncs: they give the same bits as dense ones, are refused on another base, and are never larger than dense."""

import math
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.graph.protocols import Axes
from penstock.runtime.tensor import delta as module
from penstock.runtime.tensor.delta import NONE, Delta, DeltaError, DeltaTransport, decode, encode, payload_bytes
from penstock.runtime.tensor.digest import ChecksumError
from penstock.runtime.tensor.one_sided import OneSidedTransport
from penstock.runtime.tensor.process_group import TransportError
from penstock.runtime.tensor.shm import sweep

from .peer import hurry
from .replicas import RUN, Both, ShardedPolicy, sound, together, wholes

pytestmark = pytest.mark.timeout(300)
KINDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def pair(elements: int, itemsize: int, density: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return random bytes, and a copy with about this share of the elements changed."""
    generator = torch.Generator().manual_seed(seed)
    before = torch.randint(0, 256, (elements * itemsize,), generator=generator).to(torch.uint8)
    after = before.clone()
    changed = torch.rand(elements, generator=generator) < density
    after.view(KINDS[itemsize])[changed] ^= 1 << 8 * itemsize - 2
    return before, after


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.integers(0, 300), st.sampled_from([65_535, 65_536, 65_537, 200_000])),
    st.sampled_from(sorted(KINDS)),
    st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.001, 0.015, 1.0])),
    st.integers(0, 1 << 30),
)
def test_every_bit_comes_back_and_no_delta_is_larger_than_dense(
    elements: int, itemsize: int, density: float, seed: int
) -> None:
    before, after = pair(elements, itemsize, density, seed)
    for previous in (before, None):
        delta, target = encode(previous, after, itemsize), before.clone()
        assert delta.payload.nbytes == payload_bytes(after.nbytes, itemsize, delta.changed) <= after.nbytes
        for _ in range(2):  # a second decode changes nothing
            decode(Delta(delta.changed, delta.payload.clone()), target, itemsize)
            assert torch.equal(target, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8])
def test_bits_that_equal_numbers_do_not_tell_apart_are_sent(dtype: torch.dtype) -> None:
    kind = KINDS[dtype.itemsize]
    before = torch.zeros(5000, dtype=dtype)
    after = before.clone()
    after.view(kind)[17] = torch.iinfo(kind).min  # -0.0
    if dtype.is_floating_point:
        before[99], after[99] = math.nan, math.nan
        after.view(kind)[99] ^= torch.iinfo(kind).min  # another NaN
        before[4999], after[4999] = math.nan, math.nan  # the same NaN
    delta = encode(before, after, dtype.itemsize)
    assert delta.changed == (2 if dtype.is_floating_point else 1)
    decode(delta, before, dtype.itemsize)
    assert torch.equal(before.view(kind), after.view(kind))


def test_few_changed_values_take_few_bytes() -> None:
    before, after = pair(1 << 21, 2, 0.015, 0)
    assert encode(before, after, 2).payload.nbytes < 0.032 * after.nbytes
    assert encode(after, after, 2).payload.nbytes < 0.0001 * after.nbytes


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(sorted(KINDS)), st.sampled_from([100, 65_540, 70_000]))
def test_bytes_that_are_no_delta_are_refused_or_write_inside(data: Any, itemsize: int, elements: int) -> None:
    before, after = pair(elements, itemsize, 0.01, 1)
    delta = encode(before, after, itemsize)
    changed, payload = data.draw(st.just(delta.changed) | st.integers(NONE - 1, elements + 1)), delta.payload.clone()
    for _ in range(data.draw(st.integers(0, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: len(payload) - data.draw(st.sampled_from([0, 0, 0, 1, 2, 7]))]
    guarded = torch.full((len(before) + 128,), 77, dtype=torch.uint8)
    guarded[64:-64] = before
    written = False
    with suppress(DeltaError):
        decode(Delta(changed, payload), guarded[64:-64], itemsize)
        written = True
    assert written or torch.equal(guarded[64:-64], before)
    assert (guarded[:64] == 77).all()
    assert (guarded[-64:] == 77).all()


def test_more_than_dense_is_refused_before_its_payload_comes() -> None:
    for changed in (-2, 900, 1 << 60):
        with pytest.raises(DeltaError, match="which makes no delta"):
            payload_bytes(2000, 2, changed)


SOURCE: Axes = (("fsdp", 2),)
TARGET: Axes = (("tp", 2),)


@pytest.fixture(autouse=True)
def _no_segments_left() -> Any:
    yield
    sweep(RUN)


def moved_on(version: int) -> dict[str, Tensor]:
    """Return weights of which one element in a hundred changes in each version."""
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
    """A policy whose updates change few elements."""

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
    """Move a version and check each bit of it; return the number of bytes received."""
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
    both, found = both_of(tmp_path, delta=4, wire="int8"), []
    for version in (0, 1, 2):
        sound(both.move(version, both.publish(version)))
        found.append(sum(destination.nbytes for destination in both.destinations))
    assert max(found[1:]) < found[0]


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
    answer, said = module._answer, count()

    def of_another(version: int, predecessor: int, own: Any) -> Tensor:
        return answer(version, predecessor + (next(said) == 0), own)  # the source calls it first

    monkeypatch.setattr(module, "_answer", of_another)
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


def test_a_broken_bridge_stays_broken(tmp_path: Path) -> None:
    both = both_of(tmp_path, delta=8)
    sync(both, 0)
    for destination in both.destinations:
        assert destination.opened is not None
        destination.opened.close()
    results = together(*(partial(d.sync, 1, both.publish(1)) for d in both.destinations[:1]))
    assert isinstance(results[0], TransportError)
