"""The graph and the plan compiled into what the scheduler looks up: steps, channels, readers. Pure, made once."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from penstock.graph.ir import Graph, Node
from penstock.runtime.plan.plan import Plan, Replica


@dataclass(frozen=True, slots=True)
class Rules:
    """A run's numbers. Updates `start` to `end` - 1 run; each takes `batch` fresh prompt groups.

    `versions="pinned"`: groups of update u use exactly version max(0, u - lag), whatever the timing.
    A firing that fails is tried again `retries` times; then `on_failure` stops the run or gives its group up and
    takes another ("replace").
    """

    batch: int
    end: int
    start: int = 0
    versions: Literal["free", "pinned"] = "free"
    retries: int = 0
    on_failure: Literal["stop", "replace"] = "stop"

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch: given {self.batch}, needed at least 1 prompt group per update")
        if self.end < self.start:
            raise ValueError(f"updates: given {self.end}, but {self.start} are done already")
        if self.versions == "pinned" and self.on_failure == "replace":
            raise ValueError(
                'on_failure="replace" moves later groups to earlier updates, whose pinned versions are gone; '
                'use versions="free" with it'
            )


@dataclass(frozen=True, slots=True)
class Channel:
    """The way of one carried value's weights to one pool, and the publishing node of each broadcast on it."""

    name: str
    carried: str
    source: Replica
    node: str
    pool: str
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A node or a source, compiled. `place` is its order in the program.

    groups: per-group values it reads. updates: per-update values of the same update it reads.
    carried: carried values that change and that it reads as they are. after: readers of the value it donates.
    weights: (channel, lag) of the lagged edges it reads. fixed: channels it reads of values that never change.
    readers: the steps that read its output.
    publishes: the channels of the carried values that it makes. private: its pool runs nothing but per-group steps.
    """

    name: str
    place: int
    pool: str
    per_update: bool
    source: bool = False
    stateful: bool = False
    makes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    weights: tuple[tuple[str, int], ...] = ()
    fixed: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    publishes: tuple[str, ...] = ()
    private: bool = False


@dataclass(frozen=True)
class Tables:
    """Steps and channels by name, and by what asks for them.

    group_steps, update_steps, sends: what each pool runs per group (latest first), per update, and publishes.
    stirs: the per-group steps that may start when a per-group step is done. weight_readers: who reads a channel.
    lagged: some step reads weights that change, at most `max_lag` updates old.
    makers: the step that makes the next value of each carried value that changes.
    """

    steps: dict[str, Step]
    channels: dict[str, Channel]
    replicas: dict[str, Replica]
    pool_of: dict[str, str]
    by_pool: dict[str, tuple[Replica, ...]]
    group_steps: dict[str, tuple[Step, ...]]
    update_steps: dict[str, tuple[Step, ...]]
    sends: dict[str, tuple[Channel, ...]]
    stirs: dict[str, tuple[Step, ...]]
    sources: tuple[Step, ...]
    stateful: frozenset[str]
    weight_readers: dict[str, tuple[tuple[Step, int], ...]]
    makers: dict[str, str]
    lagged: bool
    max_lag: int
    num_group_steps: int
    takes_groups: bool


def compile_tables(graph: Graph, plan: Plan) -> Tables:
    """Look up once what the scheduler needs at each event. Raises ValueError for a plan that cannot work."""
    held = {name for pool in plan.pools for name in pool.holds}
    needed = [a.name for a in graph.arguments] + [n.name for n in graph.nodes if n.fires]
    if missing := [name for name in needed if name not in held]:
        raise ValueError(f"plan: no pool holds {', '.join(missing)}; the pools hold {', '.join(sorted(held))}")
    makers = {c.name: maker for c in graph.carried if (maker := graph.producer(c.name))}
    _check_places(graph, plan, makers)
    channels, edges = _channels(graph, plan)
    steps = _steps(graph, plan, makers, channels, edges)
    _check_order(steps)
    by_pool = {p.name: p.replicas for p in plan.pools}

    def select(pools: Collection[str], per_update: bool) -> tuple[Step, ...]:
        chosen = [s for s in steps.values() if s.pool in pools and s.per_update == per_update]
        return tuple(sorted(chosen, key=lambda s: s.place if per_update else -s.place))

    def stirred(step: Step) -> tuple[Step, ...]:
        return select({step.pool, *(steps[r].pool for r in step.readers)}, False)

    return Tables(
        steps=steps,
        channels=channels,
        replicas={r.name: r for r in plan.replicas},
        pool_of={r.name: p.name for p in plan.pools for r in p.replicas},
        by_pool=by_pool,
        group_steps={p: select({p}, False) for p in by_pool},
        update_steps={p: select({p}, True) for p in by_pool},
        sends={p: tuple(c for c in channels.values() if c.source in by_pool[p]) for p in by_pool},
        stirs={s.name: stirred(s) for s in steps.values() if not s.per_update},
        sources=tuple(s for s in steps.values() if s.source),
        stateful=frozenset(s.name for s in steps.values() if s.stateful),
        weight_readers={
            name: tuple((s, lag) for s in steps.values() for c, lag in s.weights if c == name) for name in channels
        },
        makers=makers,
        lagged=any(s.weights for s in steps.values()),
        max_lag=max((lag for s in steps.values() for _, lag in s.weights), default=0),
        num_group_steps=sum(not s.per_update for s in steps.values()),
        takes_groups=any(s.groups for s in steps.values() if s.per_update),
    )


def check_rules(tables: Tables, rules: Rules) -> None:
    """Raises ValueError for pinned versions that the graph's lags do not allow.

    A replica keeps one version live and a resumed run makes none older than its cut: so all per-group readers of
    weights need the same version for a group, and per-update readers the current one.
    """
    if rules.versions == "free":
        return
    lags = {(s.name, lag) for readers in tables.weight_readers.values() for s, lag in readers if not s.per_update}
    late = {(s.name, lag) for readers in tables.weight_readers.values() for s, lag in readers if s.per_update and lag}
    if len({lag for _, lag in lags}) > 1 or late:
        given = ", ".join(f"{name} lag={lag}" for name, lag in sorted(lags | late))
        raise ValueError(
            f'versions="pinned": given {given}; needed one lag for all per-group nodes that read weights, and lag=0 '
            'for per-update ones; use versions="free" or make the lags equal'
        )


def channel_name(carried: str, pool: str) -> str:
    return f"{carried}>{pool}"


def _channels(graph: Graph, plan: Plan) -> tuple[dict[str, Channel], dict[str, list[tuple[str, int]]]]:
    """The channels by name, and for each consumer of a broadcast its (channel, lag) edges."""
    channels: dict[str, Channel] = {}
    edges: dict[str, list[tuple[str, int]]] = {}
    for node in graph.nodes:
        if node.construct != "broadcast":
            continue
        carried = node.inputs[0].ref.node
        home = plan.pool_of(carried)
        for reader in _readers(graph.nodes, node.name):
            pool = plan.pool_of(reader.name)
            name = channel_name(carried, pool.name)
            channels.setdefault(name, Channel(name, carried, home.replicas[0], node.name, pool.name, pool.replicas))
            edges.setdefault(reader.name, []).append((name, node.lag or 0))
    return channels, edges


def _readers(nodes: Sequence[Node], name: str) -> list[Node]:
    return [n for n in nodes if any(i.ref.node == name for i in n.inputs)]


def _steps(
    graph: Graph,
    plan: Plan,
    makers: dict[str, str],
    channels: dict[str, Channel],
    edges: dict[str, list[tuple[str, int]]],
) -> dict[str, Step]:
    calls = [n for n in graph.nodes if n.fires]
    clocks = {n.name: n.clock for n in calls} | {s.name: "group" for s in graph.sources}
    steps: dict[str, Step] = {}
    shared = {plan.pool_of(n.name).name for n in calls if n.clock == "update"}
    shared |= {plan.pool_of(c.carried).name for c in channels.values()}
    for place, argument in enumerate(graph.sources):
        readers = tuple(n.name for n in _readers(calls, argument.name))
        pool = plan.pool_of(argument.name).name
        steps[argument.name] = Step(
            argument.name, place, pool, False, source=True, readers=readers, private=pool not in shared
        )
    for place, node in enumerate(calls, start=len(steps)):
        reads = tuple(dict.fromkeys(i.ref.node for i in node.inputs))
        changing = tuple(r for r in reads if r in makers)
        made = tuple(c for c, maker in makers.items() if maker == node.name)
        pool = plan.pool_of(node.name).name
        lagged = tuple(dict.fromkeys(edges.get(node.name, [])))
        others = [n.name for c in made for n in _readers(calls, c) if n.name != node.name]
        steps[node.name] = Step(
            name=node.name,
            place=place,
            pool=pool,
            per_update=node.clock == "update",
            stateful=node.stateful,
            makes=made,
            groups=tuple(r for r in reads if clocks.get(r) == "group"),
            updates=tuple(r for r in reads if clocks.get(r) == "update"),
            carried=changing,
            after=tuple(dict.fromkeys(others)),
            weights=tuple(e for e in lagged if channels[e[0]].carried in makers),
            fixed=tuple(channel for channel, _ in lagged if channels[channel].carried not in makers),
            readers=tuple(n.name for n in _readers(calls, node.name)),
            publishes=tuple(c.name for c in channels.values() if c.carried in made),
            private=pool not in shared,
        )
    return steps


def _check_places(graph: Graph, plan: Plan, makers: dict[str, str]) -> None:
    """A carried value is where its readers are, and an update makes one next value."""
    for carried in makers:
        home = plan.pool_of(carried)
        if len(home.replicas) != 1:
            raise ValueError(
                f"plan: pool {home.name!r} holds the carried value {carried!r} and has {len(home.replicas)} "
                "replicas; needed 1, since an update makes one next value"
            )
    for carried in (c.name for c in graph.carried):
        home = plan.pool_of(carried)
        for node in _readers(graph.nodes, carried):
            if node.fires and node.name not in home.holds:
                raise ValueError(
                    f"plan: {node.name} reads the carried value {carried!r} and is in pool "
                    f"{plan.pool_of(node.name).name!r}; needed {home.name!r}, which holds it"
                )


def _check_order(steps: dict[str, Step]) -> None:
    """Within an update, those who read a carried value come before the one that donates it."""
    waits = {s.name: {*s.updates, *s.after} for s in steps.values() if s.per_update}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        names = " -> ".join(error.args[1])
        raise ValueError(
            f"graph: {names} wait for each other: each reads a carried value that the next one donates, or its "
            "output; needed an order in which every carried value is read before the node that makes its next value"
        ) from None
