"""Who has been silent for too long. Pure: time is passed in, and never goes back."""

from itertools import takewhile
from math import inf

# Seconds between two looks that count at most: whoever looks at nobody for longer was held up, not they.
PAUSE_S = 1.0


class LivenessTracker:
    """The last sign of life of each peer. A peer is tracked from its first sign until it is forgotten.

    Peers are kept in the order of their last signs, so that a look at who is late costs no more for many of them.
    While the one who listens is stopped it hears nobody: that time, `held_up` in all, is no one's silence.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._last: dict[str, tuple[float, float]] = {}  # as the clock had it, and of the time that counts
        self._looked = inf
        self._held_up = 0.0

    def heard(self, peer: str, now: float) -> None:
        self._last.pop(peer, None)
        self._last[peer] = now, self.counted(now)

    def forget(self, peer: str) -> None:
        self._last.pop(peer, None)

    def last(self, peer: str) -> float:
        """Its last sign of life; −∞ for a peer that is not tracked."""
        return self._last.get(peer, (-inf, -inf))[0]

    def late(self, now: float) -> list[str]:
        """The peers silent for more than `silence` seconds, in the order of their names."""
        until = self.counted(now) - self._silence
        silent = takewhile(lambda entry: entry[1][1] < until, self._last.items())
        return sorted(peer for peer, _ in silent)

    def held_up(self, now: float) -> float:
        """Seconds up to `now` in which the one who listens was stopped itself: whoever is waited for need not answer
        for these. A deadline is looked at with the same `now`: a stop may come between any two lines.
        """
        self._held_up += max(0.0, now - self._looked - PAUSE_S)
        self._looked = now
        return self._held_up

    def counted(self, now: float) -> float:
        """The time without `held_up`: on this clock others may be waited for."""
        return now - self.held_up(now)
