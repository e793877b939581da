"""Who starts a run's agents: the launcher itself, the user, or a cluster manager (Slurm, Ray, Kubernetes).

Agents that are not known beforehand enrol at the launcher's desk (`desk`) with the run's ticket. `Agents` is the
interface that starts them: a class of `runtime/managers`, or `ExternalAgents` for agents that the user starts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class AgentsError(ValueError):
    """The agents that were asked for cannot be started: no allocation, too few nodes, a missing command."""


class Agents(Protocol):
    """The agents of a run, one for each slot. The constructor takes the number that the user asks for, None for all
    that can be had, and raises AgentsError if there cannot be so many.

    `slots` is how many agents it will start. `address` is where they reach this machine: a host name or an IP address,
    without a port.
    """

    slots: int

    @property
    def address(self) -> str: ...

    def start(self, ticket: Path, tell: Callable[[str], None]) -> None:
        """Start the agents, each as `penstock agent --ticket FILE` with this ticket, and return at once. `tell` shows
        lines to the user. Raises AgentsError."""

    def poll(self) -> list[tuple[str, str]]:
        """The agents that have ended unasked since the last call: the host name under which each has enrolled ("" if
        unknown), and why. Returns at once; called about ten times a second. Raises AgentsError if no agent will come
        any more."""

    def lacking(self) -> str:
        """What the missing agents wait for, as far as is known; "" for nothing. Returns at once."""

    def stop(self) -> None:
        """End the remaining agents and free their resources, within some seconds. Called once, however the run has
        ended, even if `start` failed."""


class ExternalAgents:
    """Agents that the user starts, in any way."""

    def __init__(self, count: int | None) -> None:
        if count is None:
            raise AgentsError("--on agents: given no --agents N, needed how many agents will come")
        self.slots, self.address = count, ""

    def start(self, ticket: Path, tell: Callable[[str], None]) -> None:
        tell(f"start {self.slots} agents, each by: penstock agent --ticket {ticket}")

    def poll(self) -> list[tuple[str, str]]:
        return []

    def lacking(self) -> str:
        return ""

    def stop(self) -> None:
        pass
