"""DPO and Bradley-Terry by hand; the best and the worst of a group, ties included."""

import math

import pytest
import torch

from penstock.nodes.reward_model import best_and_worst, bradley_terry_accuracy, bradley_terry_loss, dpo_loss

CHOSEN = torch.tensor([-10.0, -12.0], dtype=torch.float64)
REJECTED = torch.tensor([-11.0, -9.0], dtype=torch.float64)
REFERENCE_CHOSEN = torch.tensor([-12.0, -12.0], dtype=torch.float64)
REFERENCE_REJECTED = torch.tensor([-10.0, -12.0], dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_dpo_and_its_gradient_by_hand() -> None:
    """Margins (2 + 1) and (0 − 3), β = ½; the gradient is ∓ β · σ(−β · margin)."""
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    loss = dpo_loss(chosen, rejected, REFERENCE_CHOSEN, REFERENCE_REJECTED, beta=0.5)
    by_hand = [-math.log(sigmoid(1.5)), -math.log(sigmoid(-1.5))]
    torch.testing.assert_close(loss, torch.tensor(by_hand, dtype=torch.float64))
    slope = torch.tensor([0.5 * sigmoid(-1.5), 0.5 * sigmoid(1.5)], dtype=torch.float64)
    grads = torch.autograd.grad(loss.sum(), (chosen, rejected))
    torch.testing.assert_close(grads, (-slope, slope))


def test_dpo_gradient_is_that_of_the_loss() -> None:
    inputs = [x.clone().requires_grad_() for x in (CHOSEN, REJECTED)]
    assert torch.autograd.gradcheck(
        lambda chosen, rejected: dpo_loss(chosen, rejected, REFERENCE_CHOSEN, REFERENCE_REJECTED, beta=0.1), inputs
    )


def test_dpo_at_the_reference_is_log_two() -> None:
    loss = dpo_loss(CHOSEN, REJECTED, CHOSEN, REJECTED, beta=0.1)
    torch.testing.assert_close(loss, torch.full((2,), math.log(2), dtype=torch.float64))


def test_a_hopeless_pair_has_a_finite_loss() -> None:
    far = torch.tensor([2000.0])
    assert dpo_loss(-far, far, torch.zeros(1), torch.zeros(1), beta=1.0).tolist() == [4000.0]


def test_best_and_worst_of_each_group() -> None:
    rewards = torch.tensor([3.0, 0.5, 1.0, 0.1, 2.0, 0.9])
    groups = torch.tensor([0, 1, 0, 1, 0, 1])
    best, worst, weight = best_and_worst(rewards, groups)
    assert (best.tolist(), worst.tolist(), weight.tolist()) == ([0, 5], [2, 3], [1.0, 1.0])


@pytest.mark.parametrize("shift", [0.0, -2.0, -10.0])
def test_the_worst_is_the_lowest_whatever_the_sign(shift: float) -> None:
    rewards = torch.tensor([3.0, -0.5, 1.0, -0.1, 2.0, -4.0]) + shift
    best, worst, _ = best_and_worst(rewards, torch.tensor([0, 1, 0, 1, 0, 1]))
    assert (best.tolist(), worst.tolist()) == ([0, 3], [2, 5])


def test_among_equals_the_first_row_is_taken_and_a_tie_of_all_weighs_nothing() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.7, 0.7, 0.7, 5.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
    best, worst, weight = best_and_worst(rewards, groups)
    assert best.tolist() == [0, 4, 7]
    assert worst.tolist() == [1, 4, 7]
    assert weight.tolist() == [1.0, 0.0, 0.0]


def test_a_tied_pair_gives_no_gradient() -> None:
    logprobs = torch.tensor([-3.0, -4.0, -5.0, -6.0], requires_grad=True)
    best, worst, weight = best_and_worst(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    reference = logprobs.detach()
    loss = weight * dpo_loss(logprobs[best], logprobs[worst], reference[best], reference[worst], beta=1.0)
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [0.0, 0.0, 0.5, -0.5]


def test_bradley_terry_and_its_gradient_by_hand() -> None:
    chosen = torch.tensor([2.0, -1.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.5, 1.0], dtype=torch.float64, requires_grad=True)
    loss = bradley_terry_loss(chosen, rejected)
    by_hand = [math.log(1 + math.exp(-1.5)), math.log(1 + math.exp(2.0))]
    torch.testing.assert_close(loss, torch.tensor(by_hand, dtype=torch.float64))
    slope = torch.tensor([sigmoid(-1.5), sigmoid(2.0)], dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), (chosen, rejected)), (-slope, slope))
    assert torch.autograd.gradcheck(bradley_terry_loss, (chosen, rejected))


@pytest.mark.parametrize(("chosen", "accuracy"), [(2.0, 1.0), (0.5, 0.5), (-3.0, 0.0)])
def test_a_model_that_cannot_tell_is_right_half_the_time(chosen: float, accuracy: float) -> None:
    assert bradley_terry_accuracy(torch.tensor([chosen]), torch.tensor([0.5])).tolist() == [accuracy]
