"""Lower bounds of the period of all plans that are still possible when some of it is decided. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from penstock.runtime.plan.found import Apart, Split
from penstock.runtime.plan.gpus import BYTES
from penstock.runtime.plan.islands import Island
from penstock.runtime.plan.opening import Groups, Pair, Room, Row, Trained
from penstock.runtime.plan.period import Times, least_period
from penstock.runtime.plan.roles import Models, Roles
from penstock.runtime.plan.sides import Sides
from penstock.runtime.plan.ways import Training

SAFE = 1 - 1e-9
"""Of a lower bound, so that rounding never makes it an upper one."""


@dataclass(frozen=True)
class Least:
    """Of one search. Nothing that is found by opening a part has a period below the part's bound."""

    roles: Roles
    sides: Sides
    islands: tuple[Island, ...]

    def row(self, row: Row) -> float:
        """Of its first split, which is one of all others: they have fewer GPUs for the generator."""
        train = self._train(row.trainer, row.gpus, row.apart)
        left = {island: island.gpus - row.gpus * (island == row.trainer) for island in self.islands}
        return self._loose(row.split, train, self._unplaced(row.apart, left))

    def room(self, room: Room) -> float:
        """Of all plans with this split."""
        split, placed = room.split, tuple(each.pools for each in room.split.apart)
        apart = tuple(self._seconds(each.pools, each.island, each.gpus) for each in split.apart)
        apart += self._unplaced(room.apart, {island: split.left(island) for island in self.islands})
        train = self._train(split.islands[0], split.trainer, (*placed, *room.apart))
        return (self._decoding if room.decoded else self._loose)(split, train, apart)

    def trained(self, part: Trained) -> float:
        """With the steps and passes known, whatever the generator is."""
        return self._decoding(part.split, part.train.seconds, _seconds_of(part.readings))

    def pair(self, pair: Pair) -> float:
        return self._period(pair.split, self.times(pair))

    def times(self, pair: Pair) -> Times:
        """Exact but for the rollout, if unknown, and the sync."""
        decode = pair.decode
        rollout = self.sides.decoding.rollout_least(decode) if pair.rollout_s is None else pair.rollout_s
        switch = pair.switch.seconds if pair.offloads else 0.0
        sync, apart = self._sync(pair), _seconds_of(pair.readings)
        return Times(pair.train.seconds, decode.steady, rollout, sync, switch, apart, decode.others, self._wait)

    def beside(self, apart: Sequence[Apart]) -> Models:
        """Models beside the policy on the trainer's GPUs."""
        return self._free(tuple(each.pools for each in apart))

    def _free(self, apart: Groups) -> Models:
        if apart not in self._beside:
            taken = {pool for group in apart for pool in group}
            self._beside[apart] = self.roles.models_of([pool for pool in self.roles.beside if pool not in taken])
        return self._beside[apart]

    @cached_property
    def _beside(self) -> dict[Groups, Models]:
        return {}

    def _train(self, island: Island, gpus: int, apart: Groups) -> float:
        return self.sides.training.train_least(island.gpu, self._free(apart)) / gpus * SAFE

    def _seconds(self, pools: Sequence[str], island: Island, gpus: int) -> tuple[float, float]:
        """Passes and steps of a group."""
        models, training = self.roles.models_of(pools), self.sides.training
        share = SAFE / gpus
        return training.read_least(island.gpu, models) * share, training.learn_least(island.gpu, models) * share

    def _unplaced(self, groups: Groups, left: Mapping[Island, int]) -> tuple[tuple[float, float], ...]:
        """Of groups that share out what is left of each island: a single one is within an island, and one of several is
        no faster than all of them on all of it."""
        if not groups:
            return ()
        pools, free = [pool for group in groups for pool in group], sum(n for n in left.values() if n > 0)
        found = [self._seconds(pools, i, free if len(groups) > 1 else n) for i, n in left.items() if n > 0]
        return ((min((read for read, _ in found), default=inf), min((learn for _, learn in found), default=inf)),)

    def _decoding(self, split: Split, train: float, apart: tuple[tuple[float, float], ...]) -> float:
        """By all generators that there are."""
        steady, least, others = self.sides.decoding.least(split.islands[1], split.generator)
        return self._period(split, Times(train, steady, least * SAFE, 0.0, 0.0, apart, others, self._wait))

    def _loose(self, split: Split, train: float, apart: tuple[tuple[float, float], ...]) -> float:
        """Whatever the generator is."""
        work, longest, others = self.sides.decoding.total_least(split.islands[1])
        share = work / split.generator * SAFE
        rollout, others = max(share, longest * SAFE), others / split.generator * SAFE
        return self._period(split, Times(train, share, rollout, 0.0, 0.0, apart, others, self._wait))

    @cached_property
    def _wait(self) -> float:
        """Seconds in which an environment answers all turns."""
        return self.roles.turns * self.sides.work.environment_s if self.roles.environment else 0.0

    def _period(self, split: Split, times: Times) -> float:
        prompts = self.sides.work.prompts
        return least_period(self.roles, times, self.sides.lag, prompts, shared=split.shared)

    def _sync(self, pair: Pair) -> float:
        """Every rank of a generator gets its share of the weights, and the trainer's ranks send all of them."""
        (trainer, generator), decode, together = pair.split.islands, pair.decode, pair.split.shared
        mesh = decode.generator.mesh
        share = self.sides.work.shape.parameters * BYTES[decode.generator.precision] / (mesh.tp * mesh.pp) * SAFE
        sent = share * decode.gpus / pair.train.trainer.mesh.ranks
        out = sent / (trainer.gpu.nvlink if together else trainer.gpu.nic)
        return max(out, share / (generator.gpu.nvlink if together else generator.gpu.nic))


def _seconds_of(readings: Sequence[Training]) -> tuple[tuple[float, float], ...]:
    """Seconds of passes and of steps of models that have GPUs of their own."""
    return tuple((each.reads.seconds, each.learns.seconds) for each in readings)
