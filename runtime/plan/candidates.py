"""The ways in which a model can learn, or be read, on so many GPUs, and what they do not go below. Pure.

All ways to decode with one mesh and precision, with their seconds. Pure.

Shapes of arrays are said in `workload` and `decoders`.

Ways to decode as columns of arrays, so that a search looks at all of them at once. Pure.

A way to train and a way to decode on so many GPUs, with its seconds and its memory. Pure.

The meshes that the ranks of a replica may form, and the sizes that are tried beside them. Pure.

GPUs that are alike: hosts with equally many of one kind, and how pools share them out. Pure.

A pool lies within one island. It has whole hosts, or a part of one host that divides it; where there is only one host,
any part of it.

What is computed once and then kept. Pure.

Things in the order of a number, of which only those are made that are asked for. Pure.

The ways in which models beside the policy can run on GPUs of their own, and lower bounds of them. Pure.

The ways in which a batch can be decoded on so many GPUs, with seconds and memory, and lower bounds of them. Pure.

Shapes of arrays are said in `workload` and `decoders`.

The ways in which the policy can learn on so many GPUs, with what lies beside it; and lower bounds of them. Pure.

The ways in which each role can be run: what a search asks, all of it kept, since it asks the same again and again.
Pure.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

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


FEWEST_SLOTS = 8


def trainer_meshes(shape: Shape, island: Island, gpus: int) -> Iterator[Parallel]:
    """Every cut of `gpus` ranks over dp, fsdp, tp and pp; tensor parallelism stays within a host."""
    for tp in _divisors(min(island.each, gpus)):
        for pp in _divisors(gpus // tp) if gpus % tp == 0 else ():
            data = gpus // tp // pp
            for fsdp in _divisors(data):
                mesh = Parallel(dp=data // fsdp, fsdp=fsdp, tp=tp, pp=pp)
                if not mesh.faults(shape):
                    yield mesh


def generator_meshes(shape: Shape, island: Island) -> Iterator[Parallel]:
    """Tensor parallelism within a host; stages only over whole hosts, where a host is not enough."""
    for tp in _divisors(island.each):
        for pp in _divisors(len(island.hosts)) if tp == island.each else (1,):
            mesh = Parallel(tp=tp, pp=pp)
            if not mesh.faults(shape):
                yield mesh


def micro_tokens(longest: int, most: int) -> Iterator[int]:
    """Tokens of a micro-batch: those of the longest sequence, doubled up to `most`."""
    tokens = longest
    yield tokens
    while tokens * 2 <= most:
        tokens *= 2
        yield tokens


def slot_counts(fit: int, useful: int) -> list[int]:
    """Rows at once: powers of two and what fits; none beyond the first that is more than can be of use."""
    counts = [FEWEST_SLOTS]
    while counts[-1] * 2 < fit:
        counts.append(counts[-1] * 2)
    counts = [count for count in counts if count < fit] + ([fit] if fit > 0 else [])
    return [count for before, count in zip([0, *counts], counts, strict=False) if before < useful]


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


T = TypeVar("T")


class Once:
    """Values by what they depend on."""

    def __init__(self) -> None:
        self._kept: dict[object, Any] = {}

    def __call__(self, key: object, make: Callable[[], T]) -> T:
        """Made at the first call."""
        if key not in self._kept:
            self._kept[key] = make()
        made: T = self._kept[key]
        return made

    def known(self, key: object, otherwise: float) -> float:
        """A number, if it has been made."""
        found: float = self._kept.get(key, otherwise)
        return found


SHARED_OUT = ("products", "attention", "elementwise", "logits")
"""Parts of a step that n GPUs do in no less than an nth of one GPU's time."""


@dataclass(frozen=True)
class Alike:
    """Ways that share out the data and cut the layers alike. They differ in how weights are sharded: over the shards of
    each mesh, and for each micro-batch or not."""

    first: Trainer
    meshes: tuple[Parallel, ...]

    def all(self) -> Iterator[Trainer]:
        for mesh in self.meshes:
            for zero3 in (False, True) if mesh.fsdp > 1 else (False,):
                yield replace(self.first, mesh=mesh, zero3=zero3)


@dataclass(frozen=True)
class Candidates:
    work: Workload
    _once: Once = field(default_factory=Once, compare=False, repr=False)

    def on(self, island: Island, gpus: int, pin: Axes | None = None) -> Iterator[Trainer]:
        """All on `gpus` GPUs, whether they fit or not; with the mesh `pin`, if it is given."""
        for alike in self.alike(island, gpus, pin):
            yield from alike.all()

    def alike(self, island: Island, gpus: int, pin: Axes | None = None) -> list[Alike]:
        meshes: dict[tuple[int, ...], list[Parallel]] = {}
        for mesh in trainer_meshes(self.work.shape, island, gpus):
            if pin is None or pin == mesh.axes:
                meshes.setdefault((mesh.data, mesh.tp, mesh.pp), []).append(mesh)
        tokens = tuple(micro_tokens(self.work.context, self.work.micro_tokens))
        return [Alike(self._first(island, some[0], each), tuple(some)) for some in meshes.values() for each in tokens]

    def bounds(self, alike: Alike, passes: int, learners: int) -> tuple[float, float]:
        """Seconds of so many passes, and of the steps of so many that learn, that none of them goes below."""
        passed = alike.first.least(self.whole, backward=False) if passes else 0.0
        steps = sum(alike.first.least(part, backward=True) for part in self.parts) if learners else 0.0
        return passed * passes * SAFE, steps * self.work.epochs * learners * SAFE

    def least(self, gpu: Gpu) -> tuple[float, float]:
        """GPU-seconds of one pass and of an update's steps that no layout of this kind goes below."""

        def least() -> tuple[float, float]:
            work = self.work
            alone = Trainer(work.shape, gpu, Parallel(), micro_tokens=int(work.sequence_tokens.sum()))
            costs = alone.passed(self.whole), alone.step(work.sequence_tokens) * work.epochs
            passed, steps = (sum(cost.parts[part] for part in SHARED_OUT) for cost in costs)
            return passed, steps

        return self._once(("least", id(gpu)), least)

    @cached_property
    def whole(self) -> Packed:
        """All that an update learns from."""
        return packed(self.work.sequence_tokens)[0]

    @cached_property
    def parts(self) -> tuple[Packed, ...]:
        """Of each minibatch."""
        return packed(self.work.sequence_tokens, self.work.minibatches)

    def _first(self, island: Island, mesh: Parallel, tokens: int) -> Trainer:
        return Trainer(self.work.shape, island.gpu, mesh, micro_tokens=tokens, zero3=False)


class Block(NamedTuple):
    """[ways] each. `base` is the number of a mesh and precision, `share` the bytes of weights of each rank, `narrow`
    whether a precision has less than 16 bits. Seconds are as in `ways.Generating`. Those with the same `alike` have the
    same rollout."""

    base: IntArray
    replicas: IntArray
    slots: IntArray
    gpus: IntArray
    share: FloatArray
    narrow: IntArray
    alike: IntArray
    steady: FloatArray
    least: FloatArray
    others: FloatArray


class Fastest(NamedTuple):
    """[sizes] each: the least of any way on so many GPUs. Where there is none, `steady` is infinite."""

    steady: FloatArray
    rollout: FloatArray
    others: FloatArray
    share: FloatArray


@dataclass(eq=False)
class Decoders:
    """Ways by GPUs, which are those numbers of `sizes` that `place` says. `rollouts` are lower bounds of each batch by
    itself, and the seconds themselves where they are `known`; `learnt` counts how often more of them have become so."""

    sizes: IntArray
    place: IntArray
    block: Block
    rollouts: FloatArray
    known: BoolArray
    learnt: int = 0

    @staticmethod
    def of(sizes: Sequence[int], blocks: Sequence[Block], known: Mapping[int, float]) -> "Decoders":
        """`known` are rollouts by `alike`."""
        none: Any = np.zeros(0, np.int64)
        blocks = blocks or [Block(*(none for _ in Block._fields))]
        columns: list[Any] = [np.concatenate(column) for column in zip(*blocks, strict=True)]
        order = columns[Block._fields.index("gpus")].argsort(kind="stable")
        return _with(sizes, _picked(columns, order), known)

    def only(self, gpus: int, known: Mapping[int, float]) -> "Decoders":
        """Those on so many GPUs."""
        here = np.flatnonzero(self.block.gpus == gpus)
        return _with((gpus,), _picked(self.block, here), known)

    def __len__(self) -> int:
        return len(self.rollouts)

    def learn(self, alike: int, seconds: float) -> None:
        """What a rollout takes."""
        same = self.block.alike == alike
        self.rollouts[same], self.known[same] = seconds, True
        self.learnt += 1

    def on(self, sizes: Sequence[int]) -> IntArray:
        """The ways on these numbers of GPUs."""
        asked = np.zeros(len(self.sizes), bool)
        asked[np.searchsorted(self.sizes, sizes)] = True
        return np.flatnonzero(asked[self.place])

    def fastest(self, *, fewer: bool) -> Fastest:
        """On each number of GPUs, or with `fewer` on any smaller one, too."""

        def least(column: FloatArray) -> FloatArray:
            found = np.full(len(self.sizes), np.inf)
            np.minimum.at(found, self.place, column)
            return np.minimum.accumulate(found) if fewer else found

        steady = least(self.block.steady)
        others = (least(c) for c in (self.block.least * SAFE, self.block.others, self.block.share))
        return Fastest(steady, *(np.where(np.isfinite(steady), column, 0.0) for column in others))


def _picked(columns: Iterable[Any], ways: IntArray) -> Block:
    return Block(*(column[ways] for column in columns))


def _with(sizes: Sequence[int], block: Block, known: Mapping[int, float]) -> Decoders:
    seconds = np.array([known.get(alike, -1.0) for alike in block.alike.tolist()], np.float64)
    counts = np.array(sizes, np.int64)
    rollouts = np.where(seconds < 0, block.least * SAFE, seconds)
    return Decoders(counts, np.searchsorted(counts, block.gpus), block, rollouts, seconds >= 0)


@dataclass(frozen=True)
class Blocks:
    """`slots` is the most rows of a replica."""

    work: Workload
    lag: int
    slots: int

    def of(self, island: Island, number: int, base: Generator, sizes: Sequence[int], fit: int) -> Block:
        """On each number of GPUs that copies of the base fill, with each number of slots that may be of use, up to the
        `fit` that there is memory for. `number` is the base's among those of the island."""
        work = self.work
        gpus = np.array([size for size in sizes if size % base.mesh.ranks == 0], np.int64)
        gpus = gpus[gpus <= work.responses * base.mesh.ranks]
        counts = np.array(slot_counts(fit, work.responses * (self.lag + 1)), np.int64)
        useful = -(-work.responses * (self.lag + 1) // (gpus // base.mesh.ranks))
        row, column = np.nonzero(np.concatenate([[0], counts[:-1]]) < useful[:, None])
        replicas, slots = gpus[row] // base.mesh.ranks, counts[column]
        rows = np.minimum(slots, self._share(replicas)) if work.kept == 1 else slots
        return Block(
            base=np.full(len(row), number),
            replicas=replicas,
            slots=slots,
            gpus=gpus[row],
            share=np.full(len(row), base.bytes_each),
            narrow=np.full(len(row), int(base.precision != "bf16")),
            alike=(number * (island.gpus + 1) + replicas) * (self.slots + 1) + rows,
            **self._seconds(replace(base, slots=fit), replicas, slots),
        )

    def _seconds(self, base: Generator, replicas: IntArray, slots: IntArray) -> dict[str, FloatArray]:
        """`steady`, `least` and `others`. A step costs what its rows do, which falls per row with their number, and
        what their contexts do, which sum to the same whoever decodes beside whom."""
        work, (tokens, contexts, longest, last) = self.work, self._totals
        fixed, slope = base.lines.fixed, float(base.lines.slope[1])
        always = slope * contexts + work.drawn * base.prefill_s(work.prompt_tokens, work.prompt_tokens**2)
        flying = np.minimum(slots, -(-(self.lag + 1) * work.responses // replicas))
        alone = np.minimum(slots, self._share(replicas))
        one, most = fixed[1], fixed[flying]
        least = (tokens * fixed[alone] / alone + always) / replicas
        return {
            "steady": (tokens * most / flying + always) / replicas,
            "least": np.maximum(least, longest * one + slope * last),
            "others": (tokens * (most - one) / np.maximum(1, flying - 1) + always) / replicas,
        }

    def _share(self, replicas: IntArray | int) -> IntArray:
        """Responses of a replica."""
        return np.asarray(-(-self.work.responses // replicas))

    @cached_property
    def _totals(self) -> tuple[float, float, int, float]:
        """Of all responses: tokens, and the tokens that each of them saw; the same of the longest one."""
        lengths = self.work.response_tokens.astype(np.float64)
        seen = lengths * self.work.prompt_tokens + lengths * (lengths - 1) / 2
        return float(lengths.sum()), float(seen.sum()), self.work.longest, float(seen.max())


@dataclass(frozen=True)
class Training:
    """A way to train: seconds of an update's steps and further passes of the policy; of the passes and steps of models
    beside it, if they are on the same GPUs; and the memory of a rank with all of it. Of GPUs that only models beside
    the policy have, there are no steps."""

    trainer: Trainer
    steps: Cost
    reads: Cost
    learns: Cost
    memory: Memory

    @cached_property
    def seconds(self) -> float:
        return self.steps.seconds + self.reads.seconds + self.learns.seconds


@dataclass(frozen=True)
class Generating:
    """A way to decode on `replicas` copies of a mesh. Seconds of a batch: `steady` with slots that never run dry,
    `least`, a lower bound of a batch by itself, and `others`, what it adds to another one that is decoded beside it.
    On one kind of hosts those with the same `alike` take the same for a batch by itself."""

    generator: Generator
    replicas: int
    memory: Memory
    steady: float
    least: float
    others: float
    alike: int

    @property
    def gpus(self) -> int:
        return self.replicas * self.generator.mesh.ranks


class Ranked(Generic[T]):
    """The lowest first. Given in groups, each with a lower bound of its numbers; a group is made when its bound is the
    lowest that is left."""

    def __init__(self, groups: Sequence[tuple[float, Callable[[], Iterable[tuple[float, T]]]]]) -> None:
        self._closed = sorted(groups, key=lambda group: -group[0])
        self._open: list[tuple[float, int, T]] = []
        self._known: list[T] = []

    def at(self, index: int) -> T | None:
        """None beyond the last one."""
        while len(self._known) <= index and (self._closed or self._open):
            if self._closed and (not self._open or self._closed[-1][0] <= self._open[0][0]):
                for number, each in self._closed.pop()[1]():
                    heapq.heappush(self._open, (number, len(self._known) + len(self._open), each))
            else:
                self._known.append(heapq.heappop(self._open)[2])
        return self._known[index] if index < len(self._known) else None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self.at(0) is not None

    def __iter__(self) -> Iterator[T]:
        index = 0
        while (each := self.at(index)) is not None:
            yield each
            index += 1


class FastestReading(NamedTuple):
    """[sizes] each: what models on so many GPUs of their own do not go below, in passes and in steps."""

    reads: FloatArray
    learns: FloatArray


@dataclass(frozen=True)
class ReadingSide:
    candidates: Candidates
    _once: Once = field(default_factory=Once, compare=False, repr=False)

    def readers(self, island: Island, gpus: int, models: Models, pin: Axes | None = None) -> tuple[Training, ...]:
        """Those that fit, the fastest first, and that no other one beats both in passes and in steps. `pin` is a mesh
        that is given."""
        return self._once(("read", island, gpus, models, pin), lambda: self._readers(island, gpus, models, pin))

    def fastest(self, island: Island, models: Models) -> FastestReading:
        """Lower bounds whatever the mesh is, and the least seconds themselves once `readers` has been asked."""
        return self._once(("fastest", island, models), lambda: self._fastest(island, models))

    def least(self, gpu: Gpu, models: Models) -> tuple[float, float]:
        """GPU-seconds of models' passes and of critics' steps that no layout of this kind goes below."""
        passed, steps = self.candidates.least(gpu)
        return models.count * passed * SAFE, models.critics * steps * SAFE

    def _fastest(self, island: Island, models: Models) -> FastestReading:
        reads, learns = self.least(island.gpu, models)
        return FastestReading(reads / island.counts, learns / island.counts)

    def _readers(self, island: Island, gpus: int, models: Models, pin: Axes | None) -> tuple[Training, ...]:
        kept: Kept = {}
        best: list[Training] = []

        def unbeaten(alike: Alike, reads: float, learns: float) -> Iterator[tuple[float, Training]]:
            if not any(_beats(other, reads, learns) for other in best):
                yield from self._fitting(alike, kept, models)

        groups = []
        for alike in self.candidates.alike(island, gpus, pin):
            bounds = self.candidates.bounds(alike, models.count, models.critics)
            groups.append((sum(bounds), partial(unbeaten, alike, *bounds)))
        for each in Ranked(groups):
            if not any(_beats(other, each.reads.seconds, each.learns.seconds) for other in best):
                best.append(each)
        if pin is None:
            known, place = self.fastest(island, models), island.sizes.index(gpus)
            known.reads[place] = min((each.reads.seconds for each in best), default=inf)
            known.learns[place] = min((each.learns.seconds for each in best), default=inf)
        return tuple(best)

    def _fitting(self, alike: Alike, kept: Kept, models: Models) -> Iterator[tuple[float, Training]]:
        """Those that fit, with their seconds."""
        for trainer in alike.all():
            # A pass that keeps nothing: no gradients, no moments, and no inputs of layers for a backward pass.
            passing = trainer if models.critics else replace(trainer, frozen=True, offload=True)
            memory = trainer_memory(passing)
            if models.count > 1:
                learner = min(1, models.critics)
                memory = memory + beside_memory(passing, Models(models.frozen - 1 + learner, models.critics - learner))
            if memory.bytes <= trainer.gpu.memory_bytes:
                reads = passing.passed(self.candidates.whole) * models.count
                found = Training(passing, Cost(), reads, self._learns(passing, kept, models), memory)
                yield found.seconds, found

    def _learns(self, trainer: Trainer, kept: Kept, models: Models) -> Cost:
        if not models.critics:
            return Cost()
        return trainer.steps(self.candidates.parts, self.candidates.work.epochs, kept) * models.critics


def _beats(one: Training, reads: float, learns: float) -> bool:
    """Whether it is no slower in passes nor in steps."""
    return one.reads.seconds <= reads and one.learns.seconds <= learns


OWN, SHARED = 2, 1
"""Arenas for weights: on GPUs of its own a generator receives the next ones while it decodes."""


@dataclass(frozen=True)
class DecodingSide:
    """`slots` is the most rows of a replica; `pin` is a mesh that is given."""

    work: Workload
    lag: int
    slots: int = 256
    pin: Axes | None = None
    _once: Once = field(default_factory=Once, compare=False, repr=False)

    def own(self, island: Island) -> Decoders:
        """All ways on GPUs of their own, on each number of GPUs that a pool may have here."""
        return self._once(("own", island), lambda: self._decoders(island, island.sizes, OWN, None))

    def beside(self, island: Island, gpus: int, memory: Memory) -> Decoders:
        """All ways on so many GPUs that take turns with a trainer, with what else lies on each of them."""
        return self._decoders(island, (gpus,), SHARED, memory)

    def turns(self, island: Island, gpus: int) -> Decoders:
        """The same with nothing else on them: more of each than there is beside any trainer."""
        turns = self._turns(island)
        if gpus not in turns:
            turns[gpus] = self._together(island).only(gpus, self._rollouts(island))
        return turns[gpus]

    def fastest(self, island: Island, *, shared: bool) -> Fastest:
        """What no way goes below: on each number of GPUs with whatever lies beside it, or on so many of its own or
        fewer."""
        return self._once(("fastest", island, shared), lambda: self._fastest(island, shared))

    def way(self, island: Island, decoders: Decoders, number: int, arenas: int) -> Generating:
        """One of them, with its memory."""
        of = decoders.block
        base, slots, replicas, alike = (int(column[number]) for column in (of.base, of.slots, of.replicas, of.alike))
        held = partial(self._held, self.bases(island)[base], slots, arenas)
        generator, memory = self._once((island, base, "held", slots, arenas), held)
        steady, least, others = (float(column[number]) for column in (of.steady, of.least, of.others))
        return Generating(generator, replicas, memory, steady, least, others, alike)

    def ways(self, island: Island, gpus: int, arenas: int, memory: Memory | None) -> Iterator[Generating]:
        """All on `gpus` GPUs, with `memory` on each of them, too."""
        found = self._decoders(island, (gpus,), arenas, memory)
        return (self.way(island, found, number, arenas) for number in range(len(found)))

    def rollout(self, island: Island, found: Generating) -> float:
        """Seconds of a batch by itself, simulated over its lengths, the tail included."""
        known = self._rollouts(island)
        if found.alike not in known:
            known[found.alike] = rollout_s(self.work, found.generator, found.replicas)
            self.own(island).learn(found.alike, known[found.alike])
            if found.gpus in (turns := self._turns(island)):
                turns[found.gpus].learn(found.alike, known[found.alike])
        return known[found.alike]

    def bases(self, island: Island) -> list[Generator]:
        """A generator of one slot for each mesh and precision."""
        return self._once(("bases", island), lambda: self._bases(island))

    @cached_property
    def context(self) -> float:
        """Tokens that a slot in use holds."""
        return self.work.prompt_tokens + float(np.mean(self.work.response_tokens))

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self.work, self.lag, self.slots)

    def _rollouts(self, island: Island) -> dict[int, float]:
        """Those that are known, by `Decoders.alike`."""
        return self._once(("rollouts", island), dict[int, float])

    def _turns(self, island: Island) -> dict[int, Decoders]:
        """Those of `turns`, by GPUs."""
        return self._once(("turns", island), dict[int, Decoders])

    def _together(self, island: Island) -> Decoders:
        """Those of `turns` on any number of GPUs."""
        return self._once(("together", island), lambda: self._decoders(island, island.sizes, SHARED, None))

    def _decoders(self, island: Island, sizes: Sequence[int], arenas: int, memory: Memory | None) -> Decoders:
        blocks = []
        for number in range(len(self.bases(island))):
            if fit := self._fit(island, number, arenas, memory):
                block = partial(self._blocks.of, island, number, self.bases(island)[number], sizes, fit)
                blocks.append(self._once((island, number, "block", sizes, fit), block))
        return Decoders.of(sizes, blocks, self._rollouts(island))

    def _fit(self, island: Island, number: int, arenas: int, memory: Memory | None) -> int:
        """How many slots a generator has beside what else is there; 0 if not even its weights fit."""
        base = self.bases(island)[number]
        key = (island, number, "row", arenas)
        empty, each = self._once(key, lambda: row_bytes(base, self.context, arenas))
        others = 0.0 if memory is None else memory.bytes - memory.parts.get("reserved", 0.0)  # a GPU reserves once
        return min(self.slots, max(0, int((base.gpu.memory_bytes - empty - others) // each)))

    def _held(self, base: Generator, slots: int, arenas: int) -> tuple[Generator, Memory]:
        """A generator with so many slots, and its memory."""
        generator = replace(base, slots=slots)
        return generator, generator_memory(generator, self.context, arenas=arenas)

    def _bases(self, island: Island) -> list[Generator]:
        shape, gpu = self.work.shape, island.gpu
        precisions: tuple[Precision, ...] = ("bf16", "fp8") if gpu.tflops.fp8 else ("bf16",)
        meshes = [m for m in generator_meshes(shape, island) if self.pin in (None, m.axes)]
        return [Generator(shape, gpu, mesh, 1, precision) for precision in precisions for mesh in meshes]

    def _fastest(self, island: Island, shared: bool) -> Fastest:
        return self._together(island).fastest(fewer=False) if shared else self.own(island).fastest(fewer=True)


@dataclass(frozen=True)
class TrainingSide:
    """`models`: there are so many copies and further passes of the policy. `pin` is the trainer's mesh, if it is given.
    Which models lie beside the policy is said in each question."""

    candidates: Candidates
    models: Models = field(default_factory=Models)
    pin: Axes | None = None
    _once: Once = field(default_factory=Once, compare=False, repr=False)

    def trainers(self, island: Island, gpus: int, beside: Models) -> Ranked[Training]:
        """All that fit, the fastest first, with the models that lie beside the policy."""
        return self._once(("train", island, gpus, beside), lambda: self._trainers(island, gpus, beside))

    def fastest(self, island: Island, beside: Models) -> FloatArray:
        """[sizes]: seconds of an update that no trainer on so many GPUs goes below: those of the fastest one, once
        `trainers` has been asked."""
        return self._once(("fastest", island, beside), lambda: self._least(island.gpu, beside) / island.counts)

    def _least(self, gpu: Gpu, beside: Models) -> float:
        """GPU-seconds of an update that no trainer of this kind goes below."""
        passed, steps = self.candidates.least(gpu)
        return (steps * (1 + beside.critics) + passed * (self.models.rereads + beside.count)) * SAFE

    def _trainers(self, island: Island, gpus: int, beside: Models) -> Ranked[Training]:
        """By how the data is shared out and the layers are cut, which bounds what shards and copies add to it."""
        kept: Kept = {}
        passes, learners = beside.count + self.models.rereads, 1 + beside.critics
        found = Ranked(
            [
                (sum(self.candidates.bounds(alike, passes, learners)), partial(self._fitting, alike, kept, beside))
                for alike in self.candidates.alike(island, gpus, self.pin)
            ]
        )
        first = found.at(0)
        self.fastest(island, beside)[island.sizes.index(gpus)] = first.seconds if first else inf
        return found

    def _fitting(self, alike: Alike, kept: Kept, beside: Models) -> Iterator[tuple[float, Training]]:
        """Those that fit, with their seconds."""
        for trainer in alike.all():
            memory = trainer_memory(trainer, self.models.copies)
            if beside.count:
                memory = memory + beside_memory(trainer, beside)
            if memory.bytes <= trainer.gpu.memory_bytes:
                found = self._training(trainer, kept, memory, beside)
                yield found.seconds, found

    def _training(self, trainer: Trainer, kept: Kept, memory: Memory, beside: Models) -> Training:
        """Steps are those of the policy, and of each critic that is on the same GPUs."""
        models, made = self.models, self.candidates
        steps = trainer.steps(made.parts, made.work.epochs, kept)
        passed = trainer.passed(made.whole) if beside.count or models.rereads else Cost()
        own = steps + passed * models.rereads if models.rereads else steps
        own = own + trainer.followed() * models.followed if models.followed else own
        if not beside.count:
            return Training(trainer, own, Cost(), Cost(), memory)
        return Training(trainer, own, passed * beside.count, steps * beside.critics, memory)


@dataclass(frozen=True)
class Pins:
    """Meshes that are given; `beside` are those of pools with models beside the policy, which then have GPUs of their
    own."""

    trainer: Axes | None = None
    generator: Axes | None = None
    beside: Mapping[str, Axes] = field(default_factory=dict)


@dataclass(frozen=True)
class Sides:
    """`slots` is the most rows of a generator's replica; `models` are there beside the policy."""

    work: Workload
    lag: int
    slots: int = 256
    pins: Pins = field(default_factory=Pins)
    models: Models = field(default_factory=Models)

    @cached_property
    def candidates(self) -> Candidates:
        return Candidates(self.work)

    @cached_property
    def training(self) -> TrainingSide:
        return TrainingSide(self.candidates, self.models, self.pins.trainer)

    @cached_property
    def reading(self) -> ReadingSide:
        return ReadingSide(self.candidates)

    @cached_property
    def decoding(self) -> DecodingSide:
        return DecodingSide(self.work, self.lag, self.slots, self.pins.generator)

    def agreed(self, pools: Sequence[str]) -> bool:
        """Whether pools with one layout keep to the meshes that are given."""
        return len({self.pins.beside[pool] for pool in pools if pool in self.pins.beside}) <= 1

    def pin_of(self, pools: Sequence[str]) -> Axes | None:
        """The mesh that is given for pools with one layout."""
        return next((self.pins.beside[pool] for pool in pools if pool in self.pins.beside), None)
