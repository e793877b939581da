"""`@carried`: a dataclass of plain values as a carried value, such as a baseline.

    @carried
    class Baseline:
        mean: float = 0.0

It is an argument of a program, and a per-update node makes its next value. What holds tensors, or weights that other
pools read, is a class of its own (`graph.protocols.Carried`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, dataclass_transform

import torch
from torch import Tensor

from penstock.graph.errors import caller, fault
from penstock.graph.imports import path_of

T = TypeVar("T")
# The key under which a checkpoint's JSON has a tuple, which JSON alone would turn into a list.
TUPLE = "a tuple"
NEEDED = "a number, a text, True, False, None, or lists, tuples and dicts (by texts) of them"


@dataclass_transform()
def carried(cls: type[T]) -> type[T]:
    """Make a class a dataclass whose values a program may carry from update to update.

    Its fields are numbers, texts, True, False, None, and lists, tuples and dicts (by texts) of them; a checkpoint holds
    them exactly. The first value is made of the fields' defaults, or by a class method `make(context)`, which sees the
    run's flags and the program's options (`graph.Context`). It lives in the pool of the node that makes its next value.
    Nodes of that pool read it as it is, once per update, or through `delay`, per group; `broadcast` sends its fields
    that are numbers to other pools, each a tensor without axes.

    Raises GraphError at the class for one inside a function, which other processes cannot import, and for a field
    without a default. A value of another kind raises TypeError where the field is set, at the latest where a checkpoint
    is written.
    """
    where, what = caller(), f"@carried {cls.__name__}"
    if "<locals>" in cls.__qualname__:
        needed = "a class at the top of a module, which other processes can import"
        raise fault("local-function", what, "a class inside a function", needed, where)
    made: Any = cls if "__dataclass_fields__" in vars(cls) else dataclasses.dataclass(cls)
    names = tuple(field.name for field in dataclasses.fields(made))
    # Weights keep their dtypes, so that of `mean: float = 0` is no integer at first.
    floats = {field.name for field in dataclasses.fields(made) if "float" in str(field.type)}
    if not hasattr(made, "make"):
        for field in dataclasses.fields(made):
            if field.init and field.default is field.default_factory is dataclasses.MISSING:
                needed = f"the value before the first update, as in `{field.name}: float = 0.0`, or a class method make"
                raise fault("field-without-default", f"{what}: field {field.name!r}", "no default", needed, where)
        made.make = classmethod(lambda own, context: own())

    def plain(name: str, value: Any) -> Any:
        try:
            return _encoded(value)
        except TypeError as error:
            raise TypeError(f"{where}: {cls.__name__}.{name}: given {error}, needed {NEEDED}") from None

    begin, assign = made.__init__, made.__setattr__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        for name in names:  # a frozen dataclass sets them past __setattr__
            plain(name, getattr(self, name))

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name in names:
            plain(name, value)
        assign(self, name, value)

    def weights(self: Any) -> dict[str, Tensor]:
        numbers = {name: getattr(self, name) for name in names if isinstance(getattr(self, name), int | float)}
        for name, x in numbers.items():
            if name not in floats and isinstance(x, int) and not -(2**63) <= x < 2**63:
                needed = "a whole number of 64 bits, as others are sent it by broadcast; or a float"
                raise ValueError(f"{where}: {cls.__name__}.{name}: given {x}, needed {needed}")
        return {name: torch.tensor(float(x) if name in floats else x) for name, x in numbers.items()}

    def state(self: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {name: plain(name, getattr(self, name)) for name in names}

    def restore(self: Any, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        if facts.keys() != set(names):
            given = f"given a checkpoint with the fields {', '.join(facts) or 'of nothing'}"
            raise ValueError(f"{where}: {cls.__name__}: {given}, needed {', '.join(names)}, as when it was written")
        for name in names:
            object.__setattr__(self, name, _decoded(facts[name]))

    def export(self: Any, folder: str) -> None:
        """There is nothing that other tools read."""

    begun: dict[str, Any] = {"__init__": __init__, "__setattr__": __setattr__}
    for name, method in {**begun, "weights": weights, "state": state, "restore": restore, "export": export}.items():
        if name in begun or name not in vars(cls):  # what the class says itself stays
            setattr(made, name, method)
    made.maker = f"{path_of(cls)}.make"
    return made  # type: ignore[no-any-return]


def _encoded(value: Any) -> Any:
    """A plain value as JSON that decodes to an equal one. Raises TypeError that tells what another one is."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        items = [_encoded(item) for item in value]
        return items if type(value) is list else {TUPLE: items}
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key == TUPLE:
                raise TypeError(f"a dict with the key {key!r} ({type(key).__name__})")
        return {key: _encoded(item) for key, item in value.items()}
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {TUPLE}:
            return tuple(_decoded(item) for item in value[TUPLE])
        return {key: _decoded(item) for key, item in value.items()}
    return value
