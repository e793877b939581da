"""A generator's replica on the virtual clock, row by row. Pure.

The model is `decoding.Slots`, as in the planner: a replica decodes up to `slots` rows at once, a step costs what its
rows and their contexts do, and a row keeps its slot until its response ends. A group's rows wait in line for slots, in
the order in which groups came to the replica; the first one to get a slot brings the prompt. What comes in the middle
of a step begins after it. The group is done when its longest response is. So the seconds of a group depend on what
else is in work, and nothing is averaged.

Beyond the planner's rollout: a group stays on the replica that the scheduler gave it to.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.graph.ir import Firing
from penstock.runtime.plan.decoding import Generator, Slots
from penstock.runtime.plan.lengths import IntArray, draws
from penstock.runtime.plan.workload import Workload
from penstock.runtime.schedule.durations import Spans


@dataclass(frozen=True)
class Responses:
    """How long the responses of each group are, in tokens. `seed` None: those of each batch are the planner's, which
    has the quantiles of the distribution; else each is drawn by (seed, ordinal, sample) alone."""

    work: Workload
    seed: int | None = 0
    _batches: dict[int, IntArray] = field(default_factory=dict, compare=False, repr=False)

    def of(self, ordinal: int) -> list[int]:
        """[samples]: of one group."""
        batch, place = divmod(ordinal, self.work.prompts)
        lengths: list[int] = self.batch(batch)[place].tolist()
        return lengths

    def batch(self, number: int) -> IntArray:
        """[prompts, samples]: of the groups that an update consumes where nothing is dropped."""
        if number not in self._batches:
            work = self.work
            if self.seed is None:
                lengths = work.response_tokens
            else:
                lengths = work.lengths.at(draws(number * work.responses, work.responses, self.seed))
            self._batches[number] = lengths.reshape(work.prompts, work.samples)
        return self._batches[number]

    def sequences(self, number: int) -> IntArray:
        """[prompts * samples]: prompt and response, as the trainer sees a batch."""
        return self.batch(number).reshape(-1) + self.work.prompt_tokens


@dataclass(frozen=True)
class Decoding:
    """The duration of a node that decodes: `engine` makes one replica."""

    generator: Generator
    responses: Responses
    _lines: dict[int, tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)

    def engine(self) -> "Replica":
        return Replica(self.generator, self.responses, self._lines)


class Replica:
    """`schedule.durations.Engine`. Spans are of rows: from the slot taken to the slot left, with the group's ordinal;
    of rows in work the end is infinity."""

    def __init__(self, generator: Generator, responses: Responses, lines: dict[int, tuple[float, float]]) -> None:
        self.responses = responses
        self.prompt = responses.work.prompt_tokens
        self.prefill_s = generator.prefill_s(self.prompt, self.prompt**2)
        self.slots = Slots(generator, lines)
        self._waiting: deque[tuple[Firing, int, float]] = deque()
        self._left: dict[Firing, int] = {}
        self._rows: list[Firing] = []
        self._begins, self._ends, self._indices = array("d"), array("d"), array("q")

    def begin(self, firing: Firing, now: float) -> None:
        self.slots.reach(now)
        lengths = self.responses.of(firing.index)
        self._left[firing] = len(lengths)
        for sample, length in enumerate(lengths):
            self._waiting.append((firing, length, 0.0 if sample else self.prefill_s))
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
            firing, length, prefill_s = self._waiting.popleft()
            self.slots.take(len(self._rows), length, self.prompt, prefill_s)
            self._rows.append(firing)
            self._begins.append(self.slots.now)
            self._ends.append(np.inf)
            self._indices.append(firing.index)
