"""`penstock watch DIR`: a run in progress, as its report's page on this machine, or in the terminal."""

import importlib
import signal
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from penstock.runtime.cli.flags import read_flags
from penstock.runtime.cli.launching import relative
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cli.watched import watch_in_terminal
from penstock.runtime.record.errors import visible
from penstock.runtime.record.folder import RunFolder, absolute
from penstock.runtime.report.run_history import read_facts

DESCRIPTION = """Look at a run while it goes on, from its folder alone: the run does not notice.

The report's page renews itself, on 127.0.0.1 only; the address has a token, which is another one each time. With --tui,
in the terminal. A finished run can be looked at as well.

Examples:
  penstock watch runs/aipo-20250304-050607
  penstock watch runs/aipo-20250304-050607 --tui"""


@dataclass(frozen=True)
class WatchFlags:
    """Flags of watch"""

    dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The run folder."""
    port: Annotated[int, tyro.conf.arg(metavar="N", help_behavior_hint="(default: any free one)")] = 0
    """The port of the page."""
    open: bool = False
    """Open the page in the browser, too."""
    tui: bool = False
    """In the terminal instead of a page."""
    plain: bool = False
    """Plain lines in the terminal; implies --tui."""
    once: bool = False
    """One picture in the terminal, and no more; implies --tui."""


def main(argv: Sequence[str]) -> int:
    flags = read_flags(WatchFlags, "watch", argv, DESCRIPTION)
    if not 0 <= flags.port < 1 << 16:
        raise CommandError(f"--port: given {flags.port}, needed 0 (any free one) to 65535", 2)
    folder = RunFolder(absolute(flags.dir))
    if not folder.alive or folder.config.exists():
        RunFolder.open(flags.dir)
        if not folder.alive:
            read_facts(folder)  # what cannot be shown is better said here than on a page
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
    if flags.tui or flags.plain or flags.once:
        return watch_in_terminal(folder, plain=flags.plain, once=flags.once)
    server = importlib.import_module("penstock.runtime.cli.watch_server").PageServer(folder, flags.port)
    print(visible(f"watching {relative(folder.path)} (Ctrl-C ends it)\n{server.url}"), flush=True)
    if flags.open:
        webbrowser.open(server.url)
    server.serve()
    return 0
