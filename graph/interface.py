"""A node's signature is its interface.

Positional parameters are inputs, keyword-only ones options, and the return annotation the outputs. Options are checked
against annotations that leave no doubt: one of a few words (`Literal`), a list, or a function of some arguments.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from penstock.graph.context import BatchPart, Context
from penstock.graph.errors import Fault, defined, fault
from penstock.graph.imports import imported, names_function, short
from penstock.graph.ir import Json
from penstock.graph.protocols import Stream
from penstock.graph.types import Metrics

# The default of an option that has none.
REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output. Only an optional input (`x: X | None = None`) may be left out of a call.

    `variable` is the name of the TypeVar that it is annotated with; `type` is then the TypeVar's bound, and an output
    has the type of the value that the call passes as the input with the same variable. `several`: an input that is a
    list of values of this type (`x: Sequence[X] = ()`); in the graph they are the inputs `x[0]`, `x[1]`, ….
    """

    name: str
    type: Any
    optional: bool = False
    variable: str = ""
    several: bool = False


@dataclass(frozen=True, slots=True)
class Interface:
    """What a node's signature says.

    `bundle` makes a call's return value from the values of its outputs in order. `metrics`: the node also returns
    figures. `returns` is the return annotation, for messages. `stream`: the state is a `Stream`, which works on several
    firings at once and keeps nothing between them. `context` names the keyword-only parameter for the node's `Context`,
    `part` the one for the `BatchPart` of an update that accumulates; "" if there is none. The run fills both.
    """

    inputs: tuple[Port, ...]
    options: Mapping[str, Any]
    outputs: tuple[Port, ...]
    bundle: Callable[..., Any]
    metrics: bool
    returns: str
    stream: bool = False
    context: str = ""
    part: str = ""

    def gathered(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs by parameter name; those of a list as one tuple."""
        found = dict(inputs)
        for port in self.inputs:
            if port.several:
                names = [name for name in inputs if name.startswith(f"{port.name}[")]
                found[port.name] = tuple(found.pop(name) for name in sorted(names, key=lambda name: (len(name), name)))
        return found

    def values(self, payload: Any) -> tuple[Any, ...]:
        """The outputs' values in a call's result without state and metrics."""
        if self.bundle is _single or not isinstance(payload, tuple):
            return () if payload is None and not self.outputs else (payload,)
        return payload


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature with evaluated annotations. Raises GraphError at the function's line."""
    try:
        return inspect.signature(function, eval_str=True)
    except NameError as error:
        what = f"{function.__name__}: signature"
        needed = "annotations that exist when the program runs (imported, and not only for type checkers)"
        raise fault("unresolved-annotation", what, str(error), needed, defined(function)) from error


def interface(function: Callable[..., Any], *, stateful: bool) -> Interface:
    """Read a node's signature. Raises GraphError at the function's line."""
    sig, where = signature(function), defined(function)
    inputs, options, context, part = [], {}, "", ""
    # The state comes first, and is no edge: it stays in the worker.
    parameters = list(sig.parameters.values())
    for parameter in parameters[1:] if stateful else parameters:
        what = f"{function.__name__}: parameter {parameter.name!r}"
        kinds = (parameter.annotation, *get_args(parameter.annotation))
        if parameter.kind is parameter.KEYWORD_ONLY and Context in kinds:
            context = parameter.name
        elif parameter.kind is parameter.KEYWORD_ONLY and BatchPart in kinds:
            part = parameter.name
        elif parameter.kind is parameter.KEYWORD_ONLY:
            options[parameter.name] = parameter.default
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            inputs.append(_input(parameter, what, where))
        else:
            given = f"a parameter that is {parameter.kind.description}"
            raise fault("bad-parameter", what, given, "a plain parameter for each input, and options after `*`", where)
    what = f"{function.__name__}: return annotation"
    outputs, bundle, metrics = _outputs(sig.return_annotation, what, where, stateful)
    returns = inspect.formatannotation(sig.return_annotation).replace("dict[str, float]", "Metrics")
    # A stream keeps nothing between its firings, so that they may come in any order.
    state = parameters[0].annotation if stateful and parameters else None
    stream = isinstance(state, type) and issubclass(state, Stream)
    if stream and (lists := [port.name for port in inputs if port.several]):
        given = f"a list of inputs, {lists[0]!r}, of a node whose state is a Stream"
        raise fault("stream-with-list", f"{function.__name__}: signature", given, "an input for each value", where)
    return Interface(tuple(inputs), options, outputs, bundle, metrics, returns, stream, context, part)


def type_of(annotation: Any, what: str, where: str) -> Any:
    """The class that an annotation names (or `Any`): edges are typed by classes."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, TypeVar):
        annotation = annotation.__bound__ or Any
    found = get_origin(annotation) or annotation
    if found is Any or (isinstance(found, type) and found not in (inspect.Parameter.empty, UnionType)):
        return found
    given = "no annotation" if annotation is inspect.Parameter.empty else f"the annotation {annotation!r}"
    raise fault("bad-annotation", what, given, "a class: the type of the edge, such as Rollouts or Rewards", where)


def _input(parameter: inspect.Parameter, what: str, where: str) -> Port:
    annotation, default = _without_none(parameter.annotation), parameter.default
    if default == () and get_origin(annotation) is Sequence:
        (type_,) = get_args(annotation)
        return Port(parameter.name, type_of(type_, what, where), optional=True, several=True)
    if default is not None and default is not parameter.empty:
        needed = "no default, or None, for an input, or () for a Sequence of inputs; options stand after `*`"
        raise fault("input-with-default", what, f"the default {default!r}", needed, where)
    return Port(parameter.name, type_of(annotation, what, where), default is None, _variable(annotation))


def _outputs(
    annotation: Any, what: str, where: str, stateful: bool
) -> tuple[tuple[Port, ...], Callable[..., Any], bool]:
    """(the outputs, what bundles their values, whether metrics come beside them)."""
    parts = list(get_args(annotation)) if get_origin(annotation) is tuple else [annotation]
    if stateful:
        if len(parts) < 2:
            needed = "tuple[State, Output] or tuple[State, Output, Metrics], since the node has an `init`"
            raise fault("state-not-returned", what, repr(annotation), needed, where)
        parts = parts[1:]
    # Figures go to the run's records, never along an edge.
    metrics = parts[-1] == Metrics
    parts = parts[:-1] if metrics else parts
    # `tuple[tuple[A, B], Metrics]`: two outputs with metrics.
    if len(parts) == 1 and get_origin(parts[0]) is tuple:
        parts = list(get_args(parts[0]))
    if len(parts) == 1 and parts[0] in (None, NoneType):
        return (), _tuple, metrics
    if len(parts) == 1 and hasattr(parts[0], "_fields"):
        hints = inspect.get_annotations(parts[0], eval_str=True)
        return tuple(Port(f, type_of(hints.get(f), what, where)) for f in parts[0]._fields), parts[0], metrics
    names = ["out"] if len(parts) == 1 else map(str, range(len(parts)))
    ports = (Port(n, type_of(p, what, where), variable=_variable(p)) for n, p in zip(names, parts, strict=True))
    return tuple(ports), _single if len(parts) == 1 else _tuple, metrics


def _variable(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, TypeVar) else ""


def _tuple(*values: Any) -> Any:
    return values or None


def _single(value: Any) -> Any:
    return value


# What an option of a plain type needs in place of None.
PLAIN: Mapping[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}


def mistyped(function: Callable[..., Any], options: Mapping[str, Json], what: str, where: str) -> Iterator[Fault]:
    """Yield a fault for each option that does not fit its annotation. `what` is the beginning of the message."""
    try:
        annotations = inspect.get_annotations(function, eval_str=True)
    except NameError:  # names that are there for type checkers only
        annotations = inspect.get_annotations(function)
    for name, given in options.items():
        annotation = _without_none(annotations.get(name))
        if given is None and NoneType in get_args(annotations.get(name)):
            continue
        choices = get_args(annotation) if get_origin(annotation) is Literal else ()
        needed, said = " or ".join(map(repr, choices)) if choices and given not in choices else "", repr(given)
        # A text would be taken for a sequence of letters.
        if get_origin(annotation) in (tuple, list) and isinstance(given, str):
            needed = f"a list or tuple, such as [{given!r}]"
        kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        # An option whose own default is None may be left so, whatever its annotation says.
        if given is None and (function.__kwdefaults__ or {}).get(name, ...) is not None:
            needed = next((said for kind in kinds for plain, said in PLAIN.items() if kind is plain), needed)
        # A union of a function and an async one: they differ only in what they return, so check against the first.
        if all(get_origin(kind) is Callable for kind in kinds):
            said, needed = _no_function(given, get_args(kinds[0])[0], (function.__kwdefaults__ or {}).get(name))
        if needed:
            yield Fault("wrong-option-type", f"{what}: option {name!r}", said, needed, where)


def _no_function(given: Json, types: Any, default: Any) -> tuple[str, str]:
    """(given, needed) for an option that is no function with positional arguments of these types; ("", "") if it is one
    or that is not known. The message takes the names of the arguments from `default`, if that is a function."""
    if not names_function(given):
        made = "NAME, or functools.partial(NAME, number=…), of a `def NAME(…)` at the top of a module"
        return repr(given), f"a function: {made}"
    function = imported(given["path"])
    if inspect.isfunction(function) and isinstance(types, list):
        try:
            inspect.signature(function).bind(*types, **given.get("options", {}))
        except TypeError as error:
            names = ", ".join(getattr(each, "__name__", str(each)) for each in types)
            needed = f"a function of ({names})"
            if inspect.isfunction(default):
                needed += f", such as {default.__name__}({', '.join(inspect.signature(default).parameters)})"
            needed += "; what else it takes has a default, or functools.partial gives it"
            return f"{short(given['path'])}: {error}", needed
    return "", ""


def _without_none(annotation: Any) -> Any:
    """`X` of `X | None`; any other annotation as it is."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    rest = [argument for argument in get_args(annotation) if argument is not NoneType]
    return rest[0] if len(rest) == 1 else annotation
