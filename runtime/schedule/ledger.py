"""Which prompt group has which fate, in what order groups are consumed, and how many stand before one.

Invariants:
- each ordinal below `next` has exactly one fate: pending, consumed, dropped or failed; all but pending are final;
- groups are consumed in ordinal order, `batch` by `batch`, lost (dropped, failed) ones skipped;
- `before(g)` counts the ordinals below g that are not known to be lost.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.graph.ir import Firing


@dataclass(slots=True)
class Talk:
    """A group's way through a bounded cycle: the turn that is due or in work, and where what was made is."""

    turn: int = 0
    made: dict[Firing, str] = field(default_factory=dict)


@dataclass(slots=True)
class Group:
    """A pending group: the steps done with the replica that holds each output, and the readers still to come.

    `working` firings are in work on it; `finished` when it has been through every step. `talks`: for each step that
    begins a bounded cycle, what its turns have made so far.
    """

    ordinal: int
    made: dict[str, str] = field(default_factory=dict)
    readers: dict[str, int] = field(default_factory=dict)
    working: int = 0
    finished: bool = False
    talks: dict[str, "Talk"] = field(default_factory=dict)


class Ledger:
    """`finished` counts the pending groups that are finished. `lost` holds the lost ordinals above the last consumed
    one: all below that are final, and only counted. `retried` counts the firings that failed and were tried again.

    `earlier` groups were consumed by updates whose ordinals are none of this ledger's: an evaluation of version 30 has
    its own ordinals from 0, and its update is the one after 30.
    """

    def __init__(self, earlier: int = 0) -> None:
        self.earlier = earlier
        self.groups: dict[int, Group] = {}
        self.leaving: dict[int, Group] = {}
        self.lost: list[int] = []
        self.fates = {"consumed": 0, "dropped": 0, "failed": 0}
        self.retried = 0
        self.finished = 0
        self.next = 0
        self._walked = 0
        self._line: deque[int] = deque()

    @property
    def first(self) -> int:
        """The lowest pending ordinal; `next` if none is pending."""
        return next(iter(self.groups), self.next)

    def open(self) -> Group:
        """The group of the next ordinal."""
        group = self.groups[self.next] = Group(self.next)
        self.next += 1
        return group

    def find(self, ordinal: int) -> Group:
        """A group in work: pending, or leaving."""
        return self.groups.get(ordinal) or self.leaving[ordinal]

    def before(self, ordinal: int) -> int:
        """How many groups not known to be lost stand before `ordinal`, which is past the last consumed group."""
        settled = self.fates["dropped"] + self.fates["failed"] - len(self.lost)
        return self.earlier + ordinal - settled - bisect_left(self.lost, ordinal)

    def lose(self, ordinal: int, fate: str) -> Group:
        """Give a group its final fate "dropped" or "failed". It is `leaving` while firings are in work on it."""
        insort(self.lost, ordinal)
        self.fates[fate] += 1
        group = self.groups.pop(ordinal)
        self.finished -= group.finished
        if group.working:
            self.leaving[ordinal] = group
        return group

    def finish(self, group: Group) -> None:
        """It has been through every step."""
        group.finished = True
        self.finished += 1

    def take(self, batch: int) -> tuple[int, ...] | None:
        """The next `batch` kept ordinals, in order, once all of them are finished."""
        while self._walked < self.next and len(self._line) < batch:
            group = self.groups.get(self._walked)
            if group is not None and not group.finished:
                break
            if group is not None:
                self._line.append(self._walked)
            self._walked += 1
        if len(self._line) < batch:
            return None
        return tuple(self._line.popleft() for _ in range(batch))

    def consume(self, ordinals: tuple[int, ...]) -> list[Group]:
        """Give the groups of a batch that was taken their final fate."""
        self.fates["consumed"] += len(ordinals)
        self.finished -= len(ordinals)
        del self.lost[: bisect_left(self.lost, ordinals[-1])]
        return [self.groups.pop(g) for g in ordinals]

    def to_json(self) -> dict[str, Any]:
        """All that a resume needs; a batch that was taken and not consumed is pending in it."""
        return {
            "earlier": self.earlier,
            "next": self.next,
            "lost": list(self.lost),
            "fates": dict(self.fates),
            **({"retried": self.retried} if self.retried else {}),  # logs of versions that did not count replay, too
            "groups": [[g.ordinal, dict(g.made), dict(g.readers)] for g in self.groups.values()],
        }

    def restore(self, cut: Mapping[str, Any]) -> None:
        """The inverse of `to_json`, on a new ledger."""
        self.earlier = cut["earlier"]
        self.next, self.lost, self.fates = cut["next"], list(cut["lost"]), dict(cut["fates"])
        self.retried = cut.get("retried", 0)
        for ordinal, made, readers in cut["groups"]:
            self.groups[ordinal] = Group(ordinal, dict(made), dict(readers))
        self._walked = self.first
