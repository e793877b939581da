"""Who passes weights on to whom in a run: a chain where they are messages, and everybody else as without one."""

import pytest
import torch

from penstock.runtime.cluster.placement import Rank, Replica
from penstock.runtime.control.routes import GRACE, Routes
from penstock.runtime.schedule.compile import Channel
from penstock.runtime.tensor.weight_sync import Description, WeightPublisher
from tests.runtime.tensor.peer import Policy


def channel(trainers: int, *hosts: str, ranks: int = 1) -> Channel:
    """From a trainer on host a to replicas on these hosts."""
    source = Replica("trainer/0", (Rank("a"),) * trainers)
    replicas = tuple(Replica(f"generator/{k}", (Rank(host),) * ranks) for k, host in enumerate(hosts))
    return Channel("policy>generator", "policy", source, "broadcast", "generator", replicas)


def description(ranks: int = 1) -> Description:
    """Of six equal tensors, which each rank holds, so that each sends an equal share of them."""
    policy = Policy(1)
    policy.tensors = {f"t{k}": torch.zeros(100) for k in range(6)}
    return WeightPublisher("policy>generator", policy, ranks=ranks, proof="off").description


def settled(way: Channel, transport: str = "auto", delta: int = 0) -> Routes:
    routes = Routes(way, transport, delta)
    routes.settle(description(len(way.source.ranks)))
    return routes


def sources(routes: Routes, way: Channel, together: tuple[str, ...] | None = None) -> list[str]:
    names = tuple(replica.name for replica in way.replicas)
    return [routes.source(name, names if together is None else together) for name in names]


def test_one_trainer_feeds_the_first_of_the_replicas_on_other_hosts_and_each_the_next() -> None:
    way = channel(1, "b", "c", "d")
    routes = settled(way)
    names = tuple(replica.name for replica in way.replicas)
    assert sources(routes, way) == ["", "generator/0", "generator/1"]
    assert [routes.next(name, names) for name in names] == ["generator/1", "generator/2", ""]
    assert all(routes.chained(name) for name in names)
    assert [routes.patience(name) for name in names] == [1, 1 + GRACE / 2, 1 + GRACE]


def test_replicas_on_the_trainers_host_are_in_no_chain() -> None:
    way = channel(1, "a", "b", "a", "c")
    routes = settled(way)
    assert sources(routes, way) == ["", "", "", "generator/1"]
    assert [routes.chained(replica.name) for replica in way.replicas] == [False, True, False, True]
    assert routes.next("generator/0", ("generator/0", "generator/2")) == ""


@pytest.mark.parametrize(
    ("hosts", "transport", "delta"),
    [("aaa", "auto", 0), ("aaab", "auto", 0), ("bcd", "auto", 4), ("aaa", "shm", 0), ("bcd", "cuda_ipc", 0)],
    ids=["one host", "one replica elsewhere", "deltas", "shared memory", "a GPU's memory"],
)
def test_without_a_use_for_a_chain_all_are_fed_by_the_trainers(hosts: str, transport: str, delta: int) -> None:
    way = channel(1, *hosts)
    routes = settled(way, transport, delta)
    assert sources(routes, way) == [""] * len(hosts)
    assert not any(routes.chained(replica.name) for replica in way.replicas)
    assert {routes.patience(replica.name) for replica in way.replicas} == {1}


def test_where_messages_are_asked_for_one_host_has_chains_too() -> None:
    way = channel(1, "a", "a")
    assert sources(settled(way, "messages"), way) == ["", "generator/0"]


def test_as_many_trainers_as_replicas_feed_them_all() -> None:
    way = channel(3, "b", "c", "d")
    routes = settled(way)
    assert sources(routes, way) == ["", "", ""]
    assert not routes.chained("generator/0")


def test_a_replica_whose_predecessor_is_not_sent_the_version_gets_it_from_the_trainers() -> None:
    way = channel(1, "b", "c", "d")
    routes = settled(way)
    assert sources(routes, way, ("generator/0", "generator/2")) == ["", "generator/0", ""]
    assert routes.next("generator/0", ("generator/0", "generator/2")) == ""
    assert sources(routes, way, ()) == ["", "", ""]
