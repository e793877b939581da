"""Carried values as they were: copies of the versions that a `delay` may still ask for."""

from collections.abc import Iterator, Mapping
from copy import deepcopy

from penstock.graph.ir import Graph
from penstock.graph.protocols import Carried


class History:
    """For each carried value that is read delayed, its last versions: `lags` says how many of them."""

    def __init__(self, lags: Mapping[str, int]) -> None:
        self.lags = dict(lags)
        self._kept: dict[str, dict[int, Carried]] = {name: {} for name in lags}

    def note(self, name: str, version: int, value: Carried) -> None:
        """`version` of a value has been made. A group of the update that made it may still be to come."""
        if name not in self.lags:
            return
        kept = self._kept[name]
        kept[version] = deepcopy(value)
        for old in [v for v in kept if v < version - self.lags[name] - 1]:
            del kept[old]

    def of(self, name: str, version: int) -> Carried:
        """A copy for one reader. Values that are read delayed are small (`check` refuses models)."""
        return deepcopy(self._kept[name][version])

    def before(self, update: int) -> Iterator[tuple[str, int, Carried]]:
        """What a run that goes on at `update` needs beside the values as they are."""
        for name, kept in self._kept.items():
            yield from ((name, v, value) for v, value in kept.items() if update - self.lags[name] <= v < update)


def delayed(graphs: tuple[Graph, ...]) -> dict[str, int]:
    """The carried values that some node reads delayed, with the largest lag."""
    lags: dict[str, int] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.construct == "delay":
                name = node.inputs[0].ref.node
                lags[name] = max(lags.get(name, 0), node.lag or 0)
    return lags
