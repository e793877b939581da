"""What the runtime asks of the values that nodes and makers keep in their workers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from penstock.graph.arrays import Array


@runtime_checkable
class Carried(Protocol):
    """A value that each update replaces, such as the policy with its optimizer. It stays in its workers."""

    def weights(self) -> Mapping[str, Array]:
        """What `broadcast` sends: the logical tensors by name, in the dtype in which they travel."""

    def state(self) -> tuple[Mapping[str, Array], Mapping[str, Any]]:
        """All that a checkpoint needs to go on exactly: tensors, and JSON-able facts."""

    def restore(self, tensors: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        """The inverse of `state`."""

    def export(self, folder: str) -> None:
        """Write what other tools read (an HF directory) into an existing folder; nothing if there is nothing."""


@runtime_checkable
class Offloadable(Protocol):
    """A carried value of which a part may lie on the host between two updates, so that others have its device memory.

    What reads it in an update has all of it on the device. Whatever else is asked of it, such as `weights`, `state`
    and `export`, computes with none of these tensors, and `state` gives them wherever they lie.
    """

    def offloadable(self) -> Mapping[str, Array]:
        """The tensors that may go, by their names in `state`: objects that stay, each with memory of its own."""


@runtime_checkable
class Source(Protocol):
    """A stream of inputs by ordinal: a pure function of the ordinal, so that nothing is lost on resume."""

    def read(self, ordinal: int) -> Any:
        """The value of group `ordinal`."""


@runtime_checkable
class Stream(Protocol):
    """The state of a node that works on several firings at once, such as an engine with slots."""

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        """Take a firing; its outputs come from `step` later. `inputs` hold the edges' values only."""

    def step(self) -> Sequence[tuple[Any, Any]]:
        """Work a little (one decode step); the finished firings, as (tag, outputs).

        An exception in place of the outputs is the failure of that firing alone. One that is raised fails them all.
        """

    def busy(self) -> bool:
        """Is there anything left to work on?"""

    def reset(self) -> None:
        """Forget all firings, as if none had been submitted: `step` raised, and none of them will be answered."""


@runtime_checkable
class Releasing(Protocol):
    """A `Stream` that can do without its device memory while it has no firings, and takes it again for the next."""

    def release(self) -> None:
        """Give it up; nothing is in work. What comes of later firings is the same."""
