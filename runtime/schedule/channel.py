"""The weights of one carried value on their way to one pool: published, sent, arrived, live.

Invariants:
- versions only grow: live <= shadow <= published, on each replica;
- nothing is published while a send of the version before is under way (the sender has one snapshot);
- nothing is sent to a replica whose shadow arena holds a version that is not live yet.

A pool may have a thousand replicas, and most events are about none of them: who can be sent to or swapped is kept, not
looked for.

The replicas of one pool in the order in which they are given work: most room first, equals in the plan's order.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from penstock.runtime.cluster.placement import Replica

NONE = -1


@dataclass(slots=True)
class Receiver:
    """One replica's arenas: the live version, the one in the shadow, and what is under way."""

    live: int = NONE
    shadow: int = NONE
    sending: bool = False
    swapping: bool = False


class Way:
    """State of one channel. `newest` is the newest live version of all replicas.

    Private: `_order`, the place of each replica; `_behind`, those that are not live with what is published; `_owed`,
    those of them whose shadow is behind, too; `_free`, those that may be sent to; `_full`, those whose shadow waits to
    be swapped in.
    """

    def __init__(self, replicas: Sequence[Replica], live: Mapping[str, int]) -> None:
        """`live` are versions that replicas hold already."""
        versions = {r.name: live.get(r.name, NONE) for r in replicas}
        self.receivers = {name: Receiver(version, version) for name, version in versions.items()}
        self.published = NONE
        self.publishing = False
        self.newest = max(versions.values(), default=NONE)
        self._order = {name: place for place, name in enumerate(self.receivers)}
        self._behind: set[str] = set()
        self._owed: set[str] = set()
        self._free: set[str] = set()
        self._full: set[str] = set()

    def may_publish(self, version: int) -> bool:
        """Is `version` news to some replica, and the snapshot free?"""
        if self.publishing or self.published >= version or self._owed:
            return False
        return any(r.live < version for r in self.receivers.values())

    def holds(self, version: int, replica: str) -> bool:
        """Can `replica` still get a version that is at least this new without another publication?"""
        return max(self.published, self.receivers[replica].shadow) >= version

    @property
    def owes(self) -> bool:
        """Has what is published still to come to some replica?"""
        return bool(self._owed)

    @property
    def awaited(self) -> bool:
        """Will some replica be live with newer weights soon?"""
        return bool(self._behind)

    def expects_first(self, replica: str) -> bool:
        """Is the first version that `replica` will ever have under way, or on the sender?"""
        under_way = self.publishing or self.published > NONE
        return under_way and replica in self.receivers and self.receivers[replica].live == NONE

    def to_send(self) -> list[str]:
        """Replicas whose shadow is free and behind what is published."""
        return sorted(self._free, key=self._order.__getitem__) if self._free and not self.publishing else []

    def to_swap(self) -> list[str]:
        """Replicas whose shadow is newer than what is live."""
        return sorted(self._full, key=self._order.__getitem__) if self._full else []

    # What happens to it --------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """The snapshot is made."""
        self.publishing, self.published = False, version
        self._behind = {name for name, r in self.receivers.items() if r.live < version}
        self._owed = {name for name in self._behind if self.receivers[name].shadow < version}
        self._free = {name for name in self._owed if self.receivers[name].shadow == self.receivers[name].live}

    def send(self, replica: str) -> None:
        """What is published is on its way."""
        self.receivers[replica].sending = True
        self._free.discard(replica)

    def arrive(self, replica: str, version: int) -> None:
        receiver = self.receivers[replica]
        receiver.sending, receiver.shadow = False, version
        self._owed.discard(replica)
        self._full.add(replica)

    def swap(self, replica: str) -> None:
        """The shadow is about to go live."""
        self.receivers[replica].swapping = True
        self._full.discard(replica)

    def swapped(self, replica: str, version: int) -> None:
        receiver = self.receivers[replica]
        receiver.swapping, receiver.live = False, version
        self.newest = max(self.newest, version)
        if version >= self.published:
            self._behind.discard(replica)
        if replica in self._owed:
            self._free.add(replica)


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
