"""The best plan for one program, cluster and workload, beside it what people set by hand, and all of it as JSON."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from penstock.graph.ir import Graph
from penstock.graph.protocols import Axes
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import html_table, spelled
from penstock.runtime.plan.candidates import LayoutCandidates, NodeGroup, Pins, Training, node_groups
from penstock.runtime.plan.infeasible import Enough, check_pins, refuse
from penstock.runtime.plan.memory import Memory, beside_memory
from penstock.runtime.plan.roles import AskedError, PlanError, Roles, assumptions, roles_of
from penstock.runtime.plan.search import Allocation, GpuSplit, Outcome, Search, Solution
from penstock.runtime.plan.simulate import KEY, Costed, costed
from penstock.runtime.plan.workload import Workload

OUTSIDE = "on machines of its own"
"""Where a slower clock measures: its GPUs are not of the plan."""
HEURISTIC_SHARE = 0.1
"""Of the time limit, that each plan set by hand may take."""
ENOUGH_S = 10.0
"""Seconds for finding out what would make a workload fit."""


@dataclass(frozen=True)
class PoolPlan:
    """One pool of a plan. `mesh` is of each replica; memory is that of the rank that holds most, in bytes by
    component. A pool of small work has no devices."""

    name: str
    nodes: tuple[str, ...]
    kind: str = ""
    hosts: tuple[str, ...] = ()
    devices: int = 0
    replicas: int = 1
    mesh: Axes = ()
    precision: str = ""
    memory: Memory = field(default_factory=lambda: Memory({}))
    room: float = 0.0
    slots: int = 0
    micro_tokens: int = 0
    zero3: bool = False
    shares: str = ""


@dataclass(frozen=True)
class Alternative:
    """Another plan; `found` is None where `why` says that there is none."""

    name: str
    found: Solution | None
    proved: bool
    why: str = ""


@dataclass(frozen=True)
class Planned:
    """The answer. `outcome.best` is there."""

    roles: Roles
    work: Workload
    lag: int
    gpus: int
    best: Solution
    outcome: Outcome
    alternatives: tuple[Alternative, ...]
    seconds: float
    cpu_s: float

    @property
    def optimal(self) -> bool:
        return self.outcome.proved

    @property
    def pools(self) -> tuple[PoolPlan, ...]:
        return pools_of(self.roles, self.best)

    @property
    def costed(self) -> Costed:
        """What the simulator needs of it."""
        return costed(self.roles, self.work, self.lag, self.best)

    @property
    def assumptions(self) -> tuple[str, ...]:
        return assumptions(self.roles, self.work)

    def to_json(self) -> dict[str, Any]:
        return {
            "program": self.roles.graph,
            "model": self.work.shape.name,
            "lag": self.lag,
            "period_s": self.best.period_s,
            "period_alone_s": self.best.alone_s,
            "optimal": self.optimal,
            "gap": self.outcome.gap,
            "bound": self.best.bound,
            "bounds": [{"seconds": bound.seconds, "cause": bound.cause} for bound in self.best.bounds],
            "assumptions": list(self.assumptions),
            "gpus": self.gpus,
            "gpus_used": self.best.split.gpus,
            "pools": [_pool_json(pool) for pool in self.pools],
            "alternatives": [_alternative_json(other) for other in self.alternatives],
            "opened": self.outcome.opened,
            "search_s": self.seconds,
            "search_cpu_s": self.cpu_s,
            KEY: self.costed.to_json(),
        }

    def _repr_html_(self) -> str:
        """The pools as a table, for notebooks."""
        sure = "optimal under the model" if self.optimal else "the best found"
        caption = f"{self.roles.graph}, {self.work.shape.name}: {self.best.period_s:.4g} s per update, {sure}"
        head = ("pool", "nodes", "GPUs", "replicas", "mesh", "precision", "memory of a rank")
        return html_table(f"{caption}; bound by {self.best.bound}", head, [_row(pool) for pool in self.pools])


def plan(
    graph: Graph,
    cluster: Cluster,
    work: Workload,
    *,
    slots: int = 256,
    meshes: Mapping[str, Axes] | None = None,
    time_limit: float = 120.0,
) -> Planned:
    """Raises PlanError for a program that is not covered, and for a workload that fits nowhere, with the numbers."""
    began, cpu = time.monotonic(), time.process_time()
    roles, found = roles_of(graph), node_groups(cluster)
    if slots < 1:
        raise AskedError(f"slots: given {slots}, needed at least 1")
    candidates = LayoutCandidates(work, roles.lag, slots, _pins(roles, meshes or {}), roles.models)
    check_pins(roles, candidates, found)
    others = [
        _by_hand(Search(roles, candidates, found, split), name, began + time_limit * HEURISTIC_SHARE * number)
        for number, (name, split) in enumerate(_hands(found), 1)
    ]
    known = tuple(other.found for other in others if other.found)
    outcome = Search(roles, candidates, found, known=known).run(began + time_limit)
    best = outcome.best
    if best is None and outcome.floor == float("inf"):
        more = str(Enough(roles, candidates, found, time.monotonic() + ENOUGH_S))
        raise PlanError("\n".join(filter(None, (str(refuse(roles, candidates, found)), more))))
    if best is None:
        raise PlanError(f"time limit: given {time_limit:g} s, which found no plan; needed more")
    second = Alternative("runner-up", outcome.runner_up, outcome.proved, "no other split fits")
    total = sum(nodes.gpus for nodes in found)
    taken = time.monotonic() - began, time.process_time() - cpu
    return Planned(roles, work, roles.lag, total, best, outcome, (second, *others), *taken)


def pools_of(roles: Roles, found: Solution) -> tuple[PoolPlan, ...]:
    """In the order trainer, generator, models beside the policy, small work."""
    split, training, decode, generator = found.split, found.training, found.generating, found.generating.generator
    hosts, decodes = split.hosts() or [(), ()], split.decodes
    trains = replace(split.trainer, pools=(roles.trainer,))
    pools = [
        _learning(roles, roles.trainer, trains, training, hosts[0]),
        PoolPlan(
            roles.generator, roles.nodes_of(roles.generator), decodes.nodes.kind, hosts[1], decodes.gpus,
            decode.replicas, generator.mesh.axes, generator.precision, decode.memory, decodes.nodes.gpu.memory_bytes,
            slots=generator.slots, shares=f"its GPUs are those of {roles.trainer}" if split.shared else "",
        ),
    ]  # fmt: skip
    for pool in roles.beside:
        group = trains, training, hosts[0]
        for each, reading, own in zip(split.dedicated, found.readings, hosts[2:], strict=False):
            group = (each, reading, own) if pool in each.pools else group
        pools.append(_learning(roles, pool, *group))
    pools += [PoolPlan(pool, roles.nodes_of(pool)) for pool in roles.small]
    return (*pools, *(PoolPlan(pool, roles.nodes_of(pool), shares=OUTSIDE) for pool in roles.outside))


def _learning(roles: Roles, pool: str, group: Allocation, training: Training, hosts: tuple[str, ...]) -> PoolPlan:
    """A pool of a group whose first one is said to have its GPUs, and what all of them hold."""
    trainer, first = training.trainer, group.pools[0]
    return PoolPlan(
        pool, roles.nodes_of(pool), group.nodes.kind, hosts, group.gpus, 1, trainer.mesh.axes, trainer.precision,
        training.memory if pool == first else beside_memory(trainer, roles.models_of((pool,))),
        group.nodes.gpu.memory_bytes, micro_tokens=trainer.micro_tokens, zero3=trainer.zero3,
        shares="" if pool == first else f"its GPUs are those of {first}",
    )  # fmt: skip


def _pins(roles: Roles, meshes: Mapping[str, Axes]) -> Pins:
    known = (roles.trainer, roles.generator, *roles.beside)
    for pool, axes in meshes.items():
        if pool not in known:
            needed = f"needed one of: {', '.join(known)}"
            raise AskedError(f"--mesh {pool}={spelled(axes)}: no such pool with a model, {needed}")
    pins = {pool: _outermost_first(axes) for pool, axes in meshes.items()}
    return Pins(pins.pop(roles.trainer, None), pins.pop(roles.generator, None), pins)


def _outermost_first(axes: Axes) -> Axes:
    """As `Parallel.axes` has them."""
    order = ("pp", "dp", "fsdp", "tp")
    return tuple(sorted((axis for axis in axes if axis[1] > 1), key=lambda axis: order.index(axis[0])))


def _hands(found: Sequence[NodeGroup]) -> list[tuple[str, GpuSplit]]:
    """What people set by hand: shares of all GPUs, all layouts free; a frozen model beside the trainer."""
    shared = max(found, key=lambda nodes: nodes.gpus * nodes.gpu.flops("bf16"))
    hands = [
        ("half and half", _shares(found, 0.5)),
        ("75:25 (generator : trainer)", _shares(found, 0.75)),
        ("all shared, synchronous", GpuSplit(Allocation(shared, shared.gpus), None)),
    ]
    return [(name, split) for name, split in hands if split is not None]


def _shares(found: Sequence[NodeGroup], part: float) -> GpuSplit | None:
    """The split that is nearest to `part` of all GPUs for the generator and the others for the trainer: each within one
    node group, the trainer on the faster one where that is no matter. None where there is a single GPU."""
    total = sum(nodes.gpus for nodes in found)
    splits = [
        GpuSplit(Allocation(trains, trainer), Allocation(decodes, generator))
        for trains, decodes in product(found, found)
        for generator in (min(decodes.sizes, key=lambda size: abs(size - part * total)),)
        for room in (trains.gpus - generator if trains == decodes else trains.gpus,)
        for trainer in [max((size for size in trains.sizes if size <= min(room, total - generator)), default=0)]
        if trainer
    ]

    def distance(split: GpuSplit) -> tuple[float, float]:
        off = abs(split.decodes.gpus - part * total) + abs(split.trainer.gpus - (1 - part) * total)
        return off, -split.trainer.nodes.gpu.flops("bf16")

    return min((split for split in splits if split.hosts()), key=distance, default=None)


def _by_hand(search: Search, name: str, deadline: float) -> Alternative:
    outcome = search.run(deadline, second=False)
    why = "" if outcome.best else "out of time" if outcome.floor < float("inf") else "does not fit"
    return Alternative(name, outcome.best, outcome.proved, why)


def _row(pool: PoolPlan) -> tuple[object, ...]:
    if not pool.devices:
        return (pool.name, ", ".join(pool.nodes), pool.shares or "on CPUs", "", "", "", "")
    memory = f"{pool.memory.bytes / 1e9:.1f} of {pool.room / 1e9:.1f} GB"
    gpus = f"{pool.devices} {pool.kind}" + (f" ({pool.shares})" if pool.shares else "")
    return (pool.name, ", ".join(pool.nodes), gpus, pool.replicas, spelled(pool.mesh), pool.precision, memory)


def _pool_json(pool: PoolPlan) -> dict[str, Any]:
    return {
        "name": pool.name,
        "nodes": list(pool.nodes),
        "devices": pool.devices,
        "kind": pool.kind,
        "hosts": list(pool.hosts),
        "replicas": pool.replicas,
        "mesh": spelled(pool.mesh),
        "precision": pool.precision,
        "memory": {part: size for part, size in pool.memory.parts.items() if size},
        "memory_available": pool.room,
        **({"slots": pool.slots} if pool.slots else {}),
        **({"micro_tokens": pool.micro_tokens, "zero3": pool.zero3} if pool.micro_tokens else {}),
        **({"shares": pool.shares} if pool.shares else {}),
    }


def _alternative_json(other: Alternative) -> dict[str, Any]:
    if other.found is None:
        return {"name": other.name, "period_s": None, "bound": other.why}
    pools = {"shared": other.found.split.shared, "gpus": list(other.found.split.sizes)}
    return {"name": other.name, "period_s": other.found.period_s, "bound": other.found.bound, **pools}
