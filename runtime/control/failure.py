"""Why a run failed: the causes of failure in the order of their priority, and which of those reported is said.

Every detector calls `Session.fail` with a `Failure`. One failure brings about others: the death of a rank breaks the
transfers of its peers, which say so at once, while the machine that ended the rank may keep its agent waiting. So the
session decides once per turn of its driver, and says the reported failure whose code comes first in `FailureCode`.

Those of `HELD` are consequences as a rule. They end the run only when no better cause can come: an agent tells of
deaths before its heartbeat, so one that has given a sign of life since knows of none. What a rank says that computes
with others may be a consequence, too, whatever its code: a collective breaks as soon as a peer is gone, long before a
host that went away is missed.

Pure: time is passed in, and with it the seconds for which the one who waits was stopped itself (`held_up`): in these no
better cause could be heard. Invariant: a failure is replaced only by one whose code comes before its own, or by a
certain one if it is doubtful itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.graph.ir import Graph
from penstock.runtime.control.messages import Order, TooLargeError
from penstock.runtime.schedule.events import Fire


class FailureCode(StrEnum):
    """What ends a run. An earlier code explains the later ones. It is stable: scripts and tests match on it."""

    INTERRUPTED = "interrupted"  # the user ends a run in one process at once, without a checkpoint
    RUN_FOLDER = "run-folder"  # the run folder is gone, or takes no more
    CONTROLLER = "controller"  # the process that drives the run raised or was ended
    AGENT_DIED = "agent-died"  # and with it all ranks of its host
    RANK_DIED = "rank-died"  # by a signal, or without having said why
    CHECKPOINT = "checkpoint"  # a rank cannot read its part of the checkpoint that the run goes on from
    RANK_RAISED = "rank-raised"  # a rank says why it cannot start or go on
    RANK_ENDED = "rank-ended"  # a rank has ended, and what it said of it is still to be heard
    NODE = "node"  # a node failed for good, or groups were dropped or failed beyond the bounds
    NOT_READY = "not-ready"  # agents or ranks were not there within the startup deadline
    SILENT = "silent"  # a process gives no sign of life
    OVERDUE = "overdue"  # an answer was not there within the deadline
    UNREACHABLE = "unreachable"  # a rank cannot be sent to
    TRANSFER = "transfer"  # weights did not arrive, or values that an update was to read


# What has gone with a process or a host, so that a start from the last checkpoint may mend it. Where a host dies in
# mid-sync, the transfer may be all that is known of it.
MENDABLE = (
    FailureCode.AGENT_DIED,
    FailureCode.RANK_DIED,
    FailureCode.SILENT,
    FailureCode.UNREACHABLE,
    FailureCode.TRANSFER,
)
PRIORITY = {code: number for number, code in enumerate(FailureCode)}
# Failures that wait for a better cause.
HELD = (FailureCode.RANK_ENDED, FailureCode.UNREACHABLE, FailureCode.TRANSFER)
# Seconds for which they wait in any case.
HELD_S = 1.0
# Seconds after which no agent's heartbeat is waited for any more: by then one that is gone is found to be silent, which
# is a better cause.
DOUBT_S = 15.0


@dataclass(frozen=True)
class Failure:
    """What a detector found. `text` is for the user; `agents` are the peers that may know of a better cause.
    `doubtful`: a rank said it that computes with others, or reads what another one has made, and such a one may be
    gone. `replica`: the one without which it would not be; its loss may be mended. `host`: the one of which something
    is gone, where it is a single one: another start may do without it.
    """

    code: FailureCode
    text: str
    agents: tuple[str, ...] = ()
    doubtful: bool = False
    replica: str = ""
    host: str = ""

    @property
    def held(self) -> bool:
        return self.doubtful or self.code in HELD

    def explains(self, other: "Failure") -> bool:
        if self.doubtful != other.doubtful and not (self.held and other.held):
            return other.doubtful
        return PRIORITY[self.code] < PRIORITY[other.code]

    def line(self) -> dict[str, Any]:
        """As the launcher and the display are told of it."""
        return {"kind": "error", "code": self.code.value, "text": self.text}


# What makes a message smaller, by what most of it is.
_SMALLER = {
    "handles": "fewer groups in an update's batch (--batch)",
    "commands": "fewer groups in an update's batch (--batch)",
    "groups": "fewer groups in an update's batch (--batch)",
    "firings": "fewer groups that are under way (--batch, --lag)",
    "state": "fewer groups that are under way (--batch, --lag)",
    "manifests": "weights of fewer tensors",
    "config": "shorter options of its nodes",
}


def too_large(error: TooLargeError, graphs: Sequence[Graph]) -> Failure:
    """The run cannot go on since a message is too large; the node that it is for, or whose options make it so."""
    nodes = {node.name: node for graph in graphs for node in graph.nodes}
    commands = error.value.commands if isinstance(error.value, Order) else (error.value,)
    node, whose = None, ""
    if fires := [command for command in commands if isinstance(command, Fire)]:
        largest = max(fires, key=lambda fire: len(fire.groups))
        node, whose = nodes.get(largest.firing.node), f" on {largest.replica}, of {len(largest.groups)} groups"
    elif error.field == "config":
        node = max(nodes.values(), key=lambda node: len(repr(node.options)))
    place = f"{node.where}: {node.name!r}{whose}: " if node else ""
    return Failure(FailureCode.NODE, f"{place}{error}: {_SMALLER.get(error.field, 'less of it')}")


class Verdict:
    """The failure that a run ends with, of all that are reported."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.certain = False  # is there a failure that waits for no better cause?
        self._since = self._held_up = 0.0

    def report(self, failure: Failure, now: float, held_up: float = 0.0) -> None:
        """Keep the failure if it explains the one that is known. Of two with one code, the first is kept."""
        # What was reported first may be a consequence of what is reported now.
        if self.failure is None or failure.explains(self.failure):
            self.failure, self._since, self._held_up = failure, now, held_up
            self.certain = not failure.held

    def forgive(self, replica: str) -> None:
        """A replica is lost, and the run goes on without it: so it does in spite of what follows from the loss."""
        if self.failure is not None and self.failure.replica == replica:
            self.failure, self.certain = None, False

    def final(self, now: float, heard: Callable[[str], float], held_up: float = 0.0) -> Failure | None:
        """The failure to end the run with; None while there is none, or a better cause may come.

        `heard` gives the time of a peer's last sign of life.
        """
        if self.failure is None or self.certain:
            return self.failure
        waited = now - self._since - (held_up - self._held_up)
        beaten = all(heard(agent) > self._since for agent in self.failure.agents)
        return self.failure if waited > DOUBT_S or (waited > HELD_S and beaten) else None
