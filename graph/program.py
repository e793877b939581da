"""`@program`, and `trace`, which calls a program once with handles: the node calls become the graph."""

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from penstock.graph.check import by_place, check
from penstock.graph.errors import Fault, GraphError, caller, defined, fault, nearest
from penstock.graph.imports import LISTS, PATHS, encode, located, path_of, resolve, short
from penstock.graph.imports import arguments as decoded
from penstock.graph.interface import REQUIRED, signature, type_of
from penstock.graph.ir import Graph, Json, Ref
from penstock.graph.trace import Handle, TraceRecorder, current

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flag:
    """A keyword argument of a program. `default` is `interface.REQUIRED` if it has none."""

    name: str
    annotation: Any
    default: Any
    help: str

    @property
    def is_path(self) -> bool:
        """True if it names a file or a folder (`Path`, or `Path | None`)."""
        return self.annotation in PATHS

    @property
    def is_paths(self) -> bool:
        """True if it names several files or folders (`list[Path]`, `tuple[Path, ...]`)."""
        return self.annotation in LISTS


class Program(Generic[P, T]):
    """A program: from the carried state and the sources to the next carried state.

    `evaluation` and `defaults` are those of `@program`. `names` maps carried arguments to the names that `of` gives
    them in the graph. Calling a program calls its function.
    """

    __name__: str

    def __init__(
        self,
        fn: Callable[P, T],
        evaluation: "Program[..., Any] | None" = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.evaluation = fn, evaluation
        self.name, self.path, self.where = fn.__name__, path_of(fn), defined(fn)
        self.doc = inspect.getdoc(fn) or ""
        self.defaults = dict(defaults or {})
        self.names: dict[str, str] = {}
        self.renamed = ""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<program {self.path}>"

    def of(self, **names: str) -> Self:
        """This program on carried values of other names: `evaluate.of(policy="solver")` is `evaluate` with the carried
        value `solver` wherever it says `policy`.

        Raises GraphError for a name that is no argument of this program, or that two arguments would have. `trace`
        refuses new names for sources: each program has its own sources.
        """
        arguments = list(inspect.signature(self.fn).parameters)
        # A copy: all modules that import this program share it.
        made = copy.copy(self)
        made.names, made.renamed = {**self.names, **names}, caller()
        for argument, name in names.items():
            what = f"{self.name}.of: {argument}={name!r}"
            if argument not in arguments:
                needed = f"a carried argument of {self.name}{nearest(argument, arguments)}"
                raise fault("unknown-option", what, repr(argument), needed)
            if not isinstance(name, str) or not name.isidentifier():
                raise fault("bad-name", what, repr(name), 'the name of a carried value, such as "policy"')
            for other in arguments:
                if other != argument and made.names.get(other, other) == name:
                    given = f"{name!r}, as the argument {other!r} is called"
                    raise fault("duplicate-name", what, given, "another name for each argument")
        return made

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """The positional parameters with their types; `Any` for one without annotation."""
        found = {}
        for parameter in signature(self.fn).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY:
                continue
            what = f"{self.name}: argument {parameter.name!r}"
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                given = f"a parameter that is {parameter.kind.description}"
                needed = "a plain parameter for each carried value or source, and options after `*`"
                raise fault("bad-parameter", what, given, needed, self.where)
            if parameter.default is not parameter.empty:
                needed = "no default for a carried value or source; options stand after `*`"
                raise fault("input-with-default", what, f"the default {parameter.default!r}", needed, self.where)
            untyped = parameter.annotation is parameter.empty
            found[parameter.name] = Any if untyped else type_of(parameter.annotation, what, self.where)
        return found

    @functools.cached_property
    def flags(self) -> tuple[Flag, ...]:
        """The keyword-only parameters in order, with their help from the docstring's "Args:"."""
        help_texts, found = _args_section(self.doc), []
        for parameter in signature(self.fn).parameters.values():
            if parameter.kind is not parameter.KEYWORD_ONLY:
                continue
            annotation, default = parameter.annotation, parameter.default
            if default is not REQUIRED:
                _encoded(self, parameter.name, default)
            if annotation is parameter.empty:
                annotation = Path if isinstance(default, Path) else type(default)
                # None and a missing default do not tell the type.
                annotation = Any if default is None or default is REQUIRED else annotation
            found.append(Flag(parameter.name, annotation, default, help_texts.get(parameter.name, "")))
        return tuple(found)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All flags' values. Raises GraphError for an unknown or missing one."""
        names = [flag.name for flag in self.flags]
        for name in given.keys() - set(names):
            needed = f"an option of {self.name}{nearest(name, names)}"
            raise fault("unknown-option", f"{self.name}: option {name!r}", repr(given[name]), needed, self.where)
        values = {}
        for flag in self.flags:
            value = resolve(given[flag.name]) if flag.name in given else flag.default
            if value is REQUIRED:
                what, needed = f"{self.name}: option {flag.name!r}", "a value, since it has no default"
                raise fault("missing-option", what, "nothing", needed, self.where)
            values[flag.name] = located(value, flag.annotation)
        return values


@overload
def program(fn: Callable[P, T], /) -> Program[P, T]: ...
@overload
def program(
    *, evaluation: Program[..., Any] | None = None, defaults: Mapping[str, Any] | None = None
) -> Callable[[Callable[P, T]], Program[P, T]]: ...
def program(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    evaluation: Program[..., Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Any:
    """Make a function a program. Its positional parameters are carried values (those it returns) and sources, its
    keyword-only parameters the options, which are flags of the command line.

    `evaluation` is a program that measures what this one trains: a run calls it on `--eval-groups` held-out groups,
    once before the first update and once after the last; the metric `accuracy` of its nodes is the accuracy of the run.
    Its carried arguments must be carried values of this program, by name and type; `of` renames them. Its sources are
    its own and read held-out data (`Context.split` is "evaluate"). Its options that this program also has, with the
    same default, get this program's values; the others have their defaults. Without an evaluation nothing is measured
    beside the training.

        @program(evaluation=evaluate.of(policy="solver"))
        def self_play(proposer: Policy, solver: Policy, prompts: Prompts) -> dict[str, Policy]: ...

    `defaults` are this program's own for flags that every program has, by name: `{"updates": 60, "max_tokens": 24}`.
    The command line and `--config` override them. A name that is no flag is refused.
    """
    if fn is not None:
        return Program(fn)
    return lambda fn: Program(fn, evaluation, defaults)


def trace(
    program: Program[..., Any],
    options: Mapping[str, Any] | None = None,
    prefix: str = "",
    *,
    batch: int | None = None,
) -> Graph:
    """The graph of a program, by calling it once with handles.

    The result says which arguments are carried values: a single value is the next of the first argument; a dict or
    dataclass has the next values by argument name. All other arguments are sources. `options` overrides the program's
    flags. `prefix` goes before the names of nodes and sources, so that two graphs can share carried values in one run
    ("evaluate.").

    Raises GraphError at the user's line for calls that cannot be recorded; `check` finds all other faults. An option
    that a node cannot take is left out and tracing goes on: the error has all such options, and the faults that `check`
    finds in the rest, given the `batch`. Any other faulty call ends the trace, and is the last fault of the error.
    """
    if not isinstance(program, Program):
        raise fault("not-a-program", "trace", repr(program), "a function with @program")
    values = program.options(options or {})
    encoded: dict[str, Json] = {}
    faults: list[Fault] = []
    for name, value in sorted(values.items()):
        try:
            encoded[name] = _encoded(program, name, value)
        except GraphError as error:
            faults += error.faults
    if faults:
        raise GraphError(*faults)
    # Faults of the program's options were raised above: without their values the program cannot be called.
    recorder = TraceRecorder(program, prefix)
    # Not an argument: calls of nodes in a program read as calls of functions.
    token = current.set(recorder)
    try:
        returned = program.fn(*(Handle(recorder, Ref(name)) for name in program.arguments), **values)
        graph = recorder.graph(_results(program, recorder, returned), encoded)
    except GraphError as error:
        # A call that cannot be recorded ends the trace; report the options left out before it, too.
        if recorder.faults:
            raise GraphError(*recorder.faults, *error.faults) from None
        raise
    finally:
        current.reset(token)
    if recorder.faults:
        raise GraphError(*sorted([*recorder.faults, *check(graph, batch=batch)], key=by_place))
    return graph


def trace_evaluation(program: Program[..., Any], graph: Graph, prefix: str, *, batch: int | None = None) -> Graph:
    """The graph of a program's evaluation on the carried values of the program, which `graph` has traced.

    Options that both have with the same default get the program's values.

    Raises GraphError as `trace` does, and for a carried argument that is no carried value of the program, or one of
    another type: the run would make a separate value for it, which no update changes.
    """
    evaluation = program.evaluation
    assert evaluation is not None
    defaults = {flag.name: flag.default for flag in program.flags}
    # The evaluation uses the training's settings; a different default is its own choice, such as temperature 0.
    alike = {f.name for f in evaluation.flags if f.name in defaults and defaults[f.name] == f.default}
    shared = {name: value for name, value in graph.options if name in alike}
    traced = trace(evaluation, decoded(evaluation.fn, shared), prefix, batch=batch)
    held = {argument.name: argument for argument in graph.carried}
    bases = {name: {name, *above} for name, above in (*graph.types, *traced.types)}
    faults: list[Fault] = []
    for argument in traced.carried:
        fitting = [name for name, own in held.items() if argument.type in bases.get(own.type, {own.type})]
        if argument.name in fitting:
            continue
        given = f"{argument.name!r}, which {graph.name} does not have, or no node of it reads"
        if (own := graph.argument(argument.name)) is not None:
            given = f"{argument.name!r}, a {short(own.type)} in {graph.name}"
            if own.kind == "source":
                given = f"{argument.name!r}, which is a source of {graph.name}"
        parameter = {name: key for key, name in evaluation.names.items()}.get(argument.name, argument.name)
        needed = f"a carried value of {graph.name} that is a {short(argument.type)}"
        if fitting:
            needed += f": @program(evaluation={evaluation.name}.of({parameter}=NAME)), NAME one of "
            needed += ", ".join(f'"{name}"' for name in fitting)
        what = f"{graph.name}: evaluation {evaluation.name}: argument {parameter!r}"
        faults.append(Fault("evaluation-mismatch", what, given, needed, evaluation.renamed or graph.where))
    if faults:
        raise GraphError(*sorted([*faults, *check(traced, batch=batch)], key=by_place))
    # The value is the program's, and so are its maker and its pool.
    return traced.replace(
        arguments=tuple(held.get(argument.name, argument) for argument in traced.arguments),
        types=tuple(sorted({**dict(graph.types), **dict(traced.types)}.items())),
    )


def _encoded(program: Program[..., Any], name: str, value: Any) -> Json:
    """An option of a program as JSON. Raises GraphError, at the program, for what JSON cannot hold."""
    try:
        return encode(value, f"{program.name}: option {name!r}")
    except GraphError as error:
        raise GraphError(*(dataclasses.replace(found, where=program.where) for found in error.faults)) from None


def _results(program: Program[..., Any], recorder: TraceRecorder, returned: Any) -> dict[str, Ref]:
    """The next value of each carried value, by its name."""
    what, arguments = f"{program.name}: its result", list(program.arguments)
    needed = "the next carried value, or a dict or dataclass of them by argument name"
    if isinstance(returned, Handle) and arguments:
        named = {arguments[0]: returned}
    elif isinstance(returned, Mapping):
        named = dict(returned)
    elif dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        named = {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    else:
        raise fault("bad-result", what, repr(returned), needed, program.where)
    for name, value in named.items():
        if name not in arguments:
            given, needed = f"{name!r}, which is no argument", f"names of arguments{nearest(str(name), arguments)}"
            raise fault("unknown-result", what, given, needed, program.where)
        if not isinstance(value, Handle) or value._recorder is not recorder:
            raise fault("bad-result", f"{what} {name!r}", repr(value), needed, program.where)
    # In the order of the arguments, so that equal programs have equal graphs however they return.
    return {name: named[name]._ref for name in arguments if name in named}


def _args_section(doc: str) -> dict[str, str]:
    """The texts of a docstring's "Args:" by parameter name."""
    _, _, section = doc.partition("Args:\n")
    texts: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        start = re.match(r" {2,4}(\w+)(?: \([^)]*\))?: +(.*)", line)
        if start:
            name, texts[start[1]] = start[1], start[2]
        elif name and line.startswith("      "):
            texts[name] += " " + line.strip()
        elif line.strip():
            break
    return texts
