"""Functions that several processes run at once, in one group, as ranks of a run do: what tests of ranks share.

A function is named `module:function`. It gets its rank, the test's folder, and the words that `spawn` was given. As in
a run, ranks are forked from one process that has imported what they need.
"""

import atexit
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

DEADLINE_S = 400
ROOT = Path(__file__).parents[2]


def spawn(count: int, function: str, *words: str, folder: Path) -> None:
    """Run it on `count` ranks. Fails with what they have written unless all of them end well before the deadline."""
    server = _server()
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps([function, str(folder), count, *words]) + "\n")
    server.stdin.flush()
    # The server answers with a line. One that is silent until the deadline, or that died, ends with all its ranks.
    answered = bool(select.select([server.stdout], [], [], DEADLINE_S)[0]) and server.stdout.readline() == "good\n"
    if not answered:
        _end(server)
        _server.cache_clear()
    assert answered, (folder / "ranks.log").read_text()


@cache
def _server() -> "subprocess.Popen[str]":
    """The process that ranks are forked from: it imports torch once for all tests of this process."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "tests.nodes.ranked"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes)
    atexit.register(_end, server)
    return server


def _end(server: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def main() -> None:
    importlib.import_module("torch._dynamo")  # which optimizers import when they are made, each rank by itself
    torch.set_num_threads(1)
    for request in sys.stdin:
        function, folder, count, *words = json.loads(request)
        module, _, name = function.partition(":")
        body = getattr(importlib.import_module(module), name)
        ranks = []
        for rank in range(count):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                _be_rank(rank, count, body, folder, words)
        statuses = [os.waitpid(rank, 0)[1] for rank in ranks]
        print("failed" if any(statuses) else "good", flush=True)


def _be_rank(rank: int, count: int, body: Callable[..., Any], folder: str, words: list[str]) -> NoReturn:
    status = 1
    log = os.open(f"{folder}/ranks.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
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
    main()
