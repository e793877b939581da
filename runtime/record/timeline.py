"""What happened when, as bars on lanes: a simulated schedule or a real one. Pure; times are seconds on any one clock.

`Bar` is the one record of activity, for a run's trace, a simulation and a report. `lanes` arranges bars for drawing,
`trace_formats` prints them. `Utilisation` is the one account of what lanes did and why they were idle, for a run's
rows, a simulation and a report. Its invariant: the states of a lane add up to the time that has passed.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

Kind = Literal["group", "update", "publish", "send", "swap", "save", "source"]


@dataclass(slots=True)
class Bar:
    """One thing that a lane (a replica, "pool/0") did from `start` to `end`. A report adds what only an event log knows
    (`report.follow.Work`).

    `index` is, by its kind, the ordinal of a group, an update or a version. `version` is that of the weights that it
    worked with, None without weights; drawings shade odd and even versions differently. `detail` is for tooltips.
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


def pool_of(replica: str) -> str:
    """ "generator/0" belongs to the pool "generator"."""
    return replica.rpartition("/")[0] or replica


def lanes(bars: Iterable[Bar]) -> list[Lane]:
    """The lanes: pools in the order in which they first run a node, replicas of a pool by their number."""
    # Nodes alone count for the order: a sync may begin before its pool has run any.
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
    """The bars of the first updates, and of the first replicas of each pool: what a picture has room for."""
    shown = list(bars)
    ends = boundaries(shown)
    until = ends[min(updates, len(ends)) - 1][1] if ends else inf
    return [bar for bar in shown if bar.start < until and _number(bar.lane) < replicas]


def _number(replica: str) -> int:
    number = replica.rpartition("/")[2]
    return int(number) if number.isdigit() else 0


def place(bars: Sequence[Bar]) -> tuple[list[int], int]:
    """The lowest track that is free for each bar, in order of their starts; and how many tracks there are."""
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


class Utilisation:
    """The time of each lane by state ("busy", or the cause of being idle). A lane's states add up to the time that has
    passed: exactly if times are whole numbers.

    `lanes` begin at `now` in `state`.
    """

    def __init__(self, lanes: Iterable[Hashable], now: float, state: str = "start") -> None:
        self.now = now
        # A cluster has a thousand replicas that are idle for one cause, which changes for all of them at once. They
        # share a clock: time passes once for each kind, and not once for each replica.
        self._clocks: dict[Hashable, dict[str, float]] = {}
        self._members: dict[Hashable, dict[Hashable, dict[str, float]]] = {}
        self._kinds: dict[Hashable, Hashable] = {}
        self._spent: dict[Hashable, dict[str, float]] = {lane: {} for lane in lanes}
        for lane in self._spent:
            self._enter(lane, state)

    def let(self, time: float, cause: Callable[[Any], str] = str) -> None:
        """Let the clock go on to `time`; it never goes back. `cause` gives the state of any lane of a kind."""
        passed, self.now = max(time - self.now, 0), max(time, self.now)
        for kind, members in self._members.items():
            if members:
                state = kind if isinstance(kind, str) else cause(next(iter(members)))
                self._clocks[kind][state] = self._clocks[kind].get(state, 0) + passed

    def pools(self, changes: Iterable[tuple[float, str, str]], now: float) -> dict[str, dict[str, float]]:
        """Seconds by pool and state since the last call, for lanes that are replicas and times in microseconds.
        `changes` are those of their states meanwhile: (seconds, replica, state), in order.
        """
        for seconds, replica, state in changes:
            self.let(microseconds(seconds))
            self.change(replica, state)
        self.let(microseconds(now))
        return pool_means(self.take())

    def change(self, lane: Hashable, kind: Hashable) -> None:
        """From now on `lane` is in a state of its own, a text, or in that of all lanes of a kind, which `let` asks."""
        if self._kinds[lane] != kind:
            self._settle(lane)
            self._enter(lane, kind)

    def take(self) -> dict[Any, dict[str, float]]:
        """Time by lane and state since the last call; no state without time."""
        for lane, kind in self._kinds.items():
            self._settle(lane)
            self._enter(lane, kind)
        taken, self._spent = self._spent, {lane: {} for lane in self._spent}
        return taken

    def _enter(self, lane: Hashable, kind: Hashable) -> None:
        """Note what the clock of a kind says when a lane joins it."""
        self._kinds[lane] = kind
        self._members.setdefault(kind, {})[lane] = dict(self._clocks.setdefault(kind, {}))

    def _settle(self, lane: Hashable) -> None:
        """Add what a lane has done since it joined its kind."""
        kind, spent = self._kinds[lane], self._spent[lane]
        before = self._members[kind].pop(lane)
        for state, time in self._clocks[kind].items():
            if time > before.get(state, 0):
                spent[state] = spent.get(state, 0) + time - before.get(state, 0)


def pool_means(spent: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Seconds by pool and state, from whole microseconds by replica and state: the mean over the replicas of a pool."""
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
            # What the division leaves over goes to the largest state, so that a pool adds up as its replicas do.
            mean[max(mean, key=lambda s: mean[s])] += sum(replicas[0].values()) - sum(mean.values())
        means[pool] = {state: time / 1e6 for state, time in mean.items() if time}
    return means


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
