"""When a checkpoint is due: after so many updates, or so rarely that checkpoints cost little. Pure: time is passed in.

The cost of a checkpoint is measured. It is the seconds for which training waits until ranks have copied their shards,
plus the CPU seconds that writing takes in the background, on the rank that takes most. The interval is this cost over
`SHARE`, and at least `SHORTEST_S`, with which a run begins.
"""

# The share of the time that checkpoints may take.
SHARE = 0.05
# Seconds between two checkpoints that cost almost nothing. A crash may lose as much work.
SHORTEST_S = 30.0

# The metric in a rank's answer `Saved`: CPU seconds of the background write.
WRITE_CPU_S = "write_cpu_s"


class CheckpointInterval:
    """Checkpoints every `every` updates; 0: by time. The run begins before `update`."""

    def __init__(self, every: int, update: int) -> None:
        self.every = every
        self._saved_at = update
        self._since: float | None = None
        self._began = 0.0
        self._copy_s = self._write_s = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from one checkpoint to the next, by time."""
        return max(SHORTEST_S, (self._copy_s + self._write_s) / SHARE)

    def due(self, update: int, writing: bool, now: float) -> bool:
        """True if a checkpoint should be made before `update`. `writing`: the last one is not written yet."""
        # Count from the first call: the start of the run may take minutes.
        if self._since is None:
            self._since = now
        if self.every:
            return update - self._saved_at >= self.every
        return update > self._saved_at and not writing and now - self._since >= self.seconds

    def asked(self, update: int, now: float) -> None:
        """A checkpoint was asked for before `update`, or as soon after that as possible."""
        self._saved_at, self._since = update, now

    def began(self, update: int, now: float) -> None:
        """Updates wait until ranks have copied the state before `update`."""
        self._saved_at, self._since, self._began = update, now, now

    def copied(self, now: float) -> None:
        """All ranks have copied their shards."""
        self._copy_s, self._write_s = now - self._began, 0.0

    def wrote(self, seconds: float) -> None:
        """A rank has taken `seconds` of CPU time to write its shard."""
        self._write_s = max(self._write_s, seconds)
