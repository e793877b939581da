"""The best plan by best-first branch and bound. Pure but for the clock of its time limit.

What is open lies in a heap by a lower bound of its period: first a split (which pools share GPUs, on which island and
how many), bounded by GPU-seconds that no layout goes below; then the split with its fastest trainer; then each layout
of a generator; then with its rollout simulated; then with each trainer in turn, fastest first, and the sync of the real
resharding plan. A plan that comes out of the heap whole is no worse than anything still open: it is optimal under the
model. Equal periods are decided by precision (bf16 first), then by GPUs (fewer first), then by the order of creation,
so that the same question always has the same answer.
"""

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf

from penstock.runtime.plan.cost import Cost
from penstock.runtime.plan.found import Found, Outcome, Split
from penstock.runtime.plan.gpus import BYTES
from penstock.runtime.plan.islands import Island
from penstock.runtime.plan.memory import Memory
from penstock.runtime.plan.period import Times, bounds, period
from penstock.runtime.plan.roles import Roles
from penstock.runtime.plan.sides import Generating, Sides, Training
from penstock.runtime.plan.syncing import switch_cost, sync_cost, traffic

SAFE = 1 - 1e-9
"""Of a lower bound, so that rounding never makes it an upper one."""


@dataclass(frozen=True)
class _Room:
    """A split of which no layout is decided. `apart`: a frozen model is to have GPUs of its own, still to be chosen."""

    split: Split
    apart: bool


@dataclass(frozen=True)
class _Trained:
    """A split with a trainer, the `index`th of its list."""

    split: Split
    reading: Training | None
    train: Training
    index: int = 0


@dataclass(frozen=True)
class _Pair:
    """All but the sync, and the rollout while it is None. With GPUs of its own the trainer is the `index`th of its
    list, and the others follow."""

    split: Split
    reading: Training | None
    train: Training
    decode: Generating
    rollout_s: float | None = None
    index: int = 0
    offloads: bool = False

    @property
    def tie(self) -> tuple[int, ...]:
        return (int(self.decode.generator.precision != "bf16"), self.split.gpus)

    @property
    def switch(self) -> Cost:
        """The trainer's moments to the host and back."""
        moments = self.train.memory.parts["moments"] if self.offloads else 0.0
        return switch_cost(self.split.islands[0].gpu, moments, moments)


Part = _Room | _Trained | _Pair | Found
Entry = tuple[float, tuple[int, ...], int, Part]


@dataclass
class Search:
    """One search of the plans whose split is `allowed`."""

    roles: Roles
    sides: Sides
    islands: tuple[Island, ...]
    allowed: Callable[[Split], bool] = lambda _split: True
    _heap: list[Entry] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=count)

    def run(self, deadline: float, *, second: bool = True) -> Outcome:
        """Until the best plan (and with `second` that of another split) is known, or the clock passes `deadline`."""
        for room in self._rooms():
            self._push(room, self._least(room))
        best: Found | None = None
        seen: list[Found] = []
        opened, floor = 0, inf
        while self._heap and time.monotonic() < deadline:
            lower, _, _, part = heapq.heappop(self._heap)
            opened += 1
            if not isinstance(part, Found):
                seen += self._open(part, lower)
            elif best is None:
                best, floor = part, lower
                if not second:
                    return Outcome(best, None, floor, True, opened)
            elif part.split != best.split:
                return Outcome(best, part, floor, True, opened)
        if best is not None or not self._heap:
            return Outcome(best, _other(seen, best), floor, best is not None, opened)
        first = min(seen, key=lambda found: found.period_s, default=None)
        return Outcome(first, _other(seen, first), self._heap[0][0], False, opened)

    def _push(self, part: Part, lower: float, tie: tuple[int, ...] = ()) -> None:
        if lower < inf:
            heapq.heappush(self._heap, (lower, tie, next(self._serial), part))

    def _open(self, part: _Room | _Trained | _Pair, lower: float) -> list[Found]:
        """Decide the next thing about a part; returns what became whole by it."""
        match part:
            case _Room(apart=True):
                self._open_apart(part)
            case _Room():
                self._open_room(part)
            case _Trained():
                self._open_trained(part)
            case _Pair(rollout_s=None):
                known = replace(part, rollout_s=self.sides.rollout(part.decode))
                self._push(known, max(lower, self._period(part.split, self._times(known))), known.tie)
            case _Pair():
                return [self._open_pair(part)]
        return []

    def _rooms(self) -> Iterator[_Room]:
        """All splits that have room, with a frozen model beside the trainer and on GPUs of its own."""
        ways = (False, True) if self.roles.reader else (False,)
        if "reader" in self.sides.pins:  # a mesh of its own
            ways = (True,)
        for split in self._splits():
            for apart in ways:
                if split.has_room and (apart or self.allowed(split)):
                    yield _Room(split, apart)

    def _splits(self) -> Iterator[Split]:
        for island in self.islands:
            for size in island.sizes:
                yield Split(True, (island, island, island), size, size)
                for other in self.islands:
                    for decodes in other.sizes:
                        if island != other or size + decodes <= island.gpus:
                            yield Split(False, (island, other, island), size, decodes)

    def _open_apart(self, room: _Room) -> None:
        for island in self.islands:
            for size in island.sizes:
                if size > room.split.left(island):
                    break
                split = replace(room.split, islands=(*room.split.islands[:2], island), reader=size)
                if self.allowed(split) and split.has_room:
                    self._push(_Room(split, False), self._least(_Room(split, False)))

    def _least(self, room: _Room) -> float:
        """A lower bound of all plans with this split."""
        split = room.split
        trainer, _, reader = split.islands
        read = self.sides.read_least(reader.gpu) / split.reader if split.reader else 0.0
        if room.apart:
            left = [(island, split.left(island)) for island in self.islands]
            read = min((self.sides.read_least(i.gpu) / gpus for i, gpus in left if gpus > 0), default=inf)
        beside = bool(self.roles.reader) and not (split.reader or room.apart)
        return self._loose(split, self.sides.train_least(trainer.gpu, beside) / split.trainer, read)

    def _loose(self, split: Split, train: float, read: float) -> float:
        """A lower bound whatever the generator is."""
        work, longest = self.sides.generate_least(split.islands[1])
        share = work / split.generator
        return self._period(split, Times(train, share, max(share, longest), read=read))

    def _period(self, split: Split, times: Times) -> float:
        prompts = self.sides.work.prompts
        return period(self.roles, times, self.sides.lag, prompts, shared=split.shared) * SAFE

    def _open_room(self, room: _Room) -> None:
        split = room.split
        trainers = self._trainers(split)
        reading = self.sides.reader(split.islands[2], split.reader) if split.reader else None
        if trainers and (reading is not None or not split.reader):
            self._push_trained(_Trained(split, reading, trainers[0]))

    def _push_trained(self, part: _Trained) -> None:
        steady, least = self.sides.decode_least(part.split.islands[1], part.split.generator)
        times = Times(part.train.seconds, steady, least, read=_seconds(part.reading))
        self._push(part, self._period(part.split, times))

    def _trainers(self, split: Split) -> list[Training]:
        return self.sides.trainers(split.islands[0], split.trainer, bool(self.roles.reader) and not split.reader)

    def _open_trained(self, part: _Trained) -> None:
        """All generators on GPUs of their own; or all beside this trainer, whose moments stay or are on the host, and
        then the next trainer."""
        split, memory = part.split, part.train.memory
        if not split.shared:
            for decode in self.sides.generators(split.islands[1], split.generator):
                self._push_pair(_Pair(split, part.reading, part.train, decode))
            return
        stays = {name: memory.parts[name] for name in ("weights", "frozen model") if name in memory.parts}
        for offloads, beside in ((False, memory), (True, Memory(stays))):
            for decode in self.sides.decoders(split.islands[1], split.generator, 1, beside):
                self._push_pair(_Pair(split, part.reading, part.train, decode, offloads=offloads))
        trainers = self._trainers(split)
        if part.index + 1 < len(trainers):
            self._push_trained(replace(part, train=trainers[part.index + 1], index=part.index + 1))

    def _push_pair(self, pair: _Pair) -> None:
        self._push(pair, self._period(pair.split, self._times(pair)), pair.tie)

    def _open_pair(self, pair: _Pair) -> Found:
        """The plan of a generator and a trainer, whole; with GPUs of its own, the next trainer after it."""
        found = self._whole(pair)
        self._push(found, found.period_s, pair.tie)
        trainers = [] if pair.split.shared else self._trainers(pair.split)
        if pair.index + 1 < len(trainers):
            self._push_pair(replace(pair, train=trainers[pair.index + 1], index=pair.index + 1))
        return found

    def _times(self, pair: _Pair) -> Times:
        """Exact but for the rollout, if unknown, and the sync."""
        decode = pair.decode
        rollout = decode.least if pair.rollout_s is None else pair.rollout_s
        read = _seconds(pair.reading)
        return Times(pair.train.seconds, decode.steady, rollout, self._sync_least(pair), pair.switch.seconds, read)

    def _sync_least(self, pair: _Pair) -> float:
        """Every rank of a generator gets its share of the weights, and the trainer's ranks send all of them."""
        (trainer, generator, _), decode, together = pair.split.islands, pair.decode, pair.split.shared
        mesh = decode.generator.mesh
        share = self.sides.work.shape.parameters * BYTES[decode.generator.precision] / (mesh.tp * mesh.pp) * SAFE
        sent = share * decode.gpus / pair.train.trainer.mesh.ranks
        out = sent / (trainer.gpu.nvlink if together else trainer.gpu.nic)
        return max(out, share / (generator.gpu.nvlink if together else generator.gpu.nic))

    def _whole(self, pair: _Pair) -> Found:
        split, decode, generator = pair.split, pair.decode, pair.decode.generator
        trained = pair.train.trainer.mesh
        moved = traffic(generator.shape, trained, generator.mesh, decode.replicas, generator.precision)
        sync = sync_cost(moved, split.islands[0].gpu, split.islands[1].gpu, together=split.shared)
        times = replace(self._times(pair), sync=sync.seconds)
        found = bounds(self.roles, times, self.sides.lag, self.sides.work.prompts, shared=split.shared)
        return Found(split, pair.train, decode, pair.reading, times.rollout, sync, pair.switch, found, pair.offloads)


def _seconds(reading: Training | None) -> float:
    return reading.seconds if reading else 0.0


def _other(seen: list[Found], best: Found | None) -> Found | None:
    """The best seen plan of another split."""
    others = (found for found in seen if best is not None and found.split != best.split)
    return min(others, key=lambda found: found.period_s, default=None)
