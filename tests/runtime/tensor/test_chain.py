"""Chains of replicas: who feeds whom, and what is passed on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.tensor.layout import Copy, Mesh, Region, sharded
from penstock.runtime.tensor.reshard import SLACK, ReshardPlan, chain, forwards, reshard


def plan_of(trainers: int, generators: int) -> ReshardPlan:
    tensors = [(f"t{i}", (240, 64), "bfloat16") for i in range(4)]
    rules = {f"t{i}": (0, 0) for i in range(4)}
    return reshard(sharded(tensors, Mesh((("fsdp", trainers),))), sharded(tensors, Mesh((("tp", generators),)), rules))


@pytest.mark.parametrize(
    ("trainers", "generators", "replicas", "heads"),
    [(1, 1, 1, 1), (1, 1, 5, 1), (4, 1, 3, 3), (4, 1, 4, 4), (4, 1, 9, 4), (2, 4, 6, 1), (8, 2, 16, 4), (8, 2, 3, 3)],
)
def test_trainers_feed_as_many_replicas_as_keep_them_no_busier_than_a_receiver(
    trainers: int, generators: int, replicas: int, heads: int
) -> None:
    plan = plan_of(trainers, generators)
    links = chain(plan, replicas)
    assert [link.destination for link in links] == list(range(replicas))
    assert sum(link.source is None for link in links) == heads
    assert heads == 1 or heads * max(plan.bytes_out) <= SLACK * max(plan.bytes_in)
    assert heads == replicas or (heads + 1) * max(plan.bytes_out) > SLACK * max(plan.bytes_in)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 40))
def test_a_replica_forwards_to_one_at_most_and_all_are_reached(trainers: int, generators: int, replicas: int) -> None:
    links = chain(plan_of(trainers, generators), replicas)
    sources = [link.source for link in links if link.source is not None]
    assert len(sources) == len(set(sources))
    assert all(link.source is None or link.source < link.destination for link in links)
    depth: dict[int, int] = {}
    for source, destination in links:
        depth[destination] = 1 if source is None else depth[source] + 1
    assert max(depth.values()) - min(depth[k] for k in range(replicas) if k not in sources) <= 1


def test_no_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="given 0 replicas"):
        chain(plan_of(1, 1), 0)


def test_replicas_of_nothing_are_fed_directly() -> None:
    assert all(link.source is None for link in chain(ReshardPlan((), 1, 1), 3))


def test_a_rank_forwards_all_that_it_holds_to_the_same_rank() -> None:
    held = {"b": Region((2, 0), (4, 2)), "a": Region((0,), (3,)), "nothing": Region((4,), (4,))}
    assert forwards(held, 1) == (Copy("b", 1, 1, held["b"]), Copy("a", 1, 1, held["a"]))
