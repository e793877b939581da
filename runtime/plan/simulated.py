"""A plan of GPUs on the virtual clock: the real scheduler, with the cost model's seconds for each firing. Pure.

- generating: row by row, with sampled lengths (`simulated_decoding`);
- an update: the steps on the sequences of its own batch;
- a frozen model's pass: that of its batch; where it takes groups one by one, each group's share of it by tokens;
- a sync: the wire's seconds, to all replicas at once, beside other work;
- GPUs that trainer and generator share: they take turns, so that the schedule is that of lag 0 whatever the lag is; the
  moments leave for the host with the publication and come back before the steps, after which the frozen model reads;
- filters drop the plan's share of the groups, drawn by the ordinal; a node that decodes baselines shares the slots;
- small work takes no time, unless it is given.

A replica's ranks do everything together, so that one stands for all. A group keeps its place on a generator until its
longest response is done. So that slots do not run dry meanwhile, a replica has room for more groups than fill its
slots: by the mean of the longest response of a group over the mean of all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from penstock.graph.ir import Graph
from penstock.runtime.plan.cluster import Cluster, Host
from penstock.runtime.plan.place import GROUPS_AHEAD, place
from penstock.runtime.plan.plan import Plan, Pool, Rank, Replica
from penstock.runtime.plan.roles import Roles
from penstock.runtime.plan.roles_of import roles_of
from penstock.runtime.plan.simulated_decoding import Decoding, Responses
from penstock.runtime.plan.simulated_plan import Costed, Reader
from penstock.runtime.plan.simulated_slots import Filling, filling
from penstock.runtime.plan.training import Trainer
from penstock.runtime.schedule.durations import Duration, Durations
from penstock.runtime.schedule.simulation import Simulation
from penstock.runtime.schedule.simulator import simulate
from penstock.runtime.schedule.tables import Rules, compile_tables
from penstock.runtime.schedule.verdicts import Verdicts

ONE = Cluster(hosts=(Host(name="local", cores=1),))


@dataclass(frozen=True)
class Scene:
    """A program, a plan for it, and how long everything takes. `seed` draws the lengths of responses (None: the
    planner's in each batch). `given` are seconds of nodes that the cost model has none for."""

    graph: Graph
    plan: Costed
    seed: int | None = 0
    given: Mapping[str, Duration] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """Rows that all replicas decode at once."""
        return self.plan.generator.slots * self.plan.replicas

    @cached_property
    def roles(self) -> Roles:
        return roles_of(self.graph)

    @cached_property
    def responses(self) -> Responses:
        roles = self.roles
        return Responses(self.plan.work, self.seed, {}, roles.turns, roles.filters, self.verdicts)

    @cached_property
    def verdicts(self) -> Verdicts:
        """Each of several filters drops the same share of what it sees."""
        filters = self.roles.filters
        dropped = 1 - self.plan.work.kept ** (1 / max(1, len(filters)))
        return Verdicts(dict.fromkeys(filters, dropped), seed=self.seed or 0)

    @cached_property
    def decoded(self) -> Mapping[str, tuple[int, int]]:
        """Of a group's rows, those of each node that decodes: the first, and the first one after them."""
        nodes = ((self.roles.cycle[2], self.plan.work.samples), *self.roles.baselines)
        ends = list(accumulate(samples for _, samples in nodes))
        return {node: (end - samples, end) for (node, samples), end in zip(nodes, ends, strict=True)}

    @property
    def lag(self) -> int:
        """What the schedule has of it."""
        return 0 if self.plan.shared else self.roles.lag

    def run(self, updates: int) -> "Simulated":
        graph = relagged(self.graph, self.roles, self.lag)
        tables = compile_tables(graph, self.places(graph))
        rules = Rules(self.plan.work.prompts, updates)
        return Simulated(self, simulate(tables, rules, self.durations(), verdicts=self.verdicts))

    def effect_of_lag(self, updates: int, lags: range = range(5)) -> Iterator[tuple[int, Simulation]]:
        """Each lag, with a run of so many updates. The plan stays. A lag that is too small for how seldom weights are
        sent is left out."""
        beat = self.graph[self.roles.cycle[1]].every
        for lag in lags:
            if lag >= beat - 1:
                yield lag, self.at(lag).run(updates).result

    def at(self, lag: int) -> "Scene":
        """The same with another lag."""
        return replace(self, graph=relagged(self.graph, self.roles, lag))

    @property
    def in_flight(self) -> int:
        """Groups on a replica of the generator at once."""
        work = self.plan.work
        lengths = work.response_tokens.reshape(work.drawn, work.rows)
        stay = float(lengths.max(axis=1).mean() / lengths.mean())
        return ceil(self.plan.generator.slots / work.rows * stay) + GROUPS_AHEAD

    def places(self, graph: Graph) -> Plan:
        """One rank stands for a replica."""
        roles, base = self.roles, place([graph], ONE, generators=self.plan.replicas)
        groups = [(each.pools[0] if each.apart else roles.trainer, each.pools) for each in self.plan.readers]
        guests = {pool: host for host, pools in groups for pool in pools if pool != host}
        pools = []
        for pool in base.pools:
            capacity = self.in_flight * (1 + len(roles.baselines)) if pool.name == roles.generator else 1
            if pool.name == roles.environment:  # answers wait for nobody but their own group
                capacity = self.plan.work.prompts * (self.lag + 1)
            replicas = tuple(Replica(r.name, (Rank(),), capacity) for r in pool.replicas)
            here = [guest for guest, host in guests.items() if host == pool.name]
            more = [name for guest in here for name in base.pool_of(roles.nodes_of(guest)[0]).holds]
            if pool.name not in guests:
                pools.append(Pool(pool.name, (*pool.holds, *more), replicas))
        return Plan(tuple(pools))

    def durations(self) -> Durations:
        plan, roles = self.plan, self.roles
        nodes: dict[str, Duration] = {node.name: 0.0 for node in self.graph.nodes if node.fires}
        nodes |= self.given
        nodes |= dict.fromkeys(self.decoded, Decoding(plan.generator, self.responses, self.decoded))
        steps = nodes[roles.cycle[-1]] = self._steps(plan.trainer, plan.returns_s)
        nodes |= dict.fromkeys(roles.rereads, self._reads(plan.trainer, 1))
        nodes |= dict.fromkeys(roles.followers, plan.trainer.followed().seconds)
        if roles.turns > 1:
            answers = [name for name in roles.nodes_of(roles.environment) if name not in self.given]
            nodes |= dict.fromkeys(answers, plan.work.environment_s)
        beside = [self._beside(each) for each in plan.readers]
        if plan.shared and beside:
            nodes[roles.cycle[-1]] = lambda node, update: steps(node, update) + self._in_turns(beside, update)
        elif not plan.shared:
            for each in beside:
                groups = self._shared_out(each.reads)
                nodes |= {n: groups if self.graph[n].clock == "group" else each.reads for n in each.readers}
                nodes |= dict.fromkeys(each.learners, each.learns)
        return Durations(nodes, publish=plan.leaves_s, wire=plan.sync_s)

    def _steps(self, trainer: Trainer, more: float) -> Callable[[str, int], float]:
        """An update of the policy or of a critic, and so many seconds more."""
        work, kept = self.plan.work, dict[int, float]()

        def seconds(_node: str, update: int) -> float:
            if update not in kept:
                cost = trainer.update(self.responses.sequences(update), work.epochs, work.minibatches)
                kept[update] = cost.seconds + more
            return kept[update]

        return seconds

    def _beside(self, group: Reader) -> "_Beside":
        here = {node for pool in group.pools for node in self.roles.nodes_of(pool)}
        readers, learners = ([n for n in names if n in here] for names in (self.roles.readers, self.roles.learners))
        reads = self._reads(group.trainer, len(readers) / group.models.count)
        return _Beside(group.apart, readers, reads, learners, self._steps(group.trainer, 0.0))

    @staticmethod
    def _in_turns(beside: "Sequence[_Beside]", update: int) -> float:
        """Seconds of an update that the models beside the policy add where its GPUs decode, too: those on the same GPUs
        one after the other, those with GPUs of their own beside each other."""
        own, apart = 0.0, 0.0
        for each in beside:
            seconds = sum(each.reads(node, update) for node in each.readers)
            seconds += sum(each.learns(node, update) for node in each.learners)
            own, apart = (own, max(apart, seconds)) if each.apart else (own + seconds, apart)
        return own + apart

    def _reads(self, reader: Trainer, nodes: float) -> Callable[[str, int], float]:
        """A model's pass over a batch; so many nodes that read with it share it."""
        kept = dict[int, float]()

        def seconds(_node: str, update: int) -> float:
            if update not in kept:
                kept[update] = reader.logprobs(self.responses.sequences(update)).seconds / nodes
            return kept[update]

        return seconds

    def _shared_out(self, batch: Callable[[str, int], float]) -> Callable[[str, int], float]:
        """Seconds of a batch, by the tokens of each of its groups."""
        work = self.plan.work

        def seconds(node: str, ordinal: int) -> float:
            update = self.responses.update_of(ordinal)
            own = sum(self.responses.of(ordinal)[: work.samples]) + work.samples * work.prompt_tokens
            return batch(node, update) * own / float(self.responses.sequences(update).sum())

        return seconds


@dataclass(frozen=True)
class Simulated:
    """A schedule of a plan. Rates are of its steady updates (`Simulation.steady`), of all where there are none."""

    scene: Scene
    result: Simulation

    @cached_property
    def filling(self) -> Filling:
        """How full the generator's slots are."""
        spans = next(self.result.spans[node] for node in self.scene.decoded if node in self.result.spans)
        return filling(spans, self.scene.slots, self.scene.responses.drawn, self.result)

    @property
    def groups_per_s(self) -> float:
        return self.scene.plan.work.prompts / self.result.steady_s

    @cached_property
    def tokens_per_s(self) -> float:
        """Tokens of responses that updates learn from, each once."""
        first, last = self.result.steady or (-1, len(self.result.ends) - 1)
        tokens = sum(int(self.scene.responses.fresh(update).sum()) for update in range(first + 1, last + 1))
        return tokens / (last - first) / self.result.steady_s

    def _repr_html_(self) -> str:
        """The schedule as a picture, for notebooks."""
        plan = self.scene.plan
        what = f"{self.scene.graph.name}, {plan.work.shape.name}, {plan.gpus} GPUs"
        what = f"{what}: {self.result.steady_s:.4g} s per update"
        return f"<p>{escape(what)}</p>{self.result._repr_html_()}"


def relagged(graph: Graph, roles: Roles, lag: int) -> Graph:
    """A graph whose generator's weights may be `lag` updates old."""
    nodes = tuple(replace(node, lag=lag) if node.name == roles.cycle[1] else node for node in graph.nodes)
    return graph.replace(nodes=nodes)


class _Beside(NamedTuple):
    """Nodes of models that share GPUs, with their seconds."""

    apart: bool
    readers: Sequence[str]
    reads: Callable[[str, int], float]
    learners: Sequence[str]
    learns: Callable[[str, int], float]
