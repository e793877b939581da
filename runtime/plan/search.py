"""The best plan: combinations of the roles' candidate layouts, in the order of a lower bound of the period. Pure but
for the clock of its time limit.

A combination is decided step by step: the trainer's GPUs; those of each group of models that has dedicated ones; their
layouts; then a row of the generator's table, with its rollout simulated and the sync of the real resharding plan. What
is open lies in a heap by a lower bound of the period of all that may follow from it. A plan that is no worse than the
least of these bounds is optimal under the model. What cannot beat the best two plans of different splits is dropped.

Equal periods are decided by GPUs (fewer first), then by the order in which plans are found, so that the same question
always has the same answer. Of micro-batches with which the steps take as long, a plan has those that need least memory
(`Search._least_memory`).

The period is the largest of a few sums, by the argument of `graph.analysis`. A batch of groups counts as one firing of
each node. With dedicated GPUs pools work beside each other, so that the period is at least each pool's work; and from
one version of the policy to the version that is trained on its samples the sync, the batch's rollout (with its tail),
the passes of models beside it and the steps follow each other, 1 + lag updates at a time. Pools that share GPUs take
turns, whatever the lag is. What queueing between groups adds is left to the simulator.

At a lag of k, k other batches are decoded beside a batch (docs/staleness.md). Reading the weights costs a step the same
whoever is in it; what rows and contexts cost, `others` seconds of each batch, comes on top for each. A batch follows
another one by an update's steps, t seconds or more, so that of each the share 1 - t / r falls into a rollout of r.
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
    DEDICATED,
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

# Seconds beyond its time that a search without any plan has to find one.
GRACE = 5.0
# What a trainer keeps on GPUs that decode while its moments are on the host.
STAY = ("weights", "frozen model", "critic weights", "copies")
# Of GPUs that one role has.
NO_SWITCH = Cost({"to the host": 0.0, "from the host": 0.0})
# Pools that share dedicated GPUs.
Groups = tuple[tuple[str, ...], ...]
# A number, or an array of them: of as many plans at once.
Seconds = Any


@dataclass(frozen=True)
class Allocation:
    """GPUs of one node group for one or more pools."""

    nodes: NodeGroup
    gpus: int
    pools: tuple[str, ...] = ()


def hosts_of(allocations: Sequence[Allocation]) -> list[tuple[str, ...]] | None:
    """The hosts of each; None if they have no room beside each other."""
    # Each node group is packed by itself: no pool spans two kinds of GPUs.
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
    """Who has which GPUs. `generator` is None where it shares the trainer's. Models beside the policy that have no
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
        """Of the trainer, the generator and each dedicated group; None if they have no room."""
        found = hosts_of(self.allocations)
        return [found[0], *found] if found and self.shared else found


@dataclass(frozen=True)
class Solution:
    """A whole plan. `readings` are of dedicated groups, in the split's order. `alone_s` would be its period if no batch
    slowed another one. `offloads`: the trainer's moments lie on the host while its GPUs decode."""

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
        """What decides between plans, the lowest first: the period, then the GPUs."""
        return self.period_s, (self.split.gpus,)

    @property
    def bound(self) -> str:
        return self.bounds[0].cause

    @property
    def host_bytes(self) -> Mapping[str, float]:
        """Of each host's memory, what AdamW's moments take that lie there."""
        hosts, found = self.split.hosts() or [(), ()], Counter[str]()
        pools = zip((self.split.trainer, *self.split.dedicated), (self.training, *self.readings), strict=True)
        for (own, training), names in zip(pools, (hosts[0], *hosts[2:]), strict=True):
            if training.host_bytes:
                found.update(dict.fromkeys(names, training.host_bytes * min(own.gpus, own.nodes.each)))
        return found

    @property
    def tp_over_hosts(self) -> bool:
        """Whether tensor parallelism of any pool crosses hosts."""
        trains = zip(self.split.dedicated, self.readings, strict=True)
        cuts = [(self.split.trainer, self.training.trainer.mesh), (self.split.decodes, self.generating.generator.mesh)]
        cuts += [(own, reading.trainer.mesh) for own, reading in trains]
        return any(mesh.tp > own.nodes.each for own, mesh in cuts)


@dataclass(frozen=True)
class Outcome:
    """`best` is None where nothing fits, or where the time was over before anything was found; `runner_up` is the best
    plan with another split. No plan takes less than `floor` seconds; `proved`: the search ended by itself. `opened`
    counts the parts of plans that were looked at."""

    best: Solution | None
    runner_up: Solution | None
    floor: float
    proved: bool
    opened: int

    @property
    def gap(self) -> float:
        """By how much of its period the best may be improved at most; 0 if it is optimal."""
        return 0.0 if self.proved or self.best is None else max(0.0, 1 - self.floor / self.best.period_s)


@dataclass(frozen=True)
class Times:
    """Seconds of a batch, or lower bounds of them. `train` has the work of colocated models in it; `dedicated` are the
    passes of each group with GPUs of its own, and the steps of its critics, for which only the next batch waits. `wait`
    is what an environment takes to answer all turns. `arrivals` are those of the update's parts. `steady`, `rollout`
    and `others` are as in `GeneratorTable`; `switch` is of the GPUs that both stages share."""

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
    dedicated group; or of shared GPUs all of it. With `least` none of them falls if a time is longer than given: slower
    steps may keep batches apart, so that the period itself is not monotone in them."""
    generates, around, learn = times.rollout, times.sync + times.switch + times.wait, 0.0
    if times.dedicated:
        read, learn = (reduce(np.maximum, kind) for kind in zip(*times.dedicated, strict=True))
        # Models that take each group as it is finished are behind the rollout by one group only.
        generates = np.maximum(generates, read) + read / prompts if roles.reads_groups else generates + read
    around = around + generates
    if shared:
        return [around + times.train + learn]
    trains = times.train
    if times.arrivals:
        # The parts from each one on follow its groups; those before the last one come before the rollout's end.
        rest = [(1 - part / len(times.arrivals)) * times.train for part in range(len(times.arrivals))]
        early = [(1 - came) * times.rollout if came < 1 else 0.0 for came in times.arrivals]
        trains = reduce(np.maximum, (steps - seconds for steps, seconds in zip(rest, early, strict=True)))
    # Of each other batch in work the share that falls into a rollout slows it.
    cycle = trains + lag * times.others * np.maximum(0.0, 1 - times.train / times.rollout)
    if least:
        # The sum is linear in the steps until they take as long as the rollout, so that its least is at an end. In
        # parts it is convex, and no less than what the parts take alone.
        cycle = trains if times.arrivals else np.minimum(cycle, np.maximum(times.train, times.rollout))
    groups = (reads + learns for reads, learns in times.dedicated)
    return [(around + cycle) / (1 + lag), times.train, times.steady, times.sync, *groups]


def bounds(
    roles: Roles, times: Times, lag: int, prompts: int, pools: Sequence[Sequence[str]] = (), *, shared: bool
) -> tuple[Bound, ...]:
    """All that bounds the period, the largest first. `pools` are those of each dedicated group."""
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
    """Which models beside the policy have dedicated GPUs, and which of these share them: all that differ. Models that
    are not named are colocated with the trainer. A pool with a given mesh has dedicated GPUs, which it shares with no
    pool that has another one."""
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
    """Every way to leave some out and to put the others into groups."""
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
    """What is decided of a plan. GPUs of the trainer and of some of the `groups`: an allocation for each, in this
    order. `decodes` is where the generator has its own, None if it shares the trainer's. `given` is a split that all
    plans that follow have.

    Then layouts of all but the generator: `readings` of the groups, and `train`, the `ordinal`th of those on
    the trainer's GPUs. Then some generators: `rows` of a `table`, the most promising first by what was known at the
    table's `version`. `moved` are the bytes of the trainer's moments that are on the host while they decode; None: the
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
        """Decisions so far; a later trainer is a decision more."""
        return len(self.allocations) + (self.train is not None) + self.ordinal + (self.table is not None)

    @property
    def split(self) -> GpuSplit | None:
        """Of all plans that follow, if they have the same."""
        if self.given or self.decodes or len(self.allocations) <= len(self.groups):
            return self.given
        return self.split_with(0)

    def split_with(self, gpus: int) -> GpuSplit:
        """With so many GPUs for the generator, if it has its own."""
        trainer, *dedicated = self.allocations
        return GpuSplit(trainer, Allocation(self.decodes, gpus) if self.decodes else None, tuple(dedicated))

    @property
    def first_split(self) -> GpuSplit:
        """That of the first row."""
        return self.split_with(int(self.table.gpus[self.rows[0]]) if self.table else 0)

    @property
    def tie(self) -> tuple[int, ...]:
        """As `Solution.rank` has it, of the first row."""
        return (self.first_split.gpus,) if self.table else ()

    def used(self, nodes: NodeGroup) -> int:
        return sum(each.gpus for each in self.allocations if each.nodes is nodes)

    def generator_sizes(self, nodes: NodeGroup) -> range:
        """The range of GPUs that a generator of its own may have in a node group."""
        if self.given:
            return range(self.given.decodes.gpus, self.given.decodes.gpus + 1)
        left = nodes.gpus - self.used(nodes)

        def crowded(gpus: int) -> bool:
            return gpus > left or hosts_of((*self.allocations, Allocation(nodes, gpus))) is None

        # Where a size can be packed every smaller one can.
        most = bisect_left(nodes.sizes, True, key=crowded)
        return range(1, nodes.sizes[most - 1] + 1 if most else 1)


@dataclass
class Search:
    """One search: of all plans, or of those with one `given` split, models beside the policy colocated with the
    trainer. `known` are plans that another search has found among these."""

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
        # In which an environment answers all turns.
        self.wait_s = self.roles.turns * self.candidates.work.environment_s if self.roles.environment else 0.0

    def run(self, deadline: float, *, second: bool = True) -> Outcome:
        """Until the best plan (and with `second` that of another split) is known, or the clock passes `deadline`."""
        self.second = second
        for solution in self.known:
            self._note(solution)
        self.begin()
        opened = 0
        # Without a plan the search goes on for a while: a plan with an honest gap is worth more than being in time.
        while self.heap and time.monotonic() < deadline + (GRACE if self.best is None else 0.0):
            _, lower, tie, _, part = heapq.heappop(self.heap)
            if (lower, tie) >= self._limit(None):  # nor does anything after it matter
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
        # Nothing that is still open can be better than this.
        rest = min(((lower, tie) for _, lower, tie, _, _ in self.heap), default=(inf, ()))
        proved = self.best is not None and rest >= self.best.rank
        floor = self.best.period_s if self.best and proved else rest[0]
        best, runner_up = (found and self._least_memory(found) for found in (self.best, self.runner_up))
        return Outcome(best, runner_up, floor, proved, opened)

    def begin(self) -> None:
        """Each number of GPUs for the trainer, with each of the groupings of the models beside the policy."""
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
        """Models beside the policy on the trainer's GPUs."""
        dedicated = {pool for group in groups for pool in group}
        return self.models_of(tuple(pool for pool in self.roles.beside if pool not in dedicated))

    def _push(self, part: PartialPlan, lower: float) -> None:
        """While there is no plan, what is decided furthest comes first: any plan is one to measure others by."""
        if (lower, part.tie) < self._limit(part.split):
            self.pushed += 1
            # The serial number keeps equal parts in the order in which they came: parts themselves have none.
            heapq.heappush(self.heap, (-part.depth if self.best is None else 0, lower, part.tie, self.pushed, part))

    def _limit(self, split: GpuSplit | None) -> tuple[float, tuple[int, ...]]:
        """The rank that plans of one split have to beat to matter, or with None those of any split."""
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
            # The first plan ends the dive: what is open is looked at by its bounds alone from now on.
            self.heap = [(0, *entry[1:]) for entry in self.heap]
            heapq.heapify(self.heap)

    def _place(self, part: PartialPlan, nodes: NodeGroup, pools: tuple[str, ...]) -> None:
        """The next group's GPUs, or the trainer's, with each number of them there is in a node group."""
        lower_N = self._next_bounds(part, nodes, pools)
        for place in np.flatnonzero(lower_N < self._limit(part.split)[0]).tolist():
            following = part._replace(allocations=(*part.allocations, Allocation(nodes, nodes.sizes[place], pools)))
            # The bound knows how many GPUs are left, not whether parts of hosts can be packed.
            if hosts_of(following.allocations):
                self._push(following, float(lower_N[place]))

    def _open_placed(self, part: PartialPlan) -> None:
        """The next group's GPUs; if all have theirs, their layouts, each with the fastest trainer."""
        if len(part.allocations) <= len(part.groups):
            for nodes in self.node_groups:
                self._place(part, nodes, part.groups[len(part.allocations) - 1])
            return
        # The fastest trainer alone: a slower one is opened only after it (`_open_decoding`).
        dedicated, pins, readers = part.allocations[1:], self.candidates.pins, self.candidates.readers
        layouts = (
            readers(each.nodes, each.gpus, self.models_of(each.pools), pins.of(each.pools)) for each in dedicated
        )
        for readings in product(*layouts):
            self._push_trained(part._replace(readings=readings))

    def _with_trainer(self, part: PartialPlan) -> PartialPlan | None:
        """With the fastest trainer from `ordinal` on that computes layers again as critics with their own GPUs do: a
        run has one answer for all that learns."""
        again = {reading.trainer.recompute for reading in part.readings if reading.learns.parts}
        trainers = self._trainers(part)
        for ordinal in count(part.ordinal):
            train = trainers.at(ordinal)
            if train is None or again <= {train.trainer.recompute}:
                break
        return part._replace(train=train, ordinal=ordinal) if train else None

    def _trainers(self, part: PartialPlan) -> FastestFirst:
        """All that fit on the trainer's GPUs, the fastest first."""
        return self.candidates.trainers(
            part.allocations[0].nodes, part.allocations[0].gpus, self.colocated(part.groups)
        )

    def _push_trained(self, part: PartialPlan) -> None:
        """With the next trainer; by what is known of rollouts, if the generator takes turns with it on the same
        GPUs."""
        found = self._with_trainer(part)
        if found is None or (train := found.train) is None:
            return
        if part.decodes:
            most = part.generator_sizes(part.decodes).stop - 1
            lower = self._fastest_period(part.decodes, False, train.seconds, _dedicated_s(part), most)
        else:
            trainer = part.allocations[0]
            table = self.candidates.generators(trainer.nodes, (trainer.gpus,), self.candidates.shared_copies, None)
            lower = self._period(True, self._times(part, train, table, slice(None))).min(initial=inf)
        self._push(found, float(lower))

    def _open_trained(self, part: PartialPlan, train: Training) -> None:
        """All generators on dedicated GPUs; or all on this trainer's, whose moments stay or are on the host, and then
        the next trainer."""
        if part.decodes:
            table, sizes = self.candidates.dedicated(part.decodes), part.generator_sizes(part.decodes)
            rows = np.arange(*np.searchsorted(table.gpus, (sizes.start, sizes.stop)))
            self._push_decoding(part, train, table, rows)
            return
        # Moments that stay leave less room for the cache; moments that move take time.
        trainer, parts = part.allocations[0], train.memory.parts
        stays = Memory({name: parts[name] for name in STAY if name in parts})
        moments = parts["moments"] + parts.get("critic moments", 0.0)
        pins, copies = self.candidates.pins, self.candidates.shared_copies
        for moved, beside in ((None, train.memory), (moments, stays)):
            offloads = moved is not None
            # What both need at the same time cannot leave.
            if (offloads and pins.overlaps) or (pins.offload is not None and pins.offload != offloads):
                continue
            table = self.candidates.generators(trainer.nodes, (trainer.gpus,), copies, beside)
            self._push_decoding(part._replace(moved=moved), train, table, np.arange(len(table.gpus)))
        self._push_trained(part._replace(ordinal=part.ordinal + 1))

    def _push_decoding(self, part: PartialPlan, train: Training, table: GeneratorTable, rows: IntArray) -> None:
        """Rows that matter, by all that is known of rollouts."""
        lower = self._period(part.decodes is None, self._times(part, train, table, rows))
        # Rows beyond the limit never matter again, since limits only fall and bounds only rise.
        matters = lower <= self._limit(part.split)[0]
        rows, lower = rows[matters], lower[matters]
        if len(rows):
            order = np.lexsort((table.gpus[rows], lower))
            found = part._replace(train=train, table=table, rows=rows[order], version=table.version)
            self._push(found, float(lower[order[0]]))

    def _open_decoding(self, part: PartialPlan, train: Training, table: GeneratorTable, lower: float) -> None:
        """The first row, once its rollout is known and it is still the first one; then those after it, and this row
        with the next trainer on dedicated GPUs."""
        rows, split = np.asarray(part.rows), part.first_split
        # A simulation takes milliseconds, so that a row gets one only when its bound is the lowest of all that is open.
        # It may lift the bounds of many rows: those of this part are put in order again.
        if part.version == table.version and not table.simulated[rows[0]]:
            self.candidates.simulate(split.decodes.nodes, table, int(rows[0]))
        if part.version != table.version:
            self._push_decoding(part, train, table, rows)
            return
        # The part may hold rows of several splits; those of the best plan's split have to beat that plan, not the
        # runner-up.
        if (lower, part.tie) < self._limit(split):
            found = self._solution(part, train, table, split)
            if all(found.host_bytes[host] <= self.memory[host] for host in found.host_bytes):
                self._note(found)
        self._push_decoding(part, train, table, rows[1:])
        # A slower trainer may have a faster sync. On shared GPUs its memory decides which generators fit, so that
        # `_open_trained` has gone through all trainers there.
        following = None if split.shared else self._with_trainer(part._replace(ordinal=part.ordinal + 1))
        if following is not None and following.train is not None:
            self._push_decoding(following, following.train, table, rows[:1])

    def _solution(self, part: PartialPlan, train: Training, table: GeneratorTable, split: GpuSplit) -> Solution:
        """The whole plan with the first row, its sync by the resharding plan."""
        row, lag, prompts = int(part.rows[0]), self.candidates.lag, self.candidates.work.prompts
        copies = self.candidates.shared_copies if split.shared else DEDICATED
        decode = self.candidates.generating(split.decodes.nodes, table, row, copies)
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
        """The same with the micro-batches that need least memory of those with which the steps take as long."""
        trainer, training = found.split.trainer, found.training
        groups = tuple(each.pools for each in found.split.dedicated)
        for each in self.candidates.trainers(trainer.nodes, trainer.gpus, self.colocated(groups)):
            # Equal but for rounding: as many micro-batches of as many tokens follow from several limits.
            if each.seconds > found.training.seconds * (1 + 1e-12):
                break
            alike = replace(each.trainer, micro_tokens=training.trainer.micro_tokens) == training.trainer
            if alike and each.memory.bytes < training.memory.bytes:
                training = each
        return replace(found, training=training)

    def _times(self, part: PartialPlan, train: Training, table: GeneratorTable, rows: IntArray | slice | int) -> Times:
        """Of some rows, exact but for rollouts that are not simulated and for the sync. Every rank of a generator gets
        its share of the weights, and the trainer's ranks send all of them to one replica at the least."""
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
        """[sizes]: for each number of GPUs of a node group that come next, the trainer's or those of `pools`."""
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
            # Groups that come later share out what is left: a single one is within a node group, and one of several is
            # no faster than all of them on all of it.
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
        # What is left is negative where the next group asks for more than there is.
        return np.where(left[nodes] >= 0, lower, inf)

    def _fastest_period(
        self,
        nodes: NodeGroup,
        shared: bool,
        train: Seconds,
        dedicated: tuple[tuple[Seconds, Seconds], ...],
        gpus: Seconds,
    ) -> Seconds:
        """With the fastest generators on so many GPUs, or on fewer dedicated ones; infinite where there are none."""
        fastest = self.candidates.fastest(nodes, shared)
        place = np.searchsorted(nodes.sizes_N, gpus, "right") - 1
        steady, rollout, others, share = (column[place] for column in fastest)
        sync = share * SAFE / _rate(nodes, gpus <= nodes.each)
        arrivals = self.candidates.work.arrivals
        times = Times(train, steady, rollout, sync, 0.0, dedicated, others, self.wait_s, arrivals)
        # Shared GPUs have no sum of the steady seconds, which are infinite where there is no generator.
        return np.where((place >= 0) & np.isfinite(steady), self._period(shared, times), inf)

    def _period(self, shared: bool, times: Times) -> Seconds:
        """What the period does not go below whichever of the times are longer than given."""
        lag, prompts = self.candidates.lag, self.candidates.work.prompts
        return reduce(np.maximum, period_terms(self.roles, times, lag, prompts, shared=shared, least=True))


def _dedicated_s(part: PartialPlan) -> tuple[tuple[float, float], ...]:
    """Seconds of passes and of steps of each dedicated group."""
    return tuple((each.reads.seconds, each.learns.seconds) for each in part.readings)


def _rate(nodes: NodeGroup, together: BoolArray) -> FloatArray:
    """Bytes per second of a rank's weights: over NVLink where both roles are on one host."""
    return np.where(together, nodes.gpu.nvlink, nodes.gpu.nic)
