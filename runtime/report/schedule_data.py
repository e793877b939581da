"""A schedule as compact data for a page: columns of numbers, deflated, in base64. Pure.

`encode` makes it from a `Chart`; `templates/page.js` reads it. Times are integer microseconds, starts and indices are
differences from the bar before, names and causes are indices into tables. In the middle of a long run, bars are merged
(`thin`), so that a page stays small; the page says how many.
"""

import base64
import json
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.control.run_config import EVALUATION
from penstock.runtime.record.timeline import place
from penstock.runtime.report.follow import Work

# Nanoseconds per microsecond.
US = 1_000

# How many bars a page may have; if there are more, those in the middle of the run are merged.
MOST_BARS = 72_000

# Kinds of work that are drawn in a strip of their own, under the rank's firings.
SYNCS = ("publish", "send", "swap", "save")

OUTCOMES = ("", "failed", "dropped", "unanswered")


@dataclass
class Strip:
    """Bars that are drawn together: tracks of work, and a strip of syncs under them. `swaps` are (time, version)."""

    work: list[Work]
    swaps: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Row:
    """A rank's lane: its real work, and its predicted work if there is a prediction. `room` is how many firings it may
    have in work at once, which determines its height; 0 if that must be derived from its bars."""

    name: str
    pool: str
    real: Strip
    predicted: Strip | None = None
    room: int = 0


@dataclass
class Chart:
    """The content of a schedule's picture. `ends`: (update, time) of the end of each update; `stages`: (name, begin,
    end); `lives`: when each resume began. Times are nanoseconds."""

    rows: list[Row]
    ends: list[tuple[int, int]]
    stages: list[tuple[str, int, int]] = field(default_factory=list)
    lives: list[int] = field(default_factory=list)
    end: int = 0


@dataclass
class Merged(Work):
    """Several firings of a node as one bar, with indices from `index` to `last`."""

    count: int = 1
    last: int = 0


def encode(chart: Chart, most: int = MOST_BARS) -> tuple[str, int]:
    """The chart as text for the page, and how many bars were merged into others."""
    merged = thin([s for row in chart.rows for s in (row.real, row.predicted) if s is not None], most)
    # The table index of each (name, kind) and of each cause, in the order of first use.
    names, causes = dict[tuple[str, str], int](), dict[str, int]()

    def columns(work: Sequence[Work], tracks: Sequence[int]) -> dict[str, Any]:
        """num: how many bars. Columns: s start, d duration, n name, i index, u turn, v version, c cause, x the cause's
        number, k track, o outcome, g firings, l last index. Columns that are all 0 are left out."""
        found: dict[str, list[int]] = {letter: [] for letter in "sdniuvcxkogl"}
        start = index = 0
        for item, track in zip(work, tracks, strict=True):
            begin = item.start // US
            count, last = (item.count, item.last) if isinstance(item, Merged) else (0, item.index)
            values = (
                begin - start,
                item.end // US - begin,
                names.setdefault((item.name, item.kind), len(names)),
                item.index - index,
                item.turn,
                -1 if item.version is None else item.version,
                causes.setdefault(item.cause[0], len(causes)),
                item.cause[1] - item.index,
                track,
                OUTCOMES.index(item.outcome),
                count,
                last - item.index,
            )
            for column, value in zip(found.values(), values, strict=True):
                column.append(value)
            start, index = begin, item.index
        return {"num": len(work), **{letter: column for letter, column in found.items() if any(column)}}

    def strip(of: Strip | None) -> dict[str, Any] | None:
        """A strip's columns. "tracks": how many tracks the program needs, and how many the evaluation; each of the two
        is drawn with the lane's whole height."""
        if of is None:
            return None
        work = sorted(of.work, key=lambda w: (w.start, w.end, w.index))
        main, syncs = ([item for item in work if (item.kind in SYNCS) == kind] for kind in (False, True))
        tracks, (sync_tracks, num_syncs) = place(main)[0], place(syncs)
        needed = [0, 0]
        for item, track in zip(main, tracks, strict=True):
            evaluates = item.name.startswith(EVALUATION)
            needed[evaluates] = max(needed[evaluates], track + 1)
        return {
            "tracks": needed,
            "main": columns(main, tracks),
            "syncTracks": num_syncs,
            "sync": columns(syncs, sync_tracks),
            "swaps": [[time // US, version] for time, version in of.swaps],
        }

    rows = []
    for row in chart.rows:
        sides = {"real": strip(row.real), "predicted": strip(row.predicted)}
        tracks = [max(side["tracks"][part] for side in sides.values() if side) for part in (0, 1)]
        rows.append(
            {"name": row.name, "pool": row.pool, "room": row.room or max(*tracks, 1), "tracks": tracks, **sides}
        )
    data = {
        "rows": rows,
        "names": list(names),
        "causes": list(causes),
        "ends": [[update, time // US] for update, time in chart.ends],
        "stages": [[name, begin // US, end // US] for name, begin, end in chart.stages],
        "lives": [time // US for time in chart.lives],
        "end": chart.end // US,
        "merged": merged,
    }
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)
    return base64.b64encode(packed).decode(), merged


def thin(strips: Sequence[Strip], most: int) -> int:
    """Merge bars in the middle of the run by node and version, so that about `most` are left. Returns how many bars
    this saves."""
    total = sum(len(strip.work) for strip in strips)
    if total <= most:
        return 0
    starts = sorted(work.start for strip in strips for work in strip.work)
    kept = most // 3
    begin, end = starts[kept], starts[-kept]
    for strip in strips:
        found: list[Work] = []
        alike = defaultdict[tuple[str, int | None], list[Work]](list)
        for item in strip.work:
            # A failed firing stays a bar of its own: readers look for it.
            if not begin < item.start < end or item.kind != "group" or item.outcome == "failed":
                found.append(item)
            else:
                alike[item.name, item.version].append(item)
        for (name, version), items in alike.items():
            indices, lane, rank = [item.index for item in items], items[0].lane, items[0].rank
            begins, ends = min(item.start for item in items), max(item.end for item in items)
            one = Merged(lane, name, min(indices), begins, ends, "group", version, rank=rank)
            one.count, one.last = len(items), max(indices)
            found.append(one)
        strip.work = found
    return total - sum(len(strip.work) for strip in strips)
