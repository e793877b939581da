"""`penstock simulate --from RUN`: simulate a past run with another lag or other replicas, and its own durations."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from statistics import fmean
from typing import Annotated, Literal

import tyro

from penstock.graph import check
from penstock.graph.ir import Graph
from penstock.runtime.cli.display import percent
from penstock.runtime.cli.flags import DrawingFlags, SimulateFlags
from penstock.runtime.cli.schedule_text import (
    SYNC,
    Schedule,
    assumed,
    bound_words,
    dropped_groups,
    given_durations,
    ms,
    period_facts,
    period_of,
)
from penstock.runtime.cli.tracing import CommandError, faults_text
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import Plan, place, served, slots_overrun
from penstock.runtime.control.run_config import Count, Positive, RunConfig, Shown
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.report.follow import NS
from penstock.runtime.report.run_history import Facts, StageHistory, read_facts
from penstock.runtime.report.what_if import (
    Crowding,
    bound,
    crowding,
    fit,
    generators,
    group_work,
    quick_updates,
    with_crowding,
    with_lag,
    with_replicas,
)
from penstock.runtime.schedule.compile import Tables, check_rules
from penstock.runtime.schedule.simulator import Durations, Simulation, simulate

FLAG = "--from"
# How many batches filters may drop for each update: the simulation must not fail where the run did not.
PATIENCE = 10_000


@dataclass(frozen=True)
class RecordedFlags(DrawingFlags):
    """Simulate a past run with another lag or another number of generators: the same scheduler on a virtual
    clock, with the durations that the run's firings had.

    The run does not show the effect of the program's other options (lengths, batches, models): for these, run it again.

    Examples:
      penstock simulate --from runs/aipo-20250304-050607 --lag 2
      penstock simulate --from runs/aipo-20250304-050607 --generators 4 --updates 50 --html schedule.html
      penstock simulate --from runs/aipo-20250304-050607 --duration score=0.01"""

    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN", help_behavior_hint="(required)")] = ""
    """The folder of a finished or interrupted run, whose durations are taken."""
    lag: Annotated[Count | None, Shown("INT", "the run's")] = None
    """Largest age of weights in updates, for the broadcasts that have the largest lag."""
    generators: Annotated[Positive | None, Shown("INT", "the run's")] = None
    """Replicas of the generator."""
    slots: Annotated[Positive | None, Shown("INT", "the run's")] = None
    """Most responses that a generator decodes at the same time."""
    versions: Annotated[Literal["free", "pinned"] | None, tyro.conf.arg(help_behavior_hint="(default: the run's)")] = (
        None
    )
    """Which versions groups may use."""
    order: Annotated[Literal["strict", "ready"] | None, tyro.conf.arg(help_behavior_hint="(default: the run's)")] = None
    """Which groups an update takes."""
    updates: Annotated[Positive | None, Shown("INT", "as many as the run has done")] = None
    """Updates to simulate."""
    duration: Annotated[tuple[str, ...], Shown("NODE=S[~SIGMA] …")] = ()
    """Seconds of a node's firing in place of the run's, such as score=0.01; publish, wire and swap are the parts of a
    weight sync."""


def recorded(flags: RecordedFlags) -> Schedule:
    """The schedule that the flags ask for. Raises RecordError for a folder that holds no run, CommandError for a run
    without finished work and for flags that do not fit its program."""
    folder = RunFolder.open(flags.from_)
    facts = read_facts(folder, alive=folder.alive)
    stage = max(facts.training, key=lambda s: len(s.followed.ends), default=None)
    fitted = fit(stage) if stage is not None and stage.followed.ends else None
    if stage is None or fitted is None:
        done = len(stage.followed.ends) if stage is not None else 0
        given = f"given a run that has finished {done} updates and not every node's firing once"
        raise CommandError(f"{FLAG} {flags.from_}: {given}, needed one that has finished an update")
    graph, plan = _changed(stage, facts, flags)
    before = stage.origin.rules
    versions, order = flags.versions or before.versions, flags.order or before.order
    rules = replace(before, drops=PATIENCE, versions=versions, order=order)
    same = (graph, plan, versions, order) == (stage.origin.graph, stage.origin.plan, before.versions, before.order)
    updates = flags.updates or quick_updates(stage)
    # If the stage went on from a checkpoint, so does the simulation; but not a changed one, whose groups may differ.
    saved, live, start = (stage.origin.saved, stage.origin.live, rules.start) if same else (None, None, 0)
    rules = replace(rules, start=start, end=start + updates)
    pool = generators(stage.tables)
    # How much groups slow each other down is fitted to the run: other replicas have other numbers of groups.
    crowd = crowding(group_work(stage, pool)) if pool is not None else None
    durations = fitted.durations
    if pool is not None and crowd is not None:
        durations = with_crowding(stage, durations, pool, crowd)
    names = [*(node.name for node in graph.nodes if node.fires), *SYNC]
    durations, _ = given_durations(durations, flags.duration, names)
    tables = Tables(graph, served(graph, plan))
    check_rules(tables, rules)
    result = simulate(tables, rules, durations, live, verdicts=fitted.verdicts, saved=saved)
    found = bound(graph, plan, _means(graph, durations, result), durations.publish, rules)
    # The means are over all firings; those of the steady updates may be shorter.
    found = replace(found, seconds=min(found.seconds, result.steady_s))
    # The run's own seconds per update, over as many updates as are simulated, or all that it has done.
    ends = [(end - stage.begin) / NS for _, end in sorted(stage.followed.ends.items())][:updates]
    own = Simulation(ends=ends, wall_s=ends[-1], max_lag=stage.tables.max_lag)
    # Compare like with like: at a larger lag, the pipeline may be filling during all of these few updates.
    alike = (result.steady is None) == (own.steady is None)
    period_s, measured_s = (each.steady_s if alike else each.wall_s / len(each.ends) for each in (result, own))
    of_all = {"period_s": period_s, "period_of": "all updates"}
    of_which = period_of(result) if alike else f"the mean of all {len(result.ends)}"
    more = period_s / measured_s - 1 if measured_s else 0.0
    against = f"the run's own is the same, {ms(measured_s)}"
    if abs(more) >= 5e-4:
        against = f"{percent(abs(more))} {'less' if more < 0 else 'more'} than the run's own {ms(measured_s)}"
    unchanged = same and not flags.duration
    sampling = {"lag": tables.max_lag, "generators": len(tables.by_pool[pool])} if pool is not None else {}
    settings: dict[str, object] = {**sampling, "versions": versions, "order": order}
    changed = ", ".join(f"{name} {value}" for name, value in settings.items())
    overrun = slots_overrun(graph, plan, pool) if pool is not None else 0.0
    assumptions = list(_assumptions(stage, facts, crowd, overrun, same, flags))
    return Schedule(
        title=f"{graph.name} as in {flags.from_}: {len(result.ends)} updates of {rules.batch} groups",
        wall=ms(result.wall_s),
        result=result,
        facts={
            "program": graph.name,
            "run": flags.from_,
            "updates": len(result.ends),
            "batch": rules.batch,
            **settings,
            **(period_facts(result) if alike else of_all),
            "measured_s": measured_s,
            "unchanged": unchanged,
            "bound_s": found.seconds,
            "bound_cause": found.cause,
            "assumptions": assumptions,
            "notes": facts.notes,
        },
        head=[
            ("period", f"{ms(period_s)} per update, {of_which}; {against}"),
            ("bound", bound_words(found, period_s)),
            ("with", changed + (", all as in the run" if unchanged else "")),
            *assumed(assumptions),
            *(("note", note) for note in facts.notes),
        ],
        lags=dropped_groups(result, rules.batch),
    )


def require_variable(argv: Sequence[str]) -> None:
    """Raises CommandError for a PROGRAM, and for a flag of the program or of `simulate` that `--from` cannot vary."""
    if not argv[0].startswith("-"):
        given = f"given the program {argv[0]} beside {FLAG}"
        raise CommandError(f"{given}, needed one of both: a run is simulated with the program that it has")
    # Before tyro parses them: it does not know the flags of the run's program.
    words = [*argv, ""]
    path = next((b if a == FLAG else a.partition("=")[2] for a, b in pairwise(words) if a.startswith(FLAG)), "")
    if not path or path.startswith("-"):
        raise CommandError(f"{FLAG}: given no folder, needed that of a run")
    graph = RunConfig.load(RunFolder.open(path)).graph
    able = {field.name.rstrip("_") for field in fields(RecordedFlags)}
    own = {name for name, _ in graph.options}
    fixed = (own | {field.name for field in fields(SimulateFlags)}) - able
    for word in argv:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name in fixed:
            what = "an option of the program" if name in own else "a flag of programs and plans"
            free = ("lag", "generators", "slots", "versions", "order", "updates", "duration")
            shown = ", ".join(f"--{each}" for each in free)
            given = f"--{name.replace('_', '-')}: given {what} beside {FLAG}"
            raise CommandError(f"{given}, needed one that durations do not depend on: {shown}")


def _changed(stage: StageHistory, facts: Facts, flags: RecordedFlags) -> tuple[Graph, Plan]:
    """The run's graph and plan with the changes by flags. Raises CommandError for a flag without meaning in this
    program, and for a lag that its graph does not allow."""
    graph, plan, pool = stage.origin.graph, stage.origin.plan, generators(stage.tables)
    for name in ("lag", "generators", "slots"):
        if pool is None and getattr(flags, name) is not None:
            given = f"--{name}: given for {graph.name}, in which nothing samples with broadcast weights"
            raise CommandError(f"{given}, needed none")
    if flags.lag is not None:
        graph = with_lag(graph, stage.tables.max_lag, flags.lag)
        if faults := check(graph):
            raise CommandError(f"--lag {flags.lag}: {faults_text(faults)}")
    capacity = None
    if flags.slots is not None:
        # As many groups at once as `penstock run` gives a generator with this many slots.
        like = place(facts.config.graphs, Cluster.local(), slots=flags.slots)
        capacity = next(each.replicas[0].capacity for each in like.pools if each.name == pool)
    if pool is not None:
        plan = with_replicas(plan, pool, flags.generators, capacity)
    return graph, plan


def _means(graph: Graph, durations: Durations, result: Simulation) -> dict[str, float]:
    """The mean seconds of a group (all of its turns) or update at each node in the simulation; for a broadcast those of
    a sync."""
    seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for bar in result.bars:
        seconds[bar.name][bar.index] += bar.end - bar.start
    sync = durations.publish + durations.wire + durations.swap
    return {
        node.name: sync if node.construct == "broadcast" else fmean(seconds[node.name].values() or [0.0])
        for node in graph.nodes
    }


def _assumptions(
    stage: StageHistory, facts: Facts, crowd: Crowding | None, overrun: float, same: bool, flags: RecordedFlags
) -> Iterator[str]:
    """The assumptions behind the figures, a sentence each. `overrun` as of `slots_overrun`."""
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
    if not same and overrun:
        yield (
            "Groups that wait in a generator for a slot are simulated as if they had one: where all slots are in use, "
            f"this is up to {percent(overrun)} too fast."
        )
    if not same:
        yield "Replicas are as fast as those of the run and take nothing from each other; responses are as long."
    if failures := facts.failures[0]:
        yield f"Nothing fails here, and nothing is tried again. In the run, {failures}."
    if any(step.accumulate for step in stage.tables.steps.values()):
        yield "The parts of an update take equal shares of its seconds."
    if any(work.segment and work.kind == "group" for work in stage.followed.work):
        yield "A response that paused (--segment) is as long here, and does not pause."
    if "--in-process" in facts.asked.get("command", ()):
        yield "The run did one thing at a time, in one process: its seconds include the waits for each other."
    if flags.duration:
        yield f"Given instead of the run's: {' '.join(flags.duration)}."
    yield "What passes between an answer and the next command is left out."
