"""Candidate layouts of each role, and tables of their seconds over the numbers of GPUs. Pure.

Three roles are laid out: the trainer (with the models that are colocated with it), models on dedicated GPUs, and the
generator. A pool lies within one node group; a group's `sizes` are the numbers of GPUs that a pool may have there.

A trainer's layouts are made in the order of their seconds, as far as somebody asks. A generator's are the rows of a
table. All lower bounds are multiplied by `SAFE`, so that rounding never lifts one above what it bounds.

Suffixes of arrays: _N, by `NodeGroup.sizes`; _R, by the rows of a `GeneratorTable`.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from math import inf
from typing import Any, NamedTuple

import numpy as np

from penstock.graph.protocols import Axes
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.gpus import Gpu, Precision
from penstock.runtime.plan.collectives import SAFE, Cost
from penstock.runtime.plan.decode_cost import Generator, rollout_s
from penstock.runtime.plan.memory import Memory, beside_memory, generator_memory, row_bytes, trainer_memory
from penstock.runtime.plan.model_shape import Parallel, Shape
from penstock.runtime.plan.roles import AskedError, Models
from penstock.runtime.plan.train_cost import Kept, Packed, Trainer, packed
from penstock.runtime.plan.workload import BoolArray, FloatArray, IntArray, Workload

DEDICATED, SHARED = 2, 1
"""Copies of a generator's weights: on dedicated GPUs the next version arrives while it decodes with the last one."""
FEWEST_SLOTS = 8
SHARED_OUT = ("products", "attention", "elementwise", "logits")
"""Parts of a step that n GPUs do in no less than an nth of one GPU's time."""


@dataclass(frozen=True, eq=False)
class NodeGroup:
    """Hosts that are alike: `each` GPUs of one kind."""

    kind: str
    gpu: Gpu
    hosts: tuple[str, ...]
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
    def sizes_N(self) -> IntArray:
        return np.array(self.sizes, np.int64)

    @cached_property
    def place(self) -> Mapping[int, int]:
        """Where each size stands in the tables."""
        return {size: place for place, size in enumerate(self.sizes)}

    def share_out(self, pools: Sequence[int]) -> list[tuple[str, ...]] | None:
        """The hosts of pools with so many GPUs, in the pools' order; None if they have no room beside each other.

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


def node_groups(cluster: Cluster) -> tuple[NodeGroup, ...]:
    """In the order of the cluster's hosts. Raises AskedError for a cluster without GPUs, ClusterError for a kind of GPU
    that the cluster does not say."""
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
    return tuple(NodeGroup(kind, kinds[kind, each], tuple(hosts), each) for (kind, each), hosts in found.items())


def trainer_meshes(shape: Shape, nodes: NodeGroup, gpus: int) -> Iterator[Parallel]:
    """Every cut of `gpus` ranks over dp, fsdp, tp and pp; tensor parallelism stays within a host."""
    for tp in _divisors(min(nodes.each, gpus)):
        for pp in _divisors(gpus // tp) if gpus % tp == 0 else ():
            data = gpus // tp // pp
            for fsdp in _divisors(data):
                mesh = Parallel(dp=data // fsdp, fsdp=fsdp, tp=tp, pp=pp)
                if not mesh.faults(shape):
                    yield mesh


def generator_meshes(shape: Shape, nodes: NodeGroup) -> Iterator[Parallel]:
    """Tensor parallelism within a host; stages only over whole hosts, where a host is not enough."""
    for tp in _divisors(nodes.each):
        for pp in _divisors(len(nodes.hosts)) if tp == nodes.each else (1,):
            mesh = Parallel(tp=tp, pp=pp)
            if not mesh.faults(shape):
                yield mesh


def micro_tokens(longest: int, most: int) -> list[int]:
    """Tokens of a micro-batch: those of the longest sequence, doubled up to `most`."""
    tokens = [longest]
    while tokens[-1] * 2 <= most:
        tokens.append(tokens[-1] * 2)
    return tokens


def slot_counts(fit: int, useful: int) -> list[int]:
    """Rows at once: powers of two and what fits; none beyond the first that is more than can be of use."""
    counts = [FEWEST_SLOTS]
    while counts[-1] * 2 < fit:
        counts.append(counts[-1] * 2)
    counts = [count for count in counts if count < fit] + ([fit] if fit > 0 else [])
    return [count for before, count in zip([0, *counts], counts, strict=False) if before < useful]


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


@dataclass(frozen=True)
class Pins:
    """Meshes that are given. `beside` are those of pools with models beside the policy, which then have dedicated
    GPUs."""

    trainer: Axes | None = None
    generator: Axes | None = None
    beside: Mapping[str, Axes] = field(default_factory=dict)

    def of(self, pools: Sequence[str]) -> Axes | None:
        """That of pools with one layout, if it is given."""
        return next((self.beside[pool] for pool in pools if pool in self.beside), None)

    def agree(self, pools: Sequence[str]) -> bool:
        """Whether some pools may have one layout."""
        return len({self.beside[pool] for pool in pools if pool in self.beside}) <= 1


@dataclass(frozen=True)
class Training:
    """A layout of a trainer: seconds of an update's steps and further passes of the policy; of the passes and steps of
    the models that are colocated with it; and the memory of a rank with all of it. On dedicated GPUs of models beside
    the policy there are no steps of the policy."""

    trainer: Trainer
    steps: Cost
    reads: Cost
    learns: Cost
    memory: Memory

    @cached_property
    def seconds(self) -> float:
        return self.steps.seconds + self.reads.seconds + self.learns.seconds

    def beats(self, reads_s: float, learns_s: float) -> bool:
        """Whether another one is no faster in passes nor in steps."""
        return self.reads.seconds <= reads_s and self.learns.seconds <= learns_s


@dataclass(frozen=True)
class Generating:
    """A layout of a generator: `replicas` copies of a mesh, and the memory of a rank."""

    generator: Generator
    replicas: int
    memory: Memory

    @property
    def gpus(self) -> int:
        return self.replicas * self.generator.mesh.ranks


@dataclass(frozen=True)
class TrainerFamily:
    """Trainers that share out the data and cut the layers alike. They differ in how weights are sharded: over the
    shards of each mesh, and for each micro-batch or not. `passed_s` and `steps_s`: lower bounds of the seconds of one
    pass over an update's sequences, and of one model's steps."""

    first: Trainer
    meshes: tuple[Parallel, ...]
    passed_s: float
    steps_s: float

    def layouts(self) -> Iterator[Trainer]:
        for mesh in self.meshes:
            for zero3 in (False, True) if mesh.fsdp > 1 else (False,):
                yield replace(self.first, mesh=mesh, zero3=zero3)


class FastestFirst:
    """Layouts by their seconds, equal ones in the order of their cuts. They come in `cuts`, each with a lower bound; a
    cut's layouts are made when no layout that is made already is as fast as the bound."""

    def __init__(self, cuts: Iterable[tuple[float, Callable[[], Iterable[Training]]]]) -> None:
        # Of equal bounds the last cut comes first: that with the largest micro-batches.
        by_bound = sorted(cuts, key=lambda cut: -cut[0])
        ordered = reversed(by_bound)
        self._rest = heapq.merge(*(self._made(*cut) for cut in ordered), key=lambda each: each[0])
        self._known: list[Training] = []

    @staticmethod
    def _made(bound: float, make: Callable[[], Iterable[Training]]) -> Iterator[tuple[float, Training | None]]:
        """The bound first, which stands for all of them in the merge until its turn has come."""
        yield bound, None
        yield from sorted(((each.seconds, each) for each in make()), key=lambda each: each[0])

    def at(self, index: int) -> Training | None:
        """None beyond the last one."""
        while len(self._known) <= index and (following := next(self._rest, None)):
            if following[1] is not None:
                self._known.append(following[1])
        return self._known[index] if index < len(self._known) else None

    def __iter__(self) -> Iterator[Training]:
        index = 0
        while (each := self.at(index)) is not None:
            yield each
            index += 1


class Fastest(NamedTuple):
    """Lower bounds over all layouts of a generator on so many GPUs; `steady_N` is infinite where there are none."""

    steady_N: FloatArray
    rollout_N: FloatArray
    others_N: FloatArray
    bytes_N: FloatArray


@dataclass(eq=False)
class GeneratorTable:
    """Layouts of a generator, a row for each, by GPUs.

    base: which of the candidates' `bases`, a mesh and a precision. bytes: of weights on each rank. narrow: 1 for less
    than 16 bits. Seconds of a batch: `steady`, with slots that never run dry; `rollout`, of a batch by itself, a lower
    bound until it is `simulated`; `others`, what a batch adds to another one that is decoded beside it. Rows with the
    same `alike` have the same rollout. `version` counts simulations, so that a reader sees when bounds have changed.
    """

    base: IntArray
    replicas: IntArray
    slots: IntArray
    gpus: IntArray
    bytes: FloatArray
    narrow: IntArray
    alike: IntArray
    steady: FloatArray
    rollout: FloatArray
    others: FloatArray
    simulated: BoolArray
    version: int = 0

    def note(self, alike: int, seconds: float) -> None:
        """What a rollout takes."""
        same = self.alike == alike
        if same.any():
            self.rollout[same], self.simulated[same] = seconds, True
            self.version += 1

    def fastest(self, nodes: NodeGroup, *, or_fewer: bool) -> Fastest:
        """On each number of GPUs, or with `or_fewer` on any smaller one, too."""

        def least(column_R: FloatArray) -> FloatArray:
            found = np.full(len(nodes.sizes), inf)
            np.minimum.at(found, np.searchsorted(nodes.sizes_N, self.gpus), column_R)
            return np.minimum.accumulate(found) if or_fewer else found

        steady = least(self.steady)
        columns = (least(column) for column in (self.rollout, self.others, self.bytes))
        return Fastest(steady, *(np.where(np.isfinite(steady), column, 0.0) for column in columns))


COLUMNS = tuple(each.name for each in fields(GeneratorTable))[:-2]
"""Of a table, but for what is known of rollouts."""


@dataclass(eq=False)
class LayoutCandidates:
    """Candidate layouts of each role for one workload, kept once they are made. `slots` is the most rows of a
    generator's replica, `models` are what there is beside the policy's own steps."""

    work: Workload
    lag: int
    slots: int = 256
    pins: Pins = field(default_factory=Pins)
    models: Models = field(default_factory=Models)

    def __post_init__(self) -> None:
        self.cuts = cache(self._cuts)
        self.trainers = cache(self._trainers)
        self.readers = cache(self._readers)
        self.trainer_s = cache(self._trainer_s)
        self.reader_s = cache(self._reader_s)
        self.bases = cache(self._bases)
        self.fastest = cache(self._fastest)
        self._one_gpu = cache(self._seconds_of_one_gpu)
        self._row_bytes = cache(self._bytes_of_rows)
        self._table = cache(self._table_of)
        self._block = cache(self._block_of)
        self._tables: defaultdict[NodeGroup, list[GeneratorTable]] = defaultdict(list)
        self._rollouts: defaultdict[NodeGroup, dict[int, float]] = defaultdict(dict)

    def _cuts(self, nodes: NodeGroup, gpus: int, pin: Axes | None = None) -> list[TrainerFamily]:
        """All trainers on `gpus` GPUs, whether they fit or not; with the mesh `pin`, if it is given."""
        # How weights are sharded changes what travels, not what is computed: one lower bound holds for all of these.
        meshes = defaultdict[tuple[int, ...], list[Parallel]](list)
        for mesh in trainer_meshes(self.work.shape, nodes, gpus):
            if pin is None or pin == mesh.axes:
                meshes[mesh.data, mesh.tp, mesh.pp].append(mesh)
        found = []
        for alike in meshes.values():
            for tokens in micro_tokens(self.work.context, self.work.micro_tokens):
                first = Trainer(self.work.shape, nodes.gpu, alike[0], micro_tokens=tokens, zero3=False)
                steps_s = sum(first.least(part, backward=True) for part in self._minibatches) * self.work.epochs
                found.append(TrainerFamily(first, tuple(alike), first.least(self._whole, backward=False), steps_s))
        return found

    def _trainers(self, nodes: NodeGroup, gpus: int, colocated: Models) -> FastestFirst:
        """Those that fit with the models that are colocated with the policy, the fastest first."""
        kept: Kept = {}
        passes, learners = colocated.count + self.models.rereads, 1 + colocated.critics

        def made(cut: TrainerFamily) -> Iterator[Training]:
            for trainer in cut.layouts():
                memory = trainer_memory(trainer, self.models.copies)
                memory = memory + beside_memory(trainer, colocated) if colocated.count else memory
                if memory.bytes > nodes.gpu.memory_bytes:
                    continue
                steps = trainer.steps(self._minibatches, self.work.epochs, kept)
                passed = trainer.passed(self._whole) if passes else Cost()
                own = steps + passed * self.models.rereads if self.models.rereads else steps
                own = own + trainer.followed() * self.models.followed if self.models.followed else own
                yield Training(trainer, own, passed * colocated.count, steps * colocated.critics, memory)

        cuts = self.cuts(nodes, gpus, self.pins.trainer)
        bounds = (cut.passed_s * passes * SAFE + cut.steps_s * learners * SAFE for cut in cuts)
        found = FastestFirst((bound, partial(made, cut)) for bound, cut in zip(bounds, cuts, strict=True))
        # The table of lower bounds has the seconds themselves from now on.
        first = found.at(0)
        self.trainer_s(nodes, colocated)[nodes.place[gpus]] = first.seconds if first else inf
        return found

    def _readers(self, nodes: NodeGroup, gpus: int, models: Models, pin: Axes | None = None) -> tuple[Training, ...]:
        """Layouts of models on dedicated GPUs that fit and that no other one beats both in passes and in steps."""
        kept: Kept = {}
        best: list[Training] = []

        def made(cut: TrainerFamily, *bounds: float) -> Iterator[Training]:
            for trainer in () if any(other.beats(*bounds) for other in best) else cut.layouts():
                # A pass that keeps nothing: no gradients, no moments, and no inputs of layers for a backward pass.
                passing = trainer if models.critics else replace(trainer, frozen=True, offload=True)
                memory = trainer_memory(passing)
                if models.count > 1:
                    critic = min(1, models.critics)
                    more = Models(models.frozen - 1 + critic, models.critics - critic)
                    memory = memory + beside_memory(passing, more)
                if memory.bytes <= nodes.gpu.memory_bytes:
                    reads = passing.passed(self._whole) * models.count
                    steps = trainer.steps(self._minibatches, self.work.epochs, kept) if models.critics else Cost()
                    yield Training(passing, Cost(), reads, steps * models.critics, memory)

        groups = []
        for cut in self.cuts(nodes, gpus, pin):
            bounds = cut.passed_s * models.count * SAFE, cut.steps_s * models.critics * SAFE
            groups.append((sum(bounds), partial(made, cut, *bounds)))
        # `made` sees what has been kept so far, so that a family that is beaten in both is not made at all.
        for each in FastestFirst(groups):
            if not any(other.beats(each.reads.seconds, each.learns.seconds) for other in best):
                best.append(each)
        # With a given mesh the table's bounds stay as they are: they are shared by pools without one.
        if pin is None:
            reads_N, learns_N = self.reader_s(nodes, models)
            reads_N[nodes.place[gpus]] = min((each.reads.seconds for each in best), default=inf)
            learns_N[nodes.place[gpus]] = min((each.learns.seconds for each in best), default=inf)
        return tuple(best)

    def _trainer_s(self, nodes: NodeGroup, colocated: Models) -> FloatArray:
        """[sizes]: lower bounds of an update's seconds on so many GPUs; the least seconds once `trainers` was asked."""
        passed, steps = self._one_gpu(nodes)
        gpu_s = steps * (1 + colocated.critics) + passed * (self.models.rereads + colocated.count)
        found: FloatArray = gpu_s * SAFE / nodes.sizes_N
        return found

    def _reader_s(self, nodes: NodeGroup, models: Models) -> tuple[FloatArray, FloatArray]:
        """[sizes] each: the same of the passes, and of the steps, of models on dedicated GPUs."""
        passed, steps = self.dedicated_gpu_s(nodes, models)
        return passed / nodes.sizes_N, steps / nodes.sizes_N

    def dedicated_gpu_s(self, nodes: NodeGroup, models: Models) -> tuple[float, float]:
        """GPU-seconds of models' passes and of critics' steps that no layout goes below."""
        passed, steps = self._one_gpu(nodes)
        return models.count * passed * SAFE, models.critics * steps * SAFE

    def _seconds_of_one_gpu(self, nodes: NodeGroup) -> tuple[float, float]:
        """GPU-seconds of one pass and of one model's steps that no layout goes below."""
        work = self.work
        alone = Trainer(work.shape, nodes.gpu, Parallel(), micro_tokens=int(work.sequence_tokens.sum()))
        costs = alone.passed(self._whole), alone.step(work.sequence_tokens) * work.epochs
        passed, steps = (sum(cost.parts[part] for part in SHARED_OUT) for cost in costs)
        return passed, steps

    @cached_property
    def _whole(self) -> Packed:
        """All that an update learns from."""
        return packed(self.work.sequence_tokens)[0]

    @cached_property
    def _minibatches(self) -> tuple[Packed, ...]:
        return packed(self.work.sequence_tokens, self.work.minibatches)

    def generators(self, nodes: NodeGroup, sizes: Sequence[int], copies: int, beside: Memory | None) -> GeneratorTable:
        """All layouts on these numbers of GPUs that fit with so many copies of the weights, and with what lies `beside`
        them on each GPU."""
        fits = (self._fit(nodes, number, copies, beside) for number in range(len(self.bases(nodes))))
        return self._table(nodes, tuple(sizes), tuple(fits))

    def dedicated(self, nodes: NodeGroup) -> GeneratorTable:
        """All layouts on dedicated GPUs."""
        return self.generators(nodes, nodes.sizes, DEDICATED, None)

    def _fastest(self, nodes: NodeGroup, shared: bool) -> Fastest:
        """Lower bounds on dedicated GPUs or fewer of them, or on the trainer's, whatever lies beside the generator."""
        if shared:
            return self.generators(nodes, nodes.sizes, SHARED, None).fastest(nodes, or_fewer=False)
        return self.dedicated(nodes).fastest(nodes, or_fewer=True)

    def generating(self, nodes: NodeGroup, table: GeneratorTable, row: int, copies: int) -> Generating:
        """The layout in a row, with its memory."""
        generator = replace(self.bases(nodes)[int(table.base[row])], slots=int(table.slots[row]))
        memory = generator_memory(generator, self.context, arenas=copies)
        return Generating(generator, int(table.replicas[row]), memory)

    def simulate(self, nodes: NodeGroup, table: GeneratorTable, row: int) -> None:
        """Notes the seconds of a row's rollout, simulated over the batch's lengths, in all tables of the node group."""
        generator = replace(self.bases(nodes)[int(table.base[row])], slots=int(table.slots[row]))
        alike, seconds = int(table.alike[row]), rollout_s(self.work, generator, int(table.replicas[row]))
        self._rollouts[nodes][alike] = seconds
        for each in self._tables[nodes]:
            each.note(alike, seconds)

    @cached_property
    def context(self) -> float:
        """Tokens that a slot in use holds."""
        return self.work.prompt_tokens + float(np.mean(self.work.response_tokens))

    def _bases(self, nodes: NodeGroup) -> list[Generator]:
        """A generator of one slot for each precision and mesh."""
        shape, gpu = self.work.shape, nodes.gpu
        precisions: tuple[Precision, ...] = ("bf16", "fp8") if gpu.tflops.fp8 else ("bf16",)
        meshes = [mesh for mesh in generator_meshes(shape, nodes) if self.pins.generator in (None, mesh.axes)]
        return [Generator(shape, gpu, mesh, 1, precision) for precision in precisions for mesh in meshes]

    def _fit(self, nodes: NodeGroup, base: int, copies: int, beside: Memory | None) -> int:
        """How many slots fit; 0 if not even the weights do."""
        empty, each = self._row_bytes(nodes, base, copies)
        others = 0.0 if beside is None else beside.bytes - beside.parts.get("reserved", 0.0)  # a GPU reserves once
        return min(self.slots, max(0, int((nodes.gpu.memory_bytes - empty - others) // each)))

    def _bytes_of_rows(self, nodes: NodeGroup, base: int, copies: int) -> tuple[float, float]:
        return row_bytes(self.bases(nodes)[base], self.context, copies)

    def _table_of(self, nodes: NodeGroup, sizes: tuple[int, ...], fits: tuple[int, ...]) -> GeneratorTable:
        """With up to so many slots for each base."""
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

    def _block_of(self, nodes: NodeGroup, number: int, sizes: tuple[int, ...], fit: int) -> dict[str, Any]:
        """Columns of one base: each number of GPUs that copies of it fill, with each number of slots that may be of
        use, up to the `fit` that there is memory for."""
        work, base = self.work, replace(self.bases(nodes)[number], slots=fit)
        ranks, in_flight = base.mesh.ranks, work.responses * (self.lag + 1)
        gpus = np.array([size for size in sizes if size % ranks == 0 and size <= work.responses * ranks], np.int64)
        counts = np.array(slot_counts(fit, in_flight), np.int64)
        useful = -(-in_flight // (gpus // ranks))
        size, count = np.nonzero(np.concatenate([[0], counts[:-1]]) < useful[:, None])
        replicas, slots = gpus[size] // ranks, counts[count]
        share = -(-work.responses // replicas)
        # More slots than responses change nothing, unless replacements of dropped groups come on top.
        rows = np.minimum(slots, share) if work.kept == 1 else slots
        # A step costs what its rows do, which falls per row with their number, and what their contexts do, which sum to
        # the same whatever is decoded beside them.
        tokens, contexts, longest, last = self._totals
        fixed, slope = base.lines.fixed, float(base.lines.slope[1])
        always = slope * contexts + work.drawn * base.prefill_s(work.prompt_tokens, work.prompt_tokens**2)
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
            "narrow": np.full(len(size), int(base.precision != "bf16")),
            "alike": (number * (nodes.gpus + 1) + replicas) * (self.slots + 1) + rows,
            "steady": (tokens * most / flying + always) / replicas,
            "rollout": np.maximum(least, longest * one + slope * last) * SAFE,
            "others": (tokens * (most - one) / np.maximum(1, flying - 1) + always) / replicas,
        }

    @cached_property
    def _totals(self) -> tuple[float, float, int, float]:
        """Of all responses: tokens, and the tokens that each of them saw; the same of the longest one."""
        lengths = self.work.response_tokens.astype(np.float64)
        seen = lengths * self.work.prompt_tokens + lengths * (lengths - 1) / 2
        return float(lengths.sum()), float(seen.sum()), self.work.longest, float(seen.max())
