"""What happened when, as bars on lanes: a simulated schedule or a real one. Pure; times are seconds on any one clock.

`gantt` draws bars as text, `svg` as a picture, `chrome` as a trace for Perfetto. `Idle` accounts for the seconds in
which a pool did nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

Kind = Literal["group", "update", "publish", "send", "swap", "save", "source"]


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing that a lane (a replica, "pool/0") did from `start` to `end`.

    `index` is the ordinal, update or version that it was about, by its kind. `version` is the version of the weights
    that it worked with, if it did; drawings shade odd and even versions differently. `detail` is for tooltips.
    """

    lane: str
    name: str
    index: int
    start: float
    end: float
    kind: Kind = "group"
    version: int | None = None
    detail: str = ""

    @property
    def label(self) -> str:
        return f"{self.name}[{self.index}]"

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Lane:
    """A replica's bars on as few tracks as keep bars of one track apart; bars of a track are in order of time."""

    name: str
    tracks: tuple[tuple[Bar, ...], ...]

    @property
    def pool(self) -> str:
        return pool_of(self.name)


def pool_of(replica: str) -> str:
    """ "generator/0" belongs to the pool "generator"."""
    return replica.rpartition("/")[0] or replica


def lanes(bars: Iterable[Bar]) -> list[Lane]:
    """The lanes: pools in the order in which they first run a node, replicas of a pool by their number."""
    by_lane: dict[str, list[Bar]] = {}
    first: dict[str, float] = {}
    for bar in sorted(bars, key=lambda b: (b.start, b.index, b.end)):
        by_lane.setdefault(bar.lane, []).append(bar)
        if bar.kind in ("group", "update"):
            first.setdefault(pool_of(bar.lane), bar.start)
    names = sorted(by_lane, key=lambda n: (first.get(pool_of(n), inf), pool_of(n), _number(n), n))
    return [Lane(name, _tracks(by_lane[name])) for name in names]


def excerpt(bars: Iterable[Bar], updates: int = 6, replicas: int = 8) -> list[Bar]:
    """The bars of the first updates, and of the first replicas of each pool: what a picture has room for."""
    shown = list(bars)
    ends = boundaries(shown)
    until = ends[min(updates, len(ends)) - 1][1] if ends else inf
    return [bar for bar in shown if bar.start < until and _number(bar.lane) < replicas]


def _number(replica: str) -> int:
    number = replica.rpartition("/")[2]
    return int(number) if number.isdigit() else 0


def _tracks(bars: Sequence[Bar]) -> tuple[tuple[Bar, ...], ...]:
    """Bars in order of their starts, each on the first track that is free."""
    tracks: list[list[Bar]] = []
    for bar in bars:
        free = next((t for t in tracks if t[-1].end <= bar.start), None)
        if free is None:
            tracks.append(free := [])
        free.append(bar)
    return tuple(map(tuple, tracks))


def names(bars: Iterable[Bar]) -> list[str]:
    """The different names of bars, nodes first, in the order of the lanes and then of time: the legend's order."""
    ordered = [bar for lane in lanes(bars) for track in lane.tracks for bar in track]
    return list(dict.fromkeys(bar.name for bar in sorted(ordered, key=lambda b: b.kind not in ("group", "update"))))


def boundaries(bars: Iterable[Bar]) -> list[tuple[int, float]]:
    """When each update was over: (update, end of its last node), by update."""
    ends: dict[int, float] = {}
    for bar in bars:
        if bar.kind == "update":
            ends[bar.index] = max(bar.end, ends.get(bar.index, bar.end))
    return sorted(ends.items())


def span(bars: Iterable[Bar]) -> tuple[float, float]:
    """The first start and the last end; (0, 0) without bars."""
    pairs = [(bar.start, bar.end) for bar in bars]
    return (min(s for s, _ in pairs), max(e for _, e in pairs)) if pairs else (0.0, 0.0)


class Idle:
    """Each pool's seconds by state ("busy", or the cause of being idle), adding up to the wall time exactly.

    The driver says when a replica's state changes. A pool of several replicas counts the mean over them. Time is
    kept in whole microseconds, so that nothing is lost to rounding.
    """

    def __init__(self, replicas: Iterable[str], now: float, state: str = "start") -> None:
        self._state = dict.fromkeys(replicas, state)
        self._since = self._taken = _microseconds(now)
        self._spent: dict[str, dict[str, int]] = {replica: {} for replica in self._state}

    def change(self, now: float, replica: str, state: str) -> None:
        """From `now` on, `replica` is in `state`."""
        self._advance(now)
        self._state[replica] = state

    def take(self, now: float) -> dict[str, dict[str, float]]:
        """Seconds by pool and state since the last call; each pool's add up to the time between the calls."""
        self._advance(now)
        wall, self._taken = self._since - self._taken, self._since
        pools: dict[str, list[dict[str, int]]] = {}
        for replica, spent in self._spent.items():
            pools.setdefault(pool_of(replica), []).append(spent)
        taken = {pool: _mean(spent, wall) for pool, spent in pools.items()}
        self._spent = {replica: {} for replica in self._state}
        return taken

    def _advance(self, now: float) -> None:
        time = max(_microseconds(now), self._since)
        for replica, state in self._state.items():
            spent = self._spent[replica]
            spent[state] = spent.get(state, 0) + time - self._since
        self._since = time


def idle(
    changes: Iterable[tuple[float, str, str]], replicas: Iterable[str], start: float, end: float
) -> dict[str, dict[str, float]]:
    """Seconds by pool and state between `start` and `end`, from all changes (time, replica, state) in order."""
    account = Idle(replicas, start)
    for time, replica, state in changes:
        account.change(time, replica, state)
    return account.take(end)


def _mean(spent: Sequence[dict[str, int]], wall: int) -> dict[str, float]:
    """The mean over replicas, in seconds; what whole microseconds leave over goes to the largest state."""
    total: dict[str, int] = {}
    for item in spent:
        for state, time in item.items():
            total[state] = total.get(state, 0) + time
    mean = {state: time // len(spent) for state, time in sorted(total.items())}
    if mean:
        mean[max(mean, key=lambda s: mean[s])] += wall - sum(mean.values())
    return {state: time / 1e6 for state, time in mean.items() if time}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
