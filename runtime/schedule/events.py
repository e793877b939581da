"""What the scheduler hears and says. Frozen, typed and packable: the wire and the event log use these same classes.

A *replica* is named "pool/index". A *channel* carries the weights of one carried value to one pool:
"policy>generator". A command goes to every rank of its replica; each rank answers with its own event, or one for
itself and as many `others` after it as have done the same.
"""

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, structs

from penstock.graph.ir import Firing
from penstock.runtime.packable import Packable

# Events ---------------------------------------------------------------------------------------------------

# So many ranks after the one that an event names have done the same.
Others = Annotated[int, Meta(ge=0, lt=1 << 20)]


class Begin(Packable, frozen=True):
    """All ranks are ready: the first event of a run."""


class Done(Packable, frozen=True):
    """A rank finished a firing. `dropped` is a filter's verdict on its group; `again` says of a group that takes
    turns that it wants another one; `paused`, that the group goes on where it is in another segment."""

    firing: Firing
    replica: str
    rank: int = 0
    dropped: bool = False
    again: bool = False
    paused: bool = False
    others: Others = 0


class Failed(Packable, frozen=True):
    """A firing raised on a rank."""

    firing: Firing
    replica: str
    rank: int
    error: str


class Unread(Failed, frozen=True):
    """A rank has not begun a firing of an update, since a value that it reads is not there any more. No rank of the
    replica says so unless all do."""


class _OfVersion(Packable, frozen=True):
    channel: str
    version: int
    replica: str


class _VersionAnswer(_OfVersion, frozen=True):
    rank: int = 0
    others: Others = 0


class Published(_VersionAnswer, frozen=True):
    """A rank of the sender has copied the weights of `channel` aside as `version`."""


class Arrived(_VersionAnswer, frozen=True):
    """A rank has `version` staged in its second buffer, and the digests are right."""


class Swapped(_VersionAnswer, frozen=True):
    """A rank made `version` live."""


class Checkpoint(Packable, frozen=True):
    """The user, the clock or a signal wants a checkpoint. `final` ends the run after it."""

    final: bool = False


class Copied(Packable, frozen=True):
    """A rank has copied its part of the checkpoint before `update` aside, and writes it while the run goes on. A rank
    that writes it at once says `Saved` only."""

    update: int
    replica: str
    rank: int = 0
    others: Others = 0


class Saved(Packable, frozen=True):
    """A rank wrote its part of the checkpoint before `update`."""

    update: int
    replica: str
    rank: int = 0
    others: Others = 0


class ReplicaLost(Packable, frozen=True):
    """A replica is gone, with all that it worked on and kept; `reason` is for people."""

    replica: str
    reason: str = ""


class ReplicaJoined(Packable, frozen=True):
    """A replica that was not there is: it has neither weights nor values."""

    replica: str


class Abort(Packable, frozen=True):
    """Something failed that no retry can mend (a peer, a deadline, a transfer, a publication): the run ends."""

    error: str


Answer = Done | Failed | Unread | Published | Arrived | Swapped | Saved
Event = Begin | Answer | Copied | Checkpoint | ReplicaLost | ReplicaJoined | Abort


# Commands -------------------------------------------------------------------------------------------------


class Fire(Packable, frozen=True):
    """Run a node. `groups` are the ordinals it works on: its own for a per-group node, the batch of an update.

    `update`, for a per-group node that reads a delayed value: the update that its group is for.
    """

    firing: Firing
    replica: str
    groups: tuple[int, ...] = ()
    update: int = 0


class Publish(_OfVersion, frozen=True):
    """Copy the weights of `channel` aside as `version`, on every rank of `replica`, which holds them."""


class Send(Packable, frozen=True):
    """Move the published `version` from the ranks of `source` to those of `replica`, into the second buffer.

    `together`: the replicas that are sent it at once, in the order of the plan, where there are several. They may pass
    it on to each other.
    """

    channel: str
    version: int
    source: str
    replica: str
    together: tuple[str, ...] = ()


class Swap(_OfVersion, frozen=True):
    """Make what is staged in the second buffer live, between two steps."""


class Free(Packable, frozen=True):
    """The outputs of these firings, made on `replica`, have no reader left."""

    firings: tuple[Firing, ...]
    replica: str


class CommitTurn(Packable, frozen=True):
    """A group has taken its last turn: what this firing made is the group's from now on, as that of turn 0 is."""

    firing: Firing
    replica: str


class Save(Packable, frozen=True):
    """Copy this replica's part of the checkpoint before `update` aside, and write it: carried values, states, outputs
    of `firings`."""

    update: int
    replica: str
    firings: tuple[Firing, ...] = ()


class Commit(Packable, frozen=True):
    """All parts are written: the checkpoint is complete. `state` is what the scheduler resumes from, as JSON."""

    update: int
    state: str


class Finish(Packable, frozen=True):
    """The run is over: "done", "stopped" (by the user) or "failed", with the reason."""

    status: str
    error: str = ""


Question = Fire | Publish | Send | Swap | Save
Command = Question | Free | CommitTurn | Commit | Finish


def answer(command: Question, rank: int = 0) -> Answer:
    """What a rank says that has done what a command asks for."""
    match command:
        case Fire(firing, replica):
            return Done(firing, replica, rank)
        case Save(update, replica):
            return Saved(update, replica, rank)
        case Publish(channel, version, replica):
            return Published(channel, version, replica, rank)
        case Send(channel, version, _, replica):
            return Arrived(channel, version, replica, rank)
        case Swap(channel, version, replica):
            return Swapped(channel, version, replica, rank)


def kept_as(firing: Firing, *, paused: bool) -> Firing:
    """The name under which what a firing has made is kept: a paused one's begins the next segment, and what the last
    segment has made is the whole."""
    segment = firing.segment + 1 if paused else 0
    return firing if firing.segment == segment else firing._replace(segment=segment)


def first_answer(event: Answer | Copied) -> Answer:
    """The `answer` of rank 0 to what an event answers: one for all ranks, without what the event tells."""
    match event:
        case Done(firing, replica) | Failed(firing, replica):
            return Done(firing, replica)
        case Copied(update, replica):
            return Saved(update, replica)
    return structs.replace(event, rank=0, others=0)


def ranks_of(event: Answer | Copied) -> range:
    """The ranks that an event speaks for."""
    return range(event.rank, event.rank + 1 + (0 if isinstance(event, Failed) else event.others))


def each(event: Event) -> Iterator[Event]:
    """The same for each rank by itself."""
    if isinstance(event, Answer | Copied) and not isinstance(event, Failed) and event.others:
        yield from (structs.replace(event, rank=rank, others=0) for rank in ranks_of(event))
    else:
        yield event
