"""`penstock watch DIR`: a run in progress, as its report's page on this machine, or in the terminal.

The terminal shows the same display as the run itself. `Watched` makes the lines for it from the run folder. The event
log has events without commands, so each event goes through a scheduler once more, and its commands give the state of
each pool.
"""

import importlib
import signal
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import sleep
from typing import Annotated, Any, cast

import tyro
from msgspec import Meta
from rich.console import Console

from penstock.graph.ir import Firing
from penstock.runtime.cli.display import Line, dashboard, open_display
from penstock.runtime.cli.flags import FolderFlags, read_flags
from penstock.runtime.cli.launching import going_on, relative, summary_text
from penstock.runtime.control.messages import read_record
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.record.errors import RecordError, visible
from penstock.runtime.record.event_log import EndRecord, Mark, Record, SegmentRecord, StageRecord, new_records
from penstock.runtime.record.folder import RunFolder, absolute
from penstock.runtime.record.metrics import HalfRow, read_undamaged
from penstock.runtime.record.typed_json import Summary
from penstock.runtime.report.follow import Follow, streams
from penstock.runtime.report.run_history import read_facts
from penstock.runtime.schedule.events import Event, Swapped
from penstock.runtime.schedule.idle_causes import cause
from penstock.runtime.schedule.replay import SegmentOrigin
from penstock.runtime.schedule.scheduler import Scheduler

# Seconds between two looks at the folder.
LOOK_S = 0.5
Port = Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]


@dataclass(frozen=True)
class WatchFlags(FolderFlags):
    """Watch a live run. Only its folder is read: the run is not affected.

    Shows the report as a page that updates itself, on 127.0.0.1 only. Its address has a token, a new one each time.
    With --tui, shows the run in the terminal. A finished run can be shown as well.

    Examples:
      penstock watch runs/aipo-20250304-050607
      penstock watch runs/aipo-20250304-050607 --tui"""

    port: Annotated[Port, tyro.conf.arg(metavar="N", help_behavior_hint="(default: any free one)")] = 0
    """The port of the page."""
    open: bool = False
    """Also open the page in a browser."""
    tui: bool = False
    """Show the run in the terminal instead of a page."""
    plain: bool = False
    """Print plain lines; implies --tui."""
    once: bool = False
    """Print one picture and end; implies --tui."""


def main(argv: Sequence[str]) -> int:
    flags = read_flags(WatchFlags, "watch", argv)
    folder = RunFolder(absolute(flags.dir))
    # A starting run has locked its folder, and writes its configuration once its base model is built.
    if not folder.alive or folder.config.exists():
        RunFolder.open(flags.dir)
        if not folder.alive:
            read_facts(folder)  # raise here for a folder that cannot be shown, rather than on a page
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets background processes ignore it
    if flags.tui or flags.plain or flags.once:
        return watch_in_terminal(folder, plain=flags.plain, once=flags.once)
    # Imported late: pages need templates, which the terminal does not.
    server = importlib.import_module("penstock.runtime.cli.watch_server").PageServer(folder, flags.port)
    print(visible(f"watching {relative(folder.path)} (Ctrl-C ends it)\n{server.url}"), flush=True)
    if flags.open:
        webbrowser.open(server.url)
    server.serve()
    return 0


def watch_in_terminal(folder: RunFolder, *, plain: bool, once: bool) -> int:
    """Show the run until it has ended, or one picture. The exit status does not depend on how the run ended."""
    if not folder.config.exists():
        print("the run has not begun yet; waiting for it …", file=sys.stderr, flush=True)
    while not folder.config.exists():
        sleep(LOOK_S)
        if not folder.alive:
            RunFolder.open(folder.path)
    config, watched = RunConfig.load(folder), Watched(folder)
    updates, shown = config.flags.updates, relative(folder.path)
    # Ask this before the folder is read: then the last writes of the run are read in another round, not missed.
    alive = folder.alive
    known = list(watched.lines())
    display = open_display(config.graph.name, updates, shown, plain=plain or once, seconds=watched.seconds)
    # Earlier lines are only added up: plain lines begin with the newest row.
    newest = max((place for place, line in enumerate(known) if line["kind"] == "row"), default=len(known) - 1)
    # Else the terminal would scroll through thousands of lines.
    for line in known[:newest]:
        display.progress.hear(line)
    picture = once and not plain
    tell = display.progress.hear if picture else display.tell
    with nullcontext() if picture else display:
        display.progress.stage = watched.stage
        for line in known[newest:]:
            tell(line)
        while alive and not once:
            sleep(LOOK_S)
            alive = folder.alive
            for line in watched.lines():
                tell(line)
        if not alive:
            killed = {"status": "failed", "error": "the run has no end: it was killed"}
            tell({"kind": "summary", **(watched.summary() or watched.ended or killed)})
    if picture:
        console = Console()
        console.print(dashboard(display.progress, shown, console.width, watched.seconds))
    how = "the run was stopped: " if display.progress.stage == "stopped" else ""
    for error in () if alive else display.progress.errors:
        print(visible(f"penstock watch: {how}{error}"), file=sys.stderr)
    if not (picture or alive):
        summary = watched.summary()
        if summary is not None and "command_s" in summary:
            print(visible(summary_text(summary, updates, shown, command=going_on(folder))))
    return 0


class Watched:
    """Makes the lines that a run's controller would send from its folder.

    `lines` returns those since the last call. `seconds` is how long the run has been going on. `ended` is how its last
    life ended according to the log; None if it goes on or was killed.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.stage = ""
        self.ended: Line | None = None
        self._mark: Mark | None = None
        self._broken = self._damaged = False  # the log, and metrics.jsonl
        self._scheduler: Scheduler | None = None
        self._follow: Follow | None = None
        self._live: dict[str, int] = {}
        self._known: dict[str, float | None] = {}
        self._rows = 0
        self._noted = 0  # bytes of the notes that have been read
        self._before, self._now = 0.0, 0.0

    @property
    def seconds(self) -> float:
        return self._before + self._now

    def lines(self) -> Iterator[Line]:
        if not self._broken and self.folder.events.exists() and self.folder.events.stat().st_size:
            try:
                for record, mark in new_records(self.folder.events, self._mark):
                    self._mark = mark
                    self._take(record)
            # Metrics can be shown without the log, and the run itself may be all right.
            except ValueError as error:
                self._broken, self._follow = True, None
                yield {"kind": "note", "text": f"what the pools do cannot be followed: {error}"}
        notes, self._noted = self.folder.read_notes(self._noted)
        yield from ({"kind": "note", **note} for note in notes)
        rows, damage = read_undamaged(self.folder.metrics)
        # A resume drops the rows of updates that it repeats.
        self._rows = min(self._rows, len(rows))
        yield from ({"kind": "row", "row": row} for row in rows[self._rows :])
        self._rows = len(rows)
        # A run that is alive may be writing its last row.
        if damage is not None and not isinstance(damage, HalfRow) and not self._damaged:
            self._damaged = True
            yield {"kind": "note", "text": f"metrics.jsonl is damaged; what comes before the damage is shown. {damage}"}
        end = self.summary() or {}
        ends = {when: end.get(f"accuracy_{when}") for when in ("before", "after")}
        accuracy = self._known | {when: value for when, value in ends.items() if value is not None}
        yield {"kind": "status", "stage": self.stage, "accuracy": accuracy, "pools": self._pools()}

    def summary(self) -> Line | None:
        """The run's summary; None if it was killed and has none."""
        try:
            found: Line = self.folder.read_json("summary.json", Summary)
        except RecordError:
            return None
        return found

    def _take(self, record: Record) -> None:
        """Process a record of the event log. Raises ValueError for one that does not fit."""
        if isinstance(record, SegmentRecord):
            self._before, self._now, self.ended = self.seconds, 0.0, None
        elif isinstance(record, StageRecord):
            origin = SegmentOrigin.from_json(record.facts)
            self.stage, self._scheduler = origin.stage, origin.scheduler()
            self._known |= record.facts.get("accuracy", {})
            self._follow = Follow(self._scheduler.tables, streams(origin.graph), origin.live)
        elif isinstance(record, EndRecord):
            self.ended = {**record.facts}
        elif self._scheduler is not None and self._follow is not None:
            self._now, event = record.time, cast(Event, read_record(record.event))
            if isinstance(event, Swapped):
                self._live[event.replica] = event.version
            self._follow.step(0, event, self._scheduler.handle(event))
            # Only work in progress is shown; finished work would grow with the run.
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
