"""Which parts of a fixed range of bytes are in use: first fit, and free neighbours become one. Pure.

Invariant: the free list is sorted by offset, holds no empty and no adjacent pieces, and with the blocks taken
covers [0, size) exactly once.
"""

from bisect import bisect_left


class Blocks:
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
