"""Ranks of one replica: orders are taken up by all at the same step, however they arrive."""

import random
import threading
from collections import deque
from typing import Any

import pytest
import torch

from penstock.runtime.tensor import world
from penstock.runtime.tensor.world import Free, Lockstep

RANKS, ORDERS, STEPS_EACH = 3, 40, 3


def test_a_rank_alone_takes_what_there_is() -> None:
    waiting = deque([1, 2, 3])
    assert Free().take(waiting, busy=False) == [1, 2, 3]
    assert not waiting


class _Together:
    """The smallest of the threads' numbers, as `all_reduce` gives it to processes."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=30)
        self.numbers: dict[int, int] = {}

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        self.numbers[threading.get_ident()] = int(tensor)
        self.barrier.wait()
        tensor.fill_(min(self.numbers.values()))
        self.barrier.wait()


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_make_the_same_steps_with_the_same_orders(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for ranks; orders reach each in its own time, one keeps a rank busy for some steps."""
    together = _Together(RANKS)
    monkeypatch.setattr(world.dist, "all_reduce", together.all_reduce)
    histories: list[list[tuple[int, ...]]] = [[] for _ in range(RANKS)]

    def rank(index: int) -> None:
        draw, pace, left = random.Random(seed * 100 + index), Lockstep(), 0
        waiting, arrived = deque[int](), 0
        while sum(map(len, histories[index])) < ORDERS or left:
            for _ in range(draw.choice([0, 0, 0, 1, 2, 5])):
                if arrived < ORDERS:
                    waiting.append(arrived)
                    arrived += 1
            taken = pace.take(waiting, left > 0)
            if taken or left:
                histories[index].append(tuple(taken))
            left = STEPS_EACH if taken else max(0, left - 1)

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert histories[0] == histories[1] == histories[2]
    assert sum(histories[0], ()) == tuple(range(ORDERS))
