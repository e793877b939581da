"""What the ways of weights stand on in one process of a run."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.runtime.tensor.group import Meet
from penstock.runtime.tensor.proof import Mode
from penstock.runtime.tensor.ways import Choice


@dataclass(frozen=True)
class Ground:
    """The run's id, where the ranks of a group meet, by the group's name, the address at which ranks of other hosts
    reach this one, the seconds that a wait for a peer may take, how much of each sync is proved, the format in which
    weights travel, how often all of them do (0: always), the way that they are to go, how to wake the rank, and how to
    tell the user of a slower way."""

    run: str
    meet: Meet
    address: str
    timeout: float
    proof: Mode
    wire: str
    delta: int
    transport: Choice
    wake: Callable[[], None]
    warn: Callable[[str], object]
