"""What a run leaves behind as it goes: the event log, a row per update, the trace, checkpoints, the summary.

The session tells, this file writes. Status dicts for a display go to `say`: {"kind": "status" | "stage" | "note" |
"summary", …}; the status of the run when there is news, and not too often.
"""

import json
import shutil
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from math import inf, isfinite
from typing import Any

from penstock.graph.errors import nearest
from penstock.graph.ir import Firing
from penstock.graph.types import NodeWarning
from penstock.runtime.control.messages import Result, record_bytes
from penstock.runtime.control.run_config import EVALUATION, RunConfig
from penstock.runtime.record.checkpoints import (
    SavedCheckpoint,
    all_checkpoints,
    begin_checkpoint,
    complete_checkpoint,
    discount,
    read_best,
    surplus,
)
from penstock.runtime.record.event_log import LogWriter
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import (
    LOST,
    NO_NUMBERS,
    MetricsFile,
    Row,
    Rows,
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

# Bars kept for the trace: beyond them it holds the run's first part only, and says so.
MAX_BARS = 200_000
Say = Callable[[dict[str, Any]], None]

# Warnings that the summary keeps.
MAX_WARNINGS = 200
# Seconds between two statuses for the display.
EVERY = 0.2
# Replicas of a pool of which a status tells what they are at: a line of the display has room for fewer.
SHOWN = 16
# Seconds after which a run without news says its status again.
QUIET = 1.0


def tell_node_warnings(tell: Callable[[str], None]) -> None:
    """From now on `tell` gets the text of each `NodeWarning` that Python shows; `warnings.catch_warnings` ends it."""
    show = warnings.showwarning

    def show_and_tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        show(message, category, *where, **more)
        if issubclass(category, NodeWarning):
            tell(str(message))

    warnings.showwarning = show_and_tell


# Seconds between two looks whether the run folder is still there.
LOOK_S = 0.5
# Characters of the last traceback that are kept for the display and the summary: those at its end.
MAX_TRACEBACK = 8000


class RunRecorder:
    """Records one process's part of a run. `cut` is the checkpoint that a resumed run starts from.

    What it remembers does not grow with the run, but for the trace's bars up to their bound. `bars` are what replicas
    did, `doing` what each is at, `live` the version that it works with. `published` is when each channel's newest
    version was, `sent` when a replica's next version was asked for and when it had been published: only the newest is
    ever sent, and the next one when a replica has swapped the last. `kept` are the checkpoints that stay, by the names
    under which they were written.
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
        # Rows of updates after the checkpoint are made again.
        kept = keep_rows(folder.metrics, start)
        self.metrics = MetricsFile(folder.metrics)
        elapsed = float(kept[-1]["time_s"]) if kept else 0.0
        steps = [s for s in Tables(config.graph, config.plan).steps.values() if s.per_update]
        order = [node.name for graph in config.graphs for node in graph.nodes]
        self.rows = Rows({s.name: s.every for s in steps if not s.off_path}, now, elapsed, config.graph.nodes)
        self.samples = SamplesFile(folder.samples, order, start)
        if cut and cut.figures:
            self.rows.restore(cut.figures)
            self.samples.restore(cut.figures.get("samples", ()))
        self.began = now
        self.row: Row = kept[-1] if kept else {}
        self.clocks = {node.name: node.clock for graph in config.graphs for node in graph.nodes}
        self.utilisation = Utilisation([r.name for r in config.plan.replicas], microseconds(now))
        self.states: dict[str, str] = {}
        self._changes: list[tuple[float, str, str]] = []  # of states, since the last row
        self.bars: list[Bar] = []
        self.live: dict[str, int] = {}
        self._replicas = {pool.name: [replica.name for replica in pool.replicas] for pool in config.plan.pools}
        self.doing: dict[str, object] = {}  # made into text when it is said, which is seldom
        self.published: dict[str, float] = {}
        self.sent: dict[tuple[str, str], tuple[float, float]] = {}
        self._status_said = 0.0
        self.stage = ""
        self.accuracy: dict[str, float | None] = dict(cut.accuracy) if cut else {}
        self.ledger = Ledger()  # of training, once the session has begun it; of the cut until then
        if cut:
            self.ledger.restore(cut.cut)
        self.consumed = self.ledger.outcomes["consumed"]
        # Rows have what was lost since the row before: the sum of those that are kept is where to go on.
        self.counted = {outcome: sum(_whole(row.get(outcome)) for row in kept) for outcome in LOST}
        # The metric of --keep-best, until a row has it; the nodes off the critical path that have not reported yet, and
        # the rows after which all others have.
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
        # Of earlier lives, too, as all that the summary has.
        told = dict.fromkeys(note["text"] for note in folder.read_notes()[0] if note["level"] == "warning")
        self.warnings = [*told][:MAX_WARNINGS]
        self._warned: deque[str] = deque(maxlen=MAX_WARNINGS)  # the last of those that are said once
        self._cut, self._cut_row = "", Row()
        self._cut_figures: dict[str, Any] = {}
        if len(kept) < start:
            given = f"{folder.metrics}: given rows of {len(kept)} of {start} updates, needed all"
            goes_on = "time_s goes on from the last of these, and the next row has what was dropped, failed and retried"
            self.warn(f"{given}: {goes_on} since then")
        self.kept = tuple(one.written for one in all_checkpoints(folder))
        self._evaluated: dict[str, dict[str, float]] = {}  # by node
        # Who came and went, in earlier lives, too.
        self.replicas: list[dict[str, Any]] = [*(cut.figures.get("replicas", ()) if cut else ())]

    # What the session tells -------------------------------------------------------------------------------

    def open_stage(self, origin: SegmentOrigin, now: float) -> None:
        self.log.stage({**origin.to_json(), "accuracy": self.accuracy})
        name = origin.stage
        self.stage = name
        if name == "train":
            self._pools(now)
            self.rows.restart(now)
        self.say({"kind": "stage", "stage": name, "time": now - self.began})

    def step(
        self, now: float, event: Event, commands: list[Command], states: Mapping[str, str], answer: Result | None = None
    ) -> None:
        """What follows from an event, which may be a rank's `answer`. `states` are those that have changed."""
        if answer is not None:
            self._answer(now, answer)
        self.log.step(now - self.began, record_bytes(event), [*map(record_bytes, commands)])
        for command in commands:
            match command:
                case Fire(firing, replica, groups):
                    self.doing[replica] = firing
                    if firing.node in self.rows.nodes:
                        self.rows.batch(firing.index, groups)
                case Publish(channel, version, replica):
                    self.doing[replica] = Firing(channel, version)
                case Send(channel, _, _, replica):
                    self.sent[channel, replica] = now, self.published[channel]
        if isinstance(event, ReplicaLost | ReplicaJoined):
            lost = {"reason": event.reason} if isinstance(event, ReplicaLost) else {}
            what = "lost" if lost else "joined"
            time_s = round(self.rows.time(now), 3)
            self.replicas.append({"replica": event.replica, "event": what, "time_s": time_s, **lost})
        for replica, state in states.items():
            if self.states.get(replica) != state:
                self.states[replica] = state
                self._changes.append((now, replica, state))
                if state != "busy":
                    self.doing[replica] = state
        self._status(now, EVERY)

    def _answer(self, now: float, result: Result) -> None:
        """What a rank has answered. The ranks of a replica do the same at the same time: the first speaks for them."""
        match result.event:
            case Unread(firing, replica, rank):
                if rank == 0:
                    text = f"{firing} on {replica} could not read a value of a replica that is gone: it is done again"
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
        """A firing or a publication has ended, well or not."""
        version = self.live.get(replica)
        self._add(Bar(replica, firing.node, firing.index, result.began, result.ended, kind, version, detail))

    def _add(self, bar: Bar) -> None:
        if len(self.bars) < MAX_BARS:
            self.bars.append(bar)

    def _done(self, now: float, result: Result, event: Done) -> None:
        firing, metrics = event.firing, result.metrics
        clock = self.clocks.get(firing.node)
        if clock is None:  # a source
            return
        if firing.node.startswith(EVALUATION):
            if clock == "update" and metrics:
                self._evaluated[firing.node] = metrics
        elif clock == "group":
            if metrics:
                self.rows.group(firing, metrics)
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
            self.note(f"{name} is {value} in update {update}: null in metrics.jsonl, and nothing else follows from it")

    def _tell_unseen(self) -> None:
        """Tell once of a metric of --keep-best that no row has."""
        if self._unseen:
            known = self.row.keys() - NO_NUMBERS
            self.warn(f"--keep-best: given {self._unseen!r}, which no row has so far{nearest(self._unseen, known)}")
            self._unseen = ""

    def begin_checkpoint(self, update: int, state: str) -> str:
        """Ranks are about to write their parts of a cut with this `state` of the scheduler: the name of the folder into
        which all do."""
        self.folder.require()
        # It would make a folder that was moved away anew, with nothing in it but this checkpoint.
        self._cut, self._cut_row = begin_checkpoint(self.folder, self.config.run, update), self.row
        # Now: updates that go on while it is written take metrics and samples with them.
        cut = json.loads(state)
        samples, replicas = self.samples.to_json(cut), [*self.replicas]
        self._cut_figures = {**self.rows.to_json(cut), "samples": samples, "replicas": replicas}
        return self._cut

    def commit(self, commit: Commit) -> None:
        """A cut is complete: only now does the folder say so, and not before the disk has what a resume keeps beside
        it: how it came to be, rows and samples."""
        self.folder.require()
        for file in (self.log, self.metrics, self.samples):
            file.sync()
        cut, records = json.loads(commit.state), self.log.records
        complete_checkpoint(self.folder, self._cut, cut, self.accuracy, self._cut_figures, self._cut_row, records)
        self._prune()

    def _prune(self) -> None:
        """Remove checkpoints that neither `--keep` nor `--keep-best` keeps."""
        flags, saved = self.config.flags, all_checkpoints(self.folder)
        gone = discount(self.folder, self.config.run, surplus(saved, flags.keep, flags.keep_best))
        self.kept = tuple(one.written for one in saved if one.folder not in gone)
        for path in gone.values():
            # In the background: files of many GB take long. The run's end does not wait: what is left then is swept.
            threading.Thread(target=shutil.rmtree, args=(path,), kwargs={"ignore_errors": True}).start()

    def tell_writing(self, update: int, seconds: float) -> None:
        """The run ends when the checkpoint before `update` is written, for which ranks have `seconds`."""
        text = f"the checkpoint before update {update} is being written; the run ends when it is (Ctrl-C: at once)"
        self.say({"kind": "writing", "seconds": seconds})
        self.note(text, level="info")

    def close_stage(self, name: str) -> None:
        """A stage has ended by itself."""
        if name in ("before", "after"):
            # Of several, that of the node which stands first in the program.
            told = (self._evaluated.get(node, {}) for node in self.clocks)
            figures = [metrics["accuracy"] for metrics in told if "accuracy" in metrics]
            known = figures and isfinite(figures[0])
            self.accuracy[name] = round(figures[0], 6) if known else None
            self._evaluated.clear()
            self.say({"kind": "accuracy", "stage": name, "accuracy": self.accuracy[name]})
            if figures and not known:
                self.not_finite[f"accuracy_{name}"] = {"value": str(figures[0])}
                self.note(f"the accuracy {name} training is {figures[0]}, which is no number")

    def tick(self, now: float) -> None:
        """Time passes: what is buffered is written, the display hears of a quiet run too. Raises RecordError when the
        run folder is gone."""
        if now - self._looked >= LOOK_S:
            self._looked = now
            self.folder.require()
            self.log.tick(now - self.began)
        self._status(now, QUIET)

    def finish(self, now: float, status: str, error: str, cause: str = "", lost_host: str = "") -> None:
        """The end, whatever it was. `cause` is the code of a failure, `lost_host` the host that it was on. Raises
        RecordError where the folder does not take it."""
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
            "updates": self.updates,
            "groups": self.consumed,
            # An update's row may be written before the ledger knows that it is over.
            "fates": {**self.ledger.outcomes, "consumed": self.consumed},
            "retried": self.ledger.retried,
            "last_failure": self.raised,
            "not_finite": self.not_finite,
            "wall_s": round(now - self.began, 3),
            "reward_mean": self.row.get("reward_mean"),
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
        self.folder.write_json("summary.json", summary)  # first: a stop's time may run out on a long trace
        trace = chrome_trace(self.bars, self.config.run)
        whole = f"the run from update {self.start} on, where it was resumed" if self.start else "the run"
        if len(self.bars) >= MAX_BARS:
            trace["otherData"]["note"] = f"the first {MAX_BARS} bars of {whole}"
        elif self.start:
            trace["otherData"]["note"] = whole
        self.folder.write_json("trace.json", trace)
        self.say({"kind": "summary", **summary})

    # Helpers ----------------------------------------------------------------------------------------------

    def _pools(self, now: float) -> dict[str, dict[str, float]]:
        """Seconds by pool and state since it was asked last."""
        changes, self._changes = self._changes, []
        return self.utilisation.pools(changes, now)

    def _lost(self) -> dict[str, int]:
        return {**{outcome: self.ledger.outcomes[outcome] for outcome in LOST[:-1]}, "retried": self.ledger.retried}

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

    def warn(self, text: str) -> None:
        """A warning of what goes on being so. It is said once: every rank may tell of it, or every checkpoint."""
        if text not in self._warned:
            self._warned.append(text)
            self.note(text, "warning")

    def note(self, text: str, level: str = "") -> None:
        """A line for the user, and for those who watch; the summary has the first warnings."""
        if level == "warning" and len(self.warnings) < MAX_WARNINGS and text not in self.warnings:
            self.warnings.append(text)
        self.folder.add_note(level, text)
        self.say({"kind": "note", **({"level": level} if level else {}), "text": text})

    def _status(self, now: float, after: float) -> None:
        """Say what the run and its pools are at, unless that was said less than `after` seconds ago."""
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
            if len(doing) > SHOWN:  # those that work come first
                doing.sort(key=lambda at: not isinstance(at, Firing))
            if doing:
                version = next((self.live[replica] for replica in reversed(replicas) if replica in self.live), None)
                pools[pool] = {"doing": [*map(str, doing[:SHOWN])], "version": version}
        self.say({**status, "pools": pools})


def _whole(count: Any) -> int:
    """A count of a row, which an older version may not have written."""
    return count if isinstance(count, int) else 0
