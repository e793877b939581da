"""Where the nodes run, as a value: pools of replicas of ranks. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec

from penstock.graph.sharding import Axes
from penstock.runtime.plan.table import html_table


@dataclass(frozen=True, slots=True)
class Rank:
    """One process: its host (a name of the cluster file), device, and number of CPU threads."""

    host: str = "local"
    device: str = "cpu"
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Replica:
    """SPMD ranks that run a pool's nodes together. `capacity` is the number of firings in work at once.

    `mesh` names the ranks' axes.
    """

    name: str
    ranks: tuple[Rank, ...]
    capacity: int = 1
    mesh: Axes = ()


@dataclass(frozen=True, slots=True)
class Pool:
    """A process group: the nodes and program arguments it holds, and its replicas ("pool/0", "pool/1", …)."""

    name: str
    holds: tuple[str, ...]
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    pools: tuple[Pool, ...]

    def pool_of(self, name: str) -> Pool:
        """The pool that holds a node or an argument."""
        return next(p for p in self.pools if name in p.holds)

    def replica(self, name: str) -> Replica:
        return next(r for p in self.pools for r in p.replicas if r.name == name)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return tuple(r for p in self.pools for r in p.replicas)

    def spelled(self, replica: str, rank: int) -> str:
        """A rank in words, with its host if there are several."""
        several = len({rank.host for each in self.replicas for rank in each.ranks}) > 1
        return f"{replica} rank {rank}" + (f" on host {self.replica(replica).ranks[rank].host}" if several else "")

    def to_json(self) -> dict[str, Any]:
        def rank(r: Rank) -> dict[str, Any]:
            return {"host": r.host, "device": r.device, "threads": r.threads}

        def replica(r: Replica) -> dict[str, Any]:
            mesh = {"mesh": [list(axis) for axis in r.mesh]} if r.mesh else {}
            return {"name": r.name, "capacity": r.capacity, **mesh, "ranks": [rank(x) for x in r.ranks]}

        return {
            "format": 1,
            "pools": [
                {"name": p.name, "holds": list(p.holds), "replicas": [replica(r) for r in p.replicas]}
                for p in self.pools
            ],
        }

    def _repr_html_(self) -> str:
        """The pools as a table, for notebooks."""
        rows = [
            (p.name, ", ".join(p.holds), len(p.replicas), len(r.ranks), r.capacity, ", ".join(_places(p)))
            for p in self.pools
            for r in p.replicas[:1]
        ]
        head = ("pool", "holds", "replicas", "ranks of each", "firings at once", "on")
        return html_table(f"{len(self.replicas)} replicas in {len(self.pools)} pools", head, rows)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Plan":
        """Raises ValueError for what `to_json` did not make."""
        if not isinstance(data, dict) or data.get("format") != 1:
            given = repr(data.get("format")) if isinstance(data, dict) else "none"
            raise ValueError(f"plan: given format {given}, needed 1")
        pools = msgspec.convert(data.get("pools"), tuple[Pool, ...])
        names = [replica.name for pool in pools for replica in pool.replicas]
        held = [name for pool in pools for name in pool.holds]
        for what, called in (("replicas", names), ("pools", [p.name for p in pools]), ("held values", held)):
            if len(set(called)) < len(called):
                raise ValueError(f"plan: given {what} of one name, needed names of their own")
        for pool in pools:
            for replica in pool.replicas:
                if replica.name.rpartition("/")[0] != pool.name or not replica.ranks or replica.capacity < 1:
                    raise ValueError(
                        f"plan: given replica {replica.name!r} of pool {pool.name!r}, with "
                        f"{len(replica.ranks)} ranks for {replica.capacity} firings; needed POOL/NUMBER and 1 of each"
                    )
                if replica.mesh and prod(size for _, size in replica.mesh) != len(replica.ranks):
                    raise ValueError(f"plan: given {len(replica.ranks)} ranks of {replica.name!r} with another mesh")
            if not pool.replicas:
                raise ValueError(f"plan: given pool {pool.name!r} without replicas, needed 1")
        return Plan(pools)


def _places(pool: Pool) -> list[str]:
    """The hosts and devices of a pool, each once."""
    return list(dict.fromkeys(f"{rank.host} {rank.device}" for replica in pool.replicas for rank in replica.ranks))
