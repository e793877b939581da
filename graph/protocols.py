"""What the runtime asks of the values that nodes and makers keep in their workers.

Arrays are of any library that the workers use, so that a graph needs none. A carried value that is sharded over its
ranks says so by `Sharding`: plain data, from which the runtime computes regions of tensors.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol, runtime_checkable

# A tensor of any library that has shapes, slices and arithmetic; torch in the workers.
Array = Any


class Vector(Protocol):
    """One number per row, float [N], of any array library: arithmetic row by row, and what else the library has."""

    def __add__(self, other: "Vector | float", /) -> "Vector": ...
    def __sub__(self, other: "Vector | float", /) -> "Vector": ...
    def __mul__(self, other: "Vector | float", /) -> "Vector": ...
    def __truediv__(self, other: "Vector | float", /) -> "Vector": ...
    def __radd__(self, other: float, /) -> "Vector": ...
    def __rsub__(self, other: float, /) -> "Vector": ...
    def __rmul__(self, other: float, /) -> "Vector": ...
    def __rtruediv__(self, other: float, /) -> "Vector": ...
    def __neg__(self) -> "Vector": ...
    def __getattr__(self, name: str, /) -> Any: ...


@runtime_checkable
class Carried(Protocol):
    """A value that each update replaces, such as the policy with its optimizer. It stays in its workers."""

    def weights(self) -> Mapping[str, Array]:
        """What `broadcast` sends: the logical tensors by name, in the dtype in which they travel."""

    def state(self) -> tuple[Mapping[str, Array], Mapping[str, Any]]:
        """All that a checkpoint needs to go on exactly: tensors, and JSON-able facts."""

    def restore(self, tensors: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        """The inverse of `state`."""

    def export(self, folder: str) -> Callable[[], None] | None:
        """Write what other tools read (an HF directory) into an existing folder; write nothing if there is nothing.

        Slow work may be left to a function that is returned. It is called once, later, in another thread, while the
        value changes.
        """


@runtime_checkable
class Offloadable(Protocol):
    """A carried value that may be partly offloaded to the host between two updates, to free device memory.

    During an update its readers have all of it on the device. Its other methods, such as `weights`, `state` and
    `export`, do not compute with the offloaded tensors; `state` returns them wherever they are.
    """

    def offloadable(self) -> Mapping[str, Array]:
        """The tensors that may be offloaded, by their names in `state`: always the same objects, each with its own
        memory."""


@runtime_checkable
class Threaded(Protocol):
    """A carried value that may split its work among threads of its own."""

    def own_threads(self) -> bool:
        """True if it does. Then these threads use the rank's cores, and any other operation there has one thread."""


@runtime_checkable
class Source(Protocol):
    """A stream of inputs by ordinal: a pure function of the ordinal, so that nothing is lost on resume."""

    def read(self, ordinal: int) -> Any:
        """The value of group `ordinal`, the ordinal of its prompts in a run, whatever the source calls them."""


@runtime_checkable
class Pinned(Protocol):
    """A source whose data may change at their origin, such as a data set of a hub."""

    data: str
    """A name for the data as they are now. A run that has opened the source reads this in place of its `--data`."""


@runtime_checkable
class Finite(Protocol):
    """A source that begins again after its last value, such as the problems of an evaluation. Accuracy is measured at
    most once on each value."""

    size: int
    """How many values there are; 0 for one without end."""


@runtime_checkable
class Cyclic(Protocol):
    """A source that reads its rows again after the last one."""

    def epochs(self, ordinal: int) -> float:
        """How many times all rows have been read once group `ordinal` is: 0.5 after half of them. A run's metric
        `epoch`."""


@runtime_checkable
class Stream(Protocol):
    """The state of a node that works on several firings at once, such as an engine with slots."""

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        """Take a firing; a later `step` returns its outputs. `inputs` has the edges' values and, if the firing has
        paused, `paused`: its value to continue from."""

    def step(self) -> Sequence[tuple[Any, Any]]:
        """Do a small piece of work (one decode step). Return the finished firings, as (tag, outputs).

        A `Paused` in place of the outputs asks for another segment, here or on another replica. An exception in their
        place is the failure of that firing alone. An exception that is raised fails all firings.
        """

    def busy(self) -> bool:
        """True if there is work left."""

    def reset(self) -> None:
        """Forget all firings, as if none had been submitted. Called after `step` has raised: nothing waits for them."""


@runtime_checkable
class Releasing(Protocol):
    """A `Stream` that can release its device memory while it has no firings, and allocate it again for the next."""

    def release(self) -> None:
        """Release the memory; no firing is in progress. The results of later firings do not change."""


@runtime_checkable
class Fusing(Protocol):
    """A `Stream` that fuses some tensors of its weights into one, such as an attention's queries, keys and values."""

    def fused(self) -> Sequence[Sequence[str]]:
        """The names of the tensors of each fused one, in order. If weights arrive unconverted and the sizes allow it,
        the rows of these tensors are received one after the other in contiguous memory."""


# A mesh as (axis, size), outermost first; ranks count row-major: the last axis runs fastest. () is one rank.
Axes = tuple[tuple[str, int], ...]

# The mesh axes that models know: pipeline stages, data-parallel copies, shards of each tensor, shares of the experts,
# shares of each layer. All but "dp" cut tensors; over any other axis tensors are replicated.
STAGE, DATA, FSDP, EXPERT, TENSOR = "pp", "dp", "fsdp", "ep", "tp"


def stage_of_layer(layer: int, layers: int, stages: int) -> int:
    """The pipeline stage that holds a layer: layers are cut into runs of nearly equal length. `stages` is at most
    `layers`, so that no stage is empty. Trainer and planner both use it."""
    return layer * stages // layers


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def expert_of(name: str) -> int | None:
    """The number of the expert that a tensor belongs to; None for a tensor that all tokens use."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


def experts_at(place: int, experts: int, ranks: int) -> range:
    """The experts of a layer at one place on the axis "ep" with this many ranks: runs of equal length. `ranks` divides
    `experts`."""
    return range(place * experts // ranks, (place + 1) * experts // ranks)


def place_of_expert(expert: int, experts: int, ranks: int) -> int:
    """The inverse of `experts_at`."""
    return expert * ranks // experts


# The dimension that tensor parallelism cuts, and the most units that it is cut into (0: no limit); None: replicated.
Rule = tuple[int, int] | None


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

    `mesh` is the replica's; "tp" cuts by `rules` (see `rule_of`), then "fsdp" cuts dimension 0, and "pp" puts a tensor
    on its `stages` only. Each of the `experts` of a layer (0: there are none) is at one place of "ep", which cuts other
    tensors together with "fsdp". `shapes` are those of the whole tensors. `wanted` are the rules by which a receiving
    replica with an axis "tp" cuts the same tensors.
    """

    mesh: Axes
    shapes: Mapping[str, tuple[int, ...]]
    rules: Mapping[str, Rule]
    wanted: Mapping[str, Rule]
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    experts: int = 0


@runtime_checkable
class Sharded(Protocol):
    """A carried value that is sharded over its ranks. A value without this protocol is whole on each rank."""

    def sharding(self) -> Sharding:
        """The same on every rank."""


@runtime_checkable
class Described(Protocol):
    """A carried value whose readers need more than the tensors of its weights, such as which model adapters are for."""

    def about(self) -> Mapping[str, Any]:
        """JSON-able, the same for all versions: sent with the first one, as `Weights.about`."""
