"""Things in the order of a number, of which only those are made that are asked for. Pure."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Ranked(Generic[T]):
    """The lowest first. Given in groups, each with a lower bound of its numbers; a group is made when its bound is the
    lowest that is left."""

    def __init__(self, groups: Sequence[tuple[float, Callable[[], Iterable[tuple[float, T]]]]]) -> None:
        self._closed = sorted(groups, key=lambda group: -group[0])
        self._open: list[tuple[float, int, T]] = []
        self._known: list[T] = []

    def at(self, index: int) -> T | None:
        """None beyond the last one."""
        while len(self._known) <= index and (self._closed or self._open):
            if self._closed and (not self._open or self._closed[-1][0] <= self._open[0][0]):
                for number, each in self._closed.pop()[1]():
                    heapq.heappush(self._open, (number, len(self._known) + len(self._open), each))
            else:
                self._known.append(heapq.heappop(self._open)[2])
        return self._known[index] if index < len(self._known) else None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self.at(0) is not None

    def __iter__(self) -> Iterator[T]:
        index = 0
        while (each := self.at(index)) is not None:
            yield each
            index += 1
