"""The report of a run while it goes on: drawn anew when its folder has more to say, and not too often.

One thread draws, so that no two drawings are at once; others read `snapshot`, which is replaced as a whole. A run's
machine is the run's: the drawing takes a tenth of one core at most.
"""

import os
import threading
import time
from dataclasses import replace
from typing import NamedTuple

from penstock.runtime.record.faults import RecordError
from penstock.runtime.record.folder import RunFolder, read_file
from penstock.runtime.record.metrics import METRICS_BYTES
from penstock.runtime.report.facts import read_facts
from penstock.runtime.report.page import page
from penstock.runtime.report.report import make_report
from penstock.runtime.report.schedule import render
from penstock.runtime.report.write import SIMULATING_S, time_limit

LEAST_S = 2.0
"""Seconds between two drawings, at least."""
REST = 9.0
"""Seconds of rest for each second of drawing."""
LOOK_S = 0.5
"""Seconds between two looks at the folder."""


class Snapshot(NamedTuple):
    """A page. `rows` and `bytes` are what metrics.jsonl and both records held when it was drawn; `ended`: the run is
    over, and no other page will come unless it is resumed."""

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
        self._mark: tuple[int, int, bool] | None = None
        self._next = 0.0

    def start(self) -> None:
        """Draw in a thread that ends with the process."""
        threading.Thread(target=self._run, name="drawing", daemon=True).start()

    def look(self, now: float) -> None:
        """Draw if there is news, and if it is time."""
        mark = self._sizes()
        if mark == self._mark or (now < self._next and not mark[2]):
            return
        began = time.monotonic()
        self.snapshot = Snapshot(self._draw(ended=mark[2]), self._rows(), mark[0] + mark[1], mark[2])
        self._mark = mark
        self._next = now + max(LEAST_S, REST * (time.monotonic() - began))

    def _run(self) -> None:
        while True:
            self.look(time.monotonic())
            time.sleep(LOOK_S)

    def _sizes(self) -> tuple[int, int, bool]:
        """Bytes of the records, and whether the run is over; which is asked first, so that nothing is missed."""
        ended = not self.folder.alive
        return _size(self.folder.events), _size(self.folder.metrics), ended

    def _rows(self) -> int:
        try:
            return read_file(self.folder.metrics, METRICS_BYTES).count(b"\n")
        except (OSError, RecordError):
            return 0

    def _draw(self, *, ended: bool) -> str:
        if not self.folder.config.exists():
            return self._waiting("The run has not begun: it has written nothing but its folder so far.")
        is_up = time_limit(SIMULATING_S)
        try:
            facts = read_facts(self.folder, alive=not ended)
            report = make_report(facts, lambda: not ended or is_up())
            if not ended and not facts.rows:
                report = replace(report, verdict="No update is done yet.")
            return page(report, "live.html.j2")
        except RecordError as error:
            return self._waiting(str(error))
        except Exception as error:  # ours; the next look may do better, and a thread that dies says nothing
            return self._waiting(f"The page could not be drawn: {type(error).__name__}: {error}")

    def _waiting(self, said: str) -> str:
        present = sorted(path.name for path in self.folder.path.glob("*"))
        return render("waiting.html.j2", folder=str(self.folder.path), said=said, present=present)


def _size(path: os.PathLike[str]) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
