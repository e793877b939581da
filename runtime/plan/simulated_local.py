"""A plan of one machine's cores on the virtual clock: the real scheduler, with the seconds of `local_plan`. Pure.

- generating: one token for all slots at each step, as `local.LocalGenerator` prices it. A group's rows wait in line
  for slots; what comes in the middle of a step begins after it. The group is done when its longest response is; the
  first group of each batch has its mismatch measured, with the step in which it begins;
- an update: the steps on the sequences of its own batch, in `PIECES`;
- a sync: the snapshot occupies the trainer; the rest of it is beside other work;
- with a lag trainer and generator share the cores: while both are at work, each is slower by the factor that was
  measured. A step or a piece keeps the pace with which it began;
- small work takes no time, unless it is given.
"""

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from math import inf

from penstock.graph.ir import Firing, Graph
from penstock.runtime.plan.local import reached
from penstock.runtime.plan.local_plan import LocalPlan
from penstock.runtime.plan.plan import Plan
from penstock.runtime.plan.roles_of import roles_of
from penstock.runtime.plan.simulated_decoding import Responses
from penstock.runtime.plan.simulated_places import served
from penstock.runtime.plan.simulated_scene import Outline, Schedulable, relagged
from penstock.runtime.schedule.durations import Duration, Durations, Engine, Spans

PIECES = 64
"""Of an update: as exactly as its pace follows what else is at work."""


@dataclass(frozen=True)
class LocalScene(Schedulable):
    """A plan of cores. `given` are seconds of nodes that the cost model has none for."""

    graph: Graph
    plan: LocalPlan
    seed: int | None = 0
    given: Mapping[str, Duration] = field(default_factory=dict)

    @property
    def outline(self) -> Outline:
        plan = self.plan
        slots = plan.generator.slots
        machines, lag = f"{plan.cpu.cores} cores", plan.roles.lag
        return Outline(plan.work, machines, 0, slots, plan.period_s, lag, plan.bounds[0].cause)

    def at(self, lag: int) -> "LocalScene":
        graph = relagged(self.graph, self.roles, lag)
        return replace(self, graph=graph, plan=replace(self.plan, roles=roles_of(graph)))

    def places(self, graph: Graph) -> Plan:
        return served(graph, self.plan.plan)

    def durations(self) -> Durations:
        cores, parts = _Cores(self.plan), self.plan.sync.parts
        nodes: dict[str, Duration] = {node.name: 0.0 for node in self.graph.nodes if node.fires}
        nodes |= self.given
        generator = _Paced(partial(_Generator, rows=self.decoded), self.plan, self.responses, cores)
        nodes |= dict.fromkeys(self.decoded, generator)
        nodes[self.roles.cycle[-1]] = _Paced(_Trainer, self.plan, self.responses, cores)
        nodes |= dict.fromkeys(self.roles.followers, self.plan.followed.seconds)
        return Durations(nodes, publish=parts["snapshot"], wire=self.plan.sync.seconds - parts["snapshot"])


class _Cores:
    """Who is at work on them. Begun work says `enter`, and `leave` when it is over."""

    def __init__(self, plan: LocalPlan) -> None:
        self.slower = {"trainer": plan.cpu.crowded.trainer, "generator": plan.cpu.crowded.generator}
        self._crowded = plan.overlaps
        self._at_work: set[str] = set()

    def enter(self, who: str) -> None:
        self._at_work.add(who)

    def leave(self, who: str) -> None:
        self._at_work.discard(who)

    def pace(self, who: str) -> float:
        """How many times longer work takes that begins now."""
        return self.slower[who] if self._crowded and self._at_work - {who} else 1.0


@dataclass(frozen=True)
class _Paced:
    """The duration of a node whose replicas, made by `make`, share the cores with others."""

    make: Callable[[LocalPlan, Responses, _Cores], Engine]
    plan: LocalPlan
    responses: Responses
    cores: _Cores

    def engine(self) -> Engine:
        return self.make(self.plan, self.responses, self.cores)


class _Generator:
    """`schedule.durations.Engine`. Spans are of rows: from slot taken to slot left, with the group's ordinal."""

    def __init__(
        self, plan: LocalPlan, responses: Responses, cores: _Cores, rows: Mapping[str, tuple[int, int]]
    ) -> None:
        self.generator, self.work, self.responses, self.cores = plan.generator, plan.work, responses, cores
        self._shares = rows
        self.due = inf
        self._now, self._step = 0.0, 0
        self._costs: dict[int, float] = {}
        self._waiting: deque[tuple[Firing, int, bool]] = deque()
        self._last: list[tuple[int, int]] = []
        self._oldest: deque[tuple[int, int]] = deque()
        self._left: dict[Firing, int] = {}
        self._rows: list[Firing] = []
        self._fresh: list[Firing] = []
        self._begins, self._ends, self._indices = array("d"), array("d"), array("q")

    def begin(self, firing: Firing, now: float) -> None:
        first, last = self._shares[firing.node]
        idle, lengths = self.due == inf, self.responses.of(firing.index)[first:last]
        self._left[firing] = len(lengths)
        self._waiting.extend((firing, length, sample == 0) for sample, length in enumerate(lengths))
        if idle:
            self.cores.enter("generator")
        if idle or now == self._now:  # else it waits for the end of the step
            self._decode(now)

    def finish(self) -> Sequence[Firing]:
        now, done = self.due, []
        self._step += 1
        self._fresh.clear()
        while self._last and self._last[0][0] <= self._step:
            _, row = heappop(self._last)
            firing = self._rows[row]
            self._ends[row] = now
            self._left[firing] -= 1
            if not self._left[firing]:
                del self._left[firing]
                done.append(firing)
        if self._last or self._waiting:
            self._decode(now)
        else:
            self.due = inf
            self.cores.leave("generator")
        return done

    @property
    def spans(self) -> Spans:
        return Spans(self._begins, self._ends, self._indices)

    def _decode(self, now: float) -> None:
        """Fill the slots that are free, and begin a step."""
        while self._waiting and len(self._last) < self.generator.slots:
            (firing, length, first), row = self._waiting.popleft(), len(self._rows)
            if first:
                self._fresh.append(firing)
            heappush(self._last, (self._step + length, row))
            self._oldest.append((row, self._step))
            self._rows.append(firing)
            self._begins.append(now)
            self._ends.append(inf)
            self._indices.append(firing.index)
        while self._ends[self._oldest[0][0]] < inf:
            self._oldest.popleft()
        self._now = now
        self.due = now + self._seconds() * self.cores.pace("generator")

    def _seconds(self) -> float:
        """Of the step: its blocks of positions, the prompts of groups that are new, and what is measured of them."""
        blocks = reached(self.work.prompt_tokens + self._step - self._oldest[0][1])
        if blocks not in self._costs:
            self._costs[blocks] = self.generator.step(blocks).seconds
        seconds = self._costs[blocks]
        if self._fresh:
            seconds += self.generator.prefill(len(self._fresh), self.work.prompt_tokens).seconds
        for firing in self._fresh:
            batch, place = divmod(firing.index, self.work.prompts)
            if place == 0 and not self._shares[firing.node][0]:
                mean = float(self.responses.batch(batch).mean())
                seconds += self.generator.scored(self.work.samples, self.work.prompt_tokens + mean).seconds
        return seconds


class _Trainer:
    """`schedule.durations.Engine`, of one update at a time."""

    def __init__(self, plan: LocalPlan, responses: Responses, cores: _Cores) -> None:
        self.plan, self.responses, self.cores = plan, responses, cores
        self.due = inf
        self._firing, self._left, self._piece_s = Firing("", 0), 0, 0.0

    def begin(self, firing: Firing, now: float) -> None:
        self.cores.enter("trainer")
        cost = self.plan.trained(self.responses.sequences(firing.index))
        self._firing, self._left, self._piece_s = firing, PIECES, cost.seconds / PIECES
        self.due = now + self._piece_s * self.cores.pace("trainer")

    def finish(self) -> Sequence[Firing]:
        self._left -= 1
        if self._left:
            self.due += self._piece_s * self.cores.pace("trainer")
            return ()
        self.due = inf
        self.cores.leave("trainer")
        return (self._firing,)

    @property
    def spans(self) -> Spans:
        return Spans()
