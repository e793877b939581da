"""Sharing out is what a queue of the least loaded would do, without the queue."""

import heapq

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.tensor.reshard import share


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 30), st.integers(1, 12))
def test_the_least_loaded_sends_next(loads: list[int], copies: int, nbytes: int) -> None:
    queue = sorted((load, sender) for sender, load in enumerate(loads))
    counts = [0] * len(loads)
    for _ in range(copies):
        load, sender = heapq.heappop(queue)
        counts[sender] += 1
        heapq.heappush(queue, (load + nbytes, sender))
    assert share(loads, copies, nbytes) == counts
