"""The weights of one carried value on their way to one pool: published, sent, arrived, live.

Invariants:
- versions only grow: live <= shadow <= published, on each replica;
- nothing is published while a send of the version before is under way (the sender has one snapshot);
- nothing is sent to a replica whose shadow arena holds a version that is not live yet.
"""

from dataclasses import dataclass

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


class Way:
    """State of one channel."""

    def __init__(self, replicas: tuple[str, ...], live: dict[str, int]) -> None:
        self.receivers = {r: Receiver(live.get(r, NONE), live.get(r, NONE)) for r in replicas}
        self.published = NONE
        self.publishing = False

    def may_publish(self, version: int) -> bool:
        """Is `version` news to some replica, and the snapshot free?"""
        if self.publishing or self.published >= version:
            return False
        behind = any(r.live < version for r in self.receivers.values())
        return behind and not any(self.unsent())

    def unsent(self) -> list[str]:
        """Replicas that the published version has not reached."""
        return [n for n, r in self.receivers.items() if r.sending or r.shadow < self.published]

    def to_send(self) -> list[str]:
        """Replicas whose shadow is free and behind what is published."""
        if self.publishing:
            return []
        return [n for n, r in self.receivers.items() if r.settled and r.shadow < self.published]

    @property
    def settled(self) -> bool:
        return not self.publishing and all(r.settled for r in self.receivers.values()) and not self.to_send()
