"""Functions that several processes run at once, in one group, as ranks of a run do: what tests of ranks share.

A function is named `module:function`. It gets its rank, the test's folder, and the words that `spawn` was given.
"""

import importlib
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.forks import Forked

DEADLINE_S = 400


def spawn(count: int, function: str, *words: str, folder: Path) -> None:
    """Run it on `count` ranks. Fails with what they have written unless all of them end well before the deadline."""
    log = folder / "ranks.log"
    ranks = [
        Forked(f"{__name__}:be_rank", str(rank), str(count), function, str(folder), *words, log=log)
        for rank in range(count)
    ]
    try:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0] * count, log.read_text()
    finally:
        for rank in ranks:
            rank.end()


def be_rank(rank: str, count: str, function: str, folder: str, *words: str) -> None:
    where, timeout = f"file://{folder}/store", timedelta(seconds=DEADLINE_S / 2)
    module, _, name = function.partition(":")
    dist.init_process_group("gloo", where, timeout, world_size=int(count), rank=int(rank))
    getattr(importlib.import_module(module), name)(int(rank), Path(folder), *words)
    dist.barrier()
