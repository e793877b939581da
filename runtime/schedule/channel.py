"""The weights of one carried value on their way to one pool: published, sent, arrived, live.

Invariants:
- versions only grow: live <= shadow <= published, on each replica;
- nothing is published while a send of the version before is under way (the sender has one snapshot);
- nothing is sent to a replica whose shadow arena holds a version that is not live yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.runtime.plan.plan import Replica

NONE = -1


@dataclass(slots=True)
class Receiver:
    """One replica's arenas: the live version, the one in the shadow, and what is under way."""

    live: int = NONE
    shadow: int = NONE
    sending: bool = False
    swapping: bool = False

    @property
    def settled(self) -> bool:
        return not self.sending and not self.swapping and self.shadow == self.live

    @property
    def swappable(self) -> bool:
        return self.shadow > self.live and not self.swapping


class Way:
    """State of one channel."""

    def __init__(self, replicas: Sequence[Replica], live: Mapping[str, int]) -> None:
        """`live` are versions that replicas hold already."""
        versions = {r.name: live.get(r.name, NONE) for r in replicas}
        self.receivers = {name: Receiver(version, version) for name, version in versions.items()}
        self.published = NONE
        self.publishing = False

    def may_publish(self, version: int) -> bool:
        """Is `version` news to some replica, and the snapshot free?"""
        if self.publishing or self.published >= version:
            return False
        behind = any(r.live < version for r in self.receivers.values())
        return behind and not any(r.sending or r.shadow < self.published for r in self.receivers.values())

    def holds(self, version: int, replica: str) -> bool:
        """Can `replica` still get a version that is at least this new without another publication?"""
        return max(self.published, self.receivers[replica].shadow) >= version

    def to_send(self) -> list[str]:
        """Replicas whose shadow is free and behind what is published."""
        if self.publishing:
            return []
        return [n for n, r in self.receivers.items() if r.settled and r.shadow < self.published]
