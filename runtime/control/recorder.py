"""What a run leaves behind as it goes: the event log, a row per update, the trace, checkpoints, the summary.

The session tells, this file writes. Status dicts for a display go to `say`: {"kind": "status" | "stage" | "note" |
"summary", …}.
"""

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from penstock.runtime.control.bars import Bars
from penstock.runtime.control.messages import Result
from penstock.runtime.control.records import record_bytes
from penstock.runtime.control.run_config import EVALUATION, RunConfig
from penstock.runtime.control.status import QUIET, Say, Status
from penstock.runtime.record.checkpoint import Checkpoint, open_cut, write_cut
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.log import LogWriter
from penstock.runtime.record.metrics import LOST, MetricsFile, Row, Rows, keep_rows, prefixes
from penstock.runtime.record.tensorboard import Board, open_board
from penstock.runtime.record.timeline import Idle
from penstock.runtime.schedule.events import (
    Arrived,
    Command,
    Commit,
    Done,
    Event,
    Failed,
    Fire,
    Publish,
    Published,
    Send,
    Swapped,
)
from penstock.runtime.schedule.ledger import Ledger
from penstock.runtime.schedule.replay import Origin
from penstock.runtime.schedule.tables import compile_tables

LOOK_S = 0.5
"""Seconds between two looks whether the run folder is still there."""
TOLD = 8000
"""Characters of the last traceback that are kept for the display and the summary: those at its end."""


class RunRecorder:
    """Records one process's part of a run. `cut` is the checkpoint that a resumed run starts from.

    What it remembers does not grow with the run, but for the trace's bars up to their bound.
    """

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
        folder.hold()
        self._looked = now
        self.log = LogWriter(folder.events, record_bytes)
        start = cut.update if cut else 0
        self.log.segment(start if cut else None, {"run": config.run})
        kept = keep_rows(folder.metrics, start)
        self.metrics = MetricsFile(folder.metrics)
        self.board: Board | None = open_board(folder.path, required=tensorboard, keep=kept)
        elapsed = float(kept[-1]["time_s"]) if kept else 0.0
        steps = [s for s in compile_tables(config.graph, config.plan).steps.values() if s.per_update]
        self.rows = Rows({s.name: s.every for s in steps if not s.trails}, now, elapsed)
        if cut and cut.figures:
            self.rows.restore(cut.figures)
        self.prefixes = {node: before for graph in config.graphs for node, before in prefixes(graph).items()}
        self.began, self.elapsed = now, elapsed
        self.row: Row = kept[-1] if kept else {}
        self.idle = Idle([r.name for r in config.plan.replicas], now)
        self.bars = Bars()
        self.status = Status(say, now, self.bars.live)
        self.stage = ""
        self.accuracy: dict[str, float | None] = dict(cut.accuracy) if cut else {}
        self.ledger = Ledger()  # of training, once that has begun; of the cut until then
        if cut:
            self.ledger.restore(cut.cut)
        self.consumed = self.ledger.fates["consumed"]
        self.counted = {fate: sum(_whole(row.get(fate)) for row in kept) for fate in LOST}
        self.not_finite: dict[str, dict[str, Any]] = {}
        for row in kept:
            self._not_finite(row)
        self.raised = ""
        self._said: dict[str, int] = {}
        self.updates = start
        self.version = start
        self.dropped_frames: Mapping[str, int] = {}
        self.warnings: Sequence[str] = ()
        self._cut = ""
        self._evaluated: list[dict[str, float]] = []

    # What the session tells -------------------------------------------------------------------------------

    def open_stage(self, origin: Origin, now: float) -> None:
        self.log.stage({**origin.to_json(), "accuracy": self.accuracy})
        name = origin.stage
        self.stage = name
        if name == "train":
            self.idle.take(now)
            self.rows.restart(now)
        self.say({"kind": "stage", "stage": name, "time": now - self.began})

    def follow(self, ledger: Ledger) -> None:
        """Whose fates are the run's: training's."""
        self.ledger = ledger

    def step(self, now: float, event: Event, commands: list[Command]) -> None:
        self.log.step(now - self.began, event, commands)
        for command in commands:
            match command:
                case Fire(firing, replica, groups):
                    self.status.doing[replica] = str(firing)
                    if firing.node in self.rows.nodes:
                        self.rows.batch(firing.index, groups)
                case Publish(channel, version, replica):
                    self.status.doing[replica] = f"{channel}[{version}]"
                case Send():
                    self.bars.sends(command, now)
        if self.status.due(now):
            self._status(now)

    def result(self, now: float, result: Result) -> None:
        """What a rank has answered. The ranks of a replica do the same at the same time: the first speaks for them."""
        if isinstance(result.event, Done | Published | Arrived | Swapped) and result.event.rank > 0:
            return
        match result.event:
            case Done():
                self._done(now, result, result.event)
            case Failed(firing, replica, _, error):
                self.raised = error if len(error) <= TOLD else f"{error[: TOLD // 8]}\n…\n{error[-TOLD:]}"
                self.bars.fired(replica, firing, result, "group", error)
            case Published():
                self.bars.publishes(result.event, result)
            case Arrived():
                self.bars.arrived(result.event, now)
            case Swapped():
                self.rows.synced(self.bars.swapped(result.event, now))

    def _done(self, now: float, result: Result, event: Done) -> None:
        firing, before = event.firing, self.prefixes.get(event.firing.node, ("",))
        metrics = {prefix + name: value for prefix in before for name, value in result.metrics.items()}
        node = self._node(firing.node)
        if node is None:  # a source
            return
        if firing.node.startswith(EVALUATION):
            if node == "update" and metrics:
                self._evaluated.append(metrics)
        elif node == "group":
            self.rows.group(firing, metrics)
            self.bars.fired(event.replica, firing, result, "group")
        else:
            self.bars.fired(event.replica, firing, result, "update")
            if firing.node not in self.rows.nodes:
                self.rows.beside(firing.index, firing.node, metrics)
            elif self.rows.update(firing.index, firing.node, metrics, result.ended - result.began):
                self._update(firing.index, now)

    def _update(self, update: int, now: float) -> None:
        lost = {fate: count - self.counted[fate] for fate, count in self._lost().items()}
        self.row = self.rows.row(update, now, self.idle.take(now), lost)
        self.counted = self._lost()
        self.consumed += self.row["groups"]
        self.updates = self.version = update + 1
        self.metrics.append(self.row)
        if self.board is not None:
            self.board.write(self.row)
        self.say({"kind": "row", "row": self.row})
        for name, value in self._not_finite(self.row).items():
            self._note(f"{name} is {value} in update {update}: null in metrics.jsonl, and nothing else follows from it")

    def open_cut(self, update: int) -> str:
        """Ranks are about to write their parts of a cut: the name of the folder into which all do."""
        self.folder.require()
        self._cut = open_cut(self.folder, self.config.run, update)
        return self._cut

    def commit(self, commit: Commit) -> None:
        """A cut is complete: only now does the folder say so, and not before the log tells how it came to be."""
        self.folder.require()
        self.log.sync()
        cut = json.loads(commit.cut)
        write_cut(self.folder, self._cut, cut, self.accuracy, self.rows.to_json(cut))

    def state(self, now: float, replica: str, state: str) -> None:
        self.idle.change(now, replica, state)
        if state != "busy":
            self.status.doing[replica] = state

    def close_stage(self, name: str) -> None:
        """A stage has ended by itself."""
        if name in ("before", "after"):
            figures = [m["accuracy"] for m in self._evaluated if "accuracy" in m]
            known = figures and isfinite(figures[-1])
            self.accuracy[name] = round(figures[-1], 6) if known else None
            self._evaluated.clear()
            self.say({"kind": "accuracy", "stage": name, "accuracy": self.accuracy[name]})
            if figures and not known:
                self.not_finite[f"accuracy_{name}"] = {"value": str(figures[-1])}
                self._note(f"the accuracy {name} training is {figures[-1]}, which is no number")

    def tick(self, now: float) -> None:
        """Time passes: what is buffered is written, the display hears of a quiet run too. Raises RecordError when the
        run folder is gone."""
        if now - self._looked >= LOOK_S:
            self._looked = now
            self.folder.require()
        self.log.tick(now - self.began)
        if self.status.due(now, QUIET):
            self._status(now)

    def finish(self, now: float, status: str, error: str) -> None:
        """The end, whatever it was. Raises RecordError where the folder does not take it."""
        self._status(now)
        self.folder.require()
        self.log.end({"status": status, "error": error})
        self.metrics.close()
        if self.board is not None:
            self.board.close()
        summary = {
            "status": status,
            "accuracy_before": self.accuracy.get("before"),
            "accuracy_after": self.accuracy.get("after"),
            "updates": self.updates,
            "groups": self.consumed,
            "fates": self._fates(),
            "retried": self.ledger.retried,
            "last_failure": self.raised,
            "not_finite": self.not_finite,
            "wall_s": round(now - self.began, 3),
            "reward_mean": self.row.get("reward_mean"),
            "measured": self.rows.pending,
            "dropped_frames": dict(self.dropped_frames),
            "warnings": list(self.warnings),
            "error": error,
            "records": self.log.records,
            "folder": str(self.folder.path),
        }
        self.folder.write_json("summary.json", summary)  # first: a stop's time may run out on a long trace
        self.bars.write(self.folder, self.config.run)
        self.say({"kind": "summary", **summary})

    # Helpers ----------------------------------------------------------------------------------------------

    def _fates(self) -> dict[str, int]:
        """Of all groups that have one. An update's row may be written before the ledger knows that it is over."""
        return {**self.ledger.fates, "consumed": self.consumed}

    def _lost(self) -> dict[str, int]:
        return {**{fate: self.ledger.fates[fate] for fate in LOST[:-1]}, "retried": self.ledger.retried}

    def _not_finite(self, row: Row) -> dict[str, str]:
        """Count a row's figures that are no numbers; those that are so for the first time."""
        new = {}
        found = row.get("not_finite")
        for name, value in found.items() if isinstance(found, dict) else ():
            if name not in self.not_finite:
                self.not_finite[name] = {"value": value, "first": row["update"], "updates": 0}
                new[name] = value
            self.not_finite[name] |= {"last": row["update"], "updates": self.not_finite[name]["updates"] + 1}
        return new

    def _note(self, text: str) -> None:
        self.say({"kind": "note", "text": text})

    def _node(self, name: str) -> str | None:
        """The clock of a node of either graph; None for a source."""
        for graph in self.config.graphs:
            if name in graph:
                return graph[name].clock
        return None

    def _status(self, now: float) -> None:
        facts = {
            "stage": self.stage,
            "update": self.updates,
            "updates": self.config.flags.updates,
            "version": self.version,
            "row": self.row,
            "accuracy": self.accuracy,
        }
        lost = self._lost()
        if lost != self._said and any(lost.values()):
            self._said = lost
            facts["lost"] = {**lost, "raised": self.raised}
        self.status.tell(now, facts)


def _whole(count: Any) -> int:
    """A count of a row, which an older version may not have written."""
    return count if isinstance(count, int) else 0
