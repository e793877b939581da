"""`penstock simulate --from RUN`: what another lag, or other replicas, would make of a run, with its own durations."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from statistics import fmean

from penstock.graph import check
from penstock.graph.analysis import Bound
from penstock.graph.ir import Graph
from penstock.runtime.cli.display import percent
from penstock.runtime.cli.flags import RecordedFlags, SimulateFlags, read_flags
from penstock.runtime.cli.planning import assumed, labelled
from penstock.runtime.cli.simulating import SYNC, bound_lines, depth_lines, duration, lag_lines, ms, pool_lines
from penstock.runtime.cli.tracing import CommandError, faults_text
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import Plan, place, served
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.report.follow import NS
from penstock.runtime.report.run_history import Facts, StageRecord, read_facts
from penstock.runtime.report.what_if import (
    Crowding,
    bound,
    crowding,
    fit,
    generators,
    group_work,
    quick_updates,
    with_capacity,
    with_crowding,
    with_lag,
    with_replicas,
)
from penstock.runtime.schedule.compile import Rules, Tables, check_rules, compile_tables
from penstock.runtime.schedule.simulator import Duration, Durations, LognormalSeconds, Simulation, simulate

FLAG = "--from"
COLUMN = 8
"""Where the words of a line begin."""
PATIENCE = 10_000
"""Batches that filters may drop for each update: the simulation is not to fail where the run did not."""
DESCRIPTION = """What another lag, or another number of generators, would have made of a run: the same scheduler on a
virtual clock, with the durations that the run's firings had.

What the program's other options would change (lengths, batches, models) the run cannot tell: for these, run it again.

Examples:
  penstock simulate --from runs/aipo-20250304-050607 --lag 2
  penstock simulate --from runs/aipo-20250304-050607 --generators 4 --updates 50 --html schedule.html
  penstock simulate --from runs/aipo-20250304-050607 --duration score=0.01"""


def from_run(argv: Sequence[str]) -> bool:
    """Do the words ask for the schedule of a run?"""
    return any(word.partition("=")[0] == FLAG for word in argv)


def read_recorded_flags(argv: Sequence[str]) -> RecordedFlags:
    """The flags. Raises CommandError for words that are none, with the reason for a flag that a run cannot vary."""
    if not {"-h", "--help"}.intersection(argv):
        _require_variable(argv)
    return read_flags(RecordedFlags, "simulate", argv, DESCRIPTION)


@dataclass(frozen=True)
class Recorded:
    """A schedule of a run's durations. `measured_s` are the run's own seconds per update, of as many updates. `same`:
    nothing differs from the run. `settings` are what the flags can change, by name; `notes` say what the run's folder
    lacks."""

    folder: str
    graph: Graph
    batch: int
    result: Simulation
    bound: Bound
    measured_s: float
    same: bool
    settings: Mapping[str, object]
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.graph.name} as in {self.folder}: {len(self.result.ends)} updates of {self.batch} groups"

    @property
    def bound_s(self) -> float:
        return min(self.bound.seconds, self.result.steady_s)

    def facts(self) -> Mapping[str, object]:
        return {
            "program": self.graph.name,
            "run": self.folder,
            "updates": len(self.result.ends),
            "batch": self.batch,
            **self.settings,
            "period_s": self.result.steady_s,
            "period_of": "steady updates" if self.result.steady else "all updates",
            "measured_s": self.measured_s,
            "unchanged": self.same,
            "bound_s": self.bound_s,
            "bound_cause": self.bound.cause,
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
        }

    def lines(self, width: int) -> list[str]:
        result = self.result
        of = "once the pipeline is full" if result.steady else f"the mean of all {len(result.ends)}"
        changed = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        kept = len(result.ends) * self.batch
        period = f"{ms(result.steady_s)} per update, {of}; {self._against()}"
        return [
            f"{self.title}, {ms(result.wall_s)} in all",
            "",
            *labelled("period", period, width, COLUMN),
            *bound_lines(replace(self.bound, seconds=self.bound_s), result.steady_s, width),
            *labelled("with", changed + (", all as in the run" if self.same else ""), width, COLUMN),
            *assumed(self.assumptions, width, COLUMN),
            *[line for note in self.notes for line in labelled("note", note, width, COLUMN)],
            *lag_lines(result.lags),
            *([f"groups  {result.dropped} dropped, {kept} kept"] if result.dropped else []),
            *depth_lines(result),
            *pool_lines(result, width),
        ]

    def _against(self) -> str:
        """The simulated period beside the run's own."""
        more = self.result.steady_s / self.measured_s - 1 if self.measured_s else 0.0
        if abs(more) < 5e-4:
            return f"the run's own is the same, {ms(self.measured_s)}"
        return f"{percent(abs(more))} {'less' if more < 0 else 'more'} than the run's own {ms(self.measured_s)}"


def recorded(flags: RecordedFlags) -> Recorded:
    """The schedule that the flags ask for. Raises RecordError for a folder that holds no run, CommandError for a run
    without finished work and for flags that do not fit its program."""
    folder = RunFolder.open(flags.from_)
    facts = read_facts(folder, alive=folder.alive)
    stage = max(facts.training, key=lambda s: len(s.followed.ends), default=None)
    fitted = fit(stage) if stage is not None and stage.followed.ends else None
    if stage is None or fitted is None:
        done = len(stage.followed.ends) if stage is not None else 0
        given = f"given a run that has finished {done} updates and not every node's firing once"
        raise CommandError(f"{FLAG} {flags.from_}: {given}, needed one that has finished an update", 2)
    graph, plan = _changed(stage, facts, flags)
    rules = replace(stage.origin.rules, drops=PATIENCE, versions=flags.versions or stage.origin.rules.versions)
    same_schedule = (graph, plan, rules.versions) == (
        stage.origin.graph, stage.origin.plan, stage.origin.rules.versions,
    )  # fmt: skip
    updates = flags.updates or quick_updates(stage)
    # Where a stage went on from a checkpoint, so does the simulation; its groups may be none of another schedule's.
    saved, live, start = (stage.origin.saved, stage.origin.live, rules.start) if same_schedule else (None, None, 0)
    rules = replace(rules, start=start, end=start + updates)
    pool = generators(stage.tables)
    crowd = crowding(group_work(stage, pool)) if pool is not None else None
    durations = fitted.durations
    if pool is not None and crowd is not None:
        durations = with_crowding(stage, durations, pool, crowd)
    durations = _with_given(graph, durations, flags.duration)
    tables = compile_tables(graph, served(graph, plan))
    check_rules(tables, rules)
    result = simulate(tables, rules, durations, live, verdicts=fitted.verdicts, saved=saved)
    return Recorded(
        folder=flags.from_,
        graph=graph,
        batch=rules.batch,
        result=result,
        bound=bound(graph, plan, _means(graph, durations, result), durations.publish, rules),
        measured_s=_measured_s(stage, updates),
        same=same_schedule and not flags.duration,
        settings=_settings(tables, rules),
        assumptions=tuple(_assumptions(stage, facts, crowd, same_schedule, flags)),
        notes=tuple(facts.notes),
    )


def _require_variable(argv: Sequence[str]) -> None:
    """Raises CommandError for a PROGRAM, and for a flag of the program or of `simulate` that a run cannot vary."""
    if not argv[0].startswith("-"):
        given = f"given the program {argv[0]} beside {FLAG}"
        raise CommandError(f"{given}, needed one of both: a run is simulated with the program that it has", 2)
    words = [*argv, ""]
    path = next((b if a == FLAG else a.partition("=")[2] for a, b in pairwise(words) if a.startswith(FLAG)), "")
    if not path or path.startswith("-"):
        raise CommandError(f"{FLAG}: given no folder, needed that of a run", 2)
    graph = RunConfig.load(RunFolder.open(path)).graph
    able = {field.name.rstrip("_") for field in fields(RecordedFlags)}
    own = {name for name, _ in graph.options}
    fixed = (own | {field.name for field in fields(SimulateFlags)}) - able
    for word in argv:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name in fixed:
            what = "an option of the program" if name in own else "a flag of programs and plans"
            shown = ", ".join(f"--{each}" for each in ("lag", "generators", "slots", "versions", "updates", "duration"))
            given = f"--{name.replace('_', '-')}: given {what} beside {FLAG}"
            raise CommandError(f"{given}, needed one that durations do not depend on: {shown}", 2)


def _changed(stage: StageRecord, facts: Facts, flags: RecordedFlags) -> tuple[Graph, Plan]:
    """The run's graph and plan with what the flags change. Raises CommandError for what the program does not have, and
    for a lag that its graph does not allow."""
    graph, plan, pool = stage.origin.graph, stage.origin.plan, generators(stage.tables)
    for name in ("lag", "generators", "slots"):
        if pool is None and getattr(flags, name) is not None:
            given = f"--{name}: given for {graph.name}, in which nothing samples with broadcast weights"
            raise CommandError(f"{given}, needed none", 2)
    if flags.lag is not None:
        graph = with_lag(graph, stage.tables.max_lag, flags.lag)
        if faults := check(graph):
            raise CommandError(f"--lag {flags.lag}: {faults_text(faults)}", 2)
    if pool is not None and flags.generators is not None:
        plan = with_replicas(plan, pool, flags.generators)
    if pool is not None and flags.slots is not None:
        # As many groups at once as `penstock run` would give a generator with so many slots.
        like = place(facts.config.graphs, Cluster.local(), slots=flags.slots)
        capacity = next(each.replicas[0].capacity for each in like.pools if each.name == pool)
        plan = with_capacity(plan, pool, capacity)
    return graph, plan


def _with_given(graph: Graph, durations: Durations, words: Sequence[str]) -> Durations:
    """The durations with those that the command line gives in their place. Raises CommandError."""
    names = [node.name for node in graph.nodes if node.fires]
    nodes: dict[str, Duration] = dict(durations.nodes)
    sync = {name: float(getattr(durations, name)) for name in SYNC}
    for word in words:
        name, mean, sigma = duration(word, [*names, *SYNC])
        if name in SYNC:
            sync[name] = mean
        else:
            nodes[name] = LognormalSeconds(mean, sigma) if sigma else mean
    return Durations(nodes, **sync)


def _means(graph: Graph, durations: Durations, result: Simulation) -> dict[str, float]:
    """Mean seconds of a group or update at each node in the simulation, all turns of it; of a broadcast, of a sync."""
    seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for bar in result.bars:
        seconds[bar.name][bar.index] += bar.end - bar.start
    sync = durations.publish + durations.wire + durations.swap
    return {
        node.name: sync if node.construct == "broadcast" else fmean(seconds[node.name].values() or [0.0])
        for node in graph.nodes
    }


def _measured_s(stage: StageRecord, updates: int) -> float:
    """Seconds per update of the run itself: of as many updates as are simulated, or of all that it has done."""
    ends = [(end - stage.begin) / NS for _, end in sorted(stage.followed.ends.items())][:updates]
    return Simulation(ends=ends, wall_s=ends[-1], max_lag=stage.tables.max_lag).steady_s


def _settings(tables: Tables, rules: Rules) -> dict[str, object]:
    pool = generators(tables)
    sampling = {"lag": tables.max_lag, "generators": len(tables.by_pool[pool])} if pool is not None else {}
    return {**sampling, "versions": rules.versions}


def _assumptions(
    stage: StageRecord, facts: Facts, crowd: Crowding | None, same: bool, flags: RecordedFlags
) -> Iterator[str]:
    """What stands behind the figures, a sentence each."""
    ends = stage.followed.ends
    several = f", the longest of {len(facts.training)} parts" if len(facts.training) > 1 else ""
    yield (
        f"A firing takes as long as it did in the run (updates {min(ends)} to {max(ends)}{several}) and decides as it "
        "did there; one that the run did not do takes as long as another one of its node, drawn by a key. Transfers of "
        "weights take their medians."
    )
    if crowd is not None and crowd.share:
        yield (
            f"Groups on one generator slow each other down: {percent(crowd.share)} of a group's seconds grows with the "
            f"number in work, {crowd.mean:.1f} in the run. That share is fitted to the run, and comes out too small "
            "where groups differ much in length."
        )
    elif crowd is not None and not same:
        yield "A group takes as long however many others its generator has in work: the run does not tell otherwise."
    if not same:
        yield "Replicas are as fast as those of the run and take nothing from each other; responses are as long."
    if "--in-process" in facts.asked.get("command", ()):
        yield "The run did one thing at a time, in one process: its seconds include the waits for each other."
    if flags.duration:
        yield f"Given instead of the run's: {' '.join(flags.duration)}."
    yield "What passes between an answer and the next command is left out."
