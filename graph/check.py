"""`check(graph)`: all faults of a graph at once, before anything starts."""

from collections.abc import Mapping

from penstock.graph.construct_rules import CONSTRUCT_RULES
from penstock.graph.faults import Fault
from penstock.graph.ir import Graph
from penstock.graph.rules import RULES
from penstock.graph.view import View


def check(graph: Graph, *, batch: int | None = None, pools: Mapping[str, str] | None = None) -> list[Fault]:
    """The graph's faults, by file and line; none if it can run.

    `batch` is the number of prompt groups per update, if it is known. `pools` is where the plan puts nodes and
    arguments, if not where their labels say.
    """
    view = View(graph, batch, dict(pools or {}))
    faults = [fault for rule in (*RULES, *CONSTRUCT_RULES) for fault in rule(view)]
    return sorted(faults, key=_place)


def _place(fault: Fault) -> tuple[str, int]:
    file, _, line = fault.where.rpartition(":")
    return (file, int(line)) if line.isdigit() else (fault.where, 0)
