"""Simulate a plan of GPUs: the real scheduler on the virtual clock, with the cost model's seconds for each firing. Pure
except for `read_costed`, which reads a plan that `penstock plan --json` wrote.

How long each kind of work takes:

- generating: row by row, with sampled lengths, by the event model of `decode_cost.Slots` (`DecodingReplica`);
- an update: the steps on the sequences of its own batch. In parts, each part has its share, and the last one also the
  optimizer step. On shared GPUs an update takes its batch whole;
- a frozen model's pass: that of its batch; if it takes groups one by one, each group's share of it by tokens;
- a sync: the wire's seconds, to all replicas at once, in parallel with other work;
- GPUs that trainer and generator share: they take turns, so the schedule is that of lag 0 whatever the lag is. The
  moments go to the host with the publication and come back before the steps; the work of models beside the policy is
  added to the update;
- filters drop the plan's share of the groups, drawn by ordinal; a node that decodes baselines shares the slots;
- small work takes no time, unless it is given.

All ranks of a replica do the same, so only one is simulated. A group stays on the replica that the scheduler chose
until its longest response is done. Its rows wait in a queue for slots, in the order in which groups arrived, and the
first row pays for the prompt. A row that arrives during a step begins after it. A replica has room for more groups than
fill its slots, so that slots do not run empty: by the ratio of the mean longest response of a group to the mean of all.

Shape suffix: N rows of all groups.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from html import escape
from itertools import accumulate, count
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from penstock.graph.ir import Firing, Graph
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import GROUPS_AHEAD, Plan, Pool, Rank, Replica, place
from penstock.runtime.plan.confidence import NOT_CALIBRATED, Confidence
from penstock.runtime.plan.decode_cost import Generator, Slots
from penstock.runtime.plan.roles import Models, PlanError, Roles, roles_of
from penstock.runtime.plan.search import Solution
from penstock.runtime.plan.train_cost import Trainer
from penstock.runtime.plan.workload import IntArray, Workload, draws
from penstock.runtime.record.typed_json import parse_json
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.simulator import Duration, Durations, Simulation, Spans, Verdicts, simulate


@dataclass(frozen=True)
class Responses:
    """The lengths of the responses of each group, in tokens. `seed` None: each batch has the planner's lengths, the
    quantiles of the distribution; else each length is drawn by (seed, ordinal, sample). The tokens of a conversation
    are divided evenly among its turns. `verdicts` decide which groups the `filters` drop, by ordinal alone, so that the
    groups of each update are known beforehand."""

    work: Workload
    seed: int | None = 0
    turns: int = 1
    filters: tuple[str, ...] = ()
    verdicts: Verdicts = field(default_factory=Verdicts)
    _batches: dict[int, IntArray] = field(default_factory=dict, compare=False, repr=False)
    _kept: list[int] = field(default_factory=list, compare=False, repr=False)

    def of(self, ordinal: int) -> list[int]:
        """[rows]: the lengths of one group's responses, including the prefixes that they continue."""
        batch, place = divmod(ordinal, self.work.drawn)
        lengths: list[int] = self.batch(batch)[place].tolist()
        return lengths

    def spoken(self, ordinal: int, turn: int) -> list[tuple[int, int]]:
        """[rows]: for one turn of a group, the tokens of the turn, and those before it (earlier turns, or a prefix)."""
        if self.work.begun:
            lengths = self.of(ordinal)
            begins = self.work.begins(np.array(lengths)).tolist()
            return [(length - begin, begin) for length, begin in zip(lengths, begins, strict=True)]
        # The tokens of earlier turns are in the cache.
        before = [length * turn // self.turns for length in self.of(ordinal)]
        until = [length * (turn + 1) // self.turns for length in self.of(ordinal)]
        return [(max(1, after - had), had) for had, after in zip(before, until, strict=True)]

    def batch(self, number: int) -> IntArray:
        """[drawn, rows]: the lengths of consecutive groups: of an update's groups, if nothing is dropped."""
        if number not in self._batches:
            work, lengths = self.work, self.work.response_tokens + self.work.prefix_tokens
            # Without a seed every update has the same responses, those of the planner.
            if self.seed is not None:
                lengths = work.lengths.at(draws(number * work.responses, work.responses, self.seed))
            self._batches[number] = lengths.reshape(work.drawn, work.rows)
        return self._batches[number]

    def consumed(self, update: int) -> list[int]:
        """[prompts]: the ordinals of the groups that an update consumes."""
        first = update * self.work.prompts
        # Whether a group is kept depends only on its ordinal, so kept groups are found once and in order.
        while len(self._kept) < first + self.work.prompts:
            following = count(self._kept[-1] + 1 if self._kept else 0)
            drops = self.verdicts.dropped
            self._kept.append(next(o for o in following if not any(drops(Firing(name, o)) for name in self.filters)))
        return self._kept[first : first + self.work.prompts]

    def update_of(self, ordinal: int) -> int:
        """The update that consumes a kept group."""
        while not self._kept or self._kept[-1] < ordinal:
            self.consumed(len(self._kept) // self.work.prompts)
        return bisect_left(self._kept, ordinal) // self.work.prompts

    def drawn(self, update: int) -> tuple[int, int]:
        """The range of ordinals that are drawn for an update, including dropped ones: the first, and the first after
        it."""
        return self.consumed(update - 1)[-1] + 1 if update else 0, self.consumed(update)[-1] + 1

    def fresh(self, update: int) -> IntArray:
        """[prompts * samples]: the lengths of the responses that an update trains on for the first time."""
        return np.array([self.of(ordinal)[: self.work.samples] for ordinal in self.consumed(update)], np.int64).ravel()

    def sequences(self, update: int) -> IntArray:
        """The lengths of an update's sequences (prompt and response): fresh ones, then past ones from the buffer."""
        # In the first updates a buffer has less to add.
        batches = min(update, ceil(self.work.replayed / self.work.prompts))
        past = [self.fresh(update - 1 - back) for back in range(batches)]
        added = np.concatenate([np.zeros(0, np.int64), *past])[: self.work.replayed * self.work.samples]
        return np.concatenate([self.fresh(update), added]) + self.work.prompt_tokens


@dataclass(frozen=True)
class Decoding:
    """The duration of nodes that decode: `engine` makes one replica, which all of them share. `rows` has by node the
    range of a group's rows that it makes, end excluded; a node without an entry makes all."""

    generator: Generator
    responses: Responses
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def engine(self) -> "DecodingReplica":
        return DecodingReplica(self)


class DecodingReplica:
    """A `SimulatedEngine`. A span is a row's time in its slot, with the group's ordinal; for rows in work the end is
    infinity."""

    def __init__(self, nodes: Decoding) -> None:
        self.nodes, self.prompt = nodes, nodes.responses.work.prompt_tokens
        self.prefill_s = nodes.generator.prefill_s(self.prompt)
        self.slots = Slots(nodes.generator.slots, nodes.generator.lines)
        self._waiting: deque[tuple[Firing, int, int, float]] = deque()
        self._left: dict[Firing, int] = {}
        self._rows: list[Firing] = []
        self._begins, self._ends, self._indices = array("d"), array("d"), array("q")

    def begin(self, firing: Firing, now: float) -> None:
        self.slots.reach(now)
        spoken = self.nodes.responses.spoken(firing.index, firing.turn)
        first, last = self.nodes.rows.get(firing.node, (0, len(spoken)))
        self._left[firing] = last - first
        for row, (length, before) in enumerate(spoken[first:last], first):
            # The rows of a group share a prompt, which is in the cache in later turns.
            prefill_s = 0.0 if row or firing.turn else self.prefill_s
            self._waiting.append((firing, length, self.prompt + before, prefill_s))
        if self.slots.due > self.slots.now:  # else rows end with this step, and `finish` fills the slots
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


# Returns the seconds of a node's firing with this index.
NodeSeconds = Callable[[str, int], float]
# The key of this part in a plan's JSON.
KEY = "costed"


@dataclass(frozen=True)
class Reader:
    """Pools of models beside the policy that share GPUs: the trainer's, or with `apart` their own."""

    pools: tuple[str, ...]
    models: Models
    trainer: Trainer
    apart: bool


@dataclass(frozen=True)
class Costed:
    """A plan with all input of its simulation. `lag` is the lag that it was made for, `period_s` and `bound` are the
    planner's results.

    readers: the models beside the policy, by the pools that share GPUs. shared: the generator has the trainer's GPUs,
    and they take turns. leaves_s, returns_s: seconds in which the trainer's moments go to the host before decoding, and
    come back after it.
    """

    program: str
    work: Workload
    lag: int
    gpus: int
    trainer: Trainer
    generator: Generator
    replicas: int
    readers: tuple[Reader, ...]
    shared: bool
    sync_s: float
    leaves_s: float
    returns_s: float
    period_s: float
    bound: str
    confidence: Confidence = NOT_CALIBRATED

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = TypeAdapter(Costed).dump_python(self, mode="json")
        return data


def costed(roles: Roles, work: Workload, lag: int, found: Solution, confidence: Confidence) -> Costed:
    """Make it from the planner's solution."""
    # Models without dedicated GPUs are on the trainer's.
    free = [pool for pool in roles.beside if not any(pool in each.pools for each in found.split.dedicated)]
    readers = [Reader(tuple(free), roles.models_of(free), found.training.trainer, False)] if free else []
    for each, reading in zip(found.split.dedicated, found.readings, strict=True):
        readers.append(Reader(each.pools, roles.models_of(each.pools), reading.trainer, True))
    decode, (leaves_s, returns_s) = found.generating, found.switch.parts.values()
    return Costed(
        roles.graph, work, lag, found.split.gpus, found.training.trainer, decode.generator, decode.replicas,
        tuple(readers), found.split.shared, found.sync.seconds, leaves_s, returns_s, found.period_s, found.bound,
        confidence,
    )  # fmt: skip


def read_costed(path: Path, program: str) -> Costed:
    """Read the plan in a file that `penstock plan PROGRAM --json` wrote. Raises PlanError for any other file."""
    try:
        data = parse_json(path.read_bytes(), str(path))
        found = TypeAdapter(Costed).validate_python(data[KEY])
    except ValidationError as error:
        first = error.errors()[0]
        given = f"{'.'.join(map(str, (KEY, *first['loc'])))}: {first['msg']}"
    except OSError as error:
        given = f"a file that cannot be read ({error.strerror})"
    except (KeyError, TypeError):
        given = f"JSON without {KEY!r}"
    except ValueError as error:
        given = f"something that is not JSON ({error!s:.200})"
    else:
        if found.program == program:
            return found
        given = f"a plan of {found.program}"
    raise PlanError(f"--plan {path}: given {given}, needed what `penstock plan {program} --json` prints")


# The tail of a batch begins when this share of its responses is done.
TAIL = 0.9


@dataclass(frozen=True)
class Filling:
    """The shares of slots in use, from 0 to 1: over the steady updates, and in the tails of their batches, which take
    `tail_s` seconds on average. A tail lasts from the end of 90 % of a batch's responses to the end of the last one."""

    slots: int
    occupancy: float
    tail_s: float
    tail_occupancy: float


# A host for placements that are never run, with cores for any number of ranks.
ANYWHERE = Cluster(hosts=(Host(name="local", cores=1 << 20),))


@dataclass(frozen=True)
class Scene:
    """A program, a plan for it, and all durations. `seed` draws the lengths of responses (None: each batch has the
    planner's). `given` are seconds of nodes for which the cost model has none."""

    graph: Graph
    plan: Costed
    seed: int | None = 0
    given: Mapping[str, Duration] = field(default_factory=dict)

    @cached_property
    def roles(self) -> Roles:
        return roles_of(self.graph)

    @cached_property
    def responses(self) -> Responses:
        roles = self.roles
        return Responses(self.plan.work, self.seed, turns=roles.turns, filters=roles.filters, verdicts=self.verdicts)

    @cached_property
    def verdicts(self) -> Verdicts:
        """Verdicts by which each filter drops the same share of the groups that it sees."""
        filters = self.roles.filters
        # A filter sees the groups that others keep, so the kept shares multiply.
        dropped = 1 - self.plan.work.kept ** (1 / max(1, len(filters)))
        return Verdicts(dict.fromkeys(filters, dropped), seed=self.seed or 0)

    @cached_property
    def decoded(self) -> Mapping[str, tuple[int, int]]:
        """For each node that decodes, the range of a group's rows that it makes: the first, and the first after it."""
        nodes = ((self.roles.cycle[2], self.plan.work.samples), *self.roles.baselines)
        ends = list(accumulate(samples for _, samples in nodes))
        return {node: (end - samples, end) for (node, samples), end in zip(nodes, ends, strict=True)}

    @property
    def lag(self) -> int:
        """The lag of the schedule: 0 on shared GPUs."""
        return 0 if self.plan.shared else self.roles.lag

    def run(self, updates: int) -> "Simulated":
        graph = self.at(self.lag).graph
        if self.plan.shared:
            graph = graph.replace(nodes=tuple(replace(node, accumulate=0) for node in graph.nodes))
        tables = Tables(graph, self.places(graph))
        rules = Rules(self.plan.work.prompts, updates)
        return Simulated(self, simulate(tables, rules, self.durations(), verdicts=self.verdicts))

    def effect_of_lag(self, updates: int) -> Iterator[tuple[int, Simulation]]:
        """Simulate `updates` updates with each lag from 0 to 4 and the same plan. A lag that is too small for the
        period at which weights are sent is left out."""
        # If weights are sent at every n-th update, a lag below n - 1 would wait for a version that never comes.
        every = self.graph[self.roles.cycle[1]].every
        for lag in range(every - 1, 5):
            yield lag, self.at(lag).run(updates).result

    def at(self, lag: int) -> "Scene":
        """The same scene with weights of the generator that may be `lag` updates old."""
        return replace(self, graph=self.graph.at_lag(lag, {self.roles.cycle[1]}))

    @property
    def in_flight(self) -> int:
        """How many groups a replica of the generator has in work at most."""
        work = self.plan.work
        lengths = work.response_tokens.reshape(work.drawn, work.rows)
        # A group keeps its place until its longest response is done, but each slot only as long as its row.
        stay = float(lengths.max(axis=1).mean() / lengths.mean())
        return ceil(self.plan.generator.slots / work.rows * stay) + GROUPS_AHEAD

    def places(self, graph: Graph) -> Plan:
        """The placement for the scheduler, with one rank for each replica."""
        roles, base = self.roles, place([graph], ANYWHERE, generators=self.plan.replicas)
        groups = [(each.pools[0] if each.apart else roles.trainer, each.pools) for each in self.plan.readers]
        # The scheduler has one pool for each set of GPUs: the first of the pools that share them holds all their nodes.
        guests = {pool: host for host, pools in groups for pool in pools if pool != host}
        pools = []
        for pool in base.pools:
            capacity = self.in_flight * (1 + len(roles.baselines)) if pool.name == roles.generator else 1
            if pool.name == roles.environment:  # an answer waits only for its own group
                capacity = self.plan.work.prompts * (self.lag + 1)
            replicas = tuple(Replica(r.name, (Rank(),), capacity) for r in pool.replicas)
            here = [guest for guest, host in guests.items() if host == pool.name]
            more = [name for guest in here for name in base.pool_of(roles.nodes_of(guest)[0]).holds]
            if pool.name not in guests:
                pools.append(Pool(pool.name, (*pool.holds, *more), replicas))
        return Plan(tuple(pools))

    def durations(self) -> Durations:
        plan, roles, work = self.plan, self.roles, self.plan.work
        nodes: dict[str, Duration] = {node.name: 0.0 for node in self.graph.nodes if node.fires}
        nodes |= self.given
        nodes |= dict.fromkeys(self.decoded, Decoding(plan.generator, self.responses, self.decoded))
        nodes |= dict.fromkeys(roles.rereads, self._reads(plan.trainer, 1))
        nodes |= dict.fromkeys(roles.followers, plan.trainer.followed().seconds)
        if roles.turns > 1:
            answers = [name for name in roles.nodes_of(roles.environment) if name not in self.given]
            nodes |= dict.fromkeys(answers, work.environment_s)
        parts = 1 if plan.shared else work.parts
        steps, own, dedicated = self._steps(plan.trainer, parts), list[NodeSeconds](), list[list[NodeSeconds]]()
        for reader in plan.readers:
            here = {node for pool in reader.pools for node in roles.nodes_of(pool)}
            reading, learning = ([n for n in names if n in here] for names in (roles.readers, roles.learners))
            reads, learns = self._reads(reader.trainer, len(reading) / reader.models.count), self._steps(reader.trainer)
            groups = self._by_group(reads)
            nodes |= {n: groups if self.graph[n].clock == "group" else reads for n in reading}
            nodes |= dict.fromkeys(learning, learns)
            seconds = [*(reads for _ in reading), *(learns for _ in learning)]
            own, dedicated = (own, [*dedicated, seconds]) if reader.apart else (own + seconds, dedicated)

        def update_s(node: str, update: int) -> float:
            """Seconds of the policy's steps. On GPUs that also decode, including the models beside the policy: one
            after the other on the trainer's GPUs, in parallel on dedicated ones."""
            alone = steps(node, update) + plan.returns_s
            if not plan.shared:
                return alone
            apart = (sum(each(node, update) for each in seconds) for seconds in dedicated)
            return alone + sum(each(node, update) for each in own) + max(apart, default=0.0)

        nodes[roles.cycle[-1]] = update_s
        if plan.shared:
            nodes |= dict.fromkeys((*roles.readers, *roles.learners), 0.0)
        once = {roles.cycle[-1]: plan.trainer.once().seconds}
        return Durations(nodes, publish=plan.leaves_s, wire=plan.sync_s, steps=once)

    def _steps(self, trainer: Trainer, parts: int = 1) -> NodeSeconds:
        """The seconds of an update of the policy or of a critic."""
        work = self.plan.work
        return self._of_update(
            lambda sequences: trainer.update(sequences, work.epochs, work.minibatches, parts).seconds
        )

    def _reads(self, reader: Trainer, nodes: float) -> NodeSeconds:
        """The seconds of a model's pass over a batch, divided among the `nodes` that read with it."""
        return self._of_update(lambda sequences: reader.logprobs(sequences).seconds / nodes)

    def _of_update(self, seconds: Callable[[IntArray], float]) -> NodeSeconds:
        """Seconds by the sequences of an update, cached for all nodes."""
        kept = cache(lambda update: seconds(self.responses.sequences(update)))
        return lambda _node, update: kept(update)

    def _by_group(self, batch: NodeSeconds) -> NodeSeconds:
        """Seconds of a batch, divided among its groups by their tokens."""
        work = self.plan.work

        def seconds(node: str, ordinal: int) -> float:
            update = self.responses.update_of(ordinal)
            own = sum(self.responses.of(ordinal)[: work.samples]) + work.samples * work.prompt_tokens
            return batch(node, update) * own / float(self.responses.sequences(update).sum())

        return seconds


@dataclass(frozen=True)
class Simulated:
    """A schedule of a plan. Rates are of its steady updates (`Simulation.steady`), or of all if there are none."""

    scene: Scene
    result: Simulation

    @cached_property
    def filling(self) -> Filling:
        """The shares of the generator's slots in use."""
        plan, result = self.scene.plan, self.result
        slots = plan.generator.slots * plan.replicas
        spans = next(result.spans[node] for node in self.scene.decoded if node in result.spans)
        begins_N, ends_N, indices_N = (np.array(column) for column in (spans.begins, spans.ends, spans.indices))

        def used_s(start: float, stop: float) -> float:
            """Seconds of slots in use, summed over the slots."""
            return float(np.maximum(0.0, np.minimum(ends_N, stop) - np.maximum(begins_N, start)).sum())

        begin, end = (result.ends[u] for u in result.steady) if result.steady else (0.0, result.wall_s)
        first, last = self.updates
        seconds, busy = 0.0, 0.0
        for update in range(first, last + 1):
            low, high = self.scene.responses.drawn(update)
            batch_N = np.sort(ends_N[(indices_N >= low) & (indices_N < high)])
            start, stop = float(batch_N[min(int(len(batch_N) * TAIL), len(batch_N) - 1)]), float(batch_N[-1])
            seconds += stop - start
            busy += used_s(start, stop)
        occupancy = used_s(begin, end) / ((end - begin) * slots)
        return Filling(slots, occupancy, seconds / (last + 1 - first), busy / (seconds * slots) if seconds else 1.0)

    @property
    def updates(self) -> tuple[int, int]:
        """The first and the last of the steady updates."""
        first, last = self.result.steady or (-1, len(self.result.ends) - 1)
        return first + 1, last

    @property
    def groups_per_s(self) -> float:
        return self.scene.plan.work.prompts / self.result.steady_s

    @cached_property
    def tokens_per_s(self) -> float:
        """Tokens per second of responses that updates train on, each counted once."""
        first, last = self.updates
        tokens = sum(int(self.scene.responses.fresh(update).sum()) for update in range(first, last + 1))
        return tokens / (last + 1 - first) / self.result.steady_s

    def _repr_html_(self) -> str:
        """The schedule as a picture, for notebooks."""
        plan = self.scene.plan
        what = f"{self.scene.graph.name}, {plan.work.shape.name}, {plan.gpus} GPUs"
        low, high = plan.confidence.range_s(self.result.steady_s)
        what = f"{what}: {low:g} to {high:g} s per update, {plan.confidence.words}"
        return f"<p>{escape(what)}</p>{self.result._repr_html_()}"
