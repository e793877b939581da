"""Each baseline by hand, and each node's advantages by its paper; groups of equal rewards give exactly nothing."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.graph import NodeDef
from penstock.graph.types import Advantages, Rewards, Rollouts
from penstock.nodes.advantage import (
    batch_normalized,
    greedy_advantage,
    group_advantage,
    group_mean_advantages,
    grpo_advantages,
    leave_one_out_advantage,
    plain_advantage,
    rloo_advantages,
    uniform_groups,
    whiten,
)

from .rollouts import random_rollouts

# group 0: 1, 2, 6 of mean 3, squares 14; group 1: 5, 7 of mean 6, squares 2
REWARDS = torch.tensor([1.0, 2.0, 6.0, 5.0, 7.0], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 1, 1])


def normalized(values: Tensor) -> Tensor:
    """REINFORCE++, with a baseline where these are advantages already."""
    found: Tensor = batch_normalized.fn(Advantages(values)).values_N
    return found


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_mean_of_the_group_is_the_baseline() -> None:
    torch.testing.assert_close(group_mean_advantages(REWARDS, GROUPS), float64([-2, -1, 3, -1, 1]))


def test_rows_of_a_group_need_not_be_neighbours() -> None:
    order = torch.tensor([3, 0, 4, 2, 1])
    for advantages in (group_mean_advantages, grpo_advantages, rloo_advantages):
        torch.testing.assert_close(advantages(REWARDS[order], GROUPS[order]), advantages(REWARDS, GROUPS)[order])


def test_grpo_divides_by_the_population_or_the_sample_deviation() -> None:
    population, sample = math.sqrt(14 / 3), math.sqrt(14 / 2)
    by_hand = float64([-2 / population, -1 / population, 3 / population, -1, 1])
    torch.testing.assert_close(grpo_advantages(REWARDS, GROUPS), by_hand)
    by_hand = float64([-2 / sample, -1 / sample, 3 / sample, -1 / math.sqrt(2), 1 / math.sqrt(2)])
    torch.testing.assert_close(grpo_advantages(REWARDS, GROUPS, correction=1), by_hand)


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    torch.testing.assert_close(rloo_advantages(REWARDS, GROUPS), float64([1 - 4, 2 - 3.5, 6 - 1.5, 5 - 7, 7 - 5]))


def test_leave_one_out_of_one_names_the_group() -> None:
    with pytest.raises(ValueError, match="1 samples in group 1"):
        rloo_advantages(torch.ones(3), torch.tensor([0, 1, 0]))


def test_reinforce_plus_plus_normalises_over_the_whole_batch() -> None:
    deviation = math.sqrt(((1 - 4.2) ** 2 + (2 - 4.2) ** 2 + (6 - 4.2) ** 2 + (5 - 4.2) ** 2 + (7 - 4.2) ** 2) / 5)
    torch.testing.assert_close(normalized(REWARDS), (REWARDS - 4.2) / deviation)


def test_reinforce_plus_plus_with_baseline_takes_the_group_mean_off_first() -> None:
    by_hand = float64([-2, -1, 3, -1, 1]) / math.sqrt((14 + 2) / 5)
    torch.testing.assert_close(normalized(group_mean_advantages(REWARDS, GROUPS)), by_hand)


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1 / 3, 1e8, -3e-9])
@pytest.mark.parametrize("samples", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(reward: float, samples: int) -> None:
    rewards = torch.cat([torch.full((samples,), reward), torch.tensor([0.0, 1.0])])
    groups = torch.cat([torch.zeros(samples, dtype=torch.long), torch.tensor([1, 1])])
    for advantages in (
        group_mean_advantages(rewards, groups),
        grpo_advantages(rewards, groups),
        grpo_advantages(rewards, groups, correction=1),
        normalized(group_mean_advantages(rewards, groups)),
    ):
        assert advantages.isfinite().all()
        assert advantages[-2] < 0 < advantages[-1]
    assert (grpo_advantages(rewards, groups)[:samples] == 0).all()
    assert (group_mean_advantages(rewards, groups)[:samples] == 0).all()
    assert (normalized(rewards[:samples]) == 0).all()


def test_groups_all_right_or_all_wrong_are_uniform() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.5, 0.0])
    groups = torch.tensor([0, 1, 0, 1, 2, 2, 3])
    assert uniform_groups(rewards, groups).tolist() == [True, True, False, True]
    assert uniform_groups(torch.full((3,), 0.7), torch.zeros(3, dtype=torch.long)).tolist() == [True]


def test_whitening_sees_only_what_the_mask_holds() -> None:
    values = float64([1, 1000, 2, 6, -1000])
    mask = torch.tensor([True, False, True, True, False])
    deviation = math.sqrt(14 / 3)
    white = whiten(values, mask)
    torch.testing.assert_close(white, float64([-2 / deviation, 0, -1 / deviation, 3 / deviation, 0]))
    torch.testing.assert_close(white[mask].square().mean().item(), 1.0)


# Nodes

MARKS = Rewards(torch.tensor([1.0, 0.0, 0.0, 1.0]))


def test_advantages_are_rewards_less_their_mean() -> None:
    assert group_advantage.fn(MARKS).values_N.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_normalised_advantages_have_unit_deviation() -> None:
    torch.testing.assert_close(group_advantage.fn(MARKS, normalize=True).values_N, torch.tensor([1.0, -1.0, -1.0, 1.0]))


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
    assert plain_advantage.fn(MARKS).values_N.tolist() == [1, 0, 0, 1]
    assert plain_advantage.fn(MARKS, baseline=0.5).values_N.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_the_greedy_response_is_the_baseline_of_its_prompt() -> None:
    assert greedy_advantage.fn(MARKS, Rewards(torch.tensor([1.0]))).values_N.tolist() == [0, -1, -1, 0]
    with pytest.raises(ValueError, match="given 4 greedy responses to a prompt, needed one"):
        greedy_advantage.fn(MARKS, MARKS)


def test_a_batch_is_normalised_as_a_whole() -> None:
    found = batch_normalized.fn(Advantages(torch.tensor([3.0, 1.0, 1.0, -1.0]))).values_N
    assert batch_normalized.clock == "update"
    torch.testing.assert_close(found, torch.tensor([2.0, 0.0, 0.0, -2.0]) / 2**0.5)
    assert batch_normalized.fn(Advantages(torch.full((4,), 0.3))).values_N.tolist() == [0, 0, 0, 0]


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
