"""What a graph and a plan say of each node, read straight off them: no table of the scheduler's is used."""

from dataclasses import dataclass, field
from math import gcd

from penstock.graph.ir import Graph, Node
from penstock.runtime.cluster.placement import Plan


@dataclass
class Facts:
    """What the graph says of one node (or source), read straight off it.

    `hears` is the node that speaks, for one that answers it; `heard_by` the other way round. One that `recalls` reads
    what it made in the turn before. `waits` are the groups' values that must be there before it starts: before two
    nodes take turns, those of both. `delays` are the (carried value, lag) that it reads delayed.
    """

    name: str
    pool: str
    per_update: bool
    source: bool = False
    stateful: bool = False
    every: int = 1
    turns: int = 0
    hears: str = ""
    heard_by: str = ""
    recalls: bool = False
    waits: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    updates: set[str] = field(default_factory=set)
    carried: set[str] = field(default_factory=set)
    weights: set[tuple[str, int]] = field(default_factory=set)
    fixed: set[str] = field(default_factory=set)
    delays: set[tuple[str, int]] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)
    makes: set[str] = field(default_factory=set)

    @property
    def trails(self) -> bool:
        """Does no update wait for it?"""
        return self.per_update and not (self.makes | self.readers | self.carried | self.groups | self.updates)

    def due(self, update: int) -> bool:
        """Does it fire at this update?"""
        return (update + 1) % self.every == 0


def read_facts(graph: Graph, plan: Plan) -> dict[str, Facts]:
    """Each source and node, with its edges by kind."""
    facts = {a.name: Facts(a.name, plan.pool_of(a.name).name, False, True) for a in graph.sources}
    calls = [n for n in graph.nodes if n.construct in ("call", "keep")]
    for node in calls:
        pool, per_update = plan.pool_of(node.name).name, node.clock == "update"
        facts[node.name] = Facts(
            node.name, pool, per_update, False, node.stateful, every=node.every, turns=node.turns or 0
        )
    for node in calls:
        for item in node.inputs:
            if item.back and item.ref.node != node.name:
                facts[node.name].heard_by = item.ref.node
                facts[item.ref.node].hears = node.name
    for node in calls:
        facts[node.name].recalls = bool(facts[node.name].hears) and any(item.back for item in node.inputs)
    for node in calls:
        _read_inputs(graph, plan, node, facts)
    for one in facts.values():
        one.waits = one.groups | (facts[one.heard_by].groups if one.heard_by else set())
    for carried, ref in graph.results:
        if ref.node in facts:
            facts[ref.node].makes.add(carried)
    return facts


def read_beats(graph: Graph, plan: Plan) -> dict[str, int]:
    """For each channel, how seldom its versions are sent: only multiples of this number."""
    beats: dict[str, int] = {}
    for node in graph.nodes:
        for item in node.inputs:
            if item.ref.node in graph and graph[item.ref.node].construct == "broadcast":
                sent = graph[item.ref.node]
                channel = f"{sent.inputs[0].ref.node}>{plan.pool_of(node.name).name}"
                beats[channel] = gcd(beats.get(channel, 0), sent.every)
    return beats


def _read_inputs(graph: Graph, plan: Plan, node: Node, facts: dict[str, Facts]) -> None:
    changing = {carried for carried, ref in graph.results if ref.node in graph}
    mine = facts[node.name]
    for item in node.inputs:
        ref = item.ref.node
        if item.back or ref == mine.hears:
            continue
        if ref in facts:
            (mine.updates if facts[ref].per_update else mine.groups).add(ref)
            facts[ref].readers.add(node.name)
        elif ref in graph:
            carried, lag = graph[ref].inputs[0].ref.node, graph[ref].lag or 0
            channel = f"{carried}>{plan.pool_of(node.name).name}"
            if graph[ref].construct == "delay":
                mine.delays.add((carried, lag))
            elif carried in changing:
                mine.weights.add((channel, lag))
            else:
                mine.fixed.add(channel)
        elif ref in changing:
            mine.carried.add(ref)
