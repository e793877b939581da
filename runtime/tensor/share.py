"""Sharing equal copies out among the ranks that could send them: the least loaded sends next. Pure."""

import heapq
from collections.abc import Sequence


def share(loads: Sequence[int], copies: int, nbytes: int) -> list[int]:
    """How many of `copies` copies of `nbytes` bytes each sender makes, if the one with the least bytes to send so far,
    the first among equals, always takes the next one. At the cost of a sort, however many copies there are.
    """
    if copies % len(loads) == 0 and min(loads) == max(loads):
        return [copies // len(loads)] * len(loads)
    level = _level(loads, copies * nbytes)
    counts = [max(0, level - load) // nbytes for load in loads]
    queue = [(load + count * nbytes, sender) for sender, (load, count) in enumerate(zip(loads, counts, strict=True))]
    heapq.heapify(queue)
    for _ in range(copies - sum(counts)):
        load, sender = queue[0]
        counts[sender] += 1
        heapq.heapreplace(queue, (load + nbytes, sender))
    return counts


def _level(loads: Sequence[int], nbytes: int) -> int:
    """How high `nbytes` rise if poured over the loads: no sender fills up beyond it but by its last copy."""
    total = nbytes
    ascending = sorted(loads)
    for filled, load in enumerate(ascending, 1):
        total += load
        if filled == len(ascending) or total <= ascending[filled] * filled:
            return total // filled
    raise AssertionError("nobody to send")
