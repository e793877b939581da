"""Seconds by what they go to: what every formula of the cost model returns. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SAFE = 1 - 1e-9
"""Of a lower bound, so that rounding never makes it an upper one."""


@dataclass(frozen=True)
class Cost:
    """`parts` are seconds that follow each other; what overlaps counts where it is not hidden."""

    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The part that takes longest; "nothing" of a cost of nothing."""
        return max(self.parts, key=lambda part: self.parts[part], default="nothing")

    def __add__(self, other: "Cost") -> "Cost":
        names = dict.fromkeys([*self.parts, *other.parts])
        return Cost({name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names})

    def __mul__(self, times: float) -> "Cost":
        return Cost({name: seconds * times for name, seconds in self.parts.items()})

    def __str__(self) -> str:
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return f"{self.seconds:.4g} s: " + ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts if seconds > 0)
