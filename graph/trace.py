"""Tracing: handles stand for values, and each call of a node with them becomes a node of the graph.

A `Recorder` collects the nodes of one trace in program order. Types, pools and names of arguments are known at its
end only, when the program has returned its carried values: `Assembly` makes the graph then. Invariants: each handle
belongs to one recorder, and no two nodes of a recorder have one name.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from penstock.graph.errors import Fault, GraphError, caller, fault, nearest
from penstock.graph.imports import encode, path_of, require_no_function, short
from penstock.graph.interface import REQUIRED
from penstock.graph.ir import Argument, Graph, Input, Json, Node, Output, Ref
from penstock.graph.types import Policy, Weights

if TYPE_CHECKING:
    from penstock.graph.node import NodeDef
    from penstock.graph.program import Program


ANY = "typing:Any"
# The inputs by which a node that speaks gets what it, and the one that answers, made in the turn before.
BACK = ("conversation", "replies")
# The optional input by which a node that answers gets what it made itself in the turn before.
EARLIER = "earlier"


class Handle:
    """A value of the program while it is traced. It can be passed to nodes and returned, and nothing else."""

    __slots__ = ("_recorder", "_ref")

    def __init__(self, recorder: "TraceRecorder", ref: Ref) -> None:
        self._recorder, self._ref = recorder, ref

    def __repr__(self) -> str:
        return f"<the program's value {self._ref}>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(self, f"its attribute {name!r}")


def _refuse(handle: Handle, use: str) -> NoReturn:
    what = f"{handle!r} has no number or content while the program is traced"
    raise fault("value-while-tracing", what, use, "a node: put the expression in a function with @node and call that")


def _refusing(name: str) -> Any:
    def method(self: Handle, *_: Any) -> NoReturn:
        _refuse(self, f"an expression with it ({name})")

    return method


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_COMPARISON = ("eq", "ne", "lt", "le", "gt", "ge", "contains", "bool", "len", "iter", "getitem", "call")
_UNARY = ("neg", "pos", "abs", "invert", "int", "float", "index")
# Without these, `rewards - 1` would raise a TypeError that does not say what to write instead.
for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *_COMPARISON, *_UNARY):
    setattr(Handle, f"__{_name}__", _refusing(_name))
# A class that defines __eq__ loses its hash; handles are compared by identity.
Handle.__hash__ = object.__hash__  # type: ignore[method-assign]


class TraceRecorder:
    """The nodes of one trace in program order, and the types that they and the arguments name.

    `faults` are of options that were left out, so that tracing could go on. A node that has one names no `op`, so that
    nothing is required of its call.
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
        raise fault("not-a-value", what, given, needed)

    def type_of(self, ref: Ref) -> str:
        """The type of a value of this program, as far as it is known."""
        for node in self.nodes:
            if node.name == ref.node:
                return next(o.type for o in node.outputs if o.name == ref.output)
        return self.declare(self._arguments[ref.node])

    def call(self, definition: "NodeDef[..., Any]", args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record one call of a node; its outputs' handles, bundled as the node returns them."""
        node = self._node(definition, args, kwargs)
        self.nodes.append(node)
        return self._outputs(definition, node)

    def broadcast(self, value: Any, lag: Any, every: Any) -> Handle:
        """Record a broadcast; the handle of its weights."""
        return self._edge("broadcast", value, self.declare(Weights), lag, encode(every, "broadcast: option 'every'"))

    def weights(self, value: Any, what: str) -> Handle:
        """Weights as they are, or those of a carried value by a broadcast without a lag, one for each value.

        That lag is 0 for a value that never changes, which is known at the end of the trace, and a fault for any other.
        """
        ref = self.ref(value, what, self.declare(Weights))
        if self.type_of(ref) == path_of(Weights):
            return Handle(self, ref)
        # One broadcast for all nodes that read the same value: it would be sent once for each.
        if ref not in self._weights:
            self._weights[ref] = self.broadcast(value, None, 1)
        return self._weights[ref]

    def delay(self, value: Any, lag: Any) -> Handle:
        """Record a delay; the handle of the value as it was."""
        return self._edge("delay", value, self.type_of(self.ref(value, "delay", ANY)), lag, 1)

    def _edge(self, construct: Literal["broadcast", "delay"], value: Any, type_: str, lag: Any, every: Any) -> Handle:
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
        """Record a filter; the handles of the kept values, one alone for one value."""
        if not values:
            needed = "the values of a group, the last of them often its rewards"
            raise fault("missing-input", "keep", "no value", needed)
        if not callable(when) or isinstance(when, Handle):
            needed = "a function of the values that returns True or False"
            raise fault("no-predicate", "keep: option 'when'", repr(when), needed)
        refs = [self.ref(value, f"keep: value {index}", ANY) for index, value in enumerate(values)]
        node = Node(
            name=self._name("keep"),
            op="keep",
            inputs=tuple(Input(str(index), self.type_of(ref), ref) for index, ref in enumerate(refs)),
            outputs=tuple(Output(str(index), self.type_of(ref)) for index, ref in enumerate(refs)),
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
            given = f"{speak.__name__}({', '.join(ports)})"
            raise fault("speaker-inputs", "alternate: the node that speaks", given, needed)
        # An option goes to the node that has it.
        spoken = {*speak.interface.options, *ports.keys() - BACK}
        answered = answer.interface.options.keys() - answer.bound.keys()
        known = {*spoken, *answered}
        unknown = [name for name in options if name not in known]
        for name in unknown:
            needed = f"an option of {speak.__name__} or {answer.__name__}{nearest(name, known)}"
            what = f"alternate: option {name!r}"
            self.faults.append(Fault("unknown-option", what, repr(options[name]), needed, caller()))
        for name in options.keys() & spoken & answered:
            given = f"{options[name]!r}, and both {speak.__name__} and {answer.__name__} have it"
            needed = f"the answering one's own beside it: {answer.written}.given({name}=…)"
            self.faults.append(Fault("ambiguous-option", f"alternate: option {name!r}", given, needed, caller()))
        said = self._node(speak, inputs, {k: v for k, v in options.items() if k in spoken})
        # The answering node's first input that is not bound is what the other one has made.
        own = [p.name for p in answer.interface.inputs if not p.optional and p.name not in answer.bound]
        if len(own) > 1:
            needed = f"all but what it answers: {answer.written}.given({', '.join(f'{name}=…' for name in own[1:])})"
            if answer.written != answer.__name__ and own[1:] == answer.weights:
                needed = f"the weights that it answers with: {answer.written}"
            raise fault("answer-inputs", f"alternate: inputs of {answer.__name__}, which answers", "nothing", needed)
        first = [Handle(self, Ref(said.name, said.outputs[0].name))] if said.outputs else []
        heard = self._node(answer, first, {k: v for k, v in options.items() if k in answered})
        if not said.outputs or not heard.outputs:
            what = f"alternate: {(answer if said.outputs else speak).__name__}"
            raise fault("no-output", what, "a node without an output", "one for the other to read")
        said_ref, heard_ref = (Ref(node.name, node.outputs[0].name) for node in (said, heard))
        back = [
            Input(name, self.declare(ports[name].type), ref, back=True)
            for name, ref in zip(BACK, (said_ref, heard_ref), strict=True)
        ]
        earlier = [
            Input(EARLIER, self.declare(port.type), heard_ref, back=True)
            for port in answer.interface.inputs
            if port.name == EARLIER and port.optional and EARLIER not in answer.bound
        ]
        # Without a bound the graph is still made: `check` has the fault, with all others.
        bound = encode(inf if turns is None else turns, "alternate: option 'turns'")
        for node, more in ((said, back), (heard, earlier)):
            op = "" if unknown else node.op
            self.nodes.append(replace(node, op=op, turns=bound, inputs=(*node.inputs, *more)))
        return self._outputs(speak, said), self._outputs(answer, heard)

    def _outputs(self, definition: "NodeDef[..., Any]", node: Node) -> Any:
        return definition.interface.bundle(*(Handle(self, Ref(node.name, o.name)) for o in node.outputs))

    def _node(self, definition: "NodeDef[..., Any]", args: Sequence[Any], kwargs: Mapping[str, Any]) -> Node:
        interface, kwargs = definition.interface, {**definition.bound, **kwargs}
        options, faults = _options(definition, kwargs)
        self.faults += faults
        inputs = self._inputs(definition, args, kwargs)
        # A value passed under a name that the node does not know is a fault of its option, but it has a reader.
        unknown = kwargs.keys() - interface.options.keys() - {port.name for port in interface.inputs}
        strays = [Input(k, ANY, self.ref(kwargs[k], k, ANY)) for k in unknown if isinstance(kwargs[k], Handle)]
        # Inputs behind one that the call left out are written by keyword, and so are those of lists.
        gap = next(
            (n for n, (i, port) in enumerate(zip(inputs, interface.inputs, strict=False)) if i.name != port.name), None
        )
        by_keyword = [item.name for item in inputs[len(interface.inputs) if gap is None else gap :]]
        outputs = []
        for port in interface.outputs:
            # An output with a type variable has the type of the value that the call passes for that variable.
            same = {p.name for p in interface.inputs if port.variable and p.variable == port.variable}
            given = (self.type_of(item.ref) for item in inputs if item.name in same)
            fit = (path for path in given if path in self.types and issubclass(self.types[path], port.type))
            outputs.append(Output(port.name, next(fit, None) or self.declare(port.type)))
        return Node(
            name=self._label(definition) if definition.label else self._name(definition.__name__),
            op="" if faults else definition.path,
            inputs=(*inputs, *strays),
            outputs=tuple(outputs),
            options=options,
            pool=definition.pool,
            clock=definition.clock,
            stateful=definition.init is not None and not interface.stream,
            stream=interface.stream,
            every=encode(definition.period, f"{definition.__name__}.every"),
            where=caller(),
            given=(*by_keyword, *(key for key in kwargs if key in interface.options)),
        )

    def _label(self, definition: "NodeDef[..., Any]") -> str:
        """The name that the program gives this call. Raises GraphError for one that another call has."""
        label = definition.label
        name = self.prefix + label
        other = next((node for node in self.nodes if node.label == name), None)
        if other is not None:
            given = f"{label!r}, the name of the call at {other.where}"
            raise fault("duplicate-name", f"{definition.__name__}.named", given, "a name of its own for each call")
        if name in self._taken:  # by an argument, which is the value that edges of that name carry
            name = f"{name}:{definition.__name__}"
        self._taken.add(name)
        return name

    def _name(self, function: str) -> str:
        stem = name = self.prefix + function
        count = 1
        # The second call of `policy_update` is `policy_update_2`, which checkpoints and figures then know it by.
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._taken.add(name)
        return name

    def _inputs(
        self, definition: "NodeDef[..., Any]", args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Input, ...]:
        name, ports = definition.__name__, definition.interface.inputs
        free = [port.name for port in ports if port.name not in definition.bound]
        if len(args) > len(free):
            needed = f"{len(free)} ({', '.join(free)}), since {', '.join(sorted(definition.bound))} is given already"
            if len(args) > len(ports):
                needed = f"{len(ports)} ({', '.join(p.name for p in ports)}); options are passed by keyword"
            raise fault("too-many-inputs", f"{name}: inputs", f"{len(args)} positional values", needed)
        values = dict(zip(free, args, strict=False))
        if twice := values.keys() & kwargs.keys():
            what = f"{name}: input {min(twice)!r}"
            raise fault("input-given-twice", what, "two values, by place and by keyword", "one")
        values.update({key: value for key, value in kwargs.items() if key in {p.name for p in ports}})
        inputs = []
        for port in ports:
            type_, what = self.declare(port.type), f"{name}: input {port.name!r}"
            value = values.get(port.name, () if port.several else REQUIRED)
            if port.several:
                if not isinstance(value, list | tuple):
                    raise fault("not-a-list", what, repr(value), f"a list of values of type {short(type_)}")
                for place, each in enumerate(value):
                    item = f"{port.name}[{place}]"
                    inputs.append(Input(item, type_, self.ref(each, f"{what}, number {item}", type_)))
            elif value is REQUIRED and not port.optional:
                raise fault("missing-input", what, "nothing", f"a value of type {short(type_)}")
            elif value is not REQUIRED and not (port.optional and value is None):
                inputs.append(Input(port.name, type_, self.ref(value, what, type_)))
        return tuple(inputs)


def _options(
    definition: "NodeDef[..., Any]", kwargs: Mapping[str, Any]
) -> tuple[tuple[tuple[str, Json], ...], list[Fault]]:
    """The options of a call as JSON, and the faults of those that are left out of it."""
    name, interface = definition.__name__, definition.interface
    known = [*(port.name for port in interface.inputs), *interface.options]
    faults = []
    for key in kwargs:
        if key not in known:
            needed = f"an option of {name}{nearest(key, known)}"
            faults.append(Fault("unknown-option", f"{name}: option {key!r}", repr(kwargs[key]), needed, caller()))
    options = {}
    for key, default in sorted(interface.options.items()):
        what, value = f"{name}: option {key!r}", kwargs.get(key, default)
        # All faulty options of a call are told at once: each is left out, and tracing goes on.
        try:
            if value is REQUIRED:
                raise fault("missing-option", what, "nothing", "a value, since it has no default")
            if isinstance(value, Handle):
                needed = "a constant; values of the program are passed as positional inputs"
                raise fault("value-as-option", what, repr(value), needed)
            require_no_function(value, definition.fn.__annotations__.get(key), what)
            options[key] = encode(value, what)
        except GraphError as error:
            faults += error.faults
    return tuple(options.items()), faults


# The trace under way, if there is one.
current: ContextVar[TraceRecorder | None] = ContextVar("current", default=None)


def recording(what: str) -> TraceRecorder:
    """The recorder of the trace under way. Raises GraphError outside of a program; `what` was called."""
    recorder = current.get()
    if recorder is None:
        raise fault("outside-program", what, "a call outside of a program", "a call in a function with @program")
    return recorder


def has_handles(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Handle) for value in values)


class Assembly:
    """Makes a graph of a finished trace: `results` has the next value of each carried argument, by name."""

    def __init__(self, program: "Program[..., Any]", recorder: TraceRecorder, results: dict[str, Ref]) -> None:
        self.program, self.recorder = program, recorder
        self.nodes = {node.name: node for node in recorder.nodes}
        read = {i.ref.node for n in recorder.nodes for i in n.inputs}
        # A carried value that nothing reads or changes has no part in the graph.
        unused = {name for name, ref in results.items() if ref == Ref(name) and name not in read}
        self.results = {name: ref for name, ref in results.items() if name not in unused}
        sources = [a for a in program.arguments if a not in results]
        for name in sources:
            if name in program.names:
                what, given = f"{program.name}.of: {name}={program.names[name]!r}", f"{name!r}, which is a source"
                needed = f"a carried argument: {', '.join(results) or 'there is none'}"
                raise fault("not-carried", what, given, needed, program.renamed)
        self.renamed = {name: recorder.prefix + name for name in sources} | program.names
        self.names = [a for a in program.arguments if a not in unused]

    def graph(self, options: Mapping[str, Any]) -> Graph:
        program = self.program
        nodes = tuple(self._node(n) for n in self.recorder.nodes)
        arguments = tuple(self._argument(name) for name in self.names)
        table = {
            path: tuple(path_of(base) for base in type_.__mro__[1:] if base is not object)
            for path, type_ in sorted(self.recorder.types.items())
        }
        return Graph(
            name=program.name,
            op=program.path,
            arguments=arguments,
            nodes=nodes,
            results=tuple((self.renamed.get(name, name), self._ref(ref)) for name, ref in self.results.items()),
            options=tuple(options.items()),
            types=tuple(table.items()),
            doc=program.doc,
            where=program.where,
        )

    def _ref(self, ref: Ref) -> Ref:
        return Ref(self.renamed.get(ref.node, ref.node), ref.output)

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
        """The pool that makes a value. A filter stays there, so that what it drops never travels."""
        made = self.nodes.get(name)
        if made is None:
            return self._argument(name).pool
        return self._pool_of_value(made.inputs[0].ref.node) if made.construct == "keep" else made.pool

    def _node(self, node: Node) -> Node:
        pool, lag = node.pool, node.lag
        # Weights arrive where they are read.
        if not node.fires:
            pool = self._pool_of_reader(node.name) or "default"
        elif node.construct == "keep":
            pool = self._pool_of_value(node.inputs[0].ref.node)
        carried = node.inputs[0].ref.node if node.inputs else ""
        if node.construct == "broadcast" and lag is None and self.results.get(carried) == Ref(carried):
            lag = 0
        return replace(node, inputs=tuple(replace(i, ref=self._ref(i.ref)) for i in node.inputs), pool=pool, lag=lag)

    def _argument(self, name: str) -> Argument:
        type_ = self._type(name)
        pool = getattr(type_, "pool", None)
        if name in self.results:
            # The node that makes the next value holds the value; if it never changes, its first reader does.
            producer = self.nodes.get(self.results[name].node)
            direct = [n.pool for n, _ in self._readers(name) if n.fires]
            pool = producer.pool if producer is not None else next(iter(direct), pool)
        else:
            pool = self._pool_of_reader(name) or pool
        return Argument(
            name=self.renamed.get(name, name),
            kind="carried" if name in self.results else "source",
            type=self.recorder.declare(type_),
            maker=getattr(type_, "maker", ""),
            pool=pool or "default",
            where=self.program.where,
        )

    def _type(self, name: str) -> Any:
        """An argument's class: as annotated, as its first reader says, as its next value is, or a policy if it is
        only broadcast."""
        annotated = self.program.arguments[name]
        if annotated is not Any:
            return annotated
        readers = self._readers(name)
        said = [i.type for _, i in readers]
        if name in self.results:
            said.append(self.recorder.type_of(self.results[name]))
        for type_ in said:
            if type_ != ANY:
                return self.recorder.types[type_]
        return Policy if any(n.construct == "broadcast" for n, _ in readers) else Any
