"""What a run folder says of a run, as the lines that its controller would say: for the same display.

The event log has events without what was decided; so they go through the scheduler again, each once, and what it
commands says what each pool is at.

`penstock watch DIR --tui`: a run in progress in a terminal, by the display that the run itself has.
"""

import sys
from collections.abc import Iterator
from time import sleep
from typing import Any, cast

from rich.console import Console

from penstock.graph.ir import Firing
from penstock.runtime.cli.display import Display, Line, dashboard, open_display
from penstock.runtime.cli.launching import relative, summary_text
from penstock.runtime.control.messages import read_record
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.record.errors import RecordError, visible
from penstock.runtime.record.event_log import EndRecord, Mark, Record, SegmentRecord, StageRecord, new_records
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import read_rows
from penstock.runtime.record.typed_json import Summary
from penstock.runtime.report.follow import Follow, streams
from penstock.runtime.schedule.events import Event, Swapped
from penstock.runtime.schedule.idle_causes import cause
from penstock.runtime.schedule.replay import SegmentOrigin
from penstock.runtime.schedule.scheduler import Scheduler


class Watched:
    """`lines` are those since it was asked last. `seconds` is how long the run has been going on, and `ended` how its
    last life ended, by its log; None of one that goes on or was killed."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.stage = ""
        self.ended: Line | None = None
        self._mark: Mark | None = None
        self._broken = False
        self._scheduler: Scheduler | None = None
        self._follow: Follow | None = None
        self._live: dict[str, int] = {}
        self._known: dict[str, float | None] = {}
        self._rows = 0
        self._before, self._now = 0.0, 0.0

    @property
    def seconds(self) -> float:
        return self._before + self._now

    def lines(self) -> Iterator[Line]:
        yield from self._followed()
        yield from self._new_rows()
        yield {"kind": "status", "stage": self.stage, "accuracy": self._accuracy(), "pools": self._pools()}

    def summary(self) -> Line | None:
        """How the run ended; None where nothing was left to say it."""
        try:
            found: Line = self.folder.read_json("summary.json", Summary)
        except RecordError:
            return None
        return found

    def _new_rows(self) -> Iterator[Line]:
        rows = read_rows(self.folder.metrics)
        self._rows = min(self._rows, len(rows))  # a resume drops those that it does again
        for row in rows[self._rows :]:
            yield {"kind": "row", "row": row}
        self._rows = len(rows)

    def _accuracy(self) -> dict[str, float | None]:
        """As the log's last stage says, or the summary."""
        end = self.summary() or {}
        return self._known | {
            when: end[name] for when in ("before", "after") if end.get(name := f"accuracy_{when}") is not None
        }

    # The event log ----------------------------------------------------------------------------------------

    def _followed(self) -> Iterator[Line]:
        if self._broken or not self.folder.events.exists() or not self.folder.events.stat().st_size:
            return
        try:
            for record, mark in new_records(self.folder.events, self._mark):
                self._mark = mark
                self._take(record)
        except ValueError as error:
            self._broken = True
            self._follow = None
            yield {"kind": "note", "text": f"what the pools do cannot be followed: {error}"}

    def _take(self, record: Record) -> None:
        if isinstance(record, SegmentRecord):
            self._before, self._now, self.ended = self.seconds, 0.0, None
        elif isinstance(record, StageRecord):
            origin = SegmentOrigin.from_json(record.facts)
            self.stage, self._scheduler = origin.stage, origin.scheduler()
            self._known |= record.facts.get("accuracy", {})
            self._follow = Follow(self._scheduler.tables, streams(origin.graph), origin.live)
        elif isinstance(record, EndRecord):
            self.ended = {**record.facts}
        elif self._scheduler is not None:
            self._now = record.time
            self._step(self._scheduler, cast(Event, read_record(record.event)))

    def _step(self, scheduler: Scheduler, event: Event) -> None:
        assert self._follow is not None
        if isinstance(event, Swapped):
            self._live[event.replica] = event.version
        self._follow.step(0, event, scheduler.handle(event))
        self._follow.forget()

    def _pools(self) -> dict[str, Any]:
        pools: dict[str, Any] = {}
        if self._scheduler is None or self._follow is None:
            return pools
        doing = {w.lane: str(Firing(w.name, w.index, w.turn)) for w in self._follow.firings if w.rank == 0}
        for replica, pool_name in self._scheduler.tables.pool_of.items():
            pool = pools.setdefault(pool_name, {"doing": [], "version": None})
            pool["doing"].append(doing.get(replica) or cause(self._scheduler, replica))
            pool["version"] = self._live.get(replica, pool["version"])
        return pools


LOOK_S = 0.5
"""Seconds between two looks at the folder."""


def watch_in_terminal(folder: RunFolder, *, plain: bool, once: bool) -> int:
    """Until the run has ended, or one picture. The exit status is that of the watching, however the run ended."""
    _wait_for_config(folder)
    config, watched = RunConfig.load(folder), Watched(folder)
    name, updates = config.graph.name, config.flags.updates
    alive = folder.alive
    known = list(watched.lines())
    display = open_display(name, updates, relative(folder.path), plain=plain or once, seconds=watched.seconds)
    newest = max((place for place, line in enumerate(known) if line["kind"] == "row"), default=len(known) - 1)
    for line in known[:newest]:
        display.progress.hear(line)
    if once and not plain:
        for line in known[newest:]:
            display.progress.hear(line)
        _end(display, watched, alive)
        console = Console()
        console.print(dashboard(display.progress, relative(folder.path), console.width, watched.seconds))
        return 0
    with display:
        display.progress.stage = watched.stage
        for line in known[newest:]:
            display.tell(line)
        while alive and not once:
            sleep(LOOK_S)
            alive = folder.alive
            for line in watched.lines():
                display.tell(line)
        _end(display, watched, alive)
    _tell_end(folder, display, watched, updates, alive)
    return 0


def _wait_for_config(folder: RunFolder) -> None:
    if not folder.config.exists():
        print("the run has not begun yet; waiting for it …", file=sys.stderr, flush=True)
    while not folder.config.exists():
        sleep(LOOK_S)
        if not folder.alive:
            RunFolder.open(folder.path)


def _end(display: Display, watched: Watched, alive: bool) -> None:
    if alive:
        return
    killed = {"status": "failed", "error": "the run has no end: it was killed"}
    display.tell({"kind": "summary", **(watched.summary() or watched.ended or killed)})


def _tell_end(folder: RunFolder, display: Display, watched: Watched, updates: int, alive: bool) -> None:
    if alive:
        return
    for error in display.progress.errors:
        print(visible(f"penstock watch: {error}"), file=sys.stderr)
    summary = watched.summary()
    if summary is not None and "command_s" in summary:
        print(visible(summary_text(summary, updates, relative(folder.path))))
