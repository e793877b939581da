"""`metrics.jsonl`: one row per update, over any number of resumes; and how a row comes about.

A row has `update`, `version` (the one that the update made), `time_s` (since the run began, pauses between stop and
resume left out), `seconds` (since the row before), `groups`, `update_s`, `sync_s`, `generate_tokens_per_s`,
`train_tokens_per_s`, `pools` (seconds of each pool by state, adding up to `seconds`), `dropped`, `failed` and `retried`
(groups that filters dropped and that failed, and firings that were tried again, since the row before), `not_finite`
(what was reported of figures that are null since they are no numbers, where there are any), and what the nodes report:
`reward_mean`, `loss`, `lag_mean`, `lag_max`, `ratio_mean`, `ratio_clipped`, `mismatch`, `tokens`, …
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from penstock.graph.ir import Firing, Graph
from penstock.graph.types import Metrics
from penstock.runtime.record.faults import RecordError, disk_fault
from penstock.runtime.record.folder import open_append, read_file, write_atomic
from penstock.runtime.record.typed_json import parse_json, require_row

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
        """The row of a complete update. `pools` are the states' seconds since the row before (see `timeline.Idle`), and
        `lost` the counts of `LOST`."""
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
