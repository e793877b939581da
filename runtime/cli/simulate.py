"""`penstock simulate PROGRAM`: its schedule on a virtual clock, with given durations."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from textwrap import wrap
from typing import Any

from penstock.graph.ir import Graph
from penstock.graph.passes import Bound, period_bound
from penstock.runtime.cli.figures import percent
from penstock.runtime.cli.flags import SimulateFlags
from penstock.runtime.cli.programs import require_program
from penstock.runtime.cli.traced import CommandError, trace_program
from penstock.runtime.plan.cluster import Cluster
from penstock.runtime.plan.place import place
from penstock.runtime.plan.plan import Plan
from penstock.runtime.record.chrome import chrome_trace
from penstock.runtime.record.folder import write_atomic
from penstock.runtime.record.gantt import gantt_text
from penstock.runtime.record.svg import gantt_svg
from penstock.runtime.record.timeline import pool_of
from penstock.runtime.schedule.durations import Duration, Durations, Lognormal
from penstock.runtime.schedule.simulator import Simulation, simulate
from penstock.runtime.schedule.tables import Rules, compile_tables
from penstock.runtime.schedule.verdicts import Verdicts

SYNC = ("publish", "wire", "swap")
DRAWN = 6
"""Updates that the text shows; files hold all."""


def main(argv: Sequence[str]) -> int:
    require_program("simulate", argv)
    traced = trace_program("simulate", argv)
    flags: SimulateFlags = traced.flags
    graph = traced.sound()
    if flags.updates < 1:
        raise CommandError(f"--updates: given {flags.updates}, needed at least 1", 2)
    timed = timing(graph, flags.duration)
    plan = servers(graph, place([graph], Cluster.local(), generators=flags.generators, slots=flags.slots))
    rules = Rules(flags.batch, flags.updates, versions=flags.versions)
    verdicts = deciding(graph, flags.drop, flags.again)
    try:
        result = simulate(compile_tables(graph, plan), rules, timed.durations, verdicts=verdicts)
    except ValueError as error:
        raise CommandError(str(error), 2) from None
    capacity = {pool.name: sum(r.capacity for r in pool.replicas) for pool in plan.pools}
    bound = period_bound(graph, timed.means, flags.batch, capacity)
    title = f"{graph.name}: {flags.updates} updates of {flags.batch} groups"
    if flags.svg:
        write_atomic(Path(flags.svg), gantt_svg(result.bars, title).encode())
    if flags.trace:
        write_atomic(Path(flags.trace), json.dumps(chrome_trace(result.bars, title)).encode())
    if flags.json:
        print(json.dumps(_facts(graph, flags, result, bound)))
    else:
        print(_text(title, flags, result, bound))
    return 0


@dataclass(frozen=True)
class Timing:
    """Durations as the simulator takes them, and their means by node, which the bound takes."""

    durations: Durations
    means: dict[str, float]


def timing(graph: Graph, given: Sequence[str]) -> Timing:
    """Seconds of each node: as given, else as a fake node's options say. Raises CommandError for a missing one."""
    nodes: dict[str, Duration] = {}
    means: dict[str, float] = {}
    calls = [node for node in graph.nodes if node.fires]
    for node in calls:
        options = dict(node.options)
        if "ms" in options:
            low, jitter = options["ms"] / 1e3, options.get("jitter_ms", 0.0) / 1e3
            nodes[node.name] = Uniform(low, jitter) if jitter else low
            means[node.name] = low + jitter / 2
        elif node.construct == "keep":
            nodes[node.name] = means[node.name] = 0.0
    sync = dict.fromkeys(SYNC, 0.0)
    sync["publish"] = float(dict(graph.options).get("sync_ms", 0.0)) / 1e3
    for word in given:
        name, mean, sigma = _duration(word, [n.name for n in calls])
        if name in sync:
            sync[name] = mean
        else:
            nodes[name], means[name] = Lognormal(mean, sigma) if sigma else mean, mean
    if missing := [node.name for node in calls if node.name not in nodes]:
        example = " ".join(f"{name}=0.05" for name in missing)
        raise CommandError(f"no duration of {', '.join(missing)}; needed all, such as --duration {example}", 2)
    means |= {node.name: sum(sync.values()) for node in graph.nodes if node.construct == "broadcast"}
    return Timing(Durations(nodes, **sync), means)


def deciding(graph: Graph, drop: Sequence[str], again: Sequence[str]) -> Verdicts:
    """Shares as given. Raises CommandError for what is not NODE=SHARE of a filter, or of a node that answers."""
    filters = [node.name for node in graph.nodes if node.construct == "keep"]
    answers = [node.name for node in graph.nodes if node.answers]
    return Verdicts(
        dict(_share("--drop", word, filters, "filters (keep)") for word in drop),
        dict(_share("--again", word, answers, "nodes that answer") for word in again),
    )


def _share(flag: str, word: str, names: Sequence[str], kind: str) -> tuple[str, float]:
    name, _, rest = word.partition("=")
    if name not in names:
        needed = f"one of {', '.join(names)} before '='" if names else f"none, since the program has no {kind}"
        raise CommandError(f"{flag}: given {word!r}, needed {needed}", 2)
    try:
        share = float(rest)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise CommandError(f"{flag}: given {word!r}, needed a share from 0 to 1, such as {name}=0.3", 2)
    return name, share


@dataclass(frozen=True)
class Uniform:
    """Seconds between `low` and `low` + `jitter`, keyed by node and index."""

    low: float
    jitter: float

    def __call__(self, node: str, index: int) -> float:
        key = blake2b(f"{node}/{index}".encode(), digest_size=8).digest()
        return self.low + self.jitter * int.from_bytes(key, "big") / 2**64


def _duration(word: str, names: Sequence[str]) -> tuple[str, float, float]:
    """Node, mean and sigma of NODE=SECONDS[~SIGMA]."""
    name, _, rest = word.partition("=")
    seconds, _, sigma = rest.partition("~")
    if name not in (*names, *SYNC):
        raise CommandError(f"--duration: given {word!r}, needed one of {', '.join([*names, *SYNC])} before '='", 2)
    try:
        values = float(seconds), float(sigma or 0.0)
    except ValueError:
        values = -1.0, 0.0
    if not (min(values) >= 0 and max(values) < float("inf")):
        raise CommandError(f"--duration: given {word!r}, needed seconds and sigma, such as {name}=0.05~0.5", 2)
    return name, *values


def servers(graph: Graph, plan: Plan) -> Plan:
    """The plan with the number of firings that really are in work at once: a rank works on one at a time, but for
    those of a stream (a generator, an environment)."""
    streaming = {node.pool for node in graph.nodes if node.stream and node.clock == "group"}
    pools = (
        pool
        if pool.name in streaming
        else replace(pool, replicas=tuple(replace(replica, capacity=1) for replica in pool.replicas))
        for pool in plan.pools
    )
    return Plan(tuple(pools))


def _facts(graph: Graph, flags: SimulateFlags, result: Simulation, bound: Bound) -> dict[str, Any]:
    return {
        "program": graph.name,
        "updates": flags.updates,
        "batch": flags.batch,
        "period_s": result.period_s,
        "period_of": "all updates" if result.cycle_s is None else "the full pipeline",
        "bound_s": bound.seconds,
        "bound_cause": bound.cause,
        "wall_s": result.wall_s,
        "lag_mean": result.lag_mean,
        "dropped": result.dropped,
        "lags": {str(lag): count for lag, count in sorted(result.lags.items())},
        "busy_s": result.busy,
        "idle_s": result.idle,
        "bars": len(result.bars),
    }


def _text(title: str, flags: SimulateFlags, result: Simulation, bound: Bound) -> str:
    above = result.period_s / bound.seconds - 1 if bound.seconds else 0.0
    beside = f" ({percent(above)} less)" if above > 5e-4 else ""
    if above < -5e-4:  # the start has no cycle behind it yet, and draws may be shorter than their mean
        beside = " (more updates would tell better)"
    width = flags.width or shutil.get_terminal_size((100, 24)).columns
    lines = [
        f"{title}, {_ms(result.wall_s)} in all",
        "",
        f"period  {_ms(result.period_s)} per update{_measured(result)}",
        *wrap(f"bound   {_ms(bound.seconds)}{beside}, because of {bound.cause}", width, subsequent_indent=" " * 8),
        *_lags(result.lags),
        *([f"groups  {result.dropped} dropped, {flags.updates * flags.batch} kept"] if result.dropped else []),
        *_work(result, width),
        "",
    ]
    end = result.ends[min(DRAWN, len(result.ends)) - 1] if result.ends else result.wall_s
    bars = [bar for bar in result.bars if bar.start < end]
    if len(result.ends) > DRAWN:
        lines.append(f"The first {DRAWN} updates:")
    return "\n".join([*lines, gantt_text(bars, width, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ)])


def _measured(result: Simulation) -> str:
    """What the period is of."""
    if result.cycle_s is not None:
        return " once the pipeline is full"
    return f": the mean of all {len(result.ends)}, the filling of the pipeline included"


def _ms(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 2 else f"{seconds * 1e3:.4g} ms"


def _lags(lags: Mapping[int, int]) -> list[str]:
    """A bar per difference of an update and the version that its groups were made with."""
    total = sum(lags.values())
    return [
        f"{'lag' if not row else '':<8}{lag:>2} {'█' * max(1, round(30 * count / total))} {percent(count / total)}"
        for row, (lag, count) in enumerate(sorted(lags.items()))
    ]


def _work(result: Simulation, columns: int) -> list[str]:
    """Each pool's share of busy time, and why it was idle."""
    lines = []
    pools: dict[str, list[str]] = {}
    for replica in result.busy:
        pools.setdefault(pool_of(replica), []).append(replica)
    width = max(map(len, pools), default=0)
    for row, (pool, replicas) in enumerate(pools.items()):
        wall = result.wall_s * len(replicas) or 1.0
        idle: dict[str, float] = {}
        for replica in replicas:
            for cause, seconds in result.idle[replica].items():
                idle[cause] = idle.get(cause, 0.0) + seconds
        busy = percent(sum(result.busy[r] for r in replicas) / wall)
        causes = ", ".join(f"{cause} {percent(seconds / wall)}" for cause, seconds in idle.items() if seconds > 0)
        line = f"{'pools' if not row else '':<8}{pool:<{width}}  busy {busy:>7}  idle: {causes or '-'}"
        lines += wrap(line, columns, subsequent_indent=" " * (width + 24))
    return lines
