"""When a checkpoint is due: after so many updates, or so seldom that checkpoints cost little. Pure: time is passed in.

What a checkpoint costs is measured: the seconds for which training waits until ranks have copied their parts aside, and
the seconds of a processor that writing takes beside it, of the rank that takes most. The interval is that cost over
`SHARE`, and at least `SHORTEST_S`, with which a run begins.
"""

# The share of the time that checkpoints may take.
SHARE = 0.05
# Seconds between two checkpoints that cost next to nothing: what a crash may cost at least.
SHORTEST_S = 30.0

# Of a rank's answer `Saved`: seconds of its processor that writing beside the work took.
WRITE_CPU_S = "write_cpu_s"


class CheckpointInterval:
    """`every` counts updates, 0: by time. `update` is the one before which the run begins."""

    def __init__(self, every: int, update: int) -> None:
        self.every = every
        self._saved_at = update
        self._since: float | None = None
        self._began = 0.0
        self._copy_s = self._write_s = 0.0

    @property
    def seconds(self) -> float:
        """From one checkpoint to the next."""
        return max(SHORTEST_S, (self._copy_s + self._write_s) / SHARE)

    def due(self, update: int, writing: bool, now: float) -> bool:
        """Should a checkpoint be made before `update`? `writing`: the last one is not written yet."""
        # Counted from the first answer: the start may take minutes.
        if self._since is None:
            self._since = now
        if self.every:
            return update - self._saved_at >= self.every
        return update > self._saved_at and not writing and now - self._since >= self.seconds

    def asked(self, update: int, now: float) -> None:
        """A checkpoint is wanted before `update`, or as soon after that as it can be."""
        self._saved_at, self._since = update, now

    def began(self, update: int, now: float) -> None:
        """Updates wait for ranks to copy what is before `update`."""
        self._saved_at, self._since, self._began = update, now, now

    def copied(self, now: float) -> None:
        """All ranks have copied their parts."""
        self._copy_s, self._write_s = now - self._began, 0.0

    def wrote(self, seconds: float) -> None:
        """A rank has taken `seconds` of its processor to write its part."""
        self._write_s = max(self._write_s, seconds)
