"""What `penstock simulate` prints of any schedule: lags, pools, and the drawing."""

import os
import sys
from collections.abc import Mapping
from textwrap import wrap

from penstock.runtime.cli.figures import percent
from penstock.runtime.record.gantt import gantt_text
from penstock.runtime.record.timeline import Bar, excerpt, pool_of
from penstock.runtime.schedule.simulation import Simulation

DRAWN = 6
"""Updates that the text shows; files hold all."""
LANES = 8
"""Replicas of each pool that pictures show."""


def drawing(result: Simulation, width: int) -> list[str]:
    """The first updates, under a line that says so where there are more."""
    parts = [f"{DRAWN} updates"] if len(result.ends) > DRAWN else []
    parts += [f"{LANES} replicas of each pool"] if most_replicas(result) > LANES else []
    head = [f"The first {', and the first '.join(parts)}:"] if parts else []
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return [*head, gantt_text(excerpt(result.bars, DRAWN, LANES), width, color=color)]


def pictured(result: Simulation) -> list[Bar]:
    """All updates, for files."""
    return excerpt(result.bars, len(result.ends), LANES)


def most_replicas(result: Simulation) -> int:
    """Of one pool."""
    pools = [pool_of(replica) for replica in result.busy]
    return max(map(pools.count, set(pools)), default=0)


def shares(result: Simulation) -> dict[str, tuple[float, dict[str, float]]]:
    """Of each pool's time: the share in work, and the shares without by cause."""
    pools: dict[str, list[str]] = {}
    for replica in result.busy:
        pools.setdefault(pool_of(replica), []).append(replica)
    found = {}
    for pool, replicas in pools.items():
        wall = result.wall_s * len(replicas) or 1.0
        idle: dict[str, float] = {}
        for replica in replicas:
            for cause, seconds in result.idle[replica].items():
                idle[cause] = idle.get(cause, 0.0) + seconds / wall
        found[pool] = sum(result.busy[r] for r in replicas) / wall, idle
    return found


def lag_lines(lags: Mapping[int, int]) -> list[str]:
    """A bar per difference of an update and the version that its groups were made with."""
    total = sum(lags.values())
    return [
        f"{'lag' if not row else '':<8}{lag:>2} {'█' * max(1, round(30 * count / total))} {percent(count / total)}"
        for row, (lag, count) in enumerate(sorted(lags.items()))
    ]


def pool_lines(result: Simulation, columns: int) -> list[str]:
    """Each pool's share of busy time, and why it was idle."""
    lines: list[str] = []
    found = shares(result)
    width = max(map(len, found), default=0)
    for row, (pool, (busy, idle)) in enumerate(found.items()):
        causes = ", ".join(f"{cause} {percent(share)}" for cause, share in idle.items() if share > 0)
        line = f"{'pools' if not row else '':<8}{pool:<{width}}  busy {percent(busy):>7}  idle: {causes or '-'}"
        lines += wrap(line, columns, subsequent_indent=" " * (width + 24))
    return lines


def depths(result: Simulation) -> dict[str, dict[str, float]]:
    """Groups that waited for each node, over time: their mean, 95th percentile and most."""
    return {node: _figures(seconds) for node, seconds in result.depths.items()}


def _figures(seconds: Mapping[int, float]) -> dict[str, float]:
    total = sum(seconds.values())
    passed, p95 = 0.0, 0
    for depth in sorted(seconds):
        passed, p95 = passed + seconds[depth], depth
        if passed >= 0.95 * total:
            break
    mean = sum(depth * time for depth, time in seconds.items()) / total if total else 0.0
    return {"mean": mean, "p95": p95, "max": max(seconds, default=0)}


def depth_lines(result: Simulation) -> list[str]:
    found = depths(result)
    width = max(map(len, found), default=0)
    return [
        f"{'queues' if not row else '':<8}{node:<{width}}  "
        f"mean {figures['mean']:.1f}, 95 % of the time at most {figures['p95']:.0f}, max {figures['max']:.0f} groups"
        for row, (node, figures) in enumerate(found.items())
    ]


def facts(result: Simulation) -> dict[str, object]:
    """What is the same of any schedule, for --json."""
    pools = {pool: {"busy": busy, "idle": idle} for pool, (busy, idle) in shares(result).items()}
    return {
        "steady_s": result.steady_s,
        "wall_s": result.wall_s,
        "lag_mean": result.lag_mean,
        "dropped": result.dropped,
        "lags": {str(lag): count for lag, count in sorted(result.lags.items())},
        "queues": depths(result),
        "pools": pools,
        "busy_s": result.busy,
        "idle_s": result.idle,
        "bars": len(result.bars),
    }
