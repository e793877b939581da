"""Seconds of a piece of work, on any device, alone or with the other cores kept busy."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

LEAST_S = 0.03
"""A figure is from rounds that take this long together at least, whatever the clock's grain."""
ROUNDS, FEWEST = 5, 2
"""Of a figure, and of one whose single call is long."""


def seconds(work: Callable[[], object], least: float = LEAST_S) -> float:
    """The median of several rounds of the seconds of one call; a first call, which takes its memory, is left out."""
    began = _now()
    work()
    once = max(_now() - began, 1e-7)
    calls = max(1, round(least / once / ROUNDS))
    found: list[float] = []
    while len(found) < ROUNDS and (len(found) < FEWEST or sum(found) * calls < ROUNDS * least):
        began = _now()
        for _ in range(calls):
            work()
        found.append((_now() - began) / calls)
    return median(found)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """So many other processes compute, a core each, until the end; what one of them prints says that it does."""
    command = [sys.executable, "-m", "penstock.nodes.calibrate", "--burn"]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(cores)]
    try:
        for other in others:
            assert other.stdout is not None
            if not other.stdout.readline():
                raise RuntimeError("a process that was to keep a core busy has ended")
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
            for pipe in (other.stdin, other.stdout):
                if pipe is not None:
                    pipe.close()
