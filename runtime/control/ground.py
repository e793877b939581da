"""What the ways of weights stand on in one process of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.tensor.proof import Mode
from penstock.runtime.tensor.ways import Choice


@dataclass(frozen=True)
class Ground:
    """The run's id, a folder for meeting files that no earlier process has used,
    the seconds that a wait for a peer may take, how much of each sync is proved, the format in which weights travel,
    how often all of them do (0: always), the way that they are to go, how to wake the rank, and how to tell the user of
    a slower way."""

    run: str
    folder: Path
    timeout: float
    proof: Mode
    wire: str
    delta: int
    transport: Choice
    wake: Callable[[], None]
    warn: Callable[[str], object]
