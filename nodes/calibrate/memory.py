"""Bytes per second of memory and between two processes, and seconds of an operation on next to nothing."""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.nodes.calibrate.clock import seconds

LARGE, SMALL = 256 << 20, 256 << 10
"""Bytes of a tensor that no cache keeps, and of one that the nearest caches keep."""
DEADLINE = timedelta(seconds=30)


def bandwidths(device: str) -> dict[str, float]:
    """GB/s: `read` of a sum over a large tensor, `copy` bytes read and written by a copy of it, `cached` the same of a
    small one."""
    large = torch.ones(LARGE // 4, device=device)
    other, small = torch.empty_like(large), torch.ones(SMALL // 4, device=device)
    near = torch.empty_like(small)
    found = {
        "read": LARGE / seconds(large.sum),
        "copy": 2 * LARGE / seconds(lambda: other.copy_(large)),
        "cached": 2 * SMALL / seconds(lambda: near.copy_(small)),
    }
    return {name: value / 1e9 for name, value in found.items()}


def launch_us(device: str) -> float:
    """Microseconds of an operation on a few elements, its call from Python included."""
    a, b = (torch.ones(16, device=device) for _ in range(2))

    def work() -> None:
        for _ in range(100):
            torch.add(a, b)

    with torch.inference_mode():
        return seconds(work) / 100 * 1e6


def host_gb_s(device: str) -> float:
    """Between a GPU and its host's pinned memory."""
    there = torch.empty(LARGE // 4, device=device)
    here = torch.empty(LARGE // 4, pin_memory=True)
    return LARGE / seconds(lambda: there.copy_(here, non_blocking=True)) / 1e9


def links() -> dict[str, float]:
    """GB/s and microseconds one way between two processes: over gloo on loopback, and by shared memory."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "penstock.nodes.calibrate", "--answer", folder]
        with subprocess.Popen(command) as other:
            try:
                return {**_gloo(Path(folder), 0), **_shared()}
            finally:
                other.kill()


def answer(folder: str) -> None:
    """The other process's part."""
    _gloo(Path(folder), 1)


def _gloo(folder: Path, rank: int) -> dict[str, float]:
    from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

    gloo: Any = ProcessGroupGloo  # torch's stubs lack the options
    options = gloo._Options()
    options._devices = [gloo.create_device(interface="lo")]
    options._timeout = DEADLINE
    group = gloo(FileStore(str(folder / "store"), 2), rank, 2, options)
    found = {}
    for name, size, rounds in (("latency", 8, 200), ("gloo", 32 << 20, 6)):
        payload = torch.zeros(size, dtype=torch.uint8)
        began = 0.0
        for number in range(rounds + 2):
            began = time.perf_counter() if number == 2 else began
            _ping(group, payload, rank)
        found[name] = (time.perf_counter() - began) / (2 * rounds)
    return {"gloo_gb_s": (32 << 20) / found["gloo"] / 1e9, "latency_us": found["latency"] * 1e6}


def _ping(group: Any, payload: Tensor, rank: int) -> None:
    """There and back."""
    for sender in (0, 1):
        work = group.send([payload], 1 - rank, 0) if rank == sender else group.recv([payload], 1 - rank, 0)
        work.wait()


def _shared() -> dict[str, float]:
    """What another process reads needs no second copy: the rate is that of writing into the mapping."""
    path = Path("/dev/shm") / f"penstock-measure-{os.getpid()}-{secrets.token_hex(4)}"
    size = 64 << 20
    try:
        there = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        here = torch.ones(size, dtype=torch.uint8)
        return {"shared_gb_s": size / seconds(lambda: there.copy_(here)) / 1e9}
    finally:
        path.unlink(missing_ok=True)
