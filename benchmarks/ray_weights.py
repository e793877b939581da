"""The weights of `ddma` by Ray's object store: two actors put FSDP shards, two others get them and copy their parts.

    python benchmarks/ray_weights.py REPEATS

A source puts all of its shards as one object. A destination gets both objects, which are views of the store, and copies
its part into buffers that it keeps. The driver passes the references on. A time is measured by the driver, from the
first call to the last answer. Each actor has one thread. The last line is JSON: milliseconds of each sync, and whether
the weights arrived bit-identical.
"""

import json
import os
import sys
from time import perf_counter
from typing import Any

import ray
import torch
from ddma_ranks import RANKS, RULES, SHAPES, Policy
from torch import Tensor

from penstock.graph.protocols import rule_of

# Read by Ray's processes at their start. Otherwise its workers have niceness 15 and yield to any other load.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


WARM = 3
STORE_BYTES = 2 << 30
START_S, ANSWER_S = 180.0, 60.0


class Source:
    """A trainer's rank. numpy has no bfloat16, so the arrays are of int16 with the same bits."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.shards = {name: shard.view(torch.int16).numpy() for name, shard in Policy(rank).tensors.items()}

    def put(self) -> list["ray.ObjectRef"]:
        return [ray.put(self.shards)]


class Destination:
    """A generator's rank."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.live = {name: self._own(name, torch.zeros(shape, dtype=torch.int16)) for name, shape in SHAPES.items()}

    def take(self, *references: list["ray.ObjectRef"]) -> None:
        sources = ray.get([reference for (reference,) in references], timeout=ANSWER_S)
        for name, live in self.live.items():
            row, rule = 0, rule_of(name, RULES)
            for shard in (torch.from_numpy(source[name]) for source in sources):
                rows, first = len(shard), 0
                if rule is not None and rule[0] == 0:  # this shard has some or none of the destination's rows
                    first = self.rank * len(live)
                elif rule is not None:
                    shard = shard.chunk(RANKS, rule[0])[self.rank]
                start, end = max(first, row), min(first + len(live), row + rows)
                if start < end:
                    live[start - first : end - first].copy_(shard[start - row : end - row])
                row += rows

    def has_its_own(self) -> bool:
        policies = [Policy(rank).tensors for rank in range(RANKS)]
        wholes = {name: torch.cat([policy[name] for policy in policies]).view(torch.int16) for name in SHAPES}
        return all(torch.equal(live, self._own(name, wholes[name])) for name, live in self.live.items())

    def _own(self, name: str, whole: Tensor) -> Tensor:
        rule = rule_of(name, RULES)
        return whole if rule is None else whole.chunk(RANKS, rule[0])[self.rank].clone()


def sync(sources: list[Any], destinations: list[Any]) -> float:
    """Run one sync; return its milliseconds."""
    started = perf_counter()
    references = ray.get([source.put.remote() for source in sources], timeout=ANSWER_S)
    ray.get([destination.take.remote(*references) for destination in destinations], timeout=ANSWER_S)
    return 1e3 * (perf_counter() - started)


def measure(repeats: int) -> dict[str, Any]:
    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=STORE_BYTES,
        _node_ip_address="127.0.0.1",
    )
    try:
        sources, destinations = (
            [ray.remote(num_cpus=0)(role).remote(rank) for rank in range(RANKS)] for role in (Source, Destination)
        )
        ray.get([one.__ray_ready__.remote() for one in (*sources, *destinations)], timeout=START_S)
        for _ in range(WARM):
            sync(sources, destinations)
        times = [sync(sources, destinations) for _ in range(repeats)]
        equal = ray.get([one.has_its_own.remote() for one in destinations], timeout=ANSWER_S)
        return {"ms": times, "bit_equal": all(equal)}
    finally:
        ray.shutdown()


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
