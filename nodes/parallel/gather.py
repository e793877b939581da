"""What ranks have found of their micro-batches, on every rank: JSON and tensors only, so that nothing is pickled.

All numbers travel as float64, in which those of every floating type are exact.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
Form = list[tuple[str, str, list[int]]]
"""(name, dtype, shape) of each tensor of a result; "" is the name of one that is no mapping's."""


def gather(results: Sequence[Any], device: torch.device) -> list[list[Any]]:
    """[rank][i]: result i of each rank of the default group; ranks may have different numbers of them.

    A result is a floating-point tensor, a mapping of such by name, or None. Raises TypeError for another.
    """
    leaves = [_leaves(result) for result in results]
    forms = [
        None if each is None else [(name, str(leaf.dtype), list(leaf.shape)) for name, leaf in each.items()]
        for each in leaves
    ]
    parts = [leaf.detach().double().reshape(-1) for each in leaves if each is not None for leaf in each.values()]
    own = torch.cat([torch.zeros(0, dtype=torch.float64, device=device), *parts])
    heads = _all_gather(torch.frombuffer(bytearray(json.dumps(forms).encode()), dtype=torch.uint8).to(device))
    values = _all_gather(own)
    return [_rebuilt(json.loads(bytes(head.tolist())), value) for head, value in zip(heads, values, strict=True)]


def _all_gather(own: Tensor) -> list[Tensor]:
    """The vectors of all ranks, whatever their lengths."""
    length = torch.tensor([len(own)], device=own.device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    longest = max(int(each) for each in lengths)
    every = [own.new_empty(longest) for _ in lengths]
    dist.all_gather(every, torch.nn.functional.pad(own, (0, longest - len(own))))
    return [each[: int(length)] for each, length in zip(every, lengths, strict=True)]


def _leaves(result: Any) -> dict[str, Tensor] | None:
    if result is None:
        return None
    leaves = dict(result) if isinstance(result, Mapping) else {"": result}
    for leaf in leaves.values():
        if not isinstance(leaf, Tensor) or str(leaf.dtype) not in _DTYPES:
            given = str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"result of a micro-batch: given {given}, needed a tensor of {', '.join(_DTYPES)}")
    return leaves


def _rebuilt(forms: Sequence[Form | None], values: Tensor) -> list[Any]:
    found: list[Any] = []
    for form in forms:
        leaves = {}
        for name, dtype, shape in form or ():
            count = torch.Size(shape).numel()
            leaves[name] = values[:count].view(shape).to(_DTYPES[dtype])
            values = values[count:]
        found.append(None if form is None else leaves.get("", leaves))
    return found
