"""Options that are one of a few words, as their `Literal` annotations say: any other word is a fault of the call."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from penstock.graph.faults import Fault
from penstock.graph.ir import Json


def strange(function: Callable[..., Any], options: Mapping[str, Json], what: str, where: str) -> Iterator[Fault]:
    """A fault for each of a function's options that is none of its choices; `what` begins the message."""
    annotations = _annotations(function)
    for name, given in options.items():
        choices = _choices(annotations.get(name))
        if choices and given not in choices:
            yield Fault(f"{what}: option {name!r}", repr(given), " or ".join(map(repr, choices)), where)


def _annotations(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.get_annotations(function, eval_str=True)
    except NameError:  # names that are there for type checkers only
        return inspect.get_annotations(function)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The members of a `Literal`, with None where that may be left out; () for another annotation."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, UnionType) and NoneType in (arguments := get_args(annotation)):
        rest = [argument for argument in arguments if argument is not NoneType]
        choices = _choices(rest[0]) if len(rest) == 1 else ()
        return (*choices, None) if choices else ()
    return ()
