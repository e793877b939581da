"""The defaults of `penstock run` on GPUs: the plan that `penstock plan` would make for them.

Flags that the user gives stay (meshes, the generator's slots and replicas, offload, a lag, …), and the rest is planned
around them. `why_not` says why no plan can be made, such as for a program without a generator, which then runs as its
flags say. `planned_run` makes the plan, and `five_lines` says what it chose and why. Pure except for the search's
clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.graph.ir import Graph
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import read_meshes, spelled
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.plan.candidates import Pins
from penstock.runtime.plan.model_shape import Shape
from penstock.runtime.plan.planner import Planned, PoolPlan, plan
from penstock.runtime.plan.roles import PlanError, roles_of, with_adapters, work_of
from penstock.runtime.plan.run_plan import RunPlan, run_plan
from penstock.runtime.plan.workload import given_lengths

# Seconds of the search: the start of a run does not wait for the last percent.
SEARCH_S = 20.0
# The dtypes that a plan covers; another dtype takes other memory, and so needs another plan.
DTYPES = ("bfloat16", "float16")


def why_not(graph: Graph, cluster: Cluster, options: RunOptions, typed: Mapping[str, Sequence[str]]) -> str:
    """Why a run cannot be planned, for people; "" if it can."""
    if "dtype" in typed and options.dtype not in DTYPES:
        return f"--dtype {options.dtype}, where a plan has {DTYPES[0]}"
    if unsaid := [host.name for host in cluster.hosts if host.accelerators and not host.gpu]:
        return f"the GPUs of {', '.join(unsaid)} are of no kind that --cluster says (gpu = …)"
    try:
        roles = roles_of(graph)
    except PlanError as error:
        return str(error)
    models = (roles.trainer, roles.generator, *roles.beside)
    if placed := [pool for pool in models if pool in cluster.pools]:
        return f"--cluster says where {', '.join(placed)} is (pools.{placed[0]})"
    return ""


def planned_run(
    graphs: Sequence[Graph],
    cluster: Cluster,
    shape: Shape,
    options: RunOptions,
    typed: Mapping[str, Sequence[str]],
    *,
    program: str,
    source: str,
) -> tuple[Planned, RunPlan]:
    """Plan a run of `graphs`, the first of which is trained. Returns the plan, and the plan as a run reads it. `typed`
    are the words of the flags that the user gives. Raises PlanError, with a code of docs/check-errors.md, if nothing
    fits."""
    # If the user names a device, plan with that device alone on each host.
    if options.device not in ("auto", "cuda"):
        own = (options.device,)
        hosts = [host.model_copy(update={"devices": own}) for host in cluster.hosts if own[0] in host.accelerators]
        cluster = cluster.model_copy(update={"hosts": tuple(hosts) or cluster.hosts})
    roles = roles_of(graphs[0])
    shape = with_adapters(shape, graphs[0], roles.cycle[0], options.lora, options.lora_targets)
    lengths = given_lengths("", options.max_tokens)
    work = work_of(roles, shape, options.batch, lengths, options.max_tokens, max_prompt=options.max_prompt)
    pins = Pins(
        slots=options.slots if "slots" in typed else None,
        replicas=options.generators if "generators" in typed else None,
        micro_tokens=options.micro_tokens or None,
        recompute=None if options.recompute == "auto" else options.recompute == "layer",
        host_state=None if options.optimizer_state == "auto" else options.optimizer_state == "host",
        offload=options.offload == "on" if "offload" in typed and options.offload != "auto" else None,
        # A user who gives a lag wants trainer and generator to work at the same time.
        overlaps="lag" in typed and roles.lag > 0,
    )
    meshes = read_meshes(options.mesh)
    found = plan(graphs[0], cluster, work, slots=options.slots, meshes=meshes, pins=pins, time_limit=SEARCH_S)
    made = run_plan(
        found, graphs, cluster, program=program, source=source, max_tokens=options.max_tokens,
        max_prompt=options.max_prompt, words={},
        tp_over_hosts=options.tp_over_hosts,
    )  # fmt: skip
    # The user's values equal the plan's, or are more specific, such as another format with as many bytes.
    kept = {name: getattr(options, name) for name in made.options if name in typed and name != "mesh"}
    said = {name: own for name, own in kept.items() if own not in ("auto", 0)}
    return found, replace(made, options={**made.options, **said})


def five_lines(found: Planned, made: RunPlan) -> list[str]:
    """Say in five lines what was chosen for a run, and why."""
    work, best, options = found.work, found.best, made.options
    trainer, generator, *others = found.pools
    shared, lag = best.split.shared, found.lag if made.lag is None else made.lag
    low, high = (f"{seconds:g} s" for seconds in found.confidence.range_s(best.period_s))
    turns = f", in turn with {trainer.name}" if shared and not lag else f", on GPUs of {trainer.name}" if shared else ""
    offload = ", moments on the host meanwhile" if best.offloads else ""
    micro = f"micro-batches of {options['micro_tokens']} tokens"
    micro += ", layers computed again" if options["recompute"] == "layer" else ""
    micro += ", AdamW's moments on the host" if options["optimizer_state"] == "host" else ""
    behind = f"lag {lag}" + (" (GPUs that are shared are used in turn)" if made.lag is not None else "")
    given = f"{found.pins.flags} as given; " if found.pins.flags else ""
    beside = [f"{pool.name} {pool.shares or _gpus(pool)}" for pool in others if pool.devices]
    why = "; ".join([f"bound by {best.bound}", *beside])
    return [
        f"planned {found.roles.graph} with {work.shape.name} on {best.split.gpus} of {found.gpus} GPUs: "
        f"{work.responses} responses of {work.lengths.mean:.0f} tokens on average, {behind}",
        f"  {trainer.name}: {_gpus(trainer)}, {micro}, {_memory(trainer)}",
        f"  {generator.name}: {_gpus(generator)}, {options['slots']} slots{turns}{offload}, {_memory(generator)}",
        f"  an update takes {low} to {high} by the model ({found.confidence.words}), {why}",
        f"  {given}other flags, or --plan none, change it; `penstock plan` compares it with others",
    ]


def _gpus(pool: PoolPlan) -> str:
    copies = f"{pool.replicas} × " if pool.replicas > 1 else ""
    return f"{copies}{spelled(pool.mesh) if pool.mesh else 'one'} of {pool.devices} {pool.kind}"


def _memory(pool: PoolPlan) -> str:
    return f"{pool.memory.bytes / 1e9:.0f} of {pool.memory_available / 1e9:.0f} GB"
