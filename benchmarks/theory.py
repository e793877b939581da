"""The period of a lagged graph by its lag, simulated and by the bound, as a picture for docs/staleness.md.

    python benchmarks/theory.py [--keep]

AIPO with one trainer and one generator, each with one firing at a time, and a scorer that works on 64 groups at once;
syncs and advantages take no time. Lines are the simulated period over the one at lag 0. --keep writes
docs/img/period.svg and benchmarks/results/theory.json.
"""

import argparse
from dataclasses import replace
from typing import Any

from chart import line_chart
from report import ROOT, Keep, publish

from penstock.graph import Graph, Program, load, trace
from penstock.graph.analysis import period_bound
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import Plan, place
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.simulator import Durations, simulate

PICTURE = ROOT / "docs" / "img" / "period.svg"
LAGS = (0, 1, 2, 3, 4)
BATCH, UPDATES = 4, 40
SERVERS = {"trainer": 1, "generator": 1, "scorer": 64}
"""Concurrent firings, by pool."""
CASES = {"4 : 0 : 2": (0.0, 2.0), "4 : 0 : 4": (0.0, 4.0), "4 : 8 : 4": (8.0, 4.0)}
"""Seconds of a group's score and of an update, by the ratio generation : score : update of a batch; a group's
generation takes one second."""


def aipo(lag: int) -> Graph:
    program = load("aipo")
    assert isinstance(program, Program)
    return trace(program, {"lag": lag})


def alone(graph: Graph) -> Plan:
    """Return a plan with one replica of one rank for each pool, with the capacities in `SERVERS`."""
    plan = place([graph], Cluster(hosts=(Host(name="local", cores=1),)))
    pools = (replace(p, replicas=(replace(p.replicas[0], capacity=SERVERS[p.name]),)) for p in plan.pools)
    return Plan(tuple(pools))


def periods(lag: int, score: float, update: float) -> tuple[float, float]:
    """Return the seconds per update, simulated and by the bound."""
    graph = aipo(lag)
    seconds = {"generate": 1.0, "score": score, "group_advantage": 0.0, "aipo_update": update}
    tables = Tables(graph, alone(graph))
    simulated = simulate(tables, Rules(BATCH, UPDATES), Durations(seconds)).period_s
    return simulated, period_bound(graph, seconds, BATCH, SERVERS).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action=Keep, help="write the picture and the figures")
    keep = parser.parse_args().keep
    rows: list[dict[str, Any]] = []
    lines: dict[str, list[dict[str, float]]] = {}
    for ratio, durations in CASES.items():
        found = [periods(lag, *durations) for lag in LAGS]
        first = found[0][0]
        lines[ratio] = [dict.fromkeys(("median", "min", "max"), simulated / first) for simulated, _ in found]
        for lag, (simulated, bound) in zip(LAGS, found, strict=True):
            rows.append({"generation : score : update": ratio, "lag": lag, "simulated s": simulated, "bound s": bound})
    if keep:
        title = "Seconds per update over those at lag 0, by seconds of generation : score : update"
        picture = line_chart(lines, [str(lag) for lag in LAGS], title, "lag", ("half", 0.5))
        PICTURE.write_text(picture)
    publish("theory", {"rows": rows}, keep)


if __name__ == "__main__":
    main()
