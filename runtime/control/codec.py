"""Packables to MessagePack and back, strictly: what does not fit its annotation to the letter is refused.

On the wire a Packable is an array of its class name and its fields in order; a NamedTuple and a tuple are arrays, a
dict is a map with string keys. Nothing is constructed but the classes that the annotation names: no extension types,
no names looked up. msgspec compiles annotations, once, and those of these are read: str, int (64 bits, no bool), float
(an int will do), bool, None, Literal, tuple, dict[str, …], NamedTuple, Packable, and unions that can be told apart.

Why a message was refused, in words: which field was given what, and what was needed.
"""

import re
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

from penstock.runtime.packable import Packable

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


MAX_BYTES = 4 << 20
"""Of one packed value, in either direction: metadata only, so ten times what a large batch needs."""

T = TypeVar("T")

_PLAIN = (
    inspect.StrType,
    inspect.IntType,
    inspect.FloatType,
    inspect.BoolType,
    inspect.NoneType,
    inspect.LiteralType,
)


class MessageError(ValueError):
    """Bytes that are no message: a peer's fault. Says which field was given what, and what was needed."""


class Codec(Generic[T]):
    """Packs and unpacks values of one annotation, such as a union of Packables. `label` names it in errors."""

    def __init__(self, annotation: Any, label: str) -> None:
        """Raises TypeError for an annotation that the module's docstring does not list."""
        self._label = label
        self._type = inspect.type_info(annotation)
        _check_readable(self._type)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(annotation).decode

    def pack(self, value: T) -> bytes:
        """Raises MessageError when the value is larger than any reader takes, TypeError when it is no message."""
        try:
            data: bytes = self._encode(value)
        except UnicodeEncodeError:
            data = self._encode(_escaped(msgspec.to_builtins(value)))
        if len(data) > MAX_BYTES:
            raise MessageError(f"{self._label}: given {len(data)} bytes, needed at most {MAX_BYTES}")
        return data

    def unpack(self, data: bytes) -> T:
        """Raises MessageError for anything but what `pack` could have made."""
        if len(data) > MAX_BYTES:
            raise MessageError(f"{self._label}: given {len(data)} bytes, needed at most {MAX_BYTES}")
        try:
            value: T = self._decode(data)
            packed = self._encode(value)
            if packed != data:
                _check_whole(msgspec.msgpack.decode(data), msgspec.msgpack.decode(packed), "$")
        except msgspec.ValidationError as error:
            raise MessageError(described(str(error), self._type, self._label, data)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MessageError(f"{self._label}: not MessagePack ({error})") from error
        return value


def _check_readable(kind: inspect.Type) -> None:
    match kind:
        case inspect.StructType(cls=cls, fields=fields) if issubclass(cls, Packable):
            parts = [field.type for field in fields]
        case inspect.NamedTupleType(fields=fields):
            parts = [field.type for field in fields]
        case inspect.TupleType(item_types=types) | inspect.UnionType(types=types):
            parts = list(types)
        case inspect.VarTupleType(item_type=part) | inspect.DictType(key_type=inspect.StrType(), value_type=part):
            parts = [part]
        case _ if isinstance(kind, _PLAIN):
            parts = []
        case _:
            raise TypeError(f"codec: given {kind}, needed an annotation that its docstring lists")
    for part in parts:
        _check_readable(part)


def _check_whole(given: Any, whole: Any, path: str) -> None:
    """Refuse what leaves out a field that has a default, which msgspec fills in; other spellings of a value will do."""
    if isinstance(whole, dict):
        for key, one in whole.items():
            _check_whole(given[key], one, f"{path}[...]")
    elif isinstance(whole, list):
        if len(given) != len(whole):
            text = f"Expected `array` of length {len(whole)}, got {len(given)}"
            raise msgspec.ValidationError(f"{text} - at `{path}`")
        for index, one in enumerate(whole):
            _check_whole(given[index], one, f"{path}[{index}]")


def _escaped(plain: Any) -> Any:
    """Text that UTF-8 cannot hold (a file's name may be such) with backslashes."""
    match plain:
        case str():
            return plain.encode(errors="backslashreplace").decode()
        case list() | tuple():
            return [_escaped(one) for one in plain]
        case dict():
            return {_escaped(key): _escaped(one) for key, one in plain.items()}
    return plain
