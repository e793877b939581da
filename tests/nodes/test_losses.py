"""Each loss and its gradient are the paper's formula, and not those of its well-known wrong versions."""

import math

import pytest
import torch
from torch import Tensor

from penstock.nodes.learn.losses import (
    aipo_loss,
    cispo_loss,
    decoupled_ppo_loss,
    grpo_loss,
    gspo_loss,
    gspo_token_loss,
    kl_to_reference,
    ppo_loss,
    reinforce_loss,
    sft_loss,
    tis_loss,
)

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
    torch.manual_seed(0)
    logits = torch.randn(4, 7)
    targets = torch.tensor([0, 3, 6, 1])
    logprobs = logits.log_softmax(-1)[range(4), targets]
    torch.testing.assert_close(sft_loss(logprobs).mean(), torch.nn.functional.cross_entropy(logits, targets))


# ratios on both sides of the clip at 1 − 0.2 and 1 + 0.5 (or 0.3), for both signs of the advantage
RATIOS = torch.tensor([1.0, 0.9, 1.4, 1.6, 0.5, 1.0, 0.9, 1.4, 1.6, 0.5], dtype=torch.float64)
ADVANTAGES = torch.tensor([2.0] * 5 + [-3.0] * 5, dtype=torch.float64)
BEHAVIOUR = torch.linspace(-4, -2, 10, dtype=torch.float64)


def moved() -> Tensor:
    """log π with a gradient, RATIOS away from BEHAVIOUR."""
    return (BEHAVIOUR + RATIOS.log()).requires_grad_()


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_reinforce_and_its_gradient_by_hand() -> None:
    logprobs = float64([-1.0, -2.0]).requires_grad_()
    loss = reinforce_loss(logprobs, float64([0.5, -0.25]))
    assert loss.tolist() == [0.5, -0.5]
    assert gradient(loss, logprobs).tolist() == [-0.5, 0.25]


def test_ppo_with_two_sides_and_its_gradient_by_hand() -> None:
    """For A > 0 only 1 + ε_high bounds, for A < 0 only 1 − ε_low; the gradient of r is r."""
    logprobs = moved()
    loss = ppo_loss(logprobs, BEHAVIOUR, ADVANTAGES, clip_low=0.2, clip_high=0.5)
    torch.testing.assert_close(loss, float64([-2.0, -1.8, -2.8, -3.0, -1.0, 3.0, 2.7, 4.2, 4.8, 2.4]))
    by_hand = float64([-2.0, -1.8, -2.8, 0.0, -1.0, 3.0, 2.7, 4.2, 4.8, 0.0])
    torch.testing.assert_close(gradient(loss, logprobs), by_hand)
    assert torch.autograd.gradcheck(lambda x: ppo_loss(x, BEHAVIOUR, ADVANTAGES, clip_low=0.2, clip_high=0.5), logprobs)


def test_clip_higher_moves_the_upper_side_alone() -> None:
    logprobs = moved()
    narrow = ppo_loss(logprobs, BEHAVIOUR, ADVANTAGES, clip_low=0.2, clip_high=0.3)
    wide = ppo_loss(logprobs, BEHAVIOUR, ADVANTAGES, clip_low=0.2, clip_high=0.5)
    assert (narrow != wide).nonzero().squeeze(1).tolist() == [2, 3]
    symmetric = grpo_loss(logprobs, BEHAVIOUR, ADVANTAGES, clip=0.2)
    assert torch.equal(symmetric, ppo_loss(logprobs, BEHAVIOUR, ADVANTAGES, clip_low=0.2, clip_high=0.2))


def test_dual_clip_bounds_the_loss_of_bad_tokens_alone() -> None:
    """c = 1.5 touches only A < 0 with r > 1.5."""
    logprobs = moved()
    loss = ppo_loss(logprobs, BEHAVIOUR, ADVANTAGES, clip_low=0.2, clip_high=0.5, dual_clip=1.5)
    torch.testing.assert_close(loss, float64([-2.0, -1.8, -2.8, -3.0, -1.0, 3.0, 2.7, 4.2, 4.5, 2.4]))
    by_hand = float64([-2.0, -1.8, -2.8, 0.0, -1.0, 3.0, 2.7, 4.2, 0.0, 0.0])
    torch.testing.assert_close(gradient(loss, logprobs), by_hand)
    with pytest.raises(ValueError, match=r"dual_clip=1\.0"):
        ppo_loss(logprobs, BEHAVIOUR, ADVANTAGES, clip_low=0.2, clip_high=0.5, dual_clip=1.0)


def test_ppo_learns_from_the_first_step_where_the_old_policy_is_the_live_one() -> None:
    logprobs = moved()
    loss = ppo_loss(logprobs, logprobs, ADVANTAGES, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(gradient(loss, logprobs), -ADVANTAGES)


def test_cispo_and_its_gradient_by_hand() -> None:
    logprobs = moved()
    loss = cispo_loss(logprobs, BEHAVIOUR, ADVANTAGES, clip_high=0.3)
    weights = float64([1.0, 0.9, 1.3, 1.3, 0.5] * 2)
    torch.testing.assert_close(loss, -weights * ADVANTAGES * logprobs.detach())
    torch.testing.assert_close(gradient(loss, logprobs), -weights * ADVANTAGES)


def test_cispo_with_a_lower_bound_raises_small_weights() -> None:
    logprobs = moved()
    loss = cispo_loss(logprobs, BEHAVIOUR, ADVANTAGES, clip_high=0.3, clip_low=0.2)
    torch.testing.assert_close(gradient(loss, logprobs), -float64([1.0, 0.9, 1.3, 1.3, 0.8] * 2) * ADVANTAGES)


def test_cispo_without_a_lower_bound_is_aipo() -> None:
    logprobs = moved()
    cispo = cispo_loss(logprobs, BEHAVIOUR, ADVANTAGES, clip_high=0.5)
    torch.testing.assert_close(cispo, aipo_loss(logprobs, BEHAVIOUR, ADVANTAGES, rho=1.5))


# π_prox / μ of each token: the weights of the corrected losses
WEIGHTS = float64([0.5, 3.0, 1.0, 2.0, 4.0, 0.25, 1.0, 3.0, 2.0, 4.0])


def test_decoupled_ppo_and_its_gradient_by_hand() -> None:
    """The ratio is π / π_prox, the weight π_prox / μ; the product π / μ is never clipped as one."""
    logprobs = moved()
    loss = decoupled_ppo_loss(logprobs, BEHAVIOUR, BEHAVIOUR - WEIGHTS.log(), ADVANTAGES, clip_low=0.2, clip_high=0.5)
    torch.testing.assert_close(loss, WEIGHTS * float64([-2.0, -1.8, -2.8, -3.0, -1.0, 3.0, 2.7, 4.2, 4.8, 2.4]))
    by_hand = WEIGHTS * float64([-2.0, -1.8, -2.8, 0.0, -1.0, 3.0, 2.7, 4.2, 4.8, 0.0])
    torch.testing.assert_close(gradient(loss, logprobs), by_hand)


def test_tis_caps_the_weight_and_is_decoupled_ppo_without_a_cap() -> None:
    logprobs, behaviour = moved(), BEHAVIOUR - WEIGHTS.log()
    loss = tis_loss(logprobs, BEHAVIOUR, behaviour, ADVANTAGES, clip_low=0.2, clip_high=0.5, cap=2.0)
    capped = float64([0.5, 2.0, 1.0, 2.0, 2.0, 0.25, 1.0, 2.0, 2.0, 2.0])
    by_hand = capped * float64([-2.0, -1.8, -2.8, 0.0, -1.0, 3.0, 2.7, 4.2, 4.8, 0.0])
    torch.testing.assert_close(gradient(loss, logprobs), by_hand)
    free = tis_loss(logprobs, BEHAVIOUR, behaviour, ADVANTAGES, clip_low=0.2, clip_high=0.5, cap=math.inf)
    decoupled = decoupled_ppo_loss(logprobs, BEHAVIOUR, behaviour, ADVANTAGES, clip_low=0.2, clip_high=0.5)
    assert torch.equal(free, decoupled)


def test_the_correcting_weight_is_a_constant_where_the_middle_policy_is_the_live_one() -> None:
    logprobs, behaviour = moved(), BEHAVIOUR
    for loss in (
        decoupled_ppo_loss(logprobs, logprobs, behaviour, ADVANTAGES, clip_low=0.2, clip_high=0.5),
        tis_loss(logprobs, logprobs, behaviour, ADVANTAGES, clip_low=0.2, clip_high=0.5, cap=9.0),
    ):
        torch.testing.assert_close(gradient(loss, logprobs), -RATIOS * ADVANTAGES)


# responses of 2, 1 and 3 tokens; the geometric means of their ratios are 2, 0.5 and 1
SEQUENCE = torch.tensor([0, 0, 1, 2, 2, 2])
TOKEN_RATIOS = float64([1.0, 4.0, 0.5, 2.0, 0.5, 1.0])


def responses() -> tuple[Tensor, Tensor]:
    """(log π with a gradient, log μ)."""
    behaviour = torch.linspace(-3, -1, 6, dtype=torch.float64)
    return (behaviour + TOKEN_RATIOS.log()).requires_grad_(), behaviour


@pytest.mark.parametrize(
    ("advantages", "loss_by_hand", "slopes"),
    [
        ([1.0, 1.0, 1.0], [-1.3, -0.5, -1.0], [0.0, -0.5, -1.0]),
        ([-1.0, -1.0, -1.0], [2.0, 0.8, 1.0], [2.0, 0.0, 1.0]),
    ],
)
def test_gspo_clips_whole_responses(advantages: list[float], loss_by_hand: list[float], slopes: list[float]) -> None:
    """∂s/∂ log π_t = s / |y|, so every token of a response has its response's slope, −s · A / |y|, or none."""
    logprobs, behaviour = responses()
    loss = gspo_loss(logprobs, behaviour, float64(advantages), SEQUENCE, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(loss, float64(loss_by_hand))
    by_hand = float64([slopes[0] / 2] * 2 + [slopes[1]] + [slopes[2] / 3] * 3)
    torch.testing.assert_close(gradient(loss, logprobs), by_hand)


def test_gspo_gradient_is_that_of_the_loss() -> None:
    logprobs, behaviour = responses()
    advantages = float64([-1.0, 1.0, 2.0])
    assert torch.autograd.gradcheck(
        lambda x: gspo_loss(x, behaviour, advantages, SEQUENCE, clip_low=0.2, clip_high=0.3), logprobs
    )


def test_gspo_token_averaged_over_a_response_is_gspo() -> None:
    logprobs, behaviour = responses()
    lengths = torch.tensor([2, 2, 1, 3, 3, 3])
    for advantages in (float64([1.0, 2.0, -1.0]), float64([-2.0, -1.0, 3.0])):
        whole = gspo_loss(logprobs, behaviour, advantages, SEQUENCE, clip_low=0.2, clip_high=0.3)
        tokens = gspo_token_loss(logprobs, behaviour, advantages[SEQUENCE], SEQUENCE, clip_low=0.2, clip_high=0.3)
        torch.testing.assert_close((tokens / lengths).sum(), whole.sum())
        torch.testing.assert_close(gradient(tokens / lengths, logprobs), gradient(whole, logprobs))


def test_gspo_token_lets_tokens_of_a_response_differ_and_none_leans_on_anothers_gradient() -> None:
    logprobs, behaviour = responses()
    advantages = float64([1.0, -1.0, 1.0, 3.0, -2.0, 0.5])
    loss = gspo_token_loss(logprobs, behaviour, advantages, SEQUENCE, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(loss, float64([-1.3, 2.0, -0.5, -3.0, 2.0, -0.5]))
    torch.testing.assert_close(gradient(loss, logprobs), float64([0.0, 2.0, -0.5, -3.0, 2.0, -0.5]))
