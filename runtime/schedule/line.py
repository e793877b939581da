"""The replicas of one pool in the order in which they are given work: most room first, equals in the plan's order."""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence

from penstock.runtime.plan.plan import Replica


class Line:
    """Kept sorted, so that a pool of a thousand replicas is not gone through for each firing.

    Replicas of one kind (with the same weights) can do the same; of each kind the one with most room is looked at. A
    replica's key is (load - capacity) · replicas + its place in the plan: below 0 while it has room.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._names = [replica.name for replica in replicas]
        self._key = {r.name: place - r.capacity * len(replicas) for place, r in enumerate(replicas)}
        self._kind: dict[str, Hashable] = dict.fromkeys(self._names)
        self._kinds: dict[Hashable, list[int]] = {None: sorted(self._key.values())}

    def load(self, replica: str, firings: int) -> None:
        """So many firings more are in work on a replica; less if negative."""
        keys, before = self._kinds[self._kind[replica]], self._key[replica]
        after = self._key[replica] = before + firings * len(self._names)
        del keys[bisect_left(keys, before)]
        insort(keys, after)

    def move(self, replica: str, kind: Hashable) -> None:
        """A replica is of another kind from now on."""
        keys, key = self._kinds[self._kind[replica]], self._key[replica]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._kinds[self._kind[replica]]
        self._kind[replica] = kind
        insort(self._kinds.setdefault(kind, []), key)

    def first(self, fits: Callable[[str], bool] | None = None) -> str | None:
        """The first with room that fits; all of a kind do, or none."""
        heads = [keys[0] for keys in self._kinds.values()]
        if len(heads) > 1:
            heads.sort()
        for key in heads:
            if key >= 0:
                return None
            name = self._names[key % len(self._names)]
            if fits is None or fits(name):
                return name
        return None
