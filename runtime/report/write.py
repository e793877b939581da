"""The report into its file: asked for by a verb, or at the end of a run, which a report must never change."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from penstock.runtime.record.faults import RecordError
from penstock.runtime.record.folder import RunFolder, write_atomic
from penstock.runtime.report.facts import read_facts
from penstock.runtime.report.page import page
from penstock.runtime.report.report import Report, make_report

REPORT = "report.html"
SIMULATING_S = 6.0
"""Seconds from the first case of the what-if table after which no further one is begun, where the report is all that is
wanted."""
SHARE_OF_RUN, LEAST_S, MOST_S = 0.05, 0.5, 3.0
"""The same at the end of a run: a share of the run's seconds between two limits."""
LARGE_LOG = 3 << 20
"""Bytes of an event log that takes some seconds to read: more than somebody has who has pressed Ctrl-C."""


def write_report(
    folder: RunFolder, path: Path, limit_s: float = SIMULATING_S, choice: str = "--out FILE", *, alive: bool = False
) -> Report:
    """Raises RecordError for a folder that cannot be read, or a file that cannot be written; `choice` is the flag that
    names it. `alive`: the run goes on, which the page says."""
    facts = read_facts(folder, alive=alive)
    if alive:
        facts.notes.insert(0, "The run goes on: what it has written so far is shown.")
    report = make_report(facts, time_limit(limit_s))
    write_atomic(path, page(report).encode(), choice)
    return report


def time_limit(seconds: float) -> Callable[[], bool]:
    """Is the time up? It begins when that is asked for the first time."""
    asked: list[float] = []

    def is_up() -> bool:
        asked.append(time.monotonic())
        return asked[-1] - asked[0] > seconds

    return is_up


def end_with_report(folder: RunFolder, wall_s: float, *, stopped: bool) -> tuple[Path | None, str]:
    """The report of a run that has ended, or why there is none. Never raises: what a run has learnt matters more. A
    signal ends the drawing, and so does the size of the log of a run that was `stopped`: somebody waits."""
    path = folder.path / REPORT
    try:
        if stopped and os.path.getsize(folder.events) > LARGE_LOG:
            return None, "not drawn yet: the run is long"
        limit_s = LEAST_S if stopped else min(max(SHARE_OF_RUN * wall_s, LEAST_S), MOST_S)
        write_report(folder, path, limit_s, "--out DIR")
    except (RecordError, OSError) as error:
        return None, str(error)
    except KeyboardInterrupt:
        return None, "interrupted"
    except Exception as error:  # ours, and no reason for a run to fail
        return None, f"{type(error).__name__}: {error}"
    return path, ""
