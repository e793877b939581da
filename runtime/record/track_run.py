"""The process of one tracker: `python -m penstock.runtime.record.track_run NAME RUN_FOLDER UPDATE`.

A *life* of a run is the time from its start or a resume to its end; UPDATE is the first update of this life.

The process follows the run folder, so nothing in a run waits for it: its queue is `metrics.jsonl`, which is on the disk
and is read a piece at a time. An error of the client is reported once, and the step is tried again later; a report is
withdrawn when the client has taken everything. A client that crashes ends only this process. It runs at low priority,
so that the run has the machine.

- On stdout it tells the command what it must know, one JSON object a line: `{"where": …}`, `{"logged": update}`,
  `{"note": …}`, `{"slow": …}`, `{"failed": …}`, `{"well": true}` (it was slow or failed, and has now what it lacked),
  `{"closed": true}`. All that clients print goes to stderr.
- A line on stdin, `{"report": path or ""}`, says that the run is over and the folder is final. An end of stdin without
  this line says that the command was killed: the next life of the run sends what is missing then.

`RUN/trackers/NAME.json` keeps what the next life must know: the ids of the tracked run, and the last update that was
sent. Each update is sent once. An update that is repeated after a checkpoint is not sent again, since stores only
append. The files of TensorBoard and of W&B offline are written anew in each life.
"""

import io
import json
import os
import select
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from penstock.graph.ir import Graph
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder, make_folder, open_regular
from penstock.runtime.record.metrics import Row, scalars
from penstock.runtime.record.trackers import FOLDER, OPEN, TITLES, TrackedRun, Tracker, without_secrets
from penstock.runtime.record.typed_json import ConfigFile, Summary, TrackerMemory, parse_json

# Seconds between two looks at the folder.
LOOK_S = 0.5
# Seconds until a failed step is tried again: the first time, and at most. They double each time.
RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
# Seconds after which a client call that has not returned is reported.
SLOW_S = 30.0
# Seconds in which the process must end once the command was killed.
ORPHAN_S = 5.0
# How many bytes of metrics.jsonl are read at once, and the longest row in bytes.
PIECE, LONGEST_ROW = 1 << 20, 16 << 20
# Characters of a failure's text.
MAX_TEXT = 500
Tell = Callable[[dict[str, Any]], None]


class RowReader:
    """Reads the rows of a growing file, which a resume replaces by one that ends at its checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = 0
        self._at = 0

    def restart(self) -> None:
        """Begin again with the first row."""
        self._at = 0

    def unread(self) -> Iterator[list[Row]]:
        """Whole rows that were not read yet, a piece at a time. Raises RecordError for a damaged row, and OSError."""
        try:
            fd = open_regular(self.path, os.O_RDONLY)
        except FileNotFoundError:  # no update is done yet
            return
        with os.fdopen(fd, "rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._file:
                self._file, self._at = inode, 0
            file.seek(self._at)
            rest = b""
            while piece := file.read(PIECE):
                whole, line_end, rest = (rest + piece).rpartition(b"\n")
                if line_end:
                    yield [parse_json(line, str(self.path)) for line in whole.split(b"\n")]
                    self._at += len(whole) + 1
                elif len(rest) > LONGEST_ROW:
                    raise RecordError(f"{self.path}: given a row of more than {LONGEST_ROW} bytes")


class Follower:
    """Sends the rows of a run folder to a tracker. `first` is the first update of this life of the run, and `logged`
    the last update that was sent. The tracker is None until its client has opened it."""

    def __init__(self, name: str, folder: RunFolder, first: int, tell: Tell) -> None:
        self.name, self.folder, self.first, self.tell = name, folder, first, tell
        self.tracker: Tracker | None = None
        self.logged = -1
        self.busy_since: float | None = None
        self._rows = RowReader(folder.metrics)
        self._memory_name = f"{FOLDER}/{name}.json"
        self._memory = make_folder(folder.path / FOLDER) / f"{name}.json"
        self._began = 0.0
        self._retry_at, self._retry_s = 0.0, RETRY_S
        # What was told of the client and not withdrawn: "slow" or "failed"; and whether it stays told.
        self._trouble, self._stays = "", False
        self._lock = threading.RLock()

    def look(self, now: float) -> None:
        """Send new rows, unless a failure was a short time ago."""
        if now >= self._retry_at:
            self._try(self._catch_up)

    def finish(self, report: Path | None) -> bool:
        """Send all that the folder has, and close the tracker. True if both succeeded."""
        return self._try(self._catch_up) and self._try(lambda: self._close(report))

    def _try(self, step: Callable[[], None]) -> bool:
        try:
            with self._busy():
                step()
        except Exception as error:  # a client may raise anything
            self.fail(f"{type(error).__name__}: {error}")
            self._rows.restart()
            self._retry_at = monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            return False
        self._retry_s = RETRY_S
        with self._lock:
            if self._trouble and not self._stays:
                self._trouble = ""
                self.tell({"well": True})
        return True

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self.busy_since = monotonic()
        try:
            yield
        finally:
            self.busy_since = None

    def fail(self, text: str, kind: str = "failed", stays: bool = False) -> None:
        """Report a failure, if it is the first one since the client had everything; after "slow" the first that is not.
        One that `stays` is not withdrawn when the client goes on."""
        with self._lock:
            self._stays = self._stays or stays
            if self._trouble not in (kind, "failed"):
                self._trouble = kind
                line = " ".join(without_secrets(text).split())
                self.tell({kind: line if len(line) <= MAX_TEXT else f"{line[:MAX_TEXT]} …"})

    def check_slowness(self, now: float) -> None:
        """Report a client call that does not return. Called from another thread."""
        with self._lock:
            since = self.busy_since
            if since is not None and now - since > SLOW_S:
                self.fail(f"its client has not come back for {SLOW_S:.0f} s", "slow")

    def _catch_up(self) -> None:
        tracker = self.tracker or self._open()
        for rows in self._rows.unread():
            before = self.logged
            for row in rows:
                if row["update"] > self.logged:
                    self.busy_since = monotonic()
                    tracker.log(row["update"], dict(scalars(row)))
                    self.logged = row["update"]
            if self.logged != before:
                self._remember(tracker)

    def _open(self) -> Tracker:
        memory: dict[str, Any] = {}
        try:
            memory = self.folder.read_json(self._memory_name, TrackerMemory) if self._memory.exists() else {}
        except RecordError as error:  # most clients know themselves what their store has of a run
            self.tell({"note": f"{error}; it goes on as in a first life"})
        self._began = memory.get("began") or self._first_row_began()
        told = self.folder.read_json("config.json", ConfigFile)
        flags, asked = told["flags"], told.get("asked", {})
        graph = Graph.from_json(self.folder.read_json("graph.json")["graph"])
        config = {
            "program": asked.get("program", graph.name),
            "penstock": asked.get("penstock", ""),
            "graph": graph.digest(),
            **{f"flags/{name}": _plain(value) for name, value in flags.items() if not name.startswith("track")},
            **{f"options/{name}": _plain(value) for name, value in dict(graph.options).items()},
        }
        run = TrackedRun(
            folder=self.folder.path,
            id=told["run"],
            name=self.folder.path.name,
            project=flags["track_project"],
            config=config,
            kept=memory.get("kept", {}),
            logged=memory.get("logged", -1),
            began=self._began,
        )
        self.tracker = tracker = OPEN[self.name](run)
        self.logged = tracker.logged
        if memory and self.logged >= self.first:
            again = f"updates {self.first} to {self.logged} are done again after the checkpoint"
            text = f"{again}; {TITLES[self.name]} shows them as they were"
            self.tell({"note": text})
        self._remember(tracker)
        self.tell({"where": without_secrets(tracker.where)})
        return tracker

    def _first_row_began(self) -> float:
        """When the run began, by the newest row: as if it had been made just now, and without pauses between lives."""
        newest = [rows[-1] for rows in RowReader(self.folder.metrics).unread() if rows]
        return time() - float(newest[-1].get("time_s") or 0.0 if newest else 0.0)

    def _remember(self, tracker: Tracker) -> None:
        kept = {"kept": tracker.kept, "logged": self.logged, "began": self._began}
        self.folder.write_json(self._memory_name, kept)
        self.tell({"logged": self.logged})

    def _close(self, report: Path | None) -> None:
        assert self.tracker is not None
        try:
            summary = self.folder.read_json("summary.json", Summary)
        except RecordError:  # the command was killed
            summary = {"status": "failed"}
        stages = {"before": {}, "after": {}, **summary.get("evaluated", {})}
        accuracies = {f"accuracy_{stage}": summary.get(f"accuracy_{stage}") for stage in stages}
        others = {f"{name}_{stage}": value for stage, found in stages.items() for name, value in found.items()}
        figures = {name: float(value) for name, value in {**others, **accuracies}.items() if value is not None}
        self.tracker.close(summary["status"], max(self.logged, 0), figures, report)


def _plain(value: Any) -> Any:
    """A value of the config in a form that every client can show, without secrets."""
    if isinstance(value, bool | int | float):
        return value
    return without_secrets(value if isinstance(value, str) else json.dumps(value))


def main(name: str, path: str, first: str) -> int:
    os.nice(10)
    # Output of clients must not be taken for our own lines.
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # the process ends without a last flush

    def tell(line: dict[str, Any]) -> None:
        try:
            print(json.dumps(line), file=said, flush=True)
        except OSError:  # the command was killed: no process reads the line
            os._exit(1)

    follower = Follower(name, RunFolder(Path(path)), int(first), tell)
    show = warnings.showwarning

    def show_and_tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        show(message, category, *where, **more)
        # trackio does not raise when it cannot write: it warns.
        if category is UserWarning and "trackio" in str(message).lower():
            follower.fail(str(message), stays=True)

    warnings.showwarning = show_and_tell

    def watch() -> None:
        while True:
            sleep(LOOK_S)
            follower.check_slowness(monotonic())

    threading.Thread(target=watch, daemon=True).start()
    heard = b""
    while not heard.endswith(b"\n"):
        follower.look(monotonic())
        if select.select([0], [], [], LOOK_S)[0]:
            if not (more := os.read(0, 1 << 16)):
                threading.Timer(ORPHAN_S, os._exit, (1,)).start()
                break
            heard += more
    report = json.loads(heard)["report"] if heard.endswith(b"\n") else ""
    well = follower.finish(Path(report) if report else None)
    if well:
        tell({"closed": True})
    # Threads of a client may hang: end without them. Their work is done, or its failure reported.
    os._exit(0 if well else 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
