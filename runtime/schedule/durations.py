"""How long things take, for the simulator: by node, constant, drawn by a key, or by what else is in work. Pure."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from statistics import NormalDist
from typing import Protocol

from penstock.graph.ir import Firing
from penstock.runtime.schedule.tables import Tables


class Engine(Protocol):
    """One replica's firings of one node, whose pace depends on all that are in work on it. Times are on the clock of
    the simulator and never go back."""

    def begin(self, firing: Firing, now: float) -> None:
        """Take a firing in."""

    @property
    def due(self) -> float:
        """When something happens here if nothing else begins; infinity if nothing is in work."""

    def finish(self) -> Sequence[Firing]:
        """Let happen what is due; the firings that are over by it, if any."""

    @property
    def spans(self) -> "Spans":
        """What the firings were made of so far."""


class Batching(Protocol):
    """A duration that is not known when a firing begins."""

    def engine(self) -> Engine:
        """A replica without work."""


@dataclass(frozen=True)
class Spans:
    """Pieces of work inside of firings: seconds at which each began and ended, and the firing's index."""

    begins: Sequence[float] = ()
    ends: Sequence[float] = ()
    indices: Sequence[int] = ()


Duration = float | Callable[[str, int], float] | Batching
"""Seconds; or a pure function of a firing that gives them: of the node's name, with the number of the turn after the
first one ("speak.1"), and of its index (ordinal or update); or what makes a replica that works on several at once."""


def draw(key: str) -> float:
    """A number between 0 and 1 that depends on the key alone."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A long-tailed duration with a given mean, in seconds, and sigma of its logarithm. Keyed by seed, node, index."""

    mean: float
    sigma: float
    seed: int = 0

    def __call__(self, node: str, index: int) -> float:
        uniform = draw(f"{self.seed}/{node}/{index}")
        return self.mean * exp(self.sigma * NormalDist().inv_cdf(uniform) - self.sigma**2 / 2)


@dataclass(frozen=True)
class Durations:
    """Seconds of each node, and of the three parts of a sync. Sources and filters take no time unless they are given.

    publish: the snapshot, on the trainer. wire: the transfer to one replica, beside other work. swap: between steps.
    """

    nodes: Mapping[str, Duration] = field(default_factory=dict)
    publish: float = 0.0
    wire: float = 0.0
    swap: float = 0.0

    def of(self, firing: Firing) -> float | Batching:
        given = self.nodes.get(firing.node, 0.0)
        if not callable(given):
            return given
        turn = f".{firing.turn}" if firing.turn else ""
        return given(firing.node + turn, firing.index)

    def check(self, tables: Tables) -> None:
        """Raises ValueError for a node without a duration, one that does not exist, and less than no time."""
        instant = [s.name for s in tables.steps.values() if s.source or s.filters]
        missing = [name for name in tables.steps if name not in (*instant, *self.nodes)]
        unknown = [name for name in self.nodes if name not in tables.steps]
        if missing or unknown:
            given, needed = ", ".join(self.nodes) or "none", ", ".join(s for s in tables.steps)
            raise ValueError(
                f"durations: given {given}; needed one for each node of {needed} (sources and filters may be left out)"
            )
        parts = {"publish": self.publish, "wire": self.wire, "swap": self.swap}
        times = parts | {name: value for name, value in self.nodes.items() if isinstance(value, int | float)}
        if negative := [f"{name}={value}" for name, value in times.items() if value < 0]:
            raise ValueError(f"durations: given {', '.join(negative)}; needed seconds, 0 or more")
