"""What the flags of `plan` and `simulate` ask to be planned, and the plan of it.

A plan on GPUs, for people: what it is and why, the memory, and what else there is.

Lines of a plan or a schedule that begin with a label, as wide as the terminal. Pure.
"""

import shutil
from collections.abc import Sequence
from textwrap import wrap

from penstock.graph.ir import Graph
from penstock.runtime.cli.display import percent, seconds
from penstock.runtime.cli.flags import Planning
from penstock.runtime.cli.measuring import profile_path
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.cluster import Cluster, ClusterError, read_cluster
from penstock.runtime.cluster.placement import read_meshes
from penstock.runtime.collection import uncollected
from penstock.runtime.plan.model_shape import ShapeError, read_shape
from penstock.runtime.plan.planner import Alternative, Planned, PoolPlan, plan
from penstock.runtime.plan.roles import Roles, roles_of
from penstock.runtime.plan.search import GpuSplit, Solution
from penstock.runtime.plan.workload import LengthError, Workload, given_lengths

KEPT = 0.7
"""The share of the groups that filters leave, unless it is said."""


def search(graph: Graph, flags: Planning, batch: int) -> Planned:
    """The plan that the flags ask for. Raises CommandError for those that cannot be understood, PlanError for what has
    no plan."""
    cluster, work = asked(graph, flags, batch)
    try:
        meshes = read_meshes(flags.mesh)
    except ClusterError as error:
        raise CommandError(str(error), 2) from None
    with uncollected():
        return plan(graph, cluster, work, slots=flags.slots, meshes=meshes, time_limit=flags.time_limit)


def asked(graph: Graph, flags: Planning, batch: int) -> tuple[Cluster, Workload]:
    """The machines and the work that the flags name. Raises CommandError for those that cannot be understood."""
    for name, example in (("cluster", "32x8xH100 or a file"), ("model", "llama-70b or a model directory")):
        if not getattr(flags, name):
            raise CommandError(f"--{name}: given nothing, needed such as {example}", 2)
    try:
        cluster, work = read_cluster(flags.cluster, profile_path()), workload(graph, flags, batch)
    except (ClusterError, LengthError, ShapeError) as error:
        raise CommandError(str(error), 2) from None
    if not any(host.accelerators or host.gpu for host in cluster.hosts):
        needed = "needed GPUs; on cores run it, then `penstock simulate --from RUN` tells of other lags and replicas"
        raise CommandError(f"--cluster {flags.cluster}: given hosts without GPUs, {needed}", 2)
    return cluster, work


def workload(graph: Graph, flags: Planning, batch: int) -> Workload:
    """What the flags say, and the program of samples, epochs and minibatches."""
    roles = roles_of(graph)
    try:
        return Workload(
            read_shape(flags.model),
            batch,
            roles.samples,
            given_lengths(flags.lengths, flags.max_tokens),
            flags.prompt_tokens,
            roles.epochs,
            roles.minibatches,
            flags.micro_tokens,
            flags.environment_s,
            kept(roles, flags.kept),
            sum(samples for _, samples in roles.baselines),
            roles.buffer.adds(batch) if roles.buffer else 0,
        )
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise CommandError(str(error), 2) from None


def kept(roles: Roles, given: float | None) -> float:
    """The share of the groups that filters leave."""
    if not roles.filters:
        if given is not None:
            raise CommandError(f"--kept: given {given:g}, needed none, since {roles.graph} has no filter (keep)", 2)
        return 1.0
    share = KEPT if given is None else given
    if not 0 < share <= 1:
        raise CommandError(f"--kept: given {share:g}, needed a share above 0, 1 at most", 2)
    return share


COLUMN = 12
"""Where the words begin, if nothing else is said."""


def labelled(label: str, words: str, width: int, column: int = COLUMN) -> list[str]:
    """The words beside their label; further lines are indented."""
    return wrap(words, width, initial_indent=f"{label:<{column}}", subsequent_indent=" " * column)


def assumed(said: Sequence[str], width: int, column: int = COLUMN) -> list[str]:
    """What the program does not say of its work, a paragraph each; no line of a program that says all of it."""
    labels = ("assumed", *[""] * len(said))
    return [line for label, words in zip(labels, said, strict=False) for line in labelled(label, words, width, column)]


SAID = {"cache": "the cache", "weights": "the weights", "tp": "tensor parallelism", "pp": "the hops between stages"}
"""What parts of a step are called here, where it is not their name."""


def text(found: Planned, cluster: str) -> str:
    """For people: the plan, why, the memory, and what else there is."""
    work, width = found.work, shutil.get_terminal_size((100, 24)).columns
    responses = f"{work.responses} responses of {work.lengths.mean:.0f} tokens on average"
    lines = [
        f"{found.roles.graph} with {work.shape.name} on {cluster}: {responses}, lag {found.lag}",
        "",
        *labelled("period", f"{seconds(found.best.period_s)} per update, {_sure(found)}", width),
        *labelled("bound", f"by {found.best.bound}", width),
        *labelled("", _why(found), width),
        *_crowded(found, width),
        *assumed(found.assumptions, width),
        *labelled("GPUs", f"{found.best.split.gpus} of {found.gpus} in use", width),
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


def _sure(found: Planned) -> str:
    if found.optimal:
        return "optimal under the model"
    gap = found.outcome.gap
    more = f"more than {percent(gap)}" if gap >= 0.0005 else "even 0.1 %"
    return f"the best found in time: no plan is {more} faster"


def _why(found: Planned) -> str:
    """What a batch costs, stage by stage."""
    best = found.best
    parts = [f"generation {seconds(best.rollout_s)}", f"steps {seconds(best.training.steps.seconds)}"]
    if found.roles.turns > 1:
        answers = found.roles.turns * found.work.environment_s
        parts.append(f"{found.roles.turns} answers of {found.roles.environment} {seconds(answers)}")
    groups = [(each.pools, reading) for each, reading in zip(best.split.dedicated, best.readings, strict=True)]
    taken = [pool for pools, _ in groups for pool in pools]
    free = tuple(pool for pool in found.roles.beside if pool not in taken)
    for pools, reading in [*([(free, best.training)] if free else []), *groups]:
        parts.append(f"passes of {', '.join(pools)} {seconds(reading.reads.seconds)}")
        learners = [node for pool in pools for node in found.roles.nodes_of(pool) if node in found.roles.learners]
        parts += [f"steps of {', '.join(learners)} {seconds(reading.learns.seconds)}"] if learners else []
    parts.append(f"weight sync {seconds(best.sync.seconds)}")
    if best.offloads:
        parts.append(f"moments to the host and back {seconds(best.switch.seconds)}")
    generator = best.generating.generator
    steps = f"most of a training step goes to {_part(best.training.steps.bound)}"
    rows = min(generator.slots, -(-found.work.responses // best.generating.replicas))
    decodes = generator.step(rows, rows * (found.work.prompt_tokens + found.work.lengths.mean)).bound
    return f"one batch: {', '.join(parts)}; {steps}, of a decoding step to {_part(decodes)}"


def _part(name: str) -> str:
    return SAID.get(name, name)


def _crowded(found: Planned, width: int) -> list[str]:
    """What batches that are in work at once cost each other."""
    if found.best.alone_s > 0.999 * found.best.period_s:
        return []
    return labelled("", f"if no batch slowed the others, {seconds(found.best.alone_s)} would be the bound", width)


def _pool(pool: PoolPlan, width: int) -> list[str]:
    work = ", ".join(pool.nodes)
    if not pool.devices:
        return labelled(pool.name, f"{pool.shares or 'on CPUs'}: {work}", width)
    copies = f"{pool.replicas} × " if pool.replicas > 1 else ""
    mesh = " × ".join(f"{axis} {size}" for axis, size in pool.mesh) or "one GPU"
    how = [f"{pool.devices} {pool.kind}: {copies}({mesh})", pool.precision]
    how += [f"{pool.slots} slots"] if pool.slots else []
    how += [f"micro-batches of {pool.micro_tokens} tokens"] if pool.micro_tokens else []
    how += ["weights sharded"] if pool.zero3 else []
    how += [pool.shares] if pool.shares else []
    parts = sorted(((n, size) for n, size in pool.memory.parts.items() if size), key=lambda part: -part[1])
    held = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts)
    hosts = f"{pool.hosts[0]} to {pool.hosts[-1]}" if len(pool.hosts) > 1 else pool.hosts[0]
    return [
        *labelled(pool.name, "; ".join(how), width),
        *labelled("", f"memory {pool.memory.bytes / 1e9:.1f} of {pool.memory_available / 1e9:.1f} GB: {held}", width),
        *labelled("", f"{work or 'reads responses'}, on {hosts}", width),
    ]


def _alternative(other: Alternative, found: Planned, name_width: int, width: int) -> list[str]:
    name = f"  {other.name:<{name_width}}  "
    if other.found is None:
        return [f"{name}{other.why}"]
    sure = "" if other.proved else " (best found)"
    beside = f"{_beside(other.found, found.best)}, {_gpus(other.found.split)}"
    line = f"{seconds(other.found.period_s)}{sure}, {beside}: {other.found.bound}"
    return wrap(line, width, initial_indent=name, subsequent_indent=" " * len(name))


def _beside(other: Solution, best: Solution) -> str:
    """An alternative beside the plan."""
    more = percent(other.period_s / best.period_s - 1)
    if more != percent(0):
        return f"{more} more"
    return "as planned" if other.split == best.split else "as fast"


def _gpus(split: GpuSplit) -> str:
    """Of the trainer, the generator, and each dedicated group of models; by kind where there are several."""
    several = len({each.nodes.kind for each in split.allocations}) > 1
    sizes = [f"{each.gpus} {each.nodes.kind}" if several else str(each.gpus) for each in split.allocations]
    sizes[0] += " shared" if split.shared else ""
    return " + ".join(sizes) + ("" if several else f" {split.trainer.nodes.kind}")
