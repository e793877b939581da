"""What follows a part of a plan when the next thing about it is decided. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from penstock.runtime.plan.memory import Memory
from penstock.runtime.plan.roles import Roles
from penstock.runtime.plan.sync_cost import sync_cost, traffic
from tests.oracles.plan_search.decoders import Decoders
from tests.oracles.plan_search.decoding_side import OWN, SHARED
from tests.oracles.plan_search.found import Apart, Found, Split
from tests.oracles.plan_search.frontier import Frontier
from tests.oracles.plan_search.islands import Island
from tests.oracles.plan_search.least import Least
from tests.oracles.plan_search.opening import Groups, Pair, Part, Room, Trained, Ways
from tests.oracles.plan_search.period import alone_s, bounds
from tests.oracles.plan_search.sides import Sides
from tests.oracles.plan_search.ways import Training

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
