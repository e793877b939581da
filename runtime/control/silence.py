"""How long peers have been silent, without the time in which this process was suspended. Pure: time is passed in, and
never goes back."""

from itertools import takewhile
from math import inf

# Longest gap in seconds between two looks. In the rest of a longer gap this process was suspended.
PAUSE_S = 1.0


class AwakeClock:
    """A clock that does not count the time in which this process, or its whole machine, was suspended.

    It must be looked at about every second to recognise a suspension. It counts from its first look on.
    """

    def __init__(self) -> None:
        self._looked = inf
        self._suspended_s = 0.0

    def suspended_s(self, now: float) -> float:
        """Seconds up to `now` for which this process itself was suspended; they do not count as a peer's delay. Check a
        deadline with the same `now`: a suspension may come between any two lines.
        """
        self._suspended_s += max(0.0, now - self._looked - PAUSE_S)
        self._looked = now
        return self._suspended_s

    def counted(self, now: float) -> float:
        """`now` without `suspended_s`: the clock for timeouts of peers."""
        return now - self.suspended_s(now)


class LivenessTracker(AwakeClock):
    """The last sign of life of each peer. A peer is tracked from its first sign until it is forgotten. Time in which
    this process was suspended does not count as silence.

    Peers are kept in the order of their last signs, so that `late` costs the same for many of them.
    """

    def __init__(self, silence: float) -> None:
        super().__init__()
        self._silence = silence
        self._last: dict[str, tuple[float, float]] = {}  # `now`, and the `counted` time

    def heard(self, peer: str, now: float) -> None:
        self._last.pop(peer, None)
        self._last[peer] = now, self.counted(now)

    def forget(self, peer: str) -> None:
        self._last.pop(peer, None)

    def last(self, peer: str) -> float:
        """The time of a peer's last sign of life; −∞ for a peer that is not tracked."""
        return self._last.get(peer, (-inf, -inf))[0]

    def late(self, now: float) -> list[str]:
        """The peers that have been silent for more than `silence` seconds, sorted by name."""
        until = self.counted(now) - self._silence
        silent = takewhile(lambda entry: entry[1][1] < until, self._last.items())
        return sorted(peer for peer, _ in silent)
