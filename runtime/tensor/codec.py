"""Encodes a value of an edge as tensors and JSON, and decodes it.

A dataclass is encoded by its fields: a tensor or a numpy array becomes a tensor on the CPU; a tuple of scalars, and
anything that JSON keeps unchanged, goes into `meta`. A tensor or a scalar alone counts as a value with one field. The
decoded value is an instance of the class that the graph declares: a message never names a class.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from penstock.runtime.tensor.layout import ITEMSIZE

# The dtypes that can be sent, by the names that layouts and messages use.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_SCALARS = {str, int, float, bool, type(None)}
_FIELDS: dict[type, tuple[str, ...]] = {}
_WHOLE = "value"  # the field's name when the value is no dataclass

Meta = dict[str, Any]
T = TypeVar("T")


class CodecError(TypeError):
    """A value that cannot cross processes, or tensors and meta that do not make the declared class."""


def encode(value: object) -> tuple[list[Tensor], Meta]:
    """Encode `value` as contiguous CPU tensors (copied only if needed) and a JSON-able description.

    `meta` holds "tensors" (name, dtype and shape of each, in order), "plain" (JSON values by name) and "tuples"
    (the names among them that were tuples).
    """
    tensors: list[Tensor] = []
    plain: dict[str, Any] = {}
    meta: Meta = {"tensors": [], "plain": plain, "tuples": []}
    for name, item in _parts(value):
        try:
            tensor = _as_tensor(item)
        except (TypeError, ValueError) as error:
            raise CodecError(f"{type(value).__name__}.{name}: {error}") from error
        if tensor is not None:
            tensors.append(tensor)
            meta["tensors"].append((name, NAMES[tensor.dtype], tuple(tensor.shape)))
        else:
            plain[name] = _as_json(item, f"{type(value).__name__}.{name}")
            if type(item) is tuple:
                meta["tuples"].append(name)
    return tensors, meta


def decode(cls: type[T], tensors: Sequence[Tensor], meta: Mapping[str, Any]) -> T:
    """The inverse of `encode`: an instance of `cls` that uses the tensors without a copy."""
    found: dict[str, Any] = dict(meta["plain"])
    found.update((name, tuple(found[name])) for name in meta["tuples"])
    found.update((entry[0], tensor) for entry, tensor in zip(meta["tensors"], tensors, strict=True))
    names = _field_names(cls)
    if found.keys() != set(names):
        raise CodecError(f"{cls.__name__}: given the fields {sorted(found)}, needed {sorted(names)}")
    if is_dataclass(cls):
        return cast(T, cls(**found))
    value = found[_WHOLE]
    # A float such as 7.0 may come back from JSON as an integer.
    if not isinstance(value, cls) and not (cls is float and type(value) is int):
        raise CodecError(f"given a {type(value).__name__}, needed a {cls.__name__}")
    return cast(T, value)


def _field_names(cls: type) -> tuple[str, ...]:
    if cls not in _FIELDS:  # cached: the look-up takes as long as a copy of a small value
        _FIELDS[cls] = tuple(f.name for f in fields(cls) if f.init) if is_dataclass(cls) else (_WHOLE,)
    return _FIELDS[cls]


def _parts(value: object) -> list[tuple[str, Any]]:
    if not is_dataclass(value):
        return [(_WHOLE, value)]
    return [(name, getattr(value, name)) for name in _field_names(type(value))]


def _as_tensor(item: object) -> Tensor | None:
    """`item` as a contiguous tensor on the CPU outside autograd; None if it is no array."""
    if isinstance(item, np.ndarray):
        item = torch.from_numpy(item.copy())  # a copy is writable and has no negative strides
    if not isinstance(item, Tensor):
        return None
    if item.dtype not in NAMES or item.layout is not torch.strided:
        raise CodecError(f"given a {item.dtype} tensor ({item.layout}), needed a dense one of {', '.join(ITEMSIZE)}")
    return item.detach().cpu().contiguous()


def _as_json(item: Any, where: str) -> Any:
    """`item`, if JSON keeps it unchanged, except that a tuple becomes a list. Raises CodecError otherwise."""
    kind = type(item)
    if kind in _SCALARS:
        return item
    if kind is tuple and set(map(type, item)) <= _SCALARS:
        return item
    if isinstance(item, np.generic):
        return item.item()
    try:
        same = json.loads(json.dumps(item)) == (list(item) if kind is tuple else item)
    except (TypeError, ValueError):
        same = False
    if not same:
        given = f"{where}: given {kind.__name__} {item!r:.80}"
        raise CodecError(f"{given}, needed a tensor, an array, a tuple of scalars or a JSON value")
    return item
