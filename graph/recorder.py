"""What tracing records: handles stand for values, and each call of a node with them becomes a node of the graph."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.graph.faults import caller, fault, nearest
from penstock.graph.interface import REQUIRED
from penstock.graph.ir import Input, Json, Node, Output, Ref
from penstock.graph.paths import encode, path_of, short
from penstock.graph.types import Weights

if TYPE_CHECKING:
    from penstock.graph.definition import NodeDef

ANY = "typing:Any"


class Handle:
    """A value of the program while it is traced. It can be passed to nodes and returned, and nothing else."""

    __slots__ = ("_recorder", "_ref")

    def __init__(self, recorder: "Recorder", ref: Ref) -> None:
        self._recorder, self._ref = recorder, ref

    def __repr__(self) -> str:
        return f"<the program's value {self._ref}>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(self, f"its attribute {name!r}")


def _refuse(handle: Handle, use: str) -> NoReturn:
    needed = "a node: put the expression in a function with @node and call that"
    raise fault(f"{handle!r} has no number or content while the program is traced", use, needed)


def _refusing(name: str) -> Any:
    def method(self: Handle, *_: Any) -> NoReturn:
        _refuse(self, f"an expression with it ({name})")

    return method


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_COMPARISON = ("eq", "ne", "lt", "le", "gt", "ge", "contains", "bool", "len", "iter", "getitem", "call")
_UNARY = ("neg", "pos", "abs", "invert", "int", "float", "index")
for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *_COMPARISON, *_UNARY):
    setattr(Handle, f"__{_name}__", _refusing(_name))
Handle.__hash__ = object.__hash__  # type: ignore[method-assign]


class Recorder:
    """The nodes of one trace in program order, and the types that they and the arguments name."""

    def __init__(self, arguments: Sequence[str], prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[Node] = []
        self.types: dict[str, type] = {}
        self._taken = {*arguments, *(prefix + a for a in arguments)}

    def declare(self, type_: Any) -> str:
        """The type's path, noted with the type for the graph's table of bases."""
        path = ANY if type_ is Any else path_of(type_)
        if path != ANY:
            self.types[path] = type_
        return path

    def ref(self, value: Any, what: str, type_: str) -> Ref:
        """The edge's tail. Raises GraphError for anything but a value of this program."""
        if isinstance(value, Handle) and value._recorder is self:
            return value._ref
        given = f"a value of another program, {value!r}" if isinstance(value, Handle) else repr(value)
        kind = "" if type_ == ANY else f" of type {short(type_)}"
        needed = f"a value{kind} of this program: an argument, or what a node returned (constants are options)"
        raise fault(what, given, needed)

    def call(self, definition: "NodeDef[..., Any]", args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record one call of a node; its outputs' handles, bundled as the node returns them."""
        interface = definition.interface
        node = Node(
            name=self._name(definition.__name__),
            op=definition.path,
            inputs=self._inputs(definition, args, kwargs),
            outputs=tuple(Output(port.name, self.declare(port.type)) for port in interface.outputs),
            options=_options(definition, kwargs),
            pool=definition.pool,
            clock=definition.clock,
            stateful=definition.init is not None and not interface.stream,
            where=caller(),
            given=tuple(key for key in kwargs if key in interface.options),
        )
        self.nodes.append(node)
        return interface.bundle(*(Handle(self, Ref(node.name, o.name)) for o in node.outputs))

    def broadcast(self, value: Any, lag: Any) -> Handle:
        ref = self.ref(value, "broadcast", ANY)
        node = Node(
            name=self._name("broadcast"),
            op="broadcast",
            inputs=(Input("value", ANY, ref),),
            outputs=(Output("out", self.declare(Weights)),),
            clock="update",
            construct="broadcast",
            lag=encode(lag, "broadcast: option 'lag'"),
            where=caller(),
        )
        self.nodes.append(node)
        return Handle(self, Ref(node.name))

    def _name(self, function: str) -> str:
        stem = name = self.prefix + function
        count = 1
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._taken.add(name)
        return name

    def _inputs(
        self, definition: "NodeDef[..., Any]", args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Input, ...]:
        name, ports = definition.__name__, definition.interface.inputs
        if len(args) > len(ports):
            given = f"{len(args)} positional values"
            needed = f"{len(ports)} ({', '.join(p.name for p in ports)}); options are passed by keyword"
            raise fault(f"{name}: inputs", given, needed)
        values = dict(zip((p.name for p in ports), args, strict=False))
        if twice := values.keys() & kwargs.keys():
            raise fault(f"{name}: input {min(twice)!r}", "two values, by place and by keyword", "one")
        values.update({key: value for key, value in kwargs.items() if key in {p.name for p in ports}})
        inputs = []
        for port in ports:
            type_, what = self.declare(port.type), f"{name}: input {port.name!r}"
            value = values.get(port.name, REQUIRED)
            if port.optional and (value is None or value is REQUIRED):
                continue
            if value is REQUIRED:
                raise fault(what, "nothing", f"a value of type {short(type_)}")
            inputs.append(Input(port.name, type_, self.ref(value, what, type_)))
        return tuple(inputs)


def _options(definition: "NodeDef[..., Any]", kwargs: Mapping[str, Any]) -> tuple[tuple[str, Json], ...]:
    name, interface = definition.__name__, definition.interface
    names = {port.name for port in interface.inputs}
    for key in kwargs.keys() - names - interface.options.keys():
        known = [*names, *interface.options]
        raise fault(f"{name}: option {key!r}", repr(kwargs[key]), f"an option of {name}{nearest(key, known)}")
    options = {}
    for key, default in sorted(interface.options.items()):
        value, what = kwargs.get(key, default), f"{name}: option {key!r}"
        if value is REQUIRED:
            raise fault(what, "nothing", "a value, since it has no default")
        if isinstance(value, Handle):
            raise fault(what, repr(value), "a constant; values of the program are passed as positional inputs")
        options[key] = encode(value, what)
    return tuple(options.items())


current: ContextVar[Recorder | None] = ContextVar("current", default=None)
"""The trace under way, if there is one."""


def has_handles(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Handle) for value in values)
