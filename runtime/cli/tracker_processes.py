"""The trackers of a run, seen from its command: a process for each, which follows the run folder by itself.

The command starts them, shows their messages, and waits for them at the end, for a limited time. A tracker never
changes how a run goes or ends: its first failure is reported with its name, on the display and, unless its client has
taken everything since, in the summary's `warnings`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from time import monotonic
from typing import IO, Any, Self

from penstock.host import module_command
from penstock.runtime.cli.display import Line
from penstock.runtime.record.checkpoints import latest_checkpoint
from penstock.runtime.record.errors import RecordError, visible
from penstock.runtime.record.folder import AppendFile, RunFolder
from penstock.runtime.record.metrics import keep_rows
from penstock.runtime.record.trackers import FOLDER, without_secrets
from penstock.runtime.record.typed_json import TrackerMemory

# Seconds after a run's end until trackers are killed, and until a message says that the command waits for them.
END_S, ALOUD_S = 60.0, 2.0
# How many bytes of a client's output are kept.
LOG_BYTES = 1 << 20
# Seconds for the last lines of a process that has ended: one of its children may still hold its pipe.
LAST_LINES_S = 0.5


class TrackerProcess:
    """One tracker of a run whose next update is `first`. `where`, `logged` and `closed` are its last report; until it
    has opened the run, `logged` is that of an earlier life. `warning` is the first failure that is not mended, ""
    for none; one that the client raised replaces that it is slow."""

    def __init__(self, name: str, folder: RunFolder, first: int, tell: Callable[[Line], None]) -> None:
        self.name, self._tell, self._lock = name, tell, Lock()
        self.where, self.logged, self.closed, self.warning = "", -1, False, ""
        with suppress(RecordError):  # a first life
            self.logged = folder.read_json(f"{FOLDER}/{name}.json", TrackerMemory)["logged"]
        self.ending, self._printed = False, ""
        # Of the warning: whether it is only that the client is slow. What was shown is not shown again.
        self._slow, self._shown = False, set[str]()
        self._log = AppendFile(folder.logs / f"tracker-{name}.log")
        # Clients leave temporary files there if they do not end in order.
        self._temporary = TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True)
        command = module_command("penstock.runtime.record.track_run", name, folder.path, str(first))
        # Its own session: Ctrl-C is meant for the run, whose last rows are still to come.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": self._temporary.name},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._threads = [
            Thread(target=self._hear, args=(self.process.stdout,), daemon=True),
            Thread(target=self._keep, args=(self.process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _hear(self, lines: IO[bytes]) -> None:
        for line in lines:
            said = json.loads(line)
            self.where, self.logged = said.get("where", self.where), said.get("logged", self.logged)
            self.closed = self.closed or "closed" in said
            if "note" in said:
                self._say({"level": "info", "text": f"{self.name}: {said['note']}"})
            if "slow" in said:
                self.warn(f"{said['slow']}{self._printed}", slow=True)
            if "failed" in said:
                self.warn(said["failed"])
            if "well" in said:
                self._withdraw()
        if not self.ending:
            status = self.process.wait()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            self.warn(f"its process ended by {how}; logs/tracker-{self.name}.log has what it printed")

    def _keep(self, output: IO[bytes]) -> None:
        """Write the output of clients to the log, without secrets."""
        left = LOG_BYTES
        for line in output:
            self._printed = f"; logs/tracker-{self.name}.log has what it printed"
            text = bytearray(without_secrets(line.decode(errors="replace")).encode()[:left])
            left -= len(text)
            with suppress(RecordError):  # a full disk: the run itself says so
                self._log.write(text)

    def warn(self, text: str, slow: bool = False) -> None:
        """Report a failure, if it is the first one; a client that was only `slow` so far may fail after that."""
        with self._lock:
            if self.warning and (slow or not self._slow):
                return
            self.warning, self._slow = f"{self.name}: {text}", slow
            # While the command waits for trackers, the run has ended.
            meanwhile = "" if self.ending else "; the run goes on"
            self._say_once("slow" if slow else "failed", "warning", f"{self.warning}{meanwhile}")

    def _withdraw(self) -> None:
        """Drop the warning: the client has what it lacked."""
        with self._lock:
            self.warning = ""
            self._say_once("well", "info", f"{self.name}: its client goes on, and has what it lacked")

    def _say_once(self, kind: str, level: str, text: str) -> None:
        if kind not in self._shown:
            self._shown.add(kind)
            self._say({"level": level, "text": text})

    def _say(self, note: Line) -> None:
        with suppress(OSError):  # the terminal is gone
            self._tell({"kind": "note", **note})

    def ask_to_end(self, report: Path | None) -> None:
        """Tell the tracker that the run is over, with its page `report`: it sends what is missing, and ends."""
        self.ending = True
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"report": str(report or "")}).encode() + b"\n")
            self.process.stdin.close()

    def end(self) -> None:
        """Kill the process if it is still alive, and read its last lines."""
        self.ending = True
        if self.process.poll() is None:
            # The whole group, with the client's processes.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for thread in self._threads:
            thread.join(LAST_LINES_S)
        self._temporary.cleanup()


class TrackerProcesses:
    """The trackers of one command. Leaving the context kills those that are alive; `end` gives them time first."""

    def __init__(self) -> None:
        self.trackers: list[TrackerProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for tracker in self.trackers:
            tracker.end()

    def start(self, folder: RunFolder, names: Sequence[str], tell: Callable[[Line], None]) -> None:
        """Start trackers for the run in `folder`, whose configuration is written already."""
        if not names:
            return
        # The controller also drops later rows, but perhaps only after a tracker has begun to read.
        saved = latest_checkpoint(folder)
        first = saved.update if saved else 0
        keep_rows(folder.metrics, first)
        self.trackers = [TrackerProcess(name, folder, first, tell) for name in dict.fromkeys(names)]

    def end(self, report: Path | None, updates: int, seconds: float) -> dict[str, Any]:
        """Give the trackers `seconds` to send what is missing and the `report`; Ctrl-C ends the wait. Returns by name
        where each tracked run is, and how many of the `updates` updates it has."""
        for tracker in self.trackers:
            tracker.ask_to_end(report)
        began = monotonic()
        why = f"did not end within {seconds:g} s after the run"
        try:
            if slow := self._wait(began + min(ALOUD_S, seconds)):
                aloud = f"waiting for {', '.join(slow)}, {seconds:g} s at most (Ctrl-C: no longer)"
                print(visible(f"penstock: {aloud}"), file=sys.stderr, flush=True)
                self._wait(began + seconds)
        except (KeyboardInterrupt, OSError):
            why = "was not waited for"
        found = {}
        for tracker in self.trackers:
            ended = tracker.process.poll() is not None
            tracker.end()
            has = f"it has {tracker.logged + 1} of {updates} updates"
            if not ended:
                tracker.warn(f"{why}; {has}")
            elif not tracker.closed:
                tracker.warn(f"did not take all of the run; {has}")
            found[tracker.name] = {
                "where": tracker.where,
                "updates": tracker.logged + 1,
                "complete": tracker.closed,
                "warning": tracker.warning,
            }
        return found

    def _wait(self, until: float) -> list[str]:
        """Wait until all have ended or the time is `until`. Returns the names of those that have not ended."""
        for tracker in self.trackers:
            with suppress(subprocess.TimeoutExpired):
                tracker.process.wait(max(0.0, until - monotonic()))
        return [tracker.name for tracker in self.trackers if tracker.process.poll() is None]
