"""Search for the best plan: a branch-and-bound over the roles' candidate layouts, by lower bounds of the period. Pure
except for the clock of its time limit.

A plan is decided step by step: the trainer's GPUs; those of each group of models with dedicated GPUs; their layouts;
then a row of the generator's table, with its simulated rollout and the sync of the real resharding plan. Partial plans
are in a heap, by a lower bound of the period of all plans that complete them. A plan that is no worse than the least of
these bounds is optimal under the model. Partial plans that cannot beat the best two plans of different splits are
dropped.

Ties between equal periods are broken by GPUs (fewer first), then by the order in which plans are found, so that the
result is deterministic. Of micro-batches with equally fast steps, a plan has those that need least memory
(`Search._least_memory`).

The period is the largest of a few sums, as in `graph.analysis`. A batch of groups counts as one firing of each node.
With dedicated GPUs, pools work in parallel, so the period is at least each pool's work. It is also at least the length
of the policy's cycle divided by 1 + lag: the sync, the batch's rollout (with its tail), the passes of models beside the
policy, and the steps. Pools that share GPUs take turns, whatever the lag is. Queueing between groups is left to the
simulator.

At a lag of k, k other batches are decoded during a batch's rollout (docs/staleness.md). The time to read the weights in
a step does not depend on them; the time for their rows and contexts, `others` seconds for each batch, is added. Batches
follow each other at a distance of an update's steps, t seconds or more, so that the share 1 - t / r of each other batch
falls into a rollout of r seconds.
"""

import heapq
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from itertools import count, product
from math import inf
from typing import Any, NamedTuple

import numpy as np

from penstock.graph.analysis import Bound
from penstock.runtime.plan.candidates import (
    FastestFirst,
    Generating,
    GeneratorTable,
    LayoutCandidates,
    NodeGroup,
    Training,
)
from penstock.runtime.plan.collectives import SAFE, Cost
from penstock.runtime.plan.roles import Models, Roles
from penstock.runtime.plan.sync_cost import switch_cost, sync_cost, traffic
from penstock.runtime.plan.train_cost import Memory
from penstock.runtime.plan.workload import BoolArray, FloatArray, IntArray

# Seconds beyond its deadline that a search without a plan has to find one.
GRACE = 5.0
# The memory parts that a trainer keeps on GPUs that decode, while its moments are on the host.
STAY = ("weights", "frozen model", "critic weights", "copies", "snapshots")
# The switch cost of GPUs with one role.
NO_SWITCH = Cost({"to the host": 0.0, "from the host": 0.0})
# Pools that share dedicated GPUs.
Groups = tuple[tuple[str, ...], ...]
# A number, or an array with a number for each of several plans.
Seconds = Any


@dataclass(frozen=True)
class Allocation:
    """GPUs of one node group for one or more pools."""

    nodes: NodeGroup
    gpus: int
    pools: tuple[str, ...] = ()


def hosts_of(allocations: Sequence[Allocation]) -> list[tuple[str, ...]] | None:
    """The hosts of each allocation; None if they cannot be packed together."""
    # Each node group is packed separately: no pool spans two kinds of GPUs.
    given: list[tuple[str, ...]] = [()] * len(allocations)
    for nodes in dict.fromkeys(each.nodes for each in allocations):
        here = [index for index, each in enumerate(allocations) if each.nodes is nodes]
        found = nodes.share_out([allocations[index].gpus for index in here])
        if found is None:
            return None
        for index, hosts in zip(here, found, strict=True):
            given[index] = hosts
    return given


@dataclass(frozen=True)
class GpuSplit:
    """The GPUs of each role. `generator` is None if it shares the trainer's GPUs. Models beside the policy without
    dedicated GPUs are colocated with the trainer."""

    trainer: Allocation
    generator: Allocation | None
    dedicated: tuple[Allocation, ...] = ()

    @property
    def shared(self) -> bool:
        return self.generator is None

    @property
    def decodes(self) -> Allocation:
        """The GPUs that decode."""
        return self.generator or self.trainer

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        return (self.trainer, *((self.generator,) if self.generator else ()), *self.dedicated)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(each.gpus for each in self.allocations)

    @property
    def gpus(self) -> int:
        return sum(self.sizes)

    def hosts(self) -> list[tuple[str, ...]] | None:
        """The hosts of the trainer, the generator and each dedicated group; None if they cannot be packed."""
        found = hosts_of(self.allocations)
        return [found[0], *found] if found and self.shared else found


@dataclass(frozen=True)
class Solution:
    """A whole plan. `readings` are the layouts of the dedicated groups, in the split's order. `alone_s` would be the
    period if batches did not slow each other down. `offloads`: the trainer's moments are on the host while its GPUs
    decode."""

    split: GpuSplit
    training: Training
    generating: Generating
    readings: tuple[Training, ...]
    rollout_s: float
    sync: Cost
    switch: Cost
    bounds: tuple[Bound, ...]
    alone_s: float
    offloads: bool = False

    @property
    def period_s(self) -> float:
        return self.bounds[0].seconds

    @cached_property
    def rank(self) -> tuple[float, tuple[int, ...]]:
        """The sort key of plans, the lowest is best: the period, then the number of GPUs."""
        return self.period_s, (self.split.gpus,)

    @property
    def bound(self) -> str:
        return self.bounds[0].cause

    @property
    def host_bytes(self) -> Mapping[str, float]:
        """For each host, the bytes of its memory that AdamW's moments take."""
        hosts, found = self.split.hosts() or [(), ()], Counter[str]()
        pools = zip((self.split.trainer, *self.split.dedicated), (self.training, *self.readings), strict=True)
        for (own, training), names in zip(pools, (hosts[0], *hosts[2:]), strict=True):
            if training.host_bytes:
                found.update(dict.fromkeys(names, training.host_bytes * min(own.gpus, own.nodes.each)))
        return found

    @property
    def tp_over_hosts(self) -> bool:
        """True if the tensor parallelism of any pool crosses hosts."""
        trains = zip(self.split.dedicated, self.readings, strict=True)
        cuts = [(self.split.trainer, self.training.trainer.mesh), (self.split.decodes, self.generating.generator.mesh)]
        cuts += [(own, reading.trainer.mesh) for own, reading in trains]
        return any(mesh.tp > own.nodes.each for own, mesh in cuts)


@dataclass(frozen=True)
class Outcome:
    """The result of a search. `best` is None if nothing fits, or if time ran out before a plan was found; `runner_up`
    is the best plan with another split. `floor` is a lower bound on the period of any plan. `proved`: `best` is
    optimal. `opened` counts the partial plans that were expanded."""

    best: Solution | None
    runner_up: Solution | None
    floor: float
    proved: bool
    opened: int

    @property
    def gap(self) -> float:
        """The share of its period by which the best plan could be improved at most; 0 if it is optimal."""
        return 0.0 if self.proved or self.best is None else max(0.0, 1 - self.floor / self.best.period_s)


@dataclass(frozen=True)
class Times:
    """Seconds of a batch, or lower bounds of them. `train` includes the work of colocated models. `dedicated` has, for
    each group with its own GPUs, the passes and the steps of its critics; only the next batch waits for these steps.
    `wait` is how long an environment takes to answer all turns. `arrivals` are as in `Workload`; `steady`, `rollout`
    and `others` as in `GeneratorTable`. `switch` is for GPUs that trainer and generator share."""

    train: Seconds
    steady: Seconds
    rollout: Seconds
    sync: Seconds = 0.0
    switch: Seconds = 0.0
    dedicated: tuple[tuple[Seconds, Seconds], ...] = ()
    others: Seconds = 0.0
    wait: Seconds = 0.0
    arrivals: tuple[float, ...] = ()


def period_terms(
    roles: Roles, times: Times, lag: int, prompts: int, *, shared: bool, least: bool = False
) -> list[Seconds]:
    """The sums of which the largest is the period: the cycle of the policy, the trainer, the generator, the sync, each
    dedicated group; with shared GPUs, the sum of all. With `least`, the sums are lower bounds that do not fall if a
    time is longer than given. The period itself may: slower steps keep batches apart, so it is not monotone."""
    generates, around, learn = times.rollout, times.sync + times.switch + times.wait, 0.0
    if times.dedicated:
        read, learn = (reduce(np.maximum, kind) for kind in zip(*times.dedicated, strict=True))
        # Models that take each finished group at once are only one group behind the rollout.
        generates = np.maximum(generates, read) + read / prompts if roles.reads_groups else generates + read
    around = around + generates
    if shared:
        return [around + times.train + learn]
    trains = times.train
    if times.arrivals:
        # A part and all later ones follow its groups' arrival; groups of earlier parts arrive before the rollout's end.
        rest = [(1 - part / len(times.arrivals)) * times.train for part in range(len(times.arrivals))]
        early = [(1 - came) * times.rollout if came < 1 else 0.0 for came in times.arrivals]
        trains = reduce(np.maximum, (steps - seconds for steps, seconds in zip(rest, early, strict=True)))
    # The share of each other batch that falls into a rollout slows it down.
    cycle = trains + lag * times.others * np.maximum(0.0, 1 - times.train / times.rollout)
    if least:
        # The sum is linear in the steps until they take as long as the rollout, so its minimum is at an end. In parts
        # it is convex, and at least the seconds of the parts alone.
        cycle = trains if times.arrivals else np.minimum(cycle, np.maximum(times.train, times.rollout))
    groups = (reads + learns for reads, learns in times.dedicated)
    return [(around + cycle) / (1 + lag), times.train, times.steady, times.sync, *groups]


def bounds(
    roles: Roles, times: Times, lag: int, prompts: int, pools: Sequence[Sequence[str]] = (), *, shared: bool
) -> tuple[Bound, ...]:
    """All bounds of the period, the largest first. `pools` are the pools of each dedicated group."""
    seconds = [float(each) for each in period_terms(roles, times, lag, prompts, shared=shared)]
    if shared:
        return (Bound(seconds[0], pool=f"{roles.trainer} and {roles.generator}, which share GPUs"),)
    found = [
        Bound(seconds[0], roles.cycle, 1 + lag),
        Bound(seconds[1], pool=roles.trainer),
        Bound(seconds[2], pool=roles.generator),
        Bound(seconds[3], roles.cycle[1:2]),
        *(Bound(each, pool=", ".join(names)) for names, each in zip(pools, seconds[4:], strict=True)),
    ]
    return tuple(sorted(found, key=lambda bound: -bound.seconds))


def groupings(roles: Roles, candidates: LayoutCandidates) -> tuple[Groups, ...]:
    """All distinct choices of which models beside the policy have dedicated GPUs, and which of these share them. Models
    that are not named are colocated with the trainer. A pool with a given mesh has dedicated GPUs, which it does not
    share with a pool that is given another mesh."""
    pins, found = candidates.pins, dict[object, Groups]()
    for groups in _partitions(roles.beside):
        free = [pool for pool in roles.beside if not any(pool in group for group in groups)]
        if pins.of(free) is not None or not all(map(pins.agree, groups)):
            continue
        alike = sorted(
            sorted((str(roles.models_of((pool,))), str(pins.beside.get(pool))) for pool in group) for group in groups
        )
        found.setdefault((str(alike), str(sorted(str(roles.models_of((pool,))) for pool in free))), groups)
    return tuple(found.values())


def _partitions(pools: Sequence[str]) -> Iterator[Groups]:
    """All ways to leave some pools out and to divide the others into groups."""
    if not pools:
        yield ()
        return
    first, *others = pools
    for groups in _partitions(others):
        yield groups
        yield ((first,), *groups)
        for place, group in enumerate(groups):
            yield (*groups[:place], (first, *group), *groups[place + 1 :])


class PartialPlan(NamedTuple):
    """A partial plan: the decisions so far.

    First the GPUs: `allocations` of the trainer and of some of the `groups`, in this order. `decodes` is the node group
    of the generator, None if it shares the trainer's GPUs. `given` is a split that all completions have.
    Then the layouts of all roles but the generator: `readings` of the groups, and `train`, the `ordinal`th layout on
    the trainer's GPUs. Then candidates for the generator: `rows` of a `table`, the most promising first by the table's
    `version`. `moved`: how many bytes of the trainer's moments are on the host while its GPUs decode; None: the
    trainer's state stays.
    """

    groups: Groups
    decodes: NodeGroup | None
    allocations: tuple[Allocation, ...]
    given: GpuSplit | None = None
    readings: tuple[Training, ...] = ()
    train: Training | None = None
    ordinal: int = 0
    table: GeneratorTable | None = None
    rows: tuple[int, ...] | IntArray = ()
    version: int = 0
    moved: float | None = None

    @property
    def depth(self) -> int:
        """The number of decisions so far; each slower trainer counts as one more."""
        return len(self.allocations) + (self.train is not None) + self.ordinal + (self.table is not None)

    @property
    def split(self) -> GpuSplit | None:
        """The split of all completions; None if they differ."""
        if self.given or self.decodes or len(self.allocations) <= len(self.groups):
            return self.given
        return self.split_with(0)

    def split_with(self, gpus: int) -> GpuSplit:
        """The split with `gpus` GPUs for the generator, if it has its own."""
        trainer, *dedicated = self.allocations
        return GpuSplit(trainer, Allocation(self.decodes, gpus) if self.decodes else None, tuple(dedicated))

    @property
    def first_split(self) -> GpuSplit:
        """The split of the first row."""
        return self.split_with(int(self.table.gpus[self.rows[0]]) if self.table else 0)

    @property
    def tie(self) -> tuple[int, ...]:
        """The tie-breaker of the first row, as in `Solution.rank`."""
        return (self.first_split.gpus,) if self.table else ()

    def used(self, nodes: NodeGroup) -> int:
        return sum(each.gpus for each in self.allocations if each.nodes is nodes)

    def generator_sizes(self, nodes: NodeGroup) -> range:
        """How many GPUs a generator with its own GPUs may have in a node group."""
        if self.given:
            return range(self.given.decodes.gpus, self.given.decodes.gpus + 1)
        left = nodes.gpus - self.used(nodes)

        def crowded(gpus: int) -> bool:
            return gpus > left or hosts_of((*self.allocations, Allocation(nodes, gpus))) is None

        # If a size can be packed, every smaller one can.
        most = bisect_left(nodes.sizes, True, key=crowded)
        return range(1, nodes.sizes[most - 1] + 1 if most else 1)


@dataclass
class Search:
    """A search of all plans, or of those with a `given` split, where models beside the policy are colocated with the
    trainer. `known` are plans among these that another search has found."""

    roles: Roles
    candidates: LayoutCandidates
    node_groups: tuple[NodeGroup, ...]
    given: GpuSplit | None = None
    known: tuple[Solution, ...] = ()
    second: bool = field(default=True, init=False)
    best: Solution | None = field(default=None, init=False)
    runner_up: Solution | None = field(default=None, init=False)
    heap: list[tuple[int, float, tuple[int, ...], int, PartialPlan]] = field(default_factory=list, init=False)
    pushed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.models_of = cache(self.roles.models_of)
        # Pools that share a host share its memory.
        self.memory = {host: nodes.host_bytes for nodes in self.node_groups for host in nodes.hosts}
        # Seconds in which an environment answers all turns.
        self.wait_s = self.roles.turns * self.candidates.work.environment_s if self.roles.environment else 0.0

    def run(self, deadline: float, *, second: bool = True) -> Outcome:
        """Search until the best plan (and with `second` the best of another split) is known, or `deadline` passes."""
        self.second = second
        for solution in self.known:
            self._note(solution)
        self.begin()
        opened = 0
        # Without a plan the search goes on for a while: a late plan with a known gap is better than none.
        while self.heap and time.monotonic() < deadline + (GRACE if self.best is None else 0.0):
            _, lower, tie, _, part = heapq.heappop(self.heap)
            if (lower, tie) >= self._limit(None):  # the same holds for all that is left in the heap
                break
            if (lower, tie) >= self._limit(part.split):
                continue
            opened += 1
            if part.train and part.table:
                self._open_decoding(part, part.train, part.table, lower)
            elif part.train:
                self._open_trained(part, part.train)
            else:
                self._open_placed(part)
        # No open partial plan can be better than this.
        rest = min(((lower, tie) for _, lower, tie, _, _ in self.heap), default=(inf, ()))
        proved = self.best is not None and rest >= self.best.rank
        floor = self.best.period_s if self.best and proved else rest[0]
        best, runner_up = (found and self._least_memory(found) for found in (self.best, self.runner_up))
        return Outcome(best, runner_up, floor, proved, opened)

    def begin(self) -> None:
        """Push each number of GPUs for the trainer, with each grouping of the models beside the policy."""
        every = groupings(self.roles, self.candidates)
        if self.given:
            decodes = self.given.generator.nodes if self.given.generator else None
            if () in every:
                self._push(PartialPlan((), decodes, (self.given.trainer,), self.given), 0.0)
            return
        for groups, nodes in product(every, self.node_groups):
            for generator in (None, *self.node_groups):
                self._place(PartialPlan(groups, generator, ()), nodes, ())

    def colocated(self, groups: Groups) -> Models:
        """The models beside the policy that are on the trainer's GPUs."""
        dedicated = {pool for group in groups for pool in group}
        return self.models_of(tuple(pool for pool in self.roles.beside if pool not in dedicated))

    def _push(self, part: PartialPlan, lower: float) -> None:
        """Push a partial plan that may still matter. Until a first plan is known, the deepest one comes first: any plan
        gives a limit for the others."""
        if (lower, part.tie) < self._limit(part.split):
            self.pushed += 1
            # The serial number orders equal entries by arrival: partial plans themselves have no order.
            heapq.heappush(self.heap, (-part.depth if self.best is None else 0, lower, part.tie, self.pushed, part))

    def _limit(self, split: GpuSplit | None) -> tuple[float, tuple[int, ...]]:
        """The rank that a plan of this split must beat to matter; None: a plan of any split."""
        own = not self.second or (self.best is not None and split == self.best.split)
        found = self.best if own else self.runner_up
        return found.rank if found else (inf, ())

    def _note(self, solution: Solution) -> None:
        """Keep the best plan and the best one of another split."""
        best, other = self.best, self.runner_up
        if best is None or solution.rank < best.rank:
            self.best, self.runner_up = solution, other if best is None or best.split == solution.split else best
        elif solution.split != best.split and (other is None or solution.rank < other.rank):
            self.runner_up = solution
        if best is None:
            # The first plan ends the depth-first phase: from now on the heap is ordered by bounds alone.
            self.heap = [(0, *entry[1:]) for entry in self.heap]
            heapq.heapify(self.heap)

    def _place(self, part: PartialPlan, nodes: NodeGroup, pools: tuple[str, ...]) -> None:
        """Push each number of GPUs in a node group for the trainer or the next group."""
        lower_N = self._next_bounds(part, nodes, pools)
        for place in np.flatnonzero(lower_N < self._limit(part.split)[0]).tolist():
            following = part._replace(allocations=(*part.allocations, Allocation(nodes, nodes.sizes[place], pools)))
            # The bound takes account of how many GPUs are left, not of whether parts of hosts can be packed.
            if hosts_of(following.allocations):
                self._push(following, float(lower_N[place]))

    def _open_placed(self, part: PartialPlan) -> None:
        """Push the next group's GPUs; if all groups have theirs, each choice of their layouts with the fastest
        trainer."""
        if len(part.allocations) <= len(part.groups):
            for nodes in self.node_groups:
                self._place(part, nodes, part.groups[len(part.allocations) - 1])
            return
        # Only the fastest trainer: a slower one is pushed after it (`_open_trained`, `_open_decoding`).
        dedicated, pins, readers = part.allocations[1:], self.candidates.pins, self.candidates.readers
        layouts = (
            readers(each.nodes, each.gpus, self.models_of(each.pools), pins.of(each.pools)) for each in dedicated
        )
        for readings in product(*layouts):
            self._push_trained(part._replace(readings=readings))

    def _with_trainer(self, part: PartialPlan) -> PartialPlan | None:
        """Add the fastest trainer from `ordinal` on that has the recomputation of the critics on dedicated GPUs: a run
        has one setting for all that learn. None if there is none."""
        again = {reading.trainer.recompute for reading in part.readings if reading.learns.parts}
        trainers = self._trainers(part)
        for ordinal in count(part.ordinal):
            train = trainers.at(ordinal)
            if train is None or again <= {train.trainer.recompute}:
                break
        return part._replace(train=train, ordinal=ordinal) if train else None

    def _trainers(self, part: PartialPlan) -> FastestFirst:
        """All layouts that fit on the trainer's GPUs, the fastest first."""
        return self.candidates.trainers(
            part.allocations[0].nodes, part.allocations[0].gpus, self.colocated(part.groups)
        )

    def _push_trained(self, part: PartialPlan) -> None:
        """Push the partial plan with its next trainer. If the generator shares the trainer's GPUs, the bound uses the
        rollouts that are known."""
        found = self._with_trainer(part)
        if found is None or (train := found.train) is None:
            return
        if part.decodes:
            most = part.generator_sizes(part.decodes).stop - 1
            lower = self._fastest_period(part.decodes, False, train.seconds, _dedicated_s(part), most)
        else:
            trainer = part.allocations[0]
            table = self.candidates.generators(trainer.nodes, (trainer.gpus,), None)
            lower = self._period(True, self._times(part, train, table, slice(None))).min(initial=inf)
        self._push(found, float(lower))

    def _open_trained(self, part: PartialPlan, train: Training) -> None:
        """Push all generators on dedicated GPUs; or all generators on this trainer's GPUs, with its moments there or on
        the host, and then the next trainer."""
        if part.decodes:
            table, sizes = self.candidates.dedicated(part.decodes), part.generator_sizes(part.decodes)
            rows = np.arange(*np.searchsorted(table.gpus, (sizes.start, sizes.stop)))
            self._push_decoding(part, train, table, rows)
            return
        # Moments that stay leave less memory for the cache; moments that move take time.
        trainer, parts = part.allocations[0], train.memory.parts
        stays = Memory({name: parts[name] for name in STAY if name in parts})
        moments = parts["moments"] + parts.get("critic moments", 0.0)
        pins = self.candidates.pins
        for moved, beside in ((None, train.memory), (moments, stays)):
            offloads = moved is not None
            # If both roles work at the same time, the moments cannot leave.
            if (offloads and pins.overlaps) or (pins.offload is not None and pins.offload != offloads):
                continue
            table = self.candidates.generators(trainer.nodes, (trainer.gpus,), beside, train.memory)
            self._push_decoding(part._replace(moved=moved), train, table, np.arange(len(table.gpus)))
        self._push_trained(part._replace(ordinal=part.ordinal + 1))

    def _push_decoding(self, part: PartialPlan, train: Training, table: GeneratorTable, rows: IntArray) -> None:
        """Push the rows that matter, ordered by bounds from the rollouts that are known."""
        lower = self._period(part.decodes is None, self._times(part, train, table, rows))
        # Rows beyond the limit never matter again, since limits only fall and bounds only rise.
        matters = lower <= self._limit(part.split)[0]
        rows, lower = rows[matters], lower[matters]
        if len(rows):
            order = np.lexsort((table.gpus[rows], lower))
            found = part._replace(train=train, table=table, rows=rows[order], version=table.version)
            self._push(found, float(lower[order[0]]))

    def _open_decoding(self, part: PartialPlan, train: Training, table: GeneratorTable, lower: float) -> None:
        """Simulate the first row's rollout if it is not known. If the row is still first, complete the plan with it,
        and push the rows after it, and with dedicated GPUs this row with the next trainer."""
        rows, split = np.asarray(part.rows), part.first_split
        # A simulation takes milliseconds, so a row gets one only when its bound is the lowest in the heap. It may raise
        # the bounds of many rows: then the rows of this partial plan are sorted again.
        if part.version == table.version and not table.simulated[rows[0]]:
            self.candidates.simulate(split.decodes.nodes, table, int(rows[0]))
        if part.version != table.version:
            self._push_decoding(part, train, table, rows)
            return
        # A partial plan may have rows of several splits. Rows of the best plan's split must beat that plan, others the
        # runner-up.
        if (lower, part.tie) < self._limit(split):
            found = self._solution(part, train, table, split)
            if all(found.host_bytes[host] <= self.memory[host] for host in found.host_bytes):
                self._note(found)
        self._push_decoding(part, train, table, rows[1:])
        # A slower trainer may have a faster sync. On shared GPUs a trainer's memory decides which generators fit, so
        # `_open_trained` goes through the trainers.
        following = None if split.shared else self._with_trainer(part._replace(ordinal=part.ordinal + 1))
        if following is not None and following.train is not None:
            self._push_decoding(following, following.train, table, rows[:1])

    def _solution(self, part: PartialPlan, train: Training, table: GeneratorTable, split: GpuSplit) -> Solution:
        """The whole plan with the first row; its sync follows from the resharding plan."""
        row, lag, prompts = int(part.rows[0]), self.candidates.lag, self.candidates.work.prompts
        decode = self.candidates.generating(split.decodes.nodes, table, row)
        generator, hosts = decode.generator, split.hosts() or [(), ()]
        num_hosts = len({*hosts[0], *hosts[1]})
        sync = sync_cost(
            traffic(generator.shape, train.trainer.mesh, generator.mesh, generator.precision),
            decode.replicas, split.trainer.nodes.gpu, split.decodes.nodes.gpu,
            together=num_hosts == 1, chained=num_hosts > 1,
        )  # fmt: skip
        times = replace(self._times(part, train, table, row), sync=sync.seconds)
        found = bounds(self.roles, times, lag, prompts, [each.pools for each in split.dedicated], shared=split.shared)
        alone = period_terms(self.roles, replace(times, others=0.0), lag, prompts, shared=split.shared)
        moved = part.moved or 0.0
        switch = switch_cost(train.trainer.gpu, moved, moved) if split.shared else NO_SWITCH
        return Solution(
            split, train, decode, part.readings, float(times.rollout), sync, switch, found, float(max(alone)),
            part.moved is not None,
        )  # fmt: skip

    def _least_memory(self, found: Solution) -> Solution:
        """The same plan with the micro-batches that need least memory, among those with equally fast steps."""
        trainer, training = found.split.trainer, found.training
        groups = tuple(each.pools for each in found.split.dedicated)
        for each in self.candidates.trainers(trainer.nodes, trainer.gpus, self.colocated(groups)):
            # Equal except for rounding: several limits may give equal micro-batches.
            if each.seconds > found.training.seconds * (1 + 1e-12):
                break
            alike = replace(each.trainer, micro_tokens=training.trainer.micro_tokens) == training.trainer
            if alike and each.memory.bytes < training.memory.bytes:
                training = each
        return replace(found, training=training)

    def _times(self, part: PartialPlan, train: Training, table: GeneratorTable, rows: IntArray | slice | int) -> Times:
        """The times of some rows: exact, except for rollouts that are not simulated and for the sync, which are lower
        bounds. For the sync, every rank of a generator receives its share of the weights, and the trainer's ranks
        together send all weights to at least one replica."""
        trainer, shared = part.allocations[0], part.decodes is None
        decodes = part.decodes or trainer.nodes
        gpus = table.gpus[rows] * (not shared) + trainer.gpus
        together = (gpus <= decodes.each) & (decodes is trainer.nodes)
        into, out = (_rate(nodes, together) for nodes in (decodes, trainer.nodes))
        ranks = table.gpus[rows] // table.replicas[rows] / trainer.gpus
        sync = table.bytes[rows] * np.maximum(1 / into, ranks / out) * SAFE
        moved = part.moved or 0.0
        switch_s = switch_cost(train.trainer.gpu, moved, moved).seconds if shared else 0.0
        steady, rollout, others = table.steady[rows], table.rollout[rows], table.others[rows]
        dedicated, arrivals = _dedicated_s(part), self.candidates.work.arrivals
        return Times(train.seconds, steady, rollout, sync, switch_s, dedicated, others, self.wait_s, arrivals)

    def _next_bounds(self, part: PartialPlan, nodes: NodeGroup, pools: tuple[str, ...]) -> FloatArray:
        """[sizes]: a lower bound of the period for each number of GPUs in a node group that the trainer or `pools` may
        get next."""
        candidates, sizes_N, colocated = self.candidates, nodes.sizes_N, self.colocated(part.groups)
        left = {each: each.gpus - part.used(each) - sizes_N * (each is nodes) for each in self.node_groups}
        dedicated: list[tuple[Seconds, Seconds]] = []
        for each in part.allocations[1:]:
            reads_N, learns_N = candidates.reader_s(each.nodes, self.models_of(each.pools))
            place = each.nodes.place[each.gpus]
            dedicated.append((reads_N[place], learns_N[place]))
        train: Seconds = candidates.trainer_s(nodes, colocated)
        trains, gpus = nodes, sizes_N
        if part.allocations:
            trainer = part.allocations[0]
            train_N, trains = candidates.trainer_s(trainer.nodes, colocated), trainer.nodes
            train = train_N[trains.place[trainer.gpus]]
            gpus = np.full(len(sizes_N), trainer.gpus)
            dedicated.append(candidates.reader_s(nodes, self.models_of(pools)))
        if groups := part.groups[len(part.allocations) :]:
            # Later groups divide the GPUs that are left. A single group is within one node group; several groups are no
            # faster than if all were on all of these GPUs.
            models = self.models_of(tuple(pool for group in groups for pool in group))
            free = sum(np.maximum(each, 0) for each in left.values())
            seconds = []
            for each_nodes, own in left.items():
                most = np.maximum(own, 0) if len(groups) == 1 else free
                passed, steps = candidates.dedicated_gpu_s(each_nodes, models)
                share = np.where(most > 0, 1 / np.maximum(most, 1), inf)
                seconds.append((passed * share, steps * share if steps else 0.0))
            reads, learns = zip(*seconds, strict=True)
            dedicated.append((reduce(np.minimum, reads), reduce(np.minimum, learns)))
        decodes = part.decodes or trains
        gpus = left[decodes] if part.decodes else gpus
        lower = self._fastest_period(decodes, part.decodes is None, train, tuple(dedicated), gpus)
        # `left` is negative if the next group asks for more GPUs than there are.
        return np.where(left[nodes] >= 0, lower, inf)

    def _fastest_period(
        self,
        nodes: NodeGroup,
        shared: bool,
        train: Seconds,
        dedicated: tuple[tuple[Seconds, Seconds], ...],
        gpus: Seconds,
    ) -> Seconds:
        """A lower bound of the period with the fastest generators on `gpus` GPUs (if dedicated, on as many or fewer);
        infinite if there are none."""
        fastest = self.candidates.fastest(nodes, shared)
        place = np.searchsorted(nodes.sizes_N, gpus, "right") - 1
        steady, rollout, others, share = (column[place] for column in fastest)
        sync = share * SAFE / _rate(nodes, gpus <= nodes.each)
        arrivals = self.candidates.work.arrivals
        times = Times(train, steady, rollout, sync, 0.0, dedicated, others, self.wait_s, arrivals)
        # With shared GPUs no sum contains the steady seconds, so test them here: infinite without a generator.
        return np.where((place >= 0) & np.isfinite(steady), self._period(shared, times), inf)

    def _period(self, shared: bool, times: Times) -> Seconds:
        """A lower bound of the period, valid even if any of the times are longer than given."""
        lag, prompts = self.candidates.lag, self.candidates.work.prompts
        return reduce(np.maximum, period_terms(self.roles, times, lag, prompts, shared=shared, least=True))


def _dedicated_s(part: PartialPlan) -> tuple[tuple[float, float], ...]:
    """The seconds of passes and of steps of each dedicated group."""
    return tuple((each.reads.seconds, each.learns.seconds) for each in part.readings)


def _rate(nodes: NodeGroup, together: BoolArray) -> FloatArray:
    """Bytes per second of a rank in a sync: over NVLink if both roles are on one host (`together`), else over NICs."""
    return np.where(together, nodes.gpu.nvlink, nodes.gpu.nic)
