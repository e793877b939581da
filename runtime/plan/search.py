"""The best plan by best-first branch and bound. Pure but for the clock of its time limit.

What is open lies in a heap by a lower bound of its period: first a row of splits, from the one with most GPUs for the
generator down; then a split (which pools share GPUs, on which island and how many), bounded by GPU-seconds that no
layout goes below; then the split with its fastest trainer; then each layout of a generator; then with its rollout
simulated; then with each trainer in turn, fastest first, and the sync of the real resharding plan. A plan that is no
worse than anything still open is optimal under the model, and what cannot beat the best two plans of different splits
is never opened. Equal periods are decided by precision (bf16 first), then by GPUs (fewer first), then by the order of
creation, so that the same question always has the same answer.
"""

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from math import inf

from penstock.runtime.plan.found import Found, Outcome, Split
from penstock.runtime.plan.gpus import BYTES
from penstock.runtime.plan.islands import Island
from penstock.runtime.plan.memory import Memory
from penstock.runtime.plan.opening import Pair, Room, Row, Trained
from penstock.runtime.plan.period import Times, alone_s, bounds, least_period
from penstock.runtime.plan.roles import Roles
from penstock.runtime.plan.sides import Sides
from penstock.runtime.plan.syncing import sync_cost, traffic
from penstock.runtime.plan.ways import Training

SAFE = 1 - 1e-9
"""Of a lower bound, so that rounding never makes it an upper one."""
STAY = ("weights", "frozen model", "critic weights", "copies")
"""What a trainer keeps on GPUs that decode while its moments are on the host."""
GRACE = 5.0
"""Seconds beyond its time that a search without any plan has to find one."""


Part = Row | Room | Trained | Pair
Entry = tuple[float, tuple[int, ...], int, Part]


@dataclass
class Search:
    """One search: of all plans, or of those with one of the `given` splits, a frozen model beside the trainer. `known`
    are plans that another search has found among these."""

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
        """All splits, with models beside the policy on the trainer's GPUs and on GPUs of its own."""
        if self.given is not None:
            for split in self.given if False in self._ways() else ():
                self._push_room(Room(split, False))
            return
        for apart in self._ways():
            for island in self.islands:
                for size in island.sizes:
                    self._push_room(Room(Split(True, (island, island, island), size, size), apart))
                    for other in self.islands:
                        self._push_row(Row(island, size, other, len(other.sizes) - 1, apart))

    def _ways(self) -> tuple[bool, ...]:
        if "reader" in self.sides.pins:  # a mesh of its own
            return (True,)
        return (False, True) if self.roles.reader else (False,)

    def _push(self, part: Part, lower: float, tie: tuple[int, ...] = ()) -> None:
        if lower < inf and not self._beyond(self._limit_of(part), lower, tie):
            heapq.heappush(self._heap, (lower, tie, next(self._serial), part))

    def _open(self, part: Row | Room | Trained | Pair, lower: float) -> list[Found]:
        """Decide the next thing about a part; returns what became whole by it."""
        match part:
            case Row():
                self._open_row(part)
            case Room(apart=True):
                self._open_apart(part)
            case Room():
                self._open_room(part)
            case Trained():
                self._open_trained(part)
            case Pair(rollout_s=None):
                known = replace(part, rollout_s=self.sides.rollout(part.decode))
                self._push(known, max(lower, self._period(part.split, self._times(known))), known.tie)
            case Pair():
                return [self._open_pair(part)]
        return []

    def _push_room(self, room: Room) -> None:
        self._push(room, self._least(room))

    def _push_row(self, row: Row) -> None:
        """By a lower bound of its first split, which is one of all others: they have fewer GPUs."""
        beside = bool(self.roles.reader) and not row.apart
        train = self.sides.train_least(row.trainer.gpu, beside) / row.gpus * SAFE
        self._push(row, self._loose(row.split, train, 0.0, 0.0))

    def _open_row(self, row: Row) -> None:
        split = row.split
        fits = row.trainer != row.generator or row.gpus + split.generator <= row.trainer.gpus
        if fits and split.has_room:
            self._push_room(Room(split, row.apart))
        if row.index:
            self._push_row(replace(row, index=row.index - 1))

    def _open_apart(self, room: Room) -> None:
        for island in self.islands:
            for size in island.sizes:
                if size > room.split.left(island):
                    break
                split = replace(room.split, islands=(*room.split.islands[:2], island), reader=size)
                if split.has_room:
                    self._push_room(Room(split, False))

    def _least(self, room: Room) -> float:
        """A lower bound of all plans with this split."""
        split = room.split
        trainer, _, reader = split.islands
        places = [(reader, split.reader)] if split.reader else []
        if room.apart:
            places = [(island, gpus) for island in self.islands if (gpus := split.left(island)) > 0]
        if room.apart and not places:
            return inf
        read = min((self.sides.read_least(island.gpu) / gpus for island, gpus in places), default=0.0) * SAFE
        learn = min((self.sides.learn_least(island.gpu) / gpus for island, gpus in places), default=0.0) * SAFE
        beside = bool(self.roles.reader) and not (split.reader or room.apart)
        train = self.sides.train_least(trainer.gpu, beside) / split.trainer * SAFE
        return (self._decoding if room.decoded else self._loose)(split, train, read, learn)

    def _decoding(self, split: Split, train: float, read: float, learn: float) -> float:
        """A lower bound by all generators that there are."""
        steady, least, others = self.sides.decode_least(split.islands[1], split.generator)
        return self._period(split, Times(train, steady, least * SAFE, 0.0, 0.0, read, others, learn, self._wait))

    def _loose(self, split: Split, train: float, read: float, learn: float) -> float:
        """A lower bound whatever the generator is."""
        work, longest, others = self.sides.generate_least(split.islands[1])
        share = work / split.generator * SAFE
        rollout, others = max(share, longest * SAFE), others / split.generator * SAFE
        return self._period(split, Times(train, share, rollout, 0.0, 0.0, read, others, learn, self._wait))

    @cached_property
    def _wait(self) -> float:
        """Seconds in which an environment answers all turns."""
        return self.roles.turns * self.sides.work.environment_s if self.roles.environment else 0.0

    def _period(self, split: Split, times: Times) -> float:
        prompts = self.sides.work.prompts
        return least_period(self.roles, times, self.sides.lag, prompts, shared=split.shared)

    def _open_room(self, room: Room) -> None:
        split = room.split
        if not room.decoded:  # trainers take longer to look at
            self._push_room(replace(room, decoded=True))
            return
        train = self._trainer(split, 0)
        reading = self.sides.reader(split.islands[2], split.reader) if split.reader else None
        if train is not None and (reading is not None or not split.reader):
            self._push_trained(Trained(split, reading, train))

    def _push_trained(self, part: Trained) -> None:
        lower = self._decoding(part.split, part.train.seconds, *_apart(part.reading))
        self._push(part, lower, (0, part.split.gpus))

    def _trainer(self, split: Split, index: int) -> Training | None:
        """The `index`th fastest of a split."""
        beside = bool(self.roles.reader) and not split.reader
        return self.sides.trainers(split.islands[0], split.trainer, beside).at(index)

    def _open_trained(self, part: Trained) -> None:
        """All generators on GPUs of their own; or all beside this trainer, whose moments stay or are on the host, and
        then the next trainer."""
        split, memory = part.split, part.train.memory
        limit = self._limit_of(part)
        most = limit.period_s if limit else inf
        if not split.shared:
            for decode in self.sides.generators(split.islands[1], split.generator):
                cycle = self.sides.rollout_least(decode) + part.train.seconds
                if max(decode.steady, cycle / (1 + self.sides.lag)) <= most:
                    self._push_pair(Pair(split, part.reading, part.train, decode))
            return
        stays = {name: memory.parts[name] for name in STAY if name in memory.parts}
        for offloads, beside in ((False, memory), (True, Memory(stays))):
            for decode in self.sides.decoders(split.islands[1], split.generator, 1, beside):
                if self.sides.rollout_least(decode) + part.train.seconds <= most:
                    self._push_pair(Pair(split, part.reading, part.train, decode, offloads=offloads))
        if train := self._trainer(split, part.index + 1):
            self._push_trained(replace(part, train=train, index=part.index + 1))

    def _push_pair(self, pair: Pair) -> None:
        self._push(pair, self._period(pair.split, self._times(pair)), pair.tie)

    def _open_pair(self, pair: Pair) -> Found:
        """The plan of a generator and a trainer, whole; with GPUs of its own, the next trainer after it."""
        if not pair.split.shared and (train := self._trainer(pair.split, pair.index + 1)):
            self._push_pair(replace(pair, train=train, index=pair.index + 1))
        return self._whole(pair)

    def _times(self, pair: Pair) -> Times:
        """Exact but for the rollout, if unknown, and the sync."""
        decode, (read, learn) = pair.decode, _apart(pair.reading)
        rollout = self.sides.rollout_least(decode) if pair.rollout_s is None else pair.rollout_s
        sync = self._sync_least(pair)
        switch = pair.switch.seconds if pair.offloads else 0.0
        train, others = pair.train.seconds, decode.others
        return Times(train, decode.steady, rollout, sync, switch, read, others, learn, self._wait)

    def _sync_least(self, pair: Pair) -> float:
        """Every rank of a generator gets its share of the weights, and the trainer's ranks send all of them."""
        (trainer, generator, _), decode, together = pair.split.islands, pair.decode, pair.split.shared
        mesh = decode.generator.mesh
        share = self.sides.work.shape.parameters * BYTES[decode.generator.precision] / (mesh.tp * mesh.pp) * SAFE
        sent = share * decode.gpus / pair.train.trainer.mesh.ranks
        out = sent / (trainer.gpu.nvlink if together else trainer.gpu.nic)
        return max(out, share / (generator.gpu.nvlink if together else generator.gpu.nic))

    def _whole(self, pair: Pair) -> Found:
        split, decode, generator = pair.split, pair.decode, pair.decode.generator
        trained = pair.train.trainer.mesh
        moved = traffic(generator.shape, trained, generator.mesh, decode.replicas, generator.precision)
        sync = sync_cost(moved, split.islands[0].gpu, split.islands[1].gpu, together=split.shared)
        times = replace(self._times(pair), sync=sync.seconds)
        found = bounds(self.roles, times, self.sides.lag, self.sides.work.prompts, shared=split.shared)
        alone = alone_s(self.roles, times, self.sides.lag, self.sides.work.prompts, shared=split.shared)
        return Found(
            split, pair.train, decode, pair.reading, times.rollout, sync, pair.switch, found, alone, pair.offloads
        )


def _apart(reading: Training | None) -> tuple[float, float]:
    """Seconds of passes and of steps of models that have GPUs of their own."""
    return (reading.reads.seconds, reading.learns.seconds) if reading else (0.0, 0.0)
