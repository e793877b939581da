"""What the control plane can do at most: scheduler events per second, and round trips of tasks beside Ray's.

    python benchmarks/control.py [--keep]

See `round_trips` for what a task goes through and where its workers are. Ray (extra `bench`) is measured in the same
run; without it its columns are missing, and said so.
"""

import argparse
from time import perf_counter
from typing import Any

from report import publish, spread
from round_trips import measure

from penstock.graph import trace
from penstock.programs.aipo import aipo
from penstock.runtime.plan.cluster import Cluster
from penstock.runtime.plan.place import place
from penstock.runtime.schedule.durations import Durations
from penstock.runtime.schedule.events import Event
from penstock.runtime.schedule.scheduler import Scheduler
from penstock.runtime.schedule.simulator import simulate
from penstock.runtime.schedule.tables import Rules, Tables, compile_tables

BATCH = 32
UPDATES = 300
LAG = 1
GENERATORS = 2


def scheduler_events_per_s(repeats: int = 5) -> dict[str, Any]:
    """Events per second through `Scheduler.handle` alone, for `aipo` with two generator replicas.

    The events are those of a simulated run; only handling them is timed, in one thread.
    """
    graph = trace(aipo, {"lag": LAG})
    tables = compile_tables(graph, place([graph], Cluster.local(), generators=GENERATORS))
    rules = {"free": Rules(BATCH, UPDATES), "pinned": Rules(BATCH, UPDATES, versions="pinned")}
    figures: dict[str, Any] = {"batch": BATCH, "updates": UPDATES, "lag": LAG, "generators": GENERATORS}
    for versions, chosen in rules.items():
        events = _events(tables, chosen)
        figures["events"] = len(events)
        figures[versions] = spread([len(events) / _handle(tables, chosen, events) for _ in range(repeats)])
    return figures


def _events(tables: Tables, rules: Rules) -> list[Event]:
    """What the scheduler hears in a run whose generation varies with the group."""
    heard: list[Event] = []
    nodes = {s.name: 2.0 if s.per_update else 0.01 for s in tables.steps.values() if not s.source}
    drawn = {step.name: lambda _, index: 1.0 + 0.1 * (index % 7) for step, _ in _readers(tables)}
    durations = Durations({**nodes, **drawn}, wire=0.1)
    simulate(tables, rules, durations, observe=lambda _now, event, _commands: heard.append(event))
    return heard


def _readers(tables: Tables) -> list[tuple[Any, int]]:
    return [reader for readers in tables.weight_readers.values() for reader in readers]


def _handle(tables: Tables, rules: Rules, events: list[Event]) -> float:
    """Seconds that a fresh scheduler takes to handle the events."""
    scheduler = Scheduler(tables, rules)
    start = perf_counter()
    for event in events:
        scheduler.handle(event)
    seconds = perf_counter() - start
    assert scheduler.finished
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/control.json")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    args = parser.parse_args()
    scheduler = scheduler_events_per_s()
    for versions in ("free", "pinned"):
        print(f"scheduler, versions {versions}: {scheduler[versions]['median']:,.0f} events/s")
    rows = [measure(workers, args.seconds) for workers in args.workers]
    for row in rows:
        print(describe(row))
    publish("control", {"scheduler": scheduler, "round_trips": rows}, args.keep)


def describe(row: dict[str, Any]) -> str:
    """A row as a line: both figures, each with its ratio to Ray's."""
    parts = []
    for name in ("one_in_flight", "pipelined"):
        text = f"{name.replace('_', ' ')} {row[name]:,.0f}/s"
        if row["ray"] is not None:
            text += f" ({row[name] / row['ray'][name]:.1f} x Ray's {row['ray'][name]:,.0f})"
        parts.append(text)
    where = f"{row['workers']} workers in {row['processes']} processes"
    return f"{where}: {', '.join(parts)}" + ("" if row["ray"] is not None else "; Ray not measured")


if __name__ == "__main__":
    main()
