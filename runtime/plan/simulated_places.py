"""How many firings are really in work at once where the simulator puts a plan's pools. Pure."""

from dataclasses import replace

from penstock.graph.ir import Graph
from penstock.runtime.plan.plan import Plan


def served(graph: Graph, plan: Plan) -> Plan:
    """The plan with the number of firings that really are in work at once: a rank works on one at a time, but for those
    of a stream (a generator, an environment)."""
    streaming = {node.name for node in graph.nodes if node.stream and node.clock == "group"}
    pools = (
        pool
        if streaming.intersection(pool.holds)
        else replace(pool, replicas=tuple(replace(replica, capacity=1) for replica in pool.replicas))
        for pool in plan.pools
    )
    return Plan(tuple(pools))
