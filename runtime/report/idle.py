"""Where each rank's time went: busy, or idle by cause, in whole nanoseconds that add up to the wall time exactly. Pure.

Work that failed is no use to anybody, and the trainer's snapshot of its weights is a part of the sync: both count as
idle, by their cause. How full the slots of a stream are is its occupancy, and says nothing about idle time.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from penstock.runtime.report.follow import Lane, Work

Account = dict[str, int]
"""Nanoseconds by "busy" and by cause."""


def accounts(
    work: Iterable[Work], reasons: dict[Lane, list[tuple[int, str]]], begin: int, end: int
) -> dict[Lane, Account]:
    """Of each rank between two times. `reasons` say from when on a rank that has no work is idle for which cause."""
    by_lane: dict[Lane, list[Work]] = defaultdict(list)
    for item in work:
        by_lane[item.lane].append(item)
    return {lane: account(by_lane[lane], changes, begin, end) for lane, changes in reasons.items()}


def account(work: Sequence[Work], reasons: Sequence[tuple[int, str]], begin: int, end: int) -> Account:
    """Of one rank: its time is cut where work begins or ends and where the cause changes; each piece has one state."""
    counts = {"busy": 0, "failed": 0, "syncing": 0}
    edges: list[tuple[int, str, int]] = []
    for item in work:
        state = _state(item)
        start, stop = min(max(item.start, begin), end), min(max(item.end, begin), end)
        if state and stop > start:
            edges += [(start, state, 1), (stop, state, -1)]
    edges += [(min(max(time, begin), end), "", 0) for time, _ in reasons]
    edges.append((end, "", 0))
    times = [time for time, _ in reasons]
    spent: Account = {}
    now = begin
    for time, state, change in sorted(edges, key=lambda edge: edge[0]):
        if time > now:
            what = next((name for name, count in counts.items() if count), "")
            if not what:
                place = bisect_right(times, now) - 1
                what = reasons[place][1] if place >= 0 else "starting"
            spent[what] = spent.get(what, 0) + time - now
            now = time
        if state:
            counts[state] += change
    return spent


def union(work: Iterable[Work]) -> int:
    """Nanoseconds in which at least one of them was in work."""
    total, until = 0, 0
    for start, end in sorted((item.start, item.end) for item in work):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def slot_time(work: Iterable[tuple[Work, int]], slots: int) -> int:
    """Slots in use times nanoseconds, on one replica, by work that has so many rows each; rows beyond `slots` wait."""
    total, now, held = 0, 0, 0
    for time, change in sorted(edge for item, rows in work for edge in ((item.start, rows), (item.end, -rows))):
        total += min(held, slots) * (time - now)
        now, held = time, held + change
    return total


def _state(item: Work) -> str:
    if item.kind in ("group", "update"):
        return "failed" if item.outcome == "failed" else "busy"
    return "syncing" if item.kind == "publish" else ""
