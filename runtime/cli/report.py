"""`penstock report DIR` and `penstock replay DIR`: draw a run folder as a page, and check its event log."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from penstock.runtime.cli.flags import FolderFlags, OutputFlags, read_flags
from penstock.runtime.control.messages import read_record, record_bytes
from penstock.runtime.record.errors import visible
from penstock.runtime.record.event_log import StageLog, Step, commands_digest, read_log
from penstock.runtime.record.folder import RunFolder, absolute
from penstock.runtime.record.typed_json import Summary
from penstock.runtime.report.summary import figures
from penstock.runtime.report.write import REPORT, write_report
from penstock.runtime.schedule.replay import ReplayError, SegmentOrigin
from penstock.runtime.schedule.replay import replay as replay_stages


@dataclass(frozen=True)
class ReportFlags(OutputFlags, FolderFlags):
    """Draw a run as a page: its graph and what bounds it, its schedule and the predicted one, the time of each
    rank by cause, the staleness of samples, learning curves, and the gain by another lag or more generators.

    The page is one HTML file that loads nothing. An incomplete folder is drawn as far as possible.

    Examples:
      penstock report runs/aipo-20250304-050607
      penstock report runs/aipo-20250304-050607 --json"""

    out: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: DIR/report.html)")] = ""
    """The page to write."""


def main(argv: Sequence[str]) -> int:
    flags = read_flags(ReportFlags, "report", argv)
    folder = RunFolder.open(flags.dir)
    path = absolute(flags.out) if flags.out else folder.path / REPORT
    report = write_report(folder, path, alive=folder.alive)
    if flags.json:
        print(json.dumps({**figures(report), "report": str(path)}))
    else:
        error, how = report.facts.error, "was stopped" if report.facts.was_stopped else "failed"
        why = [f"The run {how}: {error}"] if error else []
        notes = [f"note: {note}" for note in report.facts.notes]
        print(visible("\n".join([*why, report.verdict, *notes, f"report {path}"])))
    return 0


@dataclass(frozen=True)
class ReplayFlags(OutputFlags, FolderFlags):
    """Check a run's event log: feed its events to the scheduler again and compare every decision.

    The event log is a chain of hashes. An edited or reordered log is refused, with the record's number. A log that was
    cut is refused, too, if the run counted its records in summary.json. After a crash a log may end anywhere; this is
    reported.

    Example:
      penstock replay runs/aipo-20250304-050607"""


def replay(argv: Sequence[str]) -> int:
    flags = read_flags(ReplayFlags, "replay", argv)
    folder = RunFolder.open(flags.dir)
    path = folder.path / "summary.json"
    # A killed run has not counted its records: its log may end anywhere.
    counted = folder.read_json(path.name, Summary).get("records", 0) if path.exists() else 0
    segments = read_log(folder.events, int(counted))
    logs = [log for segment in segments for log in segment.stages]
    try:
        stages = [(SegmentOrigin.from_json(log.facts), recorded_steps(log)) for log in logs]
        replayed = replay_stages(stages, lambda commands: commands_digest(map(record_bytes, commands)))
    except ValueError as error:
        raise ReplayError(f"{folder.events}: {error}") from None
    if flags.json:
        facts = [
            {
                **{name: getattr(stage, name) for name in ("stage", "events", "commands", "updates")},
                "fates": stage.outcomes,
                "status": stage.finish and stage.finish.status,
            }
            for stage in replayed
        ]
        print(json.dumps({"run": str(folder.path), "equal": True, "stages": facts}))
        return 0
    lines = [f"{'stage':<10}{'events':>9}{'commands':>10}{'updates':>9}  groups"]
    for stage in replayed:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in stage.outcomes.items() if count) or "-"
        lines.append(f"{stage.stage:<10}{stage.events:>9}{stage.commands:>10}{stage.updates:>9}  {outcomes}")
    for number, segment in enumerate(segments):
        if segment.ended is None:
            lines.append(f"part {number + 1} of the log has no end: its process was killed")
    commands = sum(stage.commands for stage in replayed)
    lines.append(f"Equal: all {commands} commands are the ones that were recorded.")
    print(visible("\n".join(lines)))
    return 0


def recorded_steps(log: StageLog) -> Iterator[Step]:
    """The steps of a stage with decoded events, for a replay."""
    return (step._replace(event=read_record(step.event)) for step in log.steps)
