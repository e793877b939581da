"""A linear map, and the root-mean-square norm, both faster than torch's own on a CPU.

Trainer and generator use the same ones, so their results agree to the bit where shapes do.

Shapes: D hidden width; any number of dimensions before it, R rows in all.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_onednn = None
if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    _onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_PLAIN = (Tensor, nn.Parameter)


class Linear(nn.Linear):
    """`nn.Linear`, without bias unless it is asked for."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, with `weight` [out, in] and any number of leading dimensions of `x`."""
    # In float32 torch multiplies with MKL, which keeps to AVX2 on processors other than Intel's. oneDNN uses AVX-512
    # there (Zen 5, one core: 93 against 188 GFLOP/s) and is equal or better elsewhere.
    if _onednn is None or x.dtype != torch.float32 or x.device.type != "cpu" or x.dtype != weight.dtype:
        return F.linear(x, weight, bias)
    # A DTensor's own rules say how it is multiplied.
    if type(weight) not in _PLAIN:
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]
    return _matmul(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _matmul(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_x = _matmul(grad, weight.t()) if of_x else None
        grad_weight = _matmul(rows.t(), x.reshape(-1, x.shape[-1]).t()) if of_weight else None
        return grad_x, grad_weight, rows.sum(0) if of_bias else None


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert _onednn is not None
    return _onednn(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467, equation 4), in
    float32 at least and rounded once. The bits are the same with gradients and without."""
    # torch computes this gradient on a CPU operation by operation, each a pass over memory: for 800 tokens of width 256
    # in float32, both ways take 1030 µs, and 405 µs here.
    if x.device.type == "cpu" and torch.is_grad_enabled() and (x.requires_grad or weight_D.requires_grad):
        return _RmsNorm.apply(x, weight_D, eps)  # type: ignore[no-any-return,no-untyped-call]
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


class _RmsNorm(torch.autograd.Function):
    """With n = x / rms: ∂/∂weight = Σ g · n, and ∂/∂x = (g · weight − n · mean(g · weight · n)) / rms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_().to(x.dtype)
        ctx.save_for_backward(x, inverse, weight_D)
        # torch's own, so that what an update computes is what a generator has computed and `mismatch` has measured.
        return F.rms_norm(x, weight_D.shape, weight_D, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, inverse, weight_D = ctx.saved_tensors
        normed = x * inverse
        product_RD = (grad * normed).flatten(0, -2)
        mean = (product_RD @ weight_D).div_(-normed.shape[-1]).view(inverse.shape)
        grad_x = (grad * weight_D).addcmul_(normed, mean).mul_(inverse)
        return grad_x, product_RD.sum(0) if ctx.needs_input_grad[1] else None, None
