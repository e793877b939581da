"""Who starts a run's agents: the launcher itself, the user, or a cluster manager (Slurm, Ray, Kubernetes).

Agents that nobody can name beforehand enrol at the launcher's desk (`desk`) with the run's ticket. `Agents` is what the
launcher asks of whoever starts them: a class of `runtime/managers`, or `ExternalAgents` for those that the user starts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class AgentsError(ValueError):
    """Agents cannot be had as they were asked for: no allocation, too few nodes, a command that is not there."""

    # The exit status of the command.
    status = 1


class CountError(AgentsError):
    """There cannot be so many agents as were asked for."""

    status = 2


class Agents(Protocol):
    """The agents of a run, one for each slot. Made with the number that the user asks for, None for all there are;
    its maker raises AgentsError where there cannot be so many.

    `slots` is how many it will start. `address` is where these reach this machine: a host name or an IP address,
    without a port.
    """

    slots: int

    @property
    def address(self) -> str: ...

    def start(self, ticket: Path, tell: Callable[[str], None]) -> None:
        """Start the agents, each as `penstock agent --ticket FILE` with this ticket, and come back at once; the user is
        told what is to be known of it. Raises AgentsError."""

    def poll(self) -> list[tuple[str, str]]:
        """The agents that have ended since the last call without being asked to: the host name under which each has
        enrolled ("" where that is not known), and why. Returns at once; called about ten times a second. Raises
        AgentsError where none will come any more."""

    def lacking(self) -> str:
        """What agents that have not come wait for, as far as is known; "" for nothing. Returns at once."""

    def stop(self) -> None:
        """End the agents that are left, and free what was taken for them. Called once, however the run has ended, even
        if `start` failed; within some seconds."""


class ExternalAgents:
    """Agents that the user starts, in any way."""

    def __init__(self, count: int | None) -> None:
        if count is None:
            raise CountError("--on agents: given no --agents N, needed how many agents will come")
        self.slots, self.address = count, ""

    def start(self, ticket: Path, tell: Callable[[str], None]) -> None:
        tell(f"start {self.slots} agents, each by: penstock agent --ticket {ticket}")

    def poll(self) -> list[tuple[str, str]]:
        return []

    def lacking(self) -> str:
        return ""

    def stop(self) -> None:
        pass
