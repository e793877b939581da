"""Placements against what torch does: the elements that FSDP2 and tensor parallelism leave on each rank."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.runtime.tensor.layout import LayoutError, Mesh, Placement, Region, Split, sharded

from .layouts import meshes, placements, shapes

RULES = {"column.weight": (0, 0), "row.weight": (1, 0), "norm.weight": None}


@contextmanager
def torch_mesh(rank: int, *axes: tuple[str, int]) -> Iterator[DeviceMesh]:
    """A mesh of torch's in which this process is `rank`: the backend moves nothing."""
    sizes = tuple(size for _, size in axes)
    world = torch.Size(sizes).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=tuple(name for name, _ in axes))
    finally:
        dist.destroy_process_group()


class Two(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        for name in ("column", "row"):
            layer = nn.Linear(columns, rows, bias=False)
            layer.weight = nn.Parameter(torch.arange(float(rows * columns)).view(rows, columns))
            self.add_module(name, layer)
        self.norm = nn.RMSNorm(rows)
        self.norm.weight = nn.Parameter(torch.arange(float(rows)))


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@pytest.mark.parametrize("fsdp", [1, 2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize(("rows", "columns"), [(12, 12), (9, 6), (5, 7), (2, 3)])
def test_fsdp2_over_tensor_parallelism_leaves_these_elements(fsdp: int, tp: int, rows: int, columns: int) -> None:
    axes = ("fsdp", fsdp), ("tp", tp)
    tensors = [(name, tuple(p.shape), "float32") for name, p in Two(rows, columns).named_parameters()]
    layout = sharded(tensors, Mesh(axes), RULES)
    for rank in range(fsdp * tp):
        whole = {name: p.detach() for name, p in Two(rows, columns).named_parameters()}
        model = Two(rows, columns)
        with torch_mesh(rank, *axes) as mesh:
            styles: dict[str, Any] = {"column": ColwiseParallel(), "row": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], styles, src_data_rank=None)
            fully_shard(model, mesh=mesh["fsdp"])
            for name, parameter in model.named_parameters():
                regions = layout.by_name[name].held_by(rank)
                found = local(parameter).detach()
                if not regions:
                    assert found.numel() == 0
                else:
                    assert torch.equal(found, whole[name][regions[0].slices(Region.whole(whole[name].shape))])


@pytest.mark.parametrize("shape", [(12, 8), (7, 5), (3, 2), (1, 9)])
@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (0, None), (None, 1), (0, 0), (1, 1)])
def test_boxes_are_those_that_dtensor_computes(shape: tuple[int, ...], dims: tuple[int | None, ...]) -> None:
    axes = ("a", 3), ("b", 2)
    splits = tuple(Split(axis, dim) for (axis, _), dim in zip(axes, dims, strict=True) if dim is not None)
    placement = Placement(Mesh(axes), splits)
    theirs = [Replicate() if dim is None else Shard(dim) for dim in dims]
    for rank in range(6):
        with torch_mesh(rank, *axes) as mesh:
            extent, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, theirs)
        own = placement.of(rank, shape)
        if own:
            assert (own[0].start, own[0].shape) == (tuple(offset), tuple(extent))
        else:
            assert 0 in extent


@settings(deadline=None)
@given(st.data())
def test_boxes_of_a_placement_are_equal_or_disjoint_and_cover_the_tensor(data: Any) -> None:
    mesh, shape = data.draw(meshes), data.draw(shapes)
    placement = data.draw(placements(mesh, shape))
    assert placement.faults(shape) == []
    held = {region for rank in range(mesh.size) for region in placement.of(rank, shape)}
    assert sum(region.size for region in held) == Region.whole(shape).size
    assert all(not (a & b).size for a, b in itertools.combinations(held, 2))


def test_heads_are_dealt_whole_and_replicated_where_there_are_fewer_than_ranks() -> None:
    mesh = Mesh((("tp", 8),))

    def rows(units: int, size: int) -> list[tuple[int, int]]:
        regions = [Placement(mesh, (Split("tp", 0, units),)).of(rank, (size,)) for rank in range(8)]
        return [(own[0].start[0], own[0].stop[0]) if own else (0, 0) for own in regions]

    assert rows(8, 32) == [(4 * r, 4 * r + 4) for r in range(8)]
    assert rows(2, 32) == [(0, 16)] * 4 + [(16, 32)] * 4
    assert rows(12, 48) == [(8 * r, 8 * r + 8) for r in range(6)] + [(0, 0)] * 2


def test_the_order_of_axes_gives_the_ranks_and_nothing_else() -> None:
    tensors = [("column.weight", (8, 8), "int8"), ("norm.weight", (8,), "int8")]
    a = sharded(tensors, Mesh((("dp_replicate", 2), ("fsdp", 3), ("tp", 2))), RULES)
    b = sharded(tensors, Mesh((("tp", 2), ("dp_replicate", 2), ("fsdp", 3))), RULES)
    for dp, fsdp, tp in itertools.product(range(2), range(3), range(2)):
        for name in a.by_name:
            one = a.by_name[name].held_by((dp * 3 + fsdp) * 2 + tp)
            assert one == b.by_name[name].held_by((tp * 2 + dp) * 3 + fsdp)


def test_a_stage_holds_its_tensors_only() -> None:
    mesh = Mesh((("pp", 2), ("fsdp", 2)))
    layout = sharded([("a", (4,), "int8"), ("b", (4,), "int8")], mesh, stages={"a": (0,), "b": (0, 1)})
    assert [bool(layout.by_name["a"].held_by(rank)) for rank in range(4)] == [True, True, False, False]
    assert [bool(layout.by_name["b"].held_by(rank)) for rank in range(4)] == [True] * 4


def test_all_tensors_without_a_rule_or_a_stage_are_named() -> None:
    tensors = [("column.weight", (4, 4), "int8"), ("unheard", (4,), "int8")]
    with pytest.raises(LayoutError) as caught:
        sharded(tensors, Mesh((("pp", 2), ("tp", 2))), RULES, {"unheard": (0,)})
    assert str(caught.value).splitlines() == [
        "no layout on pp 2 × tp 2:",
        "  column.weight: no stage",
        "  unheard: no rule for tensor parallelism",
    ]


@pytest.mark.parametrize(
    ("placement", "fault"),
    [
        (Placement(Mesh((("tp", 2),)), (Split("fsdp", 0),)), "split over axis 'fsdp' of tp 2"),
        (Placement(Mesh((("tp", 2),)), (Split("tp", 2),)), r"split of dimension 2 of shape (6, 4)"),
        (Placement(Mesh((("tp", 2),)), (Split("tp", 0, 4),)), "4 units in dimension 0 of shape (6, 4)"),
        (Placement(Mesh((("tp", 4),)), (Split("tp", 0, 3),)), "3 units over 4 ranks of tp"),
        (Placement(Mesh((("tp", 2), ("fsdp", 2))), (Split("fsdp", 0), Split("tp", 0, 2))), "cut already"),
    ],
)
def test_a_placement_that_does_not_fit_says_why(placement: Placement, fault: str) -> None:
    (found,) = placement.faults((6, 4))
    assert fault in found


def test_a_mesh_with_a_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="needed distinct names"):
        Mesh((("tp", 2), ("tp", 2)))
