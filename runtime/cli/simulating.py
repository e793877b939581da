"""A plan's schedule with the seconds of the cost model, for `penstock simulate --cluster …` and `--plan FILE`.

A schedule of durations and verdicts as the command line gives them, for `penstock simulate`.

What `penstock simulate` prints of any schedule: lags, pools, and the drawing.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from math import isclose
from pathlib import Path
from textwrap import wrap
from typing import Any

from penstock.graph.analysis import Bound, period_bound
from penstock.graph.ir import Graph
from penstock.runtime.cli.display import figure, many, percent, seconds
from penstock.runtime.cli.flags import PlanFlags, Planning, SimulateFlags
from penstock.runtime.cli.planning import assumed, labelled, search
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import place, served
from penstock.runtime.plan.roles import assumptions, roles_of
from penstock.runtime.plan.simulate import Costed, Scene, Simulated, read_costed
from penstock.runtime.record.timeline import Bar, excerpt, pool_of
from penstock.runtime.record.trace_formats import gantt_text
from penstock.runtime.schedule.compile import Rules, compile_tables
from penstock.runtime.schedule.simulator import Duration, Durations, LognormalSeconds, Simulation, Verdicts, simulate

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
            for cause, length in result.idle[replica].items():
                idle[cause] = idle.get(cause, 0.0) + length / wall
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


BATCH = 8
"""Prompt groups per update, unless it is said."""
SYNC = ("publish", "wire", "swap")


@dataclass(frozen=True)
class Given:
    """A schedule of given durations."""

    graph: Graph
    batch: int
    result: Simulation
    bound: Bound

    @property
    def title(self) -> str:
        return f"{self.graph.name}: {len(self.result.ends)} updates of {self.batch} groups"

    def facts(self) -> Mapping[str, object]:
        return {
            "program": self.graph.name,
            "updates": len(self.result.ends),
            "batch": self.batch,
            "period_s": self.result.period_s,
            "period_of": "all updates" if self.result.cycle_s is None else "the full pipeline",
            "bound_s": self.bound_s,
            "bound_cause": self.bound.cause,
        }

    @property
    def bound_s(self) -> float:
        """The bound, which the period may be: then their sums are rounded apart."""
        period, bound = self.result.period_s, self.bound.seconds
        return min(period, bound) if isclose(period, bound, rel_tol=1e-9) else bound

    def lines(self, width: int) -> list[str]:
        result = self.result
        kept = len(result.ends) * self.batch
        return [
            f"{self.title}, {ms(result.wall_s)} in all",
            "",
            f"period  {ms(result.period_s)} per update{_measured(result)}",
            *bound_lines(self.bound, result.period_s, width),
            *lag_lines(result.lags),
            *([f"groups  {result.dropped} dropped, {kept} kept"] if result.dropped else []),
            *pool_lines(result, width),
        ]


def given(graph: Graph, flags: SimulateFlags) -> Given:
    """The schedule of the seconds that the flags give. Raises CommandError for flags that cannot be understood."""
    timed, batch = timing(graph, flags.duration), flags.batch or BATCH
    plan = served(graph, place([graph], Cluster.local(), generators=flags.generators, slots=flags.slots))
    rules = Rules(batch, flags.updates, versions=flags.versions)
    verdicts = deciding(graph, flags.drop, flags.again)
    result = simulate(compile_tables(graph, plan), rules, timed.durations, verdicts=verdicts)
    capacity = {pool.name: sum(r.capacity for r in pool.replicas) for pool in plan.pools}
    return Given(graph, batch, result, period_bound(graph, timed.means, batch, capacity))


def bound_lines(bound: Bound, period_s: float, width: int) -> list[str]:
    """What no schedule can beat, beside the period that it has."""
    below = 1 - bound.seconds / period_s if bound.seconds and period_s else 0.0
    beside = f" ({percent(below)} less)" if below > 5e-4 else ""
    if below < -5e-4:  # the start has no cycle behind it yet, and draws may be shorter than their mean
        beside = " (more updates would tell better)"
    return wrap(f"bound   {ms(bound.seconds)}{beside}, because of {bound.cause}", width, subsequent_indent=" " * 8)


def _measured(result: Simulation) -> str:
    """What the period is of."""
    if result.cycle_s is not None:
        return " once the pipeline is full"
    return f": the mean of all {len(result.ends)}, the filling of the pipeline included"


def ms(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 2 else f"{seconds * 1e3:.4g} ms"


@dataclass(frozen=True)
class Timing:
    """Durations as the simulator takes them, and their means by node, which the bound takes."""

    durations: Durations
    means: dict[str, float]


def timing(graph: Graph, words: Sequence[str]) -> Timing:
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
    for word in words:
        name, mean, sigma = duration(word, [*(n.name for n in calls), *SYNC])
        if name in sync:
            sync[name] = mean
        else:
            nodes[name], means[name] = LognormalSeconds(mean, sigma) if sigma else mean, mean
    if missing := [node.name for node in calls if node.name not in nodes]:
        example = " ".join(f"{name.partition(':')[0]}=0.05" for name in missing)
        others = "or a plan (--cluster and --model), or a run that has ended (penstock simulate --from RUN)"
        raise CommandError(f"no duration of {_labels(missing)}; needed all, such as --duration {example}, {others}", 2)
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
    name, rest = _named(word, names)
    if name not in names:
        needed = f"one of {_labels(names)} before '='" if names else f"none, since the program has no {kind}"
        raise CommandError(f"{flag}: given {word!r}, needed {needed}", 2)
    try:
        share = float(rest)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise CommandError(f"{flag}: given {word!r}, needed a share from 0 to 1, such as {name}=0.3", 2)
    return name, share


def _named(word: str, names: Sequence[str]) -> tuple[str, str]:
    """The node and the rest of NODE=REST. A node's label stands for its name (see `ir.Node.label`)."""
    given, _, rest = word.partition("=")
    return next((name for name in names if given in (name, name.partition(":")[0])), given), rest


def _labels(names: Sequence[str]) -> str:
    return ", ".join(name.partition(":")[0] for name in names)


@dataclass(frozen=True)
class Uniform:
    """Seconds between `low` and `low` + `jitter`, keyed by node and index."""

    low: float
    jitter: float

    def __call__(self, node: str, index: int) -> float:
        key = blake2b(f"{node}/{index}".encode(), digest_size=8).digest()
        return self.low + self.jitter * int.from_bytes(key, "big") / 2**64


def duration(word: str, names: Sequence[str]) -> tuple[str, float, float]:
    """Name, mean and sigma of NAME=SECONDS[~SIGMA]. Raises CommandError, also for a name that is not of `names`."""
    name, rest = _named(word, names)
    seconds, _, sigma = rest.partition("~")
    if name not in names:
        raise CommandError(f"--duration: given {word!r}, needed one of {_labels(names) or 'none'} before '='", 2)
    try:
        values = float(seconds), float(sigma or 0.0)
    except ValueError:
        values = -1.0, 0.0
    if not (min(values) >= 0 and max(values) < float("inf")):
        raise CommandError(f"--duration: given {word!r}, needed seconds and sigma, such as {name}=0.05~0.5", 2)
    return name, *values


COLUMN = 8
"""Where the words begin."""
OTHERWISE = {"drop": "--kept says what its filters leave", "generators": "the plan says it"}
"""What stands for flags of given seconds in a plan."""
COMPARED = 24
"""Updates of each run that shows the effect of lag; no more than were asked for."""


@dataclass(frozen=True)
class PlannedSchedule:
    """A schedule of a plan. `effect`: runs of at most `COMPARED` updates by lag; empty where shared GPUs leave it
    without any."""

    found: Simulated
    effect: Mapping[int, Simulation]

    @property
    def result(self) -> Simulation:
        return self.found.result

    @property
    def title(self) -> str:
        plan = self.found.scene.plan
        what = f"{self.found.scene.graph.name} with {plan.work.shape.name} on {plan.gpus} GPUs"
        return f"{what}: {len(self.result.ends)} updates of {plan.work.prompts} groups"

    def facts(self) -> Mapping[str, object]:
        plan, full = self.found.scene.plan, self.found.filling
        return {
            "program": self.found.scene.graph.name,
            "model": plan.work.shape.name,
            "gpus": plan.gpus,
            "updates": len(self.result.ends),
            "batch": plan.work.prompts,
            "lag": self.found.scene.lag,
            "period_s": self.result.steady_s,
            "period_of": "steady updates" if self.result.steady else "all updates",
            "planned_s": plan.period_s,
            "planned_lag": plan.lag,
            "planned_bound": plan.bound,
            "tokens_per_s": self.found.tokens_per_s,
            "tokens_per_s_per_gpu": self.found.tokens_per_s / plan.gpus,
            "groups_per_s": self.found.groups_per_s,
            "assumptions": list(assumptions(self.found.scene.roles, plan.work)),
            "slots": {field.name: getattr(full, field.name) for field in fields(full)},
            "effect_of_lag": [
                {"lag": lag, "period_s": result.steady_s, "gain": self._gain(result), "updates": len(result.ends),
                 "period_of": "steady updates" if result.steady else "all updates"}
                for lag, result in self.effect.items()
            ],
        }  # fmt: skip

    def lines(self, width: int) -> list[str]:
        found, plan, full = self.found, self.found.scene.plan, self.found.filling
        rates = f"{many(found.tokens_per_s)} tokens and {figure(found.groups_per_s)} groups per second"
        each = f", {many(found.tokens_per_s / plan.gpus)} tokens per second and GPU"
        occupied = f"{percent(full.occupancy)} of {full.slots} in use"
        tails = f"{percent(full.tail_occupancy)} in tails, which take {seconds(full.tail_s)}"
        return [
            f"{self.title}, {seconds(self.result.wall_s)} in all",
            "",
            *labelled(
                "period", f"{seconds(self.result.steady_s)} per update, {self._of()}; {self._against()}", width, COLUMN
            ),
            *labelled("rate", f"{rates}{each}", width, COLUMN),
            *assumed(assumptions(found.scene.roles, plan.work), width, COLUMN),
            *lag_lines(self.result.lags),
            *labelled("", f"the bound is {found.scene.lag}", width, COLUMN),
            *labelled("slots", f"{occupied}; {tails}", width, COLUMN),
            *depth_lines(self.result),
            *pool_lines(self.result, width),
            *self._effects(width),
        ]

    def _of(self) -> str:
        return "once the pipeline is full" if self.result.steady else f"the mean of all {len(self.result.ends)}"

    def _against(self) -> str:
        """What the planner says, where it speaks of the same lag."""
        plan, scene = self.found.scene.plan, self.found.scene
        if not plan.shared and plan.lag != scene.lag:
            return f"the plan is for lag {plan.lag}"
        above = 1 - plan.period_s / self.result.steady_s
        return f"the planner says {seconds(plan.period_s)}, {percent(abs(above))} {'less' if above >= 0 else 'more'}"

    def _effects(self, width: int) -> list[str]:
        """The same figure as the period, of runs that may be shorter."""
        if not self.effect:
            return labelled("by lag", "all the same: the pools share GPUs and take turns", width, COLUMN)
        done = len(next(iter(self.effect.values())).ends)
        of = f" of runs of {done} updates, while that above is of {len(self.result.ends)}"
        head = f"the period{of if done < len(self.result.ends) else ''}; how much faster than at lag {min(self.effect)}"
        lines = labelled("by lag", head, width, COLUMN)
        for row, (lag, result) in enumerate(self.effect.items()):
            filling = "" if result.steady else "  the filling of the pipeline included"
            gain = f"{percent(self._gain(result)):>8}" if row else " " * 8
            lines.append(f"{lag:>10}  {seconds(result.steady_s):>8}  {gain}{filling}".rstrip())
        return lines

    def _gain(self, result: Simulation) -> float:
        """How much more is done in the same time than at the smallest lag."""
        return next(iter(self.effect.values())).steady_s / result.steady_s - 1


def planned(graph: Graph, flags: SimulateFlags) -> PlannedSchedule | None:
    """None where the flags ask for no plan. Raises CommandError for flags that contradict each other, and what planning
    raises."""
    said = _said(flags)
    if not (flags.cluster or flags.plan):
        if said := [name for name in said if name != "slots"]:
            raise CommandError(f"{_flag(said[0])}: given without a plan; needed --cluster with it, or none of both", 2)
        return None
    others = ("drop", "again", "generators", "versions")
    if said and flags.plan:
        raise CommandError(f"{_flag(said[0])}: given beside --plan, which says it; needed one of both", 2)
    if contrary := [name for name in others if getattr(flags, name) != _default(name)]:
        why = OTHERWISE.get(contrary[0], "plans do not cover it")
        raise CommandError(f"{_flag(contrary[0])}: given with a plan; needed none, since {why}", 2)
    scene = _scene(graph, flags)
    effect = {} if scene.plan.shared else dict(scene.effect_of_lag(min(flags.updates, COMPARED)))
    return PlannedSchedule(scene.run(flags.updates), effect)


def _scene(graph: Graph, flags: SimulateFlags) -> Scene:
    small = _small(graph, flags.duration)
    if flags.plan:
        return Scene(graph, _read(graph, flags.plan), flags.seed, small)
    return Scene(graph, search(graph, flags, flags.batch or PlanFlags().batch).costed, flags.seed, small)


def _read(graph: Graph, file: str) -> Costed:
    """The plan in a file. Raises PlanError for one of another program, CommandError for one of other work."""
    found, roles = read_costed(Path(file), graph.name), roles_of(graph)
    for name in ("samples", "epochs", "minibatches"):
        given, needed = getattr(found.work, name), getattr(roles, name)
        if given != needed:
            what = f"given a plan for {name} {given}, needed {needed}, as the program has"
            raise CommandError(f"--plan {file}: {what}", 2)
    return found


def _small(graph: Graph, given: tuple[str, ...]) -> dict[str, Duration]:
    """Seconds of nodes that the cost model has none for."""
    roles = roles_of(graph)
    costed = {*roles.cycle, *roles.learners, *roles.rereads, *roles.followers, *(node for node, _ in roles.baselines)}
    names = [node.name for node in graph.nodes if node.fires and node.name not in costed]
    found = (duration(word, names) for word in given)
    return {name: LognormalSeconds(mean, sigma) if sigma else mean for name, mean, sigma in found}


def _said(flags: SimulateFlags) -> list[str]:
    """The flags of a plan that are not as they are by default."""
    names = [field.name for field in fields(Planning)] + ["batch"]
    planning = [name for name in names if getattr(flags, name) != _default(name)]
    return [name for name in planning if name != "batch" or flags.plan]


def _default(name: str) -> Any:
    return getattr(SimulateFlags(), name)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
