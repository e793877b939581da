"""AIPO's gradient is the paper's formula; PPO's clip and the k3 estimator are theirs."""

import math

import pytest
import torch
from torch import Tensor

from penstock.nodes.learn.losses import aipo_loss, grpo_loss, kl_to_reference, sft_loss

RHO = 4.0
# log π − log μ: on policy, below ρ, just above ρ, far above ρ, and less likely than before
LOG_RATIOS = (0.0, 0.7, math.log(RHO) + 0.1, 3.0, -2.0)


def gradient(loss: Tensor, logprobs: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss.sum(), logprobs)
    return grad


def sampled(sign: float) -> tuple[Tensor, Tensor, Tensor]:
    """(log π with a gradient, log μ, A)."""
    log_ratios = torch.tensor(LOG_RATIOS, dtype=torch.float64)
    logprobs = torch.linspace(-3, -1, len(LOG_RATIOS), dtype=torch.float64)
    advantages = sign * torch.linspace(0.5, 1.5, len(LOG_RATIOS), dtype=torch.float64)
    return logprobs.requires_grad_(), logprobs.detach() - log_ratios, advantages


def through_the_ratio(logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> Tensor:
    """The well-known wrong version: −min(r, ρ) · A, differentiated through the ratio."""
    return -torch.exp(logprobs - behaviour).clamp(max=RHO) * advantages


def by_hand(advantages: Tensor) -> Tensor:
    """∂/∂ log π_t of −Σ min(r_t, ρ) · A · log π_t with a constant weight."""
    return torch.tensor([-min(math.exp(r), RHO) for r in LOG_RATIOS], dtype=torch.float64) * advantages


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_aipo_gradient_is_the_formula_below_and_above_rho(sign: float) -> None:
    logprobs, behaviour, advantages = sampled(sign)
    grad = gradient(aipo_loss(logprobs, behaviour, advantages, rho=RHO), logprobs)
    torch.testing.assert_close(grad, by_hand(advantages))
    assert (grad != 0).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_formula_refuses_the_version_that_differentiates_through_the_ratio(sign: float) -> None:
    logprobs, behaviour, advantages = sampled(sign)
    wrong = gradient(through_the_ratio(logprobs, behaviour, advantages), logprobs)
    assert (wrong[2:4] == 0).all(), "above ρ it learns nothing"
    with pytest.raises(AssertionError):
        torch.testing.assert_close(wrong, by_hand(advantages))


def test_aipo_on_policy_is_reinforce_with_a_baseline() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -0.25])
    grad = gradient(aipo_loss(logprobs, logprobs.detach(), advantages, rho=2.0), logprobs)
    torch.testing.assert_close(grad, -advantages)


def test_ppo_clip_stops_the_gradient_only_where_the_policy_has_moved_far_enough() -> None:
    ratios = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    logprobs = torch.log(ratios).requires_grad_()
    loss = grpo_loss(logprobs, torch.zeros(5), advantages, clip=0.2)
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.0, -1.2, -0.5, 1.5, 0.8]))
    torch.testing.assert_close(gradient(loss, logprobs), torch.tensor([-1.0, 0.0, -0.5, 1.5, 0.0]))


def test_kl_estimator_is_never_negative_and_its_mean_is_the_divergence() -> None:
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 5).log_softmax(-1)
    tokens = torch.arange(5)
    estimates = kl_to_reference(policy[tokens], reference[tokens])
    assert (estimates >= 0).all()
    torch.testing.assert_close((policy.exp() * estimates).sum(), (policy.exp() * (policy - reference)).sum())


def test_grpo_adds_kl_times_the_estimator() -> None:
    logprobs, behaviour, reference = torch.tensor([[-1.0, -2.0], [-1.1, -1.9], [-1.5, -1.0]])
    advantages = torch.ones(2)
    plain = grpo_loss(logprobs, behaviour, advantages, clip=0.2)
    penalised = grpo_loss(logprobs, behaviour, advantages, clip=0.2, reference_P=reference, kl=0.3)
    torch.testing.assert_close(penalised - plain, 0.3 * kl_to_reference(logprobs, reference))


def test_sft_loss_is_cross_entropy() -> None:
    logits = torch.randn(4, 7)
    targets = torch.tensor([0, 3, 6, 1])
    logprobs = logits.log_softmax(-1)[range(4), targets]
    torch.testing.assert_close(sft_loss(logprobs).mean(), torch.nn.functional.cross_entropy(logits, targets))
