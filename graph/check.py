"""`check(graph)`: all faults of a graph at once, before anything starts."""

from collections.abc import Mapping

from penstock.graph.construct_rules import CONSTRUCT_RULES
from penstock.graph.faults import Fault
from penstock.graph.ir import Graph
from penstock.graph.protocols import Source
from penstock.graph.requirement import calls
from penstock.graph.rules import RULES
from penstock.graph.types import Context
from penstock.graph.view import View


def check(
    graph: Graph,
    *,
    batch: int | None = None,
    pools: Mapping[str, str] | None = None,
    sources: Mapping[str, Source] | None = None,
    contexts: Mapping[str, Context] | None = None,
) -> list[Fault]:
    """The graph's faults, by file and line; none if it can run.

    `batch` is the number of prompt groups per update, if it is known. `pools` is where the plan puts nodes and
    arguments, if not where their labels say. `sources` and the `contexts` of nodes and arguments, by name, are those of
    the run that it is checked for, if it is for one. What nodes themselves require of their calls (see `requires`) is
    known where their modules are imported.
    """
    view = View(graph, batch, dict(pools or {}), sources, contexts)
    faults = [fault for rule in (*RULES, *CONSTRUCT_RULES, calls) for fault in rule(view)]
    return sorted(faults, key=by_place)


def by_place(fault: Fault) -> tuple[str, int]:
    """The key that sorts faults."""
    file, _, line = fault.where.rpartition(":")
    return (file, int(line)) if line.isdigit() else (fault.where, 0)
