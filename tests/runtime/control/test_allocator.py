"""Freed memory stays with the process."""

import subprocess
import sys

import pytest

_WORK = """
import ctypes, resource, threading, torch
from statistics import median
from penstock.runtime.control.process import keep_freed_memory
if {keep}:
    keep_freed_memory()
def work():
    for _ in range(5):
        [torch.empty(2_000_000).fill_(1.0) for _ in range(8)]
def in_a_thread():
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    in_a_thread()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would be few faults
faults()
print(median(faults() for _ in range(7)))  # a heap may still grow in one of them, or be kept by chance
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_memory_that_is_used_again_is_not_faulted_in_again() -> None:
    faults = {
        keep: float(subprocess.check_output([sys.executable, "-c", _WORK.format(keep=keep)], timeout=300))
        for keep in (True, False)
    }
    assert 10 * faults[True] < faults[False], faults
