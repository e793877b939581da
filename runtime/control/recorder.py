"""What a run leaves behind as it goes: the event log, a row per update, the trace, checkpoints, the summary.

The session tells, this file writes. Status dicts for a display go to `say`: {"kind": "status" | "stage" | "note" |
"summary", …}.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.runtime.control.config import EVALUATION, RunConfig
from penstock.runtime.control.messages import Result
from penstock.runtime.control.records import record_bytes
from penstock.runtime.record.checkpoint import Checkpoint, write_cut
from penstock.runtime.record.chrome import chrome_trace
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.log import LogWriter
from penstock.runtime.record.metrics import MetricsFile, Row, Rows, keep_rows
from penstock.runtime.record.tensorboard import Board, open_board
from penstock.runtime.record.timeline import Bar, Idle, Kind
from penstock.runtime.schedule.events import Arrived, Command, Commit, Done, Event, Failed, Fire, Send, Swapped
from penstock.runtime.schedule.replay import Origin

Say = Callable[[dict[str, Any]], None]

MAX_BARS = 200_000
"""Bars kept for the trace: beyond them it holds the run's first part only, and says so."""

STATUS_EVERY = 0.2
"""Seconds between two statuses for the display."""


class RunRecorder:
    """Records one process's part of a run. `cut` is the checkpoint that a resumed run starts from."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        say: Say,
        now: float,
        cut: Checkpoint | None = None,
        tensorboard: bool = False,
    ) -> None:
        self.folder, self.config, self.say = folder, config, say
        self.log = LogWriter(folder.events, record_bytes)
        start = cut.update if cut else 0
        self.log.segment(start if cut else None, {"run": config.run})
        kept = keep_rows(folder.metrics, start)
        self.metrics = MetricsFile(folder.metrics)
        self.board: Board | None = open_board(folder.path, required=tensorboard, keep=kept)
        elapsed = float(kept[-1]["time_s"]) if kept else 0.0
        nodes = [n.name for n in config.graph.nodes if n.clock == "update" and n.construct == "call"]
        self.rows = Rows(nodes, now, elapsed)
        self.began, self.elapsed = now, elapsed
        self.row: Row = kept[-1] if kept else {}
        self.idle = Idle([r.name for r in config.plan.replicas], now)
        self.bars: list[Bar] = []
        self.stage = ""
        self.accuracy: dict[str, float | None] = dict(cut.accuracy) if cut else {}
        self.groups: dict[str, int] = {}
        self.updates = start
        self.version = start
        self.dropped_frames: Mapping[str, int] = {}
        self._evaluated: list[dict[str, float]] = []
        self._asked: dict[tuple[str, int, str], float] = {}
        self._published: dict[tuple[str, int], float] = {}
        self._doing: dict[str, str] = {}
        self._live: dict[str, int] = {}
        self._said = 0.0

    # What the session tells -------------------------------------------------------------------------------

    def open_stage(self, origin: Origin, now: float) -> None:
        self.log.stage(origin.to_json())
        name, cut = origin.stage, origin.cut
        self.stage = name
        if name == "train":
            self.groups = dict(cut["fates"]) if cut else {}
            self.idle.take(now)
            self.rows.restart(now)
        self.say({"kind": "stage", "stage": name, "time": now - self.began})

    def step(self, now: float, event: Event, commands: list[Command]) -> None:
        self.log.step(now - self.began, event, commands)
        for command in commands:
            match command:
                case Fire(firing, replica, groups):
                    self._doing[replica] = str(firing)
                    if len(groups) > 1 or firing.node in self.rows.nodes:
                        self.rows.batch(firing.index, groups)
                case Send(channel, version, _, replica):
                    self._asked[channel, version, replica] = now
        if now - self._said > STATUS_EVERY:
            self._status(now)

    def result(self, now: float, result: Result) -> None:
        match result.event:
            case Done():
                self._done(now, result, result.event)
            case Failed(firing, replica, _, error):
                self._bar(replica, firing.node, firing.index, result, "group", error)
            case Arrived(channel, version, replica, _):
                start = self._asked.pop((channel, version, replica), now)
                self._add(Bar(replica, channel, version, start, now, "send", version))
            case Swapped(channel, version, replica, _):
                self._live[replica] = version
                self.rows.synced(now - self._published.get((channel, version), now))

    def _done(self, now: float, result: Result, event: Done) -> None:
        firing, metrics = event.firing, result.metrics
        node = self._node(firing.node)
        if node is None:
            channel = ">" in firing.node
            if channel:
                self._published[firing.node, firing.index] = result.began
            kind: Kind = "publish" if channel else "source"
            self._bar(event.replica, firing.node, firing.index, result, kind)
        elif firing.node.startswith(EVALUATION):
            if node == "update" and metrics:
                self._evaluated.append(metrics)
        elif node == "group":
            self.rows.group(firing.index, metrics)
            self._bar(event.replica, firing.node, firing.index, result, "group")
        else:
            self._bar(event.replica, firing.node, firing.index, result, "update")
            if self.rows.update(firing.index, firing.node, metrics, result.ended - result.began):
                self._update(firing.index, now)

    def _update(self, update: int, now: float) -> None:
        self.row = self.rows.row(update, now, self.idle.take(now))
        self.groups["consumed"] = self.groups.get("consumed", 0) + self.row["groups"]
        self.updates = self.version = update + 1
        self.metrics.append(self.row)
        if self.board is not None:
            self.board.write(self.row)
        self.say({"kind": "row", "row": self.row})

    def commit(self, commit: Commit) -> None:
        """A cut is complete: only now does the folder say so, and not before the log tells how it came to be."""
        self.log.flush()
        write_cut(self.folder, commit.update, json.loads(commit.cut), self.accuracy)

    def state(self, now: float, replica: str, state: str) -> None:
        self.idle.change(now, replica, state)
        if state != "busy":
            self._doing[replica] = state

    def close_stage(self, name: str, fates: Mapping[str, int]) -> None:
        """A stage has ended by itself."""
        if name in ("before", "after"):
            figures = [m["accuracy"] for m in self._evaluated if "accuracy" in m]
            self.accuracy[name] = round(figures[-1], 6) if figures else None
            self._evaluated.clear()
            self.say({"kind": "accuracy", "stage": name, "accuracy": self.accuracy[name]})
        elif name == "train":
            self.groups = dict(fates)

    def tick(self, now: float) -> None:
        """Time passes: what is buffered is written, the display hears of a quiet run too."""
        self.log.tick(now - self.began)
        if now - self._said > 5 * STATUS_EVERY:
            self._status(now)

    def finish(self, now: float, status: str, error: str) -> None:
        """The end, whatever it was."""
        self.log.end({"status": status, "error": error})
        self.metrics.close()
        if self.board is not None:
            self.board.close()
        summary = {
            "status": status,
            "accuracy_before": self.accuracy.get("before"),
            "accuracy_after": self.accuracy.get("after"),
            "updates": self.updates,
            "groups": self.groups.get("consumed", 0),
            "fates": self.groups,
            "wall_s": round(now - self.began, 3),
            "reward_mean": self.row.get("reward_mean"),
            "dropped_frames": dict(self.dropped_frames),
            "error": error,
            "folder": str(self.folder.path),
        }
        self.folder.write_json("summary.json", summary)  # first: a stop's time may run out on a long trace
        trace = chrome_trace(self.bars, self.config.run)
        if len(self.bars) >= MAX_BARS:
            trace["otherData"]["note"] = f"the first {MAX_BARS} bars of the run"
        self.folder.write_json("trace.json", trace)
        self.say({"kind": "summary", **summary})

    # Helpers ----------------------------------------------------------------------------------------------

    def _node(self, name: str) -> str | None:
        """The clock of a node of either graph; None for a source or a channel."""
        for graph in self.config.graphs:
            if name in graph:
                return graph[name].clock
        return None

    def _bar(self, replica: str, name: str, index: int, result: Result, kind: Kind, detail: str = "") -> None:
        if kind != "source":
            version = self._live.get(replica)
            self._add(Bar(replica, name, index, result.began, result.ended, kind, version, detail))

    def _add(self, bar: Bar) -> None:
        if len(self.bars) < MAX_BARS:
            self.bars.append(bar)

    def _status(self, now: float) -> None:
        self._said = now
        pools: dict[str, Any] = {}
        for replica, doing in self._doing.items():
            pool = pools.setdefault(replica.rpartition("/")[0], {"doing": [], "version": None})
            pool["doing"].append(doing)
            pool["version"] = self._live.get(replica, pool["version"])
        self.say(
            {
                "kind": "status",
                "time": now - self.began,
                "stage": self.stage,
                "update": self.updates,
                "updates": self.config.flags.updates,
                "version": self.version,
                "row": self.row,
                "pools": pools,
                "accuracy": self.accuracy,
            }
        )
