"""Compile the graph and the plan into lookup tables for the scheduler: steps, channels, readers. Pure, made once.

`Tables` also checks that the graph can run as the plan places it, and `check_rules` that the graph allows a run's
rules. The errors are ValueErrors, as those of `check` are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from math import gcd
from typing import Literal

from penstock.graph.check import starving
from penstock.graph.errors import GraphError
from penstock.graph.ir import Graph, Node, Ref
from penstock.runtime.cluster.placement import Plan, Pool, Replica, why_no_turns


def _readers_of(nodes: Sequence[Node], name: str) -> list[Node]:
    """The nodes that read an output, not counting reads of the turn before."""
    return [n for n in nodes if any(i.ref.node == name and not i.back for i in n.inputs)]


# The (channel, lag) that each consumer of a broadcast reads.
Edges = dict[str, list[tuple[str, int]]]


@dataclass(frozen=True)
class Rules:
    """A run's numbers. Updates `start` to `end` - 1 run. Each takes `batch` fresh prompt groups.

    `versions="pinned"`: groups of update u use exactly version max(0, u - lag), whatever the timing.
    `order="strict"`: update u takes the next groups in ordinal order. `order="ready"`: it takes finished groups, as
    long as all others can still be taken in time (`Ledger.take_ready`).
    A per-group firing without state that fails is tried again `retries` times. Then `on_failure` stops the run, or
    gives the group up and takes another ("replace"). Any other firing that fails stops the run.
    drops: the run is stopped when filters drop drops * batch * (1 + lag) groups between two updates: 1 + lag updates
    are under way at once. failures: likewise for failed per-group firings, each try counted; the limit is at least
    retries + 1, the tries of one group.
    lost_replica: the loss of a replica stops the run, or its groups begin again on others of its pool ("replace").
    """

    batch: int
    end: int
    start: int = 0
    versions: Literal["free", "pinned"] = "free"
    order: Literal["strict", "ready"] = "strict"
    retries: int = 0
    on_failure: Literal["stop", "replace"] = "stop"
    lost_replica: Literal["stop", "replace"] = "stop"
    drops: int = 16
    failures: int = 4

    def __post_init__(self) -> None:
        limits = {"batch": "prompt group", "drops": "batch that filters may drop", "failures": "batch that may fail"}
        for name, what in limits.items():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: given {getattr(self, name)}, needed at least 1 {what} per update")
        if self.end < self.start:
            raise ValueError(f"updates: given {self.end}, but {self.start} are done already")
        if self.versions == "pinned" and self.on_failure == "replace":
            needed = "--versions free: later groups move to earlier updates, whose pinned versions are gone"
            raise ValueError(f"--on-failure replace: given --versions pinned; needed {needed}")
        if self.versions == "pinned" and self.order == "ready":
            needed = "--versions free: timing chooses the groups of an update"
            raise ValueError(f"--order ready: given --versions pinned; needed {needed}")


@dataclass(frozen=True, slots=True)
class Channel:
    """The path of one carried value's weights to one pool. `node` is the broadcast that publishes them.

    `every`: only versions that are multiples of it are published. `precision`: the format in which the weights are sent
    and read, "" if it is their own.
    """

    name: str
    carried: str
    source: Replica
    node: str
    pool: str
    replicas: tuple[Replica, ...]
    every: int = 1
    precision: str = ""

    def replica(self, name: str) -> Replica:
        """The source or the receiver of this name."""
        return next(r for r in (self.source, *self.replicas) if r.name == name)


@dataclass(frozen=True, slots=True)
class NodeStep:
    """A node or a source, compiled.

    groups: the per-group values that it reads. waits: the per-group values that a firing waits for; before two steps
    take turns, the inputs of both must be there. updates: the per-update values of the same update that it reads.
    carried: changing carried values that it reads in place. after: the readers of the values that it changes in place
    or replaces.
    weights: (channel, lag) of the lagged edges that it reads. fixed: the channels that it reads of values that never
    change. readers: the steps that read its output.
    publishes: the channels of the carried values that it changes. private: its pool runs only per-group steps and sends
    no weights.
    every: it fires at each `every`th update. accumulate: it fires in parts, each on so many groups of the batch; 0:
    once on all of them, also where it takes turns with the generator on the same GPUs. filters: it may drop its group.
    delays: (carried value, lag) that it reads delayed. off_path: it is off the critical path: it reads only weights and
    no step reads it, so later updates do not wait for it.
    turns: the most turns of a group in a bounded cycle, 0 if the step is in none. partner: the other step of the cycle.
    answers: this step decides whether there is another turn. recalls: it reads its own output of the turn before.
    where: "file:line" of its call.
    """

    name: str
    pool: str
    per_update: bool
    source: bool
    stateful: bool
    makes: tuple[str, ...]
    groups: tuple[str, ...]
    waits: tuple[str, ...]
    updates: tuple[str, ...]
    carried: tuple[str, ...]
    after: tuple[str, ...]
    weights: tuple[tuple[str, int], ...]
    fixed: tuple[str, ...]
    readers: tuple[str, ...]
    publishes: tuple[str, ...]
    private: bool
    every: int
    accumulate: int
    off_path: bool
    filters: bool
    delays: tuple[tuple[str, int], ...]
    turns: int
    partner: str
    answers: bool
    recalls: bool
    where: str

    def due(self, update: int) -> int:
        """The first update from `update` on at which a per-update step fires."""
        return update + -(update + 1) % self.every


class Tables:
    """Lookup tables of the scheduler, compiled once: steps and channels by name, and by what asks for them.

    group_steps, update_steps, sends: for each pool the per-group steps (latest first), the per-update steps (those off
    the critical path first), and the channels that it publishes. critical: the per-update steps on the critical path.
    begins: the per-group steps that may begin once a step's output is there. stirs: the per-group steps that may start
    when a per-group step is done. weight_readers: the steps that read a channel, each with its lag.
    lagged: whether some step reads changing weights, at most `max_lag` updates old. num_weighted: how many per-group
    steps do.
    makers: the step that makes the next value of each changing carried value. first_takers: the first step of an
    update that changes it in place, which is another one where updates follow each other.
    piece: how many groups an update takes at once; 0: its whole batch.

    Raises ValueError for what cannot work, as `check` does.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.makers = {c.name: maker for c in graph.carried if (maker := graph.producer(c.name))}
        takers = graph.takers()
        self.first_takers = {carried: takers.get(Ref(carried), (maker,))[0] for carried, maker in self.makers.items()}
        _check_plan(graph, plan, self.makers)
        self.replicas = {r.name: r for r in plan.replicas}
        self.pool_of = {r.name: p.name for p in plan.pools for r in p.replicas}
        self.by_pool = {p.name: p.replicas for p in plan.pools}
        self.channels, edges = _channels(graph, plan)
        self.steps = _steps(graph, plan, self.makers, takers, self.channels, edges)
        steps = self.steps.values()
        try:
            TopologicalSorter({s.name: {*s.updates, *s.after} for s in steps if s.per_update}).prepare()
        except CycleError as error:
            names = " -> ".join(error.args[1])
            raise ValueError(
                f"graph: {names} wait for each other: each reads a carried value that the next one donates, or its "
                "output; needed an order in which every carried value is read before the node that makes its next value"
            ) from None
        # Latest first: steps nearer to the update get free capacity first. Off the critical path first: such a step
        # keeps an old version from being released.
        per_group = [s for s in reversed(steps) if not s.per_update]
        per_update = sorted((s for s in steps if s.per_update), key=lambda s: not s.off_path)
        self.group_steps = {pool: tuple(s for s in per_group if s.pool == pool) for pool in self.by_pool}
        self.update_steps = {pool: tuple(s for s in per_update if s.pool == pool) for pool in self.by_pool}
        self.sends = {
            pool: tuple(c for c in self.channels.values() if c.source in replicas)
            for pool, replicas in self.by_pool.items()
        }
        self.critical = tuple(s.name for s in per_update if not s.off_path)
        self.begins: dict[str, tuple[NodeStep, ...]] = {}
        self.stirs: dict[str, tuple[NodeStep, ...]] = {}
        for step in steps:
            # Turns begin with the step that speaks, which also waits for the inputs of the step that answers.
            readers = [self.steps[name] for name in step.readers]
            begun = dict.fromkeys(r.partner if r.answers else r.name for r in readers if not r.per_update)
            self.begins[step.name] = tuple(self.steps[name] for name in begun)
            pools = {step.pool, *(reader.pool for reader in self.begins[step.name])}
            self.stirs[step.name] = tuple(s for s in per_group if s.pool in pools)
        self.sources = tuple(s for s in steps if s.source)
        self.weight_readers = {
            name: tuple((s, lag) for s in steps for channel, lag in s.weights if channel == name)
            for name in self.channels
        }
        lags = [lag for s in steps for _, lag in s.weights]
        self.lagged, self.max_lag = bool(lags), max(lags, default=0)
        self.num_group_steps = len(per_group)
        self.num_weighted = sum(bool(s.weights) for s in per_group)
        self.takes_groups = any(s.groups for s in per_update)
        # For each pool the reason why the run cannot survive the loss of its replicas; "" if it can.
        self.fixed_pools = {pool.name: _why_fixed(graph, pool, self.steps) for pool in plan.pools}
        self.piece = gcd(*(s.accumulate for s in per_update))


def _why_fixed(graph: Graph, pool: Pool, steps: Mapping[str, NodeStep]) -> str:
    """Why the replicas of a pool cannot be lost and replaced; "" if they can. What replaceable replicas hold can be
    made again from a group's sources and from weights that are sent to them."""
    own = [step for step in steps.values() if step.pool == pool.name and not step.source]
    if carried := [c.name for c in graph.carried if c.name in pool.holds]:
        return f"it holds {', '.join(carried)}"
    if found := [step.name for step in own if step.per_update]:
        return f"{', '.join(found)} fires per update"
    if found := [step.name for step in own if step.stateful]:
        return f"{', '.join(found)} has a state"
    return ""


def channel_name(carried: str, pool: str) -> str:
    return f"{carried}>{pool}"


def _check_plan(graph: Graph, plan: Plan, makers: Mapping[str, str]) -> None:
    """Require that every node is in a pool, and a carried value in the pool of its readers. `makers`: the node that
    makes the next value of each carried value."""
    held = {name for pool in plan.pools for name in pool.holds}
    needed = [a.name for a in graph.arguments] + [n.name for n in graph.nodes if n.fires]
    if missing := [name for name in needed if name not in held]:
        raise ValueError(f"plan: no pool holds {', '.join(missing)}; the pools hold {', '.join(sorted(held))}")
    for carried in (c.name for c in graph.carried):
        home = plan.pool_of(carried)
        # Two replicas would make two next values, and nothing would say which is the policy.
        if carried in makers and len(home.replicas) != 1:
            raise ValueError(
                f"plan: pool {home.name!r} holds the carried value {carried!r} and has {len(home.replicas)} "
                "replicas; needed 1, since an update makes one next value"
            )
        for node in _readers_of(graph.nodes, carried):
            if node.fires and node.name not in home.holds:
                raise ValueError(
                    f"plan: {node.name} reads the carried value {carried!r} and is in pool "
                    f"{plan.pool_of(node.name).name!r}; needed {home.name!r}, which holds it"
                )


def _channels(graph: Graph, plan: Plan) -> tuple[dict[str, Channel], Edges]:
    """The channels by name, and for each consumer of a broadcast its edges."""
    channels: dict[str, Channel] = {}
    edges: Edges = {}
    for node in graph.nodes:
        if node.construct != "broadcast":
            continue
        if fault := starving(node):
            raise GraphError(fault)
        carried = node.inputs[0].ref.node
        home = plan.pool_of(carried).replicas[0]
        for reader in _readers_of(graph.nodes, node.name):
            pool = plan.pool_of(reader.name)
            name = channel_name(carried, pool.name)
            # Broadcasts of one value to one pool share a channel, which sends every version that one of them needs.
            known = channels.get(name)
            every, publisher = (node.every, node.name) if known is None else (gcd(known.every, node.every), known.node)
            # `check` requires that all of them have the same precision.
            channels[name] = Channel(name, carried, home, publisher, pool.name, pool.replicas, every, node.precision)
            edges.setdefault(reader.name, []).append((name, node.lag or 0))
    return channels, edges


def _steps(
    graph: Graph,
    plan: Plan,
    makers: Mapping[str, str],
    takers: Mapping[Ref, Sequence[str]],
    channels: Mapping[str, Channel],
    edges: Edges,
) -> dict[str, NodeStep]:
    sources = [Node(s.name, "source", (), ()) for s in graph.sources]
    nodes = [*sources, *(n for n in graph.nodes if n.fires)]
    per_update = {n.name: n.clock == "update" for n in nodes}
    pools = {n.name: plan.pool_of(n.name).name for n in nodes}
    # Pools that also update or publish: the end of any step there may let an update or a publication begin.
    shared = {pools[name] for name, slow in per_update.items() if slow}
    shared |= {plan.pool_of(c.carried).name for c in channels.values()}
    delays = {n.name for n in graph.nodes if n.construct == "delay"}
    partners = {n.name: _partner(nodes, n) for n in nodes}
    # Where trainer and generator take turns on the same GPUs, an update is not divided into parts: a part would occupy
    # the GPUs that generate the rest of the batch.
    turns = any(n.accumulate for n in nodes) and not why_no_turns(graph, plan)
    # What a node reads of its own update or group, except the output of its partner in a cycle.
    own = {
        n.name: list(dict.fromkeys(i.ref.node for i in n.inputs if not i.back and i.ref.node != partners[n.name]))
        for n in nodes
    }
    steps: dict[str, NodeStep] = {}
    for node in nodes:
        partner, reads = partners[node.name], own[node.name]
        begun_by = dict.fromkeys((*reads, *(own[partner] if partner and not node.answers else ())))
        changing = tuple(r for r in reads if r in makers)
        made = tuple(c for c, maker in makers.items() if maker == node.name)
        taken = {*map(Ref, made), *(ref for ref, names in takers.items() if node.name in names)}
        lagged = dict.fromkeys(edges.get(node.name, []))
        readers = tuple(n.name for n in _readers_of(nodes, node.name) if n.name != partner)
        # Such a step only measures: it makes no next value, and no other node reads it.
        plain = not (made or readers or changing or any(r in per_update for r in reads))
        steps[node.name] = NodeStep(
            name=node.name,
            pool=pools[node.name],
            per_update=per_update[node.name],
            source=node in sources,
            stateful=node.stateful,
            makes=made,
            groups=tuple(r for r in reads if per_update.get(r) is False),
            waits=tuple(r for r in begun_by if per_update.get(r) is False),
            updates=tuple(r for r in reads if per_update.get(r)),
            carried=changing,
            after=tuple(
                n.name for n in nodes if n is not node and any(i.ref in taken and not i.back for i in n.inputs)
            ),
            weights=tuple(e for e in lagged if channels[e[0]].carried in makers),
            fixed=tuple(channel for channel, _ in lagged if channels[channel].carried not in makers),
            readers=readers,
            publishes=tuple(c.name for c in channels.values() if Ref(c.carried) in taken),
            private=pools[node.name] not in shared,
            every=node.every,
            accumulate=0 if turns else node.accumulate,
            off_path=per_update[node.name] and plain,
            filters=node.construct == "keep",
            delays=tuple((graph[r].inputs[0].ref.node, graph[r].lag or 0) for r in reads if r in delays),
            turns=node.turns or 0,
            partner=partner,
            answers=node.answers,
            recalls=node.answers and any(i.back for i in node.inputs),
            where=node.where,
        )
    return steps


def _partner(nodes: Sequence[Node], node: Node) -> str:
    """The other node of a bounded cycle; "" for a node in no cycle."""
    if node.answers:
        others = (n for n in nodes if n.name != node.name)
        return next(n.name for n in others if any(i.back and i.ref.node == node.name for i in n.inputs))
    return next((i.ref.node for i in node.inputs if i.back and i.ref.node != node.name), "")


# The parts of a graph that an option does not allow, by name, and what is needed instead.
Lack = tuple[list[str], str]


def check_rules(tables: Tables, rules: Rules) -> None:
    """Raises ValueError for rules that the graph does not allow."""
    for step in tables.steps.values():
        if step.accumulate and rules.batch % step.accumulate:
            where = f" (written at {step.where})" if step.where else ""
            parts = f"given parts of {step.accumulate} groups of a batch of {rules.batch}"
            raise ValueError(f"{step.name}: accumulate{where}: {parts}; needed a number that divides {rules.batch}")
    pinned, replaces = rules.versions == "pinned", rules.lost_replica == "replace"
    for asked, option, lacks in (
        (rules.on_failure == "replace", "--on-failure replace", _lacks_of_replacing),
        (pinned, "--versions pinned", _lacks_of_pinning),
        (replaces, "--lost-replica replace", _lacks_of_losing),
        (replaces and pinned, "--lost-replica replace with --versions pinned", _lacks_of_losing_pinned),
        (rules.order == "ready", "--order ready", _lacks_of_overtaking),
    ):
        for given, needed in lacks(tables) if asked else ():
            if given:
                raise ValueError(f"{option}: given {', '.join(given)}; needed {needed}")


def _lacks_of_replacing(tables: Tables) -> Iterator[Lack]:
    yield (
        _delayed(tables),
        "no delay, which is exact, while a replaced group moves those after it to earlier updates than the ones "
        "that they have read it for; use --on-failure stop, with --retries",
    )


def _lacks_of_pinning(tables: Tables) -> Iterator[Lack]:
    """A replica keeps one version live, so all pinned groups of an update must need the same version. A resumed run
    makes no version older than its checkpoint, so a checkpoint waits for the groups that need one. Such a group must
    not in turn wait for an update through a delay."""
    steps, lags = tables.steps.values(), _lags(tables)
    yield (
        [f"the filter {s.name}" for s in steps if s.filters] + _thinned(tables),
        "none, since which groups an update takes, or which versions exist, would not be known beforehand; use "
        "--versions free",
    )
    late = {(s.name, lag) for readers in tables.weight_readers.values() for s, lag in readers if s.per_update and lag}
    yield (
        [f"{name} lag={lag}" for name, lag in sorted({*lags, *late})] if late or _unequal(lags) else [],
        "one lag for all per-group nodes that read weights, and lag=0 for per-update ones; use "
        "--versions free or make the lags equal",
    )
    yield (
        [
            f"{s.name}, which reads {carried!r} with a delay of {lag} before weights are read with lag={tables.max_lag}"
            for s in steps
            for carried, lag in s.delays
            if lag < tables.max_lag and _reads_weights(tables, s)
        ],
        "a delay of at least the lag, or --versions free",
    )


def _lacks_of_losing(tables: Tables) -> Iterator[Lack]:
    steps = tables.steps.values()
    yield (
        [f"{step.name}, which has a state" for step in steps if step.stateful and not step.per_update]
        + [f"{step.name} with accumulate=…" for step in steps if step.accumulate],
        "groups that can begin again: none that a state has seen, nor a part of an update; use "
        "--lost-replica stop, and resume",
    )
    fixed = tables.fixed_pools
    yield (
        [f"pool {pool} ({why})" for pool, why in fixed.items()] if all(fixed.values()) else [],
        "a pool of generators or scorers alone, whose nodes fire per group and have no state; use "
        "--lost-replica stop, and resume",
    )


def _lacks_of_losing_pinned(tables: Tables) -> Iterator[Lack]:
    yield (
        [
            f"{step.name} in pool {step.pool} ({tables.fixed_pools[step.pool]})"
            for step in tables.steps.values()
            if step.weights and not step.per_update and tables.fixed_pools[step.pool]
        ],
        "per-group nodes that read weights in pools of generators and scorers alone, which can go back to an older "
        "version; use --versions free",
    )


def _lacks_of_overtaking(tables: Tables) -> Iterator[Lack]:
    lags = _lags(tables)
    unequal = [f"{name} lag={lag}" for name, lag in lags] if _unequal(lags) else []
    yield (
        _delayed(tables) + _thinned(tables) + unequal,
        "no delay, which is exact, every version sent, and one lag for all per-group nodes that read weights: a "
        "group that is overtaken must find new enough ones; use --order strict",
    )


def _delayed(tables: Tables) -> list[str]:
    return [f"{s.name}, which reads {carried!r} delayed" for s in tables.steps.values() for carried, _ in s.delays]


def _thinned(tables: Tables) -> list[str]:
    """Broadcasts that do not send every version."""
    return [f"{c.node} with every=…" for c in tables.channels.values() if c.every > 1]


def _lags(tables: Tables) -> list[tuple[str, int]]:
    """The lags with which per-group nodes read weights, each with its node."""
    return sorted({(s.name, lag) for read in tables.weight_readers.values() for s, lag in read if not s.per_update})


def _unequal(lags: Sequence[tuple[str, int]]) -> bool:
    return len({lag for _, lag in lags}) > 1


def _reads_weights(tables: Tables, step: NodeStep) -> bool:
    """True if a per-group step, or a step that depends on it, reads weights that change."""
    after = [*step.readers, *([step.partner] if step.turns and not step.answers else [])]
    per_group = [tables.steps[name] for name in after if not tables.steps[name].per_update]
    return bool(step.weights) or any(_reads_weights(tables, later) for later in per_group)
