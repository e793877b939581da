"""A schedule, simulated or real, as bars on lanes. Pure; times are seconds on any one clock.

`Bar` is the record of activity in a run's trace, a simulation and a report. `lanes` arranges bars for drawing, and
`trace_formats` prints them. `Utilisation` accounts for the work and the idle time of lanes, for a run's rows, a
simulation and a report. Its invariant: the states of a lane add up to the time that has passed.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

Kind = Literal["group", "update", "publish", "send", "swap", "save", "source"]


@dataclass(slots=True)
class Bar:
    """One activity of a lane (a replica, "pool/0") from `start` to `end`. `report.follow.Work` adds what only an event
    log knows.

    `index` is, depending on `kind`, the ordinal of a group, an update or a version. `version` is the version of the
    weights used, None without weights; drawings shade odd and even versions differently. `detail` is for tooltips.
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
    """A replica's bars on the fewest tracks on which bars do not overlap; the bars of a track are in order of time."""

    name: str
    tracks: tuple[tuple[Bar, ...], ...]


def pool_of(replica: str) -> str:
    """ "generator/0" belongs to the pool "generator"."""
    return replica.rpartition("/")[0] or replica


def lanes(bars: Iterable[Bar]) -> list[Lane]:
    """Arrange bars on lanes: pools in the order in which they first run a node, replicas of a pool by number."""
    # Only nodes count for the order: a sync may begin before its pool has run any.
    by_lane: dict[str, list[Bar]] = {}
    first: dict[str, float] = {}
    for bar in sorted(bars, key=lambda b: (b.start, b.index, b.end)):
        by_lane.setdefault(bar.lane, []).append(bar)
        if bar.kind in ("group", "update"):
            first.setdefault(pool_of(bar.lane), bar.start)
    names = sorted(by_lane, key=lambda n: (first.get(pool_of(n), inf), pool_of(n), _number(n), n))
    found = []
    for name in names:
        places, number = place(by_lane[name])
        tracks: list[list[Bar]] = [[] for _ in range(number)]
        for bar, track in zip(by_lane[name], places, strict=True):
            tracks[track].append(bar)
        found.append(Lane(name, tuple(map(tuple, tracks))))
    return found


def excerpt(bars: Iterable[Bar], updates: int = 6, replicas: int = 8) -> list[Bar]:
    """The bars of the first updates on the first replicas of each pool, as many as a picture can show."""
    shown = list(bars)
    ends = boundaries(shown)
    until = ends[min(updates, len(ends)) - 1][1] if ends else inf
    return [bar for bar in shown if bar.start < until and _number(bar.lane) < replicas]


def _number(replica: str) -> int:
    number = replica.rpartition("/")[2]
    return int(number) if number.isdigit() else 0


def place(bars: Sequence[Bar]) -> tuple[list[int], int]:
    """For each bar, in order of their starts, the lowest free track; and the number of tracks."""
    free: list[int] = []
    ends: list[tuple[float, int]] = []
    tracks: list[int] = []
    for bar in bars:
        while ends and ends[0][0] <= bar.start:
            heapq.heappush(free, heapq.heappop(ends)[1])
        track = heapq.heappop(free) if free else len(ends)
        tracks.append(track)
        heapq.heappush(ends, (bar.end, track))
    return tracks, max(tracks, default=-1) + 1


def names(bars: Iterable[Bar]) -> list[str]:
    """The distinct names of bars in the legend's order: nodes first, then by lane and time."""
    ordered = [bar for lane in lanes(bars) for track in lane.tracks for bar in track]
    return list(dict.fromkeys(bar.name for bar in sorted(ordered, key=lambda b: b.kind not in ("group", "update"))))


def boundaries(bars: Iterable[Bar]) -> list[tuple[int, float]]:
    """The end of each update: (update, end of its last node), by update."""
    ends: dict[int, float] = {}
    for bar in bars:
        if bar.kind == "update":
            ends[bar.index] = max(bar.end, ends.get(bar.index, bar.end))
    return sorted(ends.items())


def span(bars: Iterable[Bar]) -> tuple[float, float]:
    """The first start and the last end; (0, 0) without bars."""
    pairs = [(bar.start, bar.end) for bar in bars]
    return (min(s for s, _ in pairs), max(e for _, e in pairs)) if pairs else (0.0, 0.0)


class Utilisation:
    """The time of each lane by state ("busy", or a cause of being idle). A lane's states add up to the time that has
    passed, exactly if times are integers.

    `lanes` begin at `now` in `state`.
    """

    def __init__(self, lanes: Iterable[Hashable], now: float, state: str = "start") -> None:
        self.now = now
        # A thousand replicas may be idle for one cause, which changes for all of them at once. Such a kind shares a
        # clock: time is added once per kind, not once per replica.
        self._clocks: dict[Hashable, dict[str, float]] = {}
        self._members: dict[Hashable, dict[Hashable, dict[str, float]]] = {}
        self._kinds: dict[Hashable, Hashable] = {}
        self._spent: dict[Hashable, dict[str, float]] = {lane: {} for lane in lanes}
        for lane in self._spent:
            self._enter(lane, state)

    def let(self, time: float, cause: Callable[[Any], str] = str) -> None:
        """Advance the clock to `time`; it never goes back. `cause` returns the state of a kind from any of its
        lanes."""
        passed, self.now = max(time - self.now, 0), max(time, self.now)
        for kind, members in self._members.items():
            if members:
                state = kind if isinstance(kind, str) else cause(next(iter(members)))
                self._clocks[kind][state] = self._clocks[kind].get(state, 0) + passed

    def pools(self, changes: Iterable[tuple[float, str, str]], now: float) -> dict[str, dict[str, float]]:
        """Seconds by pool and state since the last call. The lanes are replicas, and the clock counts microseconds.
        `changes` are the changes of state since then, in order: (seconds, replica, state).
        """
        for seconds, replica, state in changes:
            self.let(microseconds(seconds))
            self.change(replica, state)
        self.let(microseconds(now))
        return pool_means(self.take())

    def change(self, lane: Hashable, kind: Hashable) -> None:
        """Note that `lane` is of another kind from now on: a state, as a string, or any other key of lanes that share a
        state, for which `let` asks `cause`."""
        if self._kinds[lane] != kind:
            self._settle(lane)
            self._enter(lane, kind)

    def take(self) -> dict[Any, dict[str, float]]:
        """The time by lane and state since the last call, without states of no time."""
        for lane, kind in self._kinds.items():
            self._settle(lane)
            self._enter(lane, kind)
        taken, self._spent = self._spent, {lane: {} for lane in self._spent}
        return taken

    def _enter(self, lane: Hashable, kind: Hashable) -> None:
        """Add a lane to a kind, and note the kind's clock at that time."""
        self._kinds[lane] = kind
        self._members.setdefault(kind, {})[lane] = dict(self._clocks.setdefault(kind, {}))

    def _settle(self, lane: Hashable) -> None:
        """Remove a lane from its kind, and add the time that has passed on the kind's clock since it joined."""
        kind, spent = self._kinds[lane], self._spent[lane]
        before = self._members[kind].pop(lane)
        for state, time in self._clocks[kind].items():
            if time > before.get(state, 0):
                spent[state] = spent.get(state, 0) + time - before.get(state, 0)


def pool_means(spent: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The mean seconds of a pool's replicas by state, from integer microseconds by replica and state."""
    pools: dict[str, list[Mapping[str, float]]] = {}
    for replica, states in spent.items():
        pools.setdefault(pool_of(replica), []).append(states)
    means: dict[str, dict[str, float]] = {}
    for pool, replicas in pools.items():
        total: dict[str, float] = {}
        for state, time in (item for states in replicas for item in states.items()):
            total[state] = total.get(state, 0) + time
        mean: dict[str, float] = {state: time // len(replicas) for state, time in sorted(total.items())}
        if mean:
            # The largest state gets the remainder of the divisions, so that a pool's states add up as a replica's do.
            mean[max(mean, key=lambda s: mean[s])] += sum(replicas[0].values()) - sum(mean.values())
        means[pool] = {state: time / 1e6 for state, time in mean.items() if time}
    return means


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
