"""A linear map that is faster than torch's own on a CPU; and several maps of the same input as one product.

Trainer and generator use the same maps, so their results are equal to the bit for equal shapes.

Shapes: D hidden width; any number of dimensions before it, R rows in all.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock.nodes.model import invariant
from penstock.nodes.model.compiled import DTYPES
from penstock.nodes.model.eight_bit import QuantisedRows, product, quantised_parameters
from penstock.nodes.model.elementwise import transposed

_onednn = None
if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    _onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_PLAIN = (Tensor, nn.Parameter)


class Linear(nn.Linear):
    """`nn.Linear`, by default without bias."""

    packed: Tensor | None = None
    """A packed copy of the weight, which is used in its place: see `pack`."""
    joined: tuple[Tensor, Tensor | None, Tensor | None] | None = None
    """Joined weight, bias and row scales of this map and of its neighbours: see `pack`."""
    row_scales: nn.Parameter | None
    """Row scales of an eight-bit weight, [out]: see `quantise`."""
    invariant: bool = False
    """True if a row's bits depend on that row only: see `invariant`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.register_parameter("row_scales", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.row_scales is not None:
            return together(x, self)[0]
        if self.invariant:
            return invariant.linear(x, self.weight, self.bias)
        if self.packed is None:
            return linear(x, self.weight, self.bias)
        return multiplied(x, self.packed, self.bias)

    def quantise(self, precision: str) -> None:
        """Compute in eight bits from now on, with elements and scales that arrive later."""
        self.weight, self.row_scales = quantised_parameters(self.weight, precision)


def together(x: Tensor, *maps: Linear) -> Sequence[Tensor]:
    """The outputs of several maps of the same input; by one product if they were packed as neighbours."""
    if maps[0].joined is not None:
        weight, bias, scales = maps[0].joined
        if scales is not None:
            made = product(x, QuantisedRows.of(x.flatten(0, -2), weight.dtype), weight, scales, bias)
        else:
            made = (multiplied if x.device.type == "cpu" else F.linear)(x, weight, bias)
        return torch.split(made, [each.out_features for each in maps], -1)
    if maps[0].row_scales is not None:
        rows = QuantisedRows.of(x.flatten(0, -2), maps[0].weight.dtype)
        return [product(x, rows, each.weight, each.row_scales, each.bias) for each in maps]
    if all(type(each) is Linear and not each.invariant and _learns(x, each.weight) for each in maps):
        return _Linear.apply(x, *(each.weight for each in maps), *(each.bias for each in maps))  # type: ignore[no-any-return,no-untyped-call]
    return [each(x) for each in maps]


def pack(maps: Sequence[Linear], rows: int) -> None:
    """Make maps of the same input compute by one product from now on, without gradients; the bits may change. On a CPU
    it uses copies of the present weights in oneDNN's layout for this many `rows`, if oneDNN has one; elsewhere the
    weights themselves, if they are contiguous (`Fusing`)."""
    if maps[0].invariant:
        return  # invariant kernels read the weight as it is
    # An adapter adds to its map's output, so maps with adapters are packed one by one.
    plain = len(maps) > 1 and all(type(each) is Linear for each in maps)
    if maps[0].weight.device.type != "cpu":
        maps[0].joined = _joined(maps) if plain else None
        return
    if maps[0].row_scales is not None:
        return  # and so do eight-bit products
    if plain:
        biases = [each.bias.detach() for each in maps if each.bias is not None]
        weight = packed(torch.cat([each.weight.detach() for each in maps]), rows)
        maps[0].joined = None if weight is None else (weight, torch.cat(biases) if biases else None, None)
        return
    for each in maps:
        each.packed = packed(each.weight.detach(), rows)


def _joined(maps: Sequence[Linear]) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Joined weight, bias and scales of maps whose tensors are contiguous in memory; else None."""
    weights = [each.weight for each in maps]
    biases = [each.bias for each in maps if each.bias is not None]
    scales = [each.row_scales for each in maps if each.row_scales is not None]
    weight, bias, scale = (_one_after_the_other(parts) if parts else None for parts in (weights, biases, scales))
    if weight is None or (biases and bias is None) or (scales and scale is None):
        return None
    return weight, bias, scale


def _one_after_the_other(parts: Sequence[Tensor]) -> Tensor | None:
    """The rows of all parts as one tensor in the same memory; None if the parts are not contiguous there."""
    first, address = parts[0].detach(), parts[0].data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.dtype == first.dtype
        if not (same and part.is_contiguous() and part.data_ptr() == address):
            return None
        address += part.nbytes
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def packed(weight: Tensor, rows: int) -> Tensor | None:
    """A copy of a weight in the layout of `multiplied`, which would convert a plain weight each time; None if there is
    no such layout."""
    if _onednn is None or weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    return torch.ops.mkldnn._reorder_linear_weight(_multipliable(weight), rows)  # type: ignore[no-any-return]


def _multipliable(x: Tensor) -> Tensor:
    return x.float() if _widened(x.dtype) else x


@functools.cache
def _widened(dtype: torch.dtype) -> bool:
    """True if products are computed in float32. Without AVX-512 oneDNN has no products of bfloat16, and torch's own
    take ten times as long as converting and multiplying (Zen 3, one core: 6 against 60 GFLOP/s)."""
    return dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, with `weight` [out, in] and any number of leading dimensions of `x`."""
    if _learns(x, weight):
        return _Linear.apply(x, weight, bias)[0]  # type: ignore[no-any-return,no-untyped-call]
    return _plain(x, weight, bias)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # In float32 torch multiplies with MKL, which keeps to AVX2 on processors other than Intel's. oneDNN uses AVX-512
    # there (Zen 5, one core: 93 against 188 GFLOP/s) and is equal or better elsewhere.
    if _onednn is not None and _suits(x, weight) and (x.dtype == torch.float32 or _widened(x.dtype)):
        return multiplied(x, weight, bias)
    return F.linear(x, weight, bias)


def _suits(x: Tensor, weight: Tensor) -> bool:
    # A DTensor has multiplication rules of its own.
    return x.device.type == "cpu" and x.dtype == weight.dtype and type(weight) in _PLAIN


def _learns(x: Tensor, weight: Tensor) -> bool:
    """True for a product that needs gradients and that `_Linear` supports."""
    asked = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return asked and _onednn is not None and _suits(x, weight) and x.dtype in DTYPES


class _Linear(torch.autograd.Function):
    """The outputs of maps of the same input: first all weights, then as many biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        # Only gradients of weights need the input.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1 : count + 1]) else None, *parameters[:count])
        ctx.shape = x.shape
        return tuple(_plain(x, *each) for each in zip(parameters[:count], parameters[count:], strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x, *of_weights = ctx.needs_input_grad[: len(weights) + 1]
        of_biases = ctx.needs_input_grad[len(weights) + 1 :]
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_x = None
        for each, weight in zip(rows, weights, strict=True) if of_x else ():
            grad_x = _plain(each, weight.t(), None) if grad_x is None else _added(grad_x, each, weight.t())
        learn = [each for each, of in zip(rows, of_weights, strict=True) if of]
        found = iter(_of_weights(learn, x.reshape(-1, x.shape[-1])) if learn else ())
        made = [next(found) if of else None for of in of_weights]
        summed = [each.sum(0) if of else None for each, of in zip(rows, of_biases, strict=True)]
        return None if grad_x is None else grad_x.view(ctx.shape), *made, *summed


def _of_weights(grads: Sequence[Tensor], x_RI: Tensor) -> list[Tensor]:
    """The gradient [O, I] of each weight, from the gradient [R, O] of its map's output."""
    # oneDNN reads a transposed factor anew for each tile of a product (AMX, 1,656 rows: 0.7 against 1.25 TFLOP/s), so
    # one of the two is transposed first: the one that moves fewer numbers.
    rows, inputs = x_RI.shape
    outputs = sum(grad.shape[1] for grad in grads)
    if outputs * rows <= inputs * (rows + outputs):
        return [_plain(transposed(grad_RO), x_RI.t(), None) for grad_RO in grads]
    x_IR = transposed(x_RI)
    return [transposed(_plain(x_IR, grad_RO.t(), None)) for grad_RO in grads]


def _added(sums: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """sums + x @ weight.T, rounded once."""
    assert _onednn is not None
    given = map(_multipliable, (x, sums, weight))
    return _onednn.binary(*given, None, "add").to(x.dtype)  # type: ignore[no-any-return]


def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias by oneDNN; the weight may be packed."""
    assert _onednn is not None
    given = _multipliable(x), _multipliable(weight), None if bias is None else _multipliable(bias)
    return _onednn(*given, "none", [], "").to(x.dtype)  # type: ignore[no-any-return]
