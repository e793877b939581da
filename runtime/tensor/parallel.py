"""The layout of a model on a mesh: tensor parallelism by a table, FSDP2 on dimension 0, pipeline stages. Pure.

The table and the stages are data that come with the model (`nodes.model.parallel` has those of the Llama family).
"""

from collections.abc import Iterable, Mapping, Sequence

from penstock.graph.sharding import FSDP, STAGE, TENSOR, Rule, rule_of
from penstock.runtime.tensor.layout import Layout, LayoutError, TensorLayout
from penstock.runtime.tensor.mesh import Mesh, Placement, Split


def sharded(
    tensors: Iterable[tuple[str, Sequence[int], str]],
    mesh: Mesh,
    rules: Mapping[str, Rule] | None = None,
    stages: Mapping[str, Sequence[int]] | None = None,
    hosts: Sequence[str] = (),
) -> Layout:
    """Every (name, shape, dtype) on a mesh whose axes are named as in `graph.sharding`, in any order.

    `rules` are for `rule_of`; `stages` gives the stages that hold a tensor.
    Raises `LayoutError` with every tensor that the mesh needs a rule or a stage for and that has none.
    """
    axes = dict(mesh.axes)
    faults: list[str] = []
    placements: dict[Placement, Placement] = {}
    layouts = []
    for name, shape, dtype in tensors:
        splits: tuple[Split, ...] = ()
        only: tuple[tuple[str, tuple[int, ...]], ...] = ()
        if TENSOR in axes:
            try:
                rule = rule_of(name, rules or {})
                splits = () if rule is None else (Split(TENSOR, *rule),)
            except LookupError as error:
                faults.append(f"  {error.args[0]}")
        if FSDP in axes and len(shape):
            splits = (*splits, Split(FSDP, 0))
        if STAGE in axes:
            if stages is None or name not in stages:
                faults.append(f"  {name}: no stage")
            else:
                only = ((STAGE, tuple(stages[name])),)
        placement = Placement(mesh, splits, only)
        layouts.append(TensorLayout(name, tuple(shape), dtype, placements.setdefault(placement, placement)))
    if faults:
        raise LayoutError("\n".join([f"no layout on {mesh}:", *faults]))
    return Layout(tuple(layouts), tuple(hosts))
