"""Each node's advantages are its paper's; a baseline of a group needs a group."""

from typing import Any

import pytest
import torch

from penstock.graph import NodeDef
from penstock.graph.types import Advantages, Rewards
from penstock.nodes.advantage import (
    batch_normalized,
    greedy_advantage,
    group_advantage,
    leave_one_out_advantage,
    plain_advantage,
)

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
