"""The throughput of the control plane: scheduler events per second, and round trips of tasks compared with Ray's calls.

    python benchmarks/control.py [--keep]
    python benchmarks/control.py --ranks [--keep]

`--ranks` measures something else: the controller of 1,024 fake ranks on 64 hosts, and the enrolment of up to 128
agents; it also estimates the seconds of a start (see `thousand_ranks`).

See `round_trips` and `ray_calls` for what a task goes through. The two alternate, each time in new processes with the
same layout: 1 and 16 workers have a process each, 256 are 16 threads in each of 16 processes. `in_flight` counts the
tasks of all workers. Without Ray (extra `bench`) its columns are missing, and the output says so.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from report import Keep, publish, spread
from thousand_ranks import figures

from penstock.graph import trace
from penstock.programs.aipo import aipo
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import place
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import Event
from penstock.runtime.schedule.scheduler import Scheduler
from penstock.runtime.schedule.simulator import Durations, simulate

BATCH = 32
UPDATES = 300
LAG = 1
GENERATORS = 2
TARGETS = {"one_in_flight": 3.0, "one_at_each": None, "pipelined": 5.0}
"""Targets for tasks per second over Ray's. `one_in_flight` is one task altogether, with the workers taking turns;
`one_at_each` is between that and pipelined, and has no target."""
WINDOW = 256
"""Tasks in flight at each worker in the pipelined mode."""
LIMIT_S = 420.0
"""Deadline in seconds for one system's part of one repeat. Start-up and each wait have shorter deadlines."""


@dataclass(frozen=True)
class Layout:
    """`threads` workers in each of `processes` processes."""

    processes: int
    threads: int

    @property
    def workers(self) -> int:
        return self.processes * self.threads

    @property
    def in_flight(self) -> dict[str, int]:
        return {"one_in_flight": 1, "one_at_each": self.workers, "pipelined": self.workers * WINDOW}


LAYOUTS = {layout.workers: layout for layout in (Layout(1, 1), Layout(16, 1), Layout(16, 16))}


def scheduler_events_per_s(repeats: int = 5) -> dict[str, Any]:
    """Measure events per second through `Scheduler.handle` alone, for `aipo` with two generator replicas.

    The events are those of a simulated run; only handling them is timed, in one thread.
    """
    graph = trace(aipo, {"lag": LAG})
    tables = Tables(graph, place([graph], Cluster.local(), generators=GENERATORS))
    rules = {"free": Rules(BATCH, UPDATES), "pinned": Rules(BATCH, UPDATES, versions="pinned")}
    found: dict[str, Any] = {"batch": BATCH, "updates": UPDATES, "lag": LAG, "generators": GENERATORS}
    for versions, chosen in rules.items():
        events = _events(tables, chosen)
        found["events"] = len(events)
        found[versions] = spread([len(events) / _handle(tables, chosen, events) for _ in range(repeats)])
    return found


def _events(tables: Tables, rules: Rules) -> list[Event]:
    """Return the events of a run in which the duration of generation varies with the group."""
    heard: list[Event] = []
    nodes = {s.name: 2.0 if s.per_update else 0.01 for s in tables.steps.values() if not s.source}
    drawn = {step.name: lambda _, index: 1.0 + 0.1 * (index % 7) for step, _ in _readers(tables)}
    durations = Durations({**nodes, **drawn}, wire=0.1)
    simulate(tables, rules, durations, observe=lambda _now, event, _commands: heard.append(event))
    return heard


def _readers(tables: Tables) -> list[tuple[Any, int]]:
    return [reader for readers in tables.weight_readers.values() for reader in readers]


def _handle(tables: Tables, rules: Rules, events: list[Event]) -> float:
    """Return the seconds in which a new scheduler handles the events."""
    scheduler = Scheduler(tables, rules)
    start = perf_counter()
    for event in events:
        scheduler.handle(event)
    seconds = perf_counter() - start
    assert scheduler.finished
    return seconds


def round_trips(layout: Layout, repeats: int, seconds: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure Penstock and Ray in turn, `repeats` times; return a row for each of TARGETS, and seconds of start-up."""
    systems = {"penstock": "round_trips.py", "ray": "ray_calls.py"}
    if importlib.util.find_spec("ray") is None:
        del systems["ray"]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, script in systems.items():
            found[name].append(measured(script, layout, seconds))
    rows = []
    for mode, target in TARGETS.items():
        rates = {name: [one[mode] for one in parts] for name, parts in found.items()}
        row: dict[str, Any] = {"workers": layout.workers, "processes": layout.processes, "threads": layout.threads}
        row |= {"mode": mode, "in_flight": layout.in_flight[mode]}
        row.update((name, spread(values)) for name, values in rates.items())
        if "ray" in rates:
            pairs = zip(rates["penstock"], rates["ray"], strict=True)
            row |= {"ratio": spread([ours / theirs for ours, theirs in pairs]), "target": target}
        rows.append(row)
    starts = {name: spread([one["start_s"] for one in parts]) for name, parts in found.items()}
    return rows, {"workers": layout.workers, **starts}


def measured(script: str, layout: Layout, seconds: float) -> dict[str, float]:
    """Run one system's script; return what it prints last. Raises CalledProcessError or TimeoutExpired."""
    path = Path(__file__).resolve().parent / script
    numbers = (layout.processes, layout.threads, WINDOW, seconds)
    command = [sys.executable, str(path), *map(str, numbers)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/control.json")
    parser.add_argument("--workers", type=int, nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", action="store_true", help="a run of 1,024 fake ranks instead")
    args = parser.parse_args()
    if args.ranks:
        publish("control_ranks", {"load_before": os.getloadavg()[0], **figures(updates=7, pace=10.0)}, args.keep)
        return
    load = os.getloadavg()[0]
    scheduler = scheduler_events_per_s()
    for versions in ("free", "pinned"):
        print(f"scheduler, versions {versions}: {scheduler[versions]['median']:,.0f} events/s", flush=True)
    rows, starts = [], []
    for workers in args.workers:
        pair, start = round_trips(LAYOUTS[workers], args.repeats, args.seconds)
        rows += pair
        starts.append(start)
        print("\n".join(map(describe, pair)), flush=True)
    measured = {"load_before": load, "scheduler": scheduler, "tasks_per_s": rows, "start_s": starts}
    publish("control", measured, args.keep)


def describe(row: dict[str, Any]) -> str:
    """Return a row as a line: the median rate, with its ratio to Ray's."""
    where = f"{row['workers']} workers ({row['processes']} processes x {row['threads']} threads)"
    line = f"{where}, {row['mode'].replace('_', ' ')}: {row['penstock']['median']:,.0f}/s"
    if "ray" not in row:
        return line + "; Ray not measured"
    target = f" (target {row['target']:.0f} x)" if row["target"] else ""
    return line + f", {row['ratio']['median']:.1f} x Ray's {row['ray']['median']:,.0f}{target}"


if __name__ == "__main__":
    main()
