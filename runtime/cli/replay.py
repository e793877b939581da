"""`penstock replay DIR`: a run's recorded events through the scheduler again; every command must come out the same."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import tyro

from penstock.runtime.cli.flags import read_flags
from penstock.runtime.control.messages import read_record, record_bytes
from penstock.runtime.record.errors import visible
from penstock.runtime.record.event_log import Segment, StageLog, commands_digest, read_log
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.typed_json import Summary
from penstock.runtime.schedule.events import Event
from penstock.runtime.schedule.replay import RecordedStep, Replayed, ReplayError, SegmentOrigin, replay_all

DESCRIPTION = """Check a run's record: feed its events to the scheduler again and compare every decision.

The event log is a chain of hashes: one that was edited or reordered is refused, with the record's number; so is one
that was cut, where the run lived to count its records in summary.json. After a crash the log may just end: that is
said.

Example:
  penstock replay runs/aipo-20250304-050607"""


@dataclass(frozen=True)
class ReplayFlags:
    """Flags of replay"""

    dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The run folder."""
    json: bool = False
    """The result as JSON."""


def main(argv: Sequence[str]) -> int:
    flags = read_flags(ReplayFlags, "replay", argv, DESCRIPTION)
    folder = RunFolder.open(flags.dir)
    segments = read_log(folder.events, _counted(folder))
    try:
        stages = [
            (SegmentOrigin.from_json(stage.facts), _steps(stage)) for segment in segments for stage in segment.stages
        ]
        replayed = replay_all(stages, lambda commands: commands_digest(map(record_bytes, commands)))
    except ValueError as error:
        raise ReplayError(f"{folder.events}: {error}") from None
    if flags.json:
        print(json.dumps({"run": str(folder.path), "equal": True, "stages": [_facts(stage) for stage in replayed]}))
    else:
        print(visible(_text(replayed, segments)))
    return 0


def _counted(folder: RunFolder) -> int:
    """The records that the log had when the run ended; 0 where it was killed before it could count them."""
    path = folder.path / "summary.json"
    return int(folder.read_json(path.name, Summary).get("records", 0)) if path.exists() else 0


def _steps(stage: StageLog) -> Iterator[RecordedStep]:
    for step in stage.steps:
        yield RecordedStep(step.record, step.time, cast(Event, read_record(step.event)), step.digest)


def _facts(stage: Replayed) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "events": stage.events,
        "commands": stage.commands,
        "updates": stage.updates,
        "fates": stage.outcomes,
        "status": stage.finish.status if stage.finish else None,
    }


def _text(replayed: Sequence[Replayed], segments: Sequence[Segment]) -> str:
    lines = [f"{'stage':<10}{'events':>9}{'commands':>10}{'updates':>9}  groups"]
    for stage in replayed:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in stage.outcomes.items() if count) or "-"
        lines.append(f"{stage.stage:<10}{stage.events:>9}{stage.commands:>10}{stage.updates:>9}  {outcomes}")
    for number, segment in enumerate(segments):
        if segment.ended is None:
            lines.append(f"part {number + 1} of the log has no end: its process was killed")
    commands = sum(stage.commands for stage in replayed)
    return "\n".join([*lines, f"Equal: all {commands} commands are the ones that were recorded."])
