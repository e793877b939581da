"""Random settings for the scheduler: all constructs in any combination, on any plan, by any rules."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random

from penstock.graph.ir import Graph, Node
from penstock.runtime.cluster.placement import Plan
from penstock.runtime.schedule.compile import Rules, Tables, check_rules

from .graphs import alternate, broadcast, call, delay, graph, keep, place
from .world import Setting

POOLS = ("generator", "scorer", "trainer")


class Draft:
    """A growing graph. `values` are its per-group values so far, `unread` those that nobody reads yet."""

    def __init__(self, rng: Random, lags: Sequence[int], pinned: bool) -> None:
        """`lags` are those of per-group readers of weights. Pinned versions allow no filter and no `every` of a
        broadcast; per-update readers need lag 0, and delays are not shorter than the lag."""
        self.rng, self.lags, self.pinned = rng, lags, pinned
        self.changing = ["policy", "critic"][: rng.choice([1, 1, 2])]
        self.carried = {c: f"update_{c}" for c in self.changing}
        self.frozen = rng.random() < 0.3
        if self.frozen:
            self.carried["reference"] = "reference"
        self.sources = ["prompts", "images"][: rng.choice([1, 1, 1, 2])]
        self.weightless = rng.random() < 0.15
        self.nodes: list[Node] = []
        self.values = list(self.sources)
        self.unread = set(self.sources)
        self.between: dict[str, int] = {}
        self.slow = {c: rng.choice([2, 3]) for c in self.changing[1:] if rng.random() < 0.35}

    def add(self, *nodes: Node) -> str:
        self.nodes += nodes
        return nodes[-1].name

    def weights(self, pool: str, per_update: bool = False) -> str:
        lag = self.rng.choice([0] if per_update and self.pinned else self.lags)
        every = self.rng.randint(1, lag + 1) if not self.pinned and self.rng.random() < 0.4 else 1
        return self.add(broadcast(f"broadcast_{len(self.nodes)}", self.rng.choice(self.changing), lag, pool, every))

    def reference(self, pool: str) -> str:
        """The fixed value, read directly or through a broadcast."""
        if pool == "trainer":
            return "reference"
        return self.add(broadcast(f"reference_{len(self.nodes)}", "reference", 0, pool))

    def group_node(self, index: int) -> None:
        """Add a node, a filter, two nodes that take turns, or a node that reads a delayed value."""
        rng, name = self.rng, f"group_{index}"
        few = rng.sample(self.values, min(len(self.values), rng.choice([1, 1, 2])))
        reads = sorted(set(self.sources) if index == 0 else set(few))
        pool = "generator" if index == 0 else rng.choice(POOLS)
        edges = []
        kind = rng.choice(["call"] * 6 + ["keep", "turns", "turns", "delay"])
        if kind == "delay":
            pool, lag = "trainer", rng.choice([0, 1, 2, 5])
            carried = rng.choice(self.changing)
            edges.append(self.add(delay(f"delay_{index}", carried, lag + self.pinned * max(self.lags))))
        if not self.weightless and (index == 0 or rng.random() < 0.25):
            edges.append(self.weights(pool))
        if self.frozen and rng.random() < (1 if pool == "trainer" else 0.0 if self.weightless else 0.3):
            edges.append(self.reference(pool))
        made = {name}
        if kind == "keep" and index > 0 and not self.pinned:
            self.add(keep(name, reads, pool))
        elif kind == "turns":
            answers = rng.choice(["environment", "environment", *POOLS])
            own = rng.sample(self.values, rng.choice([0, 0, 1, min(2, len(self.values))]))
            own_edges = [self.weights(answers)] if not self.weightless and rng.random() < 0.3 else []
            if self.frozen and answers != "trainer" and not self.weightless and rng.random() < 0.3:
                own_edges.append(self.reference(answers))
            bound, recalls = rng.randint(1, 4), rng.random() < 0.5
            of_its_own = [*own, *own_edges]
            self.add(
                *alternate(name, f"answer_{index}", [*reads, *edges], bound, pool, answers, of_its_own, recalls=recalls)
            )
            made = {name, f"answer_{index}"}
            reads += own
        else:
            self.add(call(name, [*reads, *edges], pool, stateful=rng.random() < 0.15))
        self.values += sorted(made)
        self.unread = (self.unread - set(reads)) | made

    def between_node(self, index: int) -> None:
        """Add a value made at each update or at every `every`-th one; it may read others of its kind."""
        rng, every = self.rng, self.rng.choice([1, 1, 2, 3])
        reads = [] if every > 1 and rng.random() < 0.5 else [rng.choice(self.values)]
        edges = [rng.choice(self.changing)] if rng.random() < 0.6 or not reads else []
        edges += [name for name, beat in self.between.items() if every % beat == 0 and rng.random() < 0.5]
        pool = "trainer" if edges or self.weightless else rng.choice(POOLS)
        if not self.weightless and rng.random() < 0.5:
            edges.append(self.weights(pool, per_update=True))
        name = self.add(call(f"between_{index}", [*reads, *edges], pool, "update", rng.random() < 0.3, every))
        self.between[name] = every
        if every == 1:
            self.unread -= set(reads)

    def watch(self) -> None:
        """Add a node whose output nobody reads: it reports metrics."""
        rng = self.rng
        edges = [rng.choice(self.changing)] if self.weightless or rng.random() < 0.5 else []
        pool = "trainer" if edges else rng.choice(["generator", "scorer"])
        edges = edges or [self.weights(pool, per_update=True)]
        self.add(call("watch", [self.rng.choice(self.values), *edges], pool, "update"))

    def trailing(self, index: int) -> None:
        """Add a node that reads only weights."""
        pool = self.rng.choice([*POOLS, "evaluator", "evaluator"])
        edges = [self.weights(pool, per_update=True) for _ in range(self.rng.choice([1, 1, 2]))]
        if self.frozen and pool != "trainer" and self.rng.random() < 0.3:
            edges.append(self.reference(pool))
        stateful = self.rng.random() < 0.2
        self.add(call(f"trailing_{index}", edges, pool, "update", stateful, self.rng.choice([1, 1, 2, 3])))

    def updates(self, part: int) -> None:
        """Add the updates: the policy's reads all that is unread; others may be due at some updates only. Updates that
        read only groups may take them in parts of `part`."""
        rng, reads = self.rng, self.unread
        for name in self.changing:
            every = self.slow.get(name, 1)
            chained = [f"update_{self.changing[0]}"] if name != self.changing[0] and rng.random() < 0.4 else []
            between = [b for b, beat in self.between.items() if every % beat == 0]
            groups = sorted(reads) if every == 1 or rng.random() < 0.3 else []
            accumulate = part if groups and every == 1 and not (between or chained) else 0
            self.add(
                call(
                    f"update_{name}",
                    [name, *groups, *between, *chained],
                    "trainer",
                    "update",
                    every=every,
                    accumulate=accumulate,
                )
            )
            reads = {rng.choice(self.values)}
        if rng.random() < 0.2:
            self.carried["average"] = "blend"
            read = rng.choice(["policy", "update_policy"])
            self.add(call("blend", ["average", read], "trainer", "update", every=rng.choice([1, 2])))


def random_graph(rng: Random, lags: Sequence[int], pinned: bool, part: int) -> Graph:
    """One to four per-group nodes, at most three changing carried values, and matching other nodes; updates may take
    parts of `part` groups."""
    draft = Draft(rng, lags, pinned)
    for index in range(rng.randint(1, 4)):
        draft.group_node(index)
    for index in range(rng.choice([0, 0, 1, 2])):
        draft.between_node(index)
    if rng.random() < 0.3:
        draft.watch()
    for index in range(0 if draft.weightless else rng.choice([0, 0, 0, 1, 2])):
        draft.trailing(index)
    draft.updates(part)
    return graph("random", draft.carried, draft.sources, draft.nodes)


def random_plan(rng: Random, graph: Graph) -> Plan:
    """Up to 2 x 2 ranks per pool; labels are kept, some are merged, or one replica has everything."""
    merges: list[dict[str, str]] = [
        {},
        {},
        {"scorer": "generator"},
        {"scorer": "trainer"},
        {"environment": "generator", "evaluator": "generator"},
        {"environment": "scorer", "evaluator": "scorer"},
        dict.fromkeys(["generator", "scorer", "environment", "evaluator"], "trainer"),
    ]
    pools = (*POOLS, "environment", "evaluator")
    replicas = {p: 1 if p == "trainer" else rng.choice([1, 2]) for p in pools}
    capacity = {p: rng.choice([1, 1, 2]) if p == "trainer" else rng.choice([1, 2, 5]) for p in pools}
    return place(graph, replicas, capacity, rng.choice([1, 2]), rng.choice(merges))


def random_setting(rng: Random) -> Setting:
    """Any graph, plan and rules that the scheduler must support."""
    pinned = rng.random() < 0.35
    lags = [rng.choice([0, 1, 2, 4])] if pinned or rng.random() < 0.5 else [0, 1, 2, 3, 4]
    batch = rng.randint(1, 4)
    part = rng.choice([0, *(groups for groups in (1, 2, 3, 4) if batch % groups == 0)])
    graph = random_graph(rng, lags, pinned, part)
    firing = [n for n in graph.nodes if n.fires and n.clock == "group"]
    fails = {n.name: rng.choice([0.05, 0.2]) for n in firing if not n.stateful and rng.random() < 0.3}
    filters = {n.name for n in firing if n.construct == "keep"}
    drops = {n.name: 0.3 for n in firing if n.name in filters or rng.random() < 0.15}
    exact = pinned or any(n.construct == "delay" for n in graph.nodes)
    rules = Rules(
        batch=batch,
        end=rng.randint(1, 9),
        versions="pinned" if pinned else "free",
        retries=rng.choice([0, 50]) if pinned else rng.choice([0, 1, 3]),
        on_failure="stop" if exact else rng.choice(["stop", "replace", "replace"]),
        drops=rng.choice([1, 2, 4, 16, 16, 16, 16, 16]),
        failures=rng.choice([1, 2, 4, 16, 16, 16]),
    )
    plan = random_plan(rng, graph)
    if not pinned and rng.random() < 0.7:
        with suppress(ValueError):  # if the graph needs the strict order
            check_rules(Tables(graph, plan), ready := replace(rules, order="ready"))
            rules = ready
    if rng.random() < 0.5:
        with suppress(ValueError):  # if the graph cannot lose any replica
            check_rules(Tables(graph, plan), elastic := replace(rules, lost_replica="replace"))
            rules = elastic
    names = [*(n.name for n in graph.nodes), *(r.name for r in plan.replicas), "policy>generator", "critic>trainer"]
    slow = frozenset(rng.sample(names, rng.choice([0, 0, 1, 2])))
    again = {n.name: rng.choice([0.0, 0.5, 0.9, 1.0]) for n in firing if n.turns}
    speak = [n.name for n in firing if n.construct == "call" and not n.stateful and not n.answers]
    pauses = {name: rng.choice([0.3, 0.8]) for name in speak if rng.random() < 0.3}
    fails = fails if rng.random() < 0.5 else {}
    loses = rng.choice([0.0, 0.01, 0.03])
    return Setting(graph, plan, rules, fails, {} if pinned else drops, slow, again, pauses, loses)
