"""The operations between the matrix products of a layer: root-mean-square norm, gated activation and rotary positions,
each in one pass over its tensors, forward and backward.

They are operations `torch.ops.penstock.*`. Trainer and generator share them, with gradients and without, so that
results are equal to the bit for any number of rows in a pass. On a CPU, in float32 and bfloat16, they are
`elementwise.c`, for any number of threads. On a GPU they are `elementwise_triton`, except a norm with a gradient. On
other devices, in other dtypes and without a C compiler they are torch's own operations.

Shapes: R rows, D width of a row, B sequences, S tokens, H query heads, G key-value heads, K width of a head.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock.nodes.model.compiled import DTYPES, compiled_or_warned

_SOURCE = Path(__file__).with_name("elementwise.c")
_PLAIN = (Tensor, nn.Parameter)
# Activations by their names in `config.json`, in the order of activations.h.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (weight + offset) over the last dimension (Zhang and Sennrich, arXiv 1910.07467,
    equation 4), in float32 at least and rounded once."""
    learns = _learns(x, weight_D)
    if not (suits(x, weight_D, learns=learns) or (not learns and _on_gpu(x, weight_D))):
        return _plain_rms_norm(x, weight_D, eps, offset)
    if learns:
        return _RmsNorm.apply(x, weight_D, eps, offset)  # type: ignore[no-any-return,no-untyped-call]
    return torch.ops.penstock.rms_norm(x, weight_D, eps, offset)  # type: ignore[no-any-return]


def gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) · up (Shazeer, arXiv 2002.05202), rounded once."""
    learns = _learns(gate, up)
    if not (suits(gate, up, learns=learns) or _on_gpu(gate, up)):
        return _plain_gated(gate, up, activation)
    if learns:
        return _Gated.apply(gate, up, activation)  # type: ignore[no-any-return,no-untyped-call]
    return torch.ops.penstock.gated(gate, up, activation)  # type: ignore[no-any-return]


def rotate(q_BSHK: Tensor, k_BSGK: Tensor, cos_BS1K: Tensor, sin_BS1K: Tensor) -> tuple[Tensor, Tensor]:
    """Each pair (x[i], x[i + K/2]) of queries and keys turned by its position's angle (Su et al., arXiv 2104.09864,
    equation 34). The first half of `sin` is negative, B may be left out of both tables."""
    learns = _learns(q_BSHK, k_BSGK)
    given = q_BSHK, k_BSGK, cos_BS1K, sin_BS1K
    if not (suits(*given, learns=learns) or _on_gpu(*given)):
        return _plain_rotate(q_BSHK, k_BSGK, cos_BS1K, sin_BS1K)
    if learns:
        return _Rotate.apply(q_BSHK, k_BSGK, cos_BS1K, sin_BS1K)  # type: ignore[no-any-return,no-untyped-call]
    return torch.ops.penstock.rotate(q_BSHK, k_BSGK, cos_BS1K, sin_BS1K, False)  # type: ignore[no-any-return]


def transposed(x_RD: Tensor) -> Tensor:
    """The transpose of a matrix on a CPU, [D, R]: a copy if there are `functions` for its dtype, else a view."""
    compiled = functions(x_RD.dtype)
    if compiled is None:
        return x_RD.t()
    x_RD, row = _rows(x_RD, 1)
    out_DR = torch.empty(x_RD.shape[::-1], dtype=x_RD.dtype)
    compiled.transposed(x_RD.data_ptr(), out_DR.data_ptr(), *x_RD.shape, row, torch.get_num_threads())
    return out_DR


@functools.cache
def functions(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The functions of elementwise.c; None for a dtype that they do not support, or with a warning if they do not
    compile."""
    found = compiled_or_warned(_SOURCE, dtype)
    if found is None:
        return None
    pointer, number, real, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    found.rms_norm.argtypes = [*[pointer] * 3, *[number] * 3, *[real] * 2, integer]
    found.rms_norm_backward.argtypes = [*[pointer] * 5, *[number] * 2, *[real] * 2, integer]
    found.gated.argtypes = [*[pointer] * 3, *[number] * 4, *[integer] * 2]
    found.gated_backward.argtypes = [*[pointer] * 5, *[number] * 2, *[integer] * 2]
    found.rotate.argtypes = [*[pointer] * 4, *[number] * 6, integer]
    found.transposed.argtypes = [*[pointer] * 2, *[number] * 3, integer]
    for name in ("rms_norm", "gated", "gated_backward", "rotate", "transposed"):
        getattr(found, name).restype = None
    return found


def suits(*tensors: Tensor, learns: bool) -> bool:
    """True if the operations support these tensors: plain ones on a CPU, all float32 or all bfloat16. If one `learns`,
    there must also be a compiler: without one an operation has no gradient."""
    # A DTensor has rules of its own.
    dtype = tensors[0].dtype
    plain = all(x.device.type == "cpu" and x.dtype == dtype and type(x) in _PLAIN for x in tensors)
    return plain and dtype in DTYPES and not (learns and functions(dtype) is None)


def _on_gpu(*tensors: Tensor) -> bool:
    """True if Triton kernels support these tensors. Meta tensors count as on a GPU, so that operations counted on them
    are those of a GPU."""
    first = tensors[0]
    same = all(x.device == first.device and x.dtype == first.dtype and type(x) in _PLAIN for x in tensors)
    return same and first.device.type in ("cuda", "meta") and first.is_floating_point()


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _plain_rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> Tensor:
    if not offset:
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    # In bfloat16 the sum would round the weight.
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight_D.shape, weight_D.to(wide) + offset, eps).to(x.dtype)


def _plain_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation](gate) * up


def _plain_rotate(
    q_BSHK: Tensor, k_BSGK: Tensor, cos_BS1K: Tensor, sin_BS1K: Tensor, back: bool = False
) -> tuple[Tensor, Tensor]:
    if back:  # turn by the opposite angle: swap the halves of `sin`
        sin_BS1K = sin_BS1K.roll(sin_BS1K.shape[-1] // 2, -1)

    def turned(x_BSHK: Tensor) -> Tensor:
        first, second = x_BSHK.chunk(2, dim=-1)
        return torch.addcmul(x_BSHK * cos_BS1K, torch.cat((second, first), dim=-1), sin_BS1K)

    if torch.is_grad_enabled():
        return turned(q_BSHK), turned(k_BSGK)
    # The same bits by fewer operations: for a step of a few tokens operations cost more than a pass over its numbers.
    queries, keys = torch.split(turned(torch.cat((q_BSHK, k_BSGK), 2)), [q_BSHK.shape[2], k_BSGK.shape[2]], 2)
    return queries, keys


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, offset: float) -> Tensor:
        ctx.save_for_backward(x, weight_D)
        ctx.how = eps, offset
        return torch.ops.penstock.rms_norm(x, weight_D, eps, offset)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight_D = ctx.saved_tensors
        return *torch.ops.penstock.rms_norm_backward(grad, x, weight_D, *ctx.how), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return torch.ops.penstock.gated(gate, up, activation)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *torch.ops.penstock.gated_backward(grad, *ctx.saved_tensors, ctx.activation), None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BSHK: Tensor, k_BSGK: Tensor, cos_BS1K: Tensor, sin_BS1K: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_BS1K, sin_BS1K)
        return torch.ops.penstock.rotate(q_BSHK, k_BSGK, cos_BS1K, sin_BS1K, False)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *torch.ops.penstock.rotate(grad_q, grad_k, *ctx.saved_tensors, True), None, None


_library = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "rms_norm(Tensor x, Tensor weight, float eps, float offset=0.0) -> Tensor",
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps, float offset=0.0) -> (Tensor, Tensor)",
    'gated(Tensor gate, Tensor up, str activation="silu") -> Tensor',
    'gated_backward(Tensor grad, Tensor gate, Tensor up, str activation="silu") -> (Tensor, Tensor)',
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, bool back) -> (Tensor, Tensor)",
):
    _library.define(_schema)  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "rms_norm", "Meta")
@torch.library.impl(_library, "gated", "Meta")
def _one_on_meta(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.impl(_library, "rms_norm_backward", "Meta")
@torch.library.impl(_library, "gated_backward", "Meta")
def _backward_on_meta(grad: Tensor, x: Tensor, other: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), other.new_empty(other.shape)


@torch.library.impl(_library, "rotate", "Meta")
def _rotate_on_meta(q_BSHK: Tensor, k_BSGK: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q_BSHK.new_empty(q_BSHK.shape), k_BSGK.new_empty(k_BSGK.shape)


@torch.library.impl(_library, "rms_norm", "CPU")
def _rms_norm_on_cpu(x: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    compiled = functions(x.dtype)
    if compiled is None:
        return _plain_rms_norm(x, weight_D, eps, offset)
    (x, row), weight_D = _rows(x, 1), weight_D.contiguous()
    out, width = torch.empty(x.shape, dtype=x.dtype), x.shape[-1]
    addresses = x.data_ptr(), weight_D.data_ptr(), out.data_ptr()
    compiled.rms_norm(*addresses, x.numel() // width, width, row, eps, offset, torch.get_num_threads())
    return out


@torch.library.impl(_library, "rms_norm_backward", "CPU")
def _rms_norm_backward_on_cpu(
    grad: Tensor, x: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    given = grad.contiguous(), x.contiguous(), weight_D.contiguous()
    made = torch.empty(x.shape, dtype=x.dtype), torch.empty(weight_D.shape, dtype=x.dtype)
    width, addresses = x.shape[-1], [each.data_ptr() for each in (*given, *made)]
    compiled = functions(x.dtype)
    assert compiled is not None
    sizes = x.numel() // width, width, eps, offset, torch.get_num_threads()
    if compiled.rms_norm_backward(*addresses, *sizes):
        raise MemoryError(f"norm of width {width}: no memory for the gradients of its weight")
    return made


@torch.library.impl(_library, "gated", "CPU")
def _gated_on_cpu(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    compiled = functions(gate.dtype)
    if compiled is None:
        return _plain_gated(gate, up, activation)
    (gate, gate_row), (up, up_row) = _rows(gate, 1), _rows(up, 1)
    out, width = torch.empty(gate.shape, dtype=gate.dtype), gate.shape[-1]
    addresses = gate.data_ptr(), up.data_ptr(), out.data_ptr()
    sizes, kind = (gate.numel() // max(1, width), width, gate_row, up_row), [*ACTIVATIONS].index(activation)
    compiled.gated(*addresses, *sizes, kind, torch.get_num_threads())
    return out


@torch.library.impl(_library, "gated_backward", "CPU")
def _gated_backward_on_cpu(grad: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> tuple[Tensor, Tensor]:
    given = grad.contiguous(), gate.contiguous(), up.contiguous()
    made = torch.empty(gate.shape, dtype=gate.dtype), torch.empty(gate.shape, dtype=gate.dtype)
    width, addresses = gate.shape[-1], [each.data_ptr() for each in (*given, *made)]
    compiled = functions(gate.dtype)
    assert compiled is not None
    sizes, kind = (gate.numel() // max(1, width), width), [*ACTIVATIONS].index(activation)
    compiled.gated_backward(*addresses, *sizes, kind, torch.get_num_threads())
    return made


@torch.library.impl(_library, "rotate", "CPU")
def _rotate_on_cpu(
    q_BSHK: Tensor, k_BSGK: Tensor, cos_BS1K: Tensor, sin_BS1K: Tensor, back: bool
) -> tuple[Tensor, Tensor]:
    compiled = functions(q_BSHK.dtype)
    if compiled is None:
        return _plain_rotate(q_BSHK, k_BSGK, cos_BS1K, sin_BS1K, back)
    batch, length, _, width = q_BSHK.shape
    # Tables without B, or with B = 1, are for all sequences.
    shape = (batch if cos_BS1K.ndim == 4 and cos_BS1K.shape[0] > 1 else 1, length, 1, width)
    cos_BS1K, sin_BS1K = cos_BS1K.expand(shape).contiguous(), sin_BS1K.expand(shape).contiguous()
    made = []
    for given in (q_BSHK, k_BSGK):
        x, row = _rows(given, 2)
        out, heads = torch.empty(x.shape, dtype=x.dtype), x.shape[2]
        addresses = x.data_ptr(), cos_BS1K.data_ptr(), sin_BS1K.data_ptr(), out.data_ptr()
        sizes = batch * length, heads, width, shape[0] * length, row
        compiled.rotate(*addresses, *sizes, back, torch.get_num_threads())
        made.append(out)
    return made[0], made[1]


def _by_triton(name: str) -> Callable[..., Any]:
    def compute(*given: Any) -> Any:
        # Triton is installed where a GPU is; importing it is slow.
        from penstock.nodes.model import elementwise_triton

        return getattr(elementwise_triton, name)(*given)

    return compute


for _name in ("rms_norm", "gated", "gated_backward", "rotate"):
    torch.library.impl(_library, _name, "CUDA")(_by_triton(_name))


def _rows(x: Tensor, dims: int) -> tuple[Tensor, int]:
    """(a tensor whose last `dims` dimensions are contiguous, the stride of its rows): `x`, or a copy if its rows have
    no common stride."""
    shape, strides = x.shape, x.stride()
    within = 1
    for size, stride in zip(reversed(shape[-dims:]), reversed(strides[-dims:]), strict=True):
        if size > 1 and stride != within:
            return x.contiguous(), shape[-dims:].numel()
        within *= size
    row, apart = None, 0  # an expanded tensor has the stride 0
    for size, stride in zip(reversed(shape[:-dims]), reversed(strides[:-dims]), strict=True):
        if size > 1:
            if row is not None and stride != apart:
                return x.contiguous(), within
            row, apart = stride if row is None else row, stride * size
    return x, row or 0
