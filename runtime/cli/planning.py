"""What the flags of `plan` and `simulate` ask to be planned, and the plan of it."""

from penstock.graph.ir import Graph
from penstock.runtime.cli.flags import Planning
from penstock.runtime.cli.measuring import profile_path
from penstock.runtime.cli.traced import CommandError
from penstock.runtime.collection import uncollected
from penstock.runtime.plan.cluster import Cluster, ClusterError
from penstock.runtime.plan.lengths import LengthError
from penstock.runtime.plan.meshes import read_meshes
from penstock.runtime.plan.planner import Planned, plan
from penstock.runtime.plan.roles import Roles
from penstock.runtime.plan.roles_of import roles_of
from penstock.runtime.plan.shape import ShapeError, read_shape
from penstock.runtime.plan.spec import read_cluster
from penstock.runtime.plan.workload import Workload, given_lengths

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
    if not flags.time_limit > 0:
        raise CommandError(f"--time-limit: given {flags.time_limit:g}, needed more than 0 seconds", 2)
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
