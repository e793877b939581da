"""Minibatches are whole prompt groups, each in one of them, drawn by a key."""

import pytest
import torch

from penstock.graph.types import Rewards
from penstock.nodes.learn.batching import minibatch_rows

from .updating import batch

ORDINALS = [4, 4, 6, 6, 6, 9, 12, 12]


def test_every_row_is_in_one_minibatch_with_its_group() -> None:
    for key in range(20):
        parts = minibatch_rows(ORDINALS, 2, key)
        assert sorted(row for part in parts for row in part) == list(range(8))
        for part in parts:
            assert part == sorted(part)
            assert len({ORDINALS[row] for row in part}) == 2
    assert len({str(minibatch_rows(ORDINALS, 2, key)) for key in range(20)}) > 2


def test_one_minibatch_is_the_batch_as_it_is() -> None:
    assert all(minibatch_rows(ORDINALS, 1, key) == [list(range(8))] for key in range(5))


def test_a_key_says_which() -> None:
    assert minibatch_rows(ORDINALS, 4, 3) == minibatch_rows(ORDINALS, 4, 3)


@pytest.mark.parametrize(("groups", "minibatches", "sizes"), [(6, 3, [2] * 3), (7, 3, [3, 2, 2]), (5, 5, [1] * 5)])
def test_minibatches_are_as_even_as_whole_groups_can_be(groups: int, minibatches: int, sizes: list[int]) -> None:
    ordinals = [ordinal for ordinal in range(groups) for _ in range(3)]
    for key in range(10):
        parts = minibatch_rows(ordinals, minibatches, key)
        assert [len(part) for part in parts] == [3 * size for size in sizes]
        assert sorted(row for part in parts for row in part) == list(range(3 * groups))


@pytest.mark.parametrize("minibatches", [-1, 0, 5, 8])
def test_groups_are_never_torn(minibatches: int) -> None:
    given = f"given minibatches={minibatches} for a batch of 4 prompt groups, needed at least 1, and a prompt group for"
    with pytest.raises(ValueError, match=given):
        minibatch_rows(ORDINALS, minibatches, 0)


def test_rows_are_taken_of_arrays_and_of_tuples_alike() -> None:
    rollouts, _ = batch()
    rollouts.logprobs_NT = None
    taken = rollouts.take([3, 1])
    assert taken.ordinals == (3, 1)
    assert taken.logprobs_NT is None
    assert torch.equal(taken.tokens_NS, rollouts.tokens_NS[[3, 1]])
    assert Rewards(torch.tensor([5.0, 6.0])).take([1]).values_N.tolist() == [6]


def test_rows_are_taken_by_marks_too_and_none_at_all() -> None:
    rollouts, advantage = batch()
    for marks in (advantage.values_N > 0, [True, False, True, False, True]):
        taken = rollouts.take(marks)
        assert (taken.ordinals, len(taken)) == ((0, 2, 4), 3)
        assert torch.equal(taken.tokens_NS, rollouts.tokens_NS[[0, 2, 4]])
    nothing = rollouts.take([])
    assert (len(nothing), nothing.tokens_NS.shape) == (0, (0, rollouts.tokens_NS.shape[1]))
    assert len(type(rollouts).concat([nothing, taken, nothing])) == 3
    assert taken.take(torch.tensor([2, 2])).ordinals == (4, 4)


@pytest.mark.parametrize(
    ("rows", "said"),
    [([5], "row 5, needed 0 to 4"), ([-1], "row -1, needed 0 to 4"), ([True], "1 marks, needed 5, one for each row")],
)
def test_a_row_that_there_is_not_is_refused(rows: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=rf"Rollouts\.take: given {said}"):
        batch()[0].take(rows)
