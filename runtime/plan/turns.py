"""Whether a trainer and a generator take turns with a device: then each can have the memory that the other one needs
only while it works. Pure."""

from penstock.graph.ir import Graph
from penstock.runtime.plan.place import decodes
from penstock.runtime.plan.plan import Plan, Pool


def why_no_turns(graph: Graph, plan: Plan) -> str:
    """What keeps them from it, for people; "" where they do."""
    makers = [name for argument in graph.carried if (name := graph.producer(argument.name)) is not None]
    updating = {place for name in makers for place in _places(plan.pool_of(name))}
    decoding = {place for n in graph.nodes if decodes(graph, n) for place in _places(plan.pool_of(n.name))}
    if not updating or not decoding:
        return f"{graph.name} has no {'generator' if updating else 'trainer'}"
    if lag := max((node.lag or 0 for node in graph.nodes), default=0):
        return f"with a lag of {lag} trainer and generator work at the same time"
    shared = updating & decoding
    if not shared:
        return "trainer and generator have devices of their own"
    if all(device == "cpu" for _, device in shared):
        return "trainer and generator work on the CPU, where a device's memory is the host's"
    return ""


def _places(pool: Pool) -> set[tuple[str, str]]:
    """The hosts and devices of a pool's ranks."""
    return {(rank.host, rank.device) for replica in pool.replicas for rank in replica.ranks}
