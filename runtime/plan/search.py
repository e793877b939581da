"""The best plan by best-first branch and bound. Pure but for the clock of its time limit.

What is open lies in a heap by a lower bound of its period (`least`): first the GPUs of the trainer; then those of each
group of models that is apart; then their fastest layouts; then each generator there is, on any of the GPUs that are
left; then with its rollout simulated; then with each trainer in turn, fastest first, and the sync of the real
resharding plan. A plan that is no worse than anything still open is optimal under the model, and what cannot beat the
best two plans of different splits is never opened. Equal periods are decided by precision (bf16 first), then by GPUs
(fewer first), then by the order of creation, so that the same question always has the same answer.

What a search has open, by lower bounds, and what it has found. Pure.

What follows a part of a plan when the next thing about it is decided. Pure.

What of a plan is decided, step by step: what a search has open. Pure.

What a search goes through and finds: who has which GPUs, a whole plan, and how sure it is. Pure.

Lower bounds of the period of all plans that are still possible when some of it is decided. Pure.

Seconds per update of a plan, and what bounds it: the largest of a few sums, by the argument of `graph.passes`. Pure.

A batch of groups counts as one firing of each node. With GPUs of its own each pool works beside the others, so that the
period is at least each pool's work; and from one version of the policy to the version that is trained on its samples
the sync, the batch's rollout (with its tail), the passes of models beside it and the steps follow each other, 1 + lag
updates at a time. Models that read groups as they are finished are behind the rollout by one group only. Pools on the
same GPUs take turns, whatever the lag is. What queueing between groups adds is left to the simulator.

At a lag of k, k other batches are decoded beside a batch. Reading the weights costs a step the same
whoever is in it; what rows and contexts cost, `others` seconds of each batch, comes on top for each. A batch follows
another one by an update's steps, t seconds or more, so that of each the share 1 - t / r falls into a rollout of r.
"""

import heapq
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import count, product
from math import inf
from typing import Any

import numpy as np

from penstock.graph.analysis import Bound
from penstock.runtime.plan.candidates import OWN, SHARED, Decoders, Generating, Island, Sides, Training
from penstock.runtime.plan.collectives import SAFE, Cost
from penstock.runtime.plan.memory import Memory
from penstock.runtime.plan.roles import Models, Roles
from penstock.runtime.plan.sync_cost import switch_cost, sync_cost, traffic
from penstock.runtime.plan.workload import FloatArray, IntArray


@dataclass(frozen=True)
class Apart:
    """GPUs that some pools of models beside the policy have for themselves."""

    pools: tuple[str, ...]
    island: Island
    gpus: int

    @cached_property
    def place(self) -> int:
        """Of this number among those that there may be."""
        return self.island.sizes.index(self.gpus)


@dataclass(frozen=True)
class Split:
    """Who has which GPUs. `islands` are the trainer's and the generator's. `shared`: the generator has the trainer's
    GPUs; else it has none yet while `generator` is 0. Models beside the policy that are not `apart` lie on the
    trainer's."""

    shared: bool
    islands: tuple[Island, Island]
    trainer: int
    generator: int
    apart: tuple[Apart, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPUs of each group of pools that has its own."""
        return (self.trainer, *(() if self.shared else (self.generator,)), *(each.gpus for each in self.apart))

    @property
    def gpus(self) -> int:
        return sum(self.sizes)

    def left(self, island: Island) -> int:
        """GPUs of an island that nobody has."""
        taken = self.trainer * (island == self.islands[0])
        taken += 0 if self.shared else self.generator * (island == self.islands[1])
        return island.gpus - taken - sum(each.gpus for each in self.apart if each.island == island)

    @property
    def decided(self) -> "Split | None":
        """This one, if the generator has GPUs."""
        return self if self.generator else None

    def with_generator(self, gpus: int) -> "Split":
        return self if self.generator == gpus else replace(self, generator=gpus)

    def generators(self) -> tuple[int, ...]:
        """GPUs that the generator may have beside the others."""
        island = self.islands[1]
        left = self.left(island)

        def fits(size: int) -> bool:
            return size <= left and self.with_generator(size).has_room

        sizes = island.sizes
        if self._whole:
            return sizes[: bisect_right(sizes, left)]
        whole = sizes.index(island.each)
        most = bisect_left(sizes, True, whole, key=lambda size: not fits(size))
        return (*filter(fits, sizes[:whole]), *sizes[whole:most])

    @property
    def has_room(self) -> bool:
        """Whole hosts only have to be counted, as whoever makes a split does; parts have to be packed."""
        return self._whole or self.hosts() is not None

    @property
    def _whole(self) -> bool:
        """Whether all have whole hosts of one island."""
        first, *others = (*self.islands, *(each.island for each in self.apart))
        return all(size % first.each == 0 for size in self.sizes) and all(island is first for island in others)

    def hosts(self) -> list[tuple[str, ...]] | None:
        """Of the trainer, the generator and what is apart; None if they have no room."""
        asked = [(self.islands[0], self.trainer), (self.islands[1], 0 if self.shared else self.generator)]
        asked += [(each.island, each.gpus) for each in self.apart]
        given: list[tuple[str, ...]] = [()] * len(asked)
        for island in dict.fromkeys(island for island, _ in asked):
            here = [i for i, (where, gpus) in enumerate(asked) if gpus and where == island]
            found = island.share_out([asked[i][1] for i in here])
            if found is None:
                return None
            for index, hosts in zip(here, found, strict=True):
                given[index] = hosts
        return [given[0], given[0] if self.shared else given[1], *given[2:]]


def tie(decode: Generating, split: Split) -> tuple[int, int]:
    """What decides between equal periods, the lowest first: bf16, then fewer GPUs."""
    return int(decode.generator.precision != "bf16"), split.gpus


@dataclass(frozen=True)
class Found:
    """A whole plan. `readings` are of what is apart, in the split's order. `alone_s` would be its period if no batch
    slowed another one. `offloads`: the trainer's moments lie on the host while its GPUs decode."""

    split: Split
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
        """What decides between plans, the lowest first: the period, then the precision, then the GPUs."""
        return self.period_s, tie(self.generating, self.split)

    @property
    def bound(self) -> str:
        return self.bounds[0].cause


@dataclass(frozen=True)
class Outcome:
    """`best` is None where nothing fits, or where the time was over before anything was found. No plan takes less than
    `floor` seconds; `proved`: the search ended by itself."""

    best: Found | None
    runner_up: Found | None
    floor: float
    proved: bool
    opened: int

    @property
    def gap(self) -> float:
        """By how much of its period the best may be improved at most; 0 if it is optimal."""
        return 0.0 if self.proved or self.best is None else max(0.0, 1 - self.floor / self.best.period_s)


Groups = tuple[tuple[str, ...], ...]
"""Pools that share GPUs."""


@dataclass(frozen=True)
class Room:
    """GPUs of the trainer, and of some groups of pools: `apart` are those that are to have GPUs of their own, too. The
    generator's may be undecided."""

    split: Split
    apart: Groups = ()

    @property
    def alone(self) -> Split | None:
        """The split of all plans that follow, if they have one."""
        return None if self.apart else self.split.decided


@dataclass(frozen=True)
class Trained:
    """GPUs of all but the generator, and with them a trainer, the `index`th of its list."""

    split: Split
    readings: tuple[Training, ...]
    train: Training
    index: int = 0

    @property
    def alone(self) -> Split | None:
        return self.split.decided


@dataclass(frozen=True)
class Ways:
    """A trainer with each of some generators: those of `decoders` whose numbers are in `order`, by their bounds.
    `learnt` is how much was known of their rollouts. `offloads`: the trainer's moments are on the host while they
    decode."""

    trained: Trained
    decoders: Decoders
    order: IntArray
    bounds: FloatArray
    learnt: int
    offloads: bool = False

    @property
    def alone(self) -> Split | None:
        return self.trained.alone

    @property
    def first(self) -> int:
        """The number of the most promising generator."""
        return int(self.order[0])

    @property
    def tie(self) -> tuple[int, ...]:
        """As `found.tie` has it."""
        block, split, first = self.decoders.block, self.trained.split, self.order[0]
        own = 0 if split.shared else int(block.gpus[first]) - split.generator
        return int(block.narrow[first]), split.gpus + own

    @property
    def switch(self) -> Cost:
        return moved(self.trained.split, self.trained.train, self.offloads)


@dataclass(frozen=True)
class Pair:
    """All but the sync. With GPUs of its own the trainer is the `index`th of its list, and the others follow."""

    split: Split
    readings: tuple[Training, ...]
    train: Training
    decode: Generating
    rollout_s: float
    index: int = 0
    offloads: bool = False

    @property
    def alone(self) -> Split:
        return self.split

    @property
    def tie(self) -> tuple[int, ...]:
        return tie(self.decode, self.split)

    @property
    def switch(self) -> Cost:
        return moved(self.split, self.train, self.offloads)


Part = Room | Trained | Ways | Pair


def moved(split: Split, train: Training, offloads: bool) -> Cost:
    """A trainer's moments to the host and back, if they leave."""
    parts = train.memory.parts
    moments = parts["moments"] + parts.get("critic moments", 0.0) if offloads else 0.0
    return switch_cost(split.islands[0].gpu, moments, moments)


Tie = tuple[int, ...]
Entry = tuple[float, Tie, int, Part]


@dataclass
class Frontier:
    """Parts by the bounds of their periods, then by what decides between equal ones, then in the order in which they
    came. `second`: the best plan of another split than that of the best one is looked for, too."""

    second: bool
    best: Found | None = None
    runner_up: Found | None = None
    heap: list[Entry] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=count)

    def note(self, found: Found) -> None:
        """Keep the best plan and the best one of another split."""
        best, other = self.best, self.runner_up
        if best is None or found.rank < best.rank:
            self.best, self.runner_up = found, other if best is None or best.split == found.split else best
        elif found.split != best.split and (other is None or found.rank < other.rank):
            self.runner_up = found

    def push(self, part: Part, lower: float, tie: Tie = ()) -> None:
        if lower < inf and not _beyond(self.limit_of(part), lower, tie):
            heapq.heappush(self.heap, (lower, tie, next(self._serial), part))

    def pop(self) -> Part | None:
        """The first one that still matters; None if there is none."""
        while self.heap:
            lower, tie, _, part = heapq.heappop(self.heap)
            if not _beyond(self.limit_of(part), lower, tie):
                return part
        return None

    def merge(self, heaps: Sequence[list[Entry]]) -> None:
        """All of these in place of what is open."""
        self.heap = [entry for heap in heaps for entry in heap]
        heapq.heapify(self.heap)

    @property
    def limit(self) -> Found | None:
        """The plan that another one has to beat to matter."""
        return self.runner_up if self.second else self.best

    def limit_of(self, part: Part) -> Found | None:
        """What a part has to beat: one of a single split, the best plan if it has the same."""
        return self.best if self.best is not None and part.alone == self.best.split else self.limit

    def most(self, part: Part) -> float:
        """Seconds above which it does not matter."""
        limit = self.limit_of(part)
        return limit.period_s if limit else inf

    @property
    def done(self) -> bool:
        """Whether nothing that is open can matter."""
        return not self.heap or _beyond(self.limit, *self.heap[0][:2])

    def outcome(self, opened: int) -> Outcome:
        best, rest = self.best, self.heap[0] if self.heap else (inf, ())
        proved = best is not None and _beyond(best, *rest[:2])
        return Outcome(best, self.runner_up, best.period_s if best and proved else rest[0], proved, opened)


def _beyond(found: Found | None, lower: float, tie: Tie) -> bool:
    """Whether nothing with this lower bound comes before a plan."""
    return found is not None and (lower, tie) >= found.rank


Seconds = Any
"""A number, or an array of them: of as many plans at once."""


@dataclass(frozen=True)
class Times:
    """Seconds of a batch, or lower bounds of them. `train` has the work of models beside the policy in it if they are
    on the trainer's GPUs; `apart` are the passes of each group of pools that has its own, and the steps of its critics,
    which nobody waits for but the next batch. `wait` is what an environment takes to answer all turns. `steady` and
    `rollout` are as in `ways.Generating`; `switch` is of the GPUs that both stages share. `others` is what another
    batch in work beside one adds to its rollout, if it is there from start to end.
    """

    train: Seconds
    steady: Seconds
    rollout: Seconds
    sync: Seconds = 0.0
    switch: Seconds = 0.0
    apart: tuple[tuple[Seconds, Seconds], ...] = ()
    others: Seconds = 0.0
    wait: Seconds = 0.0

    @property
    def read(self) -> Seconds:
        """Passes follow the rollout, those of several groups beside each other."""
        return reduce(np.maximum, (read for read, _ in self.apart), 0.0)

    @property
    def learn(self) -> Seconds:
        return reduce(np.maximum, (learn for _, learn in self.apart), 0.0)


def bounds(
    roles: Roles, times: Times, lag: int, prompts: int, pools: Sequence[Sequence[str]] = (), *, shared: bool
) -> tuple[Bound, ...]:
    """All that bounds the period, the largest first. `pools` are those of each group that is apart."""
    total = float(_around(roles, times, prompts))
    if shared:
        seconds = float(total + times.train + times.learn)
        return (Bound(seconds, pool=f"{roles.trainer} and {roles.generator}, which share GPUs"),)
    found = [
        Bound(float(total + _trained(times, lag)) / (1 + lag), roles.cycle, 1 + lag),
        Bound(times.train, pool=roles.trainer),
        Bound(times.steady, pool=roles.generator),
        Bound(times.sync, roles.cycle[1:2]),
    ]
    groups = zip(pools, times.apart, strict=True)
    found += [Bound(read + learn, pool=", ".join(names)) for names, (read, learn) in groups]
    return tuple(sorted(found, key=lambda bound: -bound.seconds))


def period(roles: Roles, times: Times, lag: int, prompts: int, *, shared: bool) -> float:
    """That of `bounds`."""
    return float(_largest(roles, times, lag, prompts, _trained(times, lag), shared))


def least_period(roles: Roles, times: Times, lag: int, prompts: int, *, shared: bool) -> Seconds:
    """What the period does not go below whichever of the times are longer than given. It grows with each of them but
    for the steps: slower ones may keep batches apart."""
    if shared:
        return _largest(roles, times, lag, prompts, 0.0, shared)
    # Linear in the steps until they take as long as the rollout: the least is at an end.
    slowest = _trained(replace(times, train=np.maximum(times.train, times.rollout)), lag)
    return _largest(roles, times, lag, prompts, np.minimum(_trained(times, lag), slowest), shared)


def alone_s(roles: Roles, times: Times, lag: int, prompts: int, *, shared: bool) -> float:
    """The bound of `graph.passes` for a rollout of so many seconds: per update if no batch slowed another one."""
    return period(roles, replace(times, others=0.0), lag, prompts, shared=shared)


def _around(roles: Roles, times: Times, prompts: int) -> Seconds:
    """Seconds from one version to the next one but for the steps and other batches."""
    generates = times.rollout
    if times.apart and roles.reads_groups:
        generates = np.maximum(times.rollout, times.read) + times.read / prompts
    elif times.apart:
        generates = generates + times.read
    return times.sync + times.switch + times.wait + generates


def _trained(times: Times, lag: int) -> Seconds:
    """The steps, and what the other batches in work add to a rollout."""
    some = times.rollout > 0
    overlap = np.maximum(0.0, 1 - times.train / np.where(some, times.rollout, 1.0))
    return times.train + lag * times.others * some * overlap


def _largest(roles: Roles, times: Times, lag: int, prompts: int, trained: Seconds, shared: bool) -> Seconds:
    total = _around(roles, times, prompts)
    if shared:
        return total + times.train + times.learn
    most = np.maximum(np.maximum((total + trained) / (1 + lag), times.train), np.maximum(times.steady, times.sync))
    for read, learn in times.apart:
        most = np.maximum(most, read + learn)
    return most


ApartBound = tuple[tuple[Seconds, Seconds], ...]
"""Seconds of passes and of steps of each group of models that has GPUs of its own."""
Left = Mapping[Island, Seconds]
"""GPUs of each island that nobody has yet."""


@dataclass(frozen=True)
class Least:
    """Of one search. Nothing that is found by opening a part has a period below the part's bound."""

    roles: Roles
    sides: Sides
    islands: tuple[Island, ...]

    def trainers(self, trainer: Island, generator: Island, groups: Groups, *, shared: bool) -> FloatArray:
        """[sizes]: for each number of GPUs that the trainer may have; `groups` are to have GPUs of their own."""
        sizes = trainer.counts
        left = {island: island.gpus - sizes * (island == trainer) for island in self.islands}
        train = self.sides.training.fastest(trainer, self.free(groups))
        gpus = sizes if shared else left[generator]
        found: FloatArray = self._period(generator, shared, train, self._unplaced(groups, left), gpus)
        return found

    def room(self, split: Split) -> float:
        """With the GPUs of all known; perhaps not of the generator."""
        return float(self._split(split, self._placed(split), {i: split.left(i) for i in self.islands}, ()))

    def groups(self, split: Split, groups: Groups, island: Island) -> FloatArray:
        """[sizes]: for each number of GPUs of an island that the first group may have, the others after it."""
        sizes = island.counts
        own = self.sides.reading.fastest(island, self.models_of(groups[0]))
        left = {each: split.left(each) - sizes * (each == island) for each in self.islands}
        bounds = self._split(split, (*self._placed(split), (own.reads, own.learns)), left, groups)
        return np.where(left[island] >= 0, bounds, inf)

    def trained(self, part: Trained) -> float:
        """With the steps and passes known, whatever the generator is: for one on the same GPUs, by all that is known
        of rollouts."""
        split, generator = part.split, part.split.islands[1]
        if split.shared:
            decoders = self.sides.decoding.turns(generator, split.generator)
            return float(self._ways(part, decoders, 0.0, slice(None)).min(initial=inf))
        left = split.generator or split.left(generator)
        return float(self._period(generator, False, part.train.seconds, _seconds_of(part.readings), left))

    def ways(self, ways: Ways, most: float) -> tuple[IntArray, FloatArray]:
        """Those of the generators with which the period may be `most` at the most, and a bound for each."""
        part, block, order = ways.trained, ways.decoders.block, ways.order
        shared, lag = part.split.shared, 0 if part.split.shared else self.sides.lag
        cheap = (ways.decoders.rollouts[order] + part.train.seconds) / (1 + lag)
        order = order[cheap * SAFE <= most]
        order = order if shared else order[block.steady[order] * SAFE <= most]
        bounds = self._ways(part, ways.decoders, ways.switch.seconds, order)
        return order[bounds <= most], bounds[bounds <= most]

    def _ways(self, part: Trained, decoders: Decoders, switch_s: float, order: IntArray | slice) -> FloatArray:
        block, rollouts = decoders.block, decoders.rollouts[order]
        ranks = block.gpus[order] // block.replicas[order]
        sync = self._sync(part.split, block.share[order], ranks / part.train.trainer.mesh.ranks)
        times = self._times(part, block.steady[order], rollouts, sync, switch_s, block.others[order])
        found: FloatArray = self._least(times, part.split.shared)
        return found

    def pair(self, pair: Pair) -> float:
        return float(self._least(self.times(pair), pair.split.shared))

    def times(self, pair: Pair) -> Times:
        """Exact but for the sync."""
        decode, ranks = pair.decode, pair.decode.generator.mesh.ranks
        sync = self._sync(pair.split, decode.generator.bytes_each, ranks / pair.train.trainer.mesh.ranks)
        return self._times(pair, decode.steady, pair.rollout_s, sync, pair.switch.seconds, decode.others)

    def _times(
        self, part: Trained | Pair, steady: Seconds, rollout: Seconds, sync: Seconds, switch: float, others: Seconds
    ) -> Times:
        apart = _seconds_of(part.readings)
        return Times(part.train.seconds, steady, rollout, sync, switch, apart, others, self._wait)

    def free(self, groups: Groups) -> Models:
        """Models beside the policy on the trainer's GPUs."""
        taken = {pool for group in groups for pool in group}
        return self.models_of(tuple(pool for pool in self.roles.beside if pool not in taken))

    def models_of(self, pools: tuple[str, ...]) -> Models:
        if pools not in self._models:
            self._models[pools] = self.roles.models_of(pools)
        return self._models[pools]

    @cached_property
    def _models(self) -> dict[tuple[str, ...], Models]:
        return {}

    def _placed(self, split: Split) -> ApartBound:
        """Of the groups that have GPUs."""
        found = []
        for each in split.apart:
            own, place = self.sides.reading.fastest(each.island, self.models_of(each.pools)), each.place
            found.append((own.reads[place], own.learns[place]))
        return tuple(found)

    def _split(self, split: Split, apart: ApartBound, left: Left, groups: Groups) -> Seconds:
        """With `groups` beside those of the split, of which all but the first have no GPUs."""
        trainer, generator = split.islands
        taken = (*(each.pools for each in split.apart), *groups)
        train = self.sides.training.fastest(trainer, self.free(taken))[trainer.sizes.index(split.trainer)]
        apart += self._unplaced(groups[1:], left)
        return self._period(generator, split.shared, train, apart, split.generator or left[generator])

    def _unplaced(self, groups: Groups, left: Left) -> ApartBound:
        """Of groups that share out what is left of each island: a single one is within an island, and one of several is
        no faster than all of them on all of it."""
        if not groups:
            return ()
        models = self.models_of(tuple(pool for group in groups for pool in group))
        free = sum(np.maximum(gpus, 0) for gpus in left.values())
        reads: list[Seconds] = []
        learns: list[Seconds] = []
        for island, own in left.items():
            gpus = np.maximum(own, 0) if len(groups) == 1 else free
            passed, steps = self.sides.reading.least(island.gpu, models)
            share = np.where(gpus > 0, 1 / np.maximum(gpus, 1), inf)
            reads.append(passed * share)
            learns.append(steps * share if steps else 0.0)
        return ((reduce(np.minimum, reads), reduce(np.minimum, learns)),)

    def _period(self, generator: Island, shared: bool, train: Seconds, apart: ApartBound, gpus: Seconds) -> Seconds:
        """By the fastest of all generators that there are on so many GPUs, or on fewer of their own."""
        fastest = self.sides.decoding.fastest(generator, shared=shared)
        place = np.searchsorted(generator.counts, gpus, "right") - 1
        sync = fastest.share[place] * SAFE / _rate(generator, shared)
        times = Times(
            train, fastest.steady[place], fastest.rollout[place], sync, 0.0, apart, fastest.others[place], self._wait
        )
        return np.where(place >= 0, self._least(times, shared), inf)

    def _sync(self, split: Split, share: Seconds, part: Seconds) -> Seconds:
        """Every rank of a generator gets its share of the weights, and the trainer's ranks, of which there are 1 / part
        for each of a replica's, send them to one replica at the least."""
        trainer, generator = split.islands
        into, out = _rate(generator, split.shared), _rate(trainer, split.shared)
        return share * np.maximum(1 / into, part / out) * SAFE

    def _least(self, times: Times, shared: bool) -> Seconds:
        return least_period(self.roles, times, self.sides.lag, self.sides.work.prompts, shared=shared)

    @cached_property
    def _wait(self) -> float:
        """Seconds in which an environment answers all turns."""
        return self.roles.turns * self.sides.work.environment_s if self.roles.environment else 0.0


def _rate(island: Island, shared: bool) -> float:
    """Bytes per second of a rank's weights."""
    return island.gpu.nvlink if shared else island.gpu.nic


def _seconds_of(readings: Sequence[Training]) -> ApartBound:
    """Seconds of passes and of steps of models that have GPUs of their own."""
    return tuple((each.reads.seconds, each.learns.seconds) for each in readings)


STAY = ("weights", "frozen model", "critic weights", "copies")
"""What a trainer keeps on GPUs that decode while its moments are on the host."""


@dataclass(frozen=True)
class Opener:
    """Of one search, whose `frontier` takes what follows."""

    roles: Roles
    sides: Sides
    islands: tuple[Island, ...]
    least: Least
    frontier: Frontier

    def begin(self, groups: Groups) -> None:
        """All splits with some groups of models on GPUs of their own: each number of GPUs for the trainer."""
        for trainer in self.islands:
            for shared, generator in ((True, trainer), *((False, island) for island in self.islands)):
                bounds = self.least.trainers(trainer, generator, groups, shared=shared)
                for size, bound in zip(trainer.sizes, bounds.tolist(), strict=True):
                    split = Split(shared, (trainer, generator), size, size if shared else 0)
                    self.frontier.push(Room(split, groups), bound)

    def given(self, split: Split) -> None:
        """One split."""
        self.frontier.push(Room(split), self.least.room(split))

    def open(self, part: Part) -> Found | None:
        """Decide the next thing about a part; returns the plan that became whole by it."""
        match part:
            case Room() if part.apart:
                self._open_apart(part)
            case Room():
                self._open_room(part)
            case Trained():
                self._open_trained(part)
            case Ways():
                return self._open_ways(part)
            case Pair():
                return self._open_pair(part)
        return None

    def _open_apart(self, room: Room) -> None:
        """The first group that has no GPUs yet, with each number of them."""
        first, *others = room.apart
        for island in self.islands:
            bounds = self.least.groups(room.split, room.apart, island)
            for place in np.flatnonzero(bounds < self.frontier.most(room)).tolist():
                own = Apart(first, island, island.sizes[place])
                split = replace(room.split, apart=(*room.split.apart, own))
                if split.has_room:
                    self.frontier.push(Room(split, tuple(others)), float(bounds[place]))

    def _open_room(self, room: Room) -> None:
        split, sides = room.split, self.sides
        if (train := self._trainer(split, 0)) is None:
            return
        ways = [
            sides.reading.readers(each.island, each.gpus, self.least.models_of(each.pools), sides.pin_of(each.pools))
            for each in split.apart
        ]
        for readings in product(*ways):
            self._push_trained(Trained(split, readings, train))

    def _push_trained(self, part: Trained) -> None:
        self.frontier.push(part, self.least.trained(part))

    def _trainer(self, split: Split, index: int) -> Training | None:
        """The `index`th fastest of a split."""
        beside = self.least.free(tuple(each.pools for each in split.apart))
        return self.sides.training.trainers(split.islands[0], split.trainer, beside).at(index)

    def _open_trained(self, part: Trained) -> None:
        """All generators on GPUs of their own; or all beside this trainer, whose moments stay or are on the host, and
        then the next trainer."""
        split, memory, decoding = part.split, part.train.memory, self.sides.decoding
        generator = split.islands[1]
        if not split.shared:
            self._push_ways(part, decoding.own(generator), self._sizes(split))
            return
        stays = {name: memory.parts[name] for name in STAY if name in memory.parts}
        for offloads, beside in ((False, memory), (True, Memory(stays))):
            self._push_ways(part, decoding.beside(generator, split.trainer, beside), (split.trainer,), offloads)
        if train := self._trainer(split, part.index + 1):
            self._push_trained(replace(part, train=train, index=part.index + 1))

    def _sizes(self, split: Split) -> tuple[int, ...]:
        return (split.generator,) if split.generator else split.generators()

    def _push_ways(self, part: Trained, decoders: Decoders, sizes: Sequence[int], offloads: bool = False) -> None:
        """All generators on so many GPUs."""
        self._sort(Ways(part, decoders, decoders.on(sizes), np.zeros(0), decoders.learnt, offloads))

    def _sort(self, ways: Ways) -> None:
        """Those that matter, the most promising first, by all that is known."""
        block = ways.decoders.block
        order, bounds = self.least.ways(ways, self.frontier.most(ways))
        if len(order):
            ranks = np.lexsort((block.gpus[order], block.narrow[order], bounds))
            self._push_way(replace(ways, order=order[ranks], bounds=bounds[ranks], learnt=ways.decoders.learnt))

    def _push_way(self, ways: Ways) -> None:
        self.frontier.push(ways, float(ways.bounds[0]), ways.tie)

    def _open_ways(self, ways: Ways) -> Found | None:
        """The first generator, once its rollout is known and it is still the first one; then those after it."""
        if ways.learnt < ways.decoders.learnt:
            self._sort(ways)
            return None
        part, decoding, generator = ways.trained, self.sides.decoding, ways.trained.split.islands[1]
        decode = decoding.way(generator, ways.decoders, ways.first, SHARED if part.split.shared else OWN)
        rollout_s = decoding.rollout(generator, decode)
        if not ways.decoders.known[ways.first]:
            ways.decoders.learn(decode.alike, rollout_s)
        if ways.learnt < ways.decoders.learnt:
            self._sort(ways)
            return None
        if len(ways.order) > 1:
            self._push_way(replace(ways, order=ways.order[1:], bounds=ways.bounds[1:]))
        split = part.split.with_generator(decode.gpus)
        return self._open_pair(Pair(split, part.readings, part.train, decode, rollout_s, part.index, ways.offloads))

    def _push_pair(self, pair: Pair) -> None:
        self.frontier.push(pair, self.least.pair(pair), pair.tie)

    def _open_pair(self, pair: Pair) -> Found:
        """The plan of a generator and a trainer, whole; with GPUs of its own, the next trainer after it."""
        if not pair.split.shared and (train := self._trainer(pair.split, pair.index + 1)):
            self._push_pair(replace(pair, train=train, index=pair.index + 1))
        return self._whole(pair)

    def _whole(self, pair: Pair) -> Found:
        split, decode, generator = pair.split, pair.decode, pair.decode.generator
        hosts = split.hosts() or ((), ())
        sent = traffic(generator.shape, pair.train.trainer.mesh, generator.mesh, generator.precision)
        sync = sync_cost(
            sent, decode.replicas, split.islands[0].gpu, split.islands[1].gpu,
            together=split.shared, chained=len({*hosts[0], *hosts[1]}) > 1,
        )  # fmt: skip
        times = replace(self.least.times(pair), sync=sync.seconds)
        lag, prompts, pools = self.sides.lag, self.sides.work.prompts, [each.pools for each in split.apart]
        found = bounds(self.roles, times, lag, prompts, pools, shared=split.shared)
        alone = alone_s(self.roles, times, lag, prompts, shared=split.shared)
        return Found(
            split, pair.train, decode, pair.readings, times.rollout, sync, pair.switch, found, alone, pair.offloads
        )


GRACE = 5.0
"""Seconds beyond its time that a search without any plan has to find one."""


@dataclass(frozen=True)
class Search:
    """One search: of all plans, or of those with one of the `given` splits, models beside the policy on the trainer's
    GPUs. `known` are plans that another search has found among these."""

    roles: Roles
    sides: Sides
    islands: tuple[Island, ...]
    given: tuple[Split, ...] | None = None
    known: tuple[Found, ...] = ()

    @cached_property
    def _least(self) -> Least:
        return Least(self.roles, self.sides, self.islands)

    def run(self, deadline: float, *, second: bool = True) -> Outcome:
        """Until the best plan (and with `second` that of another split) is known, or the clock passes `deadline`."""
        open_ = Frontier(second)
        for found in self.known:
            open_.note(found)
        opener = Opener(self.roles, self.sides, self.islands, self._least, open_)
        self.begin(opener)
        opened = self._dive(open_, opener, deadline + GRACE) if open_.limit is None else 0
        while not open_.done and time.monotonic() < deadline and (part := open_.pop()):
            opened += 1
            if whole := opener.open(part):
                open_.note(whole)
        return open_.outcome(opened)

    def begin(self, opener: Opener) -> None:
        """All splits, with each of the groupings of the models beside the policy."""
        ways = groupings(self.roles, self.sides)
        if self.given is None:
            for groups in ways:
                opener.begin(groups)
        elif () in ways:
            for split in self.given:
                opener.given(split)

    def _dive(self, open_: Frontier, opener: Opener, deadline: float) -> int:
        """On with what was opened last until there is a plan or time is over: one to measure others by. Returns how
        many parts were opened."""
        heaps, opened = [open_.heap], 0
        while heaps and open_.best is None and time.monotonic() < deadline:
            open_.heap = heaps[-1]
            if (part := open_.pop()) is None:
                heaps.pop()
                continue
            opened += 1
            if not isinstance(part, Ways | Pair):  # generators are compared with each other, before other trainers
                heaps.append([])
                open_.heap = heaps[-1]
            if whole := opener.open(part):
                open_.note(whole)
        open_.merge(heaps)
        return opened


def groupings(roles: Roles, sides: Sides) -> tuple[Groups, ...]:
    """Which models beside the policy have GPUs of their own, and which of these share them: all that differ. Those that
    are not named lie on the trainer's. Pools with a mesh of their own lie there with nobody who has another one."""
    found: dict[object, Groups] = {}
    for groups in _parted(roles.beside):
        free = [pool for pool in roles.beside if not any(pool in group for group in groups)]
        if any(pool in sides.pins.beside for pool in free) or not all(map(sides.agreed, groups)):
            continue
        alike = sorted(sorted((str(roles.models_of((pool,))), str(sides.pins.beside.get(pool))) for pool in group)
                       for group in groups)  # fmt: skip
        found.setdefault((str(alike), str(sorted(str(roles.models_of((pool,))) for pool in free))), groups)
    return tuple(found.values())


def _parted(pools: Sequence[str]) -> Iterator[Groups]:
    """Every way to leave some out and to put the others into groups."""
    if not pools:
        yield ()
        return
    first, *others = pools
    for groups in _parted(others):
        yield groups
        yield ((first,), *groups)
        for place, group in enumerate(groups):
            yield (*groups[:place], (first, *group), *groups[place + 1 :])
