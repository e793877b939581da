"""Chains of replicas: who feeds whom, and that a bucket can go on while the next one arrives."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.tensor.chain import SLACK, buckets, by_bucket, chain, forwards
from penstock.runtime.tensor.layout import ITEMSIZE, Box, Layout
from penstock.runtime.tensor.mesh import Mesh
from penstock.runtime.tensor.parallel import sharded
from penstock.runtime.tensor.plan import Plan
from penstock.runtime.tensor.reshard import reshard

from .layouts import layouts_of, shapes


def plan_of(trainers: int, generators: int) -> Plan:
    tensors = [(f"t{i}", (240, 64), "bfloat16") for i in range(4)]
    rules = {f"t{i}": (0, 0) for i in range(4)}
    return reshard(sharded(tensors, Mesh((("fsdp", trainers),))), sharded(tensors, Mesh((("tp", generators),)), rules))


@pytest.mark.parametrize(
    ("trainers", "generators", "replicas", "heads"),
    [(1, 1, 1, 1), (1, 1, 5, 1), (4, 1, 3, 3), (4, 1, 4, 4), (4, 1, 9, 4), (2, 4, 6, 1), (8, 2, 16, 4), (8, 2, 3, 3)],
)
def test_trainers_feed_as_many_replicas_as_keep_them_no_busier_than_a_receiver(
    trainers: int, generators: int, replicas: int, heads: int
) -> None:
    plan = plan_of(trainers, generators)
    links = chain(plan, replicas)
    assert [link.destination for link in links] == list(range(replicas))
    assert sum(link.source is None for link in links) == heads
    assert heads == 1 or heads * max(plan.bytes_out) <= SLACK * max(plan.bytes_in)
    assert heads == replicas or (heads + 1) * max(plan.bytes_out) > SLACK * max(plan.bytes_in)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 40))
def test_a_replica_forwards_to_one_at_most_and_all_are_reached(trainers: int, generators: int, replicas: int) -> None:
    links = chain(plan_of(trainers, generators), replicas)
    sources = [link.source for link in links if link.source is not None]
    assert len(sources) == len(set(sources))
    assert all(link.source is None or link.source < link.destination for link in links)
    depth: dict[int, int] = {}
    for source, destination in links:
        depth[destination] = 1 if source is None else depth[source] + 1
    assert max(depth.values()) - min(depth[k] for k in range(replicas) if k not in sources) <= 1


def test_no_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="given 0 replicas"):
        chain(plan_of(1, 1), 0)


def test_replicas_of_nothing_are_fed_directly() -> None:
    assert all(link.source is None for link in chain(Plan((), 1, 1), 3))


@settings(deadline=None)
@given(st.data())
def test_buckets_hold_what_a_rank_holds_once_and_in_order(data: Any) -> None:
    tensors = [(f"t{i}", data.draw(shapes), "int16") for i in range(data.draw(st.integers(1, 4)))]
    layout, nbytes = data.draw(layouts_of(tensors, covering=True)), data.draw(st.integers(1, 64))
    for rank in range(layout.ranks):
        own = buckets(layout, rank, nbytes)
        assert all(own)
        flat = [(name, box) for bucket in own for name, box in bucket]
        names = [name for name, _ in flat]
        assert names == sorted(names)
        for t in layout.tensors:
            slabs = [box for name, box in flat if name == t.name]
            assert sum(box.size for box in slabs) == sum(box.size for box in t.held_by(rank))
            assert all(any((box & held) == box for held in t.held_by(rank)) for box in slabs)
        for bucket in own:
            size = sum(box.size * ITEMSIZE["int16"] for _, box in bucket)
            assert size <= nbytes or len(bucket) == 1


@settings(deadline=None)
@given(st.data())
def test_copies_by_bucket_are_the_copies_and_fill_the_bucket(data: Any) -> None:
    tensors = [(f"t{i}", data.draw(shapes), "int16") for i in range(data.draw(st.integers(1, 3)))]
    src = data.draw(layouts_of(tensors, covering=True))
    dst = sharded(tensors, Mesh((("fsdp", data.draw(st.integers(1, 3))),)))
    plan = reshard(src, dst)
    for rank in range(dst.ranks):
        own = buckets(dst, rank, data.draw(st.integers(1, 64)))
        received = by_bucket(plan.receives(rank), own)
        assert len(received) == len(own)
        for copies, bucket in zip(received, own, strict=True):
            for name, box in bucket:
                inside = [c for c in copies if c.tensor == name and (c.box & box) == c.box]
                assert sum(c.box.size for c in inside) == box.size
            assert sum(c.box.size for c in copies) == sum(box.size for _, box in bucket)
        for source in range(src.ranks):
            sent = by_bucket([c for c in plan.sends(source) if c.destination == rank], own)
            assert sent == tuple(tuple(c for c in copies if c.source == source) for copies in received)


def test_a_rank_forwards_its_buckets_to_the_same_rank() -> None:
    layout = Layout.whole([("a", (4, 2), "float32"), ("b", (2,), "float32")], ranks=2)
    own = buckets(layout, 1, 16)
    assert [[(c.tensor, c.box) for c in copies] for copies in forwards(own, 1)] == [
        [("a", Box((0, 0), (2, 2)))],
        [("a", Box((2, 0), (4, 2)))],
        [("b", Box((0,), (2,)))],
    ]
    assert {(c.source, c.destination) for copies in forwards(own, 1) for c in copies} == {(1, 1)}
