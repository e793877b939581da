"""The best plan by best-first branch and bound. Pure but for the clock of its time limit.

What is open lies in a heap by a lower bound of its period (`least`): first the GPUs of the trainer; then those of each
group of models that is apart; then their fastest layouts; then each generator there is, on any of the GPUs that are
left; then with its rollout simulated; then with each trainer in turn, fastest first, and the sync of the real
resharding plan. A plan that is no worse than anything still open is optimal under the model, and what cannot beat the
best two plans of different splits is never opened. Equal periods are decided by precision (bf16 first), then by GPUs
(fewer first), then by the order of creation, so that the same question always has the same answer.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.runtime.plan.roles import Roles
from tests.oracles.plan_search.found import Found, Outcome, Split
from tests.oracles.plan_search.frontier import Frontier
from tests.oracles.plan_search.islands import Island
from tests.oracles.plan_search.least import Least
from tests.oracles.plan_search.opener import Opener
from tests.oracles.plan_search.opening import Groups, Pair, Ways
from tests.oracles.plan_search.sides import Sides

GRACE = 5.0
"""Seconds beyond its time that a search without any plan has to find one."""


@dataclass(frozen=True)
class Search:
    """One search: of all plans, or of those with one of the `given` splits, models beside the policy on the trainer's
    GPUs. `known` are plans that another search has found among these."""

    roles: Roles
    sides: Sides
    islands: tuple[Island, ...]
    given: tuple[Split, ...] | None = None
    known: tuple[Found, ...] = ()

    @cached_property
    def _least(self) -> Least:
        return Least(self.roles, self.sides, self.islands)

    def run(self, deadline: float, *, second: bool = True) -> Outcome:
        """Until the best plan (and with `second` that of another split) is known, or the clock passes `deadline`."""
        open_ = Frontier(second)
        for found in self.known:
            open_.note(found)
        opener = Opener(self.roles, self.sides, self.islands, self._least, open_)
        self.begin(opener)
        opened = self._dive(open_, opener, deadline + GRACE) if open_.limit is None else 0
        while not open_.done and time.monotonic() < deadline and (part := open_.pop()):
            opened += 1
            if whole := opener.open(part):
                open_.note(whole)
        return open_.outcome(opened)

    def begin(self, opener: Opener) -> None:
        """All splits, with each of the groupings of the models beside the policy."""
        ways = groupings(self.roles, self.sides)
        if self.given is None:
            for groups in ways:
                opener.begin(groups)
        elif () in ways:
            for split in self.given:
                opener.given(split)

    def _dive(self, open_: Frontier, opener: Opener, deadline: float) -> int:
        """On with what was opened last until there is a plan or time is over: one to measure others by. Returns how
        many parts were opened."""
        heaps, opened = [open_.heap], 0
        while heaps and open_.best is None and time.monotonic() < deadline:
            open_.heap = heaps[-1]
            if (part := open_.pop()) is None:
                heaps.pop()
                continue
            opened += 1
            if not isinstance(part, Ways | Pair):  # generators are compared with each other, before other trainers
                heaps.append([])
                open_.heap = heaps[-1]
            if whole := opener.open(part):
                open_.note(whole)
        open_.merge(heaps)
        return opened


def groupings(roles: Roles, sides: Sides) -> tuple[Groups, ...]:
    """Which models beside the policy have GPUs of their own, and which of these share them: all that differ. Those that
    are not named lie on the trainer's. Pools with a mesh of their own lie there with nobody who has another one."""
    found: dict[object, Groups] = {}
    for groups in _parted(roles.beside):
        free = [pool for pool in roles.beside if not any(pool in group for group in groups)]
        if any(pool in sides.pins.beside for pool in free) or not all(map(sides.agreed, groups)):
            continue
        alike = sorted(sorted((str(roles.models_of((pool,))), str(sides.pins.beside.get(pool))) for pool in group)
                       for group in groups)  # fmt: skip
        found.setdefault((str(alike), str(sorted(str(roles.models_of((pool,))) for pool in free))), groups)
    return tuple(found.values())


def _parted(pools: Sequence[str]) -> Iterator[Groups]:
    """Every way to leave some out and to put the others into groups."""
    if not pools:
        yield ()
        return
    first, *others = pools
    for groups in _parted(others):
        yield groups
        yield ((first,), *groups)
        for place, group in enumerate(groups):
            yield (*groups[:place], (first, *group), *groups[place + 1 :])
