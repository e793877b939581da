"""The layout of a model on a mesh: tensor parallelism by a table, FSDP2 on dimension 0, pipeline stages. Pure.

The table and the stages are data that come with the model (`nodes.model.parallel` has those of the Llama family).
"""

from collections.abc import Iterable, Mapping, Sequence

from penstock.runtime.tensor.layout import Layout, LayoutError, TensorLayout
from penstock.runtime.tensor.mesh import Mesh, Placement, Split

STAGE, FSDP, TENSOR = "pp", "fsdp", "tp"
"""The axes of a mesh that cut; over any other one tensors are replicated."""

Rule = tuple[int, int] | None
"""The dimension that tensor parallelism cuts, and into how many units at most (0: no limit); None: replicated."""


def sharded(
    tensors: Iterable[tuple[str, Sequence[int], str]],
    mesh: Mesh,
    rules: Mapping[str, Rule] | None = None,
    stages: Mapping[str, Sequence[int]] | None = None,
    hosts: Sequence[str] = (),
) -> Layout:
    """Every (name, shape, dtype) on a mesh whose axes are named as above, in any order.

    The rule of a tensor is that of the longest key its name ends with. `stages` gives the stages that hold it.
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
            own = [key for key in rules or {} if name.endswith(key)]
            rule = rules[max(own, key=len)] if rules and own else None
            splits = () if rule is None else (Split(TENSOR, *rule),)
            faults += [] if own else [f"  {name}: no rule for tensor parallelism"]
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
