"""Functions that several processes run at once, in one group, as ranks of a run do: what tests of ranks share.

A function is named `module:function`. It gets its rank, the test's folder, and the words that `spawn` was given. As in
a run, ranks are forked from one process that has imported what they need.
"""

import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

DEADLINE_S = 400
ROOT = Path(__file__).parents[2]


def spawn(count: int, function: str, *words: str, folder: Path) -> None:
    """Run it on `count` ranks. Fails with what they have written unless all of them end well before the deadline."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join([str(ROOT / "src")])}
    command = [sys.executable, "-m", "tests.nodes.ranked", function, str(folder), str(count), *words]
    log = folder / "ranks.log"
    with log.open("w") as out:
        ranks = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        assert ranks.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()


def main(function: str, folder: str, count: str, *words: str) -> None:
    importlib.import_module("torch._dynamo")  # which optimizers import when they are made, each rank by itself
    torch.set_num_threads(1)
    module, _, name = function.partition(":")
    body = getattr(importlib.import_module(module), name)
    ranks = []
    for rank in range(int(count)):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            _be_rank(rank, int(count), body, folder, words)
    statuses = [os.waitpid(rank, 0)[1] for rank in ranks]
    sys.exit(1 if any(statuses) else 0)


def _be_rank(rank: int, count: int, body: Callable[..., Any], folder: str, words: tuple[str, ...]) -> NoReturn:
    status = 1
    try:
        where, timeout = f"file://{folder}/store", timedelta(seconds=DEADLINE_S / 2)
        dist.init_process_group("gloo", where, timeout, world_size=count, rank=rank)
        body(rank, Path(folder), *words)
        dist.barrier()
        status = 0
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # gloo's threads may outlive an orderly end


if __name__ == "__main__":
    main(*sys.argv[1:])
