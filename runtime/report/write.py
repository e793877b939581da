"""The report as a file: by `penstock report`, at the end of a run, or redrawn while the run goes on.

`write_report` writes it once. `end_with_report` does so at the end of a run, and never raises: a report must not change
how a run ends. `Live` redraws a live run whenever its folder has more data. Only one thread draws; others read
`snapshot`, which is replaced as a whole. Drawing takes at most a tenth of one core: the machine belongs to the run.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder, write_atomic
from penstock.runtime.report.page import page, render
from penstock.runtime.report.run_history import read_facts
from penstock.runtime.report.summary import Report, make_report

REPORT = "report.html"
# Seconds after the first case of the what-if table after which no other case begins, if the user only waits for the
# report.
SIMULATING_S = 6.0
# The same at the end of a run: a share of the run's seconds between two limits.
SHARE_OF_RUN, LEAST_S, MOST_S = 0.05, 0.5, 3.0
# An event log of more bytes takes more than two seconds to read: too long for a user who has pressed Ctrl-C.
LARGE_LOG = 1 << 20


def write_report(
    folder: RunFolder, path: Path, limit_s: float = SIMULATING_S, choice: str = "--out FILE", *, alive: bool = False
) -> Report:
    """Write the report of the run in `folder` to `path`. Simulates for about `limit_s` seconds at most. `alive`: the
    run is still alive, which the page says. Raises RecordError for a folder that cannot be read, or a file that cannot
    be written; `choice` is the flag that names that file."""
    facts = read_facts(folder, alive=alive)
    if alive:
        facts.notes.insert(0, "The run is in progress; this is what it has written so far.")
    report = make_report(facts, time_limit(limit_s))
    write_atomic(path, page(report).encode(), choice)
    return report


def time_limit(seconds: float) -> Callable[[], bool]:
    """Return a function that is true once `seconds` have passed since its first call."""
    asked: list[float] = []

    def is_up() -> bool:
        asked.append(time.monotonic())
        return asked[-1] - asked[0] > seconds

    return is_up


def end_with_report(
    folder: RunFolder, wall_s: float, *, stopped: bool, in_haste: bool = False
) -> tuple[Path | None, str]:
    """Write the report of a run that has ended. Returns its path, or None and why there is none. Never raises.

    Ctrl-C ends the drawing. The report of a long run that was `stopped` is not drawn: its user waits. `in_haste`: a
    cluster manager is about to end this process, and nothing is drawn.
    """
    path = folder.path / REPORT
    try:
        if in_haste or (stopped and os.path.getsize(folder.events) > LARGE_LOG):
            path.unlink(missing_ok=True)  # an earlier life's would be taken for this one's
            return None, "not drawn: the run was preempted" if in_haste else "not drawn yet: the run is long"
        limit_s = LEAST_S if stopped else min(max(SHARE_OF_RUN * wall_s, LEAST_S), MOST_S)
        write_report(folder, path, limit_s, "--out DIR")
    except (RecordError, OSError) as error:
        return None, str(error)
    except KeyboardInterrupt:
        return None, "interrupted"
    except Exception as error:  # a bug of ours must not fail the run
        return None, f"{type(error).__name__}: {error}"
    return path, ""


# Seconds between two drawings, at least.
LEAST_BETWEEN_S = 2.0
# Seconds of rest for each second of drawing.
REST = 9.0
# Seconds between two looks at the folder.
LOOK_S = 0.5


class Snapshot(NamedTuple):
    """A page. `rows` is how many rows of metrics.jsonl it shows, and `bytes` the size of metrics.jsonl and events.log
    when it was drawn. `ended`: the run is over, and no other page follows unless it is resumed."""

    html: str
    rows: int
    bytes: int
    ended: bool

    @property
    def id(self) -> str:
        return f"{self.rows}-{self.bytes}-{'ended' if self.ended else 'going'}"


class Live:
    """Draws `folder` into `snapshot`."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.snapshot = Snapshot(self._waiting("The page is being drawn."), 0, 0, False)
        self._mark: tuple[int, bool] | None = None
        self._next = 0.0

    def start(self) -> None:
        """Draw in a thread that ends with the process."""
        threading.Thread(target=self._run, name="drawing", daemon=True).start()

    def look(self, now: float) -> None:
        """Draw if there is new data and the pause since the last drawing is over."""
        # Ask this before the sizes: then what the run writes in between is drawn again, not missed.
        ended = not self.folder.alive
        mark = _size(self.folder.events) + _size(self.folder.metrics), ended
        # The last page must not wait: nothing would trigger it later.
        if mark == self._mark or (now < self._next and not ended):
            return
        began = time.monotonic()
        html, rows = self._draw(ended=ended)
        self.snapshot = Snapshot(html, rows, *mark)
        self._mark = mark
        self._next = now + max(LEAST_BETWEEN_S, REST * (time.monotonic() - began))

    def _run(self) -> None:
        while True:
            self.look(time.monotonic())
            time.sleep(LOOK_S)

    def _draw(self, *, ended: bool) -> tuple[str, int]:
        """The page, and how many rows it shows."""
        if not self.folder.config.exists():
            return self._waiting("The run has not begun: it has written nothing but its folder so far."), 0
        is_up = time_limit(SIMULATING_S)
        try:
            facts = read_facts(self.folder, alive=not ended)
            # Nothing is simulated while the run is alive: the cores belong to it.
            report = make_report(facts, lambda: not ended or is_up())
            if not ended and not facts.rows:
                report = replace(report, verdict="No update is done yet.")
            return page(report, "live.html.j2"), len(facts.rows)
        except RecordError as error:
            return self._waiting(str(error)), 0
        except Exception as error:  # a bug of ours: the thread must not die silently, and the next look may succeed
            return self._waiting(f"The page could not be drawn: {type(error).__name__}: {error}"), 0

    def _waiting(self, said: str) -> str:
        present = sorted(path.name for path in self.folder.path.glob("*"))
        return render("waiting.html.j2", folder=str(self.folder.path), said=said, present=present)


def _size(path: Path) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
