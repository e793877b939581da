"""How a carried value's weights lie on the ranks that send them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.graph.protocols import Carried
from penstock.graph.sharding import Rule, Sharded, Sharding
from penstock.runtime.tensor.layout import ITEMSIZE, Layout, LayoutError
from penstock.runtime.tensor.mesh import Mesh
from penstock.runtime.tensor.parallel import sharded
from penstock.runtime.tensor.proof import Add

_DTYPES = tuple(ITEMSIZE)


def source_layout(carried: Carried, ranks: int, add: Add) -> tuple[Layout, Mapping[str, Rule]]:
    """How the value's weights lie on its ranks, and the rules that receivers cut them by.

    The ranks tell each other the dtypes (through `add`), since a rank may hold nothing of a tensor. Raises
    `LayoutError` for what cannot travel, or does not lie as the sharding says.
    """
    tensors = carried.weights()
    if not isinstance(carried, Sharded):
        entries = [(name, tuple(t.shape), _dtype(t)) for name, t in tensors.items()]
        _require_known(entries)
        return Layout.whole(entries, ranks), {}
    sharding = carried.sharding()
    mesh = Mesh(tuple(sharding.mesh))
    if mesh.size != ranks:
        raise LayoutError(f"sharding over {mesh}: given {mesh.size} ranks, needed the replica's {ranks}")
    own = [(name, tuple(t.shape), _dtype(t)) for name, t in tensors.items() if t.numel()]
    _require_known(own)
    dtypes = _agreed({name: dtype for name, _, dtype in own}, sharding, add)
    entries = [(name, tuple(shape), dtypes[name]) for name, shape in sharding.shapes.items()]
    return sharded(entries, mesh, sharding.rules, sharding.stages), sharding.wanted


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _require_known(entries: Sequence[tuple[str, tuple[int, ...], str]]) -> None:
    unknown = [f"{name} ({dtype})" for name, _, dtype in entries if dtype not in ITEMSIZE]
    if unknown:
        raise LayoutError(f"dtypes that do not travel: {', '.join(unknown)}; needed one of {', '.join(ITEMSIZE)}")


def _agreed(own: Mapping[str, str], sharding: Sharding, add: Add) -> dict[str, str]:
    """The dtype of every tensor, from the ranks that hold some of it: how many say each dtype, added up."""
    surplus = own.keys() - sharding.shapes.keys()
    if surplus:
        raise LayoutError(f"weights that the sharding does not name: {', '.join(sorted(surplus))}")
    votes = torch.zeros(len(sharding.shapes), len(_DTYPES), dtype=torch.int64)
    for row, name in enumerate(sharding.shapes):
        if name in own:
            votes[row, _DTYPES.index(own[name])] = 1
    found = [[dtype for dtype, count in zip(_DTYPES, row, strict=True) if count] for row in add(votes).tolist()]
    wrong = [
        f"  {name}: {' and '.join(dtypes) or 'on no rank'}"
        for name, dtypes in zip(sharding.shapes, found, strict=True)
        if len(dtypes) != 1
    ]
    if wrong:
        raise LayoutError("\n".join(["the ranks do not hold one dtype of each tensor:", *wrong]))
    return {name: dtypes[0] for name, dtypes in zip(sharding.shapes, found, strict=True)}
