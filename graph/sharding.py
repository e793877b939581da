"""How a carried value lies over the ranks that hold it together: plain data that the tensor plane turns into boxes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, runtime_checkable

Axes = tuple[tuple[str, int], ...]
"""A mesh as (axis, size), outermost first; ranks count row-major: the last axis runs fastest. () is one rank."""

STAGE, DATA, FSDP, TENSOR = "pp", "dp", "fsdp", "tp"
"""The axes that mean something to a model: stages of a pipeline, copies, shards of each tensor, shares of each layer.
All but "dp" cut; over any other axis tensors are replicated."""

Rule = tuple[int, int] | None
"""The dimension that tensor parallelism cuts, and into how many units at most (0: no limit); None: replicated."""


def num_ranks(axes: Axes) -> int:
    return prod(size for _, size in axes)


def described(axes: Axes) -> str:
    """For messages: "fsdp 2 × tp 2"."""
    return " × ".join(f"{name} {size}" for name, size in axes) or "one rank"


def rule_of(name: str, rules: Mapping[str, Rule]) -> Rule:
    """The rule of a tensor: that of the longest key its name ends with. Raises LookupError if there is none."""
    ends = [end for end in rules if name.endswith(end)]
    if not ends:
        raise LookupError(f"{name}: no rule for tensor parallelism")
    return rules[max(ends, key=len)]


@dataclass(frozen=True)
class Sharding:
    """The tensors that `Carried.weights` gives on each rank of a replica, as parts of logical ones.

    `mesh` is the replica's; "tp" cuts by `rules` (see `rule_of`), then "fsdp" cuts dimension 0, "pp" keeps a tensor
    to its `stages`. `shapes` are those of the whole tensors. `wanted` are the rules by which a receiving
    replica with an axis "tp" cuts the same tensors.
    """

    mesh: Axes
    shapes: Mapping[str, tuple[int, ...]]
    rules: Mapping[str, Rule]
    wanted: Mapping[str, Rule]
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@runtime_checkable
class Sharded(Protocol):
    """A carried value that its ranks hold in parts. One without this is whole on each rank."""

    def sharding(self) -> Sharding:
        """The same on every rank."""
