"""What a rank does with its commands: it makes the values it holds, runs nodes, and keeps their outputs.

One executor per rank, with no socket of its own: the worker drives it with messages, the in-process driver calls
it. A node is a function, a function with state, or a `Stream` that works on several firings at once. An exception
of a node becomes a `Failed` event with its traceback; nothing else is caught.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from penstock.graph.definition import NodeDef
from penstock.graph.ir import Argument, Firing, Graph, Input, Node
from penstock.graph.paths import load, resolve
from penstock.graph.types import Carried, Context, Source, Stream
from penstock.runtime.control.messages import Order, Result
from penstock.runtime.control.weights import Ways
from penstock.runtime.plan.plan import Plan
from penstock.runtime.schedule.events import Command, Done, Failed, Fire, Free, Save, Saved, Send, Swap, Swapped
from penstock.runtime.schedule.tables import channel_name
from penstock.runtime.tensor.checkpoint import read_part, value_name, write_part
from penstock.runtime.tensor.handle import Handle

Key = tuple[Firing, str]
"""A value's name: the firing that made it, and the output's name."""


@dataclass(frozen=True)
class Setup:
    """What a rank needs to know. `contexts` has one for each node and argument that it may hold."""

    graphs: tuple[Graph, ...]
    plan: Plan
    replica: str
    rank: int
    contexts: Mapping[str, Context]
    folder: Path
    restore: Path | None = None

    @property
    def pool(self) -> str:
        return self.replica.rpartition("/")[0]

    @property
    def holds(self) -> tuple[str, ...]:
        return next(p.holds for p in self.plan.pools if p.name == self.pool)

    def declared(self, firing: Firing, output: str) -> type:
        """The class that the graph declares for a value. Classes come from the graph, never from a message."""
        for graph in self.graphs:
            if firing.node in graph:
                return load_type(next(o.type for o in graph[firing.node].outputs if o.name == output))
            if argument := graph.argument(firing.node):
                return load_type(argument.type)
        raise KeyError(f"no graph of this run has a node {firing.node!r}")


@dataclass
class Held:
    """A node that this rank runs."""

    node: Node
    definition: NodeDef[..., Any]
    options: dict[str, Any]
    inputs: tuple[Input, ...]
    channels: dict[str, str]
    state: Any = None


def load_type(path: str) -> type:
    found = load(path)
    if not isinstance(found, type):
        raise TypeError(f"{path}: given a {type(found).__name__}, needed the class of an edge")
    return found


class Executor:
    """Runs commands. `values` are the outputs kept here; `fetch` gets one that another rank keeps.

    `ways` moves weights (see `weights.py`). `export` turns a value into a handle for other ranks; None keeps
    values in this process only. `doing` names the command or step in work, for a thread that watches this one.
    """

    def __init__(
        self,
        setup: Setup,
        ways: Ways,
        values: dict[Key, Any],
        fetch: Callable[[Handle, type], Any] | None = None,
        export: Callable[[Any], Handle] | None = None,
        release: Callable[[Handle], None] | None = None,
    ) -> None:
        self.setup, self.ways, self.values = setup, ways, values
        self.fetch, self.export, self.release = fetch, export, release
        self.handles: dict[Key, Handle] = {}
        self.restored: list[tuple[Firing, str, Handle]] = []
        self.carried: dict[str, Carried] = {}
        self.sources: dict[str, Source] = {}
        self.nodes: dict[str, Held] = {}
        self.streams: list[Held] = []
        self.submitted: dict[Firing, float] = {}
        self.doing = ""
        for graph in setup.graphs:
            for argument in graph.arguments:
                if argument.name in setup.holds:
                    self._hold_argument(argument)
            for node in graph.nodes:
                if node.construct == "call" and node.name in setup.holds:
                    self._hold_node(graph, node)
        self._exported = _exported(setup)
        self._clocks = {n.name: n.clock for g in setup.graphs for n in g.nodes}
        self._clocks |= {a.name: "group" for g in setup.graphs for a in g.sources}
        self._makes: dict[str, dict[str, str]] = {}
        for graph in setup.graphs:
            for name, ref in graph.results:
                self._makes.setdefault(ref.node, {})[name] = ref.output
        if setup.restore is not None:
            self.restored = self.restore(setup.restore)

    # What is held ------------------------------------------------------------------------------------------

    def _hold_argument(self, argument: Argument) -> None:
        if argument.name in self.carried or argument.name in self.sources:
            return
        made = load(argument.maker)(self.setup.contexts[argument.name])
        if argument.kind == "carried":
            self.carried[argument.name] = made
        else:
            self.sources[argument.name] = made

    def _hold_node(self, graph: Graph, node: Node) -> None:
        definition = load(node.op)
        options = {name: resolve(value) for name, value in node.options}
        channels = {}
        for item in node.inputs:
            if item.ref.node in graph and graph[item.ref.node].construct == "broadcast":
                carried = graph[item.ref.node].inputs[0].ref.node
                channels[item.name] = channel_name(carried, self.setup.pool)
        plain = tuple(i for i in node.inputs if i.name not in channels)
        held = Held(node, definition, options, plain, channels)
        if definition.init is not None:
            held.state = definition.init(self.setup.contexts[node.name], **options)
        if isinstance(held.state, Stream):
            self.streams.append(held)
        self.nodes[node.name] = held

    # What is done ------------------------------------------------------------------------------------------

    def carry_out(self, order: Order) -> Iterator[list[Result]]:
        """Carry out one command after the other; the answers to each that are there at once."""
        handles = {(firing, output): handle for firing, output, handle in order.handles}
        for command in order.commands:
            self.doing = str(command.firing) if isinstance(command, Fire) else type(command).__name__
            yield self.do(command, handles)
        self.doing = ""

    def do(self, command: Command, handles: Mapping[Key, Handle]) -> list[Result]:
        """Carry out one command; the answers that are there at once."""
        match command:
            case Fire():
                return self._fire(command, handles)
            case Send():
                self.ways.send(command, handles)
                return []
            case Swap(channel, version, replica):
                self.ways.swap(channel, version)
                return [Result(Swapped(channel, version, replica, self.setup.rank))]
            case Free():
                self._free(command)
                return []
            case Save():
                return self._save(command)
        raise TypeError(f"executor: given {type(command).__name__}, needed a command for a rank")

    def busy(self) -> bool:
        return any(held.state.busy() for held in self.streams)

    def step(self) -> list[Result]:
        """One step of each stream that has work; the firings it finished, and the weights that arrived."""
        results = [Result(event) for event in self.ways.arrived()]
        for held in self.streams:
            if not held.state.busy():
                continue
            self.doing = f"a step of {held.node.name}"
            try:
                finished = held.state.step()
            except Exception:
                return results + [self._failure(firing) for firing in self._submitted_to(held)]
            for firing, result in finished:
                results.append(self._finish(held, firing, result, self.submitted.pop(firing)))
        self.doing = ""
        return results

    def _submitted_to(self, held: Held) -> list[Firing]:
        firings = [f for f in self.submitted if f.node == held.node.name]
        for firing in firings:
            del self.submitted[firing]
        return firings

    def _failure(self, firing: Firing) -> Result:
        text = f"{firing} on {self.setup.replica} rank {self.setup.rank}:\n{traceback.format_exc()}"
        return Result(Failed(firing, self.setup.replica, self.setup.rank, text))

    def _fire(self, command: Fire, handles: Mapping[Key, Handle]) -> list[Result]:
        firing, began = command.firing, monotonic()
        try:
            if firing.node in self.ways.published_here:
                facts = self.ways.publish(firing.node, firing.index, self.carried)
                handle = Handle("", 0, 0, facts, self.setup.replica)
                return [self._done(firing, began, {"out": handle}, {})]
            if firing.node in self.sources:
                value = self.sources[firing.node].read(firing.index)
                return [self._done(firing, began, self._keep(firing, {"out": value}), {})]
            held = self.nodes[firing.node]
            inputs = {item.name: self._input(item, command, handles) for item in held.inputs}
            inputs |= {name: self.ways.weights(channel) for name, channel in held.channels.items()}
            if isinstance(held.state, Stream):
                held.state.submit(firing, inputs)
                self.submitted[firing] = began
                return []
            result = held.definition.run(held.state, inputs, held.options)
            return [self._finish(held, firing, result, began)]
        except Exception:
            return [self._failure(firing)]

    def _finish(self, held: Held, firing: Firing, result: Any, began: float) -> Result:
        """Keep a node's outputs: a carried value's next value replaces it, others wait for their readers."""
        streams = isinstance(held.state, Stream)
        stateful = held.definition.init is not None and not streams
        state, outputs, metrics = held.definition.split(result, stateful=stateful)
        if stateful:
            held.state = state
        for name, output in self._makes.get(held.node.name, {}).items():
            self.carried[name] = outputs.pop(output)
        return self._done(firing, began, self._keep(firing, outputs), metrics)

    def _done(self, firing: Firing, began: float, outputs: dict[str, Handle], metrics: Mapping[str, float]) -> Result:
        figures = {name: float(value) for name, value in metrics.items()}
        done = Done(firing, self.setup.replica, self.setup.rank)
        return Result(done, outputs, figures, began, monotonic())

    def _keep(self, firing: Firing, outputs: Mapping[str, Any]) -> dict[str, Handle]:
        """Keep values for readers; the handles of those that other processes read."""
        kept = {}
        for name, value in outputs.items():
            self.values[firing, name] = value
            if self.export is not None and firing.node in self._exported:
                kept[name] = self.handles[firing, name] = self.export(value)
        return kept

    def _input(self, item: Input, command: Fire, handles: Mapping[Key, Handle]) -> Any:
        """One input of a firing: a carried value as it is, a group's value, or those of a batch joined."""
        name, output, index = item.ref.node, item.ref.output, command.firing.index
        if name in self.carried:
            return self.carried[name]
        if self._clocks[name] == "update":
            return self._value((Firing(name, index), output), handles)
        if self._clocks[command.firing.node] == "group":
            return self._value((Firing(name, index), output), handles)
        parts = [self._value((Firing(name, group), output), handles) for group in command.groups]
        return join(parts)

    def _value(self, key: Key, handles: Mapping[Key, Handle]) -> Any:
        if key in self.values:
            return self.values[key]
        if self.fetch is None or key not in handles:
            raise KeyError(f"{self.setup.replica}: no value {key[0]}.{key[1]}, and no handle of it")
        return self.fetch(handles[key], self.setup.declared(*key))

    def _free(self, command: Free) -> None:
        for firing in command.firings:
            for key in [(firing, name) for name in self._outputs(firing.node)]:
                self.values.pop(key, None)
                handle = self.handles.pop(key, None)
                if handle is not None and self.release is not None:
                    self.release(handle)

    def _outputs(self, node: str) -> tuple[str, ...]:
        for graph in self.setup.graphs:
            if node in graph:
                return tuple(o.name for o in graph[node].outputs)
        return ("out",)

    # Checkpoints -------------------------------------------------------------------------------------------

    def _save(self, command: Save) -> list[Result]:
        """Write this rank's part of a cut: carried values, states, and the outputs of `command.firings`."""
        folder = self.setup.folder / "checkpoints" / f"{command.update:08d}"
        keys = [(firing, name) for firing in command.firings for name in self._outputs(firing.node)]
        values = {key: self.values[key] for key in keys if key in self.values}
        states = {n: h.state for n, h in self.nodes.items() if h.node.stateful}
        write_part(folder, self.setup.replica, self.setup.rank, self.carried, states, values)
        return [Result(Saved(command.update, self.setup.replica, self.setup.rank))]

    def restore(self, folder: Path) -> list[tuple[Firing, str, Handle]]:
        """Take up this rank's part of a cut; the handles of its values that other processes read."""
        part = read_part(folder, self.setup.replica, self.setup.rank)
        for name, value in self.carried.items():
            value.restore(*part.carried(name))
        for name, held in self.nodes.items():
            if held.node.stateful:
                held.state = part.value(f"state/{name}", type(held.state))
        restored = []
        for firing, output in part.made:
            value = part.value(value_name(firing, output), self.setup.declared(firing, output))
            kept = self._keep(firing, {output: value})
            restored += [(firing, name, handle) for name, handle in kept.items()]
        return restored


def join(parts: Sequence[Any]) -> Any:
    """The values of a batch as one: `concat` of an edge's class, or a tuple for a class that has none."""
    concat = getattr(type(parts[0]), "concat", None)
    return concat(parts) if concat is not None else tuple(parts)


def _exported(setup: Setup) -> set[str]:
    """Nodes and sources here whose outputs are read in another process."""
    several = len(next(p.replicas for p in setup.plan.pools if p.name == setup.pool)) > 1
    names = set()
    for graph in setup.graphs:
        for node in graph.nodes:
            for item in node.inputs:
                made_here = item.ref.node in setup.holds
                read_elsewhere = node.construct == "call" and (several or node.name not in setup.holds)
                if made_here and read_elsewhere:
                    names.add(item.ref.node)
    return names
