"""Functions that several processes run at once, in one group, as ranks of a run do: what tests of ranks share.

A function is named `module:function`. It gets its rank, the test's folder, and the words that `spawn` was given.
"""

import importlib
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

DEADLINE_S = 120
ROOT = Path(__file__).parents[2]


def spawn(count: int, function: str, *words: str, folder: Path) -> None:
    """Run it on `count` ranks. Fails with what they have written unless all of them end well before the deadline."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join([str(ROOT / "src")])}
    command = [sys.executable, "-m", "tests.nodes.ranked", function, str(folder), str(count)]
    logs, ranks = [folder / f"rank{rank}.log" for rank in range(count)], []
    for rank, path in enumerate(logs):
        with path.open("w") as log:
            kept = {"cwd": ROOT, "env": environment, "stdout": log, "stderr": log}
            ranks.append(subprocess.Popen([*command, str(rank), *words], **kept))  # type: ignore[call-overload]
    try:
        codes = [rank.wait(DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert not any(codes), "\n".join(path.read_text() for path in logs)


def main(function: str, folder: str, count: str, rank: str, *words: str) -> None:
    torch.set_num_threads(1)
    where, timeout = f"file://{folder}/store", timedelta(seconds=DEADLINE_S / 2)
    dist.init_process_group("gloo", where, timeout, world_size=int(count), rank=int(rank))
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(int(rank), Path(folder), *words)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may outlive an orderly end


if __name__ == "__main__":
    main(*sys.argv[1:])
