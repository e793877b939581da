"""One weight channel: the weights of one carried value on their way to one pool, published, sent, arrived, live. And
the queue from which a pool's replicas are given work.

Each replica has two buffers for the weights of a channel: the live one, which its firings read, and a second one, in
which the next version is staged while they read. A swap between two steps makes what is staged live.

Invariants:
- versions only grow: live <= staged <= published, on each replica;
- nothing is published while a send of the version before is under way: the sender has one snapshot;
- nothing is sent to a replica whose second buffer holds a version that is not live yet.

A channel with `history` keeps none of the three: its sender has the last snapshots, so that a replica may go back to an
older version, for the groups of one that was lost.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from penstock.runtime.cluster.placement import Replica

# The version of a replica that has no weights yet.
NONE = -1


@dataclass(slots=True)
class Receiver:
    """One replica: the live version, the one in its second buffer, and what is under way: `coming` is what was sent
    last."""

    live: int = NONE
    staged: int = NONE
    sending: bool = False
    swapping: bool = False
    coming: int = NONE


class ChannelState:
    """The state of one channel. `live` are versions that replicas hold already.

    published: the version of the snapshot. publishing: is one being made? newest: the newest live version of all.
    behind: the replicas that are not live with what is published. owed: those of them that it was not sent to yet, or
    has not reached.
    """

    def __init__(
        self, replicas: Sequence[Replica], live: Mapping[str, int], absent: Collection[str] = (), history: bool = False
    ) -> None:
        self.history = history
        versions = {r.name: live.get(r.name, NONE) for r in replicas if r.name not in absent}
        self.receivers = {name: Receiver(version, version) for name, version in versions.items()}
        self.published = NONE
        self.publishing = False
        self.newest = max(versions.values(), default=NONE)
        self.behind: set[str] = set()
        self.owed: set[str] = set()
        # A pool may have a thousand replicas, and most events are about none of them. So it is kept, not looked for,
        # who can be sent to (those owed whose second buffer is free) and who can be swapped (those whose is full).
        self._free: set[str] = set()
        self._full: set[str] = set()
        self._order = {replica.name: place for place, replica in enumerate(replicas)}

    def may_publish(self, version: int) -> bool:
        """Is `version` news to some replica, and the snapshot free?"""
        if self.publishing or self.published >= version or (self.owed and not self.history):
            return False
        # A version that nobody is there to get may be needed by one that comes.
        return self.history or any(r.live < version for r in self.receivers.values())

    def holds(self, version: int, replica: str) -> bool:
        """Can `replica` still get a version that is at least this new without another publication?"""
        return max(self.published, self.receivers[replica].staged) >= version

    @property
    def begun(self) -> bool:
        """Is some version published, or about to be?"""
        return self.publishing or self.published > NONE

    def expects_first(self, replica: str) -> bool:
        """Is the first version that `replica` will ever have under way, or on the sender?"""
        return self.begun and replica in self.receivers and self.receivers[replica].live == NONE

    def to_send(self) -> list[str]:
        """Replicas that can be sent what is published, in the plan's order."""
        return sorted(self._free, key=self._order.__getitem__) if self._free and not self.publishing else []

    def to_swap(self) -> list[str]:
        """Replicas in which a newer version than the live one is staged, in the plan's order."""
        return sorted(self._full, key=self._order.__getitem__) if self._full else []

    # What happens to it --------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """The snapshot is made."""
        self.publishing, self.published = False, version
        self.behind = {name for name, r in self.receivers.items() if r.live < version}
        self.owed = {name for name in self.behind if self.receivers[name].staged < version}
        self._free = {name for name in self.owed if self.receivers[name].staged == self.receivers[name].live}

    def send(self, replica: str, version: int) -> None:
        """A version is on its way, into the second buffer whatever it holds."""
        receiver = self.receivers[replica]
        receiver.sending, receiver.coming, receiver.staged = True, version, receiver.live
        self._free.discard(replica)

    def arrive(self, replica: str, version: int) -> None:
        receiver = self.receivers[replica]
        receiver.sending, receiver.staged = False, version
        self.owed.discard(replica)
        self._full.add(replica)

    def swap(self, replica: str) -> None:
        """What is staged is about to go live."""
        self.receivers[replica].swapping = True
        self._full.discard(replica)

    def swapped(self, replica: str, version: int) -> None:
        receiver = self.receivers[replica]
        receiver.swapping, receiver.live = False, version
        self.newest = max(self.newest, version)
        if version >= self.published:
            self.behind.discard(replica)
        else:
            self.behind.add(replica)
        # A newer version may have been published while this one was on its way: now there is room for it.
        if replica in self.owed:
            self._free.add(replica)

    def lose(self, replica: str) -> None:
        """A replica is gone, with its weights."""
        del self.receivers[replica]
        for names in (self.behind, self.owed, self._free, self._full):
            names.discard(replica)
        self.newest = max((receiver.live for receiver in self.receivers.values()), default=NONE)

    def join(self, replica: str) -> None:
        """A replica without weights is there. It is sent what is published."""
        self.receivers[replica] = Receiver()
        if self.published > NONE:
            self.behind.add(replica)
            self.owed.add(replica)
            self._free.add(replica)


class LeastLoadedQueue:
    """The replicas of one pool in the order in which they are given work: most room first, equals in the plan's order.

    Replicas of one kind (with the same weights) can do the same, so of each kind only the one with most room is looked
    at.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._names = [replica.name for replica in replicas]
        # A replica's key is (load - capacity) · replicas + its place in the plan: below 0 while it has room, and the
        # place is the remainder. Keys are kept sorted: a pool of a thousand is not gone through for each firing.
        self._key = {r.name: place - r.capacity * len(replicas) for place, r in enumerate(replicas)}
        self._kind: dict[str, Hashable] = dict.fromkeys(self._names)
        self._kinds: dict[Hashable, list[int]] = {None: sorted(self._key.values())}

    def remove(self, replica: str) -> None:
        """A replica is gone: nothing is given to it."""
        keys = self._kinds[self._kind[replica]]
        del keys[bisect_left(keys, self._key[replica])]
        if not keys:
            del self._kinds[self._kind[replica]]

    def add(self, replica: Replica) -> None:
        """A replica that was removed is there again, with nothing in work."""
        name, kind = replica.name, self._kind[replica.name]
        self._key[name] = self._names.index(name) - replica.capacity * len(self._names)
        insort(self._kinds.setdefault(kind, []), self._key[name])

    def load(self, replica: str, firings: int) -> None:
        """Note that `firings` more are in work on a replica; less if negative."""
        keys, before = self._kinds[self._kind[replica]], self._key[replica]
        after = self._key[replica] = before + firings * len(self._names)
        del keys[bisect_left(keys, before)]
        insort(keys, after)

    def move(self, replica: str, kind: Hashable) -> None:
        """Note that a replica is of another kind from now on."""
        keys, key = self._kinds[self._kind[replica]], self._key[replica]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._kinds[self._kind[replica]]
        self._kind[replica] = kind
        insort(self._kinds.setdefault(kind, []), key)

    def first(self, fits: Callable[[str], bool]) -> str | None:
        """The first with room that fits; all of a kind do, or none."""
        heads = [keys[0] for keys in self._kinds.values()]
        if len(heads) > 1:
            heads.sort()
        for key in heads:
            if key >= 0:
                return None
            name = self._names[key % len(self._names)]
            if fits(name):
                return name
        return None
