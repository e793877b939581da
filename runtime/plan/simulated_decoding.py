"""A generator's replica on the virtual clock, row by row. Pure.

The model is `slots.Slots`, as in the planner: a replica decodes up to `slots` rows at once, a step costs what its
rows and their contexts do, and a row keeps its slot until its response ends. A group's rows wait in line for slots, in
the order in which groups came to the replica; the first one to get a slot brings the prompt. What comes in the middle
of a step begins after it. The group is done when its longest response is. So the seconds of a group depend on what
else is in work, and nothing is averaged.

Beyond the planner's rollout: a group stays on the replica that the scheduler gave it to.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from types import MappingProxyType

import numpy as np

from penstock.graph.ir import Firing
from penstock.runtime.plan.decoding import Generator
from penstock.runtime.plan.lengths import IntArray, draws
from penstock.runtime.plan.slots import Slots
from penstock.runtime.plan.workload import Workload
from penstock.runtime.schedule.durations import Spans
from penstock.runtime.schedule.verdicts import Verdicts


@dataclass(frozen=True)
class Responses:
    """How long the responses of each group are, in tokens. `seed` None: those of each batch are the planner's, which
    has the quantiles of the distribution; else each is drawn by (seed, ordinal, sample) alone. Those of a conversation
    are shared out evenly over its turns. Which groups `filters` drop is for `verdicts` to say, by the ordinal alone, so
    that it is known which ones each update consumes."""

    work: Workload
    seed: int | None = 0
    _batches: dict[int, IntArray] = field(default_factory=dict, compare=False, repr=False)
    turns: int = 1
    filters: tuple[str, ...] = ()
    verdicts: Verdicts = field(default_factory=Verdicts)
    _kept: list[int] = field(default_factory=list, compare=False, repr=False)

    def of(self, ordinal: int) -> list[int]:
        """[rows]: of one group."""
        batch, place = divmod(ordinal, self.work.drawn)
        lengths: list[int] = self.batch(batch)[place].tolist()
        return lengths

    def spoken(self, ordinal: int, turn: int) -> list[tuple[int, int]]:
        """[rows]: tokens of one turn of a group, and those of the turns before it."""
        before = [length * turn // self.turns for length in self.of(ordinal)]
        until = [length * (turn + 1) // self.turns for length in self.of(ordinal)]
        return [(max(1, after - had), had) for had, after in zip(before, until, strict=True)]

    def batch(self, number: int) -> IntArray:
        """[drawn, rows]: of groups that follow each other: those of an update, where nothing is dropped."""
        if number not in self._batches:
            work = self.work
            if self.seed is None:
                lengths = work.response_tokens
            else:
                lengths = work.lengths.at(draws(number * work.responses, work.responses, self.seed))
            self._batches[number] = lengths.reshape(work.drawn, work.rows)
        return self._batches[number]

    def consumed(self, update: int) -> list[int]:
        """[prompts]: ordinals of the groups that an update consumes."""
        first = update * self.work.prompts
        if not self.filters:
            return list(range(first, first + self.work.prompts))
        while len(self._kept) < first + self.work.prompts:
            following = self._kept[-1] + 1 if self._kept else 0
            self._kept.append(next(ordinal for ordinal in count(following) if self._keeps(ordinal)))
        return self._kept[first : first + self.work.prompts]

    def update_of(self, ordinal: int) -> int:
        """The update that consumes a group that is kept."""
        if not self.filters:
            return ordinal // self.work.prompts
        while not self._kept or self._kept[-1] < ordinal:
            self.consumed(len(self._kept) // self.work.prompts)
        return bisect_left(self._kept, ordinal) // self.work.prompts

    def drawn(self, update: int) -> tuple[int, int]:
        """The first of the ordinals that are drawn for an update, and the first one after them: dropped ones count."""
        return self.consumed(update - 1)[-1] + 1 if update else 0, self.consumed(update)[-1] + 1

    def fresh(self, update: int) -> IntArray:
        """[prompts * samples]: of the responses that an update learns from for the first time."""
        if not self.filters:
            return self.batch(update)[:, : self.work.samples].ravel()
        return np.array([self.of(ordinal)[: self.work.samples] for ordinal in self.consumed(update)], np.int64).ravel()

    def sequences(self, update: int) -> IntArray:
        """Prompt and response, as the trainer sees a batch: fresh ones, then past ones of as many groups as there are,
        up to those that a buffer adds."""
        batches = min(update, ceil(self.work.replayed / self.work.prompts))
        past = [self.fresh(update - 1 - back) for back in range(batches)]
        added = np.concatenate([np.zeros(0, np.int64), *past])[: self.work.replayed * self.work.samples]
        return np.concatenate([self.fresh(update), added]) + self.work.prompt_tokens

    def _keeps(self, ordinal: int) -> bool:
        return not any(self.verdicts.dropped(Firing(name, ordinal)) for name in self.filters)


@dataclass(frozen=True)
class Decoding:
    """The duration of nodes that decode: `engine` makes one replica, which all of them share. `rows` are the first and
    the last of a group's that each of several nodes makes, the last one excluded; of one node, all."""

    generator: Generator
    responses: Responses
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def engine(self) -> "Replica":
        return Replica(self.generator, self.responses, self.rows)


class Replica:
    """`schedule.durations.Engine`. Spans are of rows: from the slot taken to the slot left, with the group's ordinal;
    of rows in work the end is infinity."""

    def __init__(
        self,
        generator: Generator,
        responses: Responses,
        rows: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        self.responses, self._shares = responses, rows
        self.prompt = responses.work.prompt_tokens
        self.prefill_s = generator.prefill_s(self.prompt, self.prompt**2)
        self.slots = Slots(generator.slots, generator.lines)
        self._waiting: deque[tuple[Firing, int, int, float]] = deque()
        self._left: dict[Firing, int] = {}
        self._rows: list[Firing] = []
        self._begins, self._ends, self._indices = array("d"), array("d"), array("q")

    def begin(self, firing: Firing, now: float) -> None:
        self.slots.reach(now)
        spoken = self.responses.spoken(firing.index, firing.turn)
        first, last = self._shares.get(firing.node, (0, len(spoken)))
        self._left[firing] = last - first
        for row, (length, before) in enumerate(spoken[first:last], first):
            prefill_s = 0.0 if row or firing.turn else self.prefill_s
            self._waiting.append((firing, length, self.prompt + before, prefill_s))
        if self.slots.due > self.slots.now:  # else rows end with this step, and `finish` comes first
            self._fill()

    @property
    def due(self) -> float:
        return self.slots.due

    def finish(self) -> Sequence[Firing]:
        done = []
        for row in self.slots.advance():
            firing = self._rows[row]
            self._ends[row] = self.slots.now
            self._left[firing] -= 1
            if not self._left[firing]:
                del self._left[firing]
                done.append(firing)
        self._fill()
        return done

    @property
    def spans(self) -> Spans:
        return Spans(self._begins, self._ends, self._indices)

    def _fill(self) -> None:
        while self._waiting and self.slots.free:
            firing, length, context, prefill_s = self._waiting.popleft()
            self.slots.take(len(self._rows), length, context, prefill_s)
            self._rows.append(firing)
            self._begins.append(self.slots.now)
            self._ends.append(np.inf)
            self._indices.append(firing.index)
