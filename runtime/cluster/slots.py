"""Which hosts of today stand for those of a plan that was made on others, and what keeps them from it. Pure.

A plan is over slots: the hosts of a cluster, in order. Their names and addresses are those of one day: an engine gives
a job that it has taken away other machines. Where these have the shape of the former ones, the plan stays as it is, and
with it the bits of the run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.runtime.cluster.cluster import Cluster, Host, PoolTable
from penstock.runtime.cluster.placement import Plan, Rank


@dataclass(frozen=True)
class MovedPlan:
    """A plan on other hosts: `cluster` is theirs, with pools where the plan has them. `lacks` says why the plan cannot
    be moved, a line for each reason; then it is as it was."""

    plan: Plan
    cluster: Cluster
    lacks: tuple[str, ...] = ()


def moved(plan: Plan, before: Cluster, now: Cluster) -> MovedPlan:
    """The plan that was made for the hosts of `before`, on those of `now`.

    Hosts keep their names where all of them are there; else the first stands for the first, and so on. Hosts beyond
    those are left idle. Where `now` says of no pool where it is, pools stay with their hosts."""
    stands = _stands_for(before, now)
    if lacks := tuple(_lacks(plan, before, now, stands)):
        return MovedPlan(plan, now, lacks)

    def pool_on(table: PoolTable | str | tuple[str, ...]) -> PoolTable | str | tuple[str, ...]:
        if isinstance(table, PoolTable):
            return table.model_copy(update={"hosts": pool_on(table.hosts)})
        return stands[table].name if isinstance(table, str) else tuple(stands[name].name for name in table)

    def rank_on(rank: Rank) -> Rank:
        host, was = stands[rank.host], before.host(rank.host)
        own = dict(zip(was.accelerators, host.accelerators, strict=False))
        return replace(rank, host=host.name, device=own.get(rank.device, rank.device))

    # What a file does not say of the machines that there are now is as it was of the former ones.
    former = {host.name: was for was in before.hosts for host in [stands[was.name]]}
    hosts = []
    for host in now.hosts:
        gpu, memory = host.gpu, now.memory_gib(host)
        if (own := former.get(host.name)) is not None:
            gpu, memory = gpu or own.gpu, memory or before.memory_gib(own)
        hosts.append(host.model_copy(update={"gpu": gpu, "memory_gib": memory}))
    pools_now = now.pools or {name: pool_on(table) for name, table in before.pools.items()}
    kinds = {"gpus": {**before.gpus, **now.gpus}, "cpus": {**before.cpus, **now.cpus}}
    now = now.model_copy(update={"hosts": tuple(hosts), "pools": pools_now, **kinds})
    pools = []
    for pool in plan.pools:
        replicas = tuple(replace(each, ranks=tuple(map(rank_on, each.ranks))) for each in pool.replicas)
        pools.append(replace(pool, replicas=replicas))
    return MovedPlan(Plan(tuple(pools)), now)


def _stands_for(before: Cluster, now: Cluster) -> dict[str, Host]:
    """The host of today for each of the former ones, as far as there are enough."""
    known = {host.name: host for host in now.hosts}
    names = [host.name for host in before.hosts]
    if known.keys() >= set(names):
        return {name: known[name] for name in names}
    return dict(zip(names, now.hosts, strict=False))


def _lacks(plan: Plan, before: Cluster, now: Cluster, stands: Mapping[str, Host]) -> Iterator[str]:
    if len(now.hosts) < len(before.hosts):
        yield f"given {len(now.hosts)} hosts, needed {len(before.hosts)} as before"
        return
    for was in before.hosts:
        host = stands[was.name]
        for what, given, needed in (
            ("cores", host.cores, was.cores),
            ("GPUs", len(host.accelerators), len(was.accelerators)),
            # A kind that is not said is whatever the GPUs are.
            ("GPUs of the kind", host.gpu, was.gpu if host.gpu else ""),
        ):
            if given != needed and needed != "":
                whose = f"host {host.name}" + (f" in the place of host {was.name}" if host.name != was.name else "")
                yield f"{whose}: {what}: given {given}, needed {needed}"
    for pool in plan.pools if now.pools else ():
        where = [host.name for host in now.hosts_of(pool.name)]
        wanted = [stands[host.name].name for host in before.hosts_of(pool.name)]
        if where != wanted:
            yield f"pools.{pool.name}: given {', '.join(where)}, needed {', '.join(wanted)}"
        if now.python_of(pool.name) != pool.python:
            given = now.python_of(pool.name) or "the command's interpreter"
            yield f"pools.{pool.name}.python: given {given}, needed {pool.python or 'the command’s'}"
