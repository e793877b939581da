"""Why a run failed: the causes of failure by priority, and which of several reported failures is shown.

Every detector calls `Session.fail` with a `Failure`. One failure causes others: the death of a rank breaks the
transfers of its peers, which report it at once, while the agent of the dead rank may be slow. So the session decides
once per turn of its driver, and shows the reported failure whose code comes first in `FailureCode`.

The codes in `HELD` are usually consequences. They end the run only when no better cause can come: an agent reports
deaths before its heartbeat, so an agent whose heartbeat came later than the failure knows of none. A failure of a rank
that computes with others may be a consequence, too, whatever its code: a collective breaks as soon as a peer is gone,
long before the silence of a lost host is noticed.

Pure: time is passed in, and also the seconds for which the waiting process itself was suspended (`suspended_s`): in
that time it could not hear of a better cause. Invariant: a failure is replaced only by one whose code comes earlier, or
by a certain one if it is doubtful itself.
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
    RUN_FOLDER = "run-folder"  # the run folder is gone, or cannot be written
    CONTROLLER = "controller"  # the process that drives the run raised or was ended
    UNTRUSTED = "untrusted"  # a rank reports that what it computes can no longer be trusted
    AGENT_DIED = "agent-died"  # and with it all ranks of its host
    RANK_DIED = "rank-died"  # by a signal, or without a reason
    CHECKPOINT = "checkpoint"  # a rank cannot read its shard of the checkpoint to resume from
    RANK_RAISED = "rank-raised"  # a rank reports why it cannot start or go on
    RANK_ENDED = "rank-ended"  # a rank has ended, and the message with its reason has not come yet
    NODE = "node"  # a node failed for good, or groups were dropped or failed beyond the bounds
    NOT_READY = "not-ready"  # agents or ranks were not there within the startup deadline
    SILENT = "silent"  # a process gives no sign of life
    OVERDUE = "overdue"  # an answer did not come within its deadline
    UNREACHABLE = "unreachable"  # messages to a rank cannot be sent
    TRANSFER = "transfer"  # weights did not arrive, or values that an update needs


# Failures by the loss of a process or a host, which a restart from the last checkpoint may mend. If a host dies in the
# middle of a weight sync, the broken transfer may be the only sign.
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
# Seconds after which they wait for no agent's heartbeat any more: an agent that is gone is found silent by then, which
# is a better cause.
DOUBT_S = 15.0


@dataclass(frozen=True)
class Failure:
    """What a detector found. `text` is for the user; `agents` are the peers that may know of a better cause.
    `doubtful`: the reporting rank computes with other ranks or reads their values, and one of those may be gone.
    `replica`: the replica that causes this failure; if it is lost and the run goes on without it, the failure is
    dropped. `host`: the host that lost something, if it is a single one; a restart may do without it.
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
        """The failure as a line for the launcher and the display."""
        return {"kind": "error", "code": self.code.value, "text": self.text}


# What makes a message smaller, by its largest field.
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
    """The failure for a message that is too large. It names the node that the message is for, or whose options make it
    so."""
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
    """Chooses the failure that a run ends with from all that are reported."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.certain = False  # the failure waits for no better cause
        self._since = self._suspended_s = 0.0

    def report(self, failure: Failure, now: float, suspended_s: float = 0.0) -> None:
        """Keep the failure if it explains the known one. Of two with one code, the first is kept."""
        # The known failure may be a consequence of this one.
        if self.failure is None or failure.explains(self.failure):
            self.failure, self._since, self._suspended_s = failure, now, suspended_s
            self.certain = not failure.held

    def forgive(self, replica: str) -> None:
        """The run goes on without a lost replica: drop the failure if it follows from that loss."""
        if self.failure is not None and self.failure.replica == replica:
            self.failure, self.certain = None, False

    def final(self, now: float, heard: Callable[[str], float], suspended_s: float = 0.0) -> Failure | None:
        """The failure to end the run with; None if there is none, or while a better cause may come.

        `heard` gives the time of a peer's last sign of life.
        """
        if self.failure is None or self.certain:
            return self.failure
        waited = now - self._since - (suspended_s - self._suspended_s)
        beaten = all(heard(agent) > self._since for agent in self.failure.agents)
        return self.failure if waited > DOUBT_S or (waited > HELD_S and beaten) else None
