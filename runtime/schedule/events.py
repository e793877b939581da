"""The scheduler's input (events) and output (commands). The wire and the event log use the same frozen, typed classes.

A *replica* is named "pool/index". A *channel* carries the weights of one carried value to one pool:
"policy>generator". A command goes to every rank of its replica. Each rank answers with its own event, or one event
answers for a rank and for the `others` ranks after it.
"""

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, structs

from penstock.graph.ir import Firing
from penstock.runtime.packable import Packable

# Events ---------------------------------------------------------------------------------------------------

# How many of the ranks after the one that an event names give the same answer.
Others = Annotated[int, Meta(ge=0, lt=1 << 20)]


class Begin(Packable, frozen=True):
    """All ranks are ready: the first event of a run."""


class Done(Packable, frozen=True):
    """A rank finished a firing. `dropped`: a filter drops the group. `again`: a group that takes turns wants another
    turn. `paused`: the response is not complete and goes on in another segment."""

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
    """A rank could not begin a firing of an update: a value that it reads is lost. Either all ranks of the replica say
    so, or none does."""


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
    """The user, a timer or a signal asks for a checkpoint. `final`: the run ends after it."""

    final: bool = False


class Copied(Packable, frozen=True):
    """A rank has copied its part of the checkpoint before `update` aside, and writes it in the background. A rank that
    writes its part at once sends only `Saved`."""

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
    """A replica is lost, with its work and all values that it held. `reason` is for people."""

    replica: str
    reason: str = ""


class ReplicaJoined(Packable, frozen=True):
    """An absent replica has joined. It has neither weights nor values."""

    replica: str


class Abort(Packable, frozen=True):
    """A failure that no retry can mend (a peer, a deadline, a transfer, a publication): the run ends."""

    error: str


Answer = Done | Failed | Unread | Published | Arrived | Swapped | Saved
Event = Begin | Answer | Copied | Checkpoint | ReplicaLost | ReplicaJoined | Abort


# Commands -------------------------------------------------------------------------------------------------


class Fire(Packable, frozen=True):
    """Run a node. `groups` are the ordinals it works on: its own for a per-group node, the batch of an update.

    `update` is set for a per-group node that reads a delayed value: the update that its group is for.
    """

    firing: Firing
    replica: str
    groups: tuple[int, ...] = ()
    update: int = 0


class Publish(_OfVersion, frozen=True):
    """Copy the weights of `channel` aside as `version`, on every rank of `replica`, the sender."""


class Send(Packable, frozen=True):
    """Move the published `version` from the ranks of `source` to those of `replica`, into the second buffer.

    `together`: all replicas that get this version at once, in the plan's order; empty if there is only one. They may
    pass it on to each other.
    """

    channel: str
    version: int
    source: str
    replica: str
    together: tuple[str, ...] = ()


class Swap(_OfVersion, frozen=True):
    """Make the version in the second buffer live, between two steps."""


class Free(Packable, frozen=True):
    """The outputs of these firings, made on `replica`, have no reader left."""

    firings: tuple[Firing, ...]
    replica: str


class CommitTurn(Packable, frozen=True):
    """A group has taken its last turn: store the output of this firing under the name of turn 0."""

    firing: Firing
    replica: str


class Save(Packable, frozen=True):
    """Copy this replica's part of the checkpoint before `update` aside, and write it: carried values, states, and the
    outputs of `firings`."""

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
    """The event with which a rank reports that it has executed a command."""
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
    """The name under which the output of a firing is kept. A paused firing's output is kept for the next segment; the
    last segment's output is the whole response, and is kept as segment 0."""
    segment = firing.segment + 1 if paused else 0
    return firing if firing.segment == segment else firing._replace(segment=segment)


def first_answer(event: Answer | Copied) -> Answer:
    """The `answer` of rank 0 to the same command: one key for the answers of all ranks, without verdicts or errors."""
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
    """Split an event into one event for each rank."""
    if isinstance(event, Answer | Copied) and not isinstance(event, Failed) and event.others:
        yield from (structs.replace(event, rank=rank, others=0) for rank in ranks_of(event))
    else:
        yield event
