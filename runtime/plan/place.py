"""The default plan: one pool for each pool label of the graphs, a rank per replica, cores and devices shared out. Pure.

What a pool is follows from what it holds. One that makes a carried value's next value *updates*: one replica, all
cores of its host. One that decodes with broadcast weights *generates*: as many replicas as asked for, half of the
cores, or all where updates and generators take turns. Any other one does small work: one replica, one thread. Every
host is shared out by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from penstock.graph.ir import Graph, Node
from penstock.graph.sharding import Axes, num_ranks
from penstock.runtime.plan.cluster import Cluster, ClusterError, Host
from penstock.runtime.plan.meshes import check_pools, spelled
from penstock.runtime.plan.names import nearest
from penstock.runtime.plan.plan import Plan, Pool, Rank, Replica

GROUPS_AHEAD = 2
"""Groups in flight beyond those that fill a generator's slots, so that a slot that falls free finds the next one."""
SMALL_CAPACITY = 4
"""Groups in flight in a pool of small work."""
STREAM_CAPACITY = 32
"""Groups in flight in a pool of small work whose node works on several at once, such as an environment."""


@dataclass(frozen=True, slots=True)
class _Role:
    """What a pool holds and is: `rows` is the fewest samples that a group of its decoding node has (0: none).
    `streams`: it has a node that works on several groups at once. `carries`: it holds a value that the program carries,
    be it one that never changes."""

    name: str
    holds: tuple[str, ...]
    updates: bool
    carries: bool
    rows: int
    streams: bool
    hosts: tuple[Host, ...]

    @property
    def generates(self) -> bool:
        return self.rows > 0 and not self.updates

    def replicas(self, generators: int) -> int:
        """How many it has, of which the first is on the first host, the second on the second, and so on in turn."""
        return generators if self.generates else 1

    def replicas_on(self, host: Host, generators: int) -> int:
        count, turns = self.replicas(generators), len(self.hosts)
        return sum(max(0, -(-(count - place) // turns)) for place, own in enumerate(self.hosts) if own == host)

    def host_of(self, index: int) -> Host:
        return self.hosts[index % len(self.hosts)]

    @property
    def models(self) -> bool:
        """Whether it may have a language model, and so a mesh and a GPU."""
        return self.carries or self.generates

    def capacity(self, slots: int) -> int:
        if self.rows:
            return ceil(slots / self.rows) + GROUPS_AHEAD
        if self.updates:
            return 1
        return STREAM_CAPACITY if self.streams else SMALL_CAPACITY


def place(
    graphs: Sequence[Graph],
    cluster: Cluster,
    *,
    generators: int = 1,
    slots: int = 64,
    device: str = "cpu",
    meshes: Mapping[str, Axes] = MappingProxyType({}),
) -> Plan:
    """The plan for graphs that run one after the other on the same pools (the first one wins where they differ).

    `slots` are the rows that a generator decodes at once; `device` is "cpu", "cuda" (the hosts' devices in turn,
    shared by replicas where there are too few), or one device. `meshes` gives pools several ranks. Raises ClusterError
    for pools or devices that are not there, and for ranks of one replica that would share a GPU.
    """
    if generators < 1:
        raise ClusterError(f"generators: given {generators}, needed at least 1 replica")
    roles = _roles(graphs, cluster)
    overlapping = any(node.lag for graph in graphs for node in graph.nodes)
    updating = {r.hosts[0].name: num_ranks(meshes.get(r.name, ())) for r in roles if r.updates}
    check_pools(meshes, [role.name for role in roles if role.models], [role.name for role in roles])
    _check_hosts(cluster, roles, generators)

    def replica(role: _Role, index: int) -> Replica:
        mesh, threads = meshes.get(role.name, ()), _threads(role, role.host_of(index), roles, generators, overlapping)
        ranks = _ranks(role, index, mesh, device, threads, updating)
        return Replica(f"{role.name}/{index}", ranks, role.capacity(slots), mesh)

    def pool(role: _Role) -> Pool:
        return Pool(role.name, role.holds, tuple(replica(role, index) for index in range(role.replicas(generators))))

    return Plan(tuple(map(pool, roles)))


def _check_hosts(cluster: Cluster, roles: Sequence[_Role], generators: int) -> None:
    """Raises ClusterError for a pool that is not there, and for one on more hosts than it has replicas."""
    names = [role.name for role in roles]
    for pool in cluster.pools:
        if pool not in names:
            raise ClusterError(f"pools.{pool}: no pool of this program has that name; {nearest(pool, names)}")
    for role in roles:
        if len(role.hosts) > (count := role.replicas(generators)):
            given = f"pools.{role.name}: given {len(role.hosts)} hosts for {count} replica{'s' * (count > 1)}"
            needed = f"needed one for each at most{' (--generators)' * role.generates}"
            raise ClusterError(f"{given}, {needed}: the ranks of a replica are on one host")


def _ranks(
    role: _Role, index: int, mesh: Axes, device: str, threads: int, updating: Mapping[str, int]
) -> tuple[Rank, ...]:
    """The ranks of replica `index` of a pool, on the devices that follow each other; they share its threads. Of other
    pools, those that update have the first `updating` devices of their host.
    """
    host, here = role.host_of(index), index // len(role.hosts)
    count, first = num_ranks(mesh), 0 if role.updates else updating.get(host.name, 1)
    devices = [_device(role, host, first + here * count + number, device) for number in range(count)]
    if devices[0] != "cpu" and len(set(devices)) < count:
        given = f"--mesh {role.name}={spelled(mesh)}: given {count} ranks for {', '.join(dict.fromkeys(devices))}"
        raise ClusterError(f"{given} of host {host.name}, needed a GPU for each: NCCL joins no two ranks on one")
    return tuple(Rank(host.name, device, max(1, threads // count)) for device in devices)


def _roles(graphs: Sequence[Graph], cluster: Cluster) -> list[_Role]:
    """The pools in the order in which the programs name them; a pool that is left with nothing is left out."""
    homes: dict[str, str] = {}
    updating: set[str] = set()
    carrying: set[str] = set()
    for graph in graphs:
        for argument in graph.arguments:
            pool = homes.setdefault(argument.name, argument.pool)
            if argument.kind == "carried":
                carrying.add(pool)
                updating |= {pool} if graph.producer(argument.name) else set()
        for node in graph.nodes:
            if node.fires:
                homes.setdefault(node.name, node.pool)
    rows: dict[str, int] = {}
    streaming = {homes[n.name] for graph in graphs for n in graph.nodes if n.stream and n.clock == "group"}
    for graph in graphs:
        for node in graph.nodes:
            if decodes(graph, node):
                pool, samples = homes[node.name], samples_of(graph, node)
                rows[pool] = min(rows.get(pool, samples), samples)
    return [
        _Role(
            pool,
            tuple(name for name, home in homes.items() if home == pool),
            pool in updating,
            pool in carrying,
            rows.get(pool, 0),
            pool in streaming,
            cluster.hosts_of(pool),
        )
        for pool in dict.fromkeys(homes.values())
    ]


def decodes(graph: Graph, node: Node) -> bool:
    """Does the node sample a group's responses? It works per group, and reads weights as they come."""
    sources = [graph[item.ref.node] for item in node.inputs if item.ref.node in graph]
    return node.clock == "group" and samples_of(graph, node) > 0 and any(s.construct == "broadcast" for s in sources)


def samples_of(graph: Graph, node: Node) -> int:
    """The rows of one group, by the option of that name; 0 for a node without it. One that answers another has a row
    for each of that one's."""
    samples = dict(node.options).get("samples", 0)
    if not samples and node.answers and node.inputs and node.inputs[0].ref.node in graph:
        return samples_of(graph, graph[node.inputs[0].ref.node])
    return samples if isinstance(samples, int) else 0


def _threads(role: _Role, host: Host, roles: Sequence[_Role], generators: int, overlapping: bool) -> int:
    """CPU threads of a pool's replica on a host: updates share all of the host's cores, generators what half leaves.

    An update's threads never wait for each other, so they take the time that generators leave over; those of a
    generator meet at every operation, and would stall where another process has the core. Without a lag the two take
    turns, and generators have all cores as well.
    """
    if not (role.updates or role.generates):
        return 1
    updating = sum(r.replicas_on(host, generators) for r in roles if r.updates)
    if role.updates:
        return max(1, host.cores // updating)
    generating = sum(r.replicas_on(host, generators) for r in roles if r.generates)
    rest = host.cores - max(1, host.cores // 2) if updating and overlapping else host.cores
    return max(1, rest // generating)


def _device(role: _Role, host: Host, index: int, device: str) -> str:
    """The device of this index, in turn, of a host; small work stays on the CPU."""
    if device == "cpu" or not role.models:
        return "cpu"
    has = host.accelerators
    if not has or device not in ("cuda", *has):
        known = ", ".join(has) or "no device but its cores"
        raise ClusterError(f"device: given {device!r} for pool {role.name}; host {host.name} has {known}")
    if device != "cuda":
        return device
    return has[index % len(has)]
