"""What a search goes through and finds: who has which GPUs, a whole plan, and how sure it is. Pure."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.graph.analysis import Bound
from penstock.runtime.plan.collectives import Cost
from tests.oracles.plan_search.islands import Island
from tests.oracles.plan_search.ways import Generating, Training


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
