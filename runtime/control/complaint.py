"""What is wrong with a run before it is known why: news of a death are the better reason. Pure: time is passed in.

A peer whose transfer breaks is often heard before the agent whose rank has died: the machine that ended one process may
keep another one waiting. An agent tells of deaths before it beats, so that one that has beaten since knows of none.
"""

from collections.abc import Callable
from dataclasses import dataclass

DEATH_S = 1.0
"""Seconds for which a complaint waits for a better reason in any case."""
AGENTS_S = 5.0
"""Seconds after which no agent is waited for any more: it may be what is wrong."""


@dataclass(frozen=True)
class Complaint:
    """`agents` may know of a better reason. `since` is when it was heard."""

    text: str
    since: float
    agents: tuple[str, ...] = ()

    def ripe(self, now: float, heard: Callable[[str], float]) -> bool:
        """Will no better reason come? `heard` says when a peer gave its last sign of life."""
        waited = now - self.since
        return waited > AGENTS_S or (waited > DEATH_S and all(heard(agent) > self.since for agent in self.agents))
