"""GAE by hand and against the recursion, response by response; the critic's clipped loss."""

import pytest
import torch
from torch import Tensor

from penstock.nodes.critic import discounted_sums, generalized_advantages, last_tokens, terminal_rewards, value_loss

SEQUENCE = torch.tensor([0, 0, 0, 1, 2, 2])
VALUES = torch.tensor([0.5, 0.25, 1.0, 0.75, -1.0, 2.0], dtype=torch.float64)
REWARDS = torch.tensor([0.0, 0.0, 1.0, 0.5, 0.0, -1.0], dtype=torch.float64)


def recursion(rewards: Tensor, values: Tensor, sequence: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = δ_t + γλ · A_{t+1} from each response's end, token by token."""
    advantages = torch.zeros_like(values)
    for t in reversed(range(len(values))):
        goes_on = t + 1 < len(values) and sequence[t + 1] == sequence[t]
        next_value = float(values[t + 1]) if goes_on else 0.0
        next_advantage = float(advantages[t + 1]) if goes_on else 0.0
        advantages[t] = rewards[t] + gamma * next_value - values[t] + gamma * lam * next_advantage
    return advantages


def test_the_reward_comes_at_the_last_token() -> None:
    assert last_tokens(SEQUENCE).tolist() == [False, False, True, True, False, True]
    rewards = terminal_rewards(torch.tensor([1.0, 0.5, -1.0]).double(), SEQUENCE)
    assert torch.equal(rewards, REWARDS)


def test_discounted_sums_by_hand_stay_within_a_response() -> None:
    sums = discounted_sums(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), SEQUENCE, discount=0.5)
    assert sums.tolist() == [1 + 1 + 1, 2 + 2, 4.0, 8.0, 16 + 16, 32.0]


def test_advantages_by_hand() -> None:
    """γ = ½, λ = ½: δ of the first response is ½·¼ − ½, ½·1 − ¼, 1 − 1."""
    advantages, returns = generalized_advantages(REWARDS, VALUES, SEQUENCE, gamma=0.5, lam=0.5)
    by_hand = [-0.375 + 0.25 * 0.25, 0.25, 0.0, 0.5 - 0.75, (0.5 * 2 + 1) + 0.25 * -3, -1.0 - 2.0]
    assert advantages.tolist() == by_hand
    torch.testing.assert_close(returns, advantages + VALUES)


@pytest.mark.parametrize("lengths", [[1], [2, 1], [7, 1, 8, 9, 16, 3], [33, 64, 1]])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_are_the_recursion_for_any_lengths(lengths: list[int], gamma: float, lam: float) -> None:
    torch.manual_seed(0)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rewards, values = torch.randn(2, len(sequence), dtype=torch.float64)
    advantages, _ = generalized_advantages(rewards, values, sequence, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, recursion(rewards, values, sequence, gamma, lam))


def test_undiscounted_returns_are_the_reward_and_advantages_what_the_critic_missed() -> None:
    rewards = terminal_rewards(torch.tensor([1.0, 0.5, -1.0]).double(), SEQUENCE)
    advantages, returns = generalized_advantages(rewards, VALUES, SEQUENCE, gamma=1.0, lam=1.0)
    final = torch.tensor([1.0, 1.0, 1.0, 0.5, -1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(returns, final)
    torch.testing.assert_close(advantages, final - VALUES)


def test_the_critic_gets_no_gradient_through_its_targets() -> None:
    advantages, returns = generalized_advantages(REWARDS, VALUES.clone().requires_grad_(), SEQUENCE, gamma=1.0, lam=0.9)
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_value_loss_is_half_the_square() -> None:
    values = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([4.0, -1.0], dtype=torch.float64)
    loss = value_loss(values, values.detach(), returns)
    assert loss.tolist() == [4.5, 0.5]
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [-3.0, -1.0]
    assert torch.autograd.gradcheck(lambda x: value_loss(x, torch.zeros(2), returns), (values,))


def test_clipped_value_loss_takes_the_larger_error_and_stops_only_where_the_clip_is_worse() -> None:
    """V_old = 1, ε = ½: inside; moved towards R beyond the clip; moved past R; moved away from R."""
    values = torch.tensor([1.25, 2.5, 4.0, 0.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.ones(4, dtype=torch.float64), torch.full((4,), 3.0, dtype=torch.float64)
    loss = value_loss(values, old, returns, clip=0.5)
    assert loss.tolist() == [1.75**2 / 2, 1.5**2 / 2, 1.5**2 / 2, 3.0**2 / 2]
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [-1.75, 0.0, 0.0, -3.0]
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, clip=0.5), (values,))
