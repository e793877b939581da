"""A plan as a value: how it names a rank."""

from penstock.runtime.cluster.placement import Plan, Pool, Rank, Replica


def test_a_rank_is_named_with_its_host_where_there_are_several() -> None:
    def plan(*hosts: str) -> Plan:
        return Plan(tuple(Pool(f"p{n}", (), (Replica(f"p{n}/0", (Rank(host),)),)) for n, host in enumerate(hosts)))

    assert plan("a", "a").spelled("p1/0", 0) == "p1/0 rank 0"
    assert [plan("a", "b").spelled(f"p{n}/0", 0) for n in (0, 1)] == ["p0/0 rank 0 on host a", "p1/0 rank 0 on host b"]
