"""The graph as a frozen value: arguments, nodes in program order, results.

Nothing here runs or checks anything: `trace` makes graphs, `check` finds their faults, `analysis` computes from them,
`show` prints them. Every field is JSON-able, so that a graph crosses processes.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypedDict

import msgspec

from penstock.graph.errors import Fault, GraphError

Json = Any
Clock = Literal["group", "update"]
Construct = Literal["call", "keep", "broadcast", "delay"]
# The type of a value of which only its use can show what it is.
ANY = "typing:Any"
# Formats of eight bits, with a scale for each row of a matrix, that a generator may compute in.
PRECISIONS = ("int8", "fp8")


def label_of(name: str) -> str:
    """The name of a node as users see it: "solver" for "solver:policy_update", a call that has an argument's name."""
    return name.partition(":")[0]


class Firing(NamedTuple):
    """One execution of a node. `index` is a group's ordinal or an update, by the node's clock."""

    node: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which a firing has no use for
    turn: int = 0
    segment: int = 0

    def __str__(self) -> str:
        extra = f".{self.turn}" if self.turn or self.segment else ""
        return f"{self.node}[{self.index}{extra}{f'.{self.segment}' if self.segment else ''}]"


@dataclass(frozen=True, slots=True)
class Ref:
    """The tail of an edge: an output of a node, or an argument (whose output is "out")."""

    node: str
    output: str = "out"

    def __str__(self) -> str:
        return self.node if self.output == "out" else f"{self.node}.{self.output}"


@dataclass(frozen=True, slots=True)
class Argument:
    """What the program is called with: a carried value (the policy) or a source (the prompts).

    `maker` is the import path of the function that makes the value in the worker that holds it:
    `maker(context) -> Carried` or `maker(context) -> Source` (see `graph.protocols`). A carried value's
    `pool` is a label like a node's: the pool of the node that makes its next value, if there is one.
    """

    name: str
    kind: Literal["carried", "source"]
    type: str
    maker: str
    pool: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a node: the parameter's name, the type it declares, and what is passed.

    `back`: the value of the group's previous turn; at the first turn there is none.
    """

    name: str
    type: str
    ref: Ref
    back: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Node:
    """One call in the program.

    `op` is the import path of the node's function (`package.module:name` or `/path/file.py:name`); for a
    construct of the language (`construct` other than "call") it is the construct's name. `options` are the
    call's keyword arguments, defaults included, JSON-able, sorted by name; a function passed as an option is
    `{"path": "package.module:name"}`. `stateful` nodes own a state that one replica keeps and that
    their firings pass on in order; the state of a `stream` works on several firings at once, which do not depend on
    each other.
    `lag` is set on constructs that read a carried value as it was up to (broadcast) or exactly (delay) `lag` updates
    ago. `every`: a per-update node fires, and a broadcast sends, only at every `every`-th update. `accumulate`: an
    update fires in parts of this many groups of its batch; 0 is once on the whole batch. `turns` is set on the nodes of
    a bounded cycle within a group (`alternate`): the most firings of each for one group. `given` names what the call
    writes by keyword: inputs after one that it left out, and options, in its order; other options have their defaults.
    `precision`: the format of `PRECISIONS` in which a broadcast's weights are sent and computed with; "" is the
    model's.
    """

    name: str
    op: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    options: tuple[tuple[str, Json], ...] = ()
    pool: str = "default"
    clock: Clock = "group"
    construct: Construct = "call"
    stateful: bool = False
    stream: bool = False
    lag: int | None = None
    every: int = 1
    accumulate: int = 0
    turns: int | None = None
    where: str = ""
    given: tuple[str, ...] = ()
    precision: str = ""

    @property
    def label(self) -> str:
        """Its name in metrics and flags (see `label_of`)."""
        return label_of(self.name)

    @property
    def own_label(self) -> bool:
        """True if the call has a name of its own (`named`), other than its function's with or without a number."""
        return not re.fullmatch(rf"{re.escape(self.op.rpartition(':')[2])}(_\d+)?", self.name.rpartition(".")[2])

    @property
    def fires(self) -> bool:
        """False for a broadcast or a delay, which only say how a value is read."""
        return self.construct not in ("broadcast", "delay")

    @property
    def answers(self) -> bool:
        """True for the node of a bounded cycle that decides whether there is another turn."""
        return self.turns is not None and not any(i.back and i.ref.node != self.name for i in self.inputs)

    def option(self, name: str) -> Json:
        return dict(self.options)[name]

    def to_json(self) -> dict[str, Json]:
        data = {slot: getattr(self, slot) for slot in Node.__slots__}
        data["inputs"] = [[i.name, i.type, i.ref.node, i.ref.output, *([True] if i.back else [])] for i in self.inputs]
        data["outputs"] = [[o.name, o.type] for o in self.outputs]
        data["options"] = dict(self.options)
        data["given"] = list(self.given)
        # Left out if unset, so that graphs of versions without these fields have the same digest.
        for name in ("precision", "accumulate"):
            if not data[name]:
                del data[name]
        return data


@dataclass(frozen=True)
class Graph:
    """A traced program.

    `results` says for each carried value which node's output is its next value; a carried value whose
    result is the argument itself never changes. `types` lists each type's bases, so that a subclass is
    accepted where its base is needed.
    """

    name: str
    op: str
    arguments: tuple[Argument, ...]
    nodes: tuple[Node, ...]
    results: tuple[tuple[str, Ref], ...]
    options: tuple[tuple[str, Json], ...] = ()
    types: tuple[tuple[str, tuple[str, ...]], ...] = ()
    doc: str = ""
    where: str = ""
    _by_name: dict[str, Node] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises GraphError for a graph that no program makes; `check` finds all other faults."""
        # Rules and schedulers look nodes up by name at each event; the tuple keeps the program's order.
        self._by_name.update((n.name, n) for n in self.nodes)
        for wrong in self._malformed():
            needed = "a graph as `trace` makes it, or such a graph with other values in its fields"
            raise GraphError(Fault("malformed-graph", f"graph {self.name}", wrong, needed, self.where))

    def _malformed(self) -> Iterator[str]:
        """Violations of a graph's invariants: names are unique; each value comes from an argument or an earlier node,
        or from the previous turn; each carried value has one result."""
        names = [argument.name for argument in self.arguments] + [node.name for node in self.nodes]
        yield from (f"the name {name!r} twice" for name, count in Counter(names).items() if count > 1)
        # Grows in program order, so that the nodes can fire in this order.
        made = {Ref(argument.name) for argument in self.arguments}
        # Two nodes that take turns read each other: one of the two edges comes from a later node.
        late = {Ref(node.name, output.name) for node in self.nodes if node.turns is not None for output in node.outputs}
        for node in self.nodes:
            before = late if node.turns is not None else set[Ref]()
            missing = [item.ref for item in node.inputs if item.ref not in (before if item.back else made)]
            yield from (f"{node.name} with the input {ref}, which nothing before it makes" for ref in missing)
            made |= {Ref(node.name, output.name) for output in node.outputs}
            shape = len(node.inputs), len(node.outputs), node.clock
            fits = node.lag is None if node.fires else shape == (1, 1, "update")
            if not fits or (node.construct == "keep" and shape != (len(node.inputs), len(node.inputs), "group")):
                yield f"{node.name}, a {node.construct} with {shape[0]} inputs, {shape[1]} outputs, {node.clock!r}"
        if sorted(name for name, _ in self.results) != sorted(a.name for a in self.carried):
            yield f"next values of {', '.join(name for name, _ in self.results) or 'nothing'}"
        yield from (
            f"the next {name!r} from {ref}, which nothing makes" for name, ref in self.results if ref not in made
        )

    def __hash__(self) -> int:
        return hash(self.digest())

    def __str__(self) -> str:
        """The graph as a program."""
        # Late, since `show` imports this module.
        from penstock.graph.show import text

        return text(self)

    def _repr_html_(self) -> str:
        """The graph as a picture, for notebooks."""
        from penstock.graph.svg import svg

        return svg(self)

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def argument(self, name: str) -> Argument | None:
        return next((a for a in self.arguments if a.name == name), None)

    def type_of(self, ref: Ref) -> str:
        """The type of what an edge carries."""
        if (node := self._by_name.get(ref.node)) is not None:
            return next(output.type for output in node.outputs if output.name == ref.output)
        return next(argument.type for argument in self.arguments if argument.name == ref.node)

    def fits(self, given: str, needed: str) -> bool:
        """True if a value of the type `given` is accepted where `needed` is. By name: a process that only looks at a
        graph may not be able to import the classes."""
        return given == needed or ANY in (given, needed) or needed in dict(self.types).get(given, ())

    @property
    def carried(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if a.kind == "carried")

    @property
    def sources(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if a.kind == "source")

    def producer(self, carried: str) -> str | None:
        """The node that makes a carried value's next value; None if the value never changes."""
        ref = dict(self.results).get(carried)
        return ref.node if ref is not None and ref.node in self._by_name else None

    def takers(self) -> dict[Ref, tuple[str, ...]]:
        """The per-update nodes that change a value in place, in program order, by what they are given: a carried value,
        or that value as an earlier node of the same update has changed it.

        The node that makes a carried value's next value takes that value, or what an earlier node has made of it; so
        does this one in turn. Any other node takes its first input, where it makes something of that type.
        """
        makers = {a: maker for a in self.carried if (maker := self.producer(a.name)) is not None}
        # By value that a node may take: the type of the carried value that it is, or was.
        states: dict[Ref, str] = {}
        found: dict[Ref, list[str]] = {}
        # Paths may double at each node, so each is followed once.
        followed: dict[tuple[str, str], bool] = {}

        def follow(node: Node, carried: Argument) -> bool:
            """Note what `node` takes on the way from a carried value to its next one; False if it is not on the way."""
            if (node.name, carried.name) in followed or node.clock != "update" or not node.fires:
                return followed.get((node.name, carried.name), False)
            refs = list(dict.fromkeys(i.ref for i in node.inputs if not i.back))
            taken = [ref for ref in refs if ref == Ref(carried.name)] or [
                ref
                for ref in refs
                if ref.node in self and self.fits(self.type_of(ref), carried.type) and follow(self[ref.node], carried)
            ]
            for ref in taken:
                states[ref] = carried.type
                if node.name not in found.setdefault(ref, []):
                    found[ref].append(node.name)
            followed[node.name, carried.name] = bool(taken)
            return bool(taken)

        for carried, maker in makers.items():
            states[Ref(carried.name)] = carried.type
            if follow(self[maker], carried):
                states[dict(self.results)[carried.name]] = carried.type
        done = {name for names in found.values() for name in names} | set(makers.values())
        for node in self.nodes:
            if node.clock != "update" or not node.fires or node.name in done or not node.inputs:
                continue
            first = node.inputs[0].ref
            made = [
                Ref(node.name, o.name) for o in node.outputs if first in states and self.fits(o.type, states[first])
            ]
            if made:
                found.setdefault(first, []).append(node.name)
                states |= dict.fromkeys(made, states[first])
        place = {node.name: number for number, node in enumerate(self.nodes)}
        return {ref: tuple(sorted(names, key=place.__getitem__)) for ref, names in found.items()}

    def pools(self) -> tuple[str, ...]:
        """Pool labels in program order."""
        labels = [a.pool for a in self.arguments] + [n.pool for n in self.nodes]
        return tuple(dict.fromkeys(labels))

    def replace(self, **changes: Any) -> "Graph":
        return replace(self, **changes)

    def at_lag(self, lag: int, broadcasts: Collection[str]) -> "Graph":
        """The graph with the weights of these broadcasts at most `lag` updates old."""
        return self.replace(nodes=tuple(replace(n, lag=lag) if n.name in broadcasts else n for n in self.nodes))

    def to_json(self) -> dict[str, Json]:
        return {
            "format": 1,
            "name": self.name,
            "op": self.op,
            "doc": self.doc,
            "where": self.where,
            "options": dict(self.options),
            "types": {name: list(bases) for name, bases in self.types},
            "arguments": [{slot: getattr(a, slot) for slot in Argument.__slots__} for a in self.arguments],
            "nodes": [n.to_json() for n in self.nodes],
            "results": {name: [ref.node, ref.output] for name, ref in self.results},
        }

    @staticmethod
    def from_json(data: Mapping[str, Json]) -> "Graph":
        """The inverse of `to_json`. Raises ValueError for any other data; `check` says whether the graph can run."""
        if not isinstance(data, dict) or data.get("format") != 1:
            given = repr(data.get("format")) if isinstance(data, dict) else "none"
            raise ValueError(f"graph: given format {given}, needed 1")
        read = msgspec.convert(data, _GraphJson)
        return Graph(
            name=read["name"],
            op=read["op"],
            doc=read["doc"],
            where=read["where"],
            options=tuple(sorted(read["options"].items())),
            types=tuple(sorted(read["types"].items())),
            arguments=read["arguments"],
            nodes=tuple(map(_node_from_json, read["nodes"])),
            results=tuple((name, Ref(*ref)) for name, ref in read["results"].items()),
        )

    def digest(self) -> str:
        """A hash of the graph's meaning: equal for equal graphs, whatever file they were written in."""
        data = self.to_json()
        # A program that moves, or that writes a default out, still has the same meaning.
        for item in [data, *data["arguments"], *data["nodes"]]:
            item.pop("where")
            item.pop("given", None)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


class _GraphJson(TypedDict):
    """A graph's JSON, as `Graph.from_json` reads it; each node is read by itself."""

    name: str
    op: str
    doc: str
    where: str
    options: dict[str, Json]
    types: dict[str, tuple[str, ...]]
    arguments: tuple[Argument, ...]
    nodes: list[dict[str, Json]]
    # By carried value: the node and the output that is its next value.
    results: dict[str, tuple[str, str]]


def _node_from_json(data: Mapping[str, Json]) -> Node:
    """Raises ValueError for a node of another form, or with slots that this version does not know."""
    # msgspec would drop unknown slots, and the graph would change its meaning.
    if unknown := sorted(data.keys() - set(Node.__slots__)):
        raise ValueError(f"graph: given a node with {', '.join(unknown)}, which this version does not know")
    inputs = []
    for name, type_, node, output, *back in msgspec.convert(data.get("inputs"), list[list[str | bool]]):
        inputs.append({"name": name, "type": type_, "ref": {"node": node, "output": output}, "back": any(back)})
    outputs = [{"name": name, "type": type_} for name, type_ in data.get("outputs", ())]
    options = sorted(msgspec.convert(data.get("options"), dict[str, Json]).items())
    read: Node = msgspec.convert({**data, "inputs": inputs, "outputs": outputs, "options": options}, Node)
    return read
