"""Who has been silent for too long. Pure: time is passed in."""


class Tracker:
    """The last sign of life of each peer. A peer is tracked from its first sign until it is forgotten."""

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._last: dict[str, float] = {}

    def heard(self, peer: str, now: float) -> None:
        self._last[peer] = now

    def forget(self, peer: str) -> None:
        self._last.pop(peer, None)

    def late(self, now: float) -> list[str]:
        """The peers silent for more than `silence` seconds, in the order of their names."""
        return sorted(peer for peer, last in self._last.items() if now - last > self._silence)
