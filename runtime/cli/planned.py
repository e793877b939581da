"""The machines of a run, and its plan: the plan of --plan, or one that is made for their GPUs.

`machines` reads --cluster, or takes this machine with the GPUs that its torch sees. `chosen` returns the plan with the
flags that it decides, and the lines that say what was chosen. `plan_lacks` says why a run cannot follow the plan of
--plan.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

from penstock.graph.errors import Fault
from penstock.graph.ir import PRECISIONS, Graph
from penstock.host import cache_folder
from penstock.runtime.cli.base_model import PROFILE
from penstock.runtime.cli.flags import NEW, NO_PLAN, MachineFlags, RunFlags, with_plan
from penstock.runtime.cli.tracing import CommandError, Traced, faults_text
from penstock.runtime.cluster.capabilities import (
    Dtype,
    dtype_lack,
    invariance_lack,
    precision_lack,
    precision_on_cpu_lack,
)
from penstock.runtime.cluster.cluster import Cluster, ClusterError, SeenGpu
from penstock.runtime.cluster.gpus import Precision, alike
from penstock.runtime.cluster.interpreters import interpreter_lacks
from penstock.runtime.cluster.placement import Plan, place, read_meshes
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.schedule.compile import Rules, Tables, check_rules


@dataclass(frozen=True)
class Chosen:
    """A program as it is run: its graphs and flags, its plan (None: by the flags), and lines about the plan."""

    traced: Traced
    plan: Plan | None = None
    lines: Sequence[str] = ()


def machines(flags: MachineFlags, seen: Sequence[SeenGpu]) -> Cluster:
    """The machines of --cluster, or this machine. Raises ClusterError for an invalid file."""
    if flags.cluster:
        return Cluster.read(Path(flags.cluster)).with_seen(seen)
    here = Cluster.local(len(seen))
    # The profile is only used for GPUs, and a user may have no cache.
    if not (seen and (path := cache_folder() / PROFILE).exists()):
        return here.with_seen(seen)
    # Measurements on this machine are better than a data sheet.
    measured = Cluster.read(path)
    own = measured.hosts[0]
    named = here.with_seen(seen)
    one, other = named.gpu_of(named.hosts[0]), measured.gpu_of(own)
    if one is None or other is None or not alike(one, other):
        return named
    (host,) = named.hosts
    return here.model_copy(update={"hosts": (host.model_copy(update={"gpu": own.gpu}),), "gpus": measured.gpus})


def chosen(traced: Traced, cluster: Cluster) -> Chosen:
    """Choose the plan of a run on a cluster: the plan of --plan (`plan_lacks` must be empty), or one that is made.
    Raises PlanError for a model that fits nowhere."""
    flags: RunFlags = traced.flags
    if traced.plan is not None:
        graphs = _graphs(traced)
        return Chosen(_with_graphs(traced, traced.plan.graphs(graphs)), traced.plan.on(graphs, cluster))
    gpus = any(host.accelerators for host in cluster.hosts)
    model = Path(flags.model)
    # A small model needs no plan, and neither does a run in one process.
    unknown = not any((model / name).is_file() for name in ("config.json", "adapter_config.json"))
    small = not traced.base or flags.model in ("", NEW) or unknown
    if flags.plan == NO_PLAN or small or not gpus or flags.device == "cpu" or flags.in_process:
        return Chosen(traced)
    # Imports numpy and the cost model, which a run on CPUs does not need.
    from penstock.runtime.collection import uncollected
    from penstock.runtime.plan.defaults import five_lines, planned_run, why_not
    from penstock.runtime.plan.model_shape import read_shape

    options, graphs = flags.options(flags.model), _graphs(traced)
    if why := why_not(graphs[0], cluster, options, traced.typed):
        return Chosen(traced, lines=[f"not planned: {why}; the flags say where pools are (--mesh, --generators)"])
    with uncollected():
        found, made = planned_run(
            graphs, cluster, read_shape(flags.model), options, traced.typed, program=traced.path, source=flags.cluster
        )
    lines = five_lines(found, made)
    planned = replace(traced, flags=with_plan(flags, made.options))
    return Chosen(_with_graphs(planned, made.graphs(graphs)), made.plan, lines)


def plan_lacks(traced: Traced, cluster: Cluster) -> Iterator[Fault]:
    """Why a run of the program on a cluster cannot follow the plan of --plan."""
    if traced.plan is None or traced.graph is None:
        return
    from penstock.runtime.plan.model_shape import read_shape

    given = traced.flags.model
    model = None if given in ("", NEW) else read_shape(given)
    made, graphs = traced.plan, _graphs(traced)
    if lacks := made.lacks(graphs, model, cluster):
        yield from lacks
    else:
        yield from device_lacks(made.on(graphs, cluster), cluster, made.options["dtype"], traced.gpus)


def engine_lacks(traced: Traced) -> Iterator[Fault]:
    """What the interpreters on this machine lack for a program's pools, by --cluster and --engine."""
    cluster, graphs = machines(traced.flags, traced.gpus), _graphs(traced)
    # A pool that needs its mesh to be placed is looked at with the run's own plan.
    with suppress(ClusterError):
        yield from interpreter_lacks(graphs, place(graphs, cluster), cluster, traced.flags.engine)


def rule_lacks(traced: Traced) -> Iterator[Fault]:
    """Faults for the rules of a run that a program does not allow: versions and order of groups, handling of failures
    and of lost replicas, and replicas that join later. The program has no other faults."""
    flags, graphs = traced.flags, _graphs(traced)
    first, most = flags.first_generators, flags.generators
    range_of = f"--generators {first}..{most}"
    if first > most:
        yield Fault("generators-range", range_of, "a range that ends before it begins", f"at most {most} to begin with")
    if first and flags.lost_replica == "stop":
        yield Fault("generators-range", range_of, "--lost-replica stop", "--lost-replica replace")
    # The rules depend on the pools, not on their places.
    plan = place(graphs, Cluster.local())
    of_all = {"batch": flags.batch, "end": 1, "lost_replica": flags.lost_replica}
    of_run = {field.name: getattr(flags, field.name) for field in fields(Rules) if hasattr(flags, field.name)}
    for graph in graphs:
        try:
            # The other rules of a run do not apply to its evaluation.
            check_rules(Tables(graph, plan), Rules(**(of_run | of_all if graph is traced.graph else of_all)))
        except ValueError as error:
            rule, _, rest = str(error).partition(": given ")
            given, _, needed = rest.partition("; needed ")
            code = "cannot-be-lost" if rule.startswith("--lost-replica") else "unmet-rule"
            yield Fault(code, f"{graph.name}: {rule}", given, needed)


def device_lacks(plan: Plan, cluster: Cluster, dtype: Dtype, seen: Sequence[SeenGpu]) -> Iterator[Fault]:
    """Faults for ranks on this machine with GPUs that its torch does not see, or that cannot compute in the run's
    format. On other machines the ranks report this."""
    here = {host.name for host in cluster.hosts if host.agent == "local"}
    own = {rank for each in plan.replicas for rank in each.ranks if rank.device != "cpu" and rank.host in here}
    if lost := sorted({(r.host, r.device) for r in own if int(r.device.removeprefix("cuda:")) >= len(seen)}):
        named = {host: ", ".join(device for own, device in lost if own == host) for host, _ in lost}
        given = f"{len(seen)} GPUs that PyTorch sees here"
        needed = "; ".join(f"{devices} of host {host}" for host, devices in named.items())
        needed += " (see `penstock doctor`), or an agent on the machine that has them"
        yield Fault("no-device", "the GPUs of this machine", given, needed)
    elif own and (lack := dtype_lack(dtype, seen)):
        yield lack


def precision_lacks(graphs: Sequence[Graph], cluster: Cluster, device: str, given: str) -> Iterator[Fault]:
    """Faults for broadcasts in a precision in which the machines cannot compute, on a `device` as `choose_device` names
    it. Broadcasts in the precision `given` by --generator-precision have one fault together."""
    # For a kind of GPU that is not described, the ranks report this.
    kinds = {host.gpu: cluster.gpu_of(host) for host in cluster.hosts if host.accelerators and host.gpu}
    told: list[Fault] = []
    for node in (node for graph in graphs for node in graph.nodes if node.precision in PRECISIONS):
        own = cast(Precision, node.precision)
        lacks = [precision_lack("generator", own, gpu, kind) for kind, gpu in kinds.items()]
        for lack in filter(None, [precision_on_cpu_lack(own)] if device == "cpu" else lacks):
            if own != given:
                yield replace(lack, what=f"{node.name}: option 'precision'", where=node.where)
            elif lack not in told:
                told.append(lack)
                yield replace(lack, what="--generator-precision")


def invariance_lacks(graphs: Sequence[Graph], device: str, flags: RunOptions) -> Iterator[Fault]:
    """Why log-probabilities of a run on a `device` would not have the same bits wherever they are computed."""
    what = "--invariant"
    if device != "cpu":
        yield Fault("not-invariant", what, f"the device {device}", "--device cpu: kernels of GPUs add up as they like")
    yield from filter(None, (invariance_lack(pool, mesh) for pool, mesh in read_meshes(flags.mesh).items()))
    for node in (node for graph in graphs for node in graph.nodes if node.precision):
        given, needed = f"weights in {node.precision} (from {node.name})", "a broadcast without a precision"
        yield Fault("not-invariant", what, given, f"{needed}: the trainer computes in its own", node.where)


def require_devices(plan: Plan, cluster: Cluster, dtype: Dtype, seen: Sequence[SeenGpu]) -> None:
    """Raises CommandError for `device_lacks`."""
    if lacks := tuple(device_lacks(plan, cluster, dtype, seen)):
        raise CommandError("\n".join(map(str, lacks)))


def require_precision(graphs: Sequence[Graph], cluster: Cluster, flags: RunOptions) -> None:
    """Raises CommandError for `precision_lacks` and `invariance_lacks`."""
    lacks = [*precision_lacks(graphs, cluster, flags.device, flags.generator_precision)]
    if flags.invariant:
        lacks += invariance_lacks(graphs, flags.device, flags)
    if lacks:
        raise CommandError(faults_text(lacks))


def _graphs(traced: Traced) -> list[Graph]:
    """The graph of the program, and of its evaluation if it has one."""
    return [graph for graph in (traced.graph, traced.evaluation) if graph is not None]


def _with_graphs(traced: Traced, graphs: Sequence[Graph]) -> Traced:
    return replace(traced, graph=graphs[0], evaluation=graphs[1] if len(graphs) > 1 else None)
