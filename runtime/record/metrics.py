"""`metrics.jsonl`: one row per update, over any number of resumes. How rows are assembled, read and plotted.

A row has `update`, `version` (the one that the update made), `time_s` (since the run began, without pauses between stop
and resume), `seconds` (since the row before), `groups`, `update_s`, `sync_s`, `generate_tokens_per_s`,
`train_tokens_per_s`, `pools` (seconds of each pool by state, adding up to `seconds`), `dropped`, `failed` and `retried`
(since the row before: groups that filters dropped, groups that failed, firings that were tried again), `not_finite`
(by metric, the reported infinity or NaN where the column is null), and what the nodes report: `reward_mean`, `loss`,
`lag_mean`, `lag_max`, `ratio_mean`, `ratio_clipped`, `mismatch`, `tokens`, …

- `Rows` assembles rows, `MetricsFile` appends them, `read_rows` and `read_undamaged` read them.
- `scalars` are the numbers of a row as trackers get them (`runtime.record.trackers`).
- `schedule_figure` and `curves_figure` are figures for papers (the extra `figures`, matplotlib). They open no window:
  `figure.savefig("schedule.pdf")`.
"""

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from math import isfinite
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.graph.ir import Firing, Graph, Node, label_of
from penstock.graph.types import BY_LAG, EPOCH, Mean, Metrics
from penstock.host import install_command
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import AppendFile, RunFolder, read_file, write_atomic
from penstock.runtime.record.timeline import Bar, excerpt, span
from penstock.runtime.record.trace_formats import Drawing
from penstock.runtime.record.typed_json import LARGEST, Figures, RowColumns, parse_json, require_shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Row = dict[str, Any]

# The longest file of rows that is read, in bytes.
METRICS_BYTES = 1 << 30
# Columns of a row that count since the row before.
LOST = ("dropped", "failed", "retried")

# The metric with which a node that trains reports how many response tokens it has trained on.
TOKENS = "tokens"
# Metrics that are counts: an update has the sum over its groups, not the mean.
SUMMED = frozenset({TOKENS, "prompt_tokens"})

# The metric with which a node that decodes reports how many tokens a firing sampled. A row has only the rate, over all
# groups. Of other nodes (see `counting`) both are metrics as any.
GENERATED = "generated_tokens"
# Names that are not numeric columns of a row.
NO_NUMBERS = frozenset({"pools", "not_finite"})


def columns(rows: Sequence[Row], figure: str) -> list[str]:
    """The columns that hold a metric: `loss`, and those of named nodes (`solver.loss`). The plain column is left out if
    a named one has the same numbers: then it is of the same node."""
    named = sorted({name for row in rows for name in row if name.endswith(f".{figure}")})
    again = any(all(row.get(name) == row.get(figure) for row in rows) for name in named)
    return [*([figure] if any(figure in row for row in rows) and not again else []), *named]


def counting(graphs: Iterable[Graph]) -> frozenset[str]:
    """The nodes whose `TOKENS` and `GENERATED` make the rates of a row: those that make the next value of a model,
    those that have its weights, and environments of this package."""
    found = set[str]()
    for graph in graphs:
        bases, values = dict(graph.types), {argument.name for argument in graph.carried}
        for node in graph.nodes:
            made = {item.type for item in node.inputs if item.ref.node in values} & {out.type for out in node.outputs}
            # A type that the graph does not describe may be a model.
            models = [kind for kind in made if any(base.endswith(":Model") for base in bases.get(kind, (":Model",)))]
            trains = bool(models) and node.clock == "update"
            if trains:
                values.add(node.name)  # an update may be several calls, one after the other
            sources = [graph[item.ref.node] for item in node.inputs if item.ref.node in graph]
            weights = any(source.construct == "broadcast" for source in sources)
            if trains or weights or (node.stream and node.op.startswith("penstock.")):
                found.add(node.name)
    return frozenset(found)


def combine(parts: Sequence[Metrics]) -> Metrics:
    """Combine the metrics of several groups: sums of counts, the maximum of `*_max` and `EPOCH`, the minimum of
    `*_min`, means of a `Mean` weighted by its count, else the mean over the groups that have the metric."""
    found: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    combined: Metrics = {}
    for name, values in found.items():
        if name.endswith("_min"):
            combined[name] = min(values)
        elif name.endswith("_max") or name == EPOCH:
            combined[name] = max(values)
        elif name in SUMMED:
            combined[name] = sum(values)
        else:
            means = [value for value in values if isinstance(value, Mean)]
            # A number without a count, as in a checkpoint of an earlier version, has no weight beside one with a count.
            counts = [value.count for value in means] if len(means) == len(values) else [1.0] * len(values)
            combined[name] = sum(map(mul, values, counts)) / sum(counts)
    return combined


class Rows:
    """Assembles rows from what nodes report. Time is passed in, in seconds on one clock.

    `nodes` are the per-update nodes, each with the number of updates between two of its firings. An update's row is
    complete when all nodes that fire at it have reported. `elapsed` is the `time_s` of the last row that a resumed run
    keeps. `groups` has the metrics of groups that no update has taken yet, by ordinal, then by node and turn. Metrics
    of a lost group count nowhere.

    A plain column such as `loss` belongs to one node: the first in the graph's `order` that has reported it, where
    `nodes` come first, and nodes off the critical path last. Of several nodes of one function, only the first can own
    columns. The same metric of another node has the node's label before it (`solver.loss`). All columns of `BY_LAG`
    together belong to one node. Metrics of a node that the program has named are always there with its label, too.

    `counted` are the nodes whose tokens make the rates (`counting`).
    """

    def __init__(
        self,
        nodes: Mapping[str, int],
        now: float,
        elapsed: float = 0.0,
        order: Sequence[Node] = (),
        counted: Container[str] = (),
    ) -> None:
        self.nodes, self._counted = dict(nodes), counted
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
        """Note that training begins now: earlier time is in no row's `seconds`."""
        self._last, self._generated = now, 0.0

    def time(self, now: float) -> float:
        """The `time_s` of an event at `now`: seconds since the run began, without pauses."""
        return round(now - self._start, 6)

    def group(self, firing: Firing, metrics: Metrics) -> None:
        """Note the report of a per-group firing. The tokens that it sampled count at once, even if the group is lost
        later."""
        if firing.node in self._counted and GENERATED in metrics:
            self._generated += metrics[GENERATED]
            self._samples = True
        # By turn: a repeated firing replaces its metrics, a further turn adds its own.
        self.groups.setdefault(firing.index, {})[firing.node, firing.turn] = metrics

    def batch(self, update: int, ordinals: Sequence[int]) -> None:
        """Note groups that an update takes, some or all of them."""
        taken = self._batches.get(update, ())
        if more := [ordinal for ordinal in ordinals if ordinal not in taken]:
            self._batches[update] = tuple(sorted((*taken, *more)))

    def taken(self, update: int) -> tuple[int, ...]:
        """The groups that an update has taken so far."""
        return self._batches.get(update, ())

    def synced(self, seconds: float) -> None:
        """Note that weights went live everywhere, `seconds` after they were published; counts for the next row."""
        self._sync = max(self._sync or 0.0, seconds)

    def part(self, update: int, node: str, seconds: float) -> None:
        """Note the seconds in which a node processed a part of its update's batch that is not the last."""
        self._part_s[update, node] = self._part_s.get((update, node), 0.0) + seconds

    def update(self, update: int, node: str, metrics: Metrics, seconds: float) -> bool:
        """Note the report of a per-update firing that took `seconds`. True if it completes the update's row."""
        reports = self._updates.setdefault(update, {})
        reports[node] = (metrics, seconds + self._part_s.pop((update, node), 0.0))
        return all(name in reports for name, every in self.nodes.items() if (update + 1) % every == 0)

    def trailing(self, update: int, node: str, metrics: Metrics) -> None:
        """Note the report of a node off the critical path for `update`. Each row takes the oldest report of each such
        node, with its update."""
        if metrics:
            self._trailing.setdefault(node, []).append((update, metrics))

    @property
    def pending(self) -> list[Metrics]:
        """The reports of nodes off the critical path that no row has taken, as rows would have them."""
        rows = range(max(map(len, self._trailing.values()), default=0))
        return [_finite(self._columns({}, {}, n)) for n in rows]

    def _columns(self, groups: Mapping[str, Metrics], reports: Mapping[str, Metrics], later: int = 0) -> Metrics:
        """The metric columns of the row that comes after `later` others: from the nodes' reports on its groups and its
        update, and from nodes off the critical path."""

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
        """The metrics that a run resuming from the scheduler's state `cut` does not get again. Metrics of firings that
        the cut does not have are left out: these firings will be repeated."""

        def plain(value: float) -> float | str:
            return float(value) if isfinite(value) else str(float(value))

        def written(metrics: Metrics) -> dict[str, Any]:
            return {n: [plain(x), x.count] if isinstance(x, Mean) else plain(x) for n, x in metrics.items()}

        made = {ordinal: nodes for ordinal, nodes, _ in cut["groups"]}
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
        """The inverse of `to_json`, on new rows."""

        def read(metrics: Mapping[str, Any]) -> Metrics:
            # float() reads "nan" and "inf", for which JSON has no number.
            return {n: Mean(float(x[0]), x[1]) if isinstance(x, list) else float(x) for n, x in metrics.items()}

        for ordinal, node, turn, metrics in figures["groups"]:
            # Unlike `group`, do not count the tokens: they were sampled before the cut.
            made = read(metrics)
            self.groups.setdefault(ordinal, {})[node, turn] = made
            self._samples |= node in self._counted and GENERATED in made
        for node, update, metrics in figures["beside"]:
            self.trailing(update, node, read(metrics))
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
        before (see `timeline.pool_means`), and `lost` the counts of `LOST`. Other groups before its last one are lost
        and forgotten, except those that are `overtaken`: later updates take them."""
        ordinals = self._batches.pop(update, ())
        reports = self._updates.pop(update)
        parts = [self.groups.pop(ordinal, {}) for ordinal in ordinals]
        grouped: dict[str, list[Metrics]] = {}
        for part in parts:
            # Sorted: sums of floats must not depend on the order in which firings ended.
            for node, turn in sorted(part):
                grouped.setdefault(node, []).append(part[node, turn])
        reported = {node: metrics for node, (metrics, _) in reports.items()}
        combined = {node: combine(found) for node, found in grouped.items()}
        for node in combined:
            if node in self._counted:
                combined[node].pop(GENERATED, None)
        figures = self._columns(combined, reported)
        last = ordinals[-1] if ordinals else -1
        self.groups = {g: part for g, part in self.groups.items() if g > last or g in overtaken}
        seconds, update_s = now - self._last, sum(duration for _, duration in reports.values())
        # Nodes may not report tokens at all, which differs from reporting none.
        tokens = [found[TOKENS] for node, found in reported.items() if node in self._counted and TOKENS in found]
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
        # Reset what is counted since the row before.
        self._last, self._sync, self._generated = now, None, 0.0
        self._trailing = {node: found[1:] for node, found in self._trailing.items()}
        wrong = {name: str(value) for name, value in row.items() if isinstance(value, float) and not is_figure(value)}
        return {**_finite(row), "not_finite": wrong} if wrong else row


class MetricsFile(AppendFile):
    """Appends rows to a file. A row has been handed to the operating system when `append` returns."""

    def append(self, row: Row) -> None:
        """Raises RecordError if the disk is full."""
        # One write per row, without a buffer: a row survives the process, and `watch` sees it at once.
        self.write(bytearray(json.dumps(_finite(row), allow_nan=False).encode() + b"\n"))


class HalfRow(RecordError):
    """A file that ends in the middle of a row, as a kill leaves it."""


def read_rows(path: Path) -> list[Row]:
    """All rows. Half a line at the end, as a kill leaves it, is left out; any other damage raises RecordError."""
    rows, damage = read_undamaged(path)
    if damage is not None and not isinstance(damage, HalfRow):
        raise damage
    return rows


def read_undamaged(path: Path) -> tuple[list[Row], RecordError | None]:
    """The rows up to the first damage, and the error for that damage."""
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
            # All other columns are numbers or null.
            figures = {name: value for name, value in row.items() if name not in ("pools", "not_finite")}
            require_shape(figures, Figures, where)
        except RecordError as damage:
            return rows, damage
        rows.append(row)
    return rows, HalfRow(f"{path}:{len(lines)}: given half a line; needed a row") if lines[-1] else None


def rows_before(path: Path, cut: int) -> list[Row]:
    """The rows that a resume from the cut before update `cut` keeps. Raises RecordError for damage among them; rows
    after them are dropped anyway."""
    found, damage = read_undamaged(path)
    rows = [row for row in found if row["update"] < cut]
    if damage is not None and not isinstance(damage, HalfRow) and (rows[-1]["update"] if rows else -1) < cut - 1:
        raise RecordError(f"{damage}, or the file without this line")
    return rows


def keep_rows(path: Path, cut: int) -> list[Row]:
    """Keep only the rows before update `cut`, and return them. Raises as `rows_before`."""
    rows = rows_before(path, cut)
    write_atomic(path, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return rows


def is_figure(value: float) -> bool:
    """True for a number that a row can have: neither infinite, nor NaN, nor beyond `LARGEST`."""
    return abs(value) <= LARGEST


def _finite(value: Any) -> Any:
    """`value` with None for floats that are no figures."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not is_figure(value) else value


def _figure_of(column: str) -> str:
    """The key by which a column has an owner: its name, or `BY_LAG` for all columns with that prefix."""
    return BY_LAG if column.startswith(BY_LAG) else column


def scalars(row: Row) -> Iterable[tuple[str, float]]:
    """A row's numbers by path, nested ones joined with "/"."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", number) for key, number in scalars(dict(value)))
        elif isinstance(value, int | float) and name != "update":
            yield name, float(value)


# The columns of `metrics.jsonl` that are plotted if a run has them, each with its title.
CURVES = (
    ("reward_mean", "reward"),
    ("loss", "loss"),
    ("response_length", "tokens of a response"),
    ("lag_mean", "lag"),
    ("ratio_mean", "importance ratio"),
    ("seconds", "seconds of an update"),
)


def schedule_figure(bars: Sequence[Bar], updates: int = 6, replicas: int = 8, width: float = 7.0) -> "Figure":
    """A figure of a schedule's first updates, with the first replicas of each pool: a lane for each replica, a colour
    for each node, lighter for odd versions, and a line where an update ends. `width` is in inches.

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
    """A figure of a run's metrics by update: those of `CURVES` that its `metrics.jsonl` has.

    Raises ImportError without matplotlib, FileNotFoundError if the folder is not a run's, ValueError for a run without
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
    """A matplotlib figure that opens no window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"figures need matplotlib: {install_command('figures')}") from error
    return Figure(layout="constrained")
