"""What a search has open, by lower bounds, and what it has found. Pure."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from tests.oracles.plan_search.found import Found, Outcome
from tests.oracles.plan_search.opening import Part

Tie = tuple[int, ...]
Entry = tuple[float, Tie, int, Part]


@dataclass
class Frontier:
    """Parts by the bounds of their periods, then by what decides between equal ones, then in the order in which they
    came. `second`: the best plan of another split than that of the best one is looked for, too."""

    second: bool
    best: Found | None = None
    runner_up: Found | None = None
    heap: list[Entry] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=count)

    def note(self, found: Found) -> None:
        """Keep the best plan and the best one of another split."""
        best, other = self.best, self.runner_up
        if best is None or found.rank < best.rank:
            self.best, self.runner_up = found, other if best is None or best.split == found.split else best
        elif found.split != best.split and (other is None or found.rank < other.rank):
            self.runner_up = found

    def push(self, part: Part, lower: float, tie: Tie = ()) -> None:
        if lower < inf and not _beyond(self.limit_of(part), lower, tie):
            heapq.heappush(self.heap, (lower, tie, next(self._serial), part))

    def pop(self) -> Part | None:
        """The first one that still matters; None if there is none."""
        while self.heap:
            lower, tie, _, part = heapq.heappop(self.heap)
            if not _beyond(self.limit_of(part), lower, tie):
                return part
        return None

    def merge(self, heaps: Sequence[list[Entry]]) -> None:
        """All of these in place of what is open."""
        self.heap = [entry for heap in heaps for entry in heap]
        heapq.heapify(self.heap)

    @property
    def limit(self) -> Found | None:
        """The plan that another one has to beat to matter."""
        return self.runner_up if self.second else self.best

    def limit_of(self, part: Part) -> Found | None:
        """What a part has to beat: one of a single split, the best plan if it has the same."""
        return self.best if self.best is not None and part.alone == self.best.split else self.limit

    def most(self, part: Part) -> float:
        """Seconds above which it does not matter."""
        limit = self.limit_of(part)
        return limit.period_s if limit else inf

    @property
    def done(self) -> bool:
        """Whether nothing that is open can matter."""
        return not self.heap or _beyond(self.limit, *self.heap[0][:2])

    def outcome(self, opened: int) -> Outcome:
        best, rest = self.best, self.heap[0] if self.heap else (inf, ())
        proved = best is not None and _beyond(best, *rest[:2])
        return Outcome(best, self.runner_up, best.period_s if best and proved else rest[0], proved, opened)


def _beyond(found: Found | None, lower: float, tie: Tie) -> bool:
    """Whether nothing with this lower bound comes before a plan."""
    return found is not None and (lower, tie) >= found.rank
