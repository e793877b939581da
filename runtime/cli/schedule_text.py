"""The output of `penstock simulate` for any schedule (text, JSON, files), and the parsing of NODE=SECONDS words.

`Schedule` is made by each kind of simulation. Its text has a title, the period, lags, queues, pools, and a drawing.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from pathlib import Path
from textwrap import wrap

from penstock.graph.analysis import Bound
from penstock.graph.ir import label_of
from penstock.runtime.cli.display import percent
from penstock.runtime.cli.flags import DrawingFlags
from penstock.runtime.cli.plan import labelled
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.record.errors import visible
from penstock.runtime.record.folder import write_atomic
from penstock.runtime.record.timeline import Bar, excerpt, pool_of
from penstock.runtime.record.trace_formats import chrome_trace, gantt_svg, gantt_text
from penstock.runtime.schedule.simulator import Duration, Durations, LognormalSeconds, Simulation

# How many updates the text shows; files have all.
DRAWN = 6
# How many replicas of each pool pictures show.
LANES = 8
# The column in which the words of a line begin.
COLUMN = 8
# The parts of a weight sync that have their own durations.
SYNC = ("publish", "wire", "swap")

# (label, words) pairs. An empty label continues the paragraph above.
Paragraphs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Schedule:
    """A simulation with its description.

    title, wall: what was simulated, and its wall time, for the first line.
    facts: the facts in --json before the figures common to all schedules.
    head, lags: paragraphs before and after the bars of the lags. tail: lines after the pools, wrapped already.
    queues: whether queues are shown.
    """

    title: str
    wall: str
    result: Simulation
    facts: Mapping[str, object]
    head: Paragraphs
    lags: Paragraphs = ()
    tail: Sequence[str] = ()
    queues: bool = True

    def to_json(self) -> dict[str, object]:
        result = self.result
        pools = {pool: {"busy": busy, "idle": idle} for pool, (busy, idle) in shares(result).items()}
        return {
            **self.facts,
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

    def text(self, width: int) -> str:
        result = self.result

        def paragraphs(given: Paragraphs) -> list[str]:
            return [line for label, words in given for line in labelled(label, words, width, COLUMN)]

        lines = [f"{self.title}, {self.wall} in all", "", *paragraphs(self.head)]
        total = result.lags.total()
        for row, (lag, count) in enumerate(sorted(result.lags.items())):
            bar = "█" * max(1, round(30 * count / total))
            lines.append(f"{'' if row else 'lag':<8}{lag:>2} {bar} {percent(count / total)}")
        lines += paragraphs(self.lags)
        words = {}
        for node, waiting in depths(result).items() if self.queues else ():
            most = f"95 % of the time at most {waiting['p95']:.0f}, max {waiting['max']:.0f} groups"
            words[node] = f"mean {waiting['mean']:.1f}, {most}"
        lines += named_lines("queues", words)
        words = {}
        for pool, (busy, idle) in shares(result).items():
            causes = ", ".join(f"{cause} {percent(share)}" for cause, share in idle.items() if share > 0)
            words[pool] = f"busy {percent(busy):>7}  idle: {causes or '-'}"
        indent = " " * (max(map(len, words), default=0) + 24)
        for line in named_lines("pools", words):
            lines += wrap(line, width, subsequent_indent=indent)
        lines += [*self.tail, ""]
        # Draw only the first updates and replicas, under a line that says so if there are more.
        sizes = Counter(map(pool_of, result.busy))
        parts = [f"{DRAWN} updates"] if len(result.ends) > DRAWN else []
        parts += [f"{LANES} replicas of each pool"] if max(sizes.values(), default=0) > LANES else []
        lines += [f"The first {', and the first '.join(parts)}:"] if parts else []
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        picture = gantt_text(excerpt(result.bars, DRAWN, LANES), width, color=color)
        return "\n".join([*map(visible, lines), picture])

    def write(self, flags: DrawingFlags) -> None:
        """Write the files that the flags ask for."""
        pictured: list[Bar] = excerpt(self.result.bars, len(self.result.ends), LANES)
        if flags.svg:
            write_atomic(Path(flags.svg), gantt_svg(pictured, self.title).encode(), "--svg FILE")
        if flags.html:
            from penstock.runtime.report.page import schedule_html  # imports templates: only if needed

            write_atomic(Path(flags.html), schedule_html(pictured, self.title).encode(), "--html FILE")
        if flags.trace:
            trace = json.dumps(chrome_trace(self.result.bars, self.title))
            write_atomic(Path(flags.trace), trace.encode(), "--trace FILE")


def shares(result: Simulation) -> dict[str, tuple[float, dict[str, float]]]:
    """For each pool, the share of time with work, and the shares of idle time by cause."""
    found = {}
    # The replicas of a pool are adjacent.
    for pool, group in groupby(result.busy, pool_of):
        replicas = list(group)
        wall = result.wall_s * len(replicas) or 1.0
        idle: dict[str, float] = {}
        for cause, length in (item for replica in replicas for item in result.idle[replica].items()):
            idle[cause] = idle.get(cause, 0.0) + length / wall
        found[pool] = sum(result.busy[r] for r in replicas) / wall, idle
    return found


def named_lines(label: str, words: Mapping[str, str]) -> Iterator[str]:
    """A line for each name with its words; the first line has the label."""
    width = max(map(len, words), default=0)
    for row, (name, said) in enumerate(words.items()):
        yield f"{'' if row else label:<{COLUMN}}{name:<{width}}  {said}"


def depths(result: Simulation) -> dict[str, dict[str, float]]:
    """The number of groups that waited for each node, over time: mean, 95th percentile and maximum."""
    found = {}
    for node, seconds in result.depths.items():
        total, passed, p95 = sum(seconds.values()), 0.0, 0
        # Weighted by time: a queue that is long only for a moment hardly counts.
        for depth in sorted(seconds):
            passed, p95 = passed + seconds[depth], depth
            if passed >= 0.95 * total:
                break
        mean = sum(depth * time for depth, time in seconds.items()) / total if total else 0.0
        found[node] = {"mean": mean, "p95": p95, "max": max(seconds, default=0)}
    return found


def bound_words(bound: Bound, period_s: float) -> str:
    """The bound in words, compared with the period."""
    below = 1 - bound.seconds / period_s if bound.seconds and period_s else 0.0
    beside = f" ({percent(below)} less)" if below > 5e-4 else ""
    if below < -5e-4:  # the first updates have no full cycle before them, and draws may be shorter than their mean
        beside = " (more updates would tell better)"
    return f"{ms(bound.seconds)}{beside}, because of {bound.cause}"


def period_facts(result: Simulation) -> dict[str, object]:
    return {"period_s": result.steady_s, "period_of": "steady updates" if result.steady else "all updates"}


def period_of(result: Simulation) -> str:
    """The updates to which `steady_s` refers, in words."""
    return "once the pipeline is full" if result.steady else f"the mean of all {len(result.ends)}"


def dropped_groups(result: Simulation, batch: int) -> Paragraphs:
    return [("groups", f"{result.dropped} dropped, {len(result.ends) * batch} kept")] if result.dropped else []


def assumed(said: Sequence[str]) -> Paragraphs:
    """The assumptions behind the figures, a paragraph each."""
    return [("" if row else "assumed", words) for row, words in enumerate(said)]


def ms(seconds: float) -> str:
    """Seconds in words: from 1 s on, as rounded, in seconds."""
    words = f"{seconds * 1e3:.4g} ms"
    return words if seconds < 1 and words != "1000 ms" else f"{seconds:.4g} s"


def given_durations(
    durations: Durations, words: Sequence[str], names: Sequence[str], seed: int = 0
) -> tuple[Durations, dict[str, float]]:
    """The durations, replaced where NODE=SECONDS[~SIGMA] words give others (drawn by the seed); and the means of the
    given ones by node.

    Raises CommandError for words that cannot be understood, and for a node that is not in `names`.
    """
    nodes: dict[str, Duration] = dict(durations.nodes)
    sync = {name: float(getattr(durations, name)) for name in SYNC}
    means: dict[str, float] = {}
    for word in words:
        name, rest = named_node("--duration", word, names, "none")
        seconds, tilde, spread = rest.partition("~")
        try:
            mean, sigma = float(seconds), float(spread) if tilde else 0.0
        except ValueError:
            mean, sigma = -1.0, 0.0
        if not (min(mean, sigma) >= 0 and max(mean, sigma) < inf):
            raise CommandError(f"--duration: given {word!r}, needed seconds and sigma, such as {name}=0.05~0.5")
        if name in SYNC:
            if sigma:
                needed = f"seconds alone: each {name} takes as long as the others"
                raise CommandError(f"--duration: given {word!r}, needed {needed}")
            sync[name] = mean
        else:
            nodes[name], means[name] = LognormalSeconds(mean, sigma, seed) if sigma else mean, mean
    return Durations(nodes, sync["publish"], sync["wire"], sync["swap"]), means


def named_node(flag: str, word: str, names: Sequence[str], none: str) -> tuple[str, str]:
    """Split NODE=REST into the node's name and the rest. A node's label stands for its name (see `ir.Node.label`).
    Raises CommandError for a node that is not in `names`; `none` is what is needed if `names` is empty."""
    given, _, rest = word.partition("=")
    for name in names:
        if given in (name, label_of(name)):
            return name, rest
    raise CommandError(f"{flag}: given {word!r}, needed {f'one of {labels(names)}' if names else none} before '='")


def labels(names: Sequence[str]) -> str:
    return ", ".join(label_of(name) for name in names)
