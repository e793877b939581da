"""Boxes as sets of elements; layouts as values that travel."""

import itertools
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.tensor.layout import Layout, Mesh, Region, sharded

from .layouts import layouts_of, regions, shapes

Element = tuple[int, ...]


def elements(region: Region) -> set[Element]:
    return set(itertools.product(*(range(a, b) for a, b in zip(region.start, region.stop, strict=True))))


@settings(deadline=None)
@given(st.data())
def test_intersection_and_difference_are_those_of_sets(data: Any) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(regions(shape)), data.draw(regions(shape))
    assert elements(a & b) == elements(a) & elements(b)
    rest = a.minus(b)
    assert set().union(*map(elements, rest)) == elements(a) - elements(b)
    assert sum(piece.size for piece in rest) == len(elements(a) - elements(b))
    assert a.size == len(elements(a))


@settings(deadline=None)
@given(st.data())
def test_slabs_are_the_box_once_and_nearly_equal(data: Any) -> None:
    region, parts = data.draw(regions(data.draw(shapes))), data.draw(st.integers(1, 9))
    slabs = region.cut(parts)
    assert len(slabs) == (parts if any(extent >= parts for extent in region.shape) else 1)
    assert set().union(*map(elements, slabs)) == elements(region)
    assert sum(slab.size for slab in slabs) == region.size
    extents = [[slab.shape[d] for slab in slabs] for d in range(len(region.shape))]
    assert all(max(along) - min(along) <= 1 for along in extents)


@settings(deadline=None)
@given(st.data())
def test_a_layout_comes_back_from_json_equal(data: Any) -> None:
    tensors = [(f"t{i}", data.draw(shapes), "int8") for i in range(data.draw(st.integers(0, 4)))]
    layout = data.draw(layouts_of(tensors, covering=True, listed=False))
    loaded = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert loaded == layout
    assert loaded.to_json() == layout.to_json()
    assert loaded.ranks == layout.ranks
    for rank in range(layout.ranks):
        assert [t.held_by(rank) for t in loaded.tensors] == [t.held_by(rank) for t in layout.tensors]


def test_a_described_layout_is_written_once_per_signature_whatever_the_number_of_ranks() -> None:
    tensors = [(f"layers.{i}.weight", (64, 64), "bfloat16") for i in range(100)]
    few, many = (sharded(tensors, Mesh((("fsdp", ranks),))) for ranks in (2, 4096))
    assert len(json.dumps(many.to_json())) - len(json.dumps(few.to_json())) == len("4096") - len("2")
    assert len(many.to_json()["signatures"]) == 1


def test_ranks_that_hold_nothing_count() -> None:
    assert Layout.whole([], ranks=3).ranks == 0
    assert Layout((), ("a", "b")).ranks == 2
    assert Layout.whole([("t", (0,), "int8")], ranks=3).ranks == 3
