"""A receiving replica's side of a channel: its mesh, its layout, the plan that brings it there. Pure, without torch.

What a receiver needs to know of the sender travels as JSON: the layout and the rules by which a replica with an axis
"tp" cuts the tensors.
"""

from collections.abc import Mapping
from typing import Any

from penstock.graph.sharding import TENSOR, Axes, Rule
from penstock.runtime.tensor.convert import converted
from penstock.runtime.tensor.layout import Layout
from penstock.runtime.tensor.mesh import Mesh
from penstock.runtime.tensor.parallel import sharded
from penstock.runtime.tensor.plan import Plan
from penstock.runtime.tensor.reshard import reshard


def mesh_of(axes: Axes | None, ranks: int = 1) -> Mesh:
    """The mesh of a replica; without axes, `ranks` ranks that each hold everything."""
    return Mesh((("replica", ranks),) if axes is None else tuple((name, size) for name, size in axes))


def target_layout(source: Layout, wanted: Mapping[str, Rule], mesh: Mesh) -> Layout:
    """The same tensors on a receiving replica: cut over its axis "tp" by the rules, whole over any other; whole on
    each rank if there are no rules."""
    axes = tuple((name if name == TENSOR and size > 1 else f"{name} (whole)", size) for name, size in mesh.axes)
    return sharded([(t.name, t.shape, t.dtype) for t in source.tensors], Mesh(axes), wanted or {"": None})


def plan_of(description: Mapping[str, Any], mesh: Mesh) -> Plan:
    """The plan from a sender, whose description of its weights this is (`sync`), to a replica on `mesh`."""
    source, wire = Layout.from_json(description["layout"]), description["wire"]
    target = target_layout(source, rules_from_json(description["wanted"]), mesh)
    return reshard(converted(source, wire), converted(target, wire))


def rules_to_json(rules: Mapping[str, Rule]) -> dict[str, list[int] | None]:
    return {key: None if rule is None else list(rule) for key, rule in rules.items()}


def rules_from_json(data: Mapping[str, Any]) -> dict[str, Rule]:
    return {key: None if rule is None else (rule[0], rule[1]) for key, rule in data.items()}
