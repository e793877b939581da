"""Moves a plan to other hosts: which new host replaces which former one, and why it may be impossible. Pure.

A plan is over slots: the hosts of a cluster, in order. Their names and addresses may change: a cluster manager gives a
preempted job other machines. If these have the shape of the former ones, the plan stays the same, and so do the bits of
the run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.runtime.cluster.cluster import Cluster, Host, PoolTable
from penstock.runtime.cluster.placement import Plan, Rank


@dataclass(frozen=True)
class MovedPlan:
    """A plan on other hosts. `cluster` is that of the new hosts, with the plan's pools on them. `lacks` says why the
    plan cannot be moved, a line for each reason; then the plan is unchanged."""

    plan: Plan
    cluster: Cluster
    lacks: tuple[str, ...] = ()


def moved(plan: Plan, before: Cluster, now: Cluster) -> MovedPlan:
    """Move a plan that was made for the hosts of `before` to those of `now`.

    If `now` has all former host names, each host keeps its role; otherwise the first new host replaces the first former
    one, and so on. Further hosts stay idle. If `now` has no `pools`, pools stay with their hosts."""
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

    # GPU kind and memory that the new cluster does not give are taken from the former hosts.
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
    """The new host for each former one, as far as there are enough."""
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
            # A kind that is not given matches any.
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
