"""A run's log through the scheduler again."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from penstock.runtime.control.messages import read_record, record_bytes
from penstock.runtime.record.event_log import StageLog, commands_digest, read_log
from penstock.runtime.schedule.events import Event
from penstock.runtime.schedule.replay import RecordedStep, Replayed, SegmentOrigin, replay_all


def replayed(folder: Path) -> list[Replayed]:
    """All stages of a run, over all its segments. Raises LogError or ReplayError."""
    segments = read_log(folder / "events.log")
    stages = [(SegmentOrigin.from_json(stage.facts), _steps(stage)) for segment in segments for stage in segment.stages]
    return replay_all(stages, lambda commands: commands_digest(map(record_bytes, commands)))


def _steps(stage: StageLog) -> Iterator[RecordedStep]:
    for step in stage.steps:
        yield RecordedStep(step.record, step.time, cast(Event, read_record(step.event)), step.digest)
