"""`metrics.jsonl`: one row per update, over any number of resumes; how a row comes about, and what is drawn of rows.

A row has `update`, `version` (the one that the update made), `time_s` (since the run began, pauses between stop and
resume left out), `seconds` (since the row before), `groups`, `update_s`, `sync_s`, `generate_tokens_per_s`,
`train_tokens_per_s`, `pools` (seconds of each pool by state, adding up to `seconds`), `dropped`, `failed` and `retried`
(groups that filters dropped and that failed, and firings that were tried again, since the row before), `not_finite`
(by metric, what was reported where the column is null since it was no finite number), and what the nodes report:
`reward_mean`, `loss`, `lag_mean`, `lag_max`, `ratio_mean`, `ratio_clipped`, `mismatch`, `tokens`, …

- `Rows` assembles rows, `MetricsFile` appends them, `read_rows` and `read_undamaged` read them.
- `scalars` are the numbers of a row as trackers have them (`runtime.record.trackers`).
- `schedule_figure` and `curves_figure` are figures for papers (the extra `figures`, matplotlib). They belong to no
  window: `figure.savefig("schedule.pdf")`.
"""

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.graph.ir import Firing, Node, label_of
from penstock.graph.types import Metrics
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import AppendFile, RunFolder, read_file, write_atomic
from penstock.runtime.record.timeline import Bar, excerpt, span
from penstock.runtime.record.trace_formats import Drawing
from penstock.runtime.record.typed_json import Figures, RowColumns, parse_json, require_shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Row = dict[str, Any]

# Bytes of the longest file of rows that is read.
METRICS_BYTES = 1 << 30
# Columns of a row that count since the row before.
LOST = ("dropped", "failed", "retried")

# The metric by which a node says how many response tokens it has learnt from.
TOKENS = "tokens"
# Metrics that are counts: an update has the sum of its groups', not the mean.
SUMMED = frozenset({TOKENS, "prompt_tokens"})

# The metric by which a node says how many tokens a firing sampled. Rows have its rate alone: it counts all groups.
GENERATED = "generated_tokens"
# Metrics of a firing that samples which are means over its tokens, or over the rows that said something in it: an
# update's are so, too. Long groups are the stale ones, and in a late turn few rows go on.
BY_TOKENS, BY_ROWS = "stale_cache", "response_length"
# The columns of a count that is told apart by lag: one figure, so that all of them are of one node.
BY_LAG = "tokens_lag_"
# Names for which no row has a number.
NO_NUMBERS = frozenset({"pools", "not_finite", GENERATED})


def columns(rows: Sequence[Row], figure: str) -> list[str]:
    """The columns that hold a metric: its own, and those of nodes with a name (`solver.loss`). Its own is left out
    where one of them has the same numbers, since it is of the same node."""
    named = sorted({name for row in rows for name in row if name.endswith(f".{figure}")})
    again = any(all(row.get(name) == row.get(figure) for row in rows) for name in named)
    return [*([figure] if any(figure in row for row in rows) and not again else []), *named]


def combine(parts: Sequence[Metrics]) -> Metrics:
    """The metrics of several groups as one: sums of counts, the largest of `*_max`, the least of `*_min`, means over
    tokens or rows of `BY_TOKENS` and `BY_ROWS`, else means over the groups that have it."""
    found: dict[str, list[tuple[float, float]]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append((value, _weight(name, part)))
    combined: Metrics = {}
    for name, weighted in found.items():
        values = [value for value, _ in weighted]
        if name.endswith(("_max", "_min")):
            combined[name] = max(values) if name.endswith("_max") else min(values)
        elif name in SUMMED:
            combined[name] = sum(values)
        elif whole := sum(weight for _, weight in weighted):
            combined[name] = sum(value * weight for value, weight in weighted) / whole
    return combined


def _weight(name: str, part: Metrics) -> float:
    """How much a metric of a firing counts in a mean: as the tokens, or the rows, that the firing sampled where it is a
    mean over these."""
    tokens = part.get(GENERATED)
    if tokens is None or name not in (BY_TOKENS, BY_ROWS):
        return 1.0
    length = part[BY_ROWS] if name == BY_ROWS else 1.0
    return tokens / length if length else tokens


class Rows:
    """Assembles rows from what nodes report. Time is passed in, in seconds on one clock.

    `nodes` are the per-update nodes, each with the number of updates between two of its firings: an update's row is
    complete when all that fire at it have reported. `elapsed` is the `time_s` of the last row that a resumed run keeps.
    `groups` are the metrics of groups that no update has taken yet, by ordinal, then by node and turn. Those of a group
    that is lost count nowhere.

    A column is of one node: of the first that has reported it in the `order` of the graph, `nodes` before others, and
    last those off the critical path, which report when they are done; of a function that has several nodes, the first
    alone. Another node's metric of that name has the node's label and a dot before it. Columns of `BY_LAG` are of one
    node together, whichever lags it has had. Metrics of a node that the program has named stand there both ways.
    """

    def __init__(self, nodes: Mapping[str, int], now: float, elapsed: float = 0.0, order: Sequence[Node] = ()) -> None:
        self.nodes = dict(nodes)
        self._places = {node.name: place for place, node in enumerate(order)}
        first = {node.op: node.name for node in reversed(order)}
        self._further = {node.name for node in order if first[node.op] != node.name}
        self._named = {node.name for node in order if node.own_label}
        self._owners: dict[str, str] = {}
        self._start, self._last = now - elapsed, now
        self.groups: dict[int, dict[tuple[str, int], Metrics]] = {}
        self._batches: dict[int, tuple[int, ...]] = {}
        self._updates: dict[int, dict[str, tuple[Metrics, float]]] = {}
        self._part_s: dict[tuple[int, str], float] = {}
        self._sync: float | None = None
        self._generated = 0.0
        self._samples = False  # whether a node has ever said how many tokens it sampled
        self._trailing: dict[str, list[tuple[int, Metrics]]] = {}

    def restart(self, now: float) -> None:
        """Training begins now: what came before is in no row's `seconds`."""
        self._last, self._generated = now, 0.0

    def time(self, now: float) -> float:
        """`time_s` of what happens now: seconds since the run began, pauses left out."""
        return round(now - self._start, 6)

    def group(self, firing: Firing, metrics: Metrics) -> None:
        """A firing of a per-group node has reported. Tokens that it sampled count at once, whatever becomes of the
        group."""
        self._generated += metrics.get(GENERATED, 0.0)
        self._samples |= GENERATED in metrics
        # By turn: a firing that is done again replaces its metrics, a further turn adds its own.
        self.groups.setdefault(firing.index, {})[firing.node, firing.turn] = metrics

    def batch(self, update: int, ordinals: Sequence[int]) -> None:
        """Groups that an update takes, some or all of them."""
        taken = self._batches.get(update, ())
        if more := [ordinal for ordinal in ordinals if ordinal not in taken]:
            self._batches[update] = tuple(sorted((*taken, *more)))

    def taken(self, update: int) -> tuple[int, ...]:
        """The groups that an update has taken so far."""
        return self._batches.get(update, ())

    def synced(self, seconds: float) -> None:
        """Weights went live everywhere, `seconds` after they were published; counts for the next row."""
        self._sync = max(self._sync or 0.0, seconds)

    def part(self, update: int, node: str, seconds: float) -> None:
        """A node has taken a part of its update's batch, and not the last one, in so many seconds."""
        self._part_s[update, node] = self._part_s.get((update, node), 0.0) + seconds

    def update(self, update: int, node: str, metrics: Metrics, seconds: float) -> bool:
        """A per-update node has reported after `seconds`. Returns whether that completes the update's row."""
        reports = self._updates.setdefault(update, {})
        reports[node] = (metrics, seconds + self._part_s.pop((update, node), 0.0))
        return all(name in reports for name, every in self.nodes.items() if (update + 1) % every == 0)

    def trailing(self, update: int, node: str, metrics: Metrics) -> None:
        """A node off the critical path has reported at `update`. Each row takes one report of each such node, the
        oldest first, with the update that it is of."""
        if metrics:
            self._trailing.setdefault(node, []).append((update, metrics))

    @property
    def pending(self) -> list[Metrics]:
        """The reports of nodes off the critical path that no row has taken, as rows would take them."""
        rows = range(max(map(len, self._trailing.values()), default=0))
        return [_finite(self._columns({}, {}, n)) for n in rows]

    def _columns(self, groups: Mapping[str, Metrics], reports: Mapping[str, Metrics], later: int = 0) -> Metrics:
        """The columns of the row that comes after so many others: what nodes have reported of its groups and at its
        update, and what it takes from those off the critical path."""

        def place(node: str) -> tuple[bool, bool, int, str]:
            return node not in self.nodes, node in self._trailing, self._places.get(node, -1), node

        beside = {node: found[later] for node, found in self._trailing.items() if len(found) > later}
        reports = {**reports, **{node: metrics for node, (_, metrics) in beside.items()}}
        figures = {**groups, **{node: reports[node] for node in sorted(reports, key=place)}}
        for node in sorted(figures.keys() - self._further, key=place):
            for column in figures[node]:
                self._owners.setdefault(_figure_of(column), node)
        found: Metrics = {}
        for node, metrics in figures.items():
            label = label_of(node)
            own = {name for name in metrics if self._owners.get(_figure_of(name)) == node}
            labelled = metrics if node in self._named else metrics.keys() - own
            found |= {name: value for name, value in metrics.items() if name in own}
            found |= {f"{label}.{name}": value for name, value in metrics.items() if name in labelled}
            if node in beside:
                found[f"{label}_update"] = float(beside[node][0])
        return found

    def to_json(self, cut: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics that a run which resumes from the checkpoint with the scheduler's state `cut` does not make
        again. Metrics are left out of firings that the cut does not know yet: they will come again."""

        def written(metrics: Metrics) -> dict[str, float | str]:
            return {name: value if isfinite(value) else str(value) for name, value in metrics.items()}

        made = {ordinal: nodes for ordinal, nodes, *_ in cut["groups"]}
        groups = [
            [ordinal, node, turn, written(metrics)]
            for ordinal, parts in self.groups.items()
            for (node, turn), metrics in parts.items()
            if node in made.get(ordinal, ())
        ]
        beside = [
            [node, update, written(metrics)]
            for node, found in self._trailing.items()
            for update, metrics in found
            if update < cut["trailing"][node]
        ]
        return {"groups": groups, "beside": beside, "owners": dict(self._owners)}

    def restore(self, figures: Mapping[str, Any]) -> None:
        """The inverse of `to_json`, on new rows. float() reads the words that JSON has no number for ("nan")."""
        for ordinal, node, turn, metrics in figures["groups"]:
            # Not as `group` does it: their tokens were sampled before the cut.
            made = {name: float(value) for name, value in metrics.items()}
            self.groups.setdefault(ordinal, {})[node, turn] = made
            self._samples |= GENERATED in made
        for node, update, metrics in figures["beside"]:
            self.trailing(update, node, {name: float(value) for name, value in metrics.items()})
        for column, node in figures.get("owners", {}).items():
            self._owners.setdefault(_figure_of(column), node)

    def row(
        self,
        update: int,
        now: float,
        pools: Mapping[str, Mapping[str, float]],
        lost: Mapping[str, int] | None = None,
        overtaken: Container[int] = (),
    ) -> Row:
        """The row of a complete update at time `now`. `pools` are the seconds of each pool by state since the row
        before (see `timeline.pool_means`), and `lost` the counts of `LOST`. Groups before its last one are lost, but
        for those that are `overtaken`: they are for later updates, too."""
        ordinals = self._batches.pop(update, ())
        reports = self._updates.pop(update)
        parts = [self.groups.pop(ordinal, {}) for ordinal in ordinals]
        grouped: dict[str, list[Metrics]] = {}
        for part in parts:
            # Sorted: means are sums of floats, which must not depend on the order in which firings were done.
            for node, turn in sorted(part):
                grouped.setdefault(node, []).append(part[node, turn])
        reported = {node: metrics for node, (metrics, _) in reports.items()}
        combined = {node: combine(found) for node, found in grouped.items()}
        for metrics in combined.values():
            metrics.pop(GENERATED, None)
        figures = self._columns(combined, reported)
        last = ordinals[-1] if ordinals else -1
        self.groups = {g: part for g, part in self.groups.items() if g > last or g in overtaken}
        seconds, update_s = now - self._last, sum(duration for _, duration in reports.values())
        # Nodes may say nothing of tokens, which is another thing than none.
        tokens = [metrics[TOKENS] for metrics in reported.values() if TOKENS in metrics]
        rates = {"generate_tokens_per_s": round(self._generated / seconds, 3)} if self._samples and seconds > 0 else {}
        rates |= {"train_tokens_per_s": round(sum(tokens) / update_s, 3)} if tokens and update_s > 0 else {}
        row: Row = {
            "update": update,
            "version": update + 1,
            "time_s": self.time(now),
            "seconds": round(seconds, 6),
            "groups": len(ordinals),
            **(lost or {}),
            "update_s": round(update_s, 6),
            **({} if self._sync is None else {"sync_s": round(self._sync, 6)}),
            **rates,
            **figures,
            "pools": {pool: dict(states) for pool, states in pools.items()},
        }
        # What is counted since the row before begins anew.
        self._last, self._sync, self._generated = now, None, 0.0
        self._trailing = {node: found[1:] for node, found in self._trailing.items()}
        wrong = {name: str(value) for name, value in row.items() if isinstance(value, float) and not isfinite(value)}
        return {**_finite(row), "not_finite": wrong} if wrong else row


class MetricsFile(AppendFile):
    """Appends rows to a file; each is on its way to the disk when `append` returns."""

    def append(self, row: Row) -> None:
        """Raises RecordError if the disk is full."""
        # One write per row, without a buffer: a row survives the process, and `watch` sees it at once.
        self.write(bytearray(json.dumps(_finite(row), allow_nan=False).encode() + b"\n"))


class HalfRow(RecordError):
    """A file that ends in the middle of a row, as a kill leaves it."""


def read_rows(path: Path) -> list[Row]:
    """All rows. Half a line at the end, which a kill leaves, is left out; any other damage raises RecordError."""
    rows, damage = read_undamaged(path)
    if damage is not None and not isinstance(damage, HalfRow):
        raise damage
    return rows


def read_undamaged(path: Path) -> tuple[list[Row], RecordError | None]:
    """The rows up to the first damage, and what that is."""
    try:
        lines = read_file(path, METRICS_BYTES).split(b"\n")
    except FileNotFoundError:
        return [], None
    except OSError as error:
        return [], RecordError(f"{path}: cannot be read: {error.strerror}")
    rows: list[Row] = []
    for number, line in enumerate(lines[:-1], 1):
        where = f"{path}:{number}"
        try:
            row = parse_json(line, where)
            require_shape(row, RowColumns, where)
            # What is no column of its own is a number, or null.
            figures = {name: value for name, value in row.items() if name not in ("pools", "not_finite")}
            require_shape(figures, Figures, where)
        except RecordError as damage:
            return rows, damage
        rows.append(row)
    return rows, HalfRow(f"{path}:{len(lines)}: given half a line; needed a row") if lines[-1] else None


def rows_before(path: Path, cut: int) -> list[Row]:
    """The rows that a resume from the cut before update `cut` keeps. Raises RecordError for damage among them: what
    lies behind them goes in any case."""
    found, damage = read_undamaged(path)
    rows = [row for row in found if row["update"] < cut]
    if damage is not None and not isinstance(damage, HalfRow) and (rows[-1]["update"] if rows else -1) < cut - 1:
        raise RecordError(f"{damage}, or the file without this line")
    return rows


def keep_rows(path: Path, cut: int) -> list[Row]:
    """Drop all rows but those before update `cut`; these. Raises as `rows_before`."""
    rows = rows_before(path, cut)
    write_atomic(path, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return rows


def _finite(value: Any) -> Any:
    """`value` with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def _figure_of(column: str) -> str:
    """What has one owner: a column by itself, or all of `BY_LAG`."""
    return BY_LAG if column.startswith(BY_LAG) else column


def scalars(row: Row) -> Iterable[tuple[str, float]]:
    """A row's numbers by path, nested ones joined with "/"."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", number) for key, number in scalars(dict(value)))
        elif isinstance(value, int | float) and name != "update":
            yield name, float(value)


# Columns of `metrics.jsonl` that are drawn where a run has them, and what they are called.
CURVES = (
    ("reward_mean", "reward"),
    ("loss", "loss"),
    ("response_length", "tokens of a response"),
    ("lag_mean", "lag"),
    ("ratio_mean", "importance ratio"),
    ("seconds", "seconds of an update"),
)


def schedule_figure(bars: Sequence[Bar], updates: int = 6, replicas: int = 8, width: float = 7.0) -> "Figure":
    """A schedule's first updates, and of each pool the first replicas: a lane for each replica, a colour for each node,
    lighter for odd versions, and a line where an update ends. `width` is in inches.

    Raises ImportError without matplotlib, ValueError without bars.
    """
    figure = _figure()
    shown = excerpt(bars, updates, replicas)
    if not shown:
        raise ValueError("schedule: given no bars, needed one or more")
    drawing, (begin, end) = Drawing(shown), span(shown)
    figure.set_size_inches(width, 0.9 + 0.32 * len(drawing.lanes))
    axes = figure.subplots()
    for row, lane in enumerate(drawing.lanes):
        height = 0.8 / len(lane.tracks)
        for number, track in enumerate(lane.tracks):
            places = [(bar.start - begin, bar.seconds) for bar in track]
            shades = [drawing.shade(bar) for bar in track]
            axes.broken_barh(places, (row - 0.4 + number * height, height), facecolors=shades, linewidth=0)
    for _, time in drawing.ends:
        axes.axvline(time - begin, color="#6B7480", linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(drawing.lanes)), [lane.name for lane in drawing.lanes])
    axes.set_ylim(len(drawing.lanes) - 0.5, -0.5)
    axes.set_xlim(0, end - begin)
    axes.set_xlabel("seconds")
    handles = [axes.barh(0, 0, color=color, label=name) for name, color in drawing.colors.items()]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, fontsize="small")
    return figure


def curves_figure(run_folder: str | Path, width: float = 7.0) -> "Figure":
    """The curves of a run, by update: those of `CURVES` that its `metrics.jsonl` has.

    Raises ImportError without matplotlib, FileNotFoundError for what is no run folder, ValueError for a run without
    rows.
    """
    figure = _figure()
    metrics = RunFolder(Path(run_folder)).metrics
    if not metrics.is_file():
        raise FileNotFoundError(f"{run_folder}: given no metrics.jsonl, needed the folder of a run")
    rows = read_rows(metrics)
    drawn = [(column, title) for column, title in CURVES if any(column in row for row in rows)]
    if not drawn:
        raise ValueError(f"{metrics}: given {len(rows)} rows, needed one or more with {CURVES[0][0]}")
    lines = -(-len(drawn) // 2)
    figure.set_size_inches(width, 1.9 * lines)
    panels = figure.subplots(lines, 2, squeeze=False, sharex=True)
    for axes, (column, title) in zip(panels.flat, drawn, strict=False):
        points = [(row["update"], row[column]) for row in rows if row.get(column) is not None]
        axes.plot([update for update, _ in points], [value for _, value in points], color="#4C78A8", linewidth=1)
        axes.set_title(title, fontsize="small")
    for axes in panels.flat[len(drawn) :]:
        axes.set_axis_off()
    for axes in panels[-1]:
        axes.set_xlabel("update")
    return figure


def _figure() -> "Figure":
    """One that belongs to no window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib, which the extra has: pip install 'penstock[figures]'") from error
    return Figure(layout="constrained")
