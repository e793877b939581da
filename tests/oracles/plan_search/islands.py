"""GPUs that are alike: hosts with equally many of one kind, and how pools share them out. Pure.

A pool lies within one island. It has whole hosts, or a part of one host that divides it; where there is only one host,
any part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.gpus import Gpu
from penstock.runtime.plan.roles import AskedError
from penstock.runtime.plan.workload import IntArray


@dataclass(frozen=True)
class Island:
    """`hosts` machines with `each` GPUs of `kind`; both together name it among those of a cluster."""

    kind: str
    gpu: Gpu = field(compare=False)
    hosts: tuple[str, ...] = field(compare=False)
    each: int

    @cached_property
    def gpus(self) -> int:
        return len(self.hosts) * self.each

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """GPUs that a pool may have: the divisors of a host, or of a single host any number; then whole hosts."""
        parts = [part for part in range(1, self.each) if self.each % part == 0 or len(self.hosts) == 1]
        return (*parts, *range(self.each, self.gpus + 1, self.each))

    @cached_property
    def counts(self) -> IntArray:
        """The same as an array."""
        return np.array(self.sizes, np.int64)

    def share_out(self, pools: Sequence[int]) -> list[tuple[str, ...]] | None:
        """The hosts of each pool, in the pools' order; None if they have no room beside each other.

        Whole hosts first, then parts, the largest first, each where there is room. Of several hosts a part is at most
        half of one, so that this packs up to five of them whenever they can be packed; on a single one their sum
        decides.
        """
        left = dict.fromkeys(self.hosts, self.each)
        given: list[tuple[str, ...]] = [()] * len(pools)
        for index in sorted(range(len(pools)), key=lambda i: -pools[i]):
            size = min(pools[index], self.each)
            hosts = [host for host, free in left.items() if free >= size][: max(1, pools[index] // self.each)]
            if len(hosts) * size < pools[index]:
                return None
            for host in hosts:
                left[host] -= size
            given[index] = tuple(hosts)
        return given


def islands(cluster: Cluster) -> tuple[Island, ...]:
    """In the order of the cluster's hosts. Raises AskedError for a cluster without GPUs, ClusterError for an unsaid
    kind."""
    found: dict[tuple[str, int], list[str]] = {}
    kinds: dict[tuple[str, int], Gpu] = {}
    for host in cluster.hosts:
        if gpu := cluster.gpu_of(host):
            alike = host.gpu, len(host.accelerators)
            kinds[alike] = gpu.in_hosts_of(alike[1])
            found.setdefault(alike, []).append(host.name)
    if not found:
        given = f"{len(cluster.hosts)} hosts without GPUs"
        raise AskedError(f"cluster: given {given}, needed one or more with devices and their kind, gpu = …")
    return tuple(Island(kind, kinds[kind, each], tuple(hosts), each) for (kind, each), hosts in found.items())
