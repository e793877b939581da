"""What would make a workload fit that does not, as a whole: no given meshes, more hosts, or shorter responses. Pure but
for the clock of its searches.

The fewest hosts of the kind with most memory, and the longest responses of half, a quarter … of the length: each is
named only where a search has found a whole plan.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.runtime.plan.islands import Island
from penstock.runtime.plan.layouts import trainer_meshes
from penstock.runtime.plan.lengths import Lengths, Listed, Lognormal
from penstock.runtime.plan.memory import trainer_memory
from penstock.runtime.plan.roles import Roles
from penstock.runtime.plan.search import Search
from penstock.runtime.plan.sides import Pins, Sides
from penstock.runtime.plan.training import Trainer

MOST_GPUS = 4096
SHORTEST = 64
"""Tokens of a response."""


@dataclass(frozen=True)
class Enough:
    """A question that has no plan, and until when others like it may be asked."""

    roles: Roles
    sides: Sides
    islands: Sequence[Island]
    deadline: float

    def __str__(self) -> str:
        """ "" where nothing that is tried is known to be enough."""
        if self.sides.pins != Pins() and self._fits(self._free, self.islands):
            return "All of it would fit without --mesh"
        ways = [way for way in (self._hosts(), self._shorter()) if way]
        return f"All of it would fit {', or '.join(ways)}" if ways else ""

    @property
    def _free(self) -> Sides:
        return replace(self.sides, pins=Pins())

    def _hosts(self) -> str:
        widest = max(self.islands, key=lambda island: island.gpu.memory_bytes * island.each)
        others = [island for island in self.islands if island is not widest]
        for count in range(len(widest.hosts) + 1, MOST_GPUS // widest.each + 1):
            grown = replace(widest, hosts=tuple(f"host{number}" for number in range(count)))
            if self._trains(grown) and self._fits(self._free, (grown, *others)):
                without = " and without --mesh" if self.sides.pins != Pins() else ""
                return f"on {count} hosts of {widest.each} {widest.kind}, {grown.gpus} GPUs{without}"
            if time.monotonic() > self.deadline:
                break
        return ""

    def _shorter(self) -> str:
        lengths, longest = self.sides.work.lengths, self.sides.work.lengths.longest // 2
        while longest >= SHORTEST and (cut := _cut(lengths, longest)) and time.monotonic() < self.deadline:
            if self._fits(replace(self.sides, work=replace(self.sides.work, lengths=cut)), self.islands):
                return f"with --max-tokens {longest}"
            longest //= 2
        return ""

    def _trains(self, island: Island) -> bool:
        """Whether a trainer fits on all GPUs of an island, alone."""
        work, copies = self.sides.work, self.sides.models.copies
        for mesh in trainer_meshes(work.shape, island, island.gpus):
            least = Trainer(work.shape, island.gpu, mesh, micro_tokens=work.context, zero3=mesh.fsdp > 1)
            if trainer_memory(least, copies).bytes <= island.gpu.memory_bytes:
                return True
        return False

    def _fits(self, sides: Sides, islands: Sequence[Island]) -> bool:
        """Whether there is any plan, as far as a search finds one in its grace."""
        # Islands that differ in their hosts alone are equal, and what is kept of one would be taken for the other's.
        fresh = Sides(sides.work, sides.lag, sides.slots, sides.pins, sides.models)
        return Search(self.roles, fresh, tuple(islands)).run(time.monotonic(), second=False).best is not None


def _cut(lengths: Lengths, longest: int) -> Lengths | None:
    """None where so little is left that they would be other responses."""
    if isinstance(lengths, Listed):
        return Listed(tuple(min(length, longest) for length in lengths.lengths))
    return Lognormal(lengths.mean, lengths.sigma, longest) if 2 * lengths.mean <= longest else None
