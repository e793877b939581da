"""Hypothesis strategies for random layouts, listed or described by random meshes."""

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from penstock.runtime.tensor.layout import Holding, Layout, ListedRegions, Mesh, Placement, Region, Split, TensorLayout

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def regions(draw: Any, shape: tuple[int, ...]) -> Region:
    edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in edges), tuple(b for _, b in edges))


@st.composite
def grids(draw: Any, shape: tuple[int, ...]) -> list[Region]:
    """The cells of an uneven grid that covers the shape."""
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    ranges = [list(itertools.pairwise(c)) or [(0, 0)] for c in cuts]
    return [Region(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in itertools.product(*ranges)]


meshes = st.lists(st.sampled_from(["pp", "dp_replicate", "fsdp", "tp"]), unique=True, max_size=3).flatmap(
    lambda names: st.tuples(*[st.tuples(st.just(n), st.integers(1, 4)) for n in names]).map(Mesh)
)


@st.composite
def placements(draw: Any, mesh: Mesh, shape: tuple[int, ...]) -> Placement:
    """Splits by some axes in any order, some in units, and perhaps limited to pipeline stages."""
    splits: list[Split] = []
    for axis, size in draw(st.permutations(mesh.axes)):
        if axis == "pp" or not shape or draw(st.booleans()):
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        free = all(split.dim != dim for split in splits)
        units = [u for u in range(1, 8) if free and shape[dim] % u == 0 and (u >= size or size % u == 0)]
        splits.append(Split(axis, dim, draw(st.sampled_from([0, *units]))))
    stages = mesh.extent("pp")
    only = (
        [("pp", tuple(sorted(draw(st.sets(st.integers(0, stages - 1), min_size=1)))))]
        if "pp" in dict(mesh.axes)
        else []
    )
    return Placement(mesh, tuple(splits), tuple(only))


@st.composite
def layouts_of(
    draw: Any, tensors: Sequence[tuple[str, tuple[int, ...], str]], *, covering: bool, listed: bool = True
) -> Layout:
    """Tensors on a random mesh, or listed: as cells on one to three ranks if they must be covered, else one region for
    each of some ranks. Perhaps with hosts.
    """
    mesh = draw(meshes)
    held: list[Holding] = []
    for _, shape, _ in tensors:
        if not listed or draw(st.integers(0, 3)):
            held.append(draw(placements(mesh, shape)))
        elif covering:
            cells = draw(grids(shape))
            holders = [draw(st.sets(st.integers(0, 3), min_size=1, max_size=3)) for _ in cells]
            held.append(
                ListedRegions(tuple((r, cell) for cell, own in zip(cells, holders, strict=True) for r in sorted(own)))
            )
        else:
            held.append(
                ListedRegions(tuple((r, draw(regions(shape))) for r in draw(st.sets(st.integers(0, 5), max_size=3))))
            )
    layout = Layout(tuple(TensorLayout(*tensor, own) for tensor, own in zip(tensors, held, strict=True)))
    hosts = draw(st.one_of(st.just(()), st.tuples(*[st.sampled_from("ab")] * layout.ranks)))
    return Layout(layout.tensors, hosts)
