"""The state of one weight channel (published, sent, arrived, live), and the queue that chooses a replica for a firing.

Each replica has two buffers for the weights of a channel: the live one, which its firings read, and a second one, in
which the next version is staged meanwhile. A swap between two steps makes the staged version live.

Invariants:
- versions only grow: on each replica live <= staged, and staged <= published once a version was published;
- no version is published while the one before is being sent: the sender has one snapshot;
- no version is sent to a replica whose second buffer holds a version that is not live yet.

A channel with `history` keeps none of the three: its sender has several snapshots, so that a replica can go back to an
older version for the groups of a lost replica.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from penstock.runtime.cluster.placement import Replica

# The version of a replica that has no weights yet.
NONE = -1


@dataclass(slots=True)
class Receiver:
    """One replica: its live version, the version in its second buffer, and transfers under way. `coming` is the version
    that was sent last."""

    live: int = NONE
    staged: int = NONE
    sending: bool = False
    swapping: bool = False
    coming: int = NONE


class ChannelState:
    """The state of one channel. `live` are the versions that replicas hold already.

    published: the version of the snapshot. publishing: a snapshot is being made. newest: the newest live version of all
    replicas. behind: the replicas on which the published version is not live. owed: those of them that have not
    received it yet.
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
        # A pool may have a thousand replicas, and most events concern none of them. So the replicas that can be sent to
        # (owed, second buffer free) and those that can be swapped (second buffer full) are kept, not searched for.
        self._free: set[str] = set()
        self._full: set[str] = set()
        self._order = {replica.name: place for place, replica in enumerate(replicas)}

    def may_publish(self, version: int) -> bool:
        """True if some replica lacks `version`, and the snapshot may be replaced."""
        if self.publishing or self.published >= version or (self.owed and not self.history):
            return False
        # With history, a replica that joins later may need a version that no present replica lacks.
        return self.history or any(r.live < version for r in self.receivers.values())

    def holds(self, version: int, replica: str) -> bool:
        """True if `replica` can get a version at least as new as `version` without another publication."""
        return max(self.published, self.receivers[replica].staged) >= version

    @property
    def begun(self) -> bool:
        """True if some version is published, or about to be."""
        return self.publishing or self.published > NONE

    def expects_first(self, replica: str) -> bool:
        """True if `replica` has no weights yet, and its first version is under way or published."""
        return self.begun and replica in self.receivers and self.receivers[replica].live == NONE

    def to_send(self) -> list[str]:
        """Replicas to which the published version can be sent, in the plan's order."""
        return sorted(self._free, key=self._order.__getitem__) if self._free and not self.publishing else []

    def to_swap(self) -> list[str]:
        """Replicas on which a newer version than the live one is staged, in the plan's order."""
        return sorted(self._full, key=self._order.__getitem__) if self._full else []

    # Changes ---------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Note that the snapshot is made."""
        self.publishing, self.published = False, version
        self.behind = {name for name, r in self.receivers.items() if r.live < version}
        self.owed = {name for name in self.behind if self.receivers[name].staged < version}
        self._free = {name for name in self.owed if self.receivers[name].staged == self.receivers[name].live}

    def send(self, replica: str, version: int) -> None:
        """Note that a version is being sent; it overwrites the second buffer."""
        receiver = self.receivers[replica]
        receiver.sending, receiver.coming, receiver.staged = True, version, receiver.live
        self._free.discard(replica)

    def arrive(self, replica: str, version: int) -> None:
        receiver = self.receivers[replica]
        receiver.sending, receiver.staged = False, version
        self.owed.discard(replica)
        self._full.add(replica)

    def swap(self, replica: str) -> None:
        """Note that the staged version is about to go live."""
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
        # A newer version may have been published while this one was under way: now the second buffer is free for it.
        if replica in self.owed:
            self._free.add(replica)

    def lose(self, replica: str) -> None:
        """Remove a replica that is lost, with its weights."""
        del self.receivers[replica]
        for names in (self.behind, self.owed, self._free, self._full):
            names.discard(replica)
        self.newest = max((receiver.live for receiver in self.receivers.values()), default=NONE)

    def join(self, replica: str) -> None:
        """Add a replica without weights. It is sent the published version."""
        self.receivers[replica] = Receiver()
        if self.published > NONE:
            self.behind.add(replica)
            self.owed.add(replica)
            self._free.add(replica)


class LeastLoadedQueue:
    """The replicas of one pool in the order in which they get work: most free capacity first, equals in the plan's
    order.

    Replicas of one kind (the same live weights) accept the same firings, so only the first of each kind is looked at.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._names = [replica.name for replica in replicas]
        # A replica's key is (load - capacity) · replicas + its place in the plan: below 0 while it has free capacity,
        # and the place is the remainder. Keys are kept sorted, so that no firing searches a pool of a thousand.
        self._key = {r.name: place - r.capacity * len(replicas) for place, r in enumerate(replicas)}
        self._kind: dict[str, Hashable] = dict.fromkeys(self._names)
        self._kinds: dict[Hashable, list[int]] = {None: sorted(self._key.values())}

    def remove(self, replica: str) -> None:
        """Remove a lost replica: it gets no work."""
        keys = self._kinds[self._kind[replica]]
        del keys[bisect_left(keys, self._key[replica])]
        if not keys:
            del self._kinds[self._kind[replica]]

    def add(self, replica: Replica) -> None:
        """Add a removed replica again, with nothing in work."""
        name, kind = replica.name, self._kind[replica.name]
        self._key[name] = self._names.index(name) - replica.capacity * len(self._names)
        insort(self._kinds.setdefault(kind, []), self._key[name])

    def load(self, replica: str, firings: int) -> None:
        """Note that `firings` more are in work on a replica; fewer if negative."""
        keys, before = self._kinds[self._kind[replica]], self._key[replica]
        after = self._key[replica] = before + firings * len(self._names)
        del keys[bisect_left(keys, before)]
        insort(keys, after)

    def move(self, replica: str, kind: Hashable) -> None:
        """Note that a replica is now of another kind."""
        keys, key = self._kinds[self._kind[replica]], self._key[replica]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._kinds[self._kind[replica]]
        self._kind[replica] = kind
        insort(self._kinds.setdefault(kind, []), key)

    def first(self, fits: Callable[[str], bool]) -> str | None:
        """The first replica with free capacity for which `fits` is true. `fits` is equal for all replicas of a kind."""
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
