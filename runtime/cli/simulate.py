"""`penstock simulate PROGRAM`: its schedule on a virtual clock, with given durations or a plan's."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from textwrap import wrap

from penstock.graph.ir import Graph
from penstock.graph.passes import Bound, period_bound
from penstock.runtime.cli.figures import percent
from penstock.runtime.cli.flags import SimulateFlags
from penstock.runtime.cli.programs import require_program
from penstock.runtime.cli.simulate_given import deciding, timing
from penstock.runtime.cli.simulate_planned import planned
from penstock.runtime.cli.simulate_text import drawing, facts, lag_lines, pictured, pool_lines
from penstock.runtime.cli.traced import CommandError, trace_program
from penstock.runtime.plan.cluster import Cluster
from penstock.runtime.plan.place import place
from penstock.runtime.plan.simulated_places import served
from penstock.runtime.record.chrome import chrome_trace
from penstock.runtime.record.faults import visible
from penstock.runtime.record.folder import write_atomic
from penstock.runtime.record.svg import gantt_svg
from penstock.runtime.schedule.simulation import Simulation
from penstock.runtime.schedule.simulator import simulate
from penstock.runtime.schedule.tables import Rules, compile_tables

BATCH = 8
"""Prompt groups per update, unless it is said."""


def main(argv: Sequence[str]) -> int:
    require_program("simulate", argv)
    traced = trace_program("simulate", argv)
    flags: SimulateFlags = traced.flags
    graph = traced.sound()
    if flags.updates < 1:
        raise CommandError(f"--updates: given {flags.updates}, needed at least 1", 2)
    try:
        shown = planned(graph, flags) or _given(graph, flags)
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise CommandError(str(error), 2) from None
    _write(shown.result, shown.title, flags)
    width = flags.width or shutil.get_terminal_size((100, 24)).columns
    if flags.json:
        print(json.dumps({**shown.facts(), **facts(shown.result)}))
    else:
        lines = [visible(line) for line in shown.lines(width)]
        print("\n".join([*lines, "", *drawing(shown.result, width)]))
    return 0


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
        result, bound = self.result, self.bound
        below = 1 - bound.seconds / result.period_s if bound.seconds and result.period_s else 0.0
        beside = f" ({percent(below)} less)" if below > 5e-4 else ""
        if below < -5e-4:  # the start has no cycle behind it yet, and draws may be shorter than their mean
            beside = " (more updates would tell better)"
        kept = len(result.ends) * self.batch
        return [
            f"{self.title}, {_ms(result.wall_s)} in all",
            "",
            f"period  {_ms(result.period_s)} per update{_measured(result)}",
            *wrap(f"bound   {_ms(bound.seconds)}{beside}, because of {bound.cause}", width, subsequent_indent=" " * 8),
            *lag_lines(result.lags),
            *([f"groups  {result.dropped} dropped, {kept} kept"] if result.dropped else []),
            *pool_lines(result, width),
        ]


def _given(graph: Graph, flags: SimulateFlags) -> Given:
    timed, batch = timing(graph, flags.duration), flags.batch or BATCH
    plan = served(graph, place([graph], Cluster.local(), generators=flags.generators, slots=flags.slots))
    rules = Rules(batch, flags.updates, versions=flags.versions)
    verdicts = deciding(graph, flags.drop, flags.again)
    result = simulate(compile_tables(graph, plan), rules, timed.durations, verdicts=verdicts)
    capacity = {pool.name: sum(r.capacity for r in pool.replicas) for pool in plan.pools}
    return Given(graph, batch, result, period_bound(graph, timed.means, batch, capacity))


def _write(result: Simulation, title: str, flags: SimulateFlags) -> None:
    """The files that were asked for."""
    if flags.svg:
        write_atomic(Path(flags.svg), gantt_svg(pictured(result), title).encode(), "--svg FILE")
    if flags.html:
        from penstock.runtime.report.schedule import schedule_html  # imports templates, which others do without

        write_atomic(Path(flags.html), schedule_html(pictured(result), title).encode(), "--html FILE")
    if flags.trace:
        write_atomic(Path(flags.trace), json.dumps(chrome_trace(result.bars, title)).encode(), "--trace FILE")


def _measured(result: Simulation) -> str:
    """What the period is of."""
    if result.cycle_s is not None:
        return " once the pipeline is full"
    return f": the mean of all {len(result.ends)}, the filling of the pipeline included"


def _ms(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 2 else f"{seconds * 1e3:.4g} ms"
