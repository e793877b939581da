"""Where the nodes run, as a value: a plan has pools, a pool has replicas, a replica has ranks. Pure.

`place` makes the default plan: one pool for each pool label of the graphs, one rank per replica, with cores and devices
divided among them. The kind of a pool follows from what it holds. A pool that makes a carried value's next value
*updates*: one replica, all cores of its hosts. A pool that decodes with broadcast weights *generates*: as many replicas
as asked for, half of the cores, or all if updates and generators take turns. Any other pool does small work: one
replica, one thread. Each host is divided separately.

A pool of H hosts has its replicas on them in turn. If it has fewer replicas than hosts, each replica has equally many
hosts of its own, with its ranks in blocks on them: the outermost axes go over hosts, and `tp` stays within one host
unless asked otherwise.

`read_meshes` reads meshes as users write them: `trainer=fsdp2xtp2`, axes with their sizes, outermost first. `why_not`
says why weights cannot use a transport between the ranks of a plan. `why_no_turns` says why trainer and generator do
not take turns with a device; if they do, each can use memory that the other one needs only while it works. `served` is
a plan with the number of firings that are really processed at once, as the simulator needs it.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from math import ceil
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.graph.context import Context
from penstock.graph.ir import Graph, Node
from penstock.graph.protocols import DATA, EXPERT, FSDP, STAGE, TENSOR, Axes, num_ranks
from penstock.runtime.cluster.capabilities import CAPABILITIES, Kind, axis_lack, spread_lack
from penstock.runtime.cluster.cluster import Cluster, ClusterError, Host, check_common_network, nearest


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in HTML. Cells are plain text, and are escaped here."""
    cells = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True, slots=True)
class Rank:
    """One process: its host (a name of the cluster file), device, and number of CPU threads."""

    host: str = "local"
    device: str = "cpu"
    threads: Annotated[int, Meta(ge=1, le=4096)] = 1


@dataclass(frozen=True, slots=True)
class Replica:
    """SPMD ranks that run a pool's nodes together. `capacity` is the number of firings in flight at once.

    `mesh` has the axes of the ranks.
    """

    name: str
    ranks: Annotated[tuple[Rank, ...], Meta(min_length=1)]
    capacity: Annotated[int, Meta(ge=1)] = 1
    mesh: Axes = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The distinct hosts, in the order of the ranks. Different names are taken for different machines."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def located(self) -> str:
        """Its name, and which ranks are on which host, for messages."""
        if len(self.hosts) == 1:
            return f"{self.name} on host {self.hosts[0]}"
        ranks = {host: [str(n) for n, rank in enumerate(self.ranks) if rank.host == host] for host in self.hosts}
        blocks = (f"ranks {', '.join(own)} on host {host}" for host, own in ranks.items())
        return f"{self.name} ({'; '.join(blocks)})"


@dataclass(frozen=True, slots=True)
class Pool:
    """The nodes and program arguments that a pool holds, and its replicas ("pool/0", "pool/1", …). `python` is the
    interpreter of its ranks, "" for the one that starts the run."""

    name: str
    holds: tuple[str, ...]
    replicas: Annotated[tuple[Replica, ...], Meta(min_length=1)]
    python: str = ""

    @property
    def places(self) -> list[tuple[str, str]]:
        """The distinct hosts and devices of its ranks."""
        return list(dict.fromkeys((rank.host, rank.device) for replica in self.replicas for rank in replica.ranks))


@dataclass(frozen=True, slots=True)
class Plan:
    pools: tuple[Pool, ...]

    def pool_of(self, name: str) -> Pool:
        """The pool that holds a node or an argument."""
        return next(p for p in self.pools if name in p.holds)

    def replica(self, name: str) -> Replica:
        return next(r for p in self.pools for r in p.replicas if r.name == name)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return tuple(r for p in self.pools for r in p.replicas)

    def needs(self, host: str) -> tuple[int, int]:
        """The cores and CUDA devices that a host needs for its ranks: a rank on the CPU needs a core for each of its
        threads, a rank on a device needs one core."""
        ranks = [rank for replica in self.replicas for rank in replica.ranks if rank.host == host]
        cores = sum(rank.threads if rank.device == "cpu" else 1 for rank in ranks)
        devices = (int(rank.device.partition(":")[2] or 0) + 1 for rank in ranks if rank.device != "cpu")
        return max(1, cores), max(devices, default=0)

    def spelled(self, replica: str, rank: int) -> str:
        """A rank, for messages, with its host if there are several."""
        several = len({rank.host for each in self.replicas for rank in each.ranks}) > 1
        return f"{replica} rank {rank}" + (f" on host {self.replica(replica).ranks[rank].host}" if several else "")

    def to_json(self) -> dict[str, Any]:
        def replica(r: Replica) -> dict[str, Any]:
            mesh = {"mesh": [list(axis) for axis in r.mesh]} if r.mesh else {}
            return {"name": r.name, "capacity": r.capacity, **mesh, "ranks": [asdict(rank) for rank in r.ranks]}

        def pool(p: Pool) -> dict[str, Any]:
            python = {"python": p.python} if p.python else {}
            return {"name": p.name, "holds": list(p.holds), **python, "replicas": [replica(r) for r in p.replicas]}

        return {"format": 1, "pools": list(map(pool, self.pools))}

    def _repr_html_(self) -> str:
        """The pools as a table, for notebooks."""
        rows = [
            (
                p.name,
                ", ".join(p.holds),
                len(p.replicas),
                len(r.ranks),
                r.capacity,
                ", ".join(f"{host} {device}" for host, device in p.places),
            )
            for p in self.pools
            # The replicas of a pool are alike: show the first.
            for r in p.replicas[:1]
        ]
        head = ("pool", "holds", "replicas", "ranks of each", "firings at once", "on")
        return html_table(f"{len(self.replicas)} replicas in {len(self.pools)} pools", head, rows)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Plan":
        """Read what `to_json` made. Raises ValueError for anything else."""
        if not isinstance(data, dict) or data.get("format") != 1:
            given = repr(data.get("format")) if isinstance(data, dict) else "none"
            raise ValueError(f"plan: given format {given}, needed 1")
        pools = msgspec.convert(data.get("pools"), tuple[Pool, ...])
        names = [replica.name for pool in pools for replica in pool.replicas]
        held = [name for pool in pools for name in pool.holds]
        for what, called in (("replicas", names), ("pools", [p.name for p in pools]), ("held values", held)):
            if len(set(called)) < len(called):
                raise ValueError(f"plan: given {what} of one name, needed names of their own")
        for pool in pools:
            for replica in pool.replicas:
                if replica.name.rpartition("/")[0] != pool.name:
                    raise ValueError(f"plan: given replica {replica.name!r} of pool {pool.name!r}, needed POOL/NUMBER")
                if replica.mesh and num_ranks(replica.mesh) != len(replica.ranks):
                    raise ValueError(f"plan: given {len(replica.ranks)} ranks of {replica.name!r} with another mesh")
                if unknown := dict(replica.mesh).keys() - AXES.keys():
                    needed = f"needed some of {', '.join(AXES)}"
                    raise ValueError(f"plan: given axes {sorted(unknown)} of {replica.name!r}, {needed}")
        return Plan(pools)


# Most ranks of a pool for each core of a host: more would not start in time.
RANKS_PER_CORE = 16

AXES = {
    STAGE: "pipeline stages",
    DATA: "copies of the model",
    FSDP: "shards of each tensor",
    EXPERT: "shares of the experts",
    TENSOR: "shares of each layer",
}


def read_meshes(words: Sequence[str]) -> dict[str, Axes]:
    """The mesh of each pool that is named. Raises ClusterError for an invalid word, with what is needed."""
    found: dict[str, Axes] = {}
    for word in words:
        pool, equals, text = word.partition("=")
        if not (pool and equals):
            raise ClusterError(f"--mesh: given {word!r}, needed POOL=MESH, such as trainer=fsdp2xtp2")
        if pool in found:
            raise ClusterError(f"--mesh: given {pool} twice, needed one mesh for a pool")
        found[pool] = _axes(word, text)
    return found


def _axes(word: str, text: str) -> Axes:
    if text == "1":
        return ()
    axes: list[tuple[str, int]] = []
    for part in text.split("x"):
        match = re.fullmatch(r"([a-z]+)(\d+)", part)
        if match is None or match[1] not in AXES or int(match[2]) < 1:
            known = ", ".join(f"{name} ({what})" for name, what in AXES.items())
            needed = f"axes with their sizes joined by 'x', such as fsdp2xtp2, or 1; axes: {known}"
            given = repr(part or text) if text else "no mesh"
            raise ClusterError(f"--mesh {word}: given {given}, needed {needed}")
        axes.append((match[1], int(match[2])))
    # A dict keeps only one of two axes with the same name.
    if len(dict(axes)) < len(axes):
        raise ClusterError(f"--mesh {word}: given an axis twice, needed each once")
    return tuple(axes)


def spelled(axes: Axes) -> str:
    """A mesh as `read_meshes` reads it; "1" for one rank."""
    return "x".join(f"{name}{size}" for name, size in axes) or "1"


def check_pools(meshes: Mapping[str, Axes], several: Sequence[str], pools: Sequence[str]) -> None:
    """Raise ClusterError for a mesh of a pool that does not exist, or that cannot have several ranks."""
    for pool, axes in meshes.items():
        if pool not in pools:
            raise ClusterError(f"--mesh {pool}={spelled(axes)}: no such pool, needed one of: {', '.join(pools)}")
        if pool not in several:
            raise ClusterError(
                f"--mesh {pool}={spelled(axes)}: given a pool without a model, needed one of: {', '.join(several)}"
            )


# Groups in flight beyond those that fill a generator's slots, so that a free slot finds the next group.
GROUPS_AHEAD = 2
# Groups in flight in a pool of small work; with many generators, one per `GENERATORS_EACH` of them, since waking up for
# answers costs the controller as much as ten answers. Each generator has at least one group, so a group waits in this
# pool only for a part of the time of a batch.
SMALL_CAPACITY, GENERATORS_EACH = 4, 4
# Groups in flight in a pool of small work with a node that works on several at once, such as an environment.
STREAM_CAPACITY = 32


@dataclass(frozen=True, slots=True)
class _Role:
    """What a pool holds and does. `rows` is the fewest samples of a group of its decoding nodes (0: it has none).
    `streams`: it has a node that works on several groups at once. `carries`: it holds a carried value, even if that
    never changes."""

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
        return generators if self.generates else 1

    def hosts_each(self, generators: int) -> int:
        return max(1, len(self.hosts) // self.replicas(generators))

    def hosts_of(self, index: int, generators: int) -> tuple[Host, ...]:
        """The hosts of a replica, each with a block of its ranks: the first replica has the first hosts, the second the
        next ones, and so on in turn."""
        each, turns = self.hosts_each(generators), len(self.hosts)
        return tuple(self.hosts[place % turns] for place in range(index * each, (index + 1) * each))

    def replicas_on(self, host: Host, generators: int) -> int:
        blocks, turns = self.replicas(generators) * self.hosts_each(generators), len(self.hosts)
        return sum(
            max(0, -(-(blocks - place) // turns)) for place, own in enumerate(self.hosts) if own.name == host.name
        )

    @property
    def models(self) -> bool:
        """True if it may have a language model, and so a mesh and a GPU."""
        return self.carries or self.generates

    @property
    def kind(self) -> Kind:
        if self.updates:
            return "trainer"
        return "generator" if self.generates else "beside" if self.carries else "small"

    def capacity(self, slots: int, generators: int, ahead: int = GROUPS_AHEAD) -> int:
        if self.rows:
            return ceil(slots / self.rows) + ahead
        if self.updates:
            return 1
        if self.streams or self.carries:
            return STREAM_CAPACITY if self.streams else SMALL_CAPACITY
        return max(SMALL_CAPACITY, generators // GENERATORS_EACH)


def place(
    graphs: Sequence[Graph],
    cluster: Cluster,
    *,
    generators: int = 1,
    slots: int = Context.slots,
    device: str = "cpu",
    meshes: Mapping[str, Axes] = MappingProxyType({}),
    tp_over_hosts: bool = False,
    ahead: int = GROUPS_AHEAD,
) -> Plan:
    """The plan for graphs that run one after the other on the same pools (where they differ, the first one counts).

    `slots` is the number of rows that a generator decodes at once, `ahead` the number of groups beyond these. `device`
    is "cpu", "cuda" (the hosts' devices in turn, shared by replicas if there are too few), or one device. `meshes`
    gives pools several ranks. `tp_over_hosts`: a replica's axis `tp` may go over hosts. Raises ClusterError for pools
    or devices that do not exist, for ranks of one replica that would share a GPU, and for hosts among which its ranks
    cannot be divided evenly, or that have no common network.
    """
    if generators < 1:
        raise ClusterError(f"generators: given {generators}, needed at least 1 replica")
    roles = _roles(graphs, cluster)
    overlapping = any(node.lag or node.accumulate for graph in graphs for node in graph.nodes)
    check_pools(meshes, [role.name for role in roles if role.models], [role.name for role in roles])
    _check_names(cluster, roles)
    for role in roles:
        if lack := axis_lack(role.kind, mesh := meshes.get(role.name, ())):
            given = f"--mesh {role.name}={spelled(mesh)} [{lack.code}]: given {lack.given}"
            raise ClusterError(f"{given}, needed {lack.needed}")
        _check_spread(role, meshes.get(role.name, ()), generators, tp_over_hosts)
    # A trainer has the first devices of its hosts; other pools begin after its ranks.
    updating = {
        host.name: num_ranks(meshes.get(role.name, ())) // len(role.hosts)
        for role in roles
        if role.updates
        for host in role.hosts
    }

    def replica(role: _Role, index: int) -> Replica:
        mesh, hosts = meshes.get(role.name, ()), role.hosts_of(index, generators)
        # Ranks that compute the same, such as copies of a norm, are bit-equal only with the same number of threads.
        threads = min(_threads(role, host, roles, generators, overlapping) for host in hosts)
        ranks = _ranks(role, index, hosts, mesh, device, threads, updating)
        return Replica(f"{role.name}/{index}", ranks, role.capacity(slots, generators, ahead), mesh)

    def pool(role: _Role) -> Pool:
        replicas = tuple(replica(role, index) for index in range(role.replicas(generators)))
        return Pool(role.name, role.holds, replicas, cluster.python_of(role.name))

    return Plan(tuple(map(pool, roles)))


def model_hosts(graphs: Sequence[Graph], cluster: Cluster) -> tuple[Host, ...]:
    """The hosts of pools with a model; all hosts if there is no such pool."""
    hosts = {host.name: host for role in _roles(graphs, cluster) if role.models for host in role.hosts}
    return tuple(hosts.values()) or cluster.hosts


def _check_names(cluster: Cluster, roles: Sequence[_Role]) -> None:
    """Raise ClusterError for a pool that does not exist."""
    names = [role.name for role in roles]
    for pool in cluster.pools:
        if pool not in names:
            raise ClusterError(
                f"--cluster: pools.{pool}: no pool of this program has that name; {nearest(pool, names)}"
            )


def _check_spread(role: _Role, mesh: Axes, generators: int, tp_over_hosts: bool) -> None:
    """Raise ClusterError if a pool's replicas, or the ranks of one, cannot be divided among its hosts."""
    replicas, ranks, names = role.replicas(generators), num_ranks(mesh), ", ".join(host.name for host in role.hosts)
    if len(role.hosts) > replicas and len(role.hosts) % replicas:
        given = f"pools.{role.name}: given {len(role.hosts)} hosts for {replicas} replicas"
        needed = f"needed at most {replicas}, or a multiple of it: replicas have equally many hosts (--generators)"
        raise ClusterError(f"{given}, {needed}")
    hosts = role.hosts_of(0, generators)
    each, left = divmod(ranks, len(hosts))
    if left:
        plural = "s" * (ranks > 1)
        given = f"pools.{role.name}: given {len(hosts)} hosts ({names}) for each replica of {ranks} rank{plural}"
        needed = f"a mesh of a multiple of {len(hosts)} ranks (--mesh {role.name}={FSDP}{len(hosts)})"
        # A pool without a model always has one rank.
        raise ClusterError(f"{given}, needed {needed if role.models else 'one host'}")
    for host in role.hosts:
        # Probably a typing mistake.
        if (here := each * role.replicas_on(host, generators)) > RANKS_PER_CORE * host.cores:
            given = f"--generators {replicas}" if replicas > 1 else f"--mesh {role.name}={spelled(mesh)}"
            needed = f"needed at most {RANKS_PER_CORE * host.cores}: a rank is a process"
            raise ClusterError(f"{given}: given {here} ranks on a host of {host.cores} cores, {needed}")
    if len(hosts) == 1:
        return
    spread = [host.name for host in hosts for _ in range(each)]
    if lack := spread_lack(role.kind, mesh, spread, tp_over_hosts):
        given = f"--mesh {role.name}={spelled(mesh)} [{lack.code}]: given {lack.given}"
        raise ClusterError(f"{given}, needed {lack.needed}")
    check_common_network(hosts, f"pools.{role.name}")


def _ranks(
    role: _Role,
    index: int,
    hosts: Sequence[Host],
    mesh: Axes,
    device: str,
    threads: int,
    updating: Mapping[str, int],
) -> tuple[Rank, ...]:
    """The ranks of replica `index` of a pool, in blocks on its hosts. The ranks on a host are on consecutive devices,
    and divide `threads` among them. Pools that update have the first `updating` devices of their hosts.
    """
    count, before = num_ranks(mesh) // len(hosts), index // len(role.hosts)
    ranks: list[Rank] = []
    for host in hosts:
        first = before * count + (0 if role.updates else updating.get(host.name, 0))
        devices = [_device(role, host, first + number, device) for number in range(count)]
        if devices[0] != "cpu" and len(set(devices)) < count:
            given = f"--mesh {role.name}={spelled(mesh)}: given {count} ranks for {', '.join(dict.fromkeys(devices))}"
            raise ClusterError(f"{given} of host {host.name}, needed a GPU for each: NCCL joins no two ranks on one")
        ranks += [Rank(host.name, name, max(1, threads // count)) for name in devices]
    return tuple(ranks)


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A planner's placement of a pool's replicas: the mesh of each, and the (host, device) of each of its ranks."""

    mesh: Axes
    replicas: tuple[tuple[tuple[str, str], ...], ...]


def place_as(
    graphs: Sequence[Graph], cluster: Cluster, layouts: Mapping[str, PoolLayout], *, slots: int, tp_over_hosts: bool
) -> Plan:
    """As `place`, but with the model pools placed by `layouts`.

    Pools without a layout do small work on the CPU of their host. Ranks with a layout divide their host's cores. Raises
    ClusterError for pools, hosts or devices that do not exist, and for replicas that `capabilities` does not allow.
    """
    roles = _roles(graphs, cluster)
    _check_names(cluster, roles)
    if strange := layouts.keys() - {role.name for role in roles if role.models}:
        needed = f"one of: {', '.join(role.name for role in roles if role.models)}"
        raise ClusterError(f"plan: given a layout of pool {min(strange)}, needed {needed}")
    generators = sum(len(layouts[role.name].replicas) for role in roles if role.generates and role.name in layouts)
    sharing = Counter(host for each in layouts.values() for places in each.replicas for host, _ in places)

    def replica(role: _Role, index: int, mesh: Axes, places: Sequence[tuple[str, str]]) -> Replica:
        what = f"plan: {role.name}/{index}"
        if len(places) != num_ranks(mesh):
            raise ClusterError(f"{what}: given {len(places)} ranks of {spelled(mesh)}, needed {num_ranks(mesh)}")
        for host, device in places:
            own = next((each for each in cluster.hosts if each.name == host), None)
            if own is None:
                raise ClusterError(f"{what}: given host {host!r}; {nearest(host, [h.name for h in cluster.hosts])}")
            if device not in own.accelerators:
                known = ", ".join(own.accelerators) or "no device but its cores"
                raise ClusterError(f"{what}: given {device!r} of host {host}, which has {known}")
        if len(set(places)) < len(places):
            raise ClusterError(f"{what}: given two ranks on one GPU, needed a GPU for each: NCCL joins no two on one")
        if lack := axis_lack(role.kind, mesh) or spread_lack(role.kind, mesh, [h for h, _ in places], tp_over_hosts):
            raise ClusterError(f"{what} [{lack.code}]: given {lack.given}, needed {lack.needed}")
        hosts = [cluster.host(host) for host in dict.fromkeys(host for host, _ in places)]
        check_common_network(hosts, what)
        # The same number for each: ranks that compute the same are bit-equal only so.
        threads = max(1, min(host.cores // sharing[host.name] for host in hosts))
        ranks = tuple(Rank(host, device, threads) for host, device in places)
        return Replica(f"{role.name}/{index}", ranks, role.capacity(slots, generators), mesh)

    def pool(role: _Role) -> Pool:
        if (layout := layouts.get(role.name)) is None:
            ranks = (Rank(cluster.hosts_of(role.name)[0].name),)
            only = (Replica(f"{role.name}/0", ranks, role.capacity(slots, generators)),)
            return Pool(role.name, role.holds, only, cluster.python_of(role.name))
        if len(layout.replicas) > 1 and not CAPABILITIES[role.kind].replicas:
            raise ClusterError(f"plan: given {len(layout.replicas)} replicas of {role.name}, needed one")
        replicas = tuple(replica(role, i, layout.mesh, each) for i, each in enumerate(layout.replicas))
        return Pool(role.name, role.holds, replicas, cluster.python_of(role.name))

    return Plan(tuple(map(pool, roles)))


def _roles(graphs: Sequence[Graph], cluster: Cluster) -> list[_Role]:
    """The pools, in the order in which the programs name them, without empty ones."""
    # The first graph with a value or a node decides its pool.
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
    """True if the node samples a group's responses: it works per group, and reads broadcast weights."""
    sources = [graph[item.ref.node] for item in node.inputs if item.ref.node in graph]
    return node.clock == "group" and samples_of(graph, node) > 0 and any(s.construct == "broadcast" for s in sources)


def samples_of(graph: Graph, node: Node) -> int:
    """The most rows of one group, by the option `samples`; 0 for a node without it. A node that answers another has as
    many rows as that one; a node that continues prefixes has `samples` rows for each prefix."""
    return len(begun_shares(graph, node))


def begun_shares(graph: Graph, node: Node) -> tuple[float, ...]:
    """For each row of one group, the share of its response that exists before: 0, except for rows that continue a
    prefix. The prefixes of one response are assumed to be spread evenly over it."""
    samples = dict(node.options).get("samples", 0)
    if not samples and node.answers and node.inputs and node.inputs[0].ref.node in graph:
        return begun_shares(graph, graph[node.inputs[0].ref.node])
    samples = samples if isinstance(samples, int) else 0
    begins = [0.0]
    if (cutter := cutter_of(graph, node)) is not None:
        most, rollouts = most_prefixes(cutter) or 1, _maker(graph, cutter, ":Rollouts")
        before = begun_shares(graph, rollouts) if rollouts is not None else (0.0,)
        begins = [share + (1 - share) * (at + 1) / (most + 1) for share in before for at in range(most)]
    return tuple(share for share in begins for _ in range(samples))


def cutter_of(graph: Graph, node: Node) -> Node | None:
    """The node that makes the prefixes that a node continues; None if it continues none."""
    return _maker(graph, node, ":Prefixes")


def most_prefixes(cutter: Node) -> int:
    """The most prefixes of a response, by the option `most`; 0 for a node without it."""
    most = dict(cutter.options).get("most")
    return most if type(most) is int and most > 0 else 0


def _maker(graph: Graph, node: Node, kind: str) -> Node | None:
    """The node that makes a node's input of this type. Filters, and other nodes that only pass it on, are skipped."""
    item = next((item for item in node.inputs if item.type.endswith(kind) and not item.back), None)
    if item is None or item.ref.node not in graph:
        return None
    maker = graph[item.ref.node]
    passes = maker.construct == "keep" or (kind == ":Rollouts" and not samples_of(graph, maker))
    return _maker(graph, maker, kind) or maker if passes else maker


def _threads(role: _Role, host: Host, roles: Sequence[_Role], generators: int, overlapping: bool) -> int:
    """CPU threads of a pool's replica on a host: updates divide all of the host's cores, generators half of them.

    An update's threads never wait for each other, so they use the time that generators leave. A generator's threads
    synchronise at every operation, and would stall if another process had a core. Without a lag, and unless updates
    accumulate, the two take turns; then generators have all cores, too.
    """
    if not (role.updates or role.generates):
        return 1
    updating = sum(r.replicas_on(host, generators) for r in roles if r.updates)
    if role.updates:
        return max(1, host.cores // updating)
    generating = sum(r.replicas_on(host, generators) for r in roles if r.generates)
    # While generators decode during an update, half of the cores are the update's.
    rest = host.cores - max(1, host.cores // 2) if updating and overlapping else host.cores
    return max(1, rest // generating)


def _device(role: _Role, host: Host, index: int, device: str) -> str:
    """A host's device with this index, in turn; small work stays on the CPU."""
    # A GPU for small work would mostly be idle, and its memory would be missing elsewhere.
    if device == "cpu" or not role.models:
        return "cpu"
    has = host.accelerators
    if not has or device not in ("cuda", *has):
        known = ", ".join(has) or "no device but its cores"
        raise ClusterError(f"device: given {device!r} for pool {role.name}; host {host.name} has {known}")
    if device != "cuda":
        return device
    return has[index % len(has)]


def why_not(asked: str, source: Replica, replicas: Sequence[Replica], delta: int = 0) -> str:
    """Why weights cannot go from `source` to `replicas` by a transport ("auto", "messages", "nccl", "shm", "cuda_ipc"),
    for messages; "" if they can, as far as a plan can tell.
    """
    if asked in ("auto", "messages"):
        return ""
    if asked == "nccl" and delta:
        return f"--delta {delta} is made and applied on the hosts, needed messages"
    for replica in (source, *replicas):
        for number, rank in enumerate(replica.ranks):
            name = f"{replica.name} rank {number}"
            if asked == "nccl":
                if rank.device == "cpu":
                    return f"{name} is on the CPU, needed a GPU"
                # A link joins the ranks of the source and of one replica; different replicas may share a GPU.
                for other, own in enumerate(source.ranks):
                    before = replica is not source or other < number
                    if before and (own.host, own.device) == (rank.host, rank.device):
                        same = f"{rank.device} with {source.name} rank {other}"
                        return f"{name} is on {same}, needed a GPU of its own: NCCL joins no two ranks on one"
                continue
            if rank.host != source.ranks[0].host:
                return f"{name} is on host {rank.host}, needed host {source.ranks[0].host} with {source.name}"
            if asked == "cuda_ipc" and rank.device == "cpu":
                return f"{name} is on the CPU, needed a GPU"
            # Shared memory is host memory: a receiver on a GPU has its weights elsewhere.
            if asked == "shm" and replica is not source and rank.device != "cpu":
                return f"{name} is on {rank.device}, needed the CPU to receive in the host's memory"
    return ""


def why_no_turns(graph: Graph, plan: Plan) -> str:
    """Why trainer and generator do not take turns with a device, for messages; "" if they do."""
    makers = [name for argument in graph.carried if (name := graph.producer(argument.name)) is not None]
    updating = {place for name in makers for place in plan.pool_of(name).places}
    decoding = {place for n in graph.nodes if decodes(graph, n) for place in plan.pool_of(n.name).places}
    if not updating or not decoding:
        return f"{graph.name} has no {'generator' if updating else 'trainer'}"
    if lag := max((node.lag or 0 for node in graph.nodes), default=0):
        return f"with a lag of {lag} trainer and generator work at the same time"
    shared = updating & decoding
    if not shared:
        return "trainer and generator have devices of their own"
    if all(device == "cpu" for _, device in shared):
        return "trainer and generator work on the CPU, where a device's memory is the host's"
    return ""


def slots_overrun(graph: Graph, plan: Plan, pool: str) -> float:
    """By how much a simulation of this plan may be too fast where a generator's slots are all in use: it lets groups
    decode that wait there for a slot (`GROUPS_AHEAD`). As a share of the groups that have one; 0 if it is less than
    5 %, and for a pool that does not decode."""
    for found in (each for each in plan.pools if each.name == pool):
        room = found.replicas[0].capacity - GROUPS_AHEAD
        if room > 0 and any(node.name in found.holds and decodes(graph, node) for node in graph.nodes):
            return share if (share := GROUPS_AHEAD / room) >= 0.05 else 0.0
    return 0.0


def served(graph: Graph, plan: Plan) -> Plan:
    """The plan with the number of firings that are really processed at once: one per rank, except in pools with a
    stream (a generator, an environment)."""
    streaming = {node.name for node in graph.nodes if node.stream and node.clock == "group"}
    pools = (
        pool
        if streaming.intersection(pool.holds)
        else replace(pool, replicas=tuple(replace(replica, capacity=1) for replica in pool.replicas))
        for pool in plan.pools
    )
    return Plan(tuple(pools))
