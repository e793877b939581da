"""The run in one line: what bounds it, what another lag or another split would gain, how far the model is off. Pure."""

from collections.abc import Callable, Mapping

from penstock.graph.ir import Graph
from penstock.graph.passes import Bound
from penstock.runtime.report.whatif import Case, Table

CLOSE = 0.75
"""A bound that is a smaller share of the period does not explain it: then firings queue for each other."""
GAIN, SAME = 0.01, 0.005
"""A gain worth a word, and two periods that are as good as each other."""


def verdict(
    graph: Graph, bound: Bound | None, period_s: float | None, error: float | None, table: Table | None,
    busy: Mapping[str, float],
) -> str:  # fmt: skip
    """`busy` is the share of training that each pool was busy."""
    if not period_s or bound is None:
        return "No update could be followed, so nothing can be said of what bounds this run."
    parts = [_bounds(graph, bound, period_s, busy)]
    if table is not None:
        parts += [*_lag(table), *_split(table)]
    if error is not None:
        parts.append(f"model error {_percent(abs(error))}")
    return "; ".join(parts) + "."


def role(graph: Graph, pool: str) -> str:
    """A pool in words: by what it does for an update where that is plain, else by its name."""
    per_update = any(n.pool == pool and n.clock == "update" and n.outputs for n in graph.nodes if n.fires)
    made = {graph.producer(argument.name) for argument in graph.carried}
    if per_update and any(n.name in made for n in graph.nodes if n.pool == pool):
        return "training" if pool == "trainer" else f"pool {pool}"
    weighted = {n.name for n in graph.nodes if n.construct == "broadcast"}
    samples = any(n.pool == pool and n.clock == "group" and any(i.ref.node in weighted for i in n.inputs)
                  for n in graph.nodes if n.fires)  # fmt: skip
    return "generation" if samples and pool == "generator" else f"pool {pool}"


def cycle_nodes(graph: Graph, bound: Bound) -> list[str]:
    """The nodes of a bounding cycle that fire."""
    return [name for name in bound.cycle if name in graph and graph[name].fires]


def _bounds(graph: Graph, bound: Bound, period_s: float, busy: Mapping[str, float]) -> str:
    if bound.seconds < CLOSE * period_s:
        pool = max(busy, key=lambda name: busy[name], default="")
        most = f", the busiest of them {role(graph, pool)} ({_percent(busy[pool])})" if pool else ""
        return f"No pool and no cycle alone bounds this run{most}"
    if bound.pool:
        name = role(graph, bound.pool)
        return f"{name[:1].upper()}{name[1:]} bounds this run"
    names = " → ".join(cycle_nodes(graph, bound))
    return f"The cycle {names} bounds this run" + (f", {bound.span} updates at a time" if bound.span > 1 else "")


def _lag(table: Table) -> list[str]:
    cases = [c for c in table.cases if c.replicas == table.replicas and c.period_s]
    now = _now(table, cases)
    if now is None:
        return []
    best = _best(cases, key=lambda c: c.lag)
    gain = now / (best.period_s or now) - 1
    if best.lag != table.lag and gain >= GAIN:
        return [f"lag {best.lag} would gain {_percent(gain)}"]
    smaller = [c.lag for c in cases if c.lag < table.lag and (c.period_s or 0) <= now * (1 + SAME)]
    return [f"lag {min(smaller)} would do as well" if smaller else "another lag would gain nothing"]


def _split(table: Table) -> list[str]:
    cases = [c for c in table.cases if c.lag == table.lag and c.period_s]
    now = _now(table, cases)
    if now is None:
        return []
    best = _best(cases, key=lambda c: c.replicas)
    gain = now / (best.period_s or now) - 1
    many = "1 generator" if best.replicas == 1 else f"{best.replicas} generators"
    return [f"{many} would gain {_percent(gain)}"] if best.replicas != table.replicas and gain >= GAIN else []


def _now(table: Table, cases: list[Case]) -> float | None:
    """The simulated period of the run as it was; None where `cases` has no other to compare it with."""
    now = table.case(table.lag, table.replicas)
    return now.period_s or None if now is not None and len(cases) > 1 else None


def _best(cases: list[Case], key: Callable[[Case], int]) -> Case:
    """The least lag, or the fewest replicas, of those that are as good as the best."""
    least = min(c.period_s or 0.0 for c in cases)
    return min((c for c in cases if (c.period_s or 0.0) <= least * (1 + SAME)), key=key)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0095 else f"{100 * share:.1f} %" if share >= 0.0005 else "under 0.1 %"
