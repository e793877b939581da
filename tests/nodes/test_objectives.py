"""Tokens that are said to be clipped are those that the clip silences or bounds."""

from functools import partial

import pytest
import torch

from penstock.nodes.learn.losses import Loss, Sampled, aipo, cispo, decoupled_ppo, gspo, importance_weighted, ppo, tis

LOG_RATIOS = torch.tensor([0.0, 0.5, -0.5, 0.05, 0.0, 0.9, 0.9, -0.9])
SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
ADVANTAGES = torch.tensor([1.0, 1, 1, -1, -1, 1, 1, -1])


def sampled(logprobs: torch.Tensor, advantages: torch.Tensor = ADVANTAGES) -> Sampled:
    behaviour = (logprobs - LOG_RATIOS).detach()
    given = {"behaviour": behaviour, "proximal": behaviour}
    return Sampled(advantages, torch.bincount(SEQUENCE)[SEQUENCE], torch.zeros(8), SEQUENCE, given)


@pytest.mark.parametrize(
    "loss", [ppo, gspo, decoupled_ppo, partial(ppo, dual_clip=2.0), partial(tis, cap=float("inf"))]
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_token_that_ppos_clip_takes_has_no_gradient(loss: Loss, sign: float) -> None:
    logprobs = torch.linspace(-3, -1, 8).requires_grad_()
    loss_P, clipped_P = loss(logprobs, sampled(logprobs, sign * ADVANTAGES))
    (grad,) = torch.autograd.grad(loss_P.sum(), logprobs)
    assert clipped_P.tolist() == (grad == 0).tolist()
    assert clipped_P.any()
    assert not clipped_P.all()


@pytest.mark.parametrize("loss", [aipo, cispo])
def test_a_bounded_weight_keeps_its_gradient(loss: Loss) -> None:
    logprobs = torch.linspace(-3, -1, 8).requires_grad_()
    loss_P, _ = loss(logprobs, sampled(logprobs))
    (grad,) = torch.autograd.grad(loss_P.sum(), logprobs)
    assert (grad != 0).all()


def test_what_a_bound_takes_is_counted() -> None:
    logprobs = torch.linspace(-3, -1, 8)
    known = sampled(logprobs)
    ratio = LOG_RATIOS.exp()
    assert torch.equal(aipo(logprobs, known, rho=2.0)[1], ratio > 2)
    assert torch.equal(cispo(logprobs, known, clip_low=0.5, clip_high=1.0)[1], (ratio < 0.5) | (ratio > 2))
    by_token = importance_weighted(logprobs, known, level="token", bound="mask", cap=2.0, floor=0.5)
    assert torch.equal(by_token[1], (ratio < 0.5) | (ratio > 2))
    assert torch.equal(by_token[0] == 0, by_token[1])
    by_sequence = importance_weighted(logprobs, known, level="sequence", cap=2.0)
    assert by_sequence[1].tolist() == [False] * 5 + [True, True, False]


def test_a_weight_above_the_cap_is_counted_beside_ppos_clip() -> None:
    logprobs = torch.linspace(-3, -1, 8)
    known = sampled(logprobs)
    apart = Sampled(**{**vars(known), "given": {**known.given, "proximal": logprobs}})
    assert torch.equal(tis(logprobs, apart, cap=2.0)[1], LOG_RATIOS.exp() > 2)
