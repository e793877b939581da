"""What a step launches on a GPU, launched at once: hundreds of kernels of microseconds each would wait for the host.

graphs = Graphs()
hidden = graphs.run(("pass", *addresses), lambda: model(static_tokens))    # the first time as it is, then a replay
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# Two kinds of passes, of weights in two places (`DoubleBuffer`).
MOST = 4


class Graphs:
    """CUDA graphs (https://docs.nvidia.com/cuda/cuda-c-programming-guide, section "CUDA Graphs") of what reads and
    writes tensors at fixed addresses; those used last are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = OrderedDict()
        # One is replayed at a time, and what it makes is read before the next one: they share what lies between.
        self._pool: Any = None

    def run(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What `compute` makes, in tensors that the next call with this key writes over.

        It must wait for no device, and compute the same when it is called twice: the first call of a key does that,
        since a kernel may be compiled only then. `key` has all addresses that it reads, but for those that never
        change.
        """
        if key not in self._kept:
            made = compute()
            graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
            # Transfers of other threads go on meanwhile, and take memory.
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
