"""The operations between the products of a layer (`elementwise`, `eight_bit`) on a GPU, by Triton: each in one pass
over its tensors, in float32 and rounded once. On a CPU the kernels run in Triton's interpreter (`TRITON_INTERPRET=1`).

Shapes: R rows, D width of a row, B sequences, S tokens, H query heads, G key-value heads, K width of a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """The norm without a gradient: torch's own kernel takes twice as long for the few rows of a decode step."""
    out, width = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    (x_RD,) = _even_rows(x)
    if len(x_RD):
        wide = triton.next_power_of_2(width)
        _rms_norm[(len(x_RD),)](x_RD, weight_D, out, x_RD.stride(0), eps, offset, D=width, DP=wide)
    return out


def quantised(rows_RD: Tensor, dtype: torch.dtype, limit: float, tiny: float) -> tuple[Tensor, Tensor]:
    """Elements [R, D] of eight bits and scales [R, 1], as in `eight_bit.QuantisedRows.of`."""
    (rows, width), rows_RD = rows_RD.shape, rows_RD.contiguous()
    elements_RD = torch.empty(rows, width, dtype=dtype, device=rows_RD.device)
    scales_R1 = torch.empty(rows, 1, device=rows_RD.device)
    if rows:
        _quantise[(rows,)](rows_RD, elements_RD, scales_R1, limit, tiny, D=width, DP=triton.next_power_of_2(width))
    return elements_RD, scales_R1


def gated(given: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    out = torch.empty(given.shape, dtype=given.dtype, device=given.device)
    given, up = _even_rows(given, up)
    width = given.shape[-1]
    rows = given.numel() // max(1, width)
    if rows:
        grid = rows, triton.cdiv(width, BLOCK)
        gelu = activation != "silu"
        _gated[grid](given, up, out, given.stride(-2), up.stride(-2), width, GELU=gelu, BLOCK=BLOCK)
    return out


def gated_backward(grad: Tensor, given: Tensor, up: Tensor, activation: str = "silu") -> tuple[Tensor, Tensor]:
    grad, given, up = (x.contiguous() for x in (grad, given, up))
    of_given, of_up = torch.empty_like(given), torch.empty_like(up)
    if grad.numel():
        _gated_backward[(triton.cdiv(grad.numel(), BLOCK),)](
            grad, given, up, of_given, of_up, grad.numel(), GELU=activation != "silu", BLOCK=BLOCK
        )
    return of_given, of_up


def rotate(
    q_BSHK: Tensor, k_BSGK: Tensor, cos_BS1K: Tensor, sin_BS1K: Tensor, back: bool = False
) -> tuple[Tensor, Tensor]:
    batch, length, heads, width = q_BSHK.shape
    groups = k_BSGK.shape[2]
    # Tables without B, or with B = 1, are for all sequences.
    several = cos_BS1K.ndim == 4 and cos_BS1K.shape[0] > 1
    shape = (batch if several else 1, length, 1, width)
    cos_BS1K, sin_BS1K = cos_BS1K.expand(shape).contiguous(), sin_BS1K.expand(shape).contiguous()
    (q_BSHK, q_token), (k_BSGK, k_token) = (_even_tokens(x) for x in (q_BSHK, k_BSGK))
    queries, keys = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_BSHK, k_BSGK))
    if batch * length:
        _rotate[(batch * length,)](
            q_BSHK, k_BSGK, cos_BS1K, sin_BS1K, queries, keys, q_token, k_token, shape[0] * length,
            BACK=back, H=heads, G=groups, F=width // 2, HP=triton.next_power_of_2(heads),
            GP=triton.next_power_of_2(groups), FP=triton.next_power_of_2(width // 2),
        )  # fmt: skip
    return queries, keys


def _even_rows(*given: Tensor) -> list[Tensor]:
    """[R, D] views whose rows have a common stride, or copies."""
    return [x.reshape(-1, x.shape[-1]) if x.stride(-1) == 1 else x.contiguous().view(-1, x.shape[-1]) for x in given]


def _even_tokens(x_BSHK: Tensor) -> tuple[Tensor, int]:
    """(a tensor, the stride of its tokens): `x_BSHK` if a token's heads are contiguous and tokens have a common stride,
    else a copy."""
    (batch, length, heads, width), (of_batch, of_token, of_head, of_element) = x_BSHK.shape, x_BSHK.stride()
    side_by_side = of_element == 1 and (heads == 1 or of_head == width)
    if side_by_side and (length == 1 or batch == 1 or of_batch == length * of_token):
        return x_BSHK, of_token if length > 1 else of_batch
    return x_BSHK.contiguous(), heads * width


@triton.jit
def _rms_norm(x, weight, out, x_row, eps, offset, D: tl.constexpr, DP: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    own = tl.load(x + row * x_row + at, at < D, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(own * own) / D + eps)
    made = own * scale * (tl.load(weight + at, at < D, 0.0).to(tl.float32) + offset)
    tl.store(out + row * D + at, made.to(out.dtype.element_ty), at < D)


@triton.jit
def _quantise(rows, elements, scales, limit, tiny, D: tl.constexpr, DP: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    own = tl.load(rows + row * D + at, at < D, 0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(own)), limit), tiny)
    # NaN stays NaN, so that it is found in the logits.
    quotient = tl.clamp(tl.div_rn(own, scale), -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    tl.store(elements + row * D + at, quotient.to(elements.dtype.element_ty), at < D)
    tl.store(scales + row, scale)


@triton.jit
def _argument(x, GELU: tl.constexpr):  # as in activations.h, with the same constants
    return x * (x * x * 0.07135481627260025 + 1.5957691216057308) if GELU else x


@triton.jit
def _gated(given, up, out, given_row, up_row, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(given + row * given_row + at, inside, 0.0).to(tl.float32)
    y = tl.load(up + row * up_row + at, inside, 0.0).to(tl.float32)
    made = x / (1.0 + tl.exp(-_argument(x, GELU))) * y
    tl.store(out + row * width + at, made.to(out.dtype.element_ty), inside)


@triton.jit
def _gated_backward(grad, given, up, of_given, of_up, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(grad + at, inside, 0.0).to(tl.float32)
    x = tl.load(given + at, inside, 0.0).to(tl.float32)
    y = tl.load(up + at, inside, 0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-_argument(x, GELU)))
    steepness = x * (x * x * (3 * 0.07135481627260025) + 1.5957691216057308) if GELU else x
    by_given = g * y * sigmoid * (1.0 + steepness * (1.0 - sigmoid))
    tl.store(of_given + at, by_given.to(of_given.dtype.element_ty), inside)
    tl.store(of_up + at, (g * x * sigmoid).to(of_up.dtype.element_ty), inside)


# One kernel for any number of tokens: loading another one waits for the GPU's present work, also that of other ranks.
@triton.jit(do_not_specialize=["tables"])
def _rotate(
    q, k, cos, sin, queries, keys, q_token, k_token, tables,
    BACK: tl.constexpr, H: tl.constexpr, G: tl.constexpr, F: tl.constexpr, HP: tl.constexpr, GP: tl.constexpr,
    FP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, FP)[None, :]
    table = (token % tables) * 2 * F + half
    cos_1 = tl.load(cos + table, half < F, 0.0).to(tl.float32)
    cos_2 = tl.load(cos + table + F, half < F, 0.0).to(tl.float32)
    sin_1 = tl.load(sin + table, half < F, 0.0).to(tl.float32)
    sin_2 = tl.load(sin + table + F, half < F, 0.0).to(tl.float32)
    if BACK:  # turn by the opposite angle: swap the halves of `sin`
        sin_1, sin_2 = sin_2, sin_1
    head = tl.arange(0, HP)[:, None]
    _turn(q + token * q_token, queries + token * H * 2 * F, head, half, cos_1, cos_2, sin_1, sin_2, H, F)
    head = tl.arange(0, GP)[:, None]
    _turn(k + token * k_token, keys + token * G * 2 * F, head, half, cos_1, cos_2, sin_1, sin_2, G, F)


@triton.jit
def _turn(given, made, head, half, cos_1, cos_2, sin_1, sin_2, HEADS: tl.constexpr, F: tl.constexpr):
    inside, at = (head < HEADS) & (half < F), head * 2 * F + half
    first = tl.load(given + at, inside, 0.0).to(tl.float32)
    second = tl.load(given + at + F, inside, 0.0).to(tl.float32)
    tl.store(made + at, (first * cos_1 + second * sin_1).to(made.dtype.element_ty), inside)
    tl.store(made + at + F, (second * cos_2 + first * sin_2).to(made.dtype.element_ty), inside)
