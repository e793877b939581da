"""How groups' values move: kept by the rank that made them, fetched by those that read them, freed after the last.

A value is copied when its maker returns it, and again for each reader of the same process; readers in others get
copies anyway. So neither the maker nor a reader can change what another reader finds, whatever drives the run. A
carried value that one node makes for the next one of an update is handed on as it is: models are not copied.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from penstock.graph.ir import Firing, Ref
from penstock.graph.protocols import Carried
from penstock.runtime.control.setup import Setup
from penstock.runtime.schedule.events import Fire
from penstock.runtime.tensor.codec import private
from penstock.runtime.tensor.handle import Handle

T = TypeVar("T")
Key = tuple[Firing, str]
"""A value's name: the firing that made it, and the output's name."""


class Values:
    """`kept` are the outputs of this rank; ranks of one process may share it.

    `fetch` gets one that another rank keeps, `export` turns a value into a handle for other ranks, and `release`
    takes that back; without them values stay in this process.
    """

    def __init__(
        self,
        setup: Setup,
        kept: dict[Key, Any],
        fetch: Callable[[Handle, type], Any] | None = None,
        export: Callable[[Any], Handle] | None = None,
        release: Callable[[Handle], None] | None = None,
    ) -> None:
        self.setup, self.kept = setup, kept
        self.fetch, self.export, self.release = fetch, export, release
        self.handles: dict[Key, Handle] = {}

    def keep(self, firing: Firing, outputs: Mapping[str, Any]) -> dict[str, Handle]:
        """Keep values for readers; the handles of those that other processes read."""
        exported = {}
        for name, value in outputs.items():
            value = self.kept[firing, name] = _own(value)
            if self.export is not None and firing.node in self.setup.exported:
                exported[name] = self.handles[firing, name] = self.export(value)
        return exported

    def read(self, ref: Ref, fire: Fire, handles: Mapping[Key, Handle], turn: int = 0) -> Any:
        """An input of a firing: a value of its own group (of that `turn`) or update, or those of a batch joined."""
        clocks, index = self.setup.clocks, fire.firing.index
        if clocks[ref.node] == "update" or clocks[fire.firing.node] == "group":
            return self._get((Firing(ref.node, index, turn), ref.output), handles)
        return join([self._get((Firing(ref.node, group), ref.output), handles) for group in fire.groups])

    def free(self, firings: Iterable[Firing]) -> None:
        for key in self._keys(firings):
            self.kept.pop(key, None)
            handle = self.handles.pop(key, None)
            if handle is not None and self.release is not None:
                self.release(handle)

    def settle(self, firing: Firing) -> None:
        """What a turn has made is its group's from now on, as that of turn 0 is."""
        for key in self._keys([firing]):
            for held in (self.kept, self.handles):
                if key in held:
                    held[firing._replace(turn=0), key[1]] = held.pop(key)

    def of(self, firings: Iterable[Firing]) -> dict[Key, Any]:
        """Those outputs of the firings that are kept here."""
        return {key: self.kept[key] for key in self._keys(firings) if key in self.kept}

    def _keys(self, firings: Iterable[Firing]) -> list[Key]:
        return [(firing, name) for firing in firings for name in self.setup.outputs[firing.node]]

    def _get(self, key: Key, handles: Mapping[Key, Handle]) -> Any:
        if key in self.kept:
            return _own(self.kept[key])
        if self.fetch is None or key not in handles:
            raise KeyError(f"{self.setup.replica}: no value {key[0]}.{key[1]}, and no handle of it")
        return self.fetch(handles[key], self.setup.declared(*key))


def _own(value: T) -> T:
    kind: type = type(value)
    return value if _carried(kind) else private(value)


@cache  # asking a protocol takes longer than a small copy
def _carried(kind: type) -> bool:
    return issubclass(kind, Carried)


def join(parts: Sequence[Any]) -> Any:
    """The values of a batch as one: `concat` of an edge's class, or a tuple for a class that has none."""
    concat = getattr(type(parts[0]), "concat", None)
    return concat(parts) if concat is not None else tuple(parts)
