"""What the scheduler hears and says. Frozen, typed and packable: the wire and the event log use these same classes.

A *replica* is named "pool/index". A *channel* carries the weights of one carried value to one pool:
"policy>generator". A command goes to every rank of its replica; each rank answers with its own event.
"""

from dataclasses import dataclass

from penstock.graph.ir import Firing

Fired = tuple[str, int, int, int]


# Events ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """All ranks are ready: the first event of a run."""


@dataclass(frozen=True, slots=True)
class Done:
    """A rank finished a firing. `dropped` is a filter's verdict on its group; `again` says of a group that takes
    turns that it wants another one."""

    firing: Firing
    replica: str
    rank: int = 0
    dropped: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A firing raised on a rank, or missed its deadline."""

    firing: Firing
    replica: str
    rank: int
    error: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """A rank holds `version` in its shadow arena, proved."""

    channel: str
    version: int
    replica: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Swapped:
    """A rank made `version` live."""

    channel: str
    version: int
    replica: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The user, the clock or a signal wants a consistent cut. `final` ends the run after it."""

    final: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """A rank wrote its part of the cut at `update`."""

    update: int
    replica: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """A peer died or a deadline passed: nothing more will be answered."""

    error: str


Event = Begin | Done | Failed | Arrived | Swapped | Checkpoint | Saved | Abort


# Commands -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fire:
    """Run a node. `groups` are the ordinals it works on: its own for a per-group node, the batch of an update.

    `update`, for a per-group node that reads a delayed value: the update that its group is for.
    """

    firing: Firing
    replica: str
    groups: tuple[int, ...] = ()
    update: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """Move the published `version` from the ranks of `source` to those of `replica`, into the shadow arena."""

    channel: str
    version: int
    source: str
    replica: str


@dataclass(frozen=True, slots=True)
class Swap:
    """Make the shadow arena live, between two steps."""

    channel: str
    version: int
    replica: str


@dataclass(frozen=True, slots=True)
class Free:
    """The outputs of these firings, made on `replica`, have no reader left."""

    firings: tuple[Firing, ...]
    replica: str


@dataclass(frozen=True, slots=True)
class Settle:
    """A group has taken its last turn: what this firing made is the group's from now on, as that of turn 0 is."""

    firing: Firing
    replica: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write this replica's part of the cut before update `update`: carried values, states, outputs of `firings`."""

    update: int
    replica: str
    firings: tuple[Firing, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """All parts of the cut are written: the checkpoint is complete. `cut` is what the scheduler resumes from."""

    update: int
    cut: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over: "done", "stopped" (by the user) or "failed", with the reason."""

    status: str
    error: str = ""


Command = Fire | Send | Swap | Free | Settle | Save | Commit | Finish
