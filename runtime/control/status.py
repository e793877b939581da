"""What the pools of a run are at, for a display: said when there is news, and not too often."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from penstock.graph.types import NodeWarning

Say = Callable[[dict[str, Any]], None]

EVERY = 0.2
"""Seconds between two statuses for the display."""
QUIET = 1.0
"""Seconds after which a run without news says its status again."""


def tell_node_warnings(tell: Callable[[str], None]) -> Callable[[], None]:
    """From now on `tell` gets the text of each `NodeWarning` that Python shows; until what is returned is called."""
    show = warnings.showwarning

    def show_and_tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        show(message, category, *where, **more)
        if issubclass(category, NodeWarning):
            tell(str(message))

    def stop() -> None:
        warnings.showwarning = show

    warnings.showwarning = show_and_tell
    return stop


class Status:
    """`doing` is what each replica is at, `live` the version that it works with; `began` when the run did."""

    def __init__(self, say: Say, began: float, live: Mapping[str, int]) -> None:
        self.say, self.began, self.live = say, began, live
        self.doing: dict[str, str] = {}
        self._said = 0.0

    def due(self, now: float, after: float = EVERY) -> bool:
        """Have `after` seconds passed since the last one?"""
        return now - self._said > after

    def tell(self, now: float, facts: Mapping[str, Any]) -> None:
        """Say `facts` of the whole run, with what its pools are at."""
        self._said = now
        self.say({"kind": "status", "time": now - self.began, **facts, "pools": self._pools()})

    def _pools(self) -> dict[str, Any]:
        pools: dict[str, Any] = {}
        for replica, doing in self.doing.items():
            pool = pools.setdefault(replica.rpartition("/")[0], {"doing": [], "version": None})
            pool["doing"].append(doing)
            pool["version"] = self.live.get(replica, pool["version"])
        return pools
