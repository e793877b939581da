"""A plan on the virtual clock: the real scheduler, with the cost model's seconds for each firing. Pure.

- generating: row by row, with sampled lengths (`simulated_decoding`);
- an update: the steps on the sequences of its own batch;
- a frozen model's pass: that of its batch; where it takes groups one by one, each group's share of it by tokens;
- a sync: the wire's seconds, to all replicas at once, beside other work;
- GPUs that trainer and generator share: they take turns, so that the schedule is that of lag 0 whatever the lag is; the
  moments leave for the host with the publication and come back before the steps, after which the frozen model reads;
- small work takes no time, unless it is given.

A replica's ranks do everything together, so that one stands for all. A group keeps its place on a generator until its
longest response is done. So that slots do not run dry meanwhile, a replica has room for more groups than fill its
slots: by the mean of the longest response of a group over the mean of all.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from math import ceil

from penstock.graph.ir import Graph
from penstock.runtime.plan.cluster import Cluster, Host
from penstock.runtime.plan.place import GROUPS_AHEAD, place
from penstock.runtime.plan.plan import Plan, Pool, Rank, Replica
from penstock.runtime.plan.roles import Roles, roles_of
from penstock.runtime.plan.simulated_decoding import Decoding, Responses
from penstock.runtime.plan.simulated_plan import Costed
from penstock.runtime.plan.simulated_slots import Filling, filling
from penstock.runtime.plan.training import Trainer
from penstock.runtime.schedule.durations import Duration, Durations
from penstock.runtime.schedule.simulator import Simulation, simulate
from penstock.runtime.schedule.tables import Rules, compile_tables

ONE = Cluster(hosts=(Host(name="local", cores=1),))


@dataclass(frozen=True)
class Scene:
    """A program, a plan for it, and how long everything takes. `seed` draws the lengths of responses (None: the
    planner's in each batch); `given` are seconds of nodes that the cost model has none for."""

    graph: Graph
    plan: Costed
    seed: int | None = 0
    given: Mapping[str, Duration] = field(default_factory=dict)

    @cached_property
    def roles(self) -> Roles:
        return roles_of(self.graph)

    @cached_property
    def responses(self) -> Responses:
        return Responses(self.plan.work, self.seed)

    @property
    def lag(self) -> int:
        """What the schedule has of it."""
        return 0 if self.plan.shared else self.roles.lag

    def at(self, lag: int) -> "Scene":
        """The same with another lag."""
        return replace(self, graph=relagged(self.graph, self.roles, lag))

    def run(self, updates: int) -> "Simulated":
        graph = relagged(self.graph, self.roles, self.lag)
        tables = compile_tables(graph, self.places(graph))
        return Simulated(self, simulate(tables, Rules(self.plan.work.prompts, updates), self.durations()))

    def effect_of_lag(self, updates: int, lags: range = range(5)) -> Iterator[tuple[int, float]]:
        """Each lag, with the seconds per update that it has in a run of so many updates. The plan stays. A lag that is
        too small for how seldom weights are sent is left out."""
        beat = self.graph[self.roles.cycle[1]].every
        for lag in lags:
            if lag >= beat - 1:
                yield lag, self.at(lag).run(updates).result.steady_s

    @property
    def in_flight(self) -> int:
        """Groups on a replica of the generator at once."""
        lengths = self.plan.work.response_tokens.reshape(self.plan.work.prompts, self.plan.work.samples)
        stay = float(lengths.max(axis=1).mean() / lengths.mean())
        return ceil(self.plan.generator.slots / self.plan.work.samples * stay) + GROUPS_AHEAD

    def places(self, graph: Graph) -> Plan:
        """One rank for each replica."""
        roles, base = self.roles, place([graph], ONE, generators=self.plan.replicas)
        beside = roles.reader if roles.reader and not self.plan.reads_apart else ""
        pools = []
        for pool in base.pools:
            capacity = self.in_flight if pool.name == roles.generator else 1
            replicas = tuple(Replica(r.name, (Rank(),), capacity) for r in pool.replicas)
            more = base.pool_of(roles.nodes_of(beside)[0]).holds if beside and pool.name == roles.trainer else ()
            if pool.name != beside:
                pools.append(Pool(pool.name, (*pool.holds, *more), replicas))
        return Plan(tuple(pools))

    def durations(self) -> Durations:
        plan, roles = self.plan, self.roles
        nodes: dict[str, Duration] = {node.name: 0.0 for node in self.graph.nodes if node.fires}
        nodes |= self.given
        nodes[roles.cycle[2]] = Decoding(plan.generator, self.responses)
        readers = roles.cycle[3:-1]
        steps = nodes[roles.cycle[-1]] = self._steps()
        if plan.reader is not None:
            reads = self._reads(plan.reader, len(readers))
            if plan.shared:
                nodes[roles.cycle[-1]] = lambda node, update: steps(node, update) + reads(node, update) * len(readers)
            else:
                groups, batches = self._shared_out(reads), reads
                nodes |= {name: groups if self.graph[name].clock == "group" else batches for name in readers}
        return Durations(nodes, publish=plan.leaves_s, wire=plan.sync_s)

    def _steps(self) -> Callable[[str, int], float]:
        work, trainer, kept = self.plan.work, self.plan.trainer, dict[int, float]()

        def seconds(_node: str, update: int) -> float:
            if update not in kept:
                cost = trainer.update(self.responses.sequences(update), work.epochs, work.minibatches)
                kept[update] = cost.seconds + self.plan.returns_s
            return kept[update]

        return seconds

    def _reads(self, reader: Trainer, nodes: int) -> Callable[[str, int], float]:
        """A frozen model's pass over a batch; nodes that read with it share it."""
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
            update = ordinal // work.prompts
            own = sum(self.responses.of(ordinal)) + work.samples * work.prompt_tokens
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
        plan = self.scene.plan
        spans = self.result.spans[self.scene.roles.cycle[2]]
        return filling(spans, plan.generator.slots * plan.replicas, plan.work.prompts, self.result)

    @property
    def groups_per_s(self) -> float:
        return self.scene.plan.work.prompts / self.result.steady_s

    @cached_property
    def tokens_per_s(self) -> float:
        """Tokens of responses."""
        first, last = self.result.steady or (-1, len(self.result.ends) - 1)
        tokens = sum(int(self.scene.responses.batch(update).sum()) for update in range(first + 1, last + 1))
        return tokens / (last - first) / self.result.steady_s

    def _repr_html_(self) -> str:
        """The schedule as a picture, for notebooks."""
        plan = self.scene.plan
        what = f"{plan.program}, {plan.work.shape.name}, {plan.gpus} GPUs: {self.result.steady_s:.4g} s per update"
        return f"<p>{escape(what)}</p>{self.result._repr_html_()}"


def relagged(graph: Graph, roles: Roles, lag: int) -> Graph:
    """A graph whose generator's weights may be `lag` updates old."""
    nodes = tuple(replace(node, lag=lag) if node.name == roles.cycle[1] else node for node in graph.nodes)
    return graph.replace(nodes=nodes)
