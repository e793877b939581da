"""`penstock simulate`: a program's schedule on a virtual clock, with given durations, or those of a plan or a run."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from math import inf, isclose
from pathlib import Path

from penstock.graph.analysis import period_bound
from penstock.graph.ir import Graph, label_of
from penstock.runtime.cli.display import about, figure, many, percent
from penstock.runtime.cli.flags import DrawingFlags, PlanFlags, Planning, SimulateFlags, read_flags
from penstock.runtime.cli.plan import labelled, likely, search
from penstock.runtime.cli.schedule_text import (
    COLUMN,
    SYNC,
    Schedule,
    assumed,
    bound_words,
    dropped_groups,
    given_durations,
    labels,
    ms,
    named_node,
    period_facts,
    period_of,
)
from penstock.runtime.cli.simulate_run import RecordedFlags, recorded, require_variable
from penstock.runtime.cli.tracing import CommandError, trace_program, usage_errors
from penstock.runtime.cluster.placement import place, served
from penstock.runtime.plan.roles import assumptions, roles_of
from penstock.runtime.plan.simulate import ANYWHERE, Scene, read_costed
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.simulator import Duration, Durations, Verdicts, simulate

# The default of prompt groups per update.
BATCH = 8
# Why some flags of given seconds do not apply to a plan.
OTHERWISE = {"drop": "--kept says what its filters leave", "generators": "the plan says it"}
# The most updates of each simulation that shows the effect of lag; no more than were asked for.
COMPARED = 24


def main(argv: Sequence[str]) -> int:
    flags: DrawingFlags
    width = shutil.get_terminal_size((100, 24)).columns
    with usage_errors():
        if any(word.partition("=")[0] == "--from" for word in argv):
            if not {"-h", "--help"}.intersection(argv):
                require_variable(argv)
            flags = read_flags(RecordedFlags, "simulate", argv)
            shown = recorded(flags)
        else:
            traced = trace_program("simulate", argv)
            flags = traced.flags
            shown = _of_program(traced.sound(), traced.flags, flags.width or width)
    shown.write(flags)
    print(json.dumps(shown.to_json()) if flags.json else shown.text(flags.width or width))
    return 0


def _of_program(graph: Graph, flags: SimulateFlags, width: int) -> Schedule:
    """Simulate given seconds, or a plan if the flags ask for one. Raises CommandError for flags that contradict each
    other."""
    default = SimulateFlags()

    def changed(names: Sequence[str]) -> list[str]:
        return [name for name in names if getattr(flags, name) != getattr(default, name)]

    def refuse(name: str, said: str) -> CommandError:
        return CommandError(f"--{name.replace('_', '-')}: given {said}")

    said = changed([field.name for field in fields(Planning)])
    # --slots applies to both: to a plan, and to a generator with given seconds.
    if not (flags.cluster or flags.plan):
        if said := [name for name in said if name != "slots"]:
            raise refuse(said[0], "without a plan; needed --cluster with it, or none of both")
        return given(graph, flags)
    if flags.plan and (said := said + changed(["batch"])):
        raise refuse(said[0], "beside --plan, which says it; needed one of both")
    if contrary := changed(["drop", "again", "generators", "versions", "order", "segment"]):
        why = OTHERWISE.get(contrary[0], "plans do not cover it")
        raise refuse(contrary[0], f"with a plan; needed none, since {why}")
    return planned(graph, flags, width)


def given(graph: Graph, flags: SimulateFlags) -> Schedule:
    """Simulate the seconds that the flags give. Raises CommandError for flags that cannot be understood."""
    durations, means = timing(graph, flags.duration, flags.seed)
    pausing = [node.name for node in graph.nodes if node.fires and node.clock == "group" and not node.answers]
    seconds = _numbers("--segment", flags.segment, pausing, "nodes per group", inf, "seconds", "2")
    durations = replace(durations, segments={name: piece for name, piece in seconds.items() if piece})
    batch = flags.batch or BATCH
    # A group's seconds are those in which it has slots: it waits for them in the queue, not in the generator.
    plan = served(graph, place([graph], ANYWHERE, generators=flags.generators, slots=flags.slots, ahead=0))
    rules = Rules(batch, flags.updates, versions=flags.versions, order=flags.order)
    filters = [node.name for node in graph.nodes if node.construct == "keep"]
    answers = [node.name for node in graph.nodes if node.answers]
    drops = _shares("--drop", flags.drop, filters, "filters (keep)")
    verdicts = Verdicts(drops, _shares("--again", flags.again, answers, "nodes that answer"), flags.seed)
    result = simulate(Tables(graph, plan), rules, durations, verdicts=verdicts)
    capacity = {pool.name: sum(r.capacity for r in pool.replicas) for pool in plan.pools}
    bound, period = period_bound(graph, means, batch, capacity), result.period_s
    # If they are equal, their sums may still differ by rounding.
    bound_s = min(period, bound.seconds) if isclose(period, bound.seconds, rel_tol=1e-9) else bound.seconds
    cycle, num = result.cycle_s is not None, len(result.ends)
    of = " once the pipeline is full" if cycle else f": the mean of all {num}, the filling of the pipeline included"
    return Schedule(
        title=f"{graph.name}: {num} updates of {batch} groups",
        wall=ms(result.wall_s),
        result=result,
        facts={
            "program": graph.name,
            "updates": num,
            "batch": batch,
            "period_s": period,
            "period_of": "the full pipeline" if cycle else "all updates",
            "bound_s": bound_s,
            "bound_cause": bound.cause,
        },
        head=[
            ("period", f"{ms(period)} per update{of}"),
            ("bound", bound_words(bound, period)),
        ],
        lags=dropped_groups(result, batch),
        queues=False,
    )


def timing(graph: Graph, words: Sequence[str], seed: int = 0) -> tuple[Durations, dict[str, float]]:
    """Durations for the simulator, and their means by node for the bound: as given, else from a fake node's options.
    Raises CommandError for a missing one."""
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
    publish_s = float(dict(graph.options).get("sync_ms", 0.0)) / 1e3
    names = [*(node.name for node in calls), *SYNC]
    durations, said = given_durations(Durations(nodes, publish=publish_s), words, names, seed)
    if missing := [node.name for node in calls if node.name not in durations.nodes]:
        example = " ".join(f"{label_of(name)}=0.05" for name in missing)
        others = "or a plan (--cluster and --model), or a run that has ended (penstock simulate --from RUN)"
        raise CommandError(f"no duration of {labels(missing)}; needed all, such as --duration {example}, {others}")
    sync_s = durations.publish + durations.wire + durations.swap
    return durations, means | said | {node.name: sync_s for node in graph.nodes if node.construct == "broadcast"}


def _shares(flag: str, words: Sequence[str], names: Sequence[str], kind: str) -> dict[str, float]:
    return _numbers(flag, words, names, kind, 1.0, "a share from 0 to 1", "0.3")


def _numbers(
    flag: str, words: Sequence[str], names: Sequence[str], kind: str, most: float, what: str, example: str
) -> dict[str, float]:
    """Parse NODE=NUMBER words: numbers from 0 to `most`, by node. Raises CommandError for another form, and for a node
    that is not in `names`, the nodes of this `kind`."""
    found: dict[str, float] = {}
    for word in words:
        name, rest = named_node(flag, word, names, f"none, since the program has no {kind},")
        try:
            found[name] = float(rest)
        except ValueError:
            found[name] = -1.0
        if not 0 <= found[name] <= most:
            raise CommandError(f"{flag}: given {word!r}, needed {what}, such as {name}={example}")
    return found


@dataclass(frozen=True)
class Uniform:
    """Seconds between `low` and `low` + `jitter`, keyed by node and index."""

    low: float
    jitter: float

    def __call__(self, node: str, index: int) -> float:
        key = blake2b(f"{node}/{index}".encode(), digest_size=8).digest()
        return self.low + self.jitter * int.from_bytes(key, "big") / 2**64


def planned(graph: Graph, flags: SimulateFlags, width: int) -> Schedule:
    """Simulate a plan, with the seconds of the cost model. Raises CommandError for a plan of other work, and the errors
    of planning."""
    roles = roles_of(graph)
    # The cost model has no seconds for the other nodes.
    costed = {*roles.cycle, *roles.learners, *roles.rereads, *roles.followers, *(node for node, _ in roles.baselines)}
    small = [node.name for node in graph.nodes if node.fires and node.name not in costed]
    durations, _ = given_durations(Durations(), flags.duration, small, flags.seed)
    if flags.plan:
        plan = read_costed(Path(flags.plan), graph.name)
        for name in ("samples", "epochs", "minibatches"):
            said, needed = getattr(plan.work, name), getattr(roles, name)
            if said != needed:
                what = f"given a plan for {name} {said}, needed {needed}, as the program has"
                raise CommandError(f"--plan {flags.plan}: {what}")
    else:
        plan = search(graph, flags, flags.batch or PlanFlags().batch).costed
    scene = Scene(graph, plan, flags.seed, durations.nodes)
    # On shared GPUs the roles take turns: the lag has no effect.
    effect = {} if plan.shared else dict(scene.effect_of_lag(min(flags.updates, COMPARED)))
    found = scene.run(flags.updates)
    result, full, num = found.result, found.filling, flags.updates
    least_s = next((run.steady_s for run in effect.values()), 0.0)
    gains = {lag: least_s / run.steady_s - 1 for lag, run in effect.items()}
    sure, digits = plan.confidence.about, plan.confidence.digits
    against = f"the plan is for lag {plan.lag}"
    if plan.shared or plan.lag == scene.lag:
        above = 1 - plan.period_s / result.steady_s
        # Not in seconds: rounding would contradict a difference of a few percent.
        against = f"the planner says {percent(abs(above))} {'less' if above >= 0 else 'more'}"
    rates = f"{many(sure(found.tokens_per_s))} tokens and {figure(sure(found.groups_per_s))} groups per second"
    occupied = f"{percent(full.occupancy)} of {full.slots} in use"
    tails = f"{percent(full.tail_occupancy)} in tails, which take {about(full.tail_s)}"
    head = "all the same: the pools share GPUs and take turns"
    rows = []
    if effect:
        done = len(next(iter(effect.values())).ends)
        of = f" of runs of {done} updates, while that above is of {num}" if done < num else ""
        head = f"the period{of}; how much faster than at lag {min(effect)}"
    for row, (lag, run) in enumerate(effect.items()):
        filling = "" if run.steady else "  the filling of the pipeline included"
        gain = f"{figure(100 * gains[lag], digits)} %".rjust(8) if row else " " * 8
        rows.append(f"{lag:>10}  {about(run.steady_s, digits):>8}  {gain}{filling}".rstrip())
    assumes = assumptions(roles, plan.work)
    return Schedule(
        title=f"{graph.name} with {plan.work.shape.name} on {plan.gpus} GPUs: {num} updates of {plan.work.prompts} "
        "groups",
        wall=about(result.wall_s),
        result=result,
        facts={
            "program": graph.name,
            "model": plan.work.shape.name,
            "gpus": plan.gpus,
            "updates": num,
            "batch": plan.work.prompts,
            "lag": scene.lag,
            **period_facts(result),
            **plan.confidence.facts(result.steady_s),
            "planned_s": plan.confidence.about(plan.period_s),
            "planned_lag": plan.lag,
            "planned_bound": plan.bound,
            "tokens_per_s": found.tokens_per_s,
            "tokens_per_s_per_gpu": found.tokens_per_s / plan.gpus,
            "groups_per_s": found.groups_per_s,
            "assumptions": list(assumes),
            "slots": asdict(full),
            "effect_of_lag": [
                {"lag": lag, "period_s": plan.confidence.about(run.steady_s), "gain": gains[lag],
                 "updates": len(run.ends), "period_of": period_facts(run)["period_of"]}
                for lag, run in effect.items()
            ],
        },
        head=[
            ("period", f"{likely(result.steady_s, plan.confidence)}; {period_of(result)}; {against}"),
            ("rate", f"{rates}, {many(sure(found.tokens_per_s / plan.gpus))} tokens per second and GPU"),
            *assumed(assumes),
        ],
        lags=[("", f"the bound is {scene.lag}"), ("slots", f"{occupied}; {tails}")],
        tail=[*labelled("by lag", head, width, COLUMN), *rows],
    )  # fmt: skip
