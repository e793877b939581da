"""`penstock doctor`: what this machine has and lacks, and what follows from it."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

import tyro
from rich.console import Console
from rich.text import Text

from penstock.runtime.cli.checks import Finding, examine

DESCRIPTION = """Say what this machine has and lacks for running Penstock, and what follows from it.

Exit status 1 if something is lacking that a run needs.

Example:
  penstock doctor"""

MARKS = {"ok": ("✓", "green"), "note": ("·", "yellow"), "lack": ("✗", "bold red")}


@dataclass(frozen=True)
class DoctorFlags:
    """Flags of doctor"""

    json: bool = False
    """The findings as JSON."""


def main(argv: Sequence[str]) -> int:
    config = (tyro.conf.FlagCreatePairsOff,)
    flags = tyro.cli(DoctorFlags, prog="penstock doctor", description=DESCRIPTION, args=argv, config=config)
    findings = []
    console = Console()
    for finding in examine():
        findings.append(finding)
        if not flags.json:
            console.print(_line(finding), soft_wrap=True)
    lacks = sum(finding.verdict == "lack" for finding in findings)
    if flags.json:
        print(json.dumps({"ok": not lacks, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        console.print(
            f"\n{lacks} things are lacking." if lacks else "\nThis machine can run Penstock.", highlight=False
        )
    return 1 if lacks else 0


def _line(finding: Finding) -> Text:
    mark, style = MARKS[finding.verdict]
    line = Text.assemble((f" {mark} ", style), (f"{finding.name:<13}", "bold"), finding.found)
    return line.append(f"  → {finding.follows}", style=style) if finding.follows else line
