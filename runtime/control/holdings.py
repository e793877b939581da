"""What a rank holds for as long as it lives: carried values, sources, and nodes with their states."""

from dataclasses import dataclass
from typing import Any

from penstock.graph.definition import NodeDef
from penstock.graph.ir import Argument, Graph, Input, Node
from penstock.graph.paths import load, resolve
from penstock.graph.types import Carried, Source, Stream
from penstock.runtime.control.setup import Setup
from penstock.runtime.schedule.tables import channel_name


@dataclass
class Held:
    """A node that this rank runs. `channels` are the inputs that are weights, `inputs` the others."""

    node: Node
    definition: NodeDef[..., Any]
    options: dict[str, Any]
    inputs: tuple[Input, ...]
    channels: dict[str, str]
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
        for graph in setup.graphs:
            for argument in graph.arguments:
                if argument.name in setup.holds:
                    self._hold_argument(argument)
            for node in graph.nodes:
                if node.fires and node.name in setup.holds:
                    self.nodes[node.name] = self._hold_node(graph, node)
        self.streams = [held for held in self.nodes.values() if held.stream]

    def _hold_argument(self, argument: Argument) -> None:
        if argument.name in self.carried or argument.name in self.sources:
            return
        made = load(argument.maker)(self.setup.contexts[argument.name])
        if argument.kind == "carried":
            self.carried[argument.name] = made
        else:
            self.sources[argument.name] = made

    def _hold_node(self, graph: Graph, node: Node) -> Held:
        definition = load(node.op)
        options = {name: resolve(value) for name, value in node.options}
        channels = {}
        for item in node.inputs:
            if item.ref.node in graph and graph[item.ref.node].construct == "broadcast":
                carried = graph[item.ref.node].inputs[0].ref.node
                channels[item.name] = channel_name(carried, self.setup.pool)
        inputs = tuple(i for i in node.inputs if i.name not in channels)
        init = definition.init
        state = None if init is None else init(self.setup.contexts[node.name], **options)
        return Held(node, definition, options, inputs, channels, state, isinstance(state, Stream))
