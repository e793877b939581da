"""The best plan by best-first branch and bound. Pure but for the clock of its time limit.

What is open lies in a heap by a lower bound of its period (`least`): first a row of splits, from the one with most GPUs
for the generator down; then a split (which pools share GPUs, on which island and how many); then the split with its
fastest trainer; then each layout of a generator; then with its rollout simulated; then with each trainer in turn,
fastest first, and the sync of the real resharding plan. A plan that is no worse than anything still open is optimal
under the model, and what cannot beat the best two plans of different splits is never opened. Equal periods are decided
by precision (bf16 first), then by GPUs (fewer first), then by the order of creation, so that the same question always
has the same answer.
"""

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, product
from math import inf

from penstock.runtime.plan.found import Apart, Found, Outcome, Split
from penstock.runtime.plan.islands import Island
from penstock.runtime.plan.least import Least
from penstock.runtime.plan.memory import Memory
from penstock.runtime.plan.opening import Groups, Pair, Room, Row, Trained
from penstock.runtime.plan.period import alone_s, bounds
from penstock.runtime.plan.roles import Roles
from penstock.runtime.plan.sides import Sides
from penstock.runtime.plan.syncing import sync_cost, traffic
from penstock.runtime.plan.ways import Training

STAY = ("weights", "frozen model", "critic weights", "copies")
"""What a trainer keeps on GPUs that decode while its moments are on the host."""
GRACE = 5.0
"""Seconds beyond its time that a search without any plan has to find one."""


Part = Row | Room | Trained | Pair
Entry = tuple[float, tuple[int, ...], int, Part]


@dataclass
class Search:
    """One search: of all plans, or of those with one of the `given` splits, models beside the policy on the trainer's
    GPUs. `known` are plans that another search has found among these."""

    roles: Roles
    sides: Sides
    islands: tuple[Island, ...]
    given: tuple[Split, ...] | None = None
    known: tuple[Found, ...] = ()
    _heap: list[Entry] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=count)
    _best: Found | None = None
    _second: Found | None = None
    _limit: Found | None = None

    @cached_property
    def _least(self) -> Least:
        return Least(self.roles, self.sides, self.islands)

    def run(self, deadline: float, *, second: bool = True) -> Outcome:
        """Until the best plan (and with `second` that of another split) is known, or the clock passes `deadline`."""
        self._best = self._second = self._limit = None
        for found in self.known:
            self._note(found, second)
        self._begin()
        opened = self._dive(deadline + GRACE, second) if self._limit is None else 0
        while self._heap and not self._beyond(self._limit, *self._heap[0][:2]) and time.monotonic() < deadline:
            lower, tie, _, part = heapq.heappop(self._heap)
            if self._beyond(self._limit_of(part), lower, tie):
                continue
            opened += 1
            for found in self._open(part, lower):
                self._note(found, second)
        best, rest = self._best, self._heap[0] if self._heap else (inf, ())
        proved = best is not None and self._beyond(best, *rest[:2])
        return Outcome(best, self._second, best.period_s if best and proved else rest[0], proved, opened)

    def _dive(self, deadline: float, second: bool) -> int:
        """On with what was opened last until there is a plan or time is over: one to measure others by. Returns how
        many parts were opened."""
        heaps, opened = [self._heap], 0
        while heaps and self._best is None and time.monotonic() < deadline:
            if not heaps[-1]:
                heaps.pop()
                continue
            entry = min(heaps[-1], key=lambda entry: (not isinstance(entry[3], Pair), entry[:3]))
            heaps[-1].remove(entry)
            lower, _, _, part = entry
            opened += 1
            if not isinstance(part, Pair):  # pairs are compared with each other, before other trainers
                heaps.append([])
            self._heap = heaps[-1]
            for found in self._open(part, lower):
                self._note(found, second)
        self._heap = [entry for heap in heaps for entry in heap]
        heapq.heapify(self._heap)
        return opened

    def _note(self, found: Found, second: bool) -> None:
        """Keep the best plan, the best of another split, and the one that a plan has to beat to matter."""
        best, other = self._best, self._second
        if best is None or found.rank < best.rank:
            self._best, self._second = found, other if best is None or best.split == found.split else best
        elif found.split != best.split and (other is None or found.rank < other.rank):
            self._second = found
        self._limit = self._second if second else self._best

    def _limit_of(self, part: Part) -> Found | None:
        """What a part has to beat: one of a single split, the best plan if it has the same."""
        several = isinstance(part, Row) or (isinstance(part, Room) and part.apart)
        return self._best if self._best and not several and self._best.split == part.split else self._limit

    @staticmethod
    def _beyond(found: Found | None, lower: float, tie: tuple[int, ...]) -> bool:
        """Whether nothing with this lower bound comes before a plan."""
        return found is not None and (lower, tie) >= found.rank

    def _begin(self) -> None:
        """All splits, with each of the groupings of the models beside the policy."""
        ways = groupings(self.roles, self.sides)
        if self.given is not None:
            for split in self.given if () in ways else ():
                self._push_room(Room(split))
            return
        for apart in ways:
            for island in self.islands:
                for size in island.sizes:
                    self._push_room(Room(Split(True, (island, island), size, size), apart))
                    for other in self.islands:
                        self._push_row(Row(island, size, other, len(other.sizes) - 1, apart))

    def _push(self, part: Part, lower: float, tie: tuple[int, ...] = ()) -> None:
        if lower < inf and not self._beyond(self._limit_of(part), lower, tie):
            heapq.heappush(self._heap, (lower, tie, next(self._serial), part))

    def _open(self, part: Row | Room | Trained | Pair, lower: float) -> list[Found]:
        """Decide the next thing about a part; returns what became whole by it."""
        match part:
            case Row():
                self._open_row(part)
            case Room() if part.apart:
                self._open_apart(part)
            case Room():
                self._open_room(part)
            case Trained():
                self._open_trained(part)
            case Pair(rollout_s=None):
                known = replace(part, rollout_s=self.sides.decoding.rollout(part.decode))
                self._push(known, max(lower, self._least.pair(known)), known.tie)
            case Pair():
                return [self._open_pair(part)]
        return []

    def _push_room(self, room: Room) -> None:
        self._push(room, self._least.room(room))

    def _push_row(self, row: Row) -> None:
        self._push(row, self._least.row(row))

    def _open_row(self, row: Row) -> None:
        split = row.split
        fits = row.trainer != row.generator or row.gpus + split.generator <= row.trainer.gpus
        if fits and split.has_room:
            self._push_room(Room(split, row.apart))
        if row.index:
            self._push_row(replace(row, index=row.index - 1))

    def _open_apart(self, room: Room) -> None:
        """The first group that has no GPUs yet, with each number of them."""
        first, *others = room.apart
        for island in self.islands:
            for size in island.sizes:
                if size > room.split.left(island):
                    break
                split = replace(room.split, apart=(*room.split.apart, Apart(first, island, size)))
                if split.has_room:
                    self._push_room(Room(split, tuple(others)))

    def _open_room(self, room: Room) -> None:
        split, sides = room.split, self.sides
        if not room.decoded:  # trainers take longer to look at
            self._push_room(replace(room, decoded=True))
            return
        if (train := self._trainer(split, 0)) is None:
            return
        ways = [
            sides.training.readers(each.island, each.gpus, self.roles.models_of(each.pools), sides.pin_of(each.pools))
            for each in split.apart
        ]
        for readings in product(*ways):
            self._push_trained(Trained(split, readings, train))

    def _push_trained(self, part: Trained) -> None:
        self._push(part, self._least.trained(part), (0, part.split.gpus))

    def _trainer(self, split: Split, index: int) -> Training | None:
        """The `index`th fastest of a split."""
        beside = self._least.beside(split.apart)
        return self.sides.training.trainers(split.islands[0], split.trainer, beside).at(index)

    def _open_trained(self, part: Trained) -> None:
        """All generators on GPUs of their own; or all beside this trainer, whose moments stay or are on the host, and
        then the next trainer."""
        split, memory, decoding = part.split, part.train.memory, self.sides.decoding
        limit = self._limit_of(part)
        most = limit.period_s if limit else inf
        if not split.shared:
            for decode in decoding.generators(split.islands[1], split.generator):
                if decode.steady > most:
                    continue
                if (decoding.rollout_least(decode) + part.train.seconds) / (1 + self.sides.lag) <= most:
                    self._push_pair(Pair(split, part.readings, part.train, decode))
            return
        stays = {name: memory.parts[name] for name in STAY if name in memory.parts}
        for offloads, beside in ((False, memory), (True, Memory(stays))):
            for decode in decoding.decoders(split.islands[1], split.generator, 1, beside):
                if decoding.rollout_least(decode) + part.train.seconds <= most:
                    self._push_pair(Pair(split, part.readings, part.train, decode, offloads=offloads))
        if train := self._trainer(split, part.index + 1):
            self._push_trained(replace(part, train=train, index=part.index + 1))

    def _push_pair(self, pair: Pair) -> None:
        self._push(pair, self._least.pair(pair), pair.tie)

    def _open_pair(self, pair: Pair) -> Found:
        """The plan of a generator and a trainer, whole; with GPUs of its own, the next trainer after it."""
        if not pair.split.shared and (train := self._trainer(pair.split, pair.index + 1)):
            self._push_pair(replace(pair, train=train, index=pair.index + 1))
        return self._whole(pair)

    def _whole(self, pair: Pair) -> Found:
        split, decode, generator = pair.split, pair.decode, pair.decode.generator
        trained = pair.train.trainer.mesh
        moved = traffic(generator.shape, trained, generator.mesh, decode.replicas, generator.precision)
        sync = sync_cost(moved, split.islands[0].gpu, split.islands[1].gpu, together=split.shared)
        times = replace(self._least.times(pair), sync=sync.seconds)
        lag, prompts, pools = self.sides.lag, self.sides.work.prompts, [each.pools for each in split.apart]
        found = bounds(self.roles, times, lag, prompts, pools, shared=split.shared)
        alone = alone_s(self.roles, times, lag, prompts, shared=split.shared)
        return Found(
            split, pair.train, decode, pair.readings, times.rollout, sync, pair.switch, found, alone, pair.offloads
        )


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
