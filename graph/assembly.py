"""From what was recorded to a graph: which arguments are carried, of what types, and in which pools all of it is."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.graph.faults import fault
from penstock.graph.ir import Argument, Graph, Input, Node, Ref
from penstock.graph.paths import path_of
from penstock.graph.recorder import ANY, Recorder
from penstock.graph.types import Policy

if TYPE_CHECKING:
    from penstock.graph.build import Program


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
