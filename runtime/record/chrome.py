"""Bars as a Chrome trace: the JSON that https://ui.perfetto.dev and chrome://tracing open. Pure.

A pool is a process, each track of a replica a thread: events of one thread must not overlap.
"""

from collections.abc import Sequence
from typing import Any

from penstock.runtime.record.timeline import Bar, boundaries, lanes, span

TRACKS = 1000
"""Thread numbers of one replica."""


def chrome_trace(bars: Sequence[Bar], title: str = "penstock") -> dict[str, Any]:
    """The trace as a JSON-able value. Times start at 0, in microseconds as the format wants them."""
    origin = span(bars)[0]
    events: list[dict[str, Any]] = []
    pools: dict[str, int] = {}
    for place, lane in enumerate(lanes(bars)):
        if lane.pool not in pools:
            pools[lane.pool] = pid = len(pools) + 1
            events += _named("process", pid, 0, lane.pool, pid)
        pid = pools[lane.pool]
        for number, track in enumerate(lane.tracks):
            tid = place * TRACKS + number
            name = lane.name if len(lane.tracks) == 1 else f"{lane.name} · {number}"
            events += _named("thread", pid, tid, name, tid)
            events += [_complete(bar, pid, tid, origin) for bar in track]
    for update, end in boundaries(bars):
        instant = {"ph": "i", "s": "g", "name": f"version {update + 1}", "cat": "version"}
        events.append({**instant, "ts": _us(end - origin), "pid": 1, "tid": 0})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}


def _named(what: str, pid: int, tid: int, name: str, order: int) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {**place, "name": f"{what}_name", "args": {"name": name}},
        {**place, "name": f"{what}_sort_index", "args": {"sort_index": order}},
    ]


def _complete(bar: Bar, pid: int, tid: int, origin: float) -> dict[str, Any]:
    facts: dict[str, Any] = {"index": bar.index}
    if bar.version is not None:
        facts["version"] = bar.version
    if bar.detail:
        facts["detail"] = bar.detail
    event = {"ph": "X", "name": bar.label, "cat": bar.kind, "pid": pid, "tid": tid, "args": facts}
    return {**event, "ts": _us(bar.start - origin), "dur": _us(bar.seconds)}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
