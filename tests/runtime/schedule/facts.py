"""What a graph and a plan say of each node, read straight off them: no table of the scheduler's is used."""

from dataclasses import dataclass, field

from penstock.graph.ir import Graph, Node
from penstock.runtime.plan.plan import Plan


@dataclass
class Facts:
    """What the graph says of one node (or source), read straight off it."""

    name: str
    pool: str
    per_update: bool
    source: bool
    stateful: bool
    groups: set[str] = field(default_factory=set)
    updates: set[str] = field(default_factory=set)
    carried: set[str] = field(default_factory=set)
    weights: set[tuple[str, int]] = field(default_factory=set)
    fixed: set[str] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)
    makes: set[str] = field(default_factory=set)


def read_facts(graph: Graph, plan: Plan) -> dict[str, Facts]:
    """Each source and node, with its edges by kind."""
    facts = {a.name: Facts(a.name, plan.pool_of(a.name).name, False, True, False) for a in graph.sources}
    calls = [n for n in graph.nodes if n.construct == "call"]
    for node in calls:
        facts[node.name] = Facts(node.name, plan.pool_of(node.name).name, node.clock == "update", False, node.stateful)
    for node in calls:
        _read_inputs(graph, plan, node, facts)
    for carried, ref in graph.results:
        if ref.node in facts:
            facts[ref.node].makes.add(carried)
    return facts


def _read_inputs(graph: Graph, plan: Plan, node: Node, facts: dict[str, Facts]) -> None:
    changing = {carried for carried, ref in graph.results if ref.node in graph}
    mine = facts[node.name]
    for item in node.inputs:
        ref = item.ref.node
        if ref in facts:
            (mine.updates if facts[ref].per_update else mine.groups).add(ref)
            facts[ref].readers.add(node.name)
        elif ref in graph:
            channel = f"{graph[ref].inputs[0].ref.node}>{plan.pool_of(node.name).name}"
            if graph[ref].inputs[0].ref.node in changing:
                mine.weights.add((channel, graph[ref].lag or 0))
            else:
                mine.fixed.add(channel)
        elif ref in changing:
            mine.carried.add(ref)
