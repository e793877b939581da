"""Writes the run folder as the run goes: the event log, a row per update, the trace, checkpoints, the summary.

The session calls it. Dicts for a display go to `say`: {"kind": "status" | "stage" | "note" | "summary", …}. The status
of the run is sent when there is news, at a limited rate.
"""

import json
import shutil
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from penstock.graph.errors import nearest
from penstock.graph.ir import Firing, label_of
from penstock.graph.types import Mean, Metrics, NodeWarning
from penstock.runtime.control.messages import Result, record_bytes
from penstock.runtime.control.run_config import EVALUATION, RunConfig
from penstock.runtime.record.checkpoints import (
    SavedCheckpoint,
    all_checkpoints,
    begin_checkpoint,
    complete_checkpoint,
    read_best,
    retire,
    surplus,
)
from penstock.runtime.record.event_log import LogWriter
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import (
    GENERATED,
    LOST,
    NO_NUMBERS,
    MetricsFile,
    Row,
    Rows,
    combine,
    counting,
    is_figure,
    keep_rows,
)
from penstock.runtime.record.samples import SamplesFile
from penstock.runtime.record.timeline import Bar, Kind, Utilisation, microseconds
from penstock.runtime.record.trace_formats import chrome_trace
from penstock.runtime.schedule.compile import Tables
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
    ReplicaJoined,
    ReplicaLost,
    Send,
    Swapped,
    Unread,
)
from penstock.runtime.schedule.replay import SegmentOrigin
from penstock.runtime.schedule.state import Ledger

# Most bars of the trace. Of a longer run it has only the first part, and says so.
MAX_BARS = 200_000
Say = Callable[[dict[str, Any]], None]

# Warnings that the summary keeps.
MAX_WARNINGS = 200
# Seconds between two statuses for the display.
EVERY = 0.2
# Most replicas of a pool whose work a status tells: a line of the display has room for fewer.
SHOWN = 16
# Seconds after which a run without news sends its status again.
QUIET = 1.0


def tell_node_warnings(tell: Callable[[str], None]) -> None:
    """From now on `tell` gets the text of each `NodeWarning` that Python shows; `warnings.catch_warnings` ends it."""
    show = warnings.showwarning

    def show_and_tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        show(message, category, *where, **more)
        if issubclass(category, NodeWarning):
            tell(str(message))

    warnings.showwarning = show_and_tell


# Seconds between two checks that the run folder is still there.
LOOK_S = 0.5
# Characters from the end of the last traceback that are kept for the display and the summary.
MAX_TRACEBACK = 8000


class RunRecorder:
    """Records a run. `cut` is the checkpoint that a resumed run starts from.

    Its memory does not grow with the run, except for the trace's bars, which are bounded. `bars` are what replicas did,
    `doing` what each is working on, `live` the version that it uses. `published` is the time at which each channel's
    newest version was published. `sent` has, for each channel and replica, the time at which its next version was asked
    for and the time at which that was published: only the newest version is ever sent, and the next one only after the
    replica has swapped. `kept` are the names under which the checkpoints that stay were written.
    """

    def __init__(
        self, folder: RunFolder, config: RunConfig, say: Say, now: float, cut: SavedCheckpoint | None = None
    ) -> None:
        self.folder, self.config, self.say = folder, config, say
        folder.hold()
        self._looked = now
        self.log = LogWriter(folder.events)
        self.start = start = cut.update if cut else 0
        self.log.segment(start if cut else None, {"run": config.run})
        # Rows of updates after the checkpoint are dropped: these updates are done again.
        kept = keep_rows(folder.metrics, start)
        self.metrics = MetricsFile(folder.metrics)
        elapsed = float(kept[-1]["time_s"]) if kept else 0.0
        steps = [s for s in Tables(config.graph, config.plan).steps.values() if s.per_update]
        order = [node.name for graph in config.graphs for node in graph.nodes]
        self._counting = counting(config.graphs)
        nodes = {s.name: s.every for s in steps if not s.off_path}
        self.rows = Rows(nodes, now, elapsed, config.graph.nodes, self._counting)
        self.samples = SamplesFile(folder.samples, order, start)
        if cut and cut.figures:
            self.rows.restore(cut.figures)
            self.samples.restore(cut.figures.get("samples", ()))
        self.began = now
        self.row: Row = kept[-1] if kept else {}
        # Of a run that changes no value: the groups of all rows with an accuracy, and its sum over these.
        self._measured, self._solved = 0, 0.0
        for row in kept:
            self._count_accuracy(row)
        self.clocks = {node.name: node.clock for graph in config.graphs for node in graph.nodes}
        self.utilisation = Utilisation([r.name for r in config.plan.replicas], microseconds(now))
        self.states: dict[str, str] = {}
        # By per-group firing in work: the version that was live when it, or its segment, began.
        self._begun: dict[Firing, int | None] = {}
        self._changes: list[tuple[float, str, str]] = []  # changes of `states` since the last row
        self.bars: list[Bar] = []
        self.live: dict[str, int] = {}
        self._replicas = {pool.name: [replica.name for replica in pool.replicas] for pool in config.plan.pools}
        self.doing: dict[str, object] = {}  # made into text only when it is sent, which is rare
        self.published: dict[str, float] = {}
        self.sent: dict[tuple[str, str], tuple[float, float]] = {}
        self._status_said = 0.0
        self.stage = ""
        self.accuracy: dict[str, float | None] = dict(cut.accuracy) if cut else {}
        self.ledger = Ledger()  # training's, once the session has begun it; the checkpoint's until then
        if cut:
            self.ledger.restore(cut.cut)
        self.consumed = self.ledger.outcomes["consumed"]
        # Each row counts what was lost since the row before: continue from the sum of the rows that are kept.
        self.counted = {outcome: sum(_whole(row.get(outcome)) for row in kept) for outcome in LOST}
        # Nodes off the critical path that have not reported yet; the number of rows after which all other nodes have;
        # the metric of --keep-best, until a row has it.
        self._silent = {s.name for s in steps if s.off_path}
        self._longest = max((s.every for s in steps if not s.off_path), default=1)
        best = read_best(config.flags.keep_best)[0] if config.flags.keep_best else ""
        self._unseen = "" if any(best in row for row in kept) else best
        self.not_finite: dict[str, dict[str, Any]] = {}
        for row in kept:
            self._not_finite(row)
        self.raised = ""
        self._said: dict[str, int] = {}
        self.updates = start
        self.dropped_frames: Mapping[str, int] = {}
        # Like the whole summary, this covers earlier lives of the run, too.
        told = dict.fromkeys(note["text"] for note in folder.read_notes()[0] if note["level"] == "warning")
        self.warnings = [*told][:MAX_WARNINGS]
        self._warned: deque[str] = deque(maxlen=MAX_WARNINGS)  # the latest texts of `warn`, each of which is noted once
        self._cut, self._cut_row = "", Row()
        self._cut_figures: dict[str, Any] = {}
        if len(kept) < start:
            given = f"{folder.metrics}: given rows of {len(kept)} of {start} updates, needed all"
            goes_on = "time_s goes on from the last of these, and the next row has what was dropped, failed and retried"
            self.warn(f"{given}: {goes_on} since then")
        self.kept = tuple(one.written for one in all_checkpoints(folder))
        # What the nodes of the evaluation that is under way have reported, and the groups that its update has taken.
        self._evaluation_metrics: dict[Firing, Metrics] = {}
        self._evaluation_groups: set[int] = set()
        # By "before" and "after" training, the metrics of a whole evaluation.
        self.evaluated: dict[str, dict[str, float | None]] = {**(cut.figures.get("evaluated", {}) if cut else {})}
        # Replicas that were lost or joined, in earlier lives, too.
        self.replicas: list[dict[str, Any]] = [*(cut.figures.get("replicas", ()) if cut else ())]

    # Called by the session --------------------------------------------------------------------------------

    def open_stage(self, origin: SegmentOrigin, now: float) -> None:
        self.log.stage({**origin.to_json(), "accuracy": self.accuracy})
        # Replicas that an earlier life has lost are there again, unless the stage begins without them.
        present = {replica.name for replica in origin.plan.replicas} - {*origin.absent}
        for replica, event in {one["replica"]: one["event"] for one in self.replicas}.items():
            if event == "lost" and replica in present:
                self._note_replica(replica, "joined", now)
        name = origin.stage
        # For displays: a program that changes no value only measures.
        self.stage = "measure" if name == "train" and not self.config.graph.takers() else name
        if name == "train":
            self._pools(now)
            self.rows.restart(now)
        self.say({"kind": "stage", "stage": self.stage, "time": now - self.began})

    def step(
        self, now: float, event: Event, commands: list[Command], states: Mapping[str, str], answer: Result | None = None
    ) -> None:
        """Record an event, which may be a rank's `answer`, and its commands. `states` are the changed states."""
        if answer is not None:
            self._answer(now, answer)
        self.log.step(now - self.began, record_bytes(event), [*map(record_bytes, commands)])
        for command in commands:
            match command:
                case Fire(firing, replica, groups):
                    self.doing[replica] = firing
                    if self.clocks.get(firing.node) == "group" and not firing.node.startswith(EVALUATION):
                        self._begun[firing] = self.live.get(replica)
                    if firing.node in self.rows.nodes:
                        self.rows.batch(firing.index, groups)
                    elif self.clocks.get(firing.node) == "update" and firing.node.startswith(EVALUATION):
                        self._evaluation_groups.update(groups)
                case Publish(channel, version, replica):
                    self.doing[replica] = Firing(channel, version)
                case Send(channel, _, _, replica):
                    self.sent[channel, replica] = now, self.published[channel]
        if isinstance(event, ReplicaLost | ReplicaJoined):
            lost = {"reason": event.reason} if isinstance(event, ReplicaLost) else {}
            self._note_replica(event.replica, "lost" if lost else "joined", now, **lost)
        for replica, state in states.items():
            if self.states.get(replica) != state:
                self.states[replica] = state
                self._changes.append((now, replica, state))
                if state != "busy":
                    self.doing[replica] = state
        self._status(now, EVERY)

    def _answer(self, now: float, result: Result) -> None:
        """Record a rank's answer. The ranks of a replica do the same at the same time: only the first one counts."""
        match result.event:
            case Unread(firing, replica, rank):
                if rank == 0:
                    text = f"{firing} on {replica} could not read a value of a replica that is gone: it fires again"
                    self.note(text, "warning")
            case Failed(firing, replica, _, error):
                head, tail = error[: MAX_TRACEBACK // 8], error[-MAX_TRACEBACK:]
                self.raised = f"{head}\n…\n{tail}" if len(error) > MAX_TRACEBACK else error
                self._fired(replica, firing, result, "group", error)
            case Done(rank=0):
                self._done(now, result, result.event)
            case Published(channel, version, replica, 0):
                self.published[channel] = result.began
                self._fired(replica, Firing(channel, version), result, "publish")
            case Arrived(channel, version, replica, 0):
                asked, _ = self.sent[channel, replica]
                self._add(Bar(replica, channel, version, asked, now, "send", version))
            case Swapped(channel, version, replica, 0):
                self.live[replica] = version
                self.rows.synced(now - self.sent[channel, replica][1])

    def _fired(self, replica: str, firing: Firing, result: Result, kind: Kind, detail: str = "") -> None:
        """Add the bar of a firing or a publication that has succeeded or failed."""
        version = self._begun.pop(firing, self.live.get(replica))
        self._add(Bar(replica, firing.node, firing.index, result.began, result.ended, kind, version, detail))

    def _add(self, bar: Bar) -> None:
        if len(self.bars) < MAX_BARS:
            self.bars.append(bar)

    def _done(self, now: float, result: Result, event: Done) -> None:
        firing, metrics = event.firing, result.metrics
        clock = self.clocks.get(firing.node)
        if clock is None:  # a source
            if metrics and not firing.node.startswith(EVALUATION):
                self.rows.group(firing, metrics)
            return
        means = {name: Mean(metrics[name], count) for name, count in result.counts.items() if name in metrics}
        if firing.node.startswith(EVALUATION):
            self._evaluation_metrics[firing] = metrics | means
        elif clock == "group":
            if metrics:
                self.rows.group(firing, metrics | means)
            if result.sample:
                self.samples.tell(firing.index, firing.node, result.sample)
            self._fired(event.replica, firing, result, "group")
        else:
            self._fired(event.replica, firing, result, "update")
            if event.paused:
                self.rows.part(firing.index, firing.node, result.ended - result.began)
            elif firing.node not in self.rows.nodes:
                self.rows.trailing(firing.index, firing.node, metrics)  # the next row has them
                self._silent.discard(firing.node)
            elif self.rows.update(firing.index, firing.node, metrics, result.ended - result.began):
                self._update(firing.index, now)

    def _update(self, update: int, now: float) -> None:
        self.samples.take(update, self.rows.taken(update), self.ledger.groups)
        lost = {outcome: count - self.counted[outcome] for outcome, count in self._lost().items()}
        self.row = self.rows.row(update, now, self._pools(now), lost, self.ledger.groups)
        self._count_accuracy(self.row)
        self.counted = self._lost()
        self.consumed += self.row["groups"]
        self.updates = update + 1
        self.metrics.append(self.row)
        self.say({"kind": "row", "row": self.row})
        if self._unseen in self.row:
            self._unseen = ""
        elif not self._silent and self.updates - self.start >= self._longest:
            self._tell_unseen()
        for name, value in self._not_finite(self.row).items():
            self.note(f"{name} is {value} in update {update}: written as null to metrics.jsonl; the run goes on")

    def _tell_unseen(self) -> None:
        """Warn, once, that no row has the metric of --keep-best."""
        if self._unseen:
            known = self.row.keys() - NO_NUMBERS
            self.warn(f"--keep-best: given {self._unseen!r}, which no row has so far{nearest(self._unseen, known)}")
            self._unseen = ""

    def _note_replica(self, replica: str, event: str, now: float, **reason: str) -> None:
        time_s = round(self.rows.time(now), 3)
        self.replicas.append({"replica": replica, "event": event, "time_s": time_s, **reason})

    def begin_checkpoint(self, update: int, state: str) -> str:
        """Ranks are about to write a checkpoint, with this `state` of the scheduler. Return the name of the folder for
        their shards."""
        # Without this, `begin_checkpoint` would create the folder again if it was moved away.
        self.folder.require()
        self._cut, self._cut_row = begin_checkpoint(self.folder, self.config.run, update), self.row
        # Take these now: while the checkpoint is written, later updates change metrics and samples.
        cut = json.loads(state)
        samples, replicas = self.samples.to_json(cut), [*self.replicas]
        beside = {"samples": samples, "replicas": replicas, "evaluated": {**self.evaluated}}
        self._cut_figures = {**self.rows.to_json(cut), **beside}
        return self._cut

    def commit(self, commit: Commit) -> None:
        """Mark a checkpoint as complete, after the files that a resume needs beside it are on the disk: event log, rows
        and samples."""
        self.folder.require()
        for file in (self.log, self.metrics, self.samples):
            file.sync()
        cut, records = json.loads(commit.state), self.log.records
        complete_checkpoint(self.folder, self._cut, cut, self.accuracy, self._cut_figures, self._cut_row, records)
        self._prune()

    def _prune(self) -> None:
        """Remove checkpoints that neither `--keep` nor `--keep-best` keeps."""
        flags, saved = self.config.flags, all_checkpoints(self.folder)
        gone = retire(self.folder, self.config.run, surplus(saved, flags.keep, flags.keep_best))
        self.kept = tuple(one.written for one in saved if one.folder not in gone)
        for path in gone.values():
            # In the background: files of many GB take long. The run's end does not wait; leftovers are swept later.
            threading.Thread(target=shutil.rmtree, args=(path,), kwargs={"ignore_errors": True}).start()

    def tell_writing(self, update: int, seconds: float) -> None:
        """Tell that the run ends when the checkpoint before `update` is written; ranks have `seconds` for it."""
        text = f"the checkpoint before update {update} is being written; the run ends when it is (Ctrl-C: at once)"
        self.say({"kind": "writing", "seconds": seconds})
        self.note(text, level="info")

    def close_stage(self, name: str) -> None:
        """A stage has ended by itself: note its metrics, if it was an evaluation."""
        if name in ("before", "after"):
            figures = self._whole_evaluation()
            self.evaluated[name] = {each: value if is_figure(value) else None for each, value in figures.items()}
            accuracy = self.evaluated[name].get("accuracy")
            self.accuracy[name] = None if accuracy is None else round(accuracy, 6)
            self.say({"kind": "accuracy", "stage": name, "accuracy": self.accuracy[name]})
            if accuracy is None and "accuracy" in figures:
                self.not_finite[f"accuracy_{name}"] = {"value": str(figures["accuracy"])}
                self.note(f"the accuracy {name} training is {figures['accuracy']}, not a number")

    def _whole_evaluation(self) -> Metrics:
        """The metrics of the evaluation that has ended. Of several nodes with the same one, it is that of the first in
        the program, those per update before those per group; the others have it with their name before it, as in rows.
        """
        by_node: dict[str, list[Metrics]] = {node: [] for node in self.clocks}
        # Sorted: sums of floats must not depend on the order in which firings ended.
        for firing in sorted(self._evaluation_metrics):
            if self.clocks[firing.node] == "update" or firing.index in self._evaluation_groups:
                by_node[firing.node].append(self._evaluation_metrics[firing])
        self._evaluation_metrics.clear()
        self._evaluation_groups.clear()
        found: Metrics = {}
        for node in sorted(by_node, key=lambda node: self.clocks[node] != "update"):
            own = combine(by_node[node])
            if node in self._counting:
                own.pop(GENERATED, None)
            label = label_of(node.removeprefix(EVALUATION))
            found |= {f"{label}.{name}" if name in found else name: value for name, value in own.items()}
        return found

    def tick(self, now: float) -> None:
        """Call it regularly: it writes buffered data, and sends the status of a quiet run. Raises RecordError when the
        run folder is gone."""
        if now - self._looked >= LOOK_S:
            self._looked = now
            self.folder.require()
            self.log.tick(now - self.began)
        self._status(now, QUIET)

    def finish(self, now: float, status: str, error: str, cause: str = "", lost_host: str = "") -> None:
        """Record the end of the run. `cause` is the code of a failure, `lost_host` its host. Raises RecordError if the
        folder cannot be written."""
        self._status(now, -inf)
        self.folder.require()
        if status == "done" and self.updates > self.start:
            self._tell_unseen()
        self.log.end({"status": status, "error": error})
        self.metrics.close()
        self.samples.close()
        summary = {
            "status": status,
            "accuracy_before": self.accuracy.get("before"),
            "accuracy_after": self.accuracy.get("after"),
            **({"evaluated": self.evaluated} if self.evaluated else {}),
            "updates": self.updates,
            "groups": self.consumed,
            # The ledger may not yet count the groups of the last row.
            "fates": {**self.ledger.outcomes, "consumed": self.consumed},
            "retried": self.ledger.retried,
            "last_failure": self.raised,
            "not_finite": self.not_finite,
            "wall_s": round(now - self.began, 3),
            "reward_mean": self.row.get("reward_mean"),
            **self._last_accuracy(),
            "measured": self.rows.pending,
            "dropped_frames": dict(self.dropped_frames),
            "warnings": self.warnings,
            **({"replicas": self.replicas} if self.replicas else {}),
            "error": error,
            "cause": cause,
            **({"lost_host": lost_host} if lost_host else {}),
            "records": self.log.records,
            "folder": str(self.folder.path),
        }
        self.folder.write_json("summary.json", summary)  # first: the grace period may end while a long trace is written
        trace = chrome_trace(self.bars, self.config.run)
        whole = f"the run from update {self.start} on, where it was resumed" if self.start else "the run"
        if len(self.bars) >= MAX_BARS:
            trace["otherData"]["note"] = f"the first {MAX_BARS} bars of {whole}"
        elif self.start:
            trace["otherData"]["note"] = whole
        self.folder.write_json("trace.json", trace)
        self.say({"kind": "summary", **summary})

    def _last_accuracy(self) -> dict[str, Any]:
        """That of the newest row; of a run that changes no value, that of all its problems."""
        if self._measured and not self.config.graph.takers():
            return {"accuracy": self._solved / self._measured}
        return {"accuracy": self.row["accuracy"]} if "accuracy" in self.row else {}

    def _count_accuracy(self, row: Row) -> None:
        if row.get("accuracy") is not None:
            self._measured += row["groups"]
            self._solved += row["accuracy"] * row["groups"]

    # Helpers ----------------------------------------------------------------------------------------------

    def _pools(self, now: float) -> dict[str, dict[str, float]]:
        """Seconds by pool and state since the last call."""
        changes, self._changes = self._changes, []
        return self.utilisation.pools(changes, now)

    def _lost(self) -> dict[str, int]:
        return {**{outcome: self.ledger.outcomes[outcome] for outcome in LOST[:-1]}, "retried": self.ledger.retried}

    def _not_finite(self, row: Row) -> dict[str, str]:
        """Count a row's metrics that are not finite. Return those that are so for the first time."""
        new = {}
        found = row.get("not_finite")
        for name, value in found.items() if isinstance(found, dict) else ():
            if name not in self.not_finite:
                self.not_finite[name] = {"value": value, "first": row["update"], "updates": 0}
                new[name] = value
            self.not_finite[name] |= {"last": row["update"], "updates": self.not_finite[name]["updates"] + 1}
        return new

    def warn(self, text: str) -> None:
        """Warn of a lasting condition. Each text is noted once: every rank, or every checkpoint, may report it."""
        if text not in self._warned:
            self._warned.append(text)
            self.note(text, "warning")

    def note(self, text: str, level: str = "") -> None:
        """Show a line to the user, and keep it in the folder. The summary has the first warnings."""
        if level == "warning" and len(self.warnings) < MAX_WARNINGS and text not in self.warnings:
            self.warnings.append(text)
        self.folder.add_note(level, text)
        self.say({"kind": "note", **({"level": level} if level else {}), "text": text})

    def _status(self, now: float, after: float) -> None:
        """Send the status of the run and its pools, unless the last one is less than `after` seconds old."""
        if now - self._status_said <= after:
            return
        self._status_said = now
        status = {
            "kind": "status",
            "time": now - self.began,
            "stage": self.stage,
            "update": self.updates,
            "updates": self.config.flags.updates,
            "version": self.updates,
            "row": self.row,
            "accuracy": self.accuracy,
        }
        lost = self._lost()
        if lost != self._said and any(lost.values()):
            self._said = lost
            status["lost"] = {**lost, "raised": self.raised}
        pools: dict[str, Any] = {}
        for pool, replicas in self._replicas.items():
            doing = [self.doing[replica] for replica in replicas if replica in self.doing]
            if len(doing) > SHOWN:  # show working replicas first
                doing.sort(key=lambda at: not isinstance(at, Firing))
            if doing:
                version = next((self.live[replica] for replica in reversed(replicas) if replica in self.live), None)
                pools[pool] = {"doing": [*map(str, doing[:SHOWN])], "version": version}
        self.say({**status, "pools": pools})


def _whole(count: Any) -> int:
    """A count of a row; 0 if an older version has not written it."""
    return count if isinstance(count, int) else 0
