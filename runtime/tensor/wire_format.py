"""The format in which each tensor of a weight channel is sent, and the layouts that follow from it. Pure, no torch:
`quantise` does the conversion.

A wire format is a dtype of floats, or one of `FORMATS`, which quantise. A matrix [out, in] is then sent as two ordinary
logical tensors: NAME in eight bits, and NAME.scale in float32, with a scale per row, [out], or per block,
[out / 128, in / 128] rounded up. A rank holds the scales of the rows or blocks that its region touches, so plan and
checksums need not know about quantisation.

A receiving replica's layout (`target_layout`) and plan (`SyncLayouts`) follow from its mesh and the sender's
description of its weights, as JSON: the layout, the rules by which a replica with an axis "tp" splits the tensors, and
the number of a layer's experts, which a replica with an axis "ep" divides among its ranks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.graph.protocols import EXPERT, TENSOR, Rule
from penstock.runtime.tensor.layout import (
    Holding,
    Layout,
    LayoutError,
    ListedRegions,
    Mesh,
    Region,
    TensorLayout,
    sharded,
)
from penstock.runtime.tensor.reshard import ReshardPlan, distinct_regions, reshard

# The suffix of the name of a matrix's scales.
SCALE = ".scale"

# Matrices with one of these in their names are not quantised: embeddings, norms, heads over words or values, and the
# routers of experts, which are small and whose choices would change.
KEPT = ("embed", "norm", "head", "score", "mlp.gate.")

FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Format:
    """Eight-bit elements of `dtype`, with magnitudes up to `limit`, times a scale: that of their row, or of their
    block × block elements if `block` is not 0. Blocks begin at the first element of the whole matrix.
    """

    dtype: str
    limit: float
    block: int = 0

    def scales(self, region: Region) -> Region:
        """The scales of the rows or blocks that a region of the matrix touches; none for an empty region."""
        dims, tile = (2, self.block) if self.block else (1, 1)
        if not region.size:
            return Region((0,) * dims, (0,) * dims)
        start, stop = region.start[:dims], region.stop[:dims]
        return Region(tuple(a // tile for a in start), tuple(-(-b // tile) for b in stop))

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of all scales of a matrix."""
        return self.scales(Region.whole(shape)).shape


# int8 and fp8 with a scale per row, fp8 with one per 128 × 128 block (DeepSeek-V3, section 3.3).
FORMATS = {
    "int8": Format("int8", 127.0),
    "fp8": Format("float8_e4m3fn", 448.0),
    "fp8_block": Format("float8_e4m3fn", 448.0, 128),
}


def converted(layout: Layout, wire: str) -> Layout:
    """The layout that is sent: `layout` itself if `wire` is ""; floats in the dtype `wire`; or, if `wire` is one of
    `FORMATS`, each matrix that `quantises` as elements and scales. Integer tensors do not change. Raises `LayoutError`
    for an unknown format, and for names that would occur twice.
    """
    if not wire:
        return layout
    format = FORMATS.get(wire)
    if format is None and wire not in FLOATS:
        raise LayoutError(f"wire format: given {wire!r}, needed {', '.join(FLOATS)} or {', '.join(FORMATS)}")
    found: list[TensorLayout] = []
    held: dict[int, Holding] = {}
    for t, index in zip(layout.tensors, layout.signatures[1], strict=True):
        if format and quantises(t):
            # Once per signature: lists of regions grow with the number of ranks.
            if index not in held:
                held[index] = scale_holding(t.held, t.shape, format)
            found.append(replace(t, dtype=format.dtype))
            found.append(TensorLayout(t.name + SCALE, format.scale_shape(t.shape), "float32", held[index]))
        else:
            found.append(replace(t, dtype=wire) if not format and t.dtype in FLOATS else t)
    times = Counter(t.name for t in found)
    if twice := sorted(name for name, count in times.items() if count > 1 and name.endswith(SCALE)):
        raise LayoutError(f"{', '.join(twice)}: there already, needed for the scales of a quantised matrix")
    return Layout(tuple(found), layout.hosts)


def quantises(t: TensorLayout) -> bool:
    """True if a wire format that quantises quantises this tensor: a non-empty matrix of floats without any of `KEPT` in
    its name."""
    matrix = len(t.shape) == 2 and 0 not in t.shape and t.dtype in FLOATS
    return matrix and not any(word in t.name for word in KEPT)


def cut_through(held: Holding, shape: tuple[int, ...], format: Format) -> bool:
    """True if any row or block lies in several regions of this holding, so that their holders must agree on its scale.
    Equal on every rank.
    """
    distinct = distinct_regions(held, shape)
    touched = sum(format.scales(distinct.region(index)).size for index in range(len(distinct.ranks)))
    return touched > Region.whole(format.scale_shape(shape)).size


def scale_holding(held: Holding, shape: tuple[int, ...], format: Format) -> ListedRegions:
    """Which rank holds which scales."""
    edges = held.edges(shape)
    rows = zip(edges.ranks.tolist(), edges.start.tolist(), edges.stop.tolist(), strict=True)
    return ListedRegions(tuple(dict.fromkeys((rank, format.scales(Region(tuple(a), tuple(b)))) for rank, a, b in rows)))


def target_layout(source: Layout, wanted: Mapping[str, Rule], mesh: Mesh, experts: int) -> Layout:
    """The same tensors on a receiving replica: split over its axis "tp" by the rules, each of a layer's `experts` at
    one place of its axis "ep", whole over any other axis; whole on each rank if there are no rules and no experts."""
    # Other axes do not split a receiver's weights.
    own = {TENSOR, EXPERT} if experts else {TENSOR}
    axes = tuple((name if name in own and size > 1 else f"{name} (whole)", size) for name, size in mesh.axes)
    tensors = [(t.name, t.shape, t.dtype) for t in source.tensors]
    return sharded(tensors, Mesh(axes), wanted or {"": None}, experts=experts, sharding_axes=())


class SyncLayouts(NamedTuple):
    """The layouts of what is sent, of what a replica receives, and of what its readers get, in their own dtypes."""

    sent: Layout
    received: Layout
    read: Layout

    @staticmethod
    def of(description: Mapping[str, Any], mesh: Mesh) -> "SyncLayouts":
        """The layouts from a sender, with this description of its weights (`weight_sync`), to a replica on `mesh`."""
        source, wire = Layout.from_json(description["layout"]), description["wire"]
        wanted = {key: None if rule is None else (rule[0], rule[1]) for key, rule in description["wanted"].items()}
        read = target_layout(source, wanted, mesh, description["experts"])
        return SyncLayouts(converted(source, wire), converted(read, wire), read)

    @property
    def plan(self) -> ReshardPlan:
        return reshard(self.sent, self.received)


def rules_to_json(rules: Mapping[str, Rule]) -> dict[str, list[int] | None]:
    return {key: None if rule is None else list(rule) for key, rule in rules.items()}
