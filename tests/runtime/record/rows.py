"""Rows of the metrics that the nodes of a graph report."""

from penstock.graph.imports import short
from penstock.graph.ir import Firing, Graph
from penstock.runtime.record.metrics import Rows


def columns_of(graph: Graph) -> dict[str, set[str]]:
    """The columns of each node's report; each node reports one metric named as its function."""
    rows = Rows({}, 0.0, order=graph.nodes)
    for place, node in enumerate(graph.nodes):
        rows.group(Firing(node.name, 0), {short(node.op): float(place)})
    rows.batch(0, (0,))
    rows.update(0, "", {}, 1.0)
    row = rows.row(0, 1.0, {})
    return {
        node.name: {column for column in row if column.endswith(short(node.op)) and row[column] == float(place)}
        for place, node in enumerate(graph.nodes)
    }
