"""Lower bounds of the period of all plans that are still possible when some of it is decided. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import inf

import numpy as np

from penstock.runtime.plan.collectives import SAFE
from penstock.runtime.plan.roles import Models, Roles
from penstock.runtime.plan.workload import FloatArray, IntArray
from tests.oracles.plan_search.decoders import Decoders
from tests.oracles.plan_search.found import Split
from tests.oracles.plan_search.islands import Island
from tests.oracles.plan_search.opening import Groups, Pair, Trained, Ways
from tests.oracles.plan_search.period import Seconds, Times, least_period
from tests.oracles.plan_search.sides import Sides
from tests.oracles.plan_search.ways import Training

Apart = tuple[tuple[Seconds, Seconds], ...]
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

    def _placed(self, split: Split) -> Apart:
        """Of the groups that have GPUs."""
        found = []
        for each in split.apart:
            own, place = self.sides.reading.fastest(each.island, self.models_of(each.pools)), each.place
            found.append((own.reads[place], own.learns[place]))
        return tuple(found)

    def _split(self, split: Split, apart: Apart, left: Left, groups: Groups) -> Seconds:
        """With `groups` beside those of the split, of which all but the first have no GPUs."""
        trainer, generator = split.islands
        taken = (*(each.pools for each in split.apart), *groups)
        train = self.sides.training.fastest(trainer, self.free(taken))[trainer.sizes.index(split.trainer)]
        apart += self._unplaced(groups[1:], left)
        return self._period(generator, split.shared, train, apart, split.generator or left[generator])

    def _unplaced(self, groups: Groups, left: Left) -> Apart:
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

    def _period(self, generator: Island, shared: bool, train: Seconds, apart: Apart, gpus: Seconds) -> Seconds:
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


def _seconds_of(readings: Sequence[Training]) -> Apart:
    """Seconds of passes and of steps of models that have GPUs of their own."""
    return tuple((each.reads.seconds, each.learns.seconds) for each in readings)
