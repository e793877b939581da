"""A graph with what the rules of `check` look up. It can be any graph, edited JSON included."""

from collections.abc import Iterator, Mapping

from penstock.graph.ir import Argument, Graph, Input, Node, Ref
from penstock.graph.protocols import Source
from penstock.graph.recorder import ANY
from penstock.graph.types import Context


class View:
    """A graph with what the rules look up. Of two things with one name it shows the first."""

    def __init__(
        self,
        graph: Graph,
        batch: int | None,
        pools: Mapping[str, str],
        sources: Mapping[str, Source] | None = None,
        contexts: Mapping[str, Context] | None = None,
    ) -> None:
        self.graph, self.batch = graph, batch
        self.sources, self.contexts = dict(sources or {}), dict(contexts or {})
        self.things: tuple[Argument | Node, ...] = (*graph.arguments, *graph.nodes)
        self.nodes: dict[str, Node] = {}
        self.arguments: dict[str, Argument] = {}
        for node in graph.nodes:
            self.nodes.setdefault(node.name, node)
        for argument in graph.arguments:
            self.arguments.setdefault(argument.name, argument)
        self.bases = {name: {name, *bases} for name, bases in graph.types}
        self.makers = {c: ref.node for c, ref in graph.results if ref != Ref(c)}
        self.pools = {thing.name: pools.get(thing.name, thing.pool) for thing in self.things}

    def inputs(self) -> Iterator[tuple[Node, Input]]:
        for node in self.graph.nodes:
            for item in node.inputs:
                yield node, item

    def readers(self, name: str) -> list[Node]:
        return [node for node, item in self.inputs() if item.ref.node == name]

    def type_of(self, ref: Ref) -> str | None:
        """The type of what an edge carries; None if there is no such value."""
        if ref.node in self.nodes:
            return next((o.type for o in self.nodes[ref.node].outputs if o.name == ref.output), None)
        argument = self.arguments.get(ref.node)
        return argument.type if argument and ref.output == "out" else None

    def fits(self, given: str, needed: str) -> bool:
        return ANY in (given, needed) or needed in self.bases.get(given, {given})

    def changing(self, ref: Ref) -> bool:
        """Does it name a carried value that updates change?"""
        return ref.node in self.arguments and ref.node in self.makers

    def per_group(self, ref: Ref) -> bool:
        argument = self.arguments.get(ref.node)
        node = self.nodes.get(ref.node)
        return (argument is not None and argument.kind == "source") or (node is not None and node.clock == "group")
