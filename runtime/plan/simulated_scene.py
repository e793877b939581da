"""What a plan's schedule needs of any plan, on GPUs or on a machine's cores, and the schedule itself. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from itertools import accumulate

from penstock.graph.ir import Graph
from penstock.runtime.plan.plan import Plan
from penstock.runtime.plan.roles import Roles
from penstock.runtime.plan.roles_of import roles_of
from penstock.runtime.plan.simulated_decoding import Responses
from penstock.runtime.plan.simulated_slots import Filling, filling
from penstock.runtime.plan.workload import Workload
from penstock.runtime.schedule.durations import Durations
from penstock.runtime.schedule.simulation import Simulation
from penstock.runtime.schedule.simulator import simulate
from penstock.runtime.schedule.tables import Rules, compile_tables
from penstock.runtime.schedule.verdicts import Verdicts


@dataclass(frozen=True)
class Outline:
    """What is said of a plan. `machines` in words; `gpus` is 0 without any; `slots` are the rows of all replicas that
    are decoded at once; `period_s`, `lag` and `bound` are the planner's; `shared`: trainer and generator have the same
    GPUs and take turns, whatever the lag is."""

    work: Workload
    machines: str
    gpus: int
    slots: int
    period_s: float
    lag: int
    bound: str
    shared: bool = False


class Schedulable(ABC):
    """A program, a plan for it, and how long everything takes. `seed` draws the lengths of responses (None: the
    planner's in each batch)."""

    graph: Graph
    seed: int | None

    @property
    @abstractmethod
    def outline(self) -> Outline: ...

    @abstractmethod
    def at(self, lag: int) -> "Schedulable":
        """The same with another lag."""

    @abstractmethod
    def places(self, graph: Graph) -> Plan:
        """The replicas, and how many firings each has in work at once."""

    @abstractmethod
    def durations(self) -> Durations:
        """Of one run."""

    @cached_property
    def roles(self) -> Roles:
        return roles_of(self.graph)

    @cached_property
    def responses(self) -> Responses:
        roles = self.roles
        return Responses(self.outline.work, self.seed, {}, roles.turns, roles.filters, self.verdicts)

    @cached_property
    def verdicts(self) -> Verdicts:
        """Each of several filters drops the same share of what it sees."""
        filters = self.roles.filters
        dropped = 1 - self.outline.work.kept ** (1 / max(1, len(filters)))
        return Verdicts(dict.fromkeys(filters, dropped), seed=self.seed or 0)

    @cached_property
    def decoded(self) -> Mapping[str, tuple[int, int]]:
        """Of a group's rows, those of each node that decodes: the first, and the first one after them."""
        nodes = ((self.roles.cycle[2], self.outline.work.samples), *self.roles.baselines)
        ends = list(accumulate(samples for _, samples in nodes))
        return {node: (end - samples, end) for (node, samples), end in zip(nodes, ends, strict=True)}

    @property
    def lag(self) -> int:
        """What the schedule has of it."""
        return 0 if self.outline.shared else self.roles.lag

    def run(self, updates: int) -> "Simulated":
        graph = relagged(self.graph, self.roles, self.lag)
        tables = compile_tables(graph, self.places(graph))
        rules = Rules(self.outline.work.prompts, updates)
        return Simulated(self, simulate(tables, rules, self.durations(), verdicts=self.verdicts))

    def effect_of_lag(self, updates: int, lags: range = range(5)) -> Iterator[tuple[int, Simulation]]:
        """Each lag, with a run of so many updates. The plan stays. A lag that is too small for how seldom weights are
        sent is left out."""
        beat = self.graph[self.roles.cycle[1]].every
        for lag in lags:
            if lag >= beat - 1:
                yield lag, self.at(lag).run(updates).result


@dataclass(frozen=True)
class Simulated:
    """A schedule of a plan. Rates are of its steady updates (`Simulation.steady`), of all where there are none."""

    scene: Schedulable
    result: Simulation

    @cached_property
    def filling(self) -> Filling:
        """How full the generator's slots are."""
        spans = next(self.result.spans[node] for node in self.scene.decoded if node in self.result.spans)
        return filling(spans, self.scene.outline.slots, self.scene.responses.drawn, self.result)

    @property
    def groups_per_s(self) -> float:
        return self.scene.outline.work.prompts / self.result.steady_s

    @cached_property
    def tokens_per_s(self) -> float:
        """Tokens of responses that updates learn from, each once."""
        first, last = self.result.steady or (-1, len(self.result.ends) - 1)
        tokens = sum(int(self.scene.responses.fresh(update).sum()) for update in range(first + 1, last + 1))
        return tokens / (last - first) / self.result.steady_s

    def _repr_html_(self) -> str:
        """The schedule as a picture, for notebooks."""
        plan = self.scene.outline
        what = (
            f"{self.scene.graph.name}, {plan.work.shape.name}, {plan.machines}: {self.result.steady_s:.4g} s per update"
        )
        return f"<p>{escape(what)}</p>{self.result._repr_html_()}"


def relagged(graph: Graph, roles: Roles, lag: int) -> Graph:
    """A graph whose generator's weights may be `lag` updates old."""
    nodes = tuple(replace(node, lag=lag) if node.name == roles.cycle[1] else node for node in graph.nodes)
    return graph.replace(nodes=nodes)
