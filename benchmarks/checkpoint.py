"""How long a process is silent while it writes a state of 2 GB: the longest gap between two beats of another thread.

A rank's heartbeat is a thread that needs the interpreter's lock, which safetensors before 0.8 held while it wrote a
file. To measure another version, put it on the path: `PYTHONPATH=DIR python benchmarks/checkpoint.py`.

    python benchmarks/checkpoint.py [--keep] [--gb 2]
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import safetensors
import torch
from report import Keep, publish

from penstock.runtime.tensor.checkpoint import HostBuffers, save_state

TENSORS = 8
BEAT_S = 0.01


class Beats:
    """Beats in a thread until the end of the block; `gap_s` is the longest time between two beats."""

    def __enter__(self) -> "Beats":
        self.gap_s, self._end = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()
        return self

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._end.wait(BEAT_S):
            now = time.monotonic()
            self.gap_s, last = max(self.gap_s, now - last), now

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action=Keep)
    parser.add_argument("--gb", type=float, default=2.0)
    arguments = parser.parse_args()
    elements = int(arguments.gb * 2**30 / 4 / TENSORS)
    tensors = {f"carried/policy/{number}": torch.ones(elements) for number in range(TENSORS)}
    buffers, found = HostBuffers(), {}
    for number in range(2):  # the second copy reuses the memory of the first
        began = time.monotonic()
        copy = buffers.copy(tensors)
        found[f"copy_{number}_s"] = round(time.monotonic() - began, 3)
    with tempfile.TemporaryDirectory() as folder, Beats() as beats:
        began, busy = time.monotonic(), time.thread_time()
        save_state(Path(folder) / "state.safetensors", copy, {})
        found |= {"write_s": round(time.monotonic() - began, 3), "write_cpu_s": round(time.thread_time() - busy, 3)}
    figures = {"safetensors": safetensors.__version__, "bytes": TENSORS * elements * 4, **found}
    publish("checkpoint", {**figures, "longest_gap_s": round(beats.gap_s, 3)}, arguments.keep)


if __name__ == "__main__":
    main()
