"""Each baseline by hand; groups of equal rewards give exactly nothing."""

import math

import pytest
import torch
from torch import Tensor

from penstock.nodes.advantage import (
    consecutive_groups,
    group_mean_advantages,
    grpo_advantages,
    overlong_penalty,
    reinforce_plus_plus_advantages,
    remax_advantages,
    rloo_advantages,
    uniform_groups,
    whiten,
)

# group 0: 1, 2, 6 of mean 3, squares 14; group 1: 5, 7 of mean 6, squares 2
REWARDS = torch.tensor([1.0, 2.0, 6.0, 5.0, 7.0], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 1, 1])


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_consecutive_rows_make_groups() -> None:
    assert consecutive_groups(6, 3).tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="7 rows"):
        consecutive_groups(7, 3)


def test_the_mean_of_the_group_is_the_baseline() -> None:
    torch.testing.assert_close(group_mean_advantages(REWARDS, GROUPS), float64([-2, -1, 3, -1, 1]))


def test_rows_of_a_group_need_not_be_neighbours() -> None:
    order = torch.tensor([3, 0, 4, 2, 1])
    for advantages in (group_mean_advantages, grpo_advantages, rloo_advantages, reinforce_plus_plus_advantages):
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
    torch.testing.assert_close(reinforce_plus_plus_advantages(REWARDS), (REWARDS - 4.2) / deviation)


def test_reinforce_plus_plus_with_baseline_takes_the_group_mean_off_first() -> None:
    by_hand = float64([-2, -1, 3, -1, 1]) / math.sqrt((14 + 2) / 5)
    torch.testing.assert_close(reinforce_plus_plus_advantages(REWARDS, GROUPS), by_hand)


def test_remax_compares_with_the_greedy_response_to_the_same_prompt() -> None:
    greedy = float64([2, 5])
    torch.testing.assert_close(remax_advantages(REWARDS, greedy, GROUPS), float64([-1, 0, 4, 0, 2]))


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1 / 3, 1e8, -3e-9])
@pytest.mark.parametrize("samples", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(reward: float, samples: int) -> None:
    rewards = torch.cat([torch.full((samples,), reward), torch.tensor([0.0, 1.0])])
    groups = torch.cat([torch.zeros(samples, dtype=torch.long), torch.tensor([1, 1])])
    for advantages in (
        group_mean_advantages(rewards, groups),
        grpo_advantages(rewards, groups),
        grpo_advantages(rewards, groups, correction=1),
        reinforce_plus_plus_advantages(rewards, groups),
    ):
        assert advantages.isfinite().all()
        assert advantages[-2] < 0 < advantages[-1]
    assert (grpo_advantages(rewards, groups)[:samples] == 0).all()
    assert (group_mean_advantages(rewards, groups)[:samples] == 0).all()
    assert (reinforce_plus_plus_advantages(rewards[:samples]) == 0).all()


def test_groups_all_right_or_all_wrong_are_uniform() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.5, 0.0])
    groups = torch.tensor([0, 1, 0, 1, 2, 2, 3])
    assert uniform_groups(rewards, groups).tolist() == [True, True, False, True]
    assert uniform_groups(torch.full((3,), 0.7), torch.zeros(3, dtype=torch.long)).tolist() == [True]


def test_overlong_responses_are_punished_along_a_line() -> None:
    lengths = torch.tensor([0, 79, 80, 81, 90, 100, 101, 10_000])
    penalty = overlong_penalty(lengths, max_length=100, buffer=20)
    torch.testing.assert_close(penalty, torch.tensor([0, 0, 0, -0.05, -0.5, -1, -1, -1]))


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_outside_the_length_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"buffer={buffer}"):
        overlong_penalty(torch.tensor([1]), max_length=100, buffer=buffer)


def test_whitening_sees_only_what_the_mask_holds() -> None:
    values = float64([1, 1000, 2, 6, -1000])
    mask = torch.tensor([True, False, True, True, False])
    deviation = math.sqrt(14 / 3)
    white = whiten(values, mask)
    torch.testing.assert_close(white, float64([-2 / deviation, 0, -1 / deviation, 3 / deviation, 0]))
    torch.testing.assert_close(white[mask].square().mean().item(), 1.0)
