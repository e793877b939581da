"""Why a message was refused, in words: which field was given what, and what was needed."""

import re
from typing import Any

import msgspec
from msgspec import inspect

_LONGEST = 120
"""Characters of what was given: an error must not carry megabytes into a log."""


def described(text: str, kind: inspect.Type, label: str, data: bytes) -> str:
    """What msgspec said of `data`, of which a value of `kind` was needed, with names for a place such as `$[2][1]`."""
    what, _, path = text.rpartition(" - at ")
    try:
        raw = msgspec.msgpack.decode(data)
    except (ValueError, RecursionError):  # damaged further on, too
        raw = None
    name, place = label, _member(kind, raw)
    for index in map(int, re.findall(r"\[(\d+)\]", path)):
        part = _part(place, name, index)
        if part is None:
            break
        raw = raw[index] if isinstance(raw, list) else None
        name, place = part[0], _member(part[1], raw)
    return f"{name}: {(what or text)[:_LONGEST]}; needed {_needed(place)}"


def _member(kind: inspect.Type, raw: Any) -> inspect.Type:
    """The member of a union that was meant: the one with the tag that was given, else the union itself."""
    if isinstance(kind, inspect.UnionType) and isinstance(raw, list) and raw:
        return next((one for one in kind.types if getattr(one, "tag", None) == raw[0]), kind)
    return kind


def _part(kind: inspect.Type, name: str, index: int) -> tuple[str, inspect.Type] | None:
    """An item of an array: its name, that of a field if it is one, and its type. None for a tag."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields) if index:
            return f"{cls.__name__}.{fields[index - 1].name}", fields[index - 1].type
        case inspect.NamedTupleType(cls=cls, fields=fields):
            return f"{cls.__name__}.{fields[index].name}", fields[index].type
        case inspect.TupleType(item_types=types):
            return f"{name}[{index}]", types[index]
        case inspect.VarTupleType(item_type=one):
            return f"{name}[{index}]", one
    return None


def _needed(kind: inspect.Type) -> str:
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return f"{cls.__name__} of {len(fields)} fields"
        case inspect.NamedTupleType(cls=cls, fields=fields):
            return f"{cls.__name__} of {len(fields)} fields"
        case inspect.LiteralType(values=values):
            return " or ".join(map(repr, values))
        case inspect.UnionType(types=types):
            return " or ".join(
                one.cls.__name__ if isinstance(one, inspect.StructType) else _needed(one) for one in types
            )
    return type(kind).__name__.removesuffix("Type").lower()
