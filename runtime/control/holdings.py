"""What a rank holds for as long as it lives: carried values, sources, and nodes with their states."""

from dataclasses import dataclass
from typing import Any

from penstock.graph.definition import NodeDef
from penstock.graph.filter import Filter
from penstock.graph.ir import Argument, Graph, Input, Node
from penstock.graph.paths import arguments, load, reach
from penstock.graph.protocols import Carried, Source, Stream
from penstock.runtime.control.history import History, delayed
from penstock.runtime.control.setup import Setup
from penstock.runtime.schedule.tables import channel_name


@dataclass
class Held:
    """A node that this rank runs, of `graph`.

    `channels` are the inputs that are weights, `delays` the carried values that it reads delayed, each with its lag;
    `inputs` are the others.
    """

    graph: Graph
    node: Node
    definition: NodeDef[..., Any] | Filter
    options: dict[str, Any]
    inputs: tuple[Input, ...]
    channels: dict[str, str]
    delays: dict[str, tuple[str, int]]
    state: Any
    stream: bool

    @property
    def stateful(self) -> bool:
        """Does each firing pass a state on to the next?"""
        return self.definition.init is not None and not self.stream


class Holdings:
    """Made from a setup: makers and `init`s are called here, and nowhere else."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.carried: dict[str, Carried] = {}
        self.sources: dict[str, Source] = {}
        self.nodes: dict[str, Held] = {}
        self.history = History({n: lag for n, lag in delayed(setup.graphs).items() if n in setup.holds})
        for graph in setup.graphs:
            reach(graph.op)
        for graph in setup.graphs:
            for argument in graph.arguments:
                if argument.name in setup.holds:
                    self._hold_argument(argument)
            for node in graph.nodes:
                if node.fires and node.name in setup.holds:
                    self.nodes[node.name] = self._hold_node(graph, node)
        self.streams = [held for held in self.nodes.values() if held.stream]

    def make(self, name: str) -> Carried:
        """A carried value as it is at the beginning, once more."""
        made: Carried = self._made(next(a for graph in self.setup.graphs for a in graph.carried if a.name == name))
        return made

    def _made(self, argument: Argument) -> Any:
        return load(argument.maker)(self.setup.contexts[argument.name])

    def _hold_argument(self, argument: Argument) -> None:
        if argument.name in self.carried or argument.name in self.sources:
            return
        made = self._made(argument)
        if argument.kind == "carried":
            self.carried[argument.name] = made
            self.history.note(argument.name, 0, made)
        else:
            self.sources[argument.name] = made

    def _hold_node(self, graph: Graph, node: Node) -> Held:
        definition = Filter() if node.construct == "keep" else load(node.op)
        options = arguments(definition.run if isinstance(definition, Filter) else definition.fn, dict(node.options))
        channels: dict[str, str] = {}
        delays: dict[str, tuple[str, int]] = {}
        for item in node.inputs:
            if item.ref.node not in graph or graph[item.ref.node].fires:
                continue
            way = graph[item.ref.node]
            carried = way.inputs[0].ref.node
            if way.construct == "broadcast":
                channels[item.name] = channel_name(carried, self.setup.pool)
            else:
                delays[item.name] = carried, way.lag or 0
        inputs = tuple(i for i in node.inputs if i.name not in channels and i.name not in delays)
        init = definition.init
        state = None if init is None else init(self.setup.contexts[node.name], **options)
        if isinstance(definition, NodeDef) and definition.interface.context:
            options[definition.interface.context] = self.setup.contexts[node.name]
        return Held(graph, node, definition, options, inputs, channels, delays, state, isinstance(state, Stream))
