"""Micro-batches are dealt out by their sizes, the same on every rank."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.nodes.parallel.mesh import assign

COSTS = st.lists(st.integers(1, 1000), max_size=40)


@given(COSTS, st.integers(1, 9))
def test_each_item_is_dealt_once_and_no_part_gets_more_than_its_rounds(costs: list[int], parts: int) -> None:
    shares = assign(costs, parts)
    assert len(shares) == parts
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    assert max(map(len, shares)) == -(-len(costs) // parts)


@given(COSTS.filter(bool), st.integers(1, 9))
def test_no_part_has_more_than_its_fair_share_and_two_items(costs: list[int], parts: int) -> None:
    totals = [sum(costs[item] for item in share) for share in assign(costs, parts)]
    assert max(totals) <= sum(costs) / parts + 2 * max(costs)


def test_the_longest_goes_first_to_who_has_least() -> None:
    assert assign([5, 5, 5, 5], 2) == [[0, 2], [1, 3]]
    assert assign([1, 9, 2, 8], 2) == [[0, 1], [2, 3]]
    assert assign([3], 3) == [[0], [], []]
    assert assign([], 2) == [[], []]
