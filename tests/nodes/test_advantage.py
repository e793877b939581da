"""The baseline of a response is its group's mean."""

import torch

from penstock.graph.types import Rewards
from penstock.nodes.advantage import group_advantage

REWARDS = Rewards(torch.tensor([1.0, 0.0, 0.0, 1.0]))


def test_advantages_are_rewards_less_their_mean() -> None:
    assert group_advantage.fn(REWARDS).values_N.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_normalised_advantages_have_unit_deviation() -> None:
    torch.testing.assert_close(
        group_advantage.fn(REWARDS, normalize=True).values_N, torch.tensor([1.0, -1.0, -1.0, 1.0])
    )


def test_equal_rewards_give_no_advantage() -> None:
    same = Rewards(torch.full((3,), 0.7))
    for normalize in (False, True):
        assert group_advantage.fn(same, normalize=normalize).values_N.abs().max() < 1e-3
