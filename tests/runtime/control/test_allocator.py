"""Freed memory stays with the process."""

import subprocess
import sys

import pytest

_WORK = """
import resource, torch
from penstock.runtime.control.allocator import keep_freed_memory
if {keep}:
    keep_freed_memory()
def work():
    for _ in range(20):
        [torch.empty(2_000_000).fill_(1.0) for _ in range(8)]
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_memory_that_is_used_again_is_not_faulted_in_again() -> None:
    faults = {
        keep: int(subprocess.check_output([sys.executable, "-c", _WORK.format(keep=keep)], timeout=60))
        for keep in (True, False)
    }
    assert 10 * faults[True] < faults[False], faults
