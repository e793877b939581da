"""What tracing records: handles stand for values, and each call of a node with them becomes a node of the graph.

From what was recorded to a graph: which arguments are carried, of what types, and in which pools all of it is.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from penstock.graph.errors import Fault, GraphError, caller, fault, nearest
from penstock.graph.imports import encode, path_of, require_no_function, short
from penstock.graph.interface import REQUIRED, Interface, Port
from penstock.graph.ir import Argument, Graph, Input, Json, Node, Output, Ref
from penstock.graph.types import Policy, Weights

if TYPE_CHECKING:
    from penstock.graph.node import NodeDef
    from penstock.graph.program import Program


ANY = "typing:Any"
BACK = ("conversation", "replies")
"""The inputs by which a node that speaks gets what it, and the one that answers, made in the turn before."""
EARLIER = "earlier"
"""The optional input by which a node that answers gets what it made itself in the turn before."""


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
    """The nodes of one trace in program order, and the types that they and the arguments name.

    `faults` are of options that were left out, so that tracing could go on. A node that has one names no `op`: what it
    requires of its call cannot be said.
    """

    def __init__(self, arguments: Mapping[str, Any], prefix: str, taken: Iterable[str] = ()) -> None:
        """`arguments` are the program's, with their types. No node gets a name that is `taken`."""
        self.prefix = prefix
        self.nodes: list[Node] = []
        self.types: dict[str, type] = {}
        self.faults: list[Fault] = []
        self._arguments = arguments
        self._weights: dict[Ref, Handle] = {}
        self._taken = {*arguments, *(prefix + a for a in arguments), *taken}

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
        node = self._node(definition, args, kwargs)
        self.nodes.append(node)
        return self._outputs(definition, node)

    def _node(self, definition: "NodeDef[..., Any]", args: Sequence[Any], kwargs: Mapping[str, Any]) -> Node:
        interface, kwargs = definition.interface, {**definition.bound, **kwargs}
        options, faults = _options(definition, kwargs)
        self.faults += faults
        inputs = self._inputs(definition, args, kwargs)
        return Node(
            name=self._named(definition) if definition.label else self._name(definition.__name__),
            op="" if faults else definition.path,
            inputs=(*inputs, *self._strays(interface, kwargs)),
            outputs=tuple(Output(port.name, self._made(port, interface, inputs)) for port in interface.outputs),
            options=options,
            pool=definition.pool,
            clock=definition.clock,
            stateful=definition.init is not None and not interface.stream,
            stream=interface.stream,
            every=encode(definition.beat, f"{definition.__name__}.every"),
            where=caller(),
            given=(*_by_keyword(definition, inputs), *(key for key in kwargs if key in interface.options)),
        )

    def _list(self, name: str, values: Any, what: str, type_: str) -> list[Input]:
        """The values of an input that is a list, each an input by its place."""
        if not isinstance(values, list | tuple):
            raise fault(what, repr(values), f"a list of values of type {short(type_)}")
        named = [(f"{name}[{place}]", value) for place, value in enumerate(values)]
        return [Input(each, type_, self.ref(value, f"{what}, number {each}", type_)) for each, value in named]

    def _made(self, port: Port, interface: Interface, inputs: Sequence[Input]) -> str:
        """The type of an output: what it declares, or where that is a TypeVar, what the call passes for it."""
        same = {p.name for p in interface.inputs if port.variable and p.variable == port.variable}
        given = (self._type(item.ref) for item in inputs if item.name in same)
        fit = (path for path in given if path in self.types and issubclass(self.types[path], port.type))
        return next(fit, None) or self.declare(port.type)

    def _strays(self, interface: Interface, kwargs: Mapping[str, Any]) -> Iterator[Input]:
        """Values that were passed under names which the node does not know: they have a reader all the same."""
        for key in kwargs.keys() - interface.options.keys() - {port.name for port in interface.inputs}:
            if isinstance(kwargs[key], Handle):
                yield Input(key, ANY, self.ref(kwargs[key], key, ANY))

    def _outputs(self, definition: "NodeDef[..., Any]", node: Node) -> Any:
        return definition.interface.bundle(*(Handle(self, Ref(node.name, o.name)) for o in node.outputs))

    def broadcast(self, value: Any, lag: Any, every: Any) -> Handle:
        return self._edge("broadcast", value, self.declare(Weights), lag, encode(every, "broadcast: option 'every'"))

    def weights(self, value: Any, what: str) -> Handle:
        """Weights as they are, or those of a carried value by a broadcast whose lag nobody has said: it is 0 for a
        value that never changes, which is known at the end of the trace, and a fault for any other."""
        ref = self.ref(value, what, self.declare(Weights))
        if self._type(ref) == path_of(Weights):
            return Handle(self, ref)
        if ref not in self._weights:
            self._weights[ref] = self.broadcast(value, None, 1)
        return self._weights[ref]

    def delay(self, value: Any, lag: Any) -> Handle:
        return self._edge("delay", value, self._type(self.ref(value, "delay", ANY)), lag, 1)

    def _edge(self, construct: Literal["broadcast", "delay"], value: Any, type_: str, lag: Any, every: Any) -> Handle:
        """A way in which a carried value is read."""
        node = Node(
            name=self._name(construct),
            op=construct,
            inputs=(Input("value", ANY, self.ref(value, construct, ANY)),),
            outputs=(Output("out", type_),),
            clock="update",
            construct=construct,
            lag=encode(lag, f"{construct}: option 'lag'"),
            every=every,
            where=caller(),
        )
        self.nodes.append(node)
        return Handle(self, Ref(node.name))

    def keep(self, values: Sequence[Any], when: Any) -> Any:
        """Record a filter; handles of what it lets through, one alone for one value."""
        if not values:
            raise fault("keep", "no value", "the values of a group, the last of them often its rewards")
        if not callable(when) or isinstance(when, Handle):
            raise fault("keep: option 'when'", repr(when), "a function of the values that returns True or False")
        refs = [self.ref(value, f"keep: value {index}", ANY) for index, value in enumerate(values)]
        node = Node(
            name=self._name("keep"),
            op="keep",
            inputs=tuple(Input(str(index), self._type(ref), ref) for index, ref in enumerate(refs)),
            outputs=tuple(Output(str(index), self._type(ref)) for index, ref in enumerate(refs)),
            options=(("when", encode(when, "keep: option 'when'")),),
            construct="keep",
            where=caller(),
            given=("when",),
        )
        self.nodes.append(node)
        kept = tuple(Handle(self, Ref(node.name, o.name)) for o in node.outputs)
        return kept if len(kept) > 1 else kept[0]

    def alternate(
        self,
        speak: "NodeDef[..., Any]",
        answer: "NodeDef[..., Any]",
        inputs: Sequence[Any],
        turns: Any,
        options: Mapping[str, Any],
    ) -> tuple[Any, Any]:
        """Record two nodes that take turns on a group; the outputs of both, as each returns them."""
        ports = {port.name: port for port in speak.interface.inputs}
        if not all(name in ports and ports[name].optional for name in BACK):
            needed = f"one with the optional inputs {' and '.join(BACK)}: what both made in the turn before"
            raise fault("alternate: the node that speaks", f"{speak.__name__}({', '.join(ports)})", needed)
        spoken = {*speak.interface.options, *ports.keys() - BACK}
        answered = answer.interface.options.keys() - answer.bound.keys()
        known = {*spoken, *answered}
        unknown = [name for name in options if name not in known]
        for name in unknown:
            needed = f"an option of {speak.__name__} or {answer.__name__}{nearest(name, known)}"
            self.faults.append(Fault(f"alternate: option {name!r}", repr(options[name]), needed, caller()))
        for name in options.keys() & spoken & answered:
            given = f"{options[name]!r}, and both {speak.__name__} and {answer.__name__} have it"
            needed = f"the answering one's own beside it: {answer.written}.given({name}=…)"
            self.faults.append(Fault(f"alternate: option {name!r}", given, needed, caller()))
        said = self._node(speak, inputs, {k: v for k, v in options.items() if k in spoken})
        first = [Handle(self, Ref(said.name, said.outputs[0].name))] if said.outputs else []
        heard = self._answer(answer, first, {k: v for k, v in options.items() if k in answered})
        if not said.outputs or not heard.outputs:
            silent = speak if not said.outputs else answer
            raise fault(f"alternate: {silent.__name__}", "a node without an output", "one for the other to read")
        back = tuple(
            Input(name, self.declare(ports[name].type), Ref(node.name, node.outputs[0].name), back=True)
            for name, node in zip(BACK, (said, heard), strict=True)
        )
        own = tuple(
            Input(EARLIER, self.declare(port.type), Ref(heard.name, heard.outputs[0].name), back=True)
            for port in answer.interface.inputs
            if port.name == EARLIER and port.optional and EARLIER not in answer.bound
        )
        bound = encode(inf if turns is None else turns, "alternate: option 'turns'")
        said, heard = (replace(node, op="" if unknown else node.op, turns=bound) for node in (said, heard))
        self.nodes += [replace(said, inputs=said.inputs + back), replace(heard, inputs=heard.inputs + own)]
        return self._outputs(speak, said), self._outputs(answer, heard)

    def _answer(self, answer: "NodeDef[..., Any]", first: Sequence[Any], options: Mapping[str, Any]) -> Node:
        """The node that answers: its first input that is not bound is what the other one has made, and those behind are
        its own."""
        own = [p.name for p in answer.interface.inputs if not p.optional and p.name not in answer.bound]
        if len(own) > 1:
            needed = f"all but what it answers: {answer.written}.given({', '.join(f'{name}=…' for name in own[1:])})"
            if answer.written != answer.__name__ and own[1:] == answer.weights:
                needed = f"the weights that it answers with: {answer.written}"
            raise fault(f"alternate: inputs of {answer.__name__}, which answers", "nothing", needed)
        return self._node(answer, first, options)

    def _type(self, ref: Ref) -> str:
        """The type of a value of this program, as far as it is known."""
        for node in self.nodes:
            if node.name == ref.node:
                return next(o.type for o in node.outputs if o.name == ref.output)
        return self.declare(self._arguments[ref.node])

    def _named(self, definition: "NodeDef[..., Any]") -> str:
        """The name that the program gives this call. Raises GraphError for one that another call has."""
        label, called = definition.label, f"{definition.__name__}.named"
        name = self.prefix + label
        other = next((node for node in self.nodes if node.label == name), None)
        if other is not None:
            raise fault(called, f"{label!r}, the name of the call at {other.where}", "a name of its own for each call")
        if name in self._taken:  # by an argument, which is the value that edges of that name carry
            name = f"{name}:{definition.__name__}"
        self._taken.add(name)
        return name

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
        free = [port.name for port in ports if port.name not in definition.bound]
        if len(args) > len(free):
            given = f"{len(args)} positional values"
            needed = f"{len(free)} ({', '.join(free)}), since {', '.join(sorted(definition.bound))} is given already"
            raise fault(f"{name}: inputs", given, needed)
        values = dict(zip(free, args, strict=False))
        if twice := values.keys() & kwargs.keys():
            raise fault(f"{name}: input {min(twice)!r}", "two values, by place and by keyword", "one")
        values.update({key: value for key, value in kwargs.items() if key in {p.name for p in ports}})
        inputs = []
        for port in ports:
            type_, what = self.declare(port.type), f"{name}: input {port.name!r}"
            value = values.get(port.name, REQUIRED)
            if port.several:
                inputs += self._list(port.name, () if value is REQUIRED else value, what, type_)
                continue
            if port.optional and (value is None or value is REQUIRED):
                continue
            if value is REQUIRED:
                raise fault(what, "nothing", f"a value of type {short(type_)}")
            inputs.append(Input(port.name, type_, self.ref(value, what, type_)))
        return tuple(inputs)


def _by_keyword(definition: "NodeDef[..., Any]", inputs: Sequence[Input]) -> list[str]:
    """The inputs that stand behind one that the call left out, and those of lists."""
    ports = definition.interface.inputs
    place = next((i for i, (item, port) in enumerate(zip(inputs, ports, strict=False)) if item.name != port.name), None)
    return [item.name for item in inputs[len(ports) if place is None else place :]]


def _options(
    definition: "NodeDef[..., Any]", kwargs: Mapping[str, Any]
) -> tuple[tuple[tuple[str, Json], ...], list[Fault]]:
    """The options of a call, and what is wrong with those that are left out."""
    name, interface = definition.__name__, definition.interface
    known = [*(port.name for port in interface.inputs), *interface.options]
    faults = [
        Fault(f"{name}: option {key!r}", repr(kwargs[key]), f"an option of {name}{nearest(key, known)}", caller())
        for key in kwargs
        if key not in known
    ]
    options = {}
    for key, default in sorted(interface.options.items()):
        try:
            what, value = f"{name}: option {key!r}", kwargs.get(key, default)
            if not isinstance(value, Handle):
                require_no_function(value, definition.fn.__annotations__.get(key), what)
            options[key] = _option(value, what)
        except GraphError as error:
            faults += error.faults
    return tuple(options.items()), faults


def _option(value: Any, what: str) -> Json:
    if value is REQUIRED:
        raise fault(what, "nothing", "a value, since it has no default")
    if isinstance(value, Handle):
        raise fault(what, repr(value), "a constant; values of the program are passed as positional inputs")
    return encode(value, what)


current: ContextVar[Recorder | None] = ContextVar("current", default=None)
"""The trace under way, if there is one."""


def has_handles(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Handle) for value in values)


class Assembly:
    """Makes a graph of what was recorded, once it is known which arguments are carried."""

    def __init__(self, program: "Program[..., Any]", recorder: Recorder, results: dict[str, Ref]) -> None:
        self.program, self.recorder = program, recorder
        read = {i.ref.node for n in recorder.nodes for i in n.inputs}
        unused = {name for name, ref in results.items() if ref == Ref(name) and name not in read}
        self.results = {name: ref for name, ref in results.items() if name not in unused}
        sources = [a for a in program.arguments if a not in results]
        for name in sources:
            if name in program.names:
                what, given = f"{program.name}.of: {name}={program.names[name]!r}", f"{name!r}, which is a source"
                needed = f"a carried argument: {', '.join(results) or 'there is none'}"
                raise fault(what, given, needed, program.renamed)
        self.renamed = {name: recorder.prefix + name for name in sources} | program.names
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
            results=tuple((self.renamed.get(name, name), self._ref(ref)) for name, ref in self.results.items()),
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
        inputs = tuple(dataclasses.replace(i, ref=self._ref(i.ref)) for i in node.inputs)
        pool = node.pool
        if not node.fires:
            pool = self._pool_of_reader(node.name) or "default"
        elif node.construct == "keep":
            pool = self._pool_of_value(node.inputs[0].ref.node)
        if node.construct == "broadcast" and node.lag is None and self.results.get(carried := node.inputs[0].ref.node):
            lag = 0 if self.results[carried] == Ref(carried) else None
            return dataclasses.replace(node, inputs=inputs, pool=pool, lag=lag)
        return dataclasses.replace(node, inputs=inputs, pool=pool)

    def _ref(self, ref: Ref) -> Ref:
        return Ref(self.renamed.get(ref.node, ref.node), ref.output)

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
