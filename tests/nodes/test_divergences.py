"""Estimators by value and by what their mean gradient is the gradient of; the full reverse KL."""

import math

import pytest
import torch
from torch import Tensor

from penstock.nodes.learn.losses import Estimator, kl_estimate, reverse_kl

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(-1)


def sampled_gradient(estimator: Estimator) -> Tensor:
    """The mean over tokens of π of the estimator's gradient by the logits: what sampling estimates."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    loss = (logprobs.exp().detach() * kl_estimate(logprobs, REFERENCE, estimator=estimator)).sum()
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize(
    ("estimator", "value"),
    [("k1", -math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 2 - math.log(2) - 1)],
)
def test_estimators_by_hand_where_the_reference_is_twice_as_likely(estimator: Estimator, value: float) -> None:
    logprobs = torch.tensor([math.log(0.2)], dtype=torch.float64)
    reference = torch.tensor([math.log(0.4)], dtype=torch.float64)
    assert kl_estimate(logprobs, reference, estimator=estimator).item() == pytest.approx(value, abs=1e-12)


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative() -> None:
    logprobs = LOGITS.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - REFERENCE)).sum()
    torch.testing.assert_close((logprobs.exp() * kl_estimate(logprobs, REFERENCE, estimator="k1")).sum(), exact)
    k3 = kl_estimate(logprobs, REFERENCE, estimator="k3")
    torch.testing.assert_close((logprobs.exp() * k3).sum(), exact)
    assert (k3 >= 0).all()
    assert (kl_estimate(logprobs, REFERENCE, estimator="k1") < 0).any()


@pytest.mark.parametrize(
    ("estimator", "slopes"),
    [("k1", [1.0, 1.0]), ("k2", [-1.0, 1.0]), ("k3", [1 - math.e, 1 - 1 / math.e])],
)
def test_the_gradient_of_a_token_is_the_estimators_derivative(estimator: Estimator, slopes: list[float]) -> None:
    """log q is 1 and −1."""
    logprobs = torch.tensor([-2.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.5], dtype=torch.float64)
    (grad,) = torch.autograd.grad(kl_estimate(logprobs, reference, estimator=estimator).sum(), logprobs)
    torch.testing.assert_close(grad, torch.tensor(slopes, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, estimator=estimator), (logprobs,))


def test_as_a_loss_k1_does_nothing_k2_follows_reverse_kl_and_k3_forward_kl() -> None:
    logprobs, probs = LOGITS.log_softmax(-1), LOGITS.softmax(-1)
    reverse = probs * (logprobs - REFERENCE - (probs * (logprobs - REFERENCE)).sum())
    forward = probs - REFERENCE.exp()
    torch.testing.assert_close(sampled_gradient("k1"), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(sampled_gradient("k2"), reverse)
    torch.testing.assert_close(sampled_gradient("k3"), forward)
    assert (reverse - forward).abs().max() > 0.1


def test_reverse_kl_by_hand_for_each_token() -> None:
    student = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64).log()
    teacher = torch.tensor([[0.25, 0.75], [0.9, 0.1]], dtype=torch.float64).log()
    by_hand = [0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75), 0.0]
    torch.testing.assert_close(reverse_kl(student, teacher), torch.tensor(by_hand, dtype=torch.float64))
    forward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert abs(forward - by_hand[0]) > 1e-2, "the other direction is another number"


def test_the_gradient_of_reverse_kl_goes_through_the_whole_vocabulary() -> None:
    logits = LOGITS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(reverse_kl(logits.log_softmax(-1), REFERENCE), logits)
    probs, gap = LOGITS.softmax(-1), LOGITS.log_softmax(-1) - REFERENCE
    torch.testing.assert_close(grad, probs * (gap - (probs * gap).sum()))
    assert torch.autograd.gradcheck(lambda x: reverse_kl(x.log_softmax(-1), REFERENCE), (logits,))
