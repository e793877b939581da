import torch
from dapo_loss import clip_higher

from penstock.nodes.learn.losses import Sampled


def test_the_gradient_is_the_formula_on_both_sides_of_both_bounds() -> None:
    ratio_P = torch.tensor([1.0, 1.27, 1.29, 0.7, 0.81, 0.79, 1.5])
    advantages_P = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    logprobs_P = torch.log(ratio_P).requires_grad_()
    one_response = torch.zeros(7, dtype=torch.long)
    sampled = Sampled(advantages_P, torch.full((7,), 7), one_response, one_response, {"behaviour": torch.zeros(7)})
    loss_P, clipped_P = clip_higher(logprobs_P, sampled)
    loss_P.sum().backward()
    assert clipped_P.tolist() == [False, False, True, False, False, True, False]
    wanted_P = torch.where(clipped_P, 0.0, -ratio_P * advantages_P)
    torch.testing.assert_close(logprobs_P.grad, wanted_P)
