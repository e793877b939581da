"""Resharding against brute force: every element of every destination box comes once, from a rank that holds it."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.tensor.layout import Box, Layout, LayoutError, TensorLayout, reshard

Element = tuple[int, ...]


def elements(box: Box) -> set[Element]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@st.composite
def boxes(draw: Any, shape: tuple[int, ...]) -> Box:
    edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))


@st.composite
def grids(draw: Any, shape: tuple[int, ...]) -> list[Box]:
    """An uneven grid that covers the shape, each cell on one to three ranks."""
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    ranges = [list(itertools.pairwise(c)) or [(0, 0)] for c in cuts]
    return [Box(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in itertools.product(*ranges)]


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(deadline=None)
@given(st.data())
def test_intersection_and_difference_are_those_of_sets(data: Any) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    assert elements(a & b) == elements(a) & elements(b)
    rest = a.minus(b)
    assert set().union(*map(elements, rest)) == elements(a) - elements(b)
    assert sum(piece.size for piece in rest) == len(elements(a) - elements(b))
    assert a.size == len(elements(a))


@settings(deadline=None)
@given(st.data())
def test_every_element_is_written_once_by_a_holder(data: Any) -> None:
    sources, targets = [], []
    for name in "ab":
        shape = data.draw(shapes)
        cells = data.draw(grids(shape))
        held = [(rank, cell) for cell in cells for rank in data.draw(st.sets(st.integers(0, 3), min_size=1))]
        extra = [(5, box) for box in data.draw(st.lists(boxes(shape), max_size=2))]
        wanted = [(r, box) for r, box in enumerate(data.draw(st.lists(boxes(shape), max_size=3)))]
        sources.append(TensorLayout(name, shape, "bfloat16", (*held, *extra)))
        targets.append(TensorLayout(name, shape, "bfloat16", tuple(wanted)))
    src, dst = Layout(tuple(sources)), Layout(tuple(targets))
    plan = reshard(src, dst)
    for wanted_tensor in dst.tensors:
        for rank, box in wanted_tensor.boxes:
            copies = [c for c in plan.receives(rank) if c.tensor == wanted_tensor.name]
            written = [element for c in copies for element in elements(c.box)]
            assert len(written) == len(set(written))
            assert set(written) == elements(box)
            for c in copies:
                holders = [b for r, b in src.by_name[c.tensor].boxes if r == c.source]
                assert any(elements(c.box) <= elements(b) for b in holders)
    assert plan.nbytes == 2 * sum(c.box.size for c in plan.copies)
    assert plan == reshard(Layout.from_json(json.loads(json.dumps(src.to_json()))), dst)
    assert sum(len(plan.sends(rank)) for rank in range(6)) == len(plan.copies)


def test_replicas_share_the_sending() -> None:
    src = Layout.whole([(f"t{i}", (10, 10), "float32") for i in range(8)], ranks=4)
    plan = reshard(src, src.replicated(2))
    assert [len(plan.sends(rank)) for rank in range(4)] == [4, 4, 4, 4]
    assert len(plan.receives(0)) == len(plan.receives(1)) == 8


def test_whole_to_whole_is_one_copy_per_tensor_in_order() -> None:
    src = Layout.whole([("b", (2, 3), "float32"), ("a", (), "int64"), ("empty", (0, 3), "int8")])
    plan = reshard(src, src.replicated(1))
    assert [(c.tensor, c.box) for c in plan.copies] == [("b", Box((0, 0), (2, 3))), ("a", Box((), ()))]


def test_all_faults_are_listed_at_once() -> None:
    def one(name: str, shape: tuple[int, ...], dtype: str = "float32", box: Box | None = None) -> TensorLayout:
        return TensorLayout(name, shape, dtype, ((0, box or Box.whole(shape)),))

    half = Box((0,), (2,))
    src = Layout((one("shape", (4,)), one("dtype", (4,)), one("part", (4,), box=half), one("unwanted", (1,))))
    dst = Layout((one("shape", (5,)), one("dtype", (4,), "float16"), one("part", (4,)), one("unknown", (1,))))
    with pytest.raises(LayoutError) as caught:
        reshard(src, dst)
    text = str(caught.value)
    assert "shape: float32 (4,) in the source, float32 (5,) in the destination" in text
    assert "dtype: float32 (4,) in the source, float16 (4,) in the destination" in text
    assert "part: [2:4] for rank 0 is held by no source rank" in text
    assert "unwanted: only in the source" in text
    assert "unknown: only in the destination" in text


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (TensorLayout("t", (4,), "float32", ((0, Box((0,), (5,))),)), r"box \[0:5\] of rank 0 outside shape \(4,\)"),
        (TensorLayout("t", (4,), "float32", ((0, Box((0, 0), (4, 4))),)), "outside shape"),
        (TensorLayout("t", (4,), "object", ((0, Box((0,), (4,))),)), "dtype 'object'"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(tensor: TensorLayout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        reshard(Layout((tensor,)), Layout((tensor,)))


def test_a_name_twice_is_refused() -> None:
    tensor = TensorLayout("t", (4,), "float32", ((0, Box((0,), (4,))),))
    with pytest.raises(LayoutError, match="t: 2 times in the source"):
        reshard(Layout((tensor, tensor)), Layout((tensor,)))
