"""`@program` and `trace`: a program is called once, with handles, and what it calls becomes the graph."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, overload

from penstock.graph.faults import defined, fault, nearest
from penstock.graph.interface import REQUIRED, signature, type_of
from penstock.graph.ir import Argument, Graph, Input, Node, Ref
from penstock.graph.paths import encode, path_of, resolve
from penstock.graph.recorder import ANY, Handle, Recorder, current
from penstock.graph.types import Policy

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flag:
    """A keyword argument of a program. `default` is `interface.REQUIRED` if it has none."""

    name: str
    annotation: Any
    default: Any
    help: str


class Program(Generic[P, T]):
    """A program: from the carried state and the sources to the next carried state.

    `evaluation` is the program that measures the policy beside it. `defaults` are this program's own for the flags
    that every program has (`{"updates": 60}`). Calling a program calls its function.
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
        self.defaults = dict(defaults or {})

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<program {self.path}>"

    @property
    def name(self) -> str:
        return self.__name__

    @property
    def path(self) -> str:
        return path_of(self.fn)

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.fn) or ""

    @property
    def where(self) -> str:
        return defined(self.fn)

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """The positional parameters with their types; `Any` for one without annotation."""
        found = {}
        for parameter in signature(self.fn).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY:
                continue
            what = f"{self.name}: argument {parameter.name!r}"
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                needed = "a plain parameter for each carried value or source, and options after `*`"
                raise fault(what, f"a parameter that is {parameter.kind.description}", needed, self.where)
            if parameter.default is not parameter.empty:
                needed = "no default for a carried value or source; options stand after `*`"
                raise fault(what, f"the default {parameter.default!r}", needed, self.where)
            untyped = parameter.annotation is parameter.empty
            found[parameter.name] = Any if untyped else type_of(parameter.annotation, what, self.where)
        return found

    @functools.cached_property
    def flags(self) -> tuple[Flag, ...]:
        """The keyword-only parameters in order, with their help from the docstring's "Args:"."""
        help_texts = _args_section(self.doc)
        parameters = [p for p in signature(self.fn).parameters.values() if p.kind is p.KEYWORD_ONLY]

        def annotation(parameter: inspect.Parameter) -> Any:
            if parameter.annotation is not parameter.empty:
                return parameter.annotation
            return Any if parameter.default is None or parameter.default is REQUIRED else type(parameter.default)

        return tuple(Flag(p.name, annotation(p), p.default, help_texts.get(p.name, "")) for p in parameters)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All flags' values. Raises GraphError for an unknown or missing one."""
        flags = {flag.name: flag.default for flag in self.flags}
        for name in given.keys() - flags.keys():
            needed = f"an option of {self.name}{nearest(name, flags)}"
            raise fault(f"{self.name}: option {name!r}", repr(given[name]), needed, self.where)
        values = {name: resolve(given[name]) if name in given else default for name, default in flags.items()}
        if missing := [name for name, value in values.items() if value is REQUIRED]:
            needed = "a value, since it has no default"
            raise fault(f"{self.name}: option {missing[0]!r}", "nothing", needed, self.where)
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
    keyword-only parameters the options, which are flags of the command line."""
    if fn is not None:
        return Program(fn)
    return lambda fn: Program(fn, evaluation, defaults)


def trace(program: Program[..., Any], options: Mapping[str, Any] | None = None, prefix: str = "") -> Graph:
    """The graph of a program, by calling it once with handles.

    What is returned names the carried values: one value is the next of the first argument; a dict or dataclass names
    its arguments. All other arguments are sources. `options` overrides the program's flags. `prefix` goes before the
    names of nodes and sources, so that two graphs can share carried values in one run ("evaluate.").
    Raises GraphError at the user's line for a call that cannot be recorded; `check` finds what is wrong with the whole.
    """
    if not isinstance(program, Program):
        raise fault("trace", repr(program), "a function with @program")
    values = program.options(options or {})
    recorder = Recorder(program.arguments, prefix)
    handles = [Handle(recorder, Ref(name)) for name in program.arguments]
    token = current.set(recorder)
    try:
        returned = program.fn(*handles, **values)
    finally:
        current.reset(token)
    encoded = {name: encode(value, f"{program.name}: option {name!r}") for name, value in sorted(values.items())}
    return _Assembly(program, recorder, _results(program, recorder, returned)).graph(encoded)


def _results(program: Program[..., Any], recorder: Recorder, returned: Any) -> dict[str, Ref]:
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
        raise fault(what, repr(returned), needed, program.where)
    for name, value in named.items():
        if name not in arguments:
            given = f"{name!r}, which is no argument"
            raise fault(what, given, f"names of arguments{nearest(str(name), arguments)}", program.where)
        if not isinstance(value, Handle) or value._recorder is not recorder:
            raise fault(f"{what} {name!r}", repr(value), needed, program.where)
    return {name: named[name]._ref for name in arguments if name in named}


class _Assembly:
    """Makes a graph of what was recorded, once it is known which arguments are carried."""

    def __init__(self, program: Program[..., Any], recorder: Recorder, results: dict[str, Ref]) -> None:
        self.program, self.recorder = program, recorder
        read = {i.ref.node for n in recorder.nodes for i in n.inputs}
        unused = {name for name, ref in results.items() if ref == Ref(name) and name not in read}
        self.results = {name: ref for name, ref in results.items() if name not in unused}
        sources = [a for a in program.arguments if a not in results]
        self.renamed = {name: recorder.prefix + name for name in sources}
        self.names = [a for a in program.arguments if a not in unused]

    def graph(self, options: Mapping[str, Any]) -> Graph:
        nodes = tuple(self._node(n) for n in self.recorder.nodes)
        arguments = tuple(self._argument(name) for name in self.names)
        table = {
            path: tuple(path_of(base) for base in type_.__mro__[1:] if base is not object)
            for path, type_ in sorted(self.recorder.types.items())
        }
        return Graph(
            name=self.program.name,
            op=self.program.path,
            arguments=arguments,
            nodes=nodes,
            results=tuple(self.results.items()),
            options=tuple(options.items()),
            types=tuple(table.items()),
            doc=self.program.doc,
            where=self.program.where,
        )

    def _readers(self, name: str) -> list[tuple[Node, Input]]:
        return [(n, i) for n in self.recorder.nodes for i in n.inputs if i.ref.node == name]

    def _pool_of_reader(self, name: str) -> str | None:
        """The pool of the first node that reads a value; a broadcast belongs to the pool that reads it."""
        for reader, _ in self._readers(name):
            pool = reader.pool if reader.construct == "call" else self._pool_of_reader(reader.name)
            if pool is not None:
                return pool
        return None

    def _pool_of_value(self, name: str) -> str:
        """Where a value is made: a filter stays there, so that what it drops never travels."""
        made = next((n for n in self.recorder.nodes if n.name == name), None)
        if made is None:
            return self._argument(name).pool
        return self._pool_of_value(made.inputs[0].ref.node) if made.construct == "keep" else made.pool

    def _node(self, node: Node) -> Node:
        inputs = tuple(
            dataclasses.replace(i, ref=Ref(self.renamed.get(i.ref.node, i.ref.node), i.ref.output)) for i in node.inputs
        )
        pool = node.pool
        if not node.fires:
            pool = self._pool_of_reader(node.name) or "default"
        elif node.construct == "keep":
            pool = self._pool_of_value(node.inputs[0].ref.node)
        return dataclasses.replace(node, inputs=inputs, pool=pool)

    def _argument(self, name: str) -> Argument:
        type_ = self._type(name)
        path = self.recorder.declare(type_)
        pool = getattr(type_, "pool", None)
        if name in self.results:
            producer = next((n for n in self.recorder.nodes if n.name == self.results[name].node), None)
            direct = [n.pool for n, _ in self._readers(name) if n.fires]
            pool = producer.pool if producer is not None else next(iter(direct), pool)
        else:
            pool = self._pool_of_reader(name) or pool
        return Argument(
            name=self.renamed.get(name, name),
            kind="carried" if name in self.results else "source",
            type=path,
            maker=getattr(type_, "maker", ""),
            pool=pool or "default",
            where=self.program.where,
        )

    def _type(self, name: str) -> Any:
        """An argument's class: as annotated, as its first reader says, as its next value is, or a policy if it is
        only broadcast."""
        annotated = self.program.arguments[name]
        readers = self._readers(name)
        said = [i.type for _, i in readers]
        if name in self.results:
            made = [o.type for n in self.recorder.nodes for o in n.outputs if Ref(n.name, o.name) == self.results[name]]
            said += made
        known = [self.recorder.types[type_] for type_ in said if type_ != ANY]
        if annotated is not Any or known:
            return annotated if annotated is not Any else known[0]
        return Policy if any(n.construct == "broadcast" for n, _ in readers) else Any


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
