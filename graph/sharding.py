"""How a carried value lies over the ranks that hold it together: plain data that the tensor plane turns into boxes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

Rule = tuple[int, int] | None
"""The dimension that tensor parallelism cuts, and into how many units at most (0: no limit); None: replicated."""


@dataclass(frozen=True)
class Sharding:
    """The tensors that `Carried.weights` gives on each rank of a replica, as parts of logical ones.

    `mesh` is the replica's, as (axis, size), outermost first, ranks row-major; "tp" cuts by `rules` (the longest key
    that a name ends with counts), then "fsdp" cuts dimension 0, "pp" keeps a tensor to its `stages`; over any other
    axis tensors are replicated. `shapes` are those of the whole tensors. `wanted` are the rules by which a receiving
    replica with an axis "tp" cuts the same tensors.
    """

    mesh: tuple[tuple[str, int], ...]
    shapes: Mapping[str, tuple[int, ...]]
    rules: Mapping[str, Rule]
    wanted: Mapping[str, Rule]
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@runtime_checkable
class Sharded(Protocol):
    """A carried value that its ranks hold in parts. One without this is whole on each rank."""

    def sharding(self) -> Sharding:
        """The same on every rank."""
