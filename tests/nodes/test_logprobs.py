"""Chunks change nothing but memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.nodes.learn.logprobs import token_logprobs


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(13, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 8, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(11, (13,))


def test_log_probabilities_are_those_of_the_softmax() -> None:
    hidden, weight, targets = inputs(torch.float32)
    logprobs, entropy = token_logprobs(hidden, weight, targets)
    expected = torch.log_softmax(hidden @ weight.T, -1)
    torch.testing.assert_close(logprobs, expected[range(13), targets])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1).detach())


@pytest.mark.parametrize("chunk_elements", [1, 11, 50, 142])
def test_chunks_give_the_same_values_and_gradients(chunk_elements: int) -> None:
    found = []
    for size in (1 << 20, chunk_elements):
        hidden, weight, targets = inputs(torch.float32)
        logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_elements=size)
        grads = torch.autograd.grad((logprobs * torch.linspace(-1, 2, 13)).sum(), (hidden, weight))
        found.append((logprobs.detach(), entropy, *grads))
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)


def test_the_chunked_form_keeps_no_logits_for_the_backward_pass() -> None:
    hidden, weight, targets = inputs(torch.float32)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(hidden, weight, targets, chunk_elements=22)
    assert max(kept) < 13 * 11


def test_entropy_has_no_gradient() -> None:
    hidden, weight, targets = inputs(torch.float32)
    for size in (1 << 20, 22):
        assert not token_logprobs(hidden, weight, targets, chunk_elements=size)[1].requires_grad


def test_bfloat16_gradients_come_back_in_bfloat16() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    logprobs, _ = token_logprobs(hidden, weight, targets, chunk_elements=22)
    assert logprobs.dtype == torch.float32
    for grad in torch.autograd.grad(logprobs.sum(), (hidden, weight)):
        assert grad.dtype == torch.bfloat16


@pytest.mark.parametrize("chunk_elements", [1 << 20, 11, 50])
def test_each_token_has_its_own_temperature(chunk_elements: int) -> None:
    hidden, weight, targets = inputs()
    temperature = torch.linspace(0.3, 3, 13)
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, chunk_elements=chunk_elements)
    exact: Any = torch.distributions.Categorical(logits=hidden @ weight.T / temperature[:, None].double())
    torch.testing.assert_close(logprobs, exact.log_prob(targets).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy, exact.entropy().detach().float(), rtol=1e-5, atol=1e-6)
    scale = torch.linspace(-1, 2, 13)
    grads = torch.autograd.grad((logprobs * scale).sum(), (hidden, weight))
    needed = torch.autograd.grad((exact.log_prob(targets) * scale).sum(), (hidden, weight))
    for found, gradient in zip(grads, needed, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)
