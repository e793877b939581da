"""Which rank works on which micro-batches: a pure function of their sizes, so that all ranks agree without a word."""

from collections.abc import Sequence


def assign(costs: Sequence[int], parts: int) -> list[list[int]]:
    """The items of each part, in the order of `costs`: the costliest first, each to the part that has least so far.

    Among equals the first item and the first part are taken. No part gets more than ⌈items / parts⌉, because every
    rank takes part in as many rounds as the one with most items.
    """
    most = -(-len(costs) // parts)
    shares: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        part = min((p for p in range(parts) if len(shares[p]) < most), key=lambda p: totals[p])
        shares[part].append(item)
        totals[part] += costs[item]
    return [sorted(share) for share in shares]
