"""Whether a graph can run as a plan places it. Pure; the errors are ValueErrors, as those of `check` are."""

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from penstock.graph.ir import Graph, Node
from penstock.runtime.plan.plan import Plan


def check_held(graph: Graph, plan: Plan) -> None:
    """Everything is in a pool."""
    held = {name for pool in plan.pools for name in pool.holds}
    needed = [a.name for a in graph.arguments] + [n.name for n in graph.nodes if n.fires]
    if missing := [name for name in needed if name not in held]:
        raise ValueError(f"plan: no pool holds {', '.join(missing)}; the pools hold {', '.join(sorted(held))}")


def check_places(graph: Graph, plan: Plan, makers: dict[str, str]) -> None:
    """A carried value is where its readers are, and an update makes one next value: `makers` say by whom."""
    for carried in makers:
        home = plan.pool_of(carried)
        if len(home.replicas) != 1:
            raise ValueError(
                f"plan: pool {home.name!r} holds the carried value {carried!r} and has {len(home.replicas)} "
                "replicas; needed 1, since an update makes one next value"
            )
    for carried in (c.name for c in graph.carried):
        home = plan.pool_of(carried)
        for node in readers_of(graph.nodes, carried):
            if node.fires and node.name not in home.holds:
                raise ValueError(
                    f"plan: {node.name} reads the carried value {carried!r} and is in pool "
                    f"{plan.pool_of(node.name).name!r}; needed {home.name!r}, which holds it"
                )


def check_order(waits: Mapping[str, set[str]]) -> None:
    """Within an update, those who read a carried value come before the one that donates it: `waits` say for whom each
    waits."""
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        names = " -> ".join(error.args[1])
        raise ValueError(
            f"graph: {names} wait for each other: each reads a carried value that the next one donates, or its "
            "output; needed an order in which every carried value is read before the node that makes its next value"
        ) from None


def readers_of(nodes: Sequence[Node], name: str) -> list[Node]:
    """Those that read an output in the same round of a cycle."""
    return [n for n in nodes if any(i.ref.node == name and not i.back for i in n.inputs)]
