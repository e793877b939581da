"""What a rank holds for its lifetime: carried values, sources, and nodes with their states.

`Instances` makes them. `History` has copies of the versions of carried values that a `delay` may still ask for.
`HeldValues` moves the values of groups: the rank that made one keeps it, readers fetch it, the last read frees it.

A value is copied when its maker returns it, and again for each reader in the same process; readers in other processes
get copies anyway. So neither the maker nor a reader can change what another reader gets, whatever drives the run. A
carried value that one node of an update makes for the next node is handed on uncopied: models are large.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from penstock.graph.context import BatchPart
from penstock.graph.deferred import Column, StackedColumns, columns_of, deferred, may_defer
from penstock.graph.imports import arguments, load, reach
from penstock.graph.ir import Argument, Firing, Graph, Node
from penstock.graph.node import Filter, NodeDef
from penstock.graph.protocols import Carried, Source, Stream
from penstock.graph.types import Batchable
from penstock.runtime.control.rank_setup import InputRead, RankSetup, input_reads
from penstock.runtime.schedule.admission import needed_version
from penstock.runtime.schedule.compile import channel_name
from penstock.runtime.schedule.events import Fire
from penstock.runtime.tensor.codec import CodecError
from penstock.runtime.tensor.object_store import ObjectRows
from penstock.runtime.tensor.shm import ObjectRef, ObjectRefError


class History:
    """The last versions of each carried value that is read delayed. `lags` are their lags."""

    def __init__(self, lags: Mapping[str, int]) -> None:
        self.lags = dict(lags)
        self._kept: dict[str, dict[int, Carried]] = {name: {} for name in lags}

    def note(self, name: str, version: int, value: Carried) -> None:
        """Keep a copy of `version`, and forget the versions that no reader can ask for any more."""
        if name in self.lags:
            # One more than the lag: other firings of the update that made this version may still come.
            kept = {v: old for v, old in self._kept[name].items() if v >= version - self.lags[name] - 1}
            self._kept[name] = {**kept, version: deepcopy(value)}

    def of(self, name: str, version: int) -> Carried:
        """A copy for one reader. Values that are read delayed are small (`check` refuses models)."""
        return deepcopy(self._kept[name][version])

    def before(self, update: int) -> Iterator[tuple[str, int]]:
        """The values and earlier versions that a run needs, beside the current ones, to resume at `update`."""
        for name, lag in self.lags.items():
            yield from ((name, version) for version in range(needed_version(update, lag), update))


class HeldInput(NamedTuple):
    """A node's input, one of three kinds: the weights of a `channel`; a `carried` value, perhaps delayed by `lag`; or
    outputs of the firings of `read`. `made` is 1 if it is the next value, which the current update makes, else 0.
    """

    name: str
    channel: str = ""
    carried: str = ""
    made: int = 0
    lag: int | None = None
    read: InputRead | None = None


@dataclass
class Held:
    """A node that this rank runs.

    `several`: one parameter may take several of the `inputs`. `batch`: groups of an update. `submitted` has the start
    time of each firing in a stream.
    """

    node: Node
    definition: NodeDef[..., Any] | Filter
    options: dict[str, Any]
    inputs: tuple[HeldInput, ...]
    state: Any
    stream: bool
    answers: bool
    several: bool
    batch: int
    submitted: dict[Firing, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"a step of {self.node.name}"

    @property
    def stateful(self) -> bool:
        """True if each firing passes a state on to the next."""
        return self.definition.init is not None and not self.stream

    @property
    def scattered(self) -> bool:
        """True if its batch may be read lazily. A node with a state might keep rows after they are freed."""
        return self.definition.init is None

    def part(self, fire: Fire) -> BatchPart | None:
        """The part of its batch that an accumulating update is fired with; None for any other firing."""
        if not self.node.accumulate:
            return None
        # If trainer and generator take turns on the same GPUs, the update gets all groups at once.
        return BatchPart(fire.firing.segment, self.batch // len(fire.groups))

    def call(self, inputs: Mapping[str, Any], part: BatchPart | None = None) -> Any:
        """Call the node's function, and return its result unchanged."""
        if isinstance(self.definition, Filter):
            return self.definition.run(None, inputs, self.options)
        if self.several:
            inputs = self.definition.interface.gathered(inputs)
        state = () if self.definition.init is None else (self.state,)
        parts = {} if part is None else {self.definition.interface.part: part}
        return self.definition.fn(*state, **inputs, **self.options, **parts)


class Instances:
    """The carried values, sources and nodes of a rank. Makers and `init`s are called only here."""

    def __init__(self, setup: RankSetup) -> None:
        self.setup = setup
        self.carried: dict[str, Carried] = {}
        self.sources: dict[str, Source] = {}
        self.nodes: dict[str, Held] = {}
        delays = [n for graph in setup.graphs for n in graph.nodes if n.construct == "delay"]
        lags = [(node.inputs[0].ref.node, node.lag or 0) for node in delays]
        self.history = History({name: lag for name, lag in sorted(lags) if name in setup.holds})
        # A program's file may define the nodes of another graph: all files are found before any node is loaded.
        for graph in setup.graphs:
            reach(graph.op)
        for graph in setup.graphs:
            for argument in graph.arguments:
                held: dict[str, Any] = self.carried if argument.kind == "carried" else self.sources
                if argument.name in setup.holds and argument.name not in held:
                    held[argument.name] = self._made(argument)
            for node in graph.nodes:
                if node.fires and node.name in setup.holds:
                    self.nodes[node.name] = self._hold_node(graph, node)
        for name in self.history.lags:
            self.history.note(name, 0, self.carried[name])
        self.streams = [held for held in self.nodes.values() if held.stream]

    def make(self, name: str) -> Carried:
        """A new instance of a carried value, in its initial state."""
        made: Carried = self._made(next(a for graph in self.setup.graphs for a in graph.carried if a.name == name))
        return made

    def _made(self, argument: Argument) -> Any:
        return load(argument.maker)(self.setup.contexts[argument.name])

    def _hold_node(self, graph: Graph, node: Node) -> Held:
        definition = Filter() if node.construct == "keep" else load(node.op)
        options = arguments(definition.run if isinstance(definition, Filter) else definition.fn, dict(node.options))
        # A node of an update may read the next value of a carried value from an earlier node of the same update.
        next_values = {(ref.node, ref.output): name for name, ref in graph.results}
        reads = {read.name: read for read in input_reads(graph, node)}
        inputs: list[HeldInput] = []
        for name, ref in ((item.name, item.ref) for item in node.inputs):
            passed = graph[ref.node] if ref.node in graph and not graph[ref.node].fires else None
            if passed is not None and passed.construct == "broadcast":
                inputs.append(HeldInput(name, channel=channel_name(passed.inputs[0].ref.node, self.setup.pool)))
            elif passed is not None:
                inputs.append(HeldInput(name, carried=passed.inputs[0].ref.node, lag=passed.lag or 0))
            elif (made := next_values.get((ref.node, ref.output), "")) in self.carried:
                inputs.append(HeldInput(name, carried=made, made=1))
            elif ref.node in self.carried:
                inputs.append(HeldInput(name, carried=ref.node))
            else:
                inputs.append(HeldInput(name, read=reads[name]))
        init = definition.init
        state = None if init is None else init(self.setup.contexts[node.name], **options)
        if isinstance(definition, NodeDef) and definition.interface.context:
            # The node's function takes its context as an option; `init` got it above.
            options[definition.interface.context] = self.setup.contexts[node.name]
        several = isinstance(definition, NodeDef) and any(port.several for port in definition.interface.inputs)
        stream, batch = isinstance(state, Stream), self.setup.contexts[node.name].batch
        return Held(node, definition, options, tuple(inputs), state, stream, node.answers, several, batch)


T = TypeVar("T")
# A value's name: the firing that made it, and the output's name.
Key = tuple[Firing, str]


class HeldValues:
    """`kept` are the outputs of this rank; ranks of one process may share it.

    `fetch` gets a value that another rank keeps, `export` turns a value into a reference for other ranks, and `release`
    frees that; without them values stay in this process. `rows` gets the columns of a value, to be read by rows.
    """

    def __init__(
        self,
        setup: RankSetup,
        kept: dict[Key, Any],
        fetch: Callable[[ObjectRef, type], Any] | None = None,
        export: Callable[[Any], ObjectRef] | None = None,
        release: Callable[[ObjectRef], None] | None = None,
        rows: Callable[[ObjectRef, type[Batchable]], ObjectRows] | None = None,
    ) -> None:
        self.setup, self.kept = setup, kept
        self.fetch, self.export, self.release, self.rows = fetch, export, release, rows
        self.handles: dict[Key, ObjectRef] = {}

    def keep(self, firing: Firing, outputs: Mapping[str, Any]) -> dict[str, ObjectRef]:
        """Keep values for readers. Return the references of those that other processes read."""
        exported = {}
        for name, value in outputs.items():
            # Copy it: its maker may change it after returning it.
            value = self.kept[firing, name] = _own(value)
            if self.export is not None and firing.node in self.setup.exported:
                exported[name] = self.handles[firing, name] = self.export(value)
        return exported

    def read(self, read: InputRead, fire: Fire, handles: Mapping[Key, ObjectRef], scattered: bool = False) -> Any:
        """An input of a firing: the value of its own group or update, or the joined values of a batch. `scattered`:
        read the columns of a batch lazily, if its class allows it. Raises ValueError for values that do not join."""
        if read.joined and scattered and (batch := self._scattered(read, fire, handles)) is not None:
            return batch
        found = [self.get((firing, read.output), handles) for firing in read.firings(fire.firing, fire.groups)]
        if not read.joined:
            return found[0]
        try:
            return join(found)
        # A user's class may raise anything, and its traceback does not say whose values these are.
        except Exception as error:
            raise ValueError(f"{read.node}.{read.output} of {len(found)} groups cannot be joined: {error}") from error

    def get(self, key: Key, handles: Mapping[Key, ObjectRef]) -> Any:
        """One value, from here or from the rank that keeps it. Raises KeyError if it is not here and has no handle."""
        if key in self.kept:
            return _own(self.kept[key])
        if self.fetch is not None and key in handles:
            try:
                return self.fetch(handles[key], self.setup.declared(*key))
            except ObjectRefError as error:
                error.handle = handles[key]
                raise
        raise KeyError(f"{self.setup.replica}: no value {key[0]}.{key[1]}, and no handle of it")

    def _scattered(self, read: InputRead, fire: Fire, handles: Mapping[Key, ObjectRef]) -> Any:
        """A batch that is not read yet. None if its class is no batch or joins groups in its own way, and if some
        groups lack a column that others have: the class's `concat` decides what replaces it."""
        keys = [(firing, read.output) for firing in read.firings(fire.firing, fire.groups)]
        home = self.setup.plan.replica(self.setup.replica).ranks[self.setup.rank].host
        kind = self.setup.declared(*keys[0])
        there = all(key in self.kept or key in handles for key in keys)
        if not (issubclass(kind, Batchable) and may_defer(kind) and self.rows is not None and there):
            return None
        parts: list[tuple[Mapping[str, Column | None], int]] = []
        for key in keys:
            # A value that may be lost during the update is read whole, before the update begins.
            perishes = key in handles and handles[key].owner in self.setup.perishable and handles[key].host != home
            if key in self.kept or perishes:
                value = self.get(key, handles)
                # The value may be of a subclass with more columns than the declared class.
                if type(value) is not kind:
                    return None
                parts.append((columns_of(value), len(value)))
            else:
                found = self.rows(handles[key], kind)
                parts.append((found.columns, found.count))
        columns: dict[str, Column | None] = {}
        for name in parts[0][0]:
            each = [(own[name], count) for own, count in parts]
            present = [(column, count) for column, count in each if column is not None]
            if present and len(present) < len(each):
                return None
            columns[name] = StackedColumns(tuple(present)) if present else None
        return deferred(kind, columns, range(sum(count for _, count in parts)))

    def free(self, firings: Iterable[Firing]) -> None:
        for key in self._keys(firings):
            self.kept.pop(key, None)
            handle = self.handles.pop(key, None)
            if handle is not None and self.release is not None:
                self.release(handle)

    def commit_turn(self, firing: Firing) -> None:
        """Store the outputs of a turn as those of turn 0, which are the group's."""
        for key in self._keys([firing]):
            for held in (self.kept, self.handles):
                if key in held:
                    held[firing._replace(turn=0), key[1]] = held.pop(key)

    def of(self, firings: Iterable[Firing]) -> dict[Key, Any]:
        """The outputs of the firings that are kept here."""
        return {key: self.kept[key] for key in self._keys(firings) if key in self.kept}

    def _keys(self, firings: Iterable[Firing]) -> list[Key]:
        return [(firing, name) for firing in firings for name in self.setup.outputs[firing.node]]


def _own(value: T) -> T:
    kind: type = type(value)
    return value if _is_carried(kind) else private(value)


# Cached: a protocol check, or a look at a class's fields, takes longer than to copy a small value.
@cache
def _is_carried(kind: type) -> bool:
    return issubclass(kind, Carried)


@cache
def _fields(kind: type) -> tuple[str, ...] | None:
    """The names of a dataclass's fields; None for any other class."""
    return tuple(f.name for f in fields(kind) if f.init) if is_dataclass(kind) else None


_SCALARS = {str, int, float, bool, type(None)}


def private(value: T) -> T:
    """A copy that shares nothing mutable with `value`, of the same class and on the same devices.

    Arrays in it become contiguous tensors outside autograd, as `encode` and `decode` make them, so that readers in this
    process get the same as those in others. Raises CodecError for a value that cannot be copied.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    return cast(T, _copied(value))


def _copied(item: Any) -> Any:
    kind: type = type(item)
    if kind in _SCALARS:
        return item
    if isinstance(item, Tensor):
        return item.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(item, np.ndarray):
        try:
            return torch.from_numpy(item.copy())
        except TypeError as error:
            raise CodecError(f"given a numpy array of {item.dtype}, needed one of numbers ({error})") from error
    if isinstance(item, np.generic):
        return item.item()
    if kind is tuple or kind is list:
        # A batch has lists of thousands of numbers, which need no call for each number.
        plain = _SCALARS.issuperset(map(type, item))
        return item if plain and kind is tuple else kind(item if plain else map(_copied, item))
    if kind is dict:
        return {key: _copied(entry) for key, entry in item.items()}
    if (names := _fields(kind)) is not None:
        return kind(**{name: _copied(getattr(item, name)) for name in names})
    try:
        return deepcopy(item)
    except Exception as error:  # a user's class may raise anything
        raise CodecError(f"given a {kind.__name__} that cannot be copied for its readers ({error!r})") from error


def join(parts: Sequence[Any]) -> Any:
    """The values of a batch as one: by `concat` of their class, or as a tuple if it has none."""
    concat = getattr(type(parts[0]), "concat", None)
    return concat(parts) if concat is not None else tuple(parts)
