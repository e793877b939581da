"""`metrics.jsonl`: one row per update, over any number of resumes; and how a row comes about.

A row has `update`, `version` (the one that the update made), `time_s` (since the run began, pauses between stop and
resume left out), `seconds` (since the row before), `groups`, `update_s`, `sync_s`, `generate_tokens_per_s`,
`train_tokens_per_s`, `pools` (seconds of each pool by state, adding up to `seconds`), `dropped`, `failed` and `retried`
(groups that filters dropped and that failed, and firings that were tried again, since the row before), `not_finite`
(what was reported of figures that are null since they are no numbers, where there are any), and what the nodes report:
`reward_mean`, `loss`, `lag_mean`, `lag_max`, `ratio_mean`, `ratio_clipped`, `mismatch`, `tokens`, …

Figures for papers: a schedule, and the curves of a run. Calling them needs the extra `figures` (matplotlib).

Both give a matplotlib Figure that no window knows of: `figure.savefig("schedule.pdf")`.

Metrics in TensorBoard, the extra `track`: the same rows as `metrics.jsonl`, as scalars by update.
"""

import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.graph.ir import Firing, Graph
from penstock.graph.types import Metrics
from penstock.runtime.record.errors import RecordError, disk_fault
from penstock.runtime.record.folder import RunFolder, make_folder, open_append, read_file, write_atomic
from penstock.runtime.record.timeline import Bar, excerpt, span
from penstock.runtime.record.trace_formats import Drawing
from penstock.runtime.record.typed_json import parse_json, require_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Row = dict[str, Any]

METRICS_BYTES = 1 << 30
"""The most of a file of rows that is read."""
LOST = ("dropped", "failed", "retried")
"""Columns of a row that count since the row before."""

SUMMED = frozenset({"tokens", "prompt_tokens"})
"""Figures that are counts: an update has the sum of its groups', not the mean."""


GENERATED = "generated_tokens"
"""The figure by which a node says how many tokens a firing sampled. Rows have its rate alone: it counts all groups."""


def prefixes(graph: Graph) -> dict[str, tuple[str, ...]]:
    """By node, what stands before the names of its figures: nothing for the first node of each function, the node's
    name and a dot for its others. So figures of two nodes are never mixed for being called alike. Figures of the first
    stand there both ways if the program has named it."""
    first: dict[str, str] = {}
    for node in graph.nodes:
        first.setdefault(node.op, node.name)
    return {
        node.name: (
            *([""] if first[node.op] == node.name else []),
            *([f"{node.label}."] if first[node.op] != node.name or node.own_label else []),
        )
        for node in graph.nodes
    }


def columns(rows: Sequence[Row], figure: str) -> list[str]:
    """The columns that hold a figure of the rows: its own, and those of nodes with a name (`solver.loss`). Its own is
    left out where one of them is the same node's, so has the same numbers."""
    named = sorted({name for row in rows for name in row if name.endswith(f".{figure}")})
    again = any(all(row.get(name) == row.get(figure) for row in rows) for name in named)
    return [*([figure] if any(figure in row for row in rows) and not again else []), *named]


def combine(parts: Sequence[Metrics]) -> Metrics:
    """The figures of several groups as one: sums of counts, the largest of `*_max`, the least of `*_min`, else means.

    A figure that only some groups have counts those.
    """
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: _combine(name, items) for name, items in values.items()}


def _combine(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    return sum(values) if name.rpartition(".")[2] in SUMMED else sum(values) / len(values)


class Rows:
    """Assembles rows from what nodes report. Time is passed in, in seconds on one clock.

    `groups` are the figures of groups that no update has taken, by node and turn. Updates take groups in ordinal order,
    so that one that an update has passed over is lost, and its figures count nowhere.

    `nodes` are the per-update nodes, each with how often it fires: an update's row is complete when all that fire at
    it have reported. `elapsed` is the `time_s` of the last row that a resumed run keeps.
    """

    def __init__(self, nodes: Mapping[str, int], now: float, elapsed: float = 0.0) -> None:
        self.nodes = dict(nodes)
        self._start, self._last = now - elapsed, now
        self.groups: dict[int, dict[tuple[str, int], Metrics]] = {}
        self._batches: dict[int, tuple[int, ...]] = {}
        self._updates: dict[int, dict[str, tuple[Metrics, float]]] = {}
        self._sync = self._generated = 0.0
        self._beside: dict[str, list[tuple[int, Metrics]]] = {}

    def restart(self, now: float) -> None:
        """Training begins now: what came before is in no row's `seconds`."""
        self._last, self._generated = now, 0.0

    def group(self, firing: Firing, metrics: Metrics) -> None:
        """The figures of a per-group node. Tokens that it sampled count at once, whatever becomes of the group."""
        told = {name: value for name, value in metrics.items() if name.rpartition(".")[2] == GENERATED}
        self._generated += max(told.values(), default=0.0)  # a node with a name tells the same twice
        if len(told) < len(metrics):
            others = {name: value for name, value in metrics.items() if name not in told}
            self.groups.setdefault(firing.index, {})[firing.node, firing.turn] = others

    def batch(self, update: int, ordinals: Sequence[int]) -> None:
        """The groups that an update takes."""
        if ordinals:
            self._batches[update] = tuple(ordinals)

    def synced(self, seconds: float) -> None:
        """Weights went live everywhere, `seconds` after they were published; counts for the next row."""
        self._sync = max(self._sync, seconds)

    def update(self, update: int, node: str, metrics: Metrics, seconds: float) -> bool:
        """A per-update node's figures and duration; true if they complete the update's row."""
        reports = self._updates.setdefault(update, {})
        reports[node] = (metrics, seconds)
        return all(name in reports for name, every in self.nodes.items() if (update + 1) % every == 0)

    def beside(self, update: int, node: str, metrics: Metrics) -> None:
        """The figures of a node that no update waits for; a row takes one update's of each node, with `update`."""
        if metrics:
            self._beside.setdefault(node, []).append((update, metrics))

    @property
    def pending(self) -> list[Metrics]:
        """Figures of nodes that no update waits for which no row has taken, as rows would take them."""
        return [_finite(self._measured(place)) for place in range(max(map(len, self._beside.values()), default=0))]

    def _measured(self, place: int) -> Metrics:
        measured: Metrics = {}
        for node, found in self._beside.items():
            for update, metrics in found[place : place + 1]:
                measured |= {**metrics, f"{node.partition(':')[0]}_update": float(update)}
        return measured

    def to_json(self, cut: Mapping[str, Any]) -> dict[str, Any]:
        """The figures that a run which goes on from a cut of the scheduler does not make again: what came meanwhile
        of firings that the cut knows nothing of is left out."""
        made = {ordinal: nodes for ordinal, nodes, _ in cut["groups"]}
        groups = [
            [ordinal, node, turn, _written(metrics)]
            for ordinal, parts in self.groups.items()
            for (node, turn), metrics in parts.items()
            if node in made.get(ordinal, ())
        ]
        beside = [
            [node, update, _written(metrics)]
            for node, found in self._beside.items()
            for update, metrics in found
            if update < cut["trailing"][node]
        ]
        return {"groups": groups, "beside": beside}

    def restore(self, figures: Mapping[str, Any]) -> None:
        """The inverse of `to_json`, on new rows."""
        for ordinal, node, turn, metrics in figures["groups"]:
            self.group(Firing(node, ordinal, turn), _read(metrics))
        for node, update, metrics in figures["beside"]:
            self.beside(update, node, _read(metrics))

    def row(
        self, update: int, now: float, pools: Mapping[str, Mapping[str, float]], lost: Mapping[str, int] | None = None
    ) -> Row:
        """The row of a complete update. `pools` are the states' seconds since the row before (see
        `timeline.pool_means`), and `lost` the counts of `LOST`."""
        ordinals = self._batches.pop(update, ())
        reports = self._updates.pop(update)
        parts = [self.groups.pop(ordinal, {}) for ordinal in ordinals]
        figures = combine([part[key] for part in parts for key in sorted(part)])
        self.groups = {g: part for g, part in self.groups.items() if not ordinals or g > ordinals[-1]}
        for metrics, _ in reports.values():
            figures.update(metrics)
        seconds, update_s = now - self._last, sum(duration for _, duration in reports.values())
        tokens = figures.get("tokens", 0.0)
        row: Row = {
            "update": update,
            "version": update + 1,
            "time_s": round(now - self._start, 6),
            "seconds": round(seconds, 6),
            "groups": len(ordinals),
            **(lost or {}),
            "update_s": round(update_s, 6),
            "sync_s": round(self._sync, 6),
            "generate_tokens_per_s": round(self._generated / seconds, 3) if seconds > 0 else 0.0,
            "train_tokens_per_s": round(tokens / update_s, 3) if update_s > 0 else 0.0,
            **figures,
            **self._measured(0),
            "pools": {pool: dict(states) for pool, states in pools.items()},
        }
        self._last, self._sync, self._generated = now, 0.0, 0.0
        self._beside = {node: found[1:] for node, found in self._beside.items()}
        wrong = {name: str(value) for name, value in row.items() if isinstance(value, float) and not isfinite(value)}
        return {**_finite(row), "not_finite": wrong} if wrong else row


class MetricsFile:
    """Appends rows to a file; each is on its way to the disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = open_append(path)
        except OSError as error:
            raise disk_fault(path, error) from error

    def append(self, row: Row) -> None:
        """Raises RecordError if the disk is full."""
        line = json.dumps(_finite(row), allow_nan=False).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            raise disk_fault(self.path, error, len(line)) from error

    def close(self) -> None:
        os.close(self._fd)


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
        try:
            row = parse_json(line, f"{path}:{number}")
            require_row(row, f"{path}:{number}")
        except RecordError as damage:
            return rows, damage
        rows.append(row)
    return rows, HalfRow(f"{path}:{len(lines)}: given half a line; needed a row") if lines[-1] else None


def keep_rows(path: Path, cut: int) -> list[Row]:
    """Drop the rows of updates that a resume from the cut before update `cut` does again; the rows that are kept."""
    rows = [row for row in read_rows(path) if row["update"] < cut]
    write_atomic(path, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return rows


def _finite(value: Any) -> Any:
    """`value` with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def _written(metrics: Metrics) -> dict[str, float | str]:
    """Figures as JSON; what JSON has no number for as a word."""
    return {name: value if isfinite(value) else str(value) for name, value in metrics.items()}


def _read(written: Mapping[str, float | str]) -> Metrics:
    return {name: float(value) for name, value in written.items()}


def scalars(row: Row) -> Iterable[tuple[str, float]]:
    """A row's figures by path, nested ones joined with "/": what a plot shows."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", number) for key, number in scalars(dict(value)))
        elif isinstance(value, int | float) and name != "update":
            yield name, float(value)


CURVES = (
    ("reward_mean", "reward"),
    ("loss", "loss"),
    ("response_length", "tokens of a response"),
    ("lag_mean", "lag"),
    ("ratio_mean", "importance ratio"),
    ("time_s", "seconds of an update"),
)
"""Columns of `metrics.jsonl` that are drawn where a run has them, and what they are called."""


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


class Board(Protocol):
    def write(self, row: Row) -> None:
        """Plot a row's figures at its update."""

    def close(self) -> None:
        """Write what is buffered."""


def open_board(folder: Path, *, required: bool, keep: Iterable[Row] = ()) -> Board | None:
    """A board in `folder`/tensorboard, begun with the rows that a resumed run keeps; None without the package.

    Raises RecordError if it is `required` and missing.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]
    except ImportError:
        if required:
            needed = "the extra `track`: pip install 'penstock[track]'"
            raise RecordError(f"--tensorboard: the package tensorboard is not installed; needed {needed}") from None
        return None
    path = make_folder(folder / "tensorboard")
    for old in path.glob("events.out.tfevents.*"):
        old.unlink()
    place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    # By number: TensorBoard takes no path that is not UTF-8.
    writer = EventFileWriter(f"/proc/self/fd/{place}", filename_suffix=f".{secrets.token_hex(8)}")
    board = _Board(writer, place, Event, Summary)
    for row in keep:
        board.write(row)
    return board


class _Board:
    def __init__(self, writer: Any, place: int, event: Any, summary: Any) -> None:
        self._writer, self._place, self._event, self._summary = writer, place, event, summary

    def write(self, row: Row) -> None:
        values = [self._summary.Value(tag=name, simple_value=number) for name, number in scalars(row)]
        self._writer.add_event(
            self._event(wall_time=row["time_s"], step=row["update"], summary=self._summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()
        os.close(self._place)
