"""Resharding against brute force: every element of every destination region comes once, from a rank that holds it."""

import itertools
import json
from collections import Counter
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.nodes.model.config import ModelConfig
from penstock.nodes.model.tensor_parallel import stages_of, tensor_parallel
from penstock.runtime.tensor.layout import (
    ITEMSIZE,
    Copy,
    Layout,
    LayoutError,
    ListedRegions,
    Mesh,
    Placement,
    Region,
    TensorLayout,
    sharded,
)
from penstock.runtime.tensor.reshard import LARGE, ReshardPlan, reshard
from tests.nodes.tiny_model import parameter_shapes

from .layouts import grids, layouts_of, regions, shapes

LLAMA_405B = ModelConfig(128256, 16384, 53248, 126, 128, 8, 128)


def check(src: Layout, dst: Layout, plan: ReshardPlan) -> None:
    """Brute force: a count per element of every destination region, and who holds what is sent."""
    for wanted in dst.tensors:
        held = src.by_name[wanted.name]
        for rank in range(dst.ranks):
            copies = [c for c in plan.receives(rank) if c.tensor == wanted.name]
            own = wanted.held_by(rank)
            for region in own:
                written = np.zeros(wanted.shape, int)
                for c in copies:
                    written[(c.region & region).slices(Region.whole(wanted.shape))] += 1
                inside = np.zeros(wanted.shape, int)
                inside[region.slices(Region.whole(wanted.shape))] = 1
                if len(own) == 1:
                    assert (written == inside).all()
                else:
                    assert (written >= inside).all()
            for c in copies:
                parts = held.held_by(c.source)
                assert sum((c.region & part).size for part in parts) >= c.region.size
                assert c.region.size


def pairs(copies: tuple[Copy, ...]) -> dict[tuple[int, int], list[Copy]]:
    found: dict[tuple[int, int], list[Copy]] = {}
    for copy in copies:
        found.setdefault((copy.source, copy.destination), []).append(copy)
    return found


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_every_element_is_written_once_by_a_holder(data: Any) -> None:
    described = data.draw(st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEMSIZE))), min_size=1, max_size=5))
    tensors = [(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(described)]
    src, dst = data.draw(layouts_of(tensors, covering=True)), data.draw(layouts_of(tensors, covering=False))
    plan = reshard(src, dst)
    check(src, dst, plan)
    assert plan.bytes_out == tuple(
        sum(c.region.size * ITEMSIZE[src.by_name[c.tensor].dtype] for c in plan.sends(r)) for r in range(src.ranks)
    )
    assert plan.bytes_in == tuple(
        sum(c.region.size * ITEMSIZE[src.by_name[c.tensor].dtype] for c in plan.receives(r)) for r in range(dst.ranks)
    )
    assert plan.nbytes == sum(plan.bytes_in)


def test_what_overlapping_regions_hold_is_written_once() -> None:
    """Rank 0 holds rows 0 to 3, rank 1 rows 2 to 5: rows 2 and 3 must come from one of them."""
    shape = (6, 2)
    held = ListedRegions(((0, Region((0, 0), (4, 2))), (1, Region((2, 0), (6, 2)))))
    src = Layout((TensorLayout("t", shape, "int8", held),))
    plan = reshard(src, src.replicated(1))
    check(src, src.replicated(1), plan)
    assert plan.nbytes == 12


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_overlapping_boxes_and_extra_holders_are_used_once(data: Any) -> None:
    sources, targets = [], []
    for name in "ab":
        shape = data.draw(shapes)
        cells = data.draw(grids(shape))
        held = [(rank, cell) for cell in cells for rank in data.draw(st.sets(st.integers(0, 3), min_size=1))]
        extra = [(5, region) for region in data.draw(st.lists(regions(shape), max_size=2))]
        wanted = [(r, region) for r, region in enumerate(data.draw(st.lists(regions(shape), max_size=3)))]
        sources.append(TensorLayout(name, shape, "bfloat16", ListedRegions((*held, *extra))))
        targets.append(TensorLayout(name, shape, "bfloat16", ListedRegions(tuple(wanted))))
    src, dst = Layout(tuple(sources)), Layout(tuple(targets))
    check(src, dst, reshard(src, dst))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_each_rank_s_own_part_is_its_part_of_the_whole_plan_and_both_ends_agree(data: Any) -> None:
    tensors = [(f"t{i}", data.draw(shapes), "int16") for i in range(data.draw(st.integers(1, 4)))]
    src, dst = data.draw(layouts_of(tensors, covering=True)), data.draw(layouts_of(tensors, covering=False))
    plan, again = reshard(src, dst), reshard(deepcopy(src), deepcopy(dst))
    assert plan == again
    every = plan.routes()
    for rank in range(src.ranks):
        assert [r for r in every if r.source == rank] == list(again.routes(source=rank))
    for rank in range(dst.ranks):
        assert [r for r in every if r.destination == rank] == list(again.routes(destination=rank))
    sent = [pairs(plan.sends(rank)) for rank in range(src.ranks)]
    received = [pairs(plan.receives(rank)) for rank in range(dst.ranks)]
    assert {k: v for part in sent for k, v in part.items()} == {k: v for part in received for k, v in part.items()}
    steps = max(src.ranks, dst.ranks)
    for side in (*sent, *received):
        order = [(destination - source) % steps for source, destination in side]
        assert order == sorted(set(order))
    places = {name: place for place, (name, _, _) in enumerate(tensors)}
    for part in sent:
        for copies in part.values():
            assert [places[c.tensor] for c in copies] == sorted(places[c.tensor] for c in copies)


def test_whole_to_whole_is_one_copy_per_tensor_in_order() -> None:
    src = Layout.whole([("b", (2, 3), "float32"), ("a", (), "int64"), ("empty", (0, 3), "int8")])
    plan = reshard(src, src.replicated(1))
    assert [(c.tensor, c.region) for c in plan.copies] == [("b", Region((0, 0), (2, 3))), ("a", Region((), ()))]


def test_replicas_share_the_sending() -> None:
    src = Layout.whole([(f"t{i}", (10, 10), "float32") for i in range(8)], ranks=4)
    plan = reshard(src, src.replicated(2))
    assert [len(plan.sends(rank)) for rank in range(4)] == [4, 4, 4, 4]
    assert len(plan.receives(0)) == len(plan.receives(1)) == 8


def test_a_large_box_that_several_hold_is_cut_if_its_copies_cannot_be_shared_out() -> None:
    src = Layout.whole([("large", (3, LARGE), "float32"), ("small", (3, 5), "float32")], ranks=3)
    plan = reshard(src, src.replicated(1))
    assert sorted(c.region.shape for c in plan.copies if c.tensor == "large") == [(1, LARGE)] * 3
    assert [c.region.shape for c in plan.copies if c.tensor == "small"] == [(3, 5)]
    assert [len(c.region.shape) for c in reshard(src, src.replicated(3)).copies if c.tensor == "large"] == [2] * 3


def test_a_holder_on_the_receiver_s_host_sends() -> None:
    tensors = [(f"t{i}", (6, 4), "float32") for i in range(5)]
    src = sharded(tensors, Mesh((("dp_replicate", 3), ("fsdp", 2))), hosts=["a", "a", "b", "b", "c", "c"])
    dst = sharded(tensors, Mesh((("replica", 4),)), hosts=["b", "c", "b", "elsewhere"])
    plan = reshard(src, dst)
    check(src, dst, plan)
    for destination, sources in ((0, {2, 3}), (1, {4, 5}), (2, {2, 3})):
        assert {c.source for c in plan.receives(destination)} == sources
    # Who has no trainer on its host is served by those that are least loaded.
    assert {c.source for c in plan.receives(3)} <= {0, 1, 4, 5}


def test_what_one_rank_alone_holds_counts_before_replicas_choose() -> None:
    alone = TensorLayout("alone", (100,), "int8", ListedRegions(((0, Region((0,), (100,))),)))
    shared = [
        TensorLayout(f"s{i}", (10,), "int8", ListedRegions(tuple((r, Region((0,), (10,))) for r in (0, 1))))
        for i in "abc"
    ]
    src = Layout((*shared, alone))
    assert reshard(src, src.replicated(1)).bytes_out == (100, 30)


def test_all_faults_are_listed_at_once() -> None:
    def one(name: str, shape: tuple[int, ...], dtype: str = "float32", region: Region | None = None) -> TensorLayout:
        return TensorLayout(name, shape, dtype, ListedRegions(((0, region or Region.whole(shape)),)))

    half = Region((0,), (2,))
    src = Layout((one("shape", (4,)), one("dtype", (4,)), one("part", (4,), region=half), one("unwanted", (1,))))
    dst = Layout((one("shape", (5,)), one("dtype", (4,), "float16"), one("part", (4,)), one("unknown", (1,))))
    with pytest.raises(LayoutError) as caught:
        reshard(src, dst)
    text = str(caught.value)
    assert "shape: float32 (4,) in the source, float32 (5,) in the destination" in text
    assert "dtype: float32 (4,) in the source, float16 (4,) in the destination" in text
    assert "part: [2:4] for rank 0 is held by no source rank" in text
    assert "unwanted: only in the source" in text
    assert "unknown: only in the destination" in text


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_no_source_holds_is_refused_with_every_tensor(data: Any) -> None:
    shape = data.draw(shapes.filter(lambda s: 0 not in s))
    cells = data.draw(grids(shape))
    gone = data.draw(st.sampled_from(cells))
    held = ListedRegions(tuple((0, cell) for cell in cells if cell != gone))
    src = Layout(tuple(TensorLayout(n, shape, "int8", held) for n in "ab"))
    with pytest.raises(LayoutError) as caught:
        reshard(src, src.replicated(5))
    for name in "ab":
        assert f"{name}: {gone} for ranks 0, 1, 2 and 2 more is held by no source rank" in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            TensorLayout("t", (4,), "int8", ListedRegions(((0, Region((0,), (5,))),))),
            r"region \[0:5\] of rank 0 outside shape \(4,\)",
        ),
        (TensorLayout("t", (4,), "int8", ListedRegions(((0, Region((0, 0), (4, 4))),))), "outside shape"),
        (TensorLayout("t", (4,), "object", ListedRegions(((0, Region((0,), (4,))),))), "dtype 'object'"),
        (TensorLayout("t", (4,), "int8", Placement(Mesh((("pp", 2),)), only=(("pp", (2,)),))), "only at"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(tensor: TensorLayout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        reshard(Layout((tensor,)), Layout((tensor,)))


def test_a_name_twice_is_refused() -> None:
    tensor = TensorLayout("t", (4,), "float32", ListedRegions(((0, Region((0,), (4,))),)))
    with pytest.raises(LayoutError, match="t: 2 times in the source"):
        reshard(Layout((tensor, tensor)), Layout((tensor,)))


def test_too_few_hosts_are_refused() -> None:
    src = Layout.whole([("t", (4,), "int8")], ranks=3)
    with pytest.raises(LayoutError, match="hosts: 2 for 3 ranks of the source"):
        reshard(Layout(src.tensors, ("a", "b")), src)


def llama_405b(*axes: tuple[str, int]) -> Layout:
    mesh = Mesh(axes)
    tensors = [(name, shape, "bfloat16") for name, shape in parameter_shapes(LLAMA_405B).items()]
    stages = stages_of(LLAMA_405B, parameter_shapes(LLAMA_405B), mesh.extent("pp"))
    return sharded(tensors, mesh, tensor_parallel(LLAMA_405B), stages)


def held(layout: Layout, rank: int) -> list[tuple[Region, ...]]:
    return [t.held_by(rank) for t in layout.tensors]


GENERATORS_405B = llama_405b(("replica", 64), ("tp", 8))


def test_405b_between_512_and_512_ranks_is_balanced_and_small() -> None:
    """FSDP64 × TP8 trainers, 64 TP8 generators."""
    src, dst = llama_405b(("fsdp", 64), ("tp", 8)), GENERATORS_405B
    plan = reshard(src, dst)
    assert len(plan.groups) == 7
    copies = sum(len(lane.destinations) * len(group.names) for group in plan.groups for lane in group.lanes)
    assert copies > 36e6
    assert sum(len(group.lanes) for group in plan.groups) < 5000
    assert max(plan.bytes_out) <= 1.01 * sum(plan.bytes_out) / 512
    assert min(plan.bytes_out) >= 0.99 * sum(plan.bytes_out) / 512
    assert max(plan.bytes_in) == min(plan.bytes_in) == pytest.approx(101.5e9, rel=0.01)
    assert len(json.dumps(src.to_json())) < 100_000
    peers = Counter((r.source, r.destination) for r in plan.routes(source=77))
    assert len(peers) == 64


@pytest.mark.parametrize(
    "axes",
    [
        (("dp_replicate", 8), ("fsdp", 8), ("tp", 8)),
        (("tp", 8), ("fsdp", 16), ("dp_replicate", 4)),
        (("dp_replicate", 3), ("fsdp", 21), ("tp", 4)),
        (("dp_replicate", 16), ("tp", 32)),
    ],
)
def test_405b_with_replicated_trainers_is_balanced(axes: tuple[tuple[str, int], ...]) -> None:
    src = llama_405b(*axes)
    plan = reshard(src, GENERATORS_405B)
    # The last shards of 21 are short: no other rank may send in their place what only they lack.
    assert max(plan.bytes_out) <= 1.01 * sum(plan.bytes_out) / len(plan.bytes_out)
    assert max(plan.bytes_in) == min(plan.bytes_in)
    replicas = [plan.bytes_out[r] for r in range(src.ranks) if held(src, r) == held(src, 0)]
    assert max(replicas) <= 1.01 * min(replicas)


def test_405b_in_pipeline_stages_is_balanced_within_each_stage() -> None:
    """A stage that has more layers, or the embedding, has more to send; within one the ranks share it evenly."""
    src = llama_405b(("pp", 16), ("dp_replicate", 2), ("fsdp", 2), ("tp", 8))
    plan = reshard(src, GENERATORS_405B)
    assert max(plan.bytes_in) == min(plan.bytes_in)
    for stage in np.array(plan.bytes_out).reshape(16, 32):
        assert 0.99 * stage.mean() <= stage.min() <= stage.max() <= 1.01 * stage.mean()


def test_pipeline_stages_on_both_sides_send_only_what_is_there() -> None:
    src, dst = llama_405b(("pp", 2), ("fsdp", 4), ("tp", 4)), llama_405b(("tp", 4), ("pp", 3))
    plan = reshard(src, dst)
    for rank in (0, 17, 31):
        assert all(src.by_name[c.tensor].held_by(rank) for c in plan.sends(rank))
    received = {(c.destination, c.tensor) for r in range(12) for c in plan.receives(r)}
    assert received == {(r, t.name) for t, r in itertools.product(dst.tensors, range(12)) if t.held_by(r)}
