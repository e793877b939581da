"""The name of a value that stays with the worker that made it. No torch: the controller passes handles on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Handle:
    """One block of shared memory: `nbytes` at `offset` in a segment of the store of `owner`.

    `meta` is JSON that the store wrote for its readers; whoever passes a handle on passes it unread.
    """

    segment: str
    offset: int
    nbytes: int
    meta: str
    owner: str

    def __str__(self) -> str:
        return f"{self.segment}[{self.offset}:{self.offset + self.nbytes}] of {self.owner} {self.meta}"


class HandleError(RuntimeError):
    """A handle that names no value: never made, freed already, or damaged on its way. The peer's fault."""
