"""The process of one tracker: `python -m penstock.runtime.record.track_run NAME RUN_FOLDER UPDATE`.

UPDATE is the first one of this life of the run.

It follows the run folder, so nothing of a run waits for it: `metrics.jsonl` is its queue, which lies on the disk and is
read a piece at a time. Whatever its client raises is told once, and tried again later; whatever a client does to the
process ends this process alone. It runs at low priority: the machine belongs to the run.

- On stdout it says what the command has to know, one JSON object a line: `{"where": …}`, `{"logged": update}`,
  `{"note": …}`, `{"failed": …}`, `{"closed": true}`. All that clients print goes to stderr.
- A line on stdin, `{"report": path or ""}`, says that the run is over and what the folder has is final. An end of stdin
  without one says that the command was killed: the next life of the run goes on with what is missing here.

`RUN/trackers/NAME.json` keeps what the next life has to know: the ids of the tracked run, and the last update that was
handed over. An update is handed over once: those that are done again after a checkpoint are not, since stores only
append. TensorBoard's files are written anew in each life.
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
from time import monotonic, sleep
from typing import Any

from penstock.graph.ir import Graph
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder, make_folder, open_regular
from penstock.runtime.record.metrics import Row, scalars
from penstock.runtime.record.trackers import FOLDER, OPEN, TITLES, TrackedRun, Tracker, without_secrets
from penstock.runtime.record.typed_json import ConfigFile, Summary, TrackerMemory, parse_json

# Seconds between two looks at the folder.
LOOK_S = 0.5
# Seconds until what failed is tried again, at first and at most: each time twice as long.
RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
# Seconds after which a client that does not come back is told of.
SLOW_S = 30.0
# Seconds to end in once the command was killed.
ORPHAN_S = 5.0
# Bytes of metrics.jsonl that are read at once, and of the longest row.
PIECE, LONGEST_ROW = 1 << 20, 16 << 20
# Characters of a failure's text.
MAX_TEXT = 500
Tell = Callable[[dict[str, Any]], None]


class RowReader:
    """The rows of a file that grows, and that a resume replaces by one that ends at its checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = 0
        self._at = 0

    def restart(self) -> None:
        """The first row is the next one again."""
        self._at = 0

    def unread(self) -> Iterator[list[Row]]:
        """Whole rows that were not read yet, a piece at a time. Raises RecordError for what is no row, and OSError."""
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
    """Hands the rows of a run folder over to a tracker. `first` is the first update of this life of the run, and
    `logged` the last one that was handed over; the tracker is None until its client has opened it."""

    def __init__(self, name: str, folder: RunFolder, first: int, tell: Tell) -> None:
        self.name, self.folder, self.first, self.tell = name, folder, first, tell
        self.tracker: Tracker | None = None
        self.logged = -1
        self.failed = False
        self.busy_since: float | None = None
        self._rows = RowReader(folder.metrics)
        self._memory_name = f"{FOLDER}/{name}.json"
        self._memory = make_folder(folder.path / FOLDER) / f"{name}.json"
        self._retry_at, self._retry_s = 0.0, RETRY_S

    def look(self, now: float) -> None:
        """Hand over what is new, unless a failure was a short time ago."""
        if now >= self._retry_at:
            self._try(self._catch_up)

    def finish(self, report: Path | None) -> bool:
        """Hand over all that the folder has. Returns whether that went well."""
        return self._try(self._catch_up) and self._try(lambda: self._close(report))

    def _try(self, step: Callable[[], None]) -> bool:
        try:
            with self._busy():
                step()
        except Exception as error:  # a client's, which may be any
            self.fail(f"{type(error).__name__}: {error}")
            self._rows.restart()
            self._retry_at = monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            return False
        self._retry_s = RETRY_S
        return True

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self.busy_since = monotonic()
        try:
            yield
        finally:
            self.busy_since = None

    def fail(self, text: str) -> None:
        """Tell of a failure, if it is the first one."""
        if not self.failed:
            self.failed = True
            line = " ".join(without_secrets(text).split())
            self.tell({"failed": line if len(line) <= MAX_TEXT else f"{line[:MAX_TEXT]} …"})

    def _catch_up(self) -> None:
        tracker = self.tracker or self._open()
        for rows in self._rows.unread():
            before = self.logged
            for row in rows:
                if row["update"] > self.logged:
                    tracker.log(row["update"], dict(scalars(row)))
                    self.logged = row["update"]
            if self.logged != before:
                self._remember(tracker)

    def _open(self) -> Tracker:
        memory: dict[str, Any] = {}
        try:
            memory = self.folder.read_json(self._memory_name, TrackerMemory) if self._memory.exists() else {}
        except RecordError as error:  # most clients know by themselves what they have of a run
            self.tell({"note": f"{error}; it goes on as in a first life"})
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

    def _remember(self, tracker: Tracker) -> None:
        kept = {"kept": tracker.kept, "logged": self.logged}
        self.folder.write_json(self._memory_name, kept)
        self.tell({"logged": self.logged})

    def _close(self, report: Path | None) -> None:
        assert self.tracker is not None
        try:
            summary = self.folder.read_json("summary.json", Summary)
        except RecordError:  # the command was killed
            summary = {"status": "failed"}
        names = ("accuracy_before", "accuracy_after")
        figures = {name: float(summary[name]) for name in names if summary.get(name) is not None}
        self.tracker.close(summary["status"], max(self.logged, 0), figures, report)


def _plain(value: Any) -> Any:
    """A value of the config as every client shows it, without secrets."""
    if isinstance(value, bool | int | float):
        return value
    return without_secrets(value if isinstance(value, str) else json.dumps(value))


def tell_slowness(follower: Follower) -> None:
    """For a thread: tell of a client that does not come back."""
    while not follower.failed:
        sleep(LOOK_S)
        since = follower.busy_since
        if since is not None and monotonic() - since > SLOW_S:
            follower.fail(f"its client has not come back for {SLOW_S:.0f} s")


def main(name: str, path: str, first: str) -> int:
    os.nice(10)
    # What clients print must not be taken for lines of ours.
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # the process ends without a last flush

    def tell(line: dict[str, Any]) -> None:
        try:
            print(json.dumps(line), file=said, flush=True)
        except OSError:  # the command was killed, and nobody hears it
            os._exit(1)

    follower = Follower(name, RunFolder(Path(path)), int(first), tell)
    show = warnings.showwarning

    def show_and_tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        show(message, category, *where, **more)
        # trackio raises nothing: what it could not write it warns of.
        if category is UserWarning and "trackio" in str(message).lower():
            follower.fail(str(message))

    warnings.showwarning = show_and_tell
    threading.Thread(target=tell_slowness, args=(follower,), daemon=True).start()
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
    # Threads of a client may hang; what they had to do is done, or told.
    os._exit(0 if well else 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
