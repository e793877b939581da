"""`@carried`: a dataclass of plain values as a carried value, such as a baseline.

    @carried
    class Baseline:
        mean: float = 0.0

It is an argument of a program, and a per-update node makes its next value. A value with tensors, or with weights that
other pools read, needs a class of its own (`graph.protocols.Carried`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, dataclass_transform

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
    them exactly. The first value is made of the fields' defaults, or by a class method `make(context)`, which gets the
    run's flags and the program's options (`graph.Context`). The value is in the pool of the node that makes its next
    value. Nodes of that pool read it as it is, once per update, or through `delay`, per group; `broadcast` sends its
    fields that are numbers to other pools, each as a tensor without axes.

    Raises GraphError at the class for one inside a function, which other processes cannot import, and for a field
    without a default. A value of another kind raises TypeError where the field is set, at the latest where a checkpoint
    is written.
    """
    where, what = caller(), f"@carried {cls.__name__}"
    if "<locals>" in cls.__qualname__:
        needed = "a class at the top of a module, which other processes can import"
        raise fault("local-function", what, "a class inside a function", needed, where)
    made: Any = cls if "__dataclass_fields__" in vars(cls) else dataclasses.dataclass(cls)
    if not hasattr(made, "make"):
        for field in dataclasses.fields(made):
            if field.init and field.default is field.default_factory is dataclasses.MISSING:
                needed = f"the value before the first update, as in `{field.name}: float = 0.0`, or a class method make"
                raise fault("field-without-default", f"{what}: field {field.name!r}", "no default", needed, where)
        made.make = classmethod(lambda own, context: own())
    begin, assign = made.__init__, made.__setattr__
    # Not `__dataclass_fields__`, which has class variables, too.
    names = {field.name for field in dataclasses.fields(made)}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.state()  # a frozen dataclass sets its fields past __setattr__

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name in names:
            _plain(self, name, value)
        assign(self, name, value)

    made.__init__, made.__setattr__, made.written = __init__, __setattr__, where
    for name in ("weights", "state", "restore", "export"):
        if name not in vars(cls):  # keep the class's own methods
            setattr(made, name, vars(_Carried)[name])
    # A subclass does not inherit its base's maker, which would make the base.
    if "maker" not in vars(cls):
        made.maker = f"{path_of(cls)}.make"
    return made  # type: ignore[no-any-return]


class _Carried:
    """The methods of a carried dataclass. `written` is the place of the class, for messages."""

    written: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def weights(self) -> dict[str, Tensor]:
        found = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # Weights keep their dtypes, so `mean: float = 0` must be a float from the start.
            value = float(value) if "float" in str(field.type) and isinstance(value, int) else value
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                needed = "a whole number of 64 bits, as others are sent it by broadcast; or a float"
                what = f"{self.written}: {type(self).__name__}.{field.name}"
                raise ValueError(f"{what}: given {value}, needed {needed}")
            if isinstance(value, int | float):
                found[field.name] = torch.tensor(value)
        return found

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        names = [field.name for field in dataclasses.fields(self)]
        return {}, {name: _plain(self, name, getattr(self, name)) for name in names}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        names = {field.name for field in dataclasses.fields(self)}
        if facts.keys() != names:
            given = f"given a checkpoint with the fields {', '.join(facts) or 'of nothing'}"
            needed = f"needed {', '.join(sorted(names))}, as when it was written"
            raise ValueError(f"{self.written}: {type(self).__name__}: {given}, {needed}")
        # Past the checks, and past a frozen dataclass.
        for name in names:
            object.__setattr__(self, name, _decoded(facts[name]))

    def export(self, folder: str) -> None:
        """Write nothing: no other tool reads it."""


def _plain(carried: Any, name: str, value: Any) -> Any:
    try:
        return _encoded(value)
    except TypeError as error:
        what = f"{carried.written}: {type(carried).__name__}.{name}"
        raise TypeError(f"{what}: given {error}, needed {NEEDED}") from None


def _encoded(value: Any) -> Any:
    """A plain value as JSON that decodes to an equal one. Raises TypeError with the kind of any other value."""
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
