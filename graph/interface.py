"""A node's signature is its interface: positional parameters are inputs, keyword-only ones options, the return
annotation the outputs.

Options against their annotations, where these leave no doubt: one of a few words (`Literal`), or a function.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from penstock.graph.errors import Fault, defined, fault
from penstock.graph.imports import names_function
from penstock.graph.ir import Json
from penstock.graph.protocols import Stream
from penstock.graph.types import Context, Metrics

REQUIRED = inspect.Parameter.empty
"""The default of an option that has none."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output. Only an optional input (`x: X | None = None`) may be left out of a call.

    `variable` is the name of the TypeVar that it is annotated with, `type` that one's bound: an output is of the type
    of the value that the call passes as the input with the same variable. `several`: an input that is a list of values
    of this type (`x: Sequence[X] = ()`); in the graph they are the inputs `x[0]`, `x[1]`, ….
    """

    name: str
    type: Any
    optional: bool = False
    variable: str = ""
    several: bool = False


@dataclass(frozen=True, slots=True)
class Interface:
    """`bundle` makes what a call returns out of its outputs' values in order; `metrics`: figures come beside them.

    `returns` is the return annotation, for messages. `stream`: the state is a `Stream`, which works on several firings
    at once and keeps nothing between them. `context` names the keyword-only parameter that the run fills with the
    node's `Context`, "" if there is none.
    """

    inputs: tuple[Port, ...]
    options: Mapping[str, Any]
    outputs: tuple[Port, ...]
    bundle: Callable[..., Any]
    metrics: bool
    returns: str
    stream: bool = False
    context: str = ""

    def gathered(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs by the names of the node's parameters: those of a list together."""
        found = dict(inputs)
        for port in self.inputs:
            if port.several:
                names = [name for name in inputs if name.startswith(f"{port.name}[")]
                found[port.name] = tuple(found.pop(name) for name in sorted(names, key=lambda name: (len(name), name)))
        return found

    def values(self, payload: Any) -> tuple[Any, ...]:
        """The outputs' values in what a call returned, taken off state and metrics."""
        if self.bundle is _single or not isinstance(payload, tuple):
            return () if payload is None and not self.outputs else (payload,)
        return payload


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature with evaluated annotations. Raises GraphError at the function's line."""
    try:
        return inspect.signature(function, eval_str=True)
    except NameError as error:
        needed = "annotations that exist when the program runs (imported, and not only for type checkers)"
        raise fault(
            "unresolved-annotation", f"{function.__name__}: signature", str(error), needed, defined(function)
        ) from error


def interface(function: Callable[..., Any], *, stateful: bool) -> Interface:
    """Read a node's signature. Raises GraphError at the function's line."""
    sig = signature(function)
    inputs, options, context = [], {}, ""
    parameters = list(sig.parameters.values())
    for parameter in parameters[1:] if stateful else parameters:
        what = f"{function.__name__}: parameter {parameter.name!r}"
        kinds = (parameter.annotation, *get_args(parameter.annotation))
        if parameter.kind is parameter.KEYWORD_ONLY and Context in kinds:
            context = parameter.name
        elif parameter.kind is parameter.KEYWORD_ONLY:
            options[parameter.name] = parameter.default
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            inputs.append(_input(parameter, what, function))
        else:
            needed = "a plain parameter for each input, and options after `*`"
            raise fault(
                "bad-parameter", what, f"a parameter that is {parameter.kind.description}", needed, defined(function)
            )
    outputs, bundle, metrics = _outputs(sig.return_annotation, function, stateful)
    returns = inspect.formatannotation(sig.return_annotation).replace("dict[str, float]", "Metrics")
    state = parameters[0].annotation if stateful and parameters else None
    stream = isinstance(state, type) and issubclass(state, Stream)
    if stream and (lists := [port.name for port in inputs if port.several]):
        given = f"a list of inputs, {lists[0]!r}, of a node whose state is a Stream"
        raise fault(
            "stream-with-list", f"{function.__name__}: signature", given, "an input for each value", defined(function)
        )
    return Interface(tuple(inputs), options, outputs, bundle, metrics, returns, stream, context)


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


def _input(parameter: inspect.Parameter, what: str, function: Callable[..., Any]) -> Port:
    annotation = parameter.annotation
    if get_origin(annotation) in (Union, UnionType):
        rest = [a for a in get_args(annotation) if a is not NoneType]
        annotation = rest[0] if len(rest) == 1 else annotation
    default = parameter.default
    if default == () and get_origin(annotation) is Sequence:
        (type_,) = get_args(annotation)
        return Port(parameter.name, type_of(type_, what, defined(function)), optional=True, several=True)
    if default is not None and default is not parameter.empty:
        needed = "no default, or None, for an input, or () for a Sequence of inputs; options stand after `*`"
        raise fault("input-with-default", what, f"the default {default!r}", needed, defined(function))
    optional, type_ = default is None, type_of(annotation, what, defined(function))
    return Port(parameter.name, type_, optional, _variable(annotation))


def _outputs(
    annotation: Any, function: Callable[..., Any], stateful: bool
) -> tuple[tuple[Port, ...], Callable[..., Any], bool]:
    """Take state and metrics off the return annotation; what is left are the outputs."""
    what, where = f"{function.__name__}: return annotation", defined(function)
    parts = list(get_args(annotation)) if get_origin(annotation) is tuple else [annotation]
    if stateful:
        if len(parts) < 2:
            needed = "tuple[State, Output] or tuple[State, Output, Metrics], since the node has an `init`"
            raise fault("state-not-returned", what, repr(annotation), needed, where)
        parts = parts[1:]
    metrics = parts[-1] == Metrics
    parts = parts[:-1] if metrics else parts
    if len(parts) == 1 and get_origin(parts[0]) is tuple:
        parts = list(get_args(parts[0]))
    if len(parts) != 1:
        ports = tuple(
            Port(str(i), type_of(part, what, where), variable=_variable(part)) for i, part in enumerate(parts)
        )
        return ports, _tuple, metrics
    if parts[0] in (None, NoneType):
        return (), _tuple, metrics
    fields = getattr(parts[0], "_fields", None)
    if fields is not None:
        hints = inspect.get_annotations(parts[0], eval_str=True)
        return tuple(Port(f, type_of(hints.get(f), what, where)) for f in fields), parts[0], metrics
    return (Port("out", type_of(parts[0], what, where), variable=_variable(parts[0])),), _single, metrics


def _variable(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, TypeVar) else ""


def _tuple(*values: Any) -> Any:
    return values or None


def _single(value: Any) -> Any:
    return value


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
            yield Fault("wrong-option-type", f"{what}: option {name!r}", repr(given), needed, where)


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
