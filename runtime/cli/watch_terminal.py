"""`penstock watch DIR --tui`: a run in progress in a terminal, by the display that the run itself has."""

import sys
from time import sleep

from rich.console import Console

from penstock.runtime.cli.display import Display, dashboard, open_display
from penstock.runtime.cli.launching import relative, summary_text
from penstock.runtime.cli.watched import Watched
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.record.faults import visible
from penstock.runtime.record.folder import RunFolder

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
