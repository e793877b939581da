"""A node's call, for those who require something of it: its options, its inputs, and where these come from."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.graph.faults import Fault, GraphError
from penstock.graph.ir import Argument, Json, Node, Ref
from penstock.graph.paths import path_of
from penstock.graph.protocols import Source
from penstock.graph.types import Rollouts
from penstock.graph.view import View

if TYPE_CHECKING:
    from penstock.graph.definition import NodeDef


ROLLOUTS = path_of(Rollouts)


class Call:
    """What a check of `requires` is given for a node, or for a function that is an option of a node.

    `options` are the node's, as the graph has them, with those that are bound to the function. `clock` is "group" or
    "update", `left_out` has the optional inputs that the call does not pass, `what` begins the message.
    `context` is the node's, None where the call is not looked at for a run.
    """

    def __init__(
        self, view: View, node: Node, definition: "NodeDef[..., Any]", what: str, bound: Mapping[str, Json]
    ) -> None:
        self.view, self.node, self.what = view, node, what
        self.clock, self.context = node.clock, view.contexts.get(node.name)
        self.options: dict[str, Json] = {**dict(node.options), **bound}
        self._inputs = {item.name: item.ref for item in node.inputs if not item.back}
        self.left_out = frozenset(p.name for p in definition.interface.inputs if p.optional) - {
            item.name.partition("[")[0] for item in node.inputs
        }

    def lack(self, given: str, needed: str, option: str = "", *, input: str = "") -> GraphError:
        """What to raise, at the line of the call; `option` or `input` is what it is about."""
        fault = self._fault(given, needed, option)
        return GraphError(replace(fault, what=f"{self.what}: input {input!r}") if input else fault)

    def numbers(self, needed: str, fit: Callable[[float], bool], *options: str) -> None:
        """Raises for options that are no numbers, or do not fit, with all of them; None, and what was not bound to the
        function, is not looked at."""
        given = {name: self.options[name] for name in options if self.options.get(name) is not None}
        wrong = [name for name, value in given.items() if type(value) not in (int, float) or not fit(value)]
        if wrong:
            raise GraphError(*(self._fault(repr(self.options[name]), needed, name) for name in wrong))

    def _fault(self, given: str, needed: str, option: str) -> Fault:
        what = f"{self.what}: option {option!r}" if option else self.what
        return Fault(what, given, needed, self.node.where)

    def samples(self, name: str) -> int | None:
        """Responses per prompt of an input, as the option `samples` of all that it comes from says; None where that is
        not one number, or where a node makes rollouts of rollouts, since it may fork or pick them."""
        counts = set(self._samples(self._inputs[name])) if name in self._inputs else set()
        return counts.pop() if len(counts) == 1 else None

    def _samples(self, ref: Ref) -> Iterator[int | None]:
        behind, seen = [(ref.node, False)], set()
        while behind:
            name, counted = way = behind.pop()
            node, argument = self.view.nodes.get(name), self.view.arguments.get(name)
            if way in seen:
                continue
            seen.add(way)
            if node is not None and node.fires:
                count = dict(node.options).get("samples")
                if type(count) is int:
                    yield count
                elif _makes_anew(node, ROLLOUTS):
                    yield None
                behind += [(i.ref.node, counted or type(count) is int) for i in node.inputs if not i.back]
            elif argument is not None and argument.kind == "source" and not counted:
                yield None  # whatever it has

    def weights_of(self, name: str) -> Argument | None:
        """The carried value that an input is the weights of; None for any other input."""
        ref = self._inputs.get(name)
        way = self.view.nodes.get(ref.node) if ref is not None else None
        if way is None or way.construct != "broadcast" or not way.inputs:
            return None
        return self.view.arguments.get(way.inputs[0].ref.node)

    def readers(self, type_: type, *, sure: bool = False) -> Iterator[Node]:
        """The nodes that read what this call makes of a type, as it is or through nodes that pass such values on.

        A node with several inputs of the type passes any of them on, or compares one with another; `sure` leaves out
        what is behind such a node.
        """
        path = path_of(type_)

        def fits(given: str) -> bool:
            return path in self.view.bases.get(given, {given})

        found: dict[str, Node] = {}
        pending = [Ref(self.node.name, output.name) for output in self.node.outputs if fits(output.type)]
        seen = set(pending)
        while pending:
            ref = pending.pop()
            for node, item in self.view.inputs():
                if item.ref != ref:
                    continue
                found[node.name] = node
                outputs = node.outputs
                if node.construct == "keep":  # what comes out is what went in
                    outputs = outputs[node.inputs.index(item) :][:1]
                elif sure and sum(fits(other.type) for other in node.inputs if not other.back) > 1:
                    outputs = ()
                further = {Ref(node.name, output.name) for output in outputs if fits(output.type)} - seen
                seen |= further
                pending += further
        yield from found.values()

    def first(self, name: str) -> Any:
        """The first value of the source that an input is, where `source` knows it."""
        source = self.source(name)
        return None if source is None else source.read(0)

    def source(self, name: str) -> Source | None:
        """The source that an input is, filtered or not; None for any other input, and where the call is not looked at
        for a run."""
        ref, seen = self._inputs.get(name), set()
        while ref is not None and ref not in seen:
            seen.add(ref)
            node = self.view.nodes.get(ref.node)
            if node is None:
                return self.view.sources.get(ref.node)
            passed = zip(node.inputs, node.outputs, strict=False) if node.construct == "keep" else ()
            ref = next((item.ref for item, output in passed if output.name == ref.output), None)
        return None


def _makes_anew(node: Node, type_: str) -> bool:
    return node.construct == "call" and type_ in {i.type for i in node.inputs} & {o.type for o in node.outputs}
