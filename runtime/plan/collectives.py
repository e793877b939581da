"""Seconds of communication between GPUs: collectives by the α-β model (Thakur et al., 2005), on NVLink and NICs. Pure.

A group is `ranks` GPUs, each `stride` apart, in machines (or NVLink domains) of `gpu.nvlink_gpus`. Within a domain
every GPU reaches every other one through a switch, so a collective takes one hop. Across domains, rings use all NICs of
the group's ranks in a domain in parallel (NCCL's multi-rail rings): the bandwidth between machines is that of as many
NICs as the group has ranks in each. `nbytes` is the whole message: what every rank has after an all-gather, before a
reduce-scatter, before and after an all-reduce.

`Cost`, which the formulas of the cost model return, has seconds by part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, log2
from typing import TypeVar

import numpy as np

from penstock.runtime.cluster.gpus import Gpu
from penstock.runtime.plan.workload import FloatArray

Seconds = TypeVar("Seconds", float, FloatArray)


def _within(gpu: Gpu, ranks: int, stride: int) -> int:
    """How many ranks of the group are in one NVLink domain."""
    return min(ranks, max(1, gpu.nvlink_gpus // stride))


def bandwidth(gpu: Gpu, ranks: int, stride: int = 1) -> float:
    """Bytes per second of a ring through the group."""
    inside = _within(gpu, ranks, stride)
    return gpu.nvlink if inside == ranks else min(gpu.nvlink, inside * gpu.nic)


def gather_s(gpu: Gpu, nbytes: Seconds, ranks: int, stride: int = 1) -> Seconds:
    """Seconds of an all-gather or a reduce-scatter: (n - 1) / n · S / B, plus a hop for each domain."""
    if ranks == 1:
        return nbytes * 0.0
    domains = ceil(ranks / _within(gpu, ranks, stride))
    hops_s = gpu.latency_s + (domains - 1) * gpu.network_s
    return (ranks - 1) / ranks * nbytes / bandwidth(gpu, ranks, stride) + hops_s


def reduce_s(gpu: Gpu, nbytes: Seconds, ranks: int, stride: int = 1) -> Seconds:
    """Seconds of an all-reduce: a reduce-scatter and an all-gather, or a tree if that is faster (few bytes)."""
    if ranks == 1:
        return nbytes * 0.0
    inside = _within(gpu, ranks, stride)
    domains = ceil(ranks / inside)
    hops_s = gpu.latency_s + ceil(log2(domains)) * gpu.network_s
    tree = 2 * nbytes / bandwidth(gpu, ranks, stride) + 2 * hops_s
    ring = 2 * gather_s(gpu, nbytes, ranks, stride)
    return np.minimum(ring, tree) if isinstance(ring, np.ndarray) else min(ring, tree)


def send_s(gpu: Gpu, nbytes: Seconds, stride: int) -> Seconds:
    """Seconds to send from one GPU to the one `stride` further."""
    inside = stride < gpu.nvlink_gpus
    return nbytes / (gpu.nvlink if inside else gpu.nic) + (gpu.latency_s if inside else gpu.network_s)


def exchange_s(gpu: Gpu, nbytes: float, ranks: int, stride: int = 1) -> float:
    """Seconds of an all-to-all between ranks that are `stride` apart: each sends `nbytes` evenly to all ranks, itself
    included. Bytes that leave the domain go over the rank's own NIC, in parallel with those that stay."""
    if ranks == 1:
        return 0.0
    inside = _within(gpu, ranks, stride)
    stays = nbytes * (inside - 1) / ranks / gpu.nvlink
    leaves = nbytes * (ranks - inside) / ranks / gpu.nic
    return max(stays, leaves) + gpu.latency_s + gpu.network_s * (inside < ranks)


# Factor of lower bounds, so that rounding never lifts one above the value that it bounds.
SAFE = 1 - 1e-9


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The sum by name; a name that one of them lacks counts as 0."""
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


@dataclass(frozen=True)
class Cost:
    """`parts` are seconds that add up: of work that overlaps, only the part that is not hidden."""

    parts: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The part that takes longest; "nothing" if there are no parts."""
        return max(self.parts, key=lambda part: self.parts[part], default="nothing")

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(added(self.parts, other.parts))

    def __mul__(self, times: float) -> "Cost":
        return Cost({name: seconds * times for name, seconds in self.parts.items()})
