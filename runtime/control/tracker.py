"""Who has been silent for too long. Pure: time is passed in, and never goes back."""

from itertools import takewhile
from math import inf


class Tracker:
    """The last sign of life of each peer. A peer is tracked from its first sign until it is forgotten.

    Peers are kept in the order of their last signs, so that a look at who is late costs no more for many of them.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._last: dict[str, float] = {}

    def heard(self, peer: str, now: float) -> None:
        self._last.pop(peer, None)
        self._last[peer] = now

    def forget(self, peer: str) -> None:
        self._last.pop(peer, None)

    def last(self, peer: str) -> float:
        """Its last sign of life; −∞ for a peer that is not tracked."""
        return self._last.get(peer, -inf)

    def late(self, now: float) -> list[str]:
        """The peers silent for more than `silence` seconds, in the order of their names."""
        silent = takewhile(lambda entry: now - entry[1] > self._silence, self._last.items())
        return sorted(peer for peer, _ in silent)
