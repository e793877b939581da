"""Which nodes make the rollouts that updates learn from: others only say what these are compared with. Pure."""

from dataclasses import replace

from penstock.graph.ir import Graph


def learnt_from(graph: Graph) -> set[str]:
    """Nodes whose rollouts come to a per-update node as such, through filters and buffers."""
    reached: set[str] = set()
    pending = [item for n in graph.nodes if n.fires and n.clock == "update" for item in n.inputs]
    while pending:
        item = pending.pop()
        if item.ref.node not in graph or item.ref.node in reached or not item.type.endswith(":Rollouts"):
            continue
        maker = graph[item.ref.node]
        reached.add(maker.name)
        if maker.construct == "keep":  # what comes out is what went in
            at = [output.name for output in maker.outputs].index(item.ref.output)
            pending.append(replace(maker.inputs[at], type=item.type))
        else:
            pending += maker.inputs
    return reached
