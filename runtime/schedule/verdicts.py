"""What filters and environments decide, for the simulator: by given shares, drawn by a key. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.graph.ir import Firing
from penstock.runtime.schedule.durations import draw
from penstock.runtime.schedule.tables import Tables


@dataclass(frozen=True)
class Verdicts:
    """Shares from 0 to 1, by node. Keyed by seed, node, ordinal and turn: the same whatever the schedule.

    drops: of the groups that a filter (`keep`) sees, those that it drops; none if it is not named.
    again: of the turns that a node answers, those after which it asks for another one; all if it is not named. The
    bound of the turns holds whatever it asks for.
    """

    drops: Mapping[str, float] = field(default_factory=dict)
    again: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def dropped(self, firing: Firing) -> bool:
        """Is the group dropped?"""
        return self._draw("drops", firing) < self.drops.get(firing.node, 0.0)

    def goes_on(self, firing: Firing) -> bool:
        """Is there to be another turn?"""
        return self._draw("again", firing) < self.again.get(firing.node, 1.0)

    def check(self, tables: Tables) -> None:
        """Raises ValueError for a node that decides nothing of the kind, and for what is no share."""
        filters = [s.name for s in tables.steps.values() if s.filters]
        answers = [s.name for s in tables.steps.values() if s.answers]
        for kind, shares, able in (("drops", self.drops, filters), ("again", self.again, answers)):
            if unknown := [name for name in shares if name not in able]:
                needed = f"names of {', '.join(able)}" if able else "none, since no node of the graph decides it"
                raise ValueError(f"{kind}: given {', '.join(unknown)}; needed {needed}")
            if wrong := [f"{name}={share}" for name, share in shares.items() if not 0 <= share <= 1]:
                raise ValueError(f"{kind}: given {', '.join(wrong)}; needed shares from 0 to 1")

    def _draw(self, kind: str, firing: Firing) -> float:
        return draw(f"{self.seed}/{kind}/{firing}")
