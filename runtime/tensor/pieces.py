"""The state of a carried value on another mesh than that it was written on: from the files of all ranks, by `reshard`.

A state's tensors are named KIND.TENSOR, such as exp_avg.model.norm.weight, where TENSOR is a logical tensor of the
layout: all of them are cut as it is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.runtime.tensor.files import StateError, StateFile
from penstock.runtime.tensor.layout import Copy, Layout
from penstock.runtime.tensor.reshard import reshard


def assemble(
    files: Sequence[StateFile], prefix: str, saved: Layout | None, wanted: Layout | None, rank: int
) -> dict[str, Tensor]:
    """What `rank` holds in `wanted` of a state whose ranks wrote `files` in `saved`; None: whole on each rank.

    Raises LayoutError for layouts of other tensors, StateError for a file that lacks what its layout says.
    """
    known = saved or wanted
    assert known is not None
    source = saved or known.replicated(len(files))
    target = wanted or known.replicated(rank + 1)
    names = dict.fromkeys(name.removeprefix(prefix) for f in files for name in f.names if name.startswith(prefix))
    kinds = dict.fromkeys(kind for name in names if (kind := _kind(name, known)))
    found = {name: tensor for name, tensor in files[0].tensors(prefix).items() if not _kind(name, known)}
    copies = reshard(source, target).receives(rank)
    for kind in kinds:
        parts: dict[str, Tensor] = {}
        for copy in copies:
            _fill(parts, files[copy.source], f"{prefix}{kind}", source, target, copy)
        for tensor in target.tensors:
            empty = torch.empty(0, *tensor.shape[1:])
            found[f"{kind}{tensor.name}"] = parts.get(tensor.name, empty)
    return found


def _kind(name: str, layout: Layout) -> str:
    """The kind of a state's tensor, with its dot; "" for one that is no logical tensor's."""
    kind, dot, tensor = name.partition(".")
    return kind + dot if tensor in layout.by_name else ""


def _fill(parts: dict[str, Tensor], file: StateFile, prefix: str, source: Layout, target: Layout, copy: Copy) -> None:
    held = next(b for b in source.by_name[copy.tensor].held_by(copy.source) if (b & copy.box) == copy.box)
    name = f"{prefix}{copy.tensor}"
    if name not in file.names:
        raise StateError(f"{file.path}: {name} is missing, of which its layout says that {held} is there")
    piece = file.piece(name, copy.box.slices(held))
    (box,) = target.by_name[copy.tensor].held_by(copy.destination)
    if copy.tensor not in parts:
        parts[copy.tensor] = torch.empty(box.shape, dtype=piece.dtype)
    parts[copy.tensor][copy.box.slices(box)] = piece
