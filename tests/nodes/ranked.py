"""Run a function in several processes at once, in one process group, as ranks of a run.

A function is named `module:function`. It gets its rank, the test's folder, and the words that `spawn` was given.
"""

import importlib
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from tests.forks import Forked

DEADLINE_S = 400


def spawn(count: int, function: str, *words: str, folder: Path, backend: str = "gloo") -> None:
    """Run a function on `count` ranks. Fails with their output unless all of them succeed before the deadline.

    With `backend="fake"` there is rank 0 alone: it sends nothing, and what it receives is undefined."""
    log = folder / "ranks.log"
    ranks = [
        Forked(f"{__name__}:be_rank", str(rank), str(count), backend, function, str(folder), *words, log=log)
        for rank in range(1 if backend == "fake" else count)
    ]
    try:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0] * len(ranks), log.read_text()
    finally:
        for rank in ranks:
            rank.end()


def be_rank(rank: str, count: str, backend: str, function: str, folder: str, *words: str) -> None:
    where, timeout = f"file://{folder}/store", timedelta(seconds=DEADLINE_S / 2)
    module, _, name = function.partition(":")
    options = FakeProcessGroup.Options() if backend == "fake" else None  # type: ignore[call-arg]
    dist.init_process_group(backend, where, timeout, world_size=int(count), rank=int(rank), pg_options=options)
    getattr(importlib.import_module(module), name)(int(rank), Path(folder), *words)
    dist.barrier()
