"""`penstock report DIR`: what a run folder says, as one HTML file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from penstock.runtime.cli.flags import read_flags
from penstock.runtime.record.errors import visible
from penstock.runtime.record.folder import RunFolder, absolute
from penstock.runtime.report.summary import figures
from penstock.runtime.report.write import REPORT, write_report

DESCRIPTION = """Draw a run: its graph and what bounds it, its schedule over the predicted one, where each rank's time
went, how stale the samples were, what it learnt, and what another lag or split would have made of it.

The page is one HTML file that loads nothing. A folder that is incomplete is drawn as far as it goes.

Examples:
  penstock report runs/aipo-20250304-050607
  penstock report runs/aipo-20250304-050607 --json"""


@dataclass(frozen=True)
class ReportFlags:
    """Flags of report"""

    dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The run folder."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: DIR/report.html)")] = ""
    """Where the page goes."""
    json: bool = False
    """Print the figures as JSON, and where the page is."""


def main(argv: Sequence[str]) -> int:
    flags = read_flags(ReportFlags, "report", argv, DESCRIPTION)
    folder = RunFolder.open(flags.dir)
    path = absolute(flags.out) if flags.out else folder.path / REPORT
    report = write_report(folder, path, alive=folder.alive)
    if flags.json:
        print(json.dumps({**figures(report), "report": str(path)}))
        return 0
    print(visible(report.verdict))
    for note in report.facts.notes:
        print(visible(f"note: {note}"))
    print(visible(f"report {path}"))
    return 0
