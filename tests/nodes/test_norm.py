"""The norm's own backward pass against torch's."""

import pytest
import torch
import torch.nn.functional as F

from penstock.nodes.model.kernels import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_and_its_gradients_are_those_of_the_formula(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight_D, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 5, 24), (24,), (3, 5, 24)))
    ours, exact = (
        tuple(t.detach().to(kind, copy=True).requires_grad_() for t in (x, weight_D)) for kind in (dtype, torch.float64)
    )
    found = rms_norm(ours[0], ours[1], 1e-5)
    needed = F.rms_norm(exact[0], (24,), exact[1], 1e-5)
    found.backward(grad)  # type: ignore[no-untyped-call]
    needed.backward(grad.double())  # type: ignore[no-untyped-call]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.double(), needed, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=tolerance, atol=4 * tolerance)


def test_gradients_agree_with_differences() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    weight_D = torch.rand(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x, weight_D))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_the_same_bits_with_gradients_and_without(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight_D = (torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 40, 96), (96,)))
    without = rms_norm(x, weight_D, 1e-5)
    for given in ((x.clone().requires_grad_(), weight_D), (x, weight_D.clone().requires_grad_())):
        assert torch.equal(rms_norm(*given, 1e-5), without)
