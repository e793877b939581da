"""A schedule of durations and verdicts as the command line gives them, for `penstock simulate`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isclose
from textwrap import wrap

from penstock.graph.ir import Graph
from penstock.graph.passes import Bound, period_bound
from penstock.runtime.cli.figures import percent
from penstock.runtime.cli.flags import SimulateFlags
from penstock.runtime.cli.simulate_text import lag_lines, pool_lines
from penstock.runtime.cli.traced import CommandError
from penstock.runtime.plan.cluster import Cluster
from penstock.runtime.plan.place import place
from penstock.runtime.plan.simulated_places import served
from penstock.runtime.schedule.durations import Duration, Durations, Lognormal
from penstock.runtime.schedule.simulation import Simulation
from penstock.runtime.schedule.simulator import simulate
from penstock.runtime.schedule.tables import Rules, compile_tables
from penstock.runtime.schedule.verdicts import Verdicts

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
            nodes[name], means[name] = Lognormal(mean, sigma) if sigma else mean, mean
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
