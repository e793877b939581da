"""Tracing: handles stand for values, and each call of a node with them becomes a node of the graph.

A `TraceRecorder` collects the nodes of one trace in program order. It makes the graph at the end: types, pools and
names of arguments depend on the carried values that the program returns. Invariants: each handle belongs to one
recorder, and no two nodes of a recorder have the same name.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from penstock.graph.errors import Fault, GraphError, caller, fault, nearest
from penstock.graph.imports import encode, path_of, require_no_function, short
from penstock.graph.interface import REQUIRED
from penstock.graph.ir import ANY, Argument, Construct, Graph, Input, Json, Node, Output, Ref
from penstock.graph.types import Policy, Weights

if TYPE_CHECKING:
    from penstock.graph.node import NodeDef
    from penstock.graph.program import Program


class Handle:
    """A value of the program during tracing. It can only be passed to nodes and returned."""

    __slots__ = ("_recorder", "_ref")

    def __init__(self, recorder: "TraceRecorder", ref: Ref) -> None:
        self._recorder, self._ref = recorder, ref

    def __repr__(self) -> str:
        return f"<the program's value {self._ref}>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(self, f"its attribute {name!r}")

    def __format__(self, form: str) -> str:
        return _refuse(self, f"its format {form!r}") if form else str(self)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self, "a function of NumPy with it")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        handle = next(_handles([args, kwargs]))
        _refuse(handle, f"a function of PyTorch with it ({getattr(function, '__name__', function)})")


def _handles(given: Any) -> Iterator[Handle]:
    """The handles among values and lists, tuples and dicts of them, as torch.stack has them."""
    if isinstance(given, Handle):
        yield given
    elif isinstance(given, list | tuple | dict):
        for each in given.values() if isinstance(given, dict) else given:
            yield from _handles(each)


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

    `faults` are those of faulty options, which are left out so that tracing goes on. A node with such a fault has no
    `op`, so that its requirements are not checked.
    """

    def __init__(self, program: "Program[..., Any]", prefix: str) -> None:
        self.program, self.prefix = program, prefix
        self.nodes: list[Node] = []
        self.types: dict[str, type] = {}
        self.faults: list[Fault] = []
        self._weights: dict[Ref, Handle] = {}
        # Names that no node may have: those of arguments, in the program and in the graph.
        arguments = program.arguments
        self._taken = {*arguments, *(prefix + name for name in arguments), *program.names.values()}

    def declare(self, type_: Any) -> str:
        """Return the type's path, and remember the type for the graph's table of bases."""
        path = ANY if type_ is Any else path_of(type_)
        if path != ANY:
            self.types[path] = type_
        return path

    def ref(self, value: Any, what: str, type_: str) -> Ref:
        """The tail of an edge that carries `value`. Raises GraphError for anything but a value of this program."""
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
        return self.declare(self.program.arguments[ref.node])

    def call(self, definition: "NodeDef[..., Any]", args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record one call of a node. Return the handles of its outputs, bundled as the node returns them."""
        node = self.node_of(definition, args, kwargs)
        self.nodes.append(node)
        return self.outputs(definition, node)

    def record(
        self, construct: Construct, inputs: tuple[Input, ...], outputs: tuple[Output, ...], **fields: Any
    ) -> tuple[Handle, ...]:
        """Record a construct. Return the handles of its outputs."""
        name = self._name(construct)
        fields = {"where": caller(), **fields}
        self.nodes.append(Node(name, construct, inputs, outputs, construct=construct, **fields))
        return tuple(Handle(self, Ref(name, output.name)) for output in outputs)

    def edge(
        self, construct: Literal["broadcast", "delay"], value: Any, lag: Any, every: Any = 1, precision: Any = ""
    ) -> Handle:
        """Record a broadcast or a delay. Return the handle of the weights or of the delayed value."""
        ref = self.ref(value, construct, ANY)
        type_ = self.declare(Weights) if construct == "broadcast" else self.type_of(ref)
        lag, every = encode(lag, f"{construct}: option 'lag'"), encode(every, f"{construct}: option 'every'")
        inputs, outputs = (Input("value", ANY, ref),), (Output("out", type_),)
        said = {"lag": lag, "every": every, "precision": encode(precision, f"{construct}: option 'precision'")}
        return self.record(construct, inputs, outputs, clock="update", **said)[0]

    def weights(self, value: Any, what: str) -> Handle:
        """The handle of weights: `value` if it is weights, else a broadcast of it without a lag, one for each value.

        At the end of the trace that lag becomes 0 if the value never changes. For any other value it is a fault.
        """
        ref = self.ref(value, what, self.declare(Weights))
        if self.type_of(ref) == path_of(Weights):
            return Handle(self, ref)
        # All readers of a value share one broadcast, so that it is sent once.
        if ref not in self._weights:
            self._weights[ref] = self.edge("broadcast", value, None)
        return self._weights[ref]

    def outputs(self, definition: "NodeDef[..., Any]", node: Node) -> Any:
        return definition.interface.bundle(*(Handle(self, Ref(node.name, o.name)) for o in node.outputs))

    def node_of(self, definition: "NodeDef[..., Any]", args: Sequence[Any], kwargs: Mapping[str, Any]) -> Node:
        interface, kwargs = definition.interface, {**definition.bound, **kwargs}
        options, faults = _options(definition, kwargs)
        self.faults += faults
        inputs = self._inputs(definition, args, kwargs)
        # A value passed under an unknown name is a faulty option. It keeps a reader, so that it is not unused as well.
        unknown = kwargs.keys() - interface.options.keys() - {port.name for port in interface.inputs}
        strays = [Input(k, ANY, self.ref(kwargs[k], k, ANY)) for k in unknown if isinstance(kwargs[k], Handle)]
        # Inputs after one that the call left out are written by keyword, and so are lists.
        gap = next(
            (n for n, (i, port) in enumerate(zip(inputs, interface.inputs, strict=False)) if i.name != port.name), None
        )
        by_keyword = [item.name for item in inputs[len(interface.inputs) if gap is None else gap :]]
        outputs = []
        for port in interface.outputs:
            # An output with a type variable has the type of the value that the call passes for that variable.
            # So an update of a `Solver(Policy)` gives a `Solver`.
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
            accumulate=encode(definition.part_groups, f"{definition.__name__}.accumulate"),
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
        if name in self._taken:  # by an argument, whose name its edges have
            name = f"{name}:{definition.__name__}"
        self._taken.add(name)
        return name

    def _name(self, function: str) -> str:
        stem = name = self.prefix + function
        count = 1
        # The second call of `policy_update` is `policy_update_2`, also in checkpoints and metrics.
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

    def graph(self, results: Mapping[str, Ref], options: Mapping[str, Json]) -> Graph:
        """The graph of the finished trace. `results` has the next value of each carried argument, by name."""
        program = self.program
        readers: dict[str, list[tuple[Node, Input]]] = defaultdict(list)
        for node in self.nodes:
            for item in node.inputs:
                readers[item.ref.node].append((node, item))
        # A carried value that nothing reads or changes is left out of the graph.
        unused = {name for name, ref in results.items() if ref == Ref(name) and not readers[name]}
        sources = [name for name in program.arguments if name not in results]
        for name in sources:
            if name in program.names:
                what, given = f"{program.name}.of: {name}={program.names[name]!r}", f"{name!r}, which is a source"
                needed = f"a carried argument: {', '.join(results) or 'there is none'}"
                raise fault("not-carried", what, given, needed, program.renamed)
        renamed = {name: self.prefix + name for name in sources} | program.names

        def named(ref: Ref) -> Ref:
            return Ref(renamed.get(ref.node, ref.node), ref.output)

        # The pool of each call, and the pool where each construct's or argument's value is first read.
        made = {node.name: node for node in self.nodes}
        consumers: dict[str, str] = {}
        for name in [*(node.name for node in reversed(self.nodes)), *program.arguments]:
            if name in made and made[name].construct == "call":
                consumers[name] = made[name].pool
            elif pools := [consumers[node.name] for node, _ in readers[name] if node.name in consumers]:
                consumers[name] = pools[0]
        # Pools by the names in the program. Nodes come after everything that they read.
        places: dict[str, str] = {}
        arguments, nodes = [], []
        for name in program.arguments:
            type_ = self._class(name, readers[name], results)
            pool = getattr(type_, "pool", None)
            if name not in results:
                pool = consumers.get(name) or pool
            elif (producer := made.get(results[name].node)) is not None:
                # The node that makes the next value holds the value; if it never changes, its first reader does.
                pool = producer.pool
            else:
                pool = next((node.pool for node, _ in readers[name] if node.fires), pool)
            places[name] = pool or "default"
            if name not in unused:
                kind: Literal["carried", "source"] = "carried" if name in results else "source"
                maker, called = getattr(type_, "maker", ""), renamed.get(name, name)
                arguments.append(Argument(called, kind, self.declare(type_), maker, places[name], program.where))
        for node in self.nodes:
            read, lag = node.inputs[0].ref.node if node.inputs else "", node.lag
            places[node.name] = node.pool if node.fires else consumers.get(node.name, "default")
            if node.construct == "keep":
                # A filter stays where its first value is made, so that what it drops never travels.
                places[node.name] = places[read]
            if node.construct == "broadcast" and lag is None and results.get(read) == Ref(read):
                lag = 0
            inputs = tuple(replace(item, ref=named(item.ref)) for item in node.inputs)
            nodes.append(replace(node, inputs=inputs, pool=places[node.name], lag=lag))
        types = ((path, type_.__mro__[1:]) for path, type_ in sorted(self.types.items()))
        return Graph(
            name=program.name,
            op=program.path,
            arguments=tuple(arguments),
            nodes=tuple(nodes),
            results=tuple((named(Ref(name)).node, named(ref)) for name, ref in results.items() if name not in unused),
            options=tuple(options.items()),
            types=tuple((path, tuple(path_of(base) for base in bases if base is not object)) for path, bases in types),
            doc=program.doc,
            where=program.where,
        )

    def _class(self, name: str, readers: Sequence[tuple[Node, Input]], results: Mapping[str, Ref]) -> Any:
        """An argument's class: its annotation, else the type of its first reader's input, else that of its next value,
        else a policy if it is broadcast."""
        annotated = self.program.arguments[name]
        if annotated is not Any:
            return annotated
        said = [item.type for _, item in readers] + [self.type_of(results[name]) for _ in readers if name in results]
        if known := [type_ for type_ in said if type_ != ANY]:
            return self.types[known[0]]
        return Policy if any(node.construct == "broadcast" for node, _ in readers) else Any


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
        # Report all faulty options of a call at once: leave each out, and go on.
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
    """The recorder of the trace under way. Raises GraphError outside of a program, for the call that `what` names."""
    recorder = current.get()
    if recorder is None:
        raise fault("outside-program", what, "a call outside of a program", "a call in a function with @program")
    return recorder
