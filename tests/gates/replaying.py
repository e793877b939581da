"""A run's log through the scheduler again."""

from pathlib import Path

from penstock.runtime.cli.report import recorded_steps
from penstock.runtime.control.messages import record_bytes
from penstock.runtime.record.event_log import commands_digest, read_log
from penstock.runtime.schedule.replay import Replayed, SegmentOrigin, replay


def replayed(folder: Path) -> list[Replayed]:
    """All stages of a run, over all its segments. Raises LogError or ReplayError."""
    logs = [stage for segment in read_log(folder / "events.log") for stage in segment.stages]
    stages = [(SegmentOrigin.from_json(log.facts), recorded_steps(log)) for log in logs]
    return replay(stages, lambda commands: commands_digest(map(record_bytes, commands)))
