"""Run folders for tests of the report: simulated events, written as a run writes them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.graph import Program, load, trace
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import Plan, Rank, place, served
from penstock.runtime.control.messages import record_bytes
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.record.event_log import LogWriter
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import MetricsFile
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import Command, Event
from penstock.runtime.schedule.replay import SegmentOrigin
from penstock.runtime.schedule.simulator import Duration, Durations, LognormalSeconds, Simulation, simulate

TOY = "penstock.programs.toy:toy"
HOST = Cluster(hosts=(Host(name="local", cores=2),))
NODES: dict[str, Duration] = {"fake_generate": LognormalSeconds(0.05, 0.4), "fake_score": 0.004, "fake_update": 0.03}
DURATIONS = Durations(NODES, publish=0.003, wire=0.002, swap=0.001)


ACCURACY = 0.42
"""The accuracy before training."""


@dataclass(frozen=True)
class Made:
    """A run folder, and the simulation that it records."""

    folder: RunFolder
    simulation: Simulation


def simulated_run(
    path: Path,
    *,
    updates: int = 6,
    batch: int = 8,
    lag: int = 1,
    generators: int = 1,
    ranks: int = 1,
    durations: Durations = DURATIONS,
    program: str = TOY,
    options: Mapping[str, Any] | None = None,
    started_s: float = 2.0,
) -> Made:
    """A complete run of `updates`; its generators have `ranks` ranks, and its processes took `started_s` to start."""
    found = load(program)
    assert isinstance(found, Program)
    graph = trace(found, options if options is not None else {"lag": lag})
    plan = _with_ranks(place([graph], HOST, generators=generators), ranks)
    config = RunConfig(
        graph, None, plan, RunOptions(updates=updates, batch=batch, generators=generators), "abcdef012345"
    )
    folder = RunFolder.create(path)
    config.write(folder, {"program": program, "command": ["toy", "--lag", str(lag)], "penstock": "0.1.0"})
    rules = Rules(batch, updates)
    tables = Tables(graph, served(graph, plan))
    log = LogWriter(folder.events)
    log.segment(None, {"run": config.run})
    log.stage({**SegmentOrigin("train", graph, served(graph, plan), rules).to_json(), "accuracy": {"before": ACCURACY}})

    def observe(time: float, event: Event, commands: list[Command]) -> None:
        log.step(started_s + time, record_bytes(event), map(record_bytes, commands))

    simulation = simulate(tables, rules, durations, observe=observe)
    log.end({"status": "done", "error": ""})
    rows = MetricsFile(folder.metrics)
    for update, end in enumerate(simulation.ends):
        rows.append(_row(update, end, lag))
    rows.close()
    folder.write_json("summary.json", _summary(folder, simulation, batch, log.records))
    folder.unlock()
    return Made(folder, simulation)


def _with_ranks(plan: Plan, ranks: int) -> Plan:
    """Return the plan with this many ranks for each generator."""
    pools = []
    for pool in plan.pools:
        if pool.name == "generator" and ranks > 1:
            own = (replace(r, ranks=(Rank(),) * ranks, mesh=(("tp", ranks),)) for r in pool.replicas)
            pool = replace(pool, replicas=tuple(own))
        pools.append(pool)
    return Plan(tuple(pools))


def _row(update: int, end: float, lag: int) -> dict[str, Any]:
    """Metrics as the nodes of a language model report them."""
    old = min(update, lag)
    return {
        "update": update, "version": update + 1, "time_s": end, "seconds": 0.1, "groups": 8, "update_s": 0.03,
        "sync_s": 0.006, "generate_tokens_per_s": 900.0 + update, "train_tokens_per_s": 4000.0, "tokens": 512.0,
        "reward_mean": 0.4 + 0.3 * update / (update + 9), "loss": 0.1 / (update + 1), "lag_mean": old * 0.9,
        "lag_max": old, f"tokens_lag_{old}": 480.0, "tokens_lag_0": 512.0 if not old else 32.0, "ratio_mean": 1.001,
        "ratio_max": 1.4, "ratio_clipped": 0.01, "mismatch": 2e-7, "entropy": 0.5, "grad_norm": 0.3, "ess": 0.98,
        "kl": 0.001, "response_length": 11.0, "finished": 0.9, "pools": {"trainer": {"busy": 0.1}},
    }  # fmt: skip


def _summary(folder: RunFolder, simulation: Simulation, batch: int, records: int) -> dict[str, Any]:
    groups = batch * len(simulation.ends)
    return {
        "status": "done", "accuracy_before": ACCURACY, "accuracy_after": 0.93, "updates": len(simulation.ends),
        "groups": groups, "fates": {"consumed": groups, "dropped": 0, "failed": 0}, "wall_s": simulation.wall_s,
        "measured": [], "dropped_frames": {}, "error": "", "folder": str(folder.path), "records": records,
    }  # fmt: skip
