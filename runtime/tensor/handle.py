"""The name of a value that stays with the worker that made it. No torch: the controller passes handles on."""

from penstock.runtime.packable import Packable


class Handle(Packable, frozen=True):
    """One block of shared memory: `nbytes` at `offset` in a segment of the store of `owner`.

    `meta` is JSON that the store wrote for its readers; whoever passes a handle on passes it unread. `host` is the
    owner's, by its name in the plan: readers there map the segment, those of other hosts ask the owner at `endpoint`
    ("" where there are none, so that it does not listen).
    """

    segment: str
    offset: int
    nbytes: int
    meta: str
    owner: str
    host: str = ""
    endpoint: str = ""

    def __str__(self) -> str:
        where = f" on host {self.host}" if self.host else ""
        return f"{self.segment}[{self.offset}:{self.offset + self.nbytes}] of {self.owner}{where} {self.meta}"


def owner_of(replica: str, rank: int) -> str:
    """The `owner` of a rank's values: "generator.0.1" is rank 1 of generator/0."""
    return f"{replica.replace('/', '.')}.{rank}"


class HandleError(RuntimeError):
    """A handle that names no value: never made, freed already, damaged on its way, out of reach. The peer's fault."""
