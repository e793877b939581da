"""CUDA graphs launch all kernels of a step at once: hundreds of kernels of microseconds each would wait for the host.

graphs = Graphs()
hidden = graphs.run(("pass", *addresses), lambda: model(static_tokens))    # runs the first time, then replays
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# Two kinds of passes, with weights in two places (`DoubleBuffer`).
MOST = 4


class Graphs:
    """CUDA graphs (https://docs.nvidia.com/cuda/cuda-c-programming-guide, section "CUDA Graphs") of computations with
    tensors at fixed addresses; the most recently used ones are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = OrderedDict()
        # One graph is replayed at a time, and its results are read before the next one: they share one memory pool.
        self._pool: Any = None

    def run(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The result of `compute`, in tensors that the next call with this key overwrites.

        `compute` must not wait for a device, and must give the same result when it is called twice: the first call of a
        key does that, since a kernel may be compiled only then. `key` must have all addresses that it reads, except
        those that never change.
        """
        if key not in self._kept:
            made = compute()
            graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
            # Transfers of other threads continue during the capture, and allocate memory.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                kept = compute()
            self._kept[key] = graph, kept
            if len(self._kept) > MOST:
                self._kept.popitem(last=False)
            return made
        self._kept.move_to_end(key)
        graph, found = self._kept[key]
        graph.replay()
        return found  # type: ignore[no-any-return]
