"""Wire formats: what is sent of each tensor and who holds it; quantised shards equal the quantised whole."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.runtime.tensor.buffers import allocate
from penstock.runtime.tensor.codec import NAMES
from penstock.runtime.tensor.layout import (
    Layout,
    LayoutError,
    Mesh,
    Placement,
    Region,
    Split,
    TensorLayout,
    whole,
)
from penstock.runtime.tensor.quantise import ConversionError, Converter, absmax, cast, dequantise, quantise, scales
from penstock.runtime.tensor.reshard import reshard
from penstock.runtime.tensor.wire_format import FORMATS, Format, converted, cut_through, scale_holding

from .layouts import layouts_of, meshes, placements

# What travels ------------------------------------------------------------------------------------------------


FORMATS_SMALL = [FORMATS["int8"], FORMATS["fp8"], Format("float8_e4m3fn", 448.0, 3)]


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


# Quantising --------------------------------------------------------------------------------------------------


WHOLE = Region.whole((4, 6))


def quantised(matrix: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Quantise the whole matrix at once, as on one rank that has gathered it."""
    region = Region.whole(matrix.shape)
    scale = scales("w", absmax(matrix, region, format), region, format)
    return quantise(matrix, region, scale, format), scale


def by_hand(matrix: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """The definition, scale by scale, by other torch operations."""
    tile = (format.block, format.block) if format.block else (1, matrix.shape[1])
    x = matrix.float()
    shape = [-(-n // t) for n, t in zip(matrix.shape, tile, strict=True)]
    scale = torch.empty(shape)
    found = torch.empty(matrix.shape, dtype=torch.float32)
    for i in range(shape[0]):
        for j in range(shape[1]):
            cell = slice(i * tile[0], (i + 1) * tile[0]), slice(j * tile[1], (j + 1) * tile[1])
            scale[i, j] = max(float(x[cell].abs().max() / format.limit), 2.0**-126)
            found[cell] = x[cell] / scale[i, j]
    if format.dtype == "int8":
        found = found.round()
    dtype = getattr(torch, format.dtype)
    return found.clamp(-format.limit, format.limit).to(dtype), scale if format.block else scale.view(-1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def convert_on_all(
    layout: Layout, wire: Layout, tensors: dict[str, Tensor], agree: Callable[[list[Tensor]], Tensor]
) -> list[Any]:
    """Convert each rank's regions: each rank first reports its maxima, then all use the agreed ones."""

    class Waiting(Exception):
        pass

    def attempt(rank: int, agreed: Tensor | None, said: list[Tensor]) -> Any:
        own = {t.name: tensors[t.name][t.held_by(rank)[0].slices(Region.whole(t.shape))] for t in held(layout, rank)}
        out = allocate(wire, rank, "cpu")

        def listen(maxima: Tensor) -> Tensor:
            said.append(maxima.clone())
            if agreed is None:
                raise Waiting
            return agreed

        try:
            Converter(layout, wire, rank).convert(own, out, listen)
        except Waiting:
            return None
        return out

    said: list[Tensor] = []
    found = [attempt(rank, None, said) for rank in range(layout.ranks)]
    if said:
        assert len(said) == layout.ranks  # if a rank skips a collective, the others hang
        agreed = agree(said)
        found = [attempt(rank, agreed, []) for rank in range(layout.ranks)]
    return found


def held(layout: Layout, rank: int) -> list[Any]:
    return [t for t in layout.tensors if t.held_by(rank)]


def maximum(said: list[Tensor]) -> Tensor:
    return torch.stack(said).amax(0)


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    st.sampled_from(sorted(FORMATS)),
    st.tuples(st.sampled_from([1, 3, 127, 128, 130, 300]), st.sampled_from([1, 5, 128, 131, 260])),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_boxes_with_agreed_scales_equal_the_whole_bit_for_bit(
    data: Any, wire: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    mesh = data.draw(meshes)
    entries = [("w", shape), ("v", shape[::-1])]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    tensors = {name: (torch.randn(size, generator=generator) * 3).to(dtype) for name, size in entries}
    tensors["w"][data.draw(st.integers(0, shape[0] - 1))] = 0
    held_by = {name: data.draw(placements(mesh, size)) for name, size in entries}
    layout = Layout(tuple(TensorLayout(name, size, NAMES[dtype], held_by[name]) for name, size in entries))
    travels = converted(layout, wire)
    found = convert_on_all(layout, travels, tensors, maximum)
    expected: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        expected[name], expected[name + ".scale"] = quantised(tensor, FORMATS[wire])
    for rank, parts in enumerate(found):
        for t in held(travels, rank):
            part = parts[t.name]
            assert same_bits(part.tensor, expected[t.name][part.region.slices(Region.whole(t.shape))])


@pytest.mark.parametrize("wire", sorted(FORMATS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (130, 257), (7, 3000), (3000, 5)])
def test_the_whole_is_what_the_definition_says(wire: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    matrix[0] *= 1000
    matrix[-1] *= len(matrix) == 1  # a row of zeros, some of them negative zeros
    for found, expected in zip(quantised(matrix, FORMATS[wire]), by_hand(matrix, FORMATS[wire]), strict=True):
        assert same_bits(found, expected)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(sorted(FORMATS)))
def test_dequantised_numbers_are_as_near_as_the_format_allows(seed: int, wire: str) -> None:
    format = FORMATS[wire]
    matrix = torch.randn(140, 150, generator=torch.Generator().manual_seed(seed))
    elements, scale = quantised(matrix, format)
    region = Region.whole(matrix.shape)
    back = dequantise(elements, region, scale, format, torch.empty_like(matrix))
    per_row = scale.max() if format.block else scale[:, None]
    step = per_row / 2 if wire == "int8" else torch.maximum(matrix.abs() / 16, per_row * 2.0**-10)
    assert ((back - matrix).abs() <= step * 1.001).all()
    part = Region((3, 129), (137, 150))
    own = scale[part.start[0] : part.stop[0]] if not format.block else scale[0:2, 1:2]
    cut = dequantise(elements[3:137, 129:150], part, own, format, torch.empty(134, 21))
    assert torch.equal(cut, back[3:137, 129:150])


def test_numbers_too_small_for_their_scale_are_zero_and_never_infinite() -> None:
    matrix = torch.full((2, 4), 2.0**-149)
    for format in FORMATS.values():
        elements, scale = quantised(matrix, format)
        assert torch.isfinite(elements.float()).all()
        assert (scale >= 2.0**-126).all()


def test_numbers_beyond_an_agreed_scale_saturate() -> None:
    matrix = torch.tensor([[1e30, -1e30, 1.0]])
    for format in (FORMATS["int8"], FORMATS["fp8"]):
        found = quantise(matrix, Region.whole((1, 3)), torch.ones(1), format).float()
        assert found.tolist() == [[format.limit, -format.limit, 1.0]]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_named_by_tensor_and_row(bad: float) -> None:
    matrix = torch.ones(300, 6)
    matrix[131, 2] = matrix[170, 0] = bad
    region = Region((1000, 50), (1300, 56))
    with pytest.raises(ConversionError, match=r"layer\.w: row 1131 and 1 more has inf or NaN"):
        scales("layer.w", absmax(matrix, region, FORMATS["int8"]), region, FORMATS["int8"])
    with pytest.raises(ConversionError, match=r"layer\.w: the 128 × 128 block at row 1024, column 0 "):
        scales("layer.w", absmax(matrix, region, FORMATS["fp8_block"]), region, FORMATS["fp8_block"])


def test_every_rank_that_shares_a_bad_row_learns_of_it() -> None:
    matrix = torch.ones(4, 6, dtype=torch.bfloat16)
    matrix[2, 5] = math.nan
    held_by = Placement(Mesh((("tp", 2),)), (Split("tp", 1),))
    layout = Layout((TensorLayout("w", (4, 6), "bfloat16", held_by),))
    wire = converted(layout, "int8")
    maxima: list[Tensor] = []
    for rank in range(2):
        region = layout.tensors[0].held_by(rank)[0]
        maxima.append(absmax(matrix[region.slices(WHOLE)], region, FORMATS["int8"]))
    for rank in range(2):
        own = {"w": matrix[layout.tensors[0].held_by(rank)[0].slices(WHOLE)]}
        with pytest.raises(ConversionError, match="w: row 2 has inf or NaN"):
            Converter(layout, wire, rank).convert(own, allocate(wire, rank, "cpu"), lambda _: maximum(maxima))
        with pytest.raises(ValueError, match="needed one: ranks share scales of w"):
            Converter(layout, wire, rank).convert(own, allocate(wire, rank, "cpu"))


def test_a_cast_beyond_the_dtype_is_an_error_and_infinities_may_travel() -> None:
    tensor, region = torch.ones(3, 2), Region((10, 0), (13, 2))
    tensor[1, 1] = math.inf
    out = torch.empty(3, 2, dtype=torch.float16)
    cast("mask", tensor, out, region)
    assert out[1, 1] == math.inf
    tensor[2, 0] = 1e5
    with pytest.raises(ConversionError, match="w: row 12 has a number beyond 65504"):
        cast("w", tensor, out, region)
