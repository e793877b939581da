"""What travels of each tensor, and who holds it, against a brute-force count of what each region touches."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.nodes.model.config import ModelConfig
from penstock.nodes.model.tensor_parallel import tensor_parallel
from penstock.runtime.tensor.layout import (
    Layout,
    LayoutError,
    Mesh,
    Placement,
    Region,
    Split,
    TensorLayout,
    sharded,
    whole,
)
from penstock.runtime.tensor.reshard import reshard
from penstock.runtime.tensor.wire_format import FORMATS, Format, converted, cut_through, scale_holding
from tests.nodes.tiny_model import parameter_shapes

from .layouts import layouts_of

FORMATS_SMALL = [FORMATS["int8"], FORMATS["fp8"], Format("float8_e4m3fn", 448.0, 3)]
MODEL = ModelConfig(512, 256, 640, 2, 4, 2, 64)


def touched(region: Region, format: Format) -> set[tuple[int, ...]]:
    tile = format.block
    places = ((r, c) for r in range(region.start[0], region.stop[0]) for c in range(region.start[1], region.stop[1]))
    return {(r // tile, c // tile) if tile else (r,) for r, c in places}


def elements(region: Region) -> set[tuple[int, ...]]:
    return {(r, *c) for r in range(region.start[0], region.stop[0]) for c in _columns(region)}


def _columns(region: Region) -> list[tuple[int, ...]]:
    return [(c,) for c in range(region.start[1], region.stop[1])] if len(region.start) == 2 else [()]


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(FORMATS_SMALL), st.tuples(st.integers(1, 11), st.integers(1, 11)))
def test_a_rank_holds_the_scales_that_its_boxes_touch_and_no_others(
    data: Any, format: Format, shape: tuple[int, int]
) -> None:
    source = data.draw(layouts_of([("w", shape, "float32")], covering=False)).tensors[0]
    scales = TensorLayout("s", format.scale_shape(shape), "float32", scale_holding(source.held, shape, format))
    assert scales.faults() == []
    touches: list[set[tuple[int, ...]]] = []
    for rank in range(source.held.ranks):
        regions = source.held_by(rank)
        needed = set[tuple[int, ...]]().union(*(touched(region, format) for region in regions))
        assert set[tuple[int, ...]]().union(*(elements(region) for region in scales.held_by(rank))) == needed
        touches += [touched(region, format) for region in regions]
    distinct = {region for rank in range(source.held.ranks) for region in source.held_by(rank)}
    counted = [scale for region in distinct for scale in touched(region, format)]
    if len(set(counted)) == scales_of(shape, format):
        assert cut_through(source.held, shape, format) == (len(counted) > len(set(counted)))


def scales_of(shape: tuple[int, int], format: Format) -> int:
    return len(touched(Region.whole(shape), format))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(sorted(FORMATS)))
def test_quantised_layouts_are_resharded_like_any_others(data: Any, wire: str) -> None:
    tensors = [("w", (5, 300), "float32"), ("x", (131, 7), "bfloat16"), ("norm", (4,), "float32")]
    src, dst = (converted(data.draw(layouts_of(tensors, covering=covering)), wire) for covering in (True, False))
    plan = reshard(src, dst)
    for rank in range(dst.ranks):
        for t in dst.tensors:
            received = [c.region for c in plan.receives(rank) if c.tensor == t.name]
            assert sum(region.size for region in received) == sum(region.size for region in set(t.held_by(rank)))


@pytest.mark.parametrize("wire", sorted(FORMATS))
def test_a_model_s_matrices_have_scales_by_row_or_block(wire: str) -> None:
    tensors = [(name, shape, "bfloat16") for name, shape in parameter_shapes(MODEL).items()]
    layout = sharded(tensors, Mesh((("fsdp", 1), ("tp", 2))), tensor_parallel(MODEL))
    travels = converted(layout, wire)
    scales = [t for t in travels.tensors if t.name.endswith(".scale")]
    assert len(scales) == 7 * MODEL.num_hidden_layers
    sizes = {"q_proj": 256, "gate_proj": 640, "down_proj": 256}
    for t in scales:
        rows = next((size for part, size in sizes.items() if part in t.name), None)
        assert rows is None or t.shape[0] == (rows if wire != "fp8_block" else rows // 128)


def test_matrices_are_quantised_but_embeddings_norms_and_heads() -> None:
    names = ["model.embed_tokens.weight", "q_proj.weight", "norm.weight", "lm_head.weight", "router.weight"]
    layout = Layout.whole([(name, (4, 4), "float32") for name in names] + [("bias", (4,), "float32")])
    dtypes = {t.name: t.dtype for t in converted(layout, "int8").tensors}
    assert [name for name, dtype in dtypes.items() if dtype == "int8"] == ["q_proj.weight", "router.weight"]
    assert dtypes["lm_head.weight"] == dtypes["bias"] == "float32"


def test_a_wire_of_floats_converts_floats_only() -> None:
    layout = Layout.whole([("w", (4, 4), "float32"), ("step", (), "int64"), ("empty", (0, 4), "float32")])
    assert [t.dtype for t in converted(layout, "bfloat16").tensors] == ["bfloat16", "int64", "bfloat16"]
    assert [t.dtype for t in converted(layout, "fp8").tensors][-1] == "float32"


def test_a_format_that_is_none_and_a_name_that_is_taken_are_refused() -> None:
    layout = Layout.whole([("w", (4, 4), "float32"), ("w.scale", (2,), "float32")])
    with pytest.raises(LayoutError, match=r"given 'int4'.*needed float16, .* or int8, fp8, fp8_block"):
        converted(layout, "int4")
    with pytest.raises(LayoutError, match=r"w\.scale: there already"):
        converted(layout, "int8")


def test_rows_are_cut_by_columns_and_blocks_by_either() -> None:
    mesh = Mesh((("fsdp", 2),))
    for dim, expected in ((0, [False, False, True]), (1, [True, True, True])):
        held = Placement(mesh, (Split("fsdp", dim),))
        assert [cut_through(held, (192, 192), FORMATS[wire]) for wire in ("int8", "fp8", "fp8_block")] == expected
    assert not cut_through(whole(4), (192, 192), FORMATS["fp8_block"])
