"""The sampled tokens' loss has, in the mean, the gradient of the divergence over the whole vocabulary."""

import torch
from torch import Tensor

from penstock.nodes.distill import distillation_advantages, distillation_loss
from penstock.nodes.learn.losses import reverse_kl

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
TEACHER = torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(-1)


def mean_gradient(tokens: Tensor, logprobs: Tensor, logits: Tensor) -> Tensor:
    """Of the tokens' losses over all tokens, each as often as π samples it."""
    return torch.autograd.grad((logprobs.exp().detach() * tokens).sum(), logits, retain_graph=True)[0]


def exact_gradient() -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(reverse_kl(logits.log_softmax(-1), TEACHER), logits)[0]


def test_the_reward_is_how_much_likelier_the_teacher_finds_the_token() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = distillation_advantages(logprobs, torch.tensor([-3.0, -0.5]))
    assert advantages.tolist() == [-2.0, 1.5]
    assert not advantages.requires_grad


def test_a_tokens_loss_and_gradient_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    loss = distillation_loss(logprobs, torch.tensor([-3.0, -0.5], dtype=torch.float64))
    assert loss.tolist() == [-2.0, 3.0]
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [2.0, -1.5]


def test_the_mean_gradient_is_that_of_reverse_kl() -> None:
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    torch.testing.assert_close(mean_gradient(distillation_loss(logprobs, TEACHER), logprobs, logits), exact_gradient())


def test_neither_the_plain_log_ratio_nor_a_live_weight_has_that_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    for wrong in (logprobs - TEACHER, (logprobs - TEACHER) * logprobs):
        gap = mean_gradient(wrong, logprobs, logits) - exact_gradient()
        assert gap.abs().max() > 0.05
