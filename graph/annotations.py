"""Options against their annotations, where these leave no doubt: one of a few words (`Literal`), or a function."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from penstock.graph.faults import Fault
from penstock.graph.ir import Json
from penstock.graph.paths import names_function


def strange(function: Callable[..., Any], options: Mapping[str, Json], what: str, where: str) -> Iterator[Fault]:
    """A fault for each of a function's options that is not what its annotation says; `what` begins the message."""
    annotations = _annotations(function)
    for name, given in options.items():
        annotation, optional = _required(annotations.get(name))
        if given is None and optional:
            continue
        choices = get_args(annotation) if get_origin(annotation) is Literal else ()
        needed = " or ".join(map(repr, choices)) if choices and given not in choices else ""
        if get_origin(annotation) is Callable and not names_function(given):
            needed = "a function: NAME, or functools.partial(NAME, number=…), of a `def NAME(…)` at the top of a module"
        if needed:
            yield Fault(f"{what}: option {name!r}", repr(given), needed, where)


def _annotations(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.get_annotations(function, eval_str=True)
    except NameError:  # names that are there for type checkers only
        return inspect.get_annotations(function)


def _required(annotation: Any) -> tuple[Any, bool]:
    """(an annotation without its None, whether it had one)."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation, False
    rest = [argument for argument in get_args(annotation) if argument is not NoneType]
    return rest[0] if len(rest) == 1 else annotation, NoneType in get_args(annotation)
