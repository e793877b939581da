"""A lower bound on a program's period, from its graph and the seconds of its nodes.

A graph with faults (see `check`) has none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.graph.errors import Fault, GraphError, nearest
from penstock.graph.ir import Graph


def feedback(graph: Graph) -> dict[str, dict[str, int]]:
    """The data flow closed over updates: for each argument and node the nodes that read its value, with the span.

    A span is a number of updates: 1 from the node that makes a carried value to that value, `lag` into a broadcast or
    a delay, otherwise 0.
    """
    names = [argument.name for argument in graph.arguments] + [node.name for node in graph.nodes]
    flow: dict[str, dict[str, int]] = {name: {} for name in names}
    makers = {c.name: maker for c in graph.carried if (maker := graph.producer(c.name))}
    takers = graph.takers()
    for node in graph.nodes:
        for item in node.inputs:
            # An input of the previous turn is no edge: two nodes that take turns would be a cycle.
            if not item.back:
                flow[item.ref.node][node.name] = 0
        if not node.fires:
            flow[node.inputs[0].ref.node][node.name] = node.lag or 0
            continue
        for item in node.inputs:
            # An update changes a carried value in place, so it waits for all other readers of the old value.
            for taker in (makers.get(item.ref.node, node.name), *takers.get(item.ref, ())):
                if taker != node.name:
                    flow[node.name][taker] = 0
    for carried, maker in makers.items():
        flow[maker][carried] = 1
    return flow


def cycles(flow: Mapping[str, Mapping[str, int]], starts: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Each cycle that goes through some of `starts` once, from the first of these."""
    before: dict[str, list[str]] = {name: [] for name in flow}
    for name, following in flow.items():
        for after in following:
            before[after].append(name)
    for number, start in enumerate(starts):
        # A path stays among nodes from which it can come back: on a branch that ends, paths may double at each node.
        back, found = {start}, [start]
        while found:
            more = {name for name in before[found.pop()] if name not in back and name not in starts[:number]}
            back |= more
            found += more
        paths: list[tuple[str, ...]] = [(start,)]
        while paths:
            path = paths.pop()
            for after in flow[path[-1]]:
                if after == start:
                    yield path
                elif after in back and after not in path:
                    paths.append((*path, after))


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule needs fewer than `seconds` per update in the long run, because of a `cycle` of nodes that spans
    `span` updates, or of the work of a `pool`."""

    seconds: float
    cycle: tuple[str, ...] = ()
    span: int = 1
    pool: str = ""

    @property
    def cause(self) -> str:
        if self.pool:
            return f"the work of pool {self.pool}"
        if not self.cycle:
            return "nothing takes time"
        updates = "1 update" if self.span == 1 else f"{self.span} updates"
        return f"the cycle {' → '.join((*self.cycle, self.cycle[0]))}, which spans {updates}"

    def __str__(self) -> str:
        return f"{self.seconds:.6g} s per update: {self.cause}"


def period_bound(
    graph: Graph,
    durations: Mapping[str, float],
    batch: int,
    servers: Mapping[str, int] | None = None,
    pools: Mapping[str, str] | None = None,
) -> Bound:
    """A lower bound on the seconds between updates in the long run: the maximum cycle ratio of the firings.

    `durations` are seconds of one firing by node; a broadcast's is publish, wire and swap together, 0 if not given.
    `servers` is the number of concurrent firings of a pool, replicas × capacity; 1 if not given. `pools` is where the
    plan puts each node, if not in the pool of its label. Sources are read ahead and cost nothing.

    A cycle. Its durations follow one another, and at each stretch of per-group nodes the whole batch must get through
    before the update: b groups, through stages of s servers and d seconds each, take Σd plus the costliest way to fill
    b - 1 places with hops of s places and d seconds (at a stage, group g waits for group g - s). For one stage that
    is (ceil(b / s) - 1) · d. The sum is divided by the updates that the cycle spans: 1 for a carried value, `lag`
    more for a broadcast. A stretch that serves m further updates' batches before the cycle closes spans m more. If an
    update accumulates, the parts from the n-th on wait for the groups of the n-th.

    A pool. The work of its nodes per update, over its servers.

    The bound is exact, for durations that do not vary, if each pool runs one node, one carried value changes,
    transfers take less than the bound, and free servers get the next group in order. If several nodes share a pool,
    their firings queue for each other, which no cycle shows: the simulator decides. Dropped groups, turns after the
    first, and nodes of a cycle that fire at some updates only make the real period longer than the bound.
    """
    names, what = [n.name for n in graph.nodes], f"{graph.name}: durations"
    for name in durations.keys() - names - {a.name for a in graph.arguments}:
        raise GraphError(Fault("unknown-node", what, f"{name!r}", f"names of nodes{nearest(name, names)}"))
    if missing := [n.name for n in graph.nodes if n.fires and n.name not in durations]:
        raise GraphError(Fault("missing-duration", what, f"none of {', '.join(missing)}", "one for each node"))
    seconds = {name: float(durations.get(name, 0.0)) for name in names}
    pool_of = {n.name: (pools or {}).get(n.name, n.pool) for n in graph.nodes}
    capacity = servers or {}
    # A node that keeps a state does one firing at a time.
    free = {n.name: 1 if n.stateful else capacity.get(pool_of[n.name], 1) for n in graph.nodes}
    # A node that fires at some updates only does not slow a cycle: most updates do not wait for it.
    always = {name: 0.0 if graph[name].every > 1 else took for name, took in seconds.items()}
    bounds = [Bound(0.0)]
    flow = feedback(graph)
    # Feedback goes through carried values, and so does each cycle.
    for cycle in cycles(flow, [carried.name for carried in graph.carried]):
        span = sum(flow[name][after] for name, after in zip(cycle, cycle[1:] + cycle[:1], strict=True))
        bounds.append(_cycle_bound(graph, span, cycle, batch, always, free))
    work: dict[str, float] = {}
    for node in graph.nodes:
        if node.fires:
            firings = batch if node.clock == "group" else 1 / node.every
            work[pool_of[node.name]] = work.get(pool_of[node.name], 0.0) + seconds[node.name] * firings
    bounds += [Bound(total / capacity.get(pool, 1), pool=pool) for pool, total in work.items()]
    return max(bounds, key=lambda bound: bound.seconds)


# Servers of a per-group node, and seconds of one of its firings.
Stage = tuple[int, float]

# The number of further batches that a stretch is followed for: queueing across more updates makes no difference.
FURTHER = 32


def _cycle_bound(
    graph: Graph, span: int, cycle: Sequence[str], batch: int, seconds: Mapping[str, float], servers: Mapping[str, int]
) -> Bound:
    """The bound of one cycle, which begins at a carried value."""
    # The durations in series, plus the waiting of the batch's last group at each stretch of per-group nodes. Of an
    # update in parts only the last part counts.
    parts = {name: graph[name].accumulate / batch for name in cycle if name in graph and graph[name].accumulate}
    base = sum(seconds.get(name, 0.0) * parts.get(name, 1.0) for name in cycle)
    clocks = groupby(cycle, key=lambda name: name in graph and graph[name].clock == "group")
    stretches = [[(servers[name], seconds[name]) for name in names] for per_group, names in clocks if per_group]
    further = [min(FURTHER, max(s for s, _ in stages)) for stages in stretches]
    fills = [_fill(stages, batch * (more + 1) - 1) for stages, more in zip(stretches, further, strict=True)]
    once = base + sum(fill[batch - 1] for fill in fills)
    ratios = [once / span]
    for name in parts:
        # The last stretch before the update makes its groups. Its n-th part waits for the groups of the first n parts.
        before = cycle[: list(cycle).index(name)]
        number = sum(per_group for per_group, _ in groupby(before, lambda n: n in graph and graph[n].clock == "group"))
        for groups in range(graph[name].accumulate, batch, graph[name].accumulate) if number else ():
            fill, rest = fills[number - 1], seconds[name] * (batch - groups) / batch
            ratios.append((once - fill[batch - 1] + fill[groups - 1] + rest) / span)
    for fill, more in zip(fills, further, strict=True):
        ratios += [(once - fill[batch - 1] + fill[batch * (m + 1) - 1]) / (span + m) for m in range(1, more + 1)]
    return Bound(max(ratios), tuple(cycle), span)


def _fill(stages: Sequence[Stage], places: int) -> list[float]:
    """For each number of places up to `places`, the most seconds of hops that fit into it."""
    best = [0.0] * (places + 1)
    for place in range(1, places + 1):
        best[place] = max([best[place - 1], *(d + best[place - s] for s, d in stages if s <= place)])
    return best
