"""Frozen dataclasses to MessagePack and back, strictly: what does not fit its annotation to the letter is refused.

On the wire a dataclass is an array of its class name and its fields in order; a NamedTuple and a tuple are arrays, a
dict is a map with string keys. Nothing is constructed but the classes that the annotation names: no extension
types, no names looked up. Annotations are compiled once into nested closures, and read: str, int (64 bits, no
bool), float (an int will do), bool, None, Literal, tuple, dict[str, …], NamedTuple, dataclass, unions of these with
at most one member that is not a dataclass, and Any for JSON.
"""

import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, Generic, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

MAX_BYTES = 4 << 20
"""Of one packed value, in either direction: metadata only, so ten times what a large batch needs."""
MAX_DEPTH = 32
"""Of nested JSON inside a message."""
MAX_ITEMS = 1 << 16
"""Of one array or map."""

T = TypeVar("T")
Check = Callable[[Any], Any]
"""Turns what MessagePack gave into the value that the annotation asks for; raises MessageError."""


class MessageError(ValueError):
    """Bytes that are no message: a peer's fault. Says which field was given what, and what was needed."""


class Codec(Generic[T]):
    """Packs and unpacks values of one annotation, such as a union of dataclasses. `label` names it in errors."""

    def __init__(self, annotation: Any, label: str) -> None:
        self._label = label
        self._check = _compile(annotation, label)

    def pack(self, value: T) -> bytes:
        """Raises MessageError when the value is larger than any reader takes, TypeError when it is no message."""
        data: bytes = msgpack.packb(value, default=_parts, unicode_errors="backslashreplace")
        if len(data) > MAX_BYTES:
            raise MessageError(f"{self._label}: given {len(data)} bytes, needed at most {MAX_BYTES}")
        return data

    def unpack(self, data: bytes) -> T:
        """Raises MessageError for anything but what `pack` could have made."""
        if len(data) > MAX_BYTES:
            raise MessageError(f"{self._label}: given {len(data)} bytes, needed at most {MAX_BYTES}")
        try:
            raw = msgpack.unpackb(data, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=0)
        # Whatever is wrong with the bytes, msgpack says it with one of these; RecursionError is a ValueError there.
        except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
            raise MessageError(f"{self._label}: not MessagePack ({error})") from error
        value: T = self._check(raw)
        return value


# Packing --------------------------------------------------------------------------------------------------

_PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


def _parts(value: object) -> tuple[Any, ...]:
    """MessagePack's question about a value it does not know: a dataclass as its name and its fields."""
    cls = type(value)
    parts = _PARTS.get(cls)
    if parts is None:
        if not is_dataclass(cls):
            raise TypeError(f"given a {cls.__name__}, needed a dataclass, a tuple, a dict or a plain value")
        parts = _PARTS[cls] = _splitter(cls.__name__, [f.name for f in fields(cls)])
    return parts(value)


def _splitter(tag: str, names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda value: (tag,)
    if len(names) == 1:
        name = names[0]
        return lambda value: (tag, getattr(value, name))
    get = attrgetter(*names)
    return lambda value: (tag, *get(value))


# Unpacking ------------------------------------------------------------------------------------------------

_CHECKS: dict[Any, Check] = {}
_EXACT = (str, bool, int)
"""Annotations whose values are of that very class."""


def _refuse(label: str, given: object, needed: str) -> NoReturn:
    raise MessageError(f"{label}: given {_short(given)}, needed {needed}")


def _short(given: object) -> str:
    """A peer's value, cut: an error must not carry megabytes into a log."""
    if isinstance(given, list | dict):
        return f"a {type(given).__name__} of {len(given)}"
    return f"{given[:40] if isinstance(given, str | bytes) else given!r:.40}"


def _compile(annotation: Any, label: str) -> Check:
    """The check of an annotation. Dataclasses and NamedTuples are compiled once, whoever refers to them."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in _EXACT:
        return _exactly(annotation, label)
    if annotation is float:
        return _float(label)
    if annotation is Any:
        return lambda value: _json(value, label, MAX_DEPTH)
    if origin is Literal:
        return _literal(args, label)
    if origin is tuple:
        return _sequence(args[0], label) if args[-1] is Ellipsis else _record(tuple, "tuple", None, args, (), label)
    if origin is dict and args[0] is str:
        return _mapping(args[1], label)
    if origin in (Union, types.UnionType):
        return _union(args, label)
    if annotation not in _CHECKS:
        _CHECKS[annotation] = _class(annotation)
    return _CHECKS[annotation]


def _class(cls: type) -> Check:
    if not is_dataclass(cls) and not hasattr(cls, "_fields"):
        raise TypeError(f"codec: given {cls}, needed an annotation that its docstring lists")
    hints = get_type_hints(cls)
    names = tuple(f.name for f in fields(cls)) if is_dataclass(cls) else tuple(cls._fields)
    tag = cls.__name__ if is_dataclass(cls) else None
    return _record(cls, cls.__name__, tag, tuple(hints[name] for name in names), names, cls.__name__)


def _exactly(cls: type, label: str) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not cls:
            _refuse(label, value, cls.__name__)
        return value

    return check


def _float(label: str) -> Check:
    def check(value: Any) -> Any:
        if type(value) is float:
            return value
        if type(value) is not int:
            _refuse(label, value, "float")
        return float(value)

    return check


def _literal(allowed: tuple[Any, ...], label: str) -> Check:
    needed = " or ".join(map(repr, allowed))

    def check(value: Any) -> Any:
        for one in allowed:
            if type(value) is type(one) and value == one:
                return one
        _refuse(label, value, needed)

    return check


def _sequence(item: Any, label: str) -> Check:
    inner = _compile(item, f"an item of {label}")

    def check(value: Any) -> Any:
        if type(value) is not list:
            _refuse(label, value, "an array")
        return tuple(map(inner, value))

    return check


def _mapping(item: Any, label: str) -> Check:
    inner = _compile(item, f"a value of {label}")

    def check(value: Any) -> Any:
        if type(value) is not dict:
            _refuse(label, value, "a map")
        found = {}
        for key, one in value.items():
            if type(key) is not str:
                _refuse(label, key, "keys that are str")
            found[key] = inner(one)
        return found

    return check


def _record(
    cls: type, name: str, tag: str | None, annotations: tuple[Any, ...], names: tuple[str, ...], label: str
) -> Check:
    """An array of fixed length: a dataclass (with its tag), a NamedTuple, or a plain tuple."""
    labels = [f"{name}.{field}" for field in names] or [f"item {k} of {label}" for k in range(len(annotations))]
    first = 0 if tag is None else 1
    length = first + len(annotations)
    needed = f"{name} of {len(annotations)} fields"
    checks = [_compile(one, where) for one, where in zip(annotations, labels, strict=True)]
    places = list(zip(range(first, length), annotations, checks, strict=True))
    exact = [(place, one, check) for place, one, check in places if one in _EXACT]
    others = [(place, check) for place, one, check in places if one not in _EXACT]

    def check(value: Any) -> Any:
        if type(value) is not list or len(value) != length:
            _refuse(label, value, needed)
        if tag is not None and value[0] != tag:
            _refuse(label, value[0], needed)
        for place, kind, one in exact:  # compared here: most fields are of these, and a call would cost more
            if type(value[place]) is not kind:
                one(value[place])
        for place, one in others:
            value[place] = one(value[place])
        return tuple.__new__(cls, value) if tag is None else cls(*value[1:])

    return check


def _union(args: tuple[Any, ...], label: str) -> Check:
    """Dataclasses are told apart by their tags; what has no tag goes to the one other member, None by identity."""
    tagged = {cls.__name__: _compile(cls, label) for cls in args if is_dataclass(cls) and isinstance(cls, type)}
    others = [cls for cls in args if not is_dataclass(cls) and cls is not types.NoneType]
    if len(others) > 1 or len(tagged) + len(others) + (types.NoneType in args) != len(args):
        raise TypeError(f"codec: {label}: members of a union that cannot be told apart: {args}")
    optional = types.NoneType in args
    other = _compile(others[0], label) if others else None
    needed = " or ".join([*tagged, *map(str, others), *["None"] * optional])

    def check(value: Any) -> Any:
        if value is None and optional:
            return None
        if type(value) is list and value and type(value[0]) is str:
            one = tagged.get(value[0])
            if one is not None:
                return one(value)
        if other is None:
            _refuse(label, value[0] if type(value) is list and value else value, needed)
        return other(value)

    return check


def _json(value: Any, label: str, depth: int) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth == 0:
        _refuse(label, value, f"JSON at most {MAX_DEPTH} deep")
    if type(value) is list:
        return [_json(one, label, depth - 1) for one in value]
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                _refuse(label, key, "keys that are str")
        return {key: _json(one, label, depth - 1) for key, one in value.items()}
    _refuse(label, value, "JSON")
