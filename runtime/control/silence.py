"""For how long others have said nothing, without the time in which this process could not have heard them. Pure: time
is passed in, and never goes back."""

from itertools import takewhile
from math import inf

# Seconds between two looks that count at most: whoever looks at nobody for longer was held up, not they.
PAUSE_S = 1.0


class AwakeClock:
    """A clock that stands while this process is stopped, or its whole machine: nobody need answer it then.

    It takes a stop for what it is where it is looked at every second or so; from its first look on.
    """

    def __init__(self) -> None:
        self._looked = inf
        self._held_up = 0.0

    def held_up(self, now: float) -> float:
        """Seconds up to `now` in which this process was stopped itself: whoever is waited for need not answer for
        these. A deadline is looked at with the same `now`: a stop may come between any two lines.
        """
        self._held_up += max(0.0, now - self._looked - PAUSE_S)
        self._looked = now
        return self._held_up

    def counted(self, now: float) -> float:
        """The time without `held_up`: on this clock others may be waited for."""
        return now - self.held_up(now)


class LivenessTracker(AwakeClock):
    """The last sign of life of each peer. A peer is tracked from its first sign until it is forgotten. No time in which
    this process was held up is anyone's silence.

    Peers are kept in the order of their last signs, so that a look at who is late costs no more for many of them.
    """

    def __init__(self, silence: float) -> None:
        super().__init__()
        self._silence = silence
        self._last: dict[str, tuple[float, float]] = {}  # as the clock had it, and of the time that counts

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
