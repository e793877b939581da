"""Products of eight bits: weights with a scale per row, as `broadcast(…, precision=…)` sends them, and inputs with a
scale per token, which are converted here.

- int8: sums of integers, exact on every device, then multiplied by both scales in float32. So a row of a product has
  the same bits for any number of rows and threads.
- fp8 (e4m3): by the tensor cores of a GPU, which round the product to bfloat16.

A weight is stored in eight bits only. A scale is the largest magnitude of its row over the format's limit.

Shapes: D width of an input, O width of an output; any number of dimensions before D, R rows in all.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.nodes.model.config import ModelError

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# The largest elements.
_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_TINY = torch.finfo(torch.float32).tiny
# Both widths of an fp8 product on a GPU are multiples of `FP8_TILE`; the first compute capability that has them.
FP8_TILE, FP8_SINCE = 16, (8, 9)


@dataclass(frozen=True)
class QuantisedRows:
    """Rows of eight bits: `elements` [R, D], times `scales` [R, 1] in float32."""

    elements: Tensor
    scales: Tensor

    @staticmethod
    def of(rows: Tensor, dtype: torch.dtype) -> "QuantisedRows":
        """Rows [R, D] of floats, rounded to the nearest, ties to even."""
        limit = _LIMITS[dtype]
        if rows.device.type == "cuda" and dtype != torch.int8:
            from penstock.nodes.model import elementwise_triton  # Triton is installed where a GPU is

            return QuantisedRows(*elementwise_triton.quantised(rows, dtype, limit, _TINY))
        scales = rows.abs().amax(-1, keepdim=True).float().div_(limit).clamp_(min=_TINY)
        quotient = rows / scales
        # Conversion to a float format rounds; conversion to integers truncates.
        quotient = quotient.round_() if dtype == torch.int8 else quotient.clamp_(-limit, limit)
        return QuantisedRows(quotient.to(dtype), scales)


def product(x: Tensor, rows: QuantisedRows, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias in the dtype of `x`. `rows` has those of `x` in eight bits; `weight` is [O, D] in eight
    bits, its `scales` are [O]."""
    assert scales is not None
    if weight.dtype == torch.int8:
        sums = torch._int_mm(rows.elements, weight.t())
        made = sums.float().mul_(scales).mul_(rows.scales)
    else:
        made = torch._scaled_mm(
            rows.elements, weight.t(), scale_a=rows.scales, scale_b=scales[None], out_dtype=torch.bfloat16
        )
    if bias is not None:
        made = made.float() + bias
    return made.to(x.dtype).view(*x.shape[:-1], -1)


def require_products(precision: str, device: str) -> None:
    """Raises ModelError for a device without products of eight bits, or with wrong ones."""
    given, kind = f"generate: given {precision} on {device}", torch.device(device).type
    if precision == "int8" and kind != "cpu":
        raise ModelError(f"{given}, needed a CPU, or fp8")
    if precision == "int8" and not _exact():
        raise ModelError(f"{given}, whose sums of products of integers overflow, needed one with VNNI, or no precision")
    if precision == "fp8" and (kind != "cuda" or torch.cuda.get_device_capability(device) < FP8_SINCE):
        raise ModelError(f"{given}, needed a GPU of {FP8_SINCE[0]}.{FP8_SINCE[1]} or later")


@functools.cache
def _exact() -> bool:
    """True if this CPU adds products of the largest integers without an overflow."""
    # Without VNNI, pairs of products are added in 16 bits.
    largest = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t()) == 127 * 127 * 64).all())


def quantised_parameters(weight: Tensor, precision: str) -> tuple[nn.Parameter, nn.Parameter]:
    """Parameters for the elements and scales of a weight in eight bits; their values arrive later."""
    elements = torch.empty(weight.shape, dtype=DTYPES[precision], device=weight.device)
    scales = torch.empty(weight.shape[0], device=weight.device)
    return nn.Parameter(elements, requires_grad=False), nn.Parameter(scales, requires_grad=False)
