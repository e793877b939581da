"""Each node's advantages are its paper's; a baseline of a group needs a group."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.graph import NodeDef
from penstock.graph.types import Advantages, Rewards, Rollouts
from penstock.nodes.advantage import (
    batch_normalized,
    greedy_advantage,
    group_advantage,
    leave_one_out_advantage,
    plain_advantage,
)

from .rollouts import random_rollouts

REWARDS = Rewards(torch.tensor([1.0, 0.0, 0.0, 1.0]))


def test_advantages_are_rewards_less_their_mean() -> None:
    assert group_advantage.fn(REWARDS).values_N.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_normalised_advantages_have_unit_deviation() -> None:
    torch.testing.assert_close(
        group_advantage.fn(REWARDS, normalize=True).values_N, torch.tensor([1.0, -1.0, -1.0, 1.0])
    )


@pytest.mark.parametrize("normalize", [False, True])
def test_equal_rewards_give_no_advantage(normalize: bool) -> None:
    same = Rewards(torch.full((3,), 0.7))
    assert group_advantage.fn(same, normalize=normalize).values_N.tolist() == [0, 0, 0]


def test_leaving_one_out_compares_with_the_others() -> None:
    torch.testing.assert_close(
        leave_one_out_advantage.fn(Rewards(torch.tensor([3.0, 0.0, 1.5]))).values_N,
        torch.tensor([3 - 0.75, 0 - 2.25, 1.5 - 1.5]),
    )


@pytest.mark.parametrize("make", [group_advantage, leave_one_out_advantage])
def test_one_sample_has_nobody_to_be_compared_with(make: NodeDef[..., Any]) -> None:
    with pytest.raises(ValueError, match=rf"{make.__name__}: given 1 sample for a prompt, needed 2 or more"):
        make.fn(Rewards(torch.tensor([1.0])))


def test_a_plain_advantage_is_the_reward_less_a_constant() -> None:
    assert plain_advantage.fn(REWARDS).values_N.tolist() == [1, 0, 0, 1]
    assert plain_advantage.fn(REWARDS, baseline=0.5).values_N.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_the_greedy_response_is_the_baseline_of_its_prompt() -> None:
    assert greedy_advantage.fn(REWARDS, Rewards(torch.tensor([1.0]))).values_N.tolist() == [0, -1, -1, 0]
    with pytest.raises(ValueError, match="given 4 greedy responses to a prompt, needed one"):
        greedy_advantage.fn(REWARDS, REWARDS)


def test_a_batch_is_normalised_as_a_whole() -> None:
    found = batch_normalized.fn(Advantages(torch.tensor([3.0, 1.0, 1.0, -1.0]))).values_N
    assert batch_normalized.clock == "update"
    torch.testing.assert_close(found, torch.tensor([2.0, 0.0, 0.0, -2.0]) / 2**0.5)
    assert batch_normalized.fn(Advantages(torch.full((4,), 0.3))).values_N.tolist() == [0, 0, 0, 0]


# Sub-groups ---------------------------------------------------------------------------------------------------


def kinds(rollouts: Rollouts) -> tuple[str, ...]:
    return rollouts.texts


def two_names(rollouts: Rollouts) -> list[int]:
    return [0, 1]


KINDS = replace(random_rollouts(), texts=("a", "b", "a", "b", "a"))
MIXED = Rewards(torch.tensor([1.0, 5.0, 0.0, 7.0, 2.0]))


def test_rows_are_compared_within_their_sub_group() -> None:
    assert group_advantage(MIXED, KINDS, by=kinds).values_N.tolist() == [0, -1, -1, 1, 1]
    assert leave_one_out_advantage(MIXED, KINDS, by=kinds).values_N.tolist() == [0, -2, -1.5, 2, 1.5]
    normal = group_advantage(MIXED, KINDS, by=kinds, normalize=True).values_N
    torch.testing.assert_close(normal, torch.tensor([0, -1, -(1.5**0.5), 1, 1.5**0.5]))
    assert group_advantage(MIXED, KINDS).values_N.tolist() == group_advantage(MIXED).values_N.tolist()


def test_a_row_alone_in_its_sub_group_has_no_advantage() -> None:
    alone = replace(KINDS, texts=("a", "b", "a", "c", "a"))
    assert group_advantage(MIXED, alone, by=kinds).values_N.tolist() == [0, 0, -1, 0, 1]
    with pytest.raises(ValueError, match="given 1 samples in group 1, needed 2 or more"):
        leave_one_out_advantage(MIXED, alone, by=kinds)


def test_sub_groups_without_rollouts_or_with_too_few_names_are_refused() -> None:
    with pytest.raises(ValueError, match="needed the input `rollouts`"):
        group_advantage(MIXED, by=kinds)
    with pytest.raises(ValueError, match="by=two_names: given 2 names of sub-groups, needed 5, one for each row"):
        group_advantage(MIXED, KINDS, by=two_names)
