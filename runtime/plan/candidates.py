"""Candidate layouts of each role, and tables of their seconds by number of GPUs. Pure.

Three roles have layouts: the trainer (with the models colocated with it), models on dedicated GPUs, and the generator.
A pool is within one node group; a group's `sizes` are the numbers of GPUs that a pool may have there.

A trainer's layouts are generated lazily in the order of their seconds. A generator's layouts are the rows of a table.
All lower bounds are multiplied by `SAFE`, so that rounding never lifts one above the value that it bounds.

Suffixes of arrays: _N, by `NodeGroup.sizes`; _R, by the rows of a `GeneratorTable`.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from itertools import product
from math import inf
from typing import Any

import numpy as np

from penstock.graph.protocols import EXPERT, STAGE, Axes
from penstock.runtime.cluster.capabilities import CAPABILITIES, DENSE_CACHE, cut_lack
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.gpus import BYTES, Gpu, Precision
from penstock.runtime.plan.collectives import SAFE, Cost
from penstock.runtime.plan.decode_cost import Generator, generator_memory, rollout_s
from penstock.runtime.plan.model_shape import Parallel, Shape
from penstock.runtime.plan.roles import Models, PlanError
from penstock.runtime.plan.train_cost import Memory, Trainer, beside_memory, host_moments, packed, trainer_memory
from penstock.runtime.plan.workload import BoolArray, FloatArray, IntArray, Workload

FEWEST_SLOTS = 8
# Parts of a step that take n GPUs at least 1 / n of one GPU's time.
SHARED_OUT = ("products", "attention", "elementwise", "logits")


@dataclass(frozen=True, eq=False)
class NodeGroup:
    """Equal hosts, each with `each` GPUs of one kind and at least `host_bytes` of host memory (inf: not known)."""

    kind: str
    gpu: Gpu
    hosts: tuple[str, ...]
    each: int
    host_bytes: float = inf

    @cached_property
    def gpus(self) -> int:
        return len(self.hosts) * self.each

    def host_share(self, gpus: int) -> float:
        """The most bytes of host memory that each rank of a pool with `gpus` GPUs may have."""
        return self.host_bytes / min(gpus, self.each)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many GPUs a pool may have: a divisor of a host's, or any number on a single host; then whole hosts."""
        parts = [part for part in range(1, self.each) if self.each % part == 0 or len(self.hosts) == 1]
        return (*parts, *range(self.each, self.gpus + 1, self.each))

    def __str__(self) -> str:
        return f"{len(self.hosts)} hosts of {self.each} {self.kind}, {self.gpus} GPUs"

    @cached_property
    def sizes_N(self) -> IntArray:
        return np.array(self.sizes, np.int64)

    @cached_property
    def place(self) -> Mapping[int, int]:
        """The index of each size in the tables."""
        return {size: place for place, size in enumerate(self.sizes)}

    def share_out(self, pools: Sequence[int]) -> list[tuple[str, ...]] | None:
        """The hosts of pools with these numbers of GPUs, in the pools' order; None if they cannot be packed.

        First-fit by decreasing size: whole hosts, then parts of hosts. If there are several hosts, a part is at most
        half of one, so up to five parts are packed whenever they can be. On a single host, the sum decides.
        """
        # Largest first: the rest of a host still has room for smaller pools.
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


def node_groups(cluster: Cluster) -> tuple[NodeGroup, ...]:
    """The node groups of a cluster, in the order of its hosts. Raises PlanError for a cluster without GPUs,
    ClusterError for a kind of GPU that the cluster does not describe."""
    alike = defaultdict[tuple[str, int], list[Host]](list)
    for host in cluster.hosts:
        if host.accelerators:
            alike[host.gpu, len(host.accelerators)].append(host)
    if not alike:
        given = f"{len(cluster.hosts)} hosts without GPUs"
        raise PlanError(f"cluster: given {given}, needed one or more with devices and their kind, gpu = …")
    return tuple(
        NodeGroup(
            kind,
            gpu.in_hosts_of(each),
            tuple(host.name for host in hosts),
            each,
            min((cluster.memory_gib(host) or inf) * 2**30 for host in hosts),
        )
        for (kind, each), hosts in alike.items()
        if (gpu := cluster.gpu_of(hosts[0]))
    )


@dataclass(frozen=True)
class LastResorts:
    """Features that layouts use only if nothing fits without them. tp_over_hosts: tensor parallelism over whole hosts,
    which a run has with the flag of this name. host_state: AdamW's moments of all models that learn are on the host.
    cp: context parallelism, sequences that several ranks share, which no run has."""

    tp_over_hosts: bool = False
    host_state: bool = False
    cp: bool = False

    def tensor_sizes(self, nodes: NodeGroup, gpus: int) -> list[int]:
        """The sizes of tensor parallelism on `gpus` GPUs."""
        over = _divisors(gpus // nodes.each)[1:] if self.tp_over_hosts and gpus > nodes.each else []
        return [*_divisors(min(nodes.each, gpus)), *(nodes.each * hosts for hosts in over)]


# In the order in which they are tried: features of real runs come first.
RESORTS = tuple(LastResorts(tp, host, cp) for cp, host, tp in product((False, True), repeat=3))


def trainer_meshes(shape: Shape, nodes: NodeGroup, gpus: int, resorts: LastResorts = RESORTS[0]) -> Iterator[Parallel]:
    """Every mesh of `gpus` ranks over dp, fsdp, tp and pp, with experts over ranks of fsdp. tp stays within a host,
    unless `resorts` has it over hosts."""
    if gpus > nodes.each and not CAPABILITIES["trainer"].over_hosts:
        return
    for tp in resorts.tensor_sizes(nodes, gpus):
        for pp in _divisors(gpus // tp) if gpus % tp == 0 else ():
            data = gpus // tp // pp
            for fsdp in _divisors(data):
                for ep in _divisors(fsdp) if shape.experts else (1,):
                    mesh = Parallel(dp=data // fsdp, fsdp=fsdp, tp=tp, pp=pp, ep=ep)
                    if cut_lack("trainer", shape, mesh.axes) is None:
                        yield mesh


def sharings(mesh: Parallel, resorts: LastResorts) -> Sequence[int]:
    """The sizes of a trainer's `cp`: over how many ranks of `fsdp` a sequence is cut."""
    return _divisors(mesh.fsdp) if resorts.cp else (1,)


def micro_tokens(longest: int, most: int) -> list[int]:
    """Candidate tokens of a micro-batch: those of the longest sequence, doubled up to `most`."""
    tokens = [longest]
    while tokens[-1] * 2 <= most:
        tokens.append(tokens[-1] * 2)
    return tokens


def slot_counts(fit: int, useful: int) -> list[int]:
    """Candidate numbers of slots: powers of two and `fit`, the most that fit in memory, up to the first that is at
    least `useful`."""
    counts = [FEWEST_SLOTS]
    while counts[-1] * 2 < fit:
        counts.append(counts[-1] * 2)
    counts = [count for count in counts if count < fit] + ([fit] if fit > 0 else [])
    return [count for before, count in zip([0, *counts], counts, strict=False) if before < useful]


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


@dataclass(frozen=True)
class Pins:
    """What the user gives.

    trainer, generator, beside: meshes; pools with models beside the policy that are given one have dedicated GPUs.
    slots, replicas: of the generator. micro_tokens, recompute, host_state (AdamW's moments are on the host): of all
    that learn. For GPUs that trainer and generator share: offload, the moments are on the host while they decode;
    overlaps, both roles work at the same time.
    """

    trainer: Axes | None = None
    generator: Axes | None = None
    beside: Mapping[str, Axes] = field(default_factory=dict)
    slots: int | None = None
    replicas: int | None = None
    micro_tokens: int | None = None
    recompute: bool | None = None
    host_state: bool | None = None
    offload: bool | None = None
    overlaps: bool = False

    @property
    def flags(self) -> str:
        """The flags that give it, in words; "" for none."""
        meshes = self.trainer is not None or self.generator is not None or bool(self.beside)
        given = {
            "mesh": meshes or None, "slots": self.slots, "generators": self.replicas,
            "micro-tokens": self.micro_tokens, "recompute": self.recompute,
            "optimizer-state": self.host_state, "offload": self.offload, "lag": self.overlaps or None,
        }  # fmt: skip
        return " and ".join(f"--{name}" for name, value in given.items() if value is not None)

    def of(self, pools: Sequence[str]) -> Axes | None:
        """The given mesh of pools that share a layout; None if none is given."""
        return next((self.beside[pool] for pool in pools if pool in self.beside), None)

    def agree(self, pools: Sequence[str]) -> bool:
        """True if some pools may share a layout."""
        return len({self.beside[pool] for pool in pools if pool in self.beside}) <= 1


@dataclass(frozen=True)
class Training:
    """A layout of a trainer. steps: seconds of an update's steps and further passes of the policy (none on dedicated
    GPUs of models beside the policy). reads, learns: passes and steps of the models on the same GPUs. memory: of a rank
    with all of it. host_bytes: a rank's moments on its host."""

    trainer: Trainer
    steps: Cost
    reads: Cost
    learns: Cost
    memory: Memory
    host_bytes: float = 0.0

    @cached_property
    def seconds(self) -> float:
        return self.steps.seconds + self.reads.seconds + self.learns.seconds


@dataclass(frozen=True)
class Generating:
    """A layout of a generator: `replicas` replicas of a mesh, and the memory of a rank."""

    generator: Generator
    replicas: int
    memory: Memory

    @property
    def gpus(self) -> int:
        return self.replicas * self.generator.mesh.ranks


@dataclass(frozen=True)
class TrainerFamily:
    """Trainers with the same data parallelism and the same cut of layers. They differ in how weights are sharded: by
    `fsdp` against `dp`, and in whether weights are gathered for each micro-batch (`zero3`). `passed_s` and `steps_s`:
    lower bounds of the seconds of one pass over an update's sequences, and of one model's steps."""

    first: Trainer
    meshes: tuple[Parallel, ...]
    passed_s: float
    steps_s: float

    def layouts(self) -> Iterator[Trainer]:
        for mesh in self.meshes:
            whole = mesh.fsdp == 1 or CAPABILITIES["trainer"].zero1
            for zero3 in (False,) * whole + (True,) * (mesh.fsdp > 1):
                yield replace(self.first, mesh=mesh, zero3=zero3)


class FastestFirst:
    """Layouts in the order of their seconds. They come in `cuts`, each with a lower bound; a cut's layouts are made
    only when no layout that is made already is as fast as the bound."""

    def __init__(self, cuts: Iterable[tuple[float, Callable[[], Iterable[Training]]]]) -> None:
        def made(bound: float, make: Callable[[], Iterable[Training]]) -> Iterator[tuple[float, Training | None]]:
            # In the merge, the bound stands for all layouts of the cut until its turn comes.
            yield bound, None
            yield from sorted(((each.seconds, each) for each in make()), key=lambda each: each[0])

        # Of equal bounds the last cut, with the largest micro-batches, comes first: the list is reversed, and the sort
        # is stable.
        ordered = list(cuts)
        ordered.reverse()
        ordered.sort(key=lambda cut: cut[0])
        self._rest = heapq.merge(*(made(*cut) for cut in ordered), key=lambda each: each[0])
        self._known: list[Training] = []

    def at(self, index: int) -> Training | None:
        """The layout at this index; None beyond the last one."""
        while len(self._known) <= index and (following := next(self._rest, None)):
            if following[1] is not None:
                self._known.append(following[1])
        return self._known[index] if index < len(self._known) else None

    def __iter__(self) -> Iterator[Training]:
        index = 0
        while (each := self.at(index)) is not None:
            yield each
            index += 1


@dataclass(eq=False)
class GeneratorTable:
    """Layouts of a generator, a row for each, sorted by GPUs.

    base: the index in the candidates' `bases`, a mesh. bytes: weights on each rank. Seconds of a batch: `steady`, with
    slots that never run empty; `rollout`, of a batch alone, a lower bound until it is `simulated`; `others`, what a
    batch adds to another batch that is decoded at the same time. Rows with the same `alike` have the same rollout.
    `version` counts changes of bounds, so that readers notice them.
    """

    base: IntArray
    replicas: IntArray
    slots: IntArray
    gpus: IntArray
    bytes: FloatArray
    alike: IntArray
    steady: FloatArray
    rollout: FloatArray
    others: FloatArray
    simulated: BoolArray
    version: int = 0

    def note(self, alike: int, seconds: float) -> None:
        """Set the simulated seconds of the rollout of rows with this `alike`."""
        same = self.alike == alike
        if same.any():
            self.rollout[same], self.simulated[same] = seconds, True
            self.version += 1

    def fastest(self, nodes: NodeGroup, *, or_fewer: bool) -> tuple[FloatArray, ...]:
        """[sizes] each: lower bounds of `steady`, `rollout`, `others` and `bytes` over all layouts on each number of
        GPUs, or with `or_fewer` on at most as many. `steady` is infinite where there is no layout."""

        def least(column_R: FloatArray) -> FloatArray:
            found = np.full(len(nodes.sizes), inf)
            np.minimum.at(found, np.searchsorted(nodes.sizes_N, self.gpus), column_R)
            return np.minimum.accumulate(found) if or_fewer else found

        # `steady` alone makes the period of such a size infinite. The others stay finite, to avoid inf - inf in sums.
        columns = (least(column) for column in (self.steady, self.rollout, self.others, self.bytes))
        steady, *others = columns
        return (steady, *(np.where(np.isfinite(steady), column, 1.0) for column in others))


# The columns of a table, without what is known from simulations.
COLUMNS = tuple(each.name for each in fields(GeneratorTable))[:-2]


# Methods of LayoutCandidates that a search calls repeatedly.
CACHED = ("cuts", "trainers", "readers", "trainer_s", "reader_s", "bases", "dedicated", "fastest", "_one_gpu",
          "_row_bytes", "_table", "_block")  # fmt: skip


@dataclass(eq=False)
class LayoutCandidates:
    """Candidate layouts of each role for one workload, cached. `slots` is the most slots of a generator's replica,
    `models` is the work beside the policy's own steps, `precision` is that of the generator's weights, `resorts` are
    the last resorts that layouts may use."""

    work: Workload
    lag: int
    slots: int = 256
    pins: Pins = field(default_factory=Pins)
    models: Models = field(default_factory=Models)
    precision: Precision = "bf16"
    resorts: LastResorts = RESORTS[0]

    def __post_init__(self) -> None:
        # A cache for each object, freed with it; caches of the class would keep all objects alive.
        for name in CACHED:
            setattr(self, name, cache(getattr(self, name)))
        # Tables of one node group share what is known of rollouts.
        self._tables: defaultdict[NodeGroup, list[GeneratorTable]] = defaultdict(list)
        self._rollouts: defaultdict[NodeGroup, dict[int, float]] = defaultdict(dict)
        # An update's sequences: all of them, each minibatch, and the parts in which they arrive.
        self._whole = packed(self.work.sequence_tokens)[0]
        # Packed once: every layout's seconds follow from these few numbers, not from all lengths.
        self._minibatches = packed(self.work.sequence_tokens, self.work.minibatches)
        self._parts = packed(self.work.sequence_tokens, self.work.minibatches * self.work.parts)
        # The tokens of each slot's cache.
        mean = self.work.prompt_tokens + float(np.mean(self.work.response_tokens + self.work.prefix_tokens))
        self.context = float(self.work.context) if DENSE_CACHE else mean

    @property
    def recomputes(self) -> tuple[float, ...]:
        """The shares of the forward pass that the backward pass may repeat, the one with least memory first."""
        return (1.0, 0.0) if self.pins.recompute is None else (float(self.pins.recompute),)

    def cuts(self, nodes: NodeGroup, gpus: int, pin: Axes | None = None) -> list[TrainerFamily]:
        """All trainers on `gpus` GPUs, whether they fit or not; with the mesh `pin`, if it is given."""
        # Sharding of weights changes communication, not computation: one lower bound holds for a whole family.
        meshes, pins = defaultdict[tuple[int, ...], list[Parallel]](list), self.pins
        own = [max(self.work.context, pins.micro_tokens)] if pins.micro_tokens else []
        for mesh in trainer_meshes(self.work.shape, nodes, gpus, self.resorts):
            if pin is None or pin == mesh.axes:
                for cp in sharings(mesh, self.resorts):
                    meshes[cp, mesh.data, mesh.tp, mesh.pp, mesh.ep].append(mesh)
        found = []
        every = product(own or micro_tokens(self.work.context, self.work.micro_tokens), self.recomputes)
        for ((cp, *_), alike), (tokens, again) in product(meshes.items(), list(every)):
            first = Trainer(
                    self.work.shape, nodes.gpu, alike[0], micro_tokens=tokens, recompute=again, zero3=False,
                    cp=cp, host_state=self.resorts.host_state,
                )  # fmt: skip
            steps_s = sum(first.least(part, backward=True) for part in self._minibatches) * self.work.epochs
            passed_s = first.least(self._whole, backward=False)
            found.append(TrainerFamily(first, tuple(alike), passed_s * SAFE, steps_s * SAFE))
        return found

    def trainers(self, nodes: NodeGroup, gpus: int, colocated: Models) -> FastestFirst:
        """The trainers that fit together with the colocated models, the fastest first."""
        critics = colocated.critics
        passes, learners = colocated.count + self.models.rereads, 1 + critics

        def made(cut: TrainerFamily) -> Iterator[Training]:
            for trainer in cut.layouts():
                memory = trainer_memory(trainer, self.models.copies, self.snapshots)
                memory = memory + beside_memory(trainer, colocated) if colocated.count else memory
                host_bytes = host_moments(trainer) + host_moments(trainer.all_learning()) * critics
                if memory.bytes > nodes.gpu.memory_bytes or host_bytes > nodes.host_share(gpus):
                    continue
                steps = trainer.steps(self._parts, self.work.epochs, self.work.parts)
                passed = trainer.passed(self._whole) if passes else Cost()
                own = steps + passed * self.models.rereads if self.models.rereads else steps
                own = own + trainer.followed() * self.models.followed if self.models.followed else own
                learns = trainer.all_learning().steps(self._minibatches, self.work.epochs) if critics else Cost()
                yield Training(trainer, own, passed * colocated.count, learns * critics, memory, host_bytes)

        cuts = self.cuts(nodes, gpus, self.pins.trainer)
        found = FastestFirst((cut.passed_s * passes + cut.steps_s * learners, partial(made, cut)) for cut in cuts)
        # From now on the table of lower bounds has the exact seconds for this size.
        first = found.at(0)
        self.trainer_s(nodes, colocated)[nodes.place[gpus]] = first.seconds if first else inf
        return found

    def readers(self, nodes: NodeGroup, gpus: int, models: Models, pin: Axes | None = None) -> tuple[Training, ...]:
        """The layouts of models on dedicated GPUs that fit, and that no other one beats in both passes and steps. For
        critics this holds for each choice of recomputation, since all that learn must have the same."""
        best: list[Training] = []

        def beaten(reads_s: float, learns_s: float, trainer: Trainer) -> bool:
            """True if a kept layout is as fast in both passes and steps."""
            return any(
                each.reads.seconds <= reads_s and each.learns.seconds <= learns_s
                for each in best
                if not models.critics or each.trainer.recompute == trainer.recompute
            )

        def made(cut: TrainerFamily) -> Iterator[Training]:
            # If a kept layout beats the family's bounds, its layouts are not made.
            if beaten(cut.passed_s * models.count, cut.steps_s * models.critics, cut.first):
                return
            for trainer in (each.all_learning() for each in cut.layouts()):
                passing = trainer if models.critics else replace(trainer, frozen=True)
                memory = trainer_memory(passing)
                if models.count > 1:
                    critic = min(1, models.critics)
                    memory += beside_memory(passing, Models(models.frozen - 1 + critic, models.critics - critic))
                host_bytes = host_moments(trainer) * models.critics
                if memory.bytes <= nodes.gpu.memory_bytes and host_bytes <= nodes.host_share(gpus):
                    reads = passing.passed(self._whole) * models.count
                    steps = trainer.steps(self._minibatches, self.work.epochs) if models.critics else Cost()
                    yield Training(passing, Cost(), reads, steps * models.critics, memory, host_bytes)

        cuts = self.cuts(nodes, gpus, pin)
        bounds = (cut.passed_s * models.count + cut.steps_s * models.critics for cut in cuts)
        for each in FastestFirst((bound, partial(made, cut)) for bound, cut in zip(bounds, cuts, strict=True)):
            if not beaten(each.reads.seconds, each.learns.seconds, each.trainer):
                best.append(each)  # noqa: PERF401 - `beaten` and `made` read the list meanwhile
        # With a given mesh the table's bounds stay: pools without a given mesh share them.
        if pin is None:
            reads_N, learns_N = self.reader_s(nodes, models)
            reads_N[nodes.place[gpus]] = min((each.reads.seconds for each in best), default=inf)
            learns_N[nodes.place[gpus]] = min((each.learns.seconds for each in best), default=inf)
        return tuple(best)

    def trainer_s(self, nodes: NodeGroup, colocated: Models) -> FloatArray:
        """[sizes]: lower bounds of an update's seconds by number of GPUs; exact once `trainers` was called."""
        passed, steps = self._one_gpu(nodes)
        gpu_s = steps * (1 + colocated.critics) + passed * (self.models.rereads + colocated.count)
        return np.asarray(gpu_s / nodes.sizes_N, np.float64)

    def reader_s(self, nodes: NodeGroup, models: Models) -> tuple[FloatArray, FloatArray]:
        """[sizes] each: the same for the passes, and for the steps, of models on dedicated GPUs."""
        passed, steps = self.dedicated_gpu_s(nodes, models)
        return passed / nodes.sizes_N, steps / nodes.sizes_N

    def dedicated_gpu_s(self, nodes: NodeGroup, models: Models) -> tuple[float, float]:
        """Lower bounds of the GPU-seconds of models' passes, and of critics' steps."""
        passed, steps = self._one_gpu(nodes)
        return models.count * passed, models.critics * steps

    def _one_gpu(self, nodes: NodeGroup) -> tuple[float, float]:
        """Lower bounds of the GPU-seconds of one pass, and of one model's steps."""
        work = self.work
        tokens = int(work.sequence_tokens.sum())
        alone = Trainer(work.shape, nodes.gpu, Parallel(), micro_tokens=tokens, recompute=min(self.recomputes))
        costs = alone.passed(self._whole), alone.update(work.sequence_tokens, work.epochs)
        passed, steps = (sum(cost.parts[part] for part in SHARED_OUT) * SAFE for cost in costs)
        return passed, steps

    def generators(
        self, nodes: NodeGroup, sizes: Sequence[int], beside: Memory | None, training: Memory | None = None
    ) -> GeneratorTable:
        """All layouts on these numbers of GPUs that fit with the memory `beside` them on each GPU. While these GPUs
        train, `training` must fit beside the generator's weights: only its cache is released."""
        # Memory is linear in the slots: how many fit follows from two points.
        empty, each = self._row_bytes(nodes)
        memory = nodes.gpu.memory_bytes
        fits = np.clip((memory - (beside.used if beside else 0.0) - empty) // each, 0, self.slots).astype(np.int64)
        fits = np.where(empty > memory - (training.used if training else 0.0), 0, fits)
        if self.pins.slots:
            fits = np.where(fits < self.pins.slots, 0, self.pins.slots)
        return self._table(nodes, tuple(sizes), tuple(fits.tolist()))

    @property
    def snapshots(self) -> float:
        """The bytes of a weight in the snapshot that generators read."""
        return BYTES[self.precision]

    def dedicated(self, nodes: NodeGroup) -> GeneratorTable:
        """All layouts of a generator on dedicated GPUs."""
        return self.generators(nodes, nodes.sizes, None)

    def fastest(self, nodes: NodeGroup, shared: bool) -> tuple[FloatArray, ...]:
        """`GeneratorTable.fastest` on at most as many dedicated GPUs; or if `shared` on exactly the trainer's, whatever
        memory the trainer takes there."""
        table = self.generators(nodes, nodes.sizes, None) if shared else self.dedicated(nodes)
        return table.fastest(nodes, or_fewer=not shared)

    def generating(self, nodes: NodeGroup, table: GeneratorTable, row: int) -> Generating:
        """The layout in a table's row, with its memory."""
        generator = self._generator(nodes, table, row)
        memory = generator_memory(generator, self.context)
        return Generating(generator, int(table.replicas[row]), memory)

    def simulate(self, nodes: NodeGroup, table: GeneratorTable, row: int) -> None:
        """Simulate a row's rollout over the batch's lengths, and note its seconds in all tables of the node group."""
        generator, replicas = self._generator(nodes, table, row), int(table.replicas[row])
        alike, seconds = int(table.alike[row]), rollout_s(self.work, generator, replicas)
        self._rollouts[nodes][alike] = seconds
        for each in self._tables[nodes]:
            each.note(alike, seconds)

    def _generator(self, nodes: NodeGroup, table: GeneratorTable, row: int) -> Generator:
        return replace(self.bases(nodes)[int(table.base[row])], slots=int(table.slots[row]))

    def bases(self, nodes: NodeGroup) -> list[Generator]:
        """A generator of one slot for each possible mesh; none on GPUs that do not compute in its precision."""
        shape, gpu, pin, row = self.work.shape, nodes.gpu, self.pins.generator, CAPABILITIES["generator"]
        if not gpu.computes(self.precision):
            return []
        staged = STAGE in row.axes and STAGE in row.over_hosts
        # Pipeline stages only over whole hosts, for models that are too large for one.
        meshes = [
            Parallel(tp=tp, pp=pp)
            for tp in self.resorts.tensor_sizes(nodes, nodes.gpus)
            for pp in (_divisors(len(nodes.hosts)) if staged and tp == nodes.each else (1,))
        ]
        # Experts are divided among the GPUs of a host; each GPU has all other weights.
        if shape.experts and EXPERT in row.axes:
            meshes += [Parallel(fsdp=ep, ep=ep) for ep in _divisors(min(nodes.each, nodes.gpus))[1:]]
        wanted = (mesh for mesh in meshes if pin in (None, mesh.axes))
        return [
            Generator(shape, gpu, mesh, 1, self.precision)
            for mesh in wanted
            if cut_lack("generator", shape, mesh.axes) is None
        ]

    def _row_bytes(self, nodes: NodeGroup) -> tuple[FloatArray, FloatArray]:
        """[bases] each: the bytes of a rank without slots, and of each slot."""
        empty, one = (
            np.array([generator_memory(replace(b, slots=n), self.context).bytes for b in self.bases(nodes)])
            for n in (0, 1)
        )
        return empty, one - empty

    def _table(self, nodes: NodeGroup, sizes: tuple[int, ...], fits: tuple[int, ...]) -> GeneratorTable:
        """The table with up to `fits` slots for each base."""
        blocks = [self._block(nodes, base, sizes, fit) for base, fit in enumerate(fits) if fit]
        blocks = blocks or [{name: np.zeros(0, np.int64) for name in COLUMNS}]
        order = np.concatenate([block["gpus"] for block in blocks]).argsort(kind="stable")
        columns: dict[str, Any] = {name: np.concatenate([block[name] for block in blocks])[order] for name in COLUMNS}
        table = GeneratorTable(**columns, simulated=np.zeros(len(order), bool))
        known = self._rollouts[nodes]
        for alike in known.keys() & set(table.alike.tolist()):
            table.note(alike, known[alike])
        self._tables[nodes].append(table)
        return table

    def _block(self, nodes: NodeGroup, number: int, sizes: tuple[int, ...], fit: int) -> dict[str, Any]:
        """The columns of one base: each number of GPUs that replicas of it fill, with each useful number of slots up to
        `fit`, the most that fit in memory."""
        work, base = self.work, replace(self.bases(nodes)[number], slots=fit)
        ranks, in_flight = base.mesh.ranks, work.responses * (self.lag + 1)
        filled = [size for size in sizes if size % ranks == 0 and size <= work.responses * ranks]
        gpus = np.array([size for size in filled if self.pins.replicas in (None, size // ranks)], np.int64)
        counts = np.array([fit] if self.pins.slots else slot_counts(fit, in_flight), np.int64)
        useful = -(-in_flight // (gpus // ranks))
        size, count = np.nonzero(np.concatenate([[0], counts[:-1]]) < useful[:, None])
        replicas, slots = gpus[size] // ranks, counts[count]
        share = -(-work.responses // replicas)
        # More slots than responses change nothing, unless replacements of dropped groups come on top.
        rows = np.minimum(slots, share) if work.kept == 1 else slots
        # The seconds of a step for its rows, which fall per row with their number, and for their contexts, whose sum
        # over a batch is always the same.
        fixed, slope = base.lines.fixed, float(base.lines.slope[1])
        tokens = float(work.response_tokens.sum())
        always = slope * float(work.seen_tokens.sum()) + work.drawn * base.prefill_s(work.prompt_tokens)
        flying = np.minimum(slots, -(-in_flight // replicas))
        alone = np.minimum(slots, share)
        one, most = fixed[1], fixed[flying]
        least = (tokens * fixed[alone] / alone + always) / replicas
        return {
            "base": np.full(len(size), number),
            "replicas": replicas,
            "slots": slots,
            "gpus": gpus[size],
            "bytes": np.full(len(size), base.bytes_each),
            "alike": (number * (nodes.gpus + 1) + replicas) * (self.slots + 1) + rows,
            "steady": (tokens * most / flying + always) / replicas,
            "rollout": np.maximum(least, work.longest * one + slope * float(work.seen_tokens.max())) * SAFE,
            "others": (tokens * (most - one) / np.maximum(1, flying - 1) + always) / replicas,
        }
