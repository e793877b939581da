"""Ranks of one replica: orders are taken up by all at the same step, however they arrive."""

import random
import threading
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from penstock.runtime.tensor.process_group import Pace, TransportError, open_world

RANKS, ORDERS, STEPS_EACH = 3, 40, 6


def test_a_rank_alone_takes_what_there_is() -> None:
    waiting = deque([1, 2, 3])
    assert Pace(False).take(waiting, busy=False) == [1, 2, 3]
    assert not waiting


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # which `open_world` sets
        monkeypatch.setenv(name, "lo")
    with pytest.raises(TransportError, match=r"rank 0: the 3 ranks .* within 0\.2 s: not there: rank 1, rank 2"):
        open_world(HashStore(), 0, 3, timeout=0.2)


class _Together:
    """The smallest of the threads' numbers, as `all_reduce` gives it to processes."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=30)
        self.given: dict[int, torch.Tensor] = {}

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MIN
        self.given[threading.get_ident()] = tensor.clone()
        self.barrier.wait()
        tensor.copy_(torch.stack(list(self.given.values())).amin(0))
        self.barrier.wait()


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_make_the_same_steps_with_the_same_orders(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for ranks. Orders reach each in its own time, and keep each busy for some steps: not all of them
    for equally many, as work that depends on the clock would."""
    together = _Together(RANKS)
    monkeypatch.setattr(dist, "all_reduce", together.all_reduce)
    histories: list[list[tuple[int, ...]]] = [[] for _ in range(RANKS)]

    def rank(index: int) -> None:
        draw, pace, left = random.Random(seed * 100 + index), Pace(True), 0
        waiting, arrived = deque[int](), 0
        while sum(map(len, histories[index])) < ORDERS or left or pace.busy:
            for _ in range(draw.choice([0, 0, 0, 1, 2, 5])):
                if arrived < ORDERS:
                    waiting.append(arrived)
                    arrived += 1
            taken = pace.take(waiting, left > 0)
            if taken:
                histories[index].append(tuple(taken))
            left = draw.randrange(1, STEPS_EACH) if taken else max(0, left - 1)

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert histories[0] == histories[1] == histories[2]
    assert sum(histories[0], ()) == tuple(range(ORDERS))
