"""The name of a value that stays with the worker that made it. No torch: the controller passes handles on.

Which parts of a fixed range of bytes are in use: first fit, and free neighbours become one. Pure.

Invariant: the free list is sorted by offset, holds no empty and no adjacent pieces, and with the blocks taken
covers [0, size) exactly once.
"""

from bisect import bisect_left

from penstock.runtime.packable import Packable


class ObjectRef(Packable, frozen=True):
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


class ObjectRefError(RuntimeError):
    """A handle that names no value: never made, freed already, damaged on its way, out of reach. The peer's fault."""


class FreeList:
    """Offsets into `size` bytes. Both calls are linear in the number of free pieces."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)]

    def take(self, nbytes: int) -> int | None:
        """The offset of `nbytes` (> 0) now in use; None if no free piece is as long."""
        for index, (offset, length) in enumerate(self._free):
            if length > nbytes:
                self._free[index] = (offset + nbytes, length - nbytes)
                return offset
            if length == nbytes:
                del self._free[index]
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Give back exactly what `take` gave."""
        free = self._free
        index = bisect_left(free, (offset, 0))
        end = offset + nbytes
        if index < len(free) and free[index][0] == end:
            end += free.pop(index)[1]
        if index and sum(free[index - 1]) == offset:
            index -= 1
            offset = free.pop(index)[0]
        free.insert(index, (offset, end - offset))

    def free_bytes(self) -> int:
        return sum(length for _, length in self._free)
