"""`penstock plan PROGRAM`: which GPUs do what on a cluster, what fits, and what bounds an update.

`search` makes the plan for the flags of `plan` and `simulate`; `text` is its text for people.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from textwrap import wrap

from penstock.graph.errors import Fault
from penstock.graph.hub import model_folder
from penstock.graph.ir import Graph
from penstock.host import cache_folder
from penstock.runtime.cli.base_model import PROFILE
from penstock.runtime.cli.display import about, more, percent
from penstock.runtime.cli.flags import PlanFlags, Planning
from penstock.runtime.cli.tracing import CommandError, Traced, trace_program, usage_errors
from penstock.runtime.cluster.cluster import read_cluster
from penstock.runtime.cluster.placement import read_meshes
from penstock.runtime.collection import uncollected
from penstock.runtime.plan.calibrate import calibrate
from penstock.runtime.plan.confidence import NOT_CALIBRATED, Confidence
from penstock.runtime.plan.model_shape import read_shape
from penstock.runtime.plan.planner import Alternative, Planned, PoolPlan, plan
from penstock.runtime.plan.roles import ENVIRONMENT_S, KEPT, roles_of, with_adapters, work_of
from penstock.runtime.plan.run_plan import KEY as RUN
from penstock.runtime.plan.run_plan import RunPlan, run_plan
from penstock.runtime.plan.workload import Workload, given_lengths
from penstock.runtime.record.errors import visible
from penstock.runtime.record.folder import absolute, write_atomic


def main(argv: Sequence[str]) -> int:
    # numpy and pydantic take a second to import: do so while the child imports torch.
    traced = trace_program("plan", argv, ("penstock.runtime.plan.planner",))
    found = search(traced.sound(), traced.flags, traced.flags.batch, traced.refused)
    if traced.flags.out:
        data = {**found.to_json(), RUN: run_of(found, traced).to_json()}
        write_atomic(Path(traced.flags.out), json.dumps(data).encode(), "--out FILE")
    print(json.dumps(found.to_json()) if traced.flags.json else visible(text(found, traced.flags.cluster)))
    return 0


def search(graph: Graph, flags: Planning, batch: int, refused: Fault | None = None) -> Planned:
    """Make the plan that the flags ask for; `refused` says why no run can have the model. Raises CommandError for flags
    that cannot be understood, PlanError if there is no plan."""
    for name, example in (("cluster", "32x8xH100 or a file"), ("model", "llama-70b or a model directory")):
        if not getattr(flags, name):
            raise CommandError(f"--{name}: given nothing, needed such as {example}")
    with usage_errors():
        cluster, work = read_cluster(flags.cluster, cache_folder() / PROFILE), workload(graph, flags, batch)
        meshes = read_meshes(flags.mesh)
        confidence = NOT_CALIBRATED
        if flags.calibrate:
            found = calibrate(Path(flags.calibrate), cluster, flags.prompt_tokens)
            cluster, confidence = found.on(cluster), Confidence(found.words)
    if not any(host.accelerators or host.gpu for host in cluster.hosts):
        needed = "needed GPUs; on cores run it, then `penstock simulate --from RUN` tells of other lags and replicas"
        raise CommandError(f"--cluster {flags.cluster}: given hosts without GPUs, {needed}")
    # A search keeps all its objects: garbage collection would find none, and take a third of the time.
    with uncollected():
        return plan(
            graph, cluster, work, slots=flags.slots, meshes=meshes, generator_precision=flags.generator_precision,
            confidence=confidence, time_limit=flags.time_limit, refused=refused,
        )  # fmt: skip


def run_of(found: Planned, traced: Traced) -> RunPlan:
    """The plan as a run reads it, with the words for the run's command line. Raises PlanError for features that no run
    can have."""
    flags = traced.flags
    own = {field.name for field in fields(PlanFlags)}
    words = {name: list(said) for name, said in traced.typed.items() if name not in own}
    # A cluster or a model that is only a word, and no file, cannot be an argument of a run.
    for name, path in (("model", model_folder(flags.model, weights=False)), ("cluster", flags.cluster)):
        if Path(path).exists():
            words[name] = [f"--{name}", str(absolute(path))]
    graphs = [graph for graph in (traced.graph, traced.evaluation) if graph is not None]
    cluster = read_cluster(flags.cluster, cache_folder() / PROFILE)
    return run_plan(
        found, graphs, cluster, program=traced.path, source=flags.cluster, max_tokens=flags.max_tokens, words=words,
        max_prompt=flags.max_prompt,
    )  # fmt: skip


def workload(graph: Graph, flags: Planning, batch: int) -> Workload:
    """The workload by the flags; samples, epochs and minibatches are the program's."""
    roles = roles_of(graph)
    parts = (
        ("--kept", flags.kept, roles.filters, "filter (keep)"),
        ("--environment-s", flags.environment_s, roles.environment, "environment"),
    )
    for flag, value, part, what in parts:
        if value is not None and not part:
            raise CommandError(f"{flag}: given {value:g}, needed none, since {roles.graph} has no {what}")
    if flags.kept is not None and not 0 < flags.kept <= 1:
        raise CommandError(f"--kept: given {flags.kept:g}, needed a share above 0, 1 at most")
    shape = with_adapters(read_shape(flags.model), graph, roles.cycle[0], flags.lora, flags.lora_targets)
    if shape.context and flags.max_tokens >= shape.context:
        needed = f"1 to {shape.context - 1}: the context of {shape.name} has {shape.context} tokens"
        raise CommandError(f"--max-tokens: given {flags.max_tokens}, needed {needed}, and a prompt takes one")
    if flags.prompt_tokens > flags.max_prompt:
        needed = f"at most the {flags.max_prompt} of --max-prompt: the mean of prompts is no more than the longest"
        raise CommandError(f"--prompt-tokens: given {flags.prompt_tokens}, needed {needed}")
    return work_of(
        roles, shape, batch, given_lengths(flags.lengths, flags.max_tokens), flags.max_tokens,
        max_prompt=flags.max_prompt,
        prompt_tokens=flags.prompt_tokens, micro_tokens=flags.micro_tokens,
        environment_s=ENVIRONMENT_S if flags.environment_s is None else flags.environment_s,
        kept=KEPT if flags.kept is None else flags.kept,
    )  # fmt: skip


# The default column in which the words begin.
COLUMN = 12


def labelled(label: str, words: str, width: int, column: int = COLUMN) -> list[str]:
    """The words after their label, wrapped; further lines are indented."""
    return wrap(words, width, initial_indent=f"{label:<{column}}", subsequent_indent=" " * column)


def assumed(said: Sequence[str], width: int) -> list[str]:
    """The lines of the assumptions, a paragraph each; no line if there are none."""
    labels = ("assumed", *[""] * len(said))
    return [line for label, words in zip(labels, said, strict=False) for line in labelled(label, words, width)]


# The names of the parts of a step in the text, if they differ.
SAID = {
    "cache": "the cache",
    "weights": "the weights",
    "host": "the host",
    "stage": "the fixed time before it (`stage_s` of the engine)",
    "tp": "tensor parallelism",
    "pp": "the hops between stages",
    "ep": "tokens that go to their experts and back",
    "moments": "moments that come from the host and go back",
}


def likely(period_s: float, confidence: Confidence) -> str:
    """A period with its likely range and the confidence, in words."""
    low, high = (about(seconds, confidence.digits) for seconds in confidence.range_s(period_s))
    return f"{about(period_s, confidence.digits)} per update by the model, {low} to {high} likely ({confidence.words})"


def text(found: Planned, cluster: str) -> str:
    """The plan for people: its period and bound, its pools with their memory, and the alternatives."""
    work, width = found.work, shutil.get_terminal_size((100, 24)).columns
    responses = f"{work.responses} responses of {work.lengths.mean:.0f} tokens on average"
    sure, gap = "optimal under the model", found.outcome.gap
    if not found.optimal:
        # Below this the gap would be printed as 0.0 %.
        more = f"more than {percent(gap)}" if gap >= 0.0005 else "even 0.1 %"
        sure = f"the best found in time: no plan is {more} faster"
    # How much batches that are in work at the same time slow each other down.
    crowded = f"if no batch slowed the others, {about(found.best.alone_s)} would be the bound"
    lines = [
        f"{found.roles.graph} with {work.shape.name} on {cluster}: {responses}, lag {found.lag}",
        "",
        *labelled("period", f"{likely(found.best.period_s, found.confidence)}; {sure}", width),
        *labelled("bound", f"by {found.best.bound}", width),
        *labelled("", _why(found), width),
        *(labelled("", crowded, width) if found.best.alone_s <= 0.999 * found.best.period_s else []),
        *assumed(found.assumptions, width),
        *labelled("GPUs", _in_use(found), width),
        "",
    ]
    for pool in found.pools:
        lines += [*_pool(pool, width), ""]
    lines.append("Alternatives, each with its best layouts:")
    name_width = max(len(other.name) for other in found.alternatives)
    for other in found.alternatives:
        lines += _alternative(other, found, name_width, width)
    lines += ["", f"{found.outcome.opened} parts of plans looked at in {found.seconds:.1f} s"]
    return "\n".join(lines)


def _in_use(found: Planned) -> str:
    """How many GPUs the plan uses, and why it does not use the others."""
    used = found.best.split.gpus
    said, given = f"{used} of {found.gpus} in use", f" with {found.pins.flags} as given" if found.pins.flags else ""
    known = "is" if found.optimal else "was found that is"
    return said if used == found.gpus else f"{said}: no plan on more of them {known} faster{given}"


def _why(found: Planned) -> str:
    """The seconds of a batch, stage by stage."""
    best = found.best
    parts = [f"generation {about(best.rollout_s)}", f"steps {about(best.training.steps.seconds)}"]
    if found.roles.turns > 1:
        answers = found.roles.turns * found.work.environment_s
        parts.append(f"{found.roles.turns} answers of {found.roles.environment} {about(answers)}")
    groups = [(each.pools, reading) for each, reading in zip(best.split.dedicated, best.readings, strict=True)]
    taken = [pool for pools, _ in groups for pool in pools]
    free = tuple(pool for pool in found.roles.beside if pool not in taken)
    for pools, reading in [*([(free, best.training)] if free else []), *groups]:
        parts.append(f"passes of {', '.join(pools)} {about(reading.reads.seconds)}")
        learners = [node for pool in pools for node in found.roles.nodes_of(pool) if node in found.roles.learners]
        parts += [f"steps of {', '.join(learners)} {about(reading.learns.seconds)}"] if learners else []
    parts.append(f"weight sync {about(best.sync.seconds)}")
    if best.offloads:
        what = "GPUs change their role" if best.training.trainer.host_state else "moments to the host and back"
        parts.append(f"{what} {about(best.switch.seconds)}")
    generator, bound = best.generating.generator, best.training.steps.bound
    steps = f"most of a training step goes to {SAID.get(bound, bound)}"
    rows = min(generator.slots, -(-found.work.responses // best.generating.replicas))
    decodes = generator.step(rows, rows * (found.work.prompt_tokens + found.work.lengths.mean)).bound
    return f"one batch: {', '.join(parts)}; {steps}, of a decoding step to {SAID.get(decodes, decodes)}"


def _pool(pool: PoolPlan, width: int) -> list[str]:
    work = ", ".join(pool.nodes)
    if not pool.devices:
        return labelled(pool.name, f"{pool.shares or 'on CPUs'}: {work}", width)
    copies = f"{pool.replicas} × " if pool.replicas > 1 else ""
    mesh = " × ".join(f"{axis} {size}" for axis, size in pool.mesh) or "one GPU"
    how = [f"{pool.devices} {pool.kind}: {copies}({mesh})", pool.precision]
    how += [f"{pool.slots} slots"] if pool.slots else []
    how += [f"micro-batches of {pool.micro_tokens} tokens"] if pool.micro_tokens else []
    how += ["layers computed again"] if pool.recompute == "layer" else []
    how += ["AdamW's moments on the host"] if pool.optimizer_state else []
    how += ["weights sharded"] if pool.zero3 else []
    how += [f"sequences over {pool.cp} ranks (cp)"] if pool.cp else []
    how += [pool.shares] if pool.shares else []
    hosts = f"{pool.hosts[0]} to {pool.hosts[-1]}" if len(pool.hosts) > 1 else pool.hosts[0]
    return [
        *labelled(pool.name, "; ".join(how), width),
        *labelled(
            "",
            f"memory {pool.memory.bytes / 1e9:.1f} of {pool.memory_available / 1e9:.1f} GB: {pool.memory.largest}",
            width,
        ),
        *labelled("", f"{work or 'reads responses'}, on {hosts}", width),
    ]


def _alternative(other: Alternative, found: Planned, name_width: int, width: int) -> list[str]:
    """An alternative, compared with the plan; why there is none if no layout of it fits."""
    name = f"  {other.name:<{name_width}}  "
    if other.found is None:
        return [f"{name}{other.why}"]
    split = other.found.split
    slower = other.found.period_s / found.best.period_s - 1
    # A smaller difference would be printed as 0.0 %.
    beside = more(slower) if slower >= 0.0005 else "as planned" if split == found.best.split else "as fast"
    # The GPUs of the trainer, the generator, and each dedicated group of models; with their kinds if these differ.
    several = len({each.nodes.kind for each in split.allocations}) > 1
    sizes = [f"{each.gpus} {each.nodes.kind}" if several else str(each.gpus) for each in split.allocations]
    sizes[0] += " shared" if split.shared else ""
    gpus = " + ".join(sizes) + ("" if several else f" {split.trainer.nodes.kind}")
    sure = "" if other.proved else " (best found)"
    line = f"{about(other.found.period_s)}{sure}, {beside}, {gpus}: {other.found.bound}"
    return wrap(line, width, initial_indent=name, subsequent_indent=" " * len(name))
