"""The default plan on one machine without GPUs, and what bounds its updates. Pure.

Nothing is searched: pools are placed as `penstock run` places them. Where the lag is 0, trainer and generator take
turns with all cores. With a lag they work beside each other, with more threads than there are cores, and each slows the
other down, as was measured; when one is done with its batch, the other goes on alone. So an update takes no less than
both batches that are begun at once.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.graph.ir import Graph
from penstock.graph.passes import Bound
from penstock.runtime.plan.assumptions import assumptions
from penstock.runtime.plan.cluster import Cluster
from penstock.runtime.plan.cost import Cost
from penstock.runtime.plan.gpus import BYTES, Precision
from penstock.runtime.plan.lengths import IntArray
from penstock.runtime.plan.local import LocalGenerator, LocalTrainer
from penstock.runtime.plan.machine import Cpu
from penstock.runtime.plan.place import place
from penstock.runtime.plan.plan import Plan
from penstock.runtime.plan.roles import PlanError, Roles
from penstock.runtime.plan.roles_of import roles_of
from penstock.runtime.plan.table import html_table
from penstock.runtime.plan.training import FOLLOW_BYTES
from penstock.runtime.plan.workload import Workload

SYNC_MESSAGES = 12
"""Messages that follow each other in an update: begin and end of each stage and of the sync's three parts."""
DIGEST_READS = 3
"""How often the bytes of a sync are read for its proof: where they come from, where they arrive, and compared."""
MICRO_TOKENS = 2048
"""Most tokens of a micro-batch on a CPU, unless the program has an option."""


@dataclass(frozen=True)
class LocalPlan:
    """`generation`, `training` and `sync` are of one batch; `cpu` has measured them."""

    roles: Roles
    work: Workload
    cpu: Cpu
    plan: Plan
    precision: Precision
    slots: int
    micro_tokens: int

    @property
    def overlaps(self) -> bool:
        return self.roles.lag > 0

    @property
    def generator(self) -> LocalGenerator:
        way = self.cpu.beside if self.overlaps else self.cpu.turns
        slots = -(-self.slots // 16) * 16
        return LocalGenerator(self.work.shape, way[self.precision], slots, self.work.context, self.precision)

    @cached_property
    def generation(self) -> Cost:
        lengths = self.work.response_tokens.tolist()
        return self.generator.rollout(lengths, self.work.prompt_tokens, self.work.rows, self.work.replacements)

    @cached_property
    def training(self) -> Cost:
        found, times = self.trained(self.work.sequence_tokens), self.roles.models.followed
        return found + self.followed * times if times else found

    @property
    def followed(self) -> Cost:
        """A copy takes in what the policy has become."""
        return Cost({"copies": self.work.shape.parameters * FOLLOW_BYTES / (self.cpu.copy_gb_s * 1e9)})

    def trained(self, sequence_tokens: IntArray) -> Cost:
        """[responses]: an update on sequences of these lengths."""
        passes = self.cpu.training[self.precision]
        trainer = LocalTrainer(self.work.shape, passes, self.cpu.copy_gb_s, self.micro_tokens, self.precision)
        lengths = [int(length) - 1 for length in sequence_tokens]
        share = -(-len(lengths) // self.work.minibatches)
        steps = [trainer.step(lengths[first : first + share]) for first in range(0, len(lengths), share)]
        return sum(steps, Cost()) * self.work.epochs

    @cached_property
    def sync(self) -> Cost:
        """A snapshot, the put into shared memory, the digests, and the messages of an update."""
        nbytes = self.work.shape.parameters * BYTES[self.precision]
        return Cost(
            {
                "snapshot": 2 * nbytes / (self.cpu.copy_gb_s * 1e9),
                "put": nbytes / (self.cpu.shared_gb_s * 1e9),
                "digests": DIGEST_READS * nbytes / (self.cpu.read_gb_s * 1e9),
                "messages": SYNC_MESSAGES * self.cpu.latency_us * 1e-6,
            }
        )

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """The largest first."""
        train, generate, sync = self.training.seconds, self.generation.seconds, self.sync.seconds
        found = [Bound((train + generate + sync) / (1 + self.roles.lag), self.roles.cycle, 1 + self.roles.lag)]
        if self.overlaps:
            names = f"{self.roles.trainer} and {self.roles.generator}, which share {self.cpu.cores} cores"
            found.append(Bound(self._both_s(train + sync, generate), pool=names))
        return tuple(sorted(found, key=lambda bound: -bound.seconds))

    def _both_s(self, train: float, generate: float) -> float:
        """Seconds until both are done that begin at once: crowded until the first is, then what is left, alone."""
        slowed = train * self.cpu.crowded.trainer, generate * self.cpu.crowded.generator
        first = min(slowed)
        left = (1 - first / slowed[0]) * train + (1 - first / slowed[1]) * generate
        return first + left

    @property
    def period_s(self) -> float:
        return self.bounds[0].seconds

    @property
    def memory(self) -> dict[str, dict[str, float]]:
        """Bytes of the trainer and the generator, by component."""
        shape, item = self.work.shape, BYTES[self.precision]
        copy = item * shape.parameters if self.precision != "fp32" else 0.0
        lanes = self.cpu.training[self.precision].lanes
        activations = 34.0 * self.micro_tokens * shape.hidden * shape.layers * item / BYTES["bf16"] * lanes
        cache = shape.layers * shape.cache_width * 4.0 * self.slots * self.work.context
        trainer = {"weights": 4.0 * shape.parameters + copy, "moments": 8.0 * shape.parameters}
        trainer |= {"copies": 4.0 * shape.parameters * self.roles.models.copies}
        trainer |= {"gradients": 4.0 * shape.parameters * (1 + lanes), "activations": activations}
        return {
            self.roles.trainer: trainer,
            self.roles.generator: {"weights": 2 * item * shape.parameters, "cache": cache},
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "program": self.roles.graph,
            "model": self.work.shape.name,
            "lag": self.roles.lag,
            "period_s": self.period_s,
            "optimal": False,
            "gap": None,
            "bound": self.bounds[0].cause,
            "bounds": [{"seconds": bound.seconds, "cause": bound.cause} for bound in self.bounds],
            "assumptions": list(assumptions(self.roles, self.work)),
            "parts": {
                "generation": dict(self.generation.parts),
                "training": dict(self.training.parts),
                "sync": dict(self.sync.parts),
            },
            "pools": [self._pool(pool.name) for pool in self.plan.pools],
            "alternatives": [
                {"name": f"in {other.precision}", "period_s": other.period_s, "bound": other.bounds[0].cause}
                for other in self.alternatives
            ],
        }

    def _repr_html_(self) -> str:
        """A table of the pools, for notebooks."""
        what = f"{self.roles.graph}, {self.work.shape.name}: {self.period_s:.3g} s per update"
        rows = [
            (pool["name"], ", ".join(pool["nodes"]), pool["threads"], pool["precision"],
             f"{sum(pool['memory'].values()) / 1e9:.2f} GB" if pool["memory"] else "")
            for pool in map(self._pool, (pool.name for pool in self.plan.pools))
        ]  # fmt: skip
        head = ("pool", "nodes", "threads", "precision", "memory")
        return html_table(f"{what}; bound by {self.bounds[0].cause}", head, rows)

    @property
    def alternatives(self) -> tuple["LocalPlan", ...]:
        """The same in the other precisions that were measured."""
        others = [name for name in self.cpu.precisions if name != self.precision]
        given = (self.slots, self.micro_tokens)
        return tuple(LocalPlan(self.roles, self.work, self.cpu, self.plan, name, *given) for name in others)

    def _pool(self, name: str) -> dict[str, Any]:
        pool = next(pool for pool in self.plan.pools if pool.name == name)
        memory = self.memory.get(name, {})
        return {
            "name": name,
            "nodes": list(self.roles.nodes_of(name)),
            "devices": 0,
            "threads": pool.replicas[0].ranks[0].threads,
            "replicas": len(pool.replicas),
            "mesh": "",
            "precision": self.precision if memory else "",
            "memory": memory,
        }


def local_plan(
    graph: Graph, cluster: Cluster, work: Workload, *, slots: int, micro_tokens: int, precision: Precision
) -> LocalPlan:
    """Raises PlanError for a program, a machine or a model that is not covered."""
    host = cluster.hosts[0]
    if len(cluster.hosts) > 1 or not host.cpu:
        given = f"{len(cluster.hosts)} hosts without GPUs" if len(cluster.hosts) > 1 else f"host {host.name}: no cpu"
        raise PlanError(f"hosts: given {given}, needed GPUs, or one host as `penstock doctor --measure` writes it")
    cpu, roles = cluster.cpus[host.cpu], roles_of(graph)
    more = (*roles.readers, *roles.learners, *roles.rereads, *([roles.environment] if roles.turns > 1 else ()))
    if more := (*more, *roles.outside):
        alone = "nothing beside generation and the policy's updates: on cores no other work is measured"
        raise PlanError(f"{roles.graph}: no period is predicted: given {', '.join(more)}, needed {alone}")
    if precision not in cpu.precisions:
        raise PlanError(f"dtype: given {precision}, needed one that was measured: {', '.join(cpu.precisions)}")
    plan = place([graph], cluster, slots=slots)
    found = LocalPlan(roles, work, cpu, plan, precision, slots, micro_tokens)
    try:
        _ = found.bounds
    except ValueError as error:
        raise PlanError(str(error)) from None
    parts = [(f"{pool} {part}", size) for pool, held in found.memory.items() for part, size in held.items() if size]
    needed = sum(size for _, size in parts)
    if needed > cpu.memory_gib * 2**30:
        held = [f"{part} {size / 1e9:.1f}" for part, size in parts]
        given = f"{cpu.memory_gib * 2**30 / 1e9:.1f} GB, needed {needed / 1e9:.1f} GB ({', '.join(held)})"
        raise PlanError(f"memory of {host.name}: given {given}: a smaller model, or fewer slots or tokens")
    return found
