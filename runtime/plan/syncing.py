"""Seconds of what happens between updates: a weight sync, a switch of shared GPUs, scoring. Pure.

A sync takes as long as its busiest rank: the bytes that the real resharding plan has each rank send and receive, over
that rank's NIC (both ways at once), and a message for each peer. Packing and proof are left out. A run has one plan for
each replica, all alike, so that trainers send to n replicas n times as much as to one; unless weights cross hosts and
a chain is the better way (`tensor.chain`): then trainers send to its heads only, and the last replica of a chain is
behind the first one by a bucket for each link.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from penstock.runtime.plan.cost import Cost
from penstock.runtime.plan.gpus import Gpu, Precision
from penstock.runtime.plan.parallel import Parallel
from penstock.runtime.plan.shape import Shape
from penstock.runtime.plan.tensors import layout
from penstock.runtime.tensor.chain import num_heads
from penstock.runtime.tensor.plan import BUCKET
from penstock.runtime.tensor.reshard import reshard

DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn", "fp4": "float8_e4m3fn"}
"""What travels: no narrower format than fp8 does yet."""


@dataclass(frozen=True)
class Traffic:
    """To one replica: bytes of the busiest sender and of the busiest receiver, and the most peers that a rank has."""

    sent: int
    received: int
    peers: int


@lru_cache(maxsize=256)
def traffic(shape: Shape, trainer: Parallel, generator: Parallel, precision: Precision) -> Traffic:
    """What a sync from the trainer's mesh to one replica of a generator moves, from its resharding plan."""
    plan = reshard(layout(shape, trainer, DTYPE[precision]), layout(shape, generator, DTYPE[precision]))
    ends = {0, plan.destinations - 1}
    peers = max(len({route.source for route in plan.routes(destination=rank)}) for rank in ends)
    return Traffic(max(plan.bytes_out), max(plan.bytes_in), peers)


def sync_cost(
    moved: Traffic, replicas: int, trainer: Gpu, generator: Gpu, *, together: bool = False, chained: bool = False
) -> Cost:
    """Seconds of a sync to so many replicas: over NICs, or over NVLink where both are on the same GPUs (`together`).
    `chained`: along chains where that is the better way, as in a run across hosts."""
    heads = num_heads(moved.sent, moved.received, replicas) if chained else replicas
    out = moved.sent * heads / (trainer.nvlink if together else trainer.nic)
    into = moved.received / (generator.nvlink if together else generator.nic)
    latency_s, hops = max(trainer.latency_s, generator.latency_s), ceil(replicas / heads) - 1
    parts = {"wire": max(out, into), "messages": moved.peers * latency_s}
    return Cost({**parts, "chain": hops * (BUCKET / generator.nic + latency_s)} if hops else parts)


def switch_cost(gpu: Gpu, leaving: float, coming: float) -> Cost:
    """Seconds until a GPU that two roles share has the other one's state: `leaving` bytes go to the host, `coming` ones
    come back, one after the other, since there is no room for both."""
    return Cost({"to the host": leaving / gpu.pcie, "from the host": coming / gpu.pcie})


def scoring_s(responses: int, seconds_each: float, workers: int) -> float:
    """Seconds until all responses are scored by workers that take one at a time."""
    if workers < 1:
        raise ValueError(f"scorers: given {workers} workers, needed at least 1")
    return -(-responses // workers) * seconds_each
