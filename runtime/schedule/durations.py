"""How long things take, for the simulator: seconds by node, constant or drawn by a key. Pure."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp
from statistics import NormalDist

from penstock.runtime.schedule.tables import Tables

Duration = float | Callable[[str, int], float]
"""Seconds, or a pure function of the node's name and its firing's index (ordinal or update) that gives them."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A long-tailed duration with a given mean, in seconds, and sigma of its logarithm. Keyed by seed, node, index."""

    mean: float
    sigma: float
    seed: int = 0

    def __call__(self, node: str, index: int) -> float:
        key = hashlib.blake2b(f"{self.seed}/{node}/{index}".encode(), digest_size=8).digest()
        uniform = (int.from_bytes(key, "big") + 0.5) / 2**64
        return self.mean * exp(self.sigma * NormalDist().inv_cdf(uniform) - self.sigma**2 / 2)


@dataclass(frozen=True)
class Durations:
    """Seconds of each node, and of the three parts of a sync. Sources take no time unless they are given.

    publish: the snapshot, on the trainer. wire: the transfer to one replica, beside other work. swap: between steps.
    """

    nodes: Mapping[str, Duration] = field(default_factory=dict)
    publish: float = 0.0
    wire: float = 0.0
    swap: float = 0.0

    def of(self, node: str, index: int) -> float:
        given = self.nodes.get(node, 0.0)
        return given(node, index) if callable(given) else given

    def check(self, tables: Tables) -> None:
        """Raises ValueError for a node without a duration, one that does not exist, and less than no time."""
        missing = [s.name for s in tables.steps.values() if not s.source and s.name not in self.nodes]
        unknown = [name for name in self.nodes if name not in tables.steps]
        if missing or unknown:
            given, needed = ", ".join(self.nodes) or "none", ", ".join(s for s in tables.steps)
            raise ValueError(
                f"durations: given {given}; needed one for each node of {needed} (sources may be left out)"
            )
        parts = {"publish": self.publish, "wire": self.wire, "swap": self.swap}
        times = parts | {name: value for name, value in self.nodes.items() if not callable(value)}
        if negative := [f"{name}={value}" for name, value in times.items() if value < 0]:
            raise ValueError(f"durations: given {', '.join(negative)}; needed seconds, 0 or more")
