"""The best plan for one program, cluster and workload, compared with common manual splits, and its JSON."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import inf
from typing import Any, Literal, cast, get_args

from penstock.graph.errors import Fault
from penstock.graph.ir import Graph
from penstock.graph.protocols import Axes
from penstock.runtime.cluster.capabilities import OptimizerState, Recompute, axis_lack, model_lack, precision_lack
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.gpus import Precision
from penstock.runtime.cluster.placement import html_table, spelled
from penstock.runtime.plan.candidates import RESORTS, LayoutCandidates, NodeGroup, Pins, Training, node_groups
from penstock.runtime.plan.confidence import NOT_CALIBRATED, Confidence
from penstock.runtime.plan.infeasible import check_pins, enough, refuse
from penstock.runtime.plan.model_shape import AXES
from penstock.runtime.plan.roles import PlanError, Roles, assumptions, roles_of
from penstock.runtime.plan.search import Allocation, GpuSplit, Outcome, Search, Solution
from penstock.runtime.plan.simulate import KEY, Costed, costed
from penstock.runtime.plan.train_cost import Memory, beside_memory, recomputation
from penstock.runtime.plan.workload import Workload

# The place of a pool on a slower clock, which measures: its GPUs are not part of the plan.
OUTSIDE = "on machines of its own"
# The share of the time limit that the search for each manual split may take.
HEURISTIC_SHARE = 0.1
# Seconds to find out what would make a workload fit.
ENOUGH_S = 10.0


@dataclass(frozen=True)
class PoolPlan:
    """One pool of a plan, as in its JSON, where None is left out. `mesh` is the mesh of each replica; `memory` is that
    of the rank that holds most. A pool of small work has no devices."""

    name: str
    nodes: tuple[str, ...]
    devices: int = 0
    kind: str = ""
    hosts: tuple[str, ...] = ()
    replicas: int = 1
    mesh: Axes = ()
    precision: str = ""
    memory: Memory = field(default_factory=lambda: Memory({}))
    memory_available: float = 0.0
    slots: int | None = None
    micro_tokens: int | None = None
    zero3: bool | None = None
    cp: int | None = None
    recompute: Recompute | None = None
    optimizer_state: OptimizerState | None = None
    shares: str | None = None

    def to_json(self) -> dict[str, Any]:
        memory = {part: size for part, size in self.memory.parts.items() if size}
        said = vars(self) | {"mesh": spelled(self.mesh), "memory": memory}
        return {name: value for name, value in said.items() if value is not None}


@dataclass(frozen=True)
class Alternative:
    """Another plan. If `found` is None, `why` says why there is none."""

    name: str
    found: Solution | None
    proved: bool
    why: str = ""

    def to_json(self, confidence: Confidence) -> dict[str, Any]:
        if self.found is None:
            return {"name": self.name, "period_s": None, "bound": self.why}
        split = self.found.split
        pools = {"shared": split.shared, "gpus": list(split.sizes)}
        period_s = confidence.about(self.found.period_s)
        return {"name": self.name, "period_s": period_s, "bound": self.found.bound, **pools}


@dataclass(frozen=True)
class Planned:
    """The result; `outcome.best` is not None. `unfollowed` are the pools with a model that the cluster file puts on
    certain hosts: plans do not follow that. `refused` is why no run can have the model."""

    roles: Roles
    work: Workload
    lag: int
    gpus: int
    best: Solution
    outcome: Outcome
    alternatives: tuple[Alternative, ...]
    seconds: float
    confidence: Confidence = NOT_CALIBRATED
    pins: Pins = field(default_factory=Pins)
    unfollowed: tuple[str, ...] = ()
    refused: Fault | None = None

    @property
    def optimal(self) -> bool:
        return self.outcome.proved

    @cached_property
    def pools(self) -> tuple[PoolPlan, ...]:
        """The pools in the order trainer, generator, models beside the policy, small work, pools outside the plan."""
        roles, found = self.roles, self.best
        split, decode, generator = found.split, found.generating, found.generating.generator
        hosts, decodes = split.hosts() or [(), ()], split.decodes
        # Each pool that trains or reads, with its GPUs: the trainer's, or those of its group.
        groups = {roles.trainer: (replace(split.trainer, pools=(roles.trainer,)), found.training, hosts[0])}
        groups |= dict.fromkeys(roles.beside, groups[roles.trainer])
        for each, reading, own in zip(split.dedicated, found.readings, hosts[2:], strict=False):
            groups |= dict.fromkeys(each.pools, (each, reading, own))
        first, *beside = (_learning(roles, pool, *group) for pool, group in groups.items())
        decoding = PoolPlan(
            roles.generator, roles.nodes_of(roles.generator), decodes.gpus, decodes.nodes.kind, hosts[1],
            decode.replicas, generator.mesh.axes, generator.precision, decode.memory, decodes.nodes.gpu.memory_bytes,
            slots=generator.slots, shares=f"its GPUs are those of {roles.trainer}" if split.shared else None,
        )  # fmt: skip
        small = (PoolPlan(pool, roles.nodes_of(pool)) for pool in roles.small)
        outside = (PoolPlan(pool, roles.nodes_of(pool), shares=OUTSIDE) for pool in roles.outside)
        return (first, decoding, *beside, *small, *outside)

    @property
    def costed(self) -> Costed:
        """The input of the simulator."""
        return costed(self.roles, self.work, self.lag, self.best, self.confidence)

    @property
    def assumptions(self) -> tuple[str, ...]:
        over = "nothing fits with tensor parallelism within hosts: a run needs --tp-over-hosts"
        said = [*assumptions(self.roles, self.work), *([over] if self.best.tp_over_hosts else [])]
        if self.unfollowed:
            said.append(f"{', '.join(self.unfollowed)} where it is best, not where [pools] of --cluster says")
        if (taken := self.best.host_bytes) and self.pins.host_state is None:
            said.append(_on_the_host(self.best, taken))
        return (*said, *map(_what_if, self.lacks))

    @property
    def lacks(self) -> tuple[Fault, ...]:
        """The features of this plan that no run can have; with any, the plan is only hypothetical."""
        trainers = (self.best.training.trainer, *(reading.trainer for reading in self.best.readings))
        shared = max(trainer.cp for trainer in trainers)
        found = (
            self.refused,
            precision_lack("generator", self.best.generating.generator.precision),
            axis_lack("trainer", (("cp", shared),)),
        )
        return tuple(lack for lack in found if lack is not None)

    def to_json(self) -> dict[str, Any]:
        about = self.confidence.about
        return {
            "program": self.roles.graph,
            "model": self.work.shape.name,
            "lag": self.lag,
            **self.confidence.facts(self.best.period_s),
            "period_alone_s": self.confidence.about(self.best.alone_s),
            "optimal": self.optimal,
            "gap": self.outcome.gap,
            "bound": self.best.bound,
            "bounds": [{"seconds": about(bound.seconds), "cause": bound.cause} for bound in self.best.bounds],
            "assumptions": list(self.assumptions),
            "gpus": self.gpus,
            "gpus_used": self.best.split.gpus,
            "pools": [pool.to_json() for pool in self.pools],
            "alternatives": [other.to_json(self.confidence) for other in self.alternatives],
            "opened": self.outcome.opened,
            "search_s": self.seconds,
            KEY: self.costed.to_json(),
        }

    def _repr_html_(self) -> str:
        """The pools as a table, for notebooks."""
        sure = "optimal under the model" if self.optimal else "the best found"
        low, high = self.confidence.range_s(self.best.period_s)
        period = f"{low:g} to {high:g} s per update, {self.confidence.words}"
        caption = f"{self.roles.graph}, {self.work.shape.name}: {period}; {sure}"
        head = ("pool", "nodes", "GPUs", "replicas", "mesh", "precision", "memory of a rank")
        rows: list[tuple[object, ...]] = []
        for pool in self.pools:
            row: tuple[object, ...] = (pool.shares or "on CPUs", "", "", "", "")
            if pool.devices:
                memory = f"{pool.memory.bytes / 1e9:.1f} of {pool.memory_available / 1e9:.1f} GB"
                gpus = f"{pool.devices} {pool.kind}" + (f" ({pool.shares})" if pool.shares else "")
                row = (gpus, pool.replicas, spelled(pool.mesh), pool.precision, memory)
            rows.append((pool.name, ", ".join(pool.nodes), *row))
        return html_table(f"{caption}; bound by {self.best.bound}", head, rows)


def plan(
    graph: Graph,
    cluster: Cluster,
    work: Workload,
    *,
    slots: int = 256,
    meshes: Mapping[str, Axes] | None = None,
    pins: Pins | None = None,
    generator_precision: Precision | Literal[""] = "",
    confidence: Confidence = NOT_CALIBRATED,
    time_limit: float = 120.0,
    refused: Fault | None = None,
) -> Planned:
    """Find the best plan. `pins` are given in addition to `meshes`; `generator_precision` is that of a broadcast that
    names none, and "" is bf16; `refused` says why no run can have the model. Raises PlanError for a program that plans
    do not cover, and, with numbers, for a workload that fits nowhere."""
    began, roles, found = time.monotonic(), roles_of(graph), node_groups(cluster)
    refused = model_lack(work.shape) or refused
    sent = graph[roles.cycle[1]]
    precision = cast(Precision, sent.precision or generator_precision or "bf16")
    if not any(nodes.gpu.computes(precision) for nodes in found):
        own = sent.precision and sent.precision != generator_precision
        asked = f"{sent.where}: {sent.name}: precision" if own else "--generator-precision"
        kinds = ", ".join(dict.fromkeys(nodes.kind for nodes in found))
        able = " or ".join(p for p in get_args(Precision) if any(nodes.gpu.computes(p) for nodes in found))
        given = f"given GPUs of kind {kinds}, which do not compute in it"
        raise PlanError(f"{asked} {precision} [no-precision]: {given}, needed {able}")
    pinned = _pins(roles, meshes or {}, pins or Pins())
    every = [
        LayoutCandidates(work, roles.lag, slots, pinned, roles.models, precision, resorts)
        for resorts in RESORTS
        # For a model that runs can have, use only features that runs can have.
        if (not resorts.cp or refused) and pinned.host_state in (None, resorts.host_state)
    ]
    check_pins(roles, every[1], found)
    for candidates in every:
        others, outcome = _searched(roles, candidates, found, began, time_limit)
        # An empty search has proved that nothing fits; one that ran out of time has not.
        if outcome.best is not None or outcome.floor < inf:
            break
    else:
        more = enough(roles, every[-1], found, time.monotonic() + ENOUGH_S)
        raise PlanError("\n".join(filter(None, (str(refuse(roles, every[-1], found)), more))))
    if outcome.best is None:
        raise PlanError(f"time limit: given {time_limit:g} s, which found no plan; needed more")
    second = Alternative("runner-up", outcome.runner_up, outcome.proved, "no other split fits")
    if second.found is not None:
        others = [each for each in others if each.found is None or each.found.split != second.found.split]
    total, taken = sum(nodes.gpus for nodes in found), time.monotonic() - began
    placed = tuple(pool for pool in (roles.trainer, roles.generator, *roles.beside) if pool in cluster.pools)
    return Planned(
        roles, work, roles.lag, total, outcome.best, outcome, (second, *others), taken, confidence, pinned, placed,
        refused,
    )  # fmt: skip


def _searched(
    roles: Roles, candidates: LayoutCandidates, found: Sequence[NodeGroup], began: float, time_limit: float
) -> tuple[list[Alternative], Outcome]:
    """The best plan of each manual split, and the best of all."""
    others, free = [], replace(candidates, pins=Pins())
    for number, (name, split) in enumerate(_by_hand(found), 1):
        deadline = began + time_limit * HEURISTIC_SHARE * number
        outcome = Search(roles, candidates, tuple(found), split).run(deadline, second=False)
        why = "" if outcome.best else "out of time" if outcome.floor < inf else "does not fit"
        if outcome.floor == inf and candidates.pins != free.pins:
            unpinned = Search(roles, free, tuple(found), split).run(time.monotonic(), second=False).best
            why = f"not with {candidates.pins.flags} as given" if unpinned else why
        others.append(Alternative(name, outcome.best, outcome.proved, why))
    # The plans of manual splits limit the search from the start.
    known = tuple(other.found for other in others if other.found)
    return others, Search(roles, candidates, tuple(found), known=known).run(began + time_limit)


def _on_the_host(best: Solution, taken: Mapping[str, float]) -> str:
    """Say that moments are on the host, how much memory they take on the host with most of them, and whether the
    cluster says that the host has it."""
    moved, nodes = best.training.steps.parts.get("moments", 0.0), best.split.trainer.nodes
    said = f"nothing fits with AdamW's moments on the GPUs: they lie on the host ({max(taken.values()) / 1e9:.0f} GB)"
    said += f", and go to the GPUs and back in {moved:.2g} s of the steps"
    unsaid = "; the cluster does not say that a host has as much (memory_gib)"
    return said + (unsaid if nodes.host_bytes == inf else "")


def _what_if(lack: Fault) -> str:
    return f"what if a run could have {lack.given}: it needs {lack.needed} [{lack.code}]"


def _learning(roles: Roles, pool: str, group: Allocation, training: Training, hosts: tuple[str, ...]) -> PoolPlan:
    """A pool of a group that shares GPUs. The group's first pool is shown with the GPUs and the memory of all."""
    trainer, first = training.trainer, group.pools[0]
    return PoolPlan(
        pool, roles.nodes_of(pool), group.gpus, group.nodes.kind, hosts, 1, trainer.mesh.axes, trainer.precision,
        training.memory if pool == first else beside_memory(trainer, roles.models_of((pool,))),
        group.nodes.gpu.memory_bytes, micro_tokens=trainer.micro_tokens, zero3=trainer.zero3,
        cp=trainer.cp if trainer.cp > 1 else None,
        recompute=None if trainer.frozen else recomputation(trainer),
        optimizer_state="host" if trainer.host_state and not trainer.frozen else None,
        shares=None if pool == first else f"its GPUs are those of {first}",
    )  # fmt: skip


def _pins(roles: Roles, meshes: Mapping[str, Axes], others: Pins) -> Pins:
    known = (roles.trainer, roles.generator, *roles.beside)
    for pool, axes in meshes.items():
        if pool not in known:
            needed = f"needed one of: {', '.join(known)}"
            raise PlanError(f"--mesh {pool}={spelled(axes)}: no such pool with a model, {needed}")
    # In the form of `Parallel.axes`: outermost first, without axes of size 1.
    sorted_axes = {
        pool: tuple(sorted((axis for axis in axes if axis[1] > 1), key=lambda axis: AXES.index(axis[0])))
        for pool, axes in meshes.items()
    }
    own = (sorted_axes.pop(pool, None) for pool in (roles.trainer, roles.generator))
    return replace(others, trainer=next(own), generator=next(own), beside=sorted_axes)


def _by_hand(found: Sequence[NodeGroup]) -> list[tuple[str, GpuSplit]]:
    """The manual splits, by their GPUs: half of all for the generator, three quarters, or all shared; with any layouts,
    and models beside the policy with the trainer."""
    shared = max(found, key=lambda nodes: nodes.gpus * nodes.gpu.flops("bf16"))
    # On few hosts both shares may be the same split.
    splits = dict.fromkeys(split for part in (0.5, 0.75) if (split := _shares(found, part)))
    return [
        *((f"{' + '.join(map(str, split.sizes))} (trainer + generator)", split) for split in splits),
        ("all shared, synchronous", GpuSplit(Allocation(shared, shared.gpus), None)),
    ]


def _shares(found: Sequence[NodeGroup], part: float) -> GpuSplit | None:
    """The split that is nearest to `part` of all GPUs for the generator and the rest for the trainer, each within one
    node group; of equally near splits, the one with the trainer on faster GPUs. None if there is a single GPU."""
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
