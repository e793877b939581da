"""A forward pass whose bits depend on a row's own tokens alone (`--invariant`): not on how many rows a pass has, what a
prompt is cut into, or the threads. So what a generator computes token by token is what a trainer computes of whole
sequences, and the log-probabilities that are recorded are the trainer's, to the bit.

All that adds numbers up, or that a compiler may do in two ways, is in `invariant.c`, which generator and trainer share:
products, norms, the gated activation, rotary positions and the log-softmax. Attention is the generator's own operation,
with each sequence as a slot. Look-ups and sums of two numbers are exact in any order. Backward passes are the ordinary
ones.

Shapes: R rows, D hidden width, O width of an output, B sequences, S tokens, H query heads, G key-value heads, K width
of a head, V vocabulary.
"""

import ctypes
import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.nodes.model.compiled import compile_c, compiler
from penstock.nodes.model.config import ModelError

_SOURCE = Path(__file__).with_name("invariant.c")
_DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def _functions(dtype: torch.dtype) -> ctypes.CDLL:
    """Raises ModelError for a dtype that it has none for, or where they do not compile."""
    if dtype not in _DTYPES:
        raise ModelError(f"--invariant: given {str(dtype).removeprefix('torch.')}, needed float32 or bfloat16")
    try:
        found = compile_c(_SOURCE, ["-DBF16"] if dtype == torch.bfloat16 else [])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"--invariant: given {compiler()!r} ({error}), needed a C compiler with OpenMP") from error
    pointer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for name, pointers, numbers in (("linear", 4, 3), ("gated", 3, 1), ("rotate", 4, 3), ("log_softmax", 3, 2)):
        function = getattr(found, name)
        function.argtypes = [*[pointer] * pointers, *[number] * numbers, threads]
        function.restype = ctypes.c_int if name == "linear" else None
    found.norm.argtypes = [*[pointer] * 3, *[number] * 2, ctypes.c_float, threads]
    found.norm.restype = None
    return found


def require_kernels(dtype: torch.dtype) -> None:
    """Raises ModelError for a dtype or a machine that they are not for."""
    _functions(dtype)


def _call(name: str, dtype: torch.dtype, tensors: tuple[Tensor | None, ...], *sizes: float) -> int:
    addresses = []
    for tensor in tensors:
        assert tensor is None or tensor.is_contiguous()
        addresses.append(None if tensor is None else tensor.data_ptr())
    status: int | None = getattr(_functions(dtype), name)(*addresses, *sizes, torch.get_num_threads())
    return status or 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, with `weight` [O, D] and any number of leading dimensions of `x`."""
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows, weight = x.contiguous(), weight.contiguous()
        out = rows.new_empty(*x.shape[:-1], len(weight))
        size = rows.numel() // rows.shape[-1], *weight.shape
        if _call("linear", x.dtype, (rows, weight, bias, out), *size):
            raise MemoryError("--invariant: no memory for the rows of a product")
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        # `kernels` has the fast ones, and imports this module.
        from penstock.nodes.model.kernels import linear as multiply

        x, weight = ctx.saved_tensors
        rows, (of_x, of_weight, of_bias) = grad.reshape(-1, grad.shape[-1]), ctx.needs_input_grad
        grad_x = multiply(rows, weight.t()).view(x.shape) if of_x else None
        grad_weight = multiply(rows.t(), x.reshape(-1, x.shape[-1]).t()) if of_weight else None
        return grad_x, grad_weight, rows.sum(0) if of_bias else None


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""
    return _ordinary(_norm, lambda x, weight_D: F.rms_norm(x, weight_D.shape, weight_D, eps), x, weight_D, eps=eps)


def _norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    rows, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(rows)
    _call("norm", x.dtype, (rows, weight_D.contiguous(), out), rows.numel() // width, width, eps)
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return _ordinary(_gated, lambda gate, up: F.silu(gate) * up, gate, up)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _call("gated", gate.dtype, (gate, up, out), gate.numel())
    return out


def rotate(x_BSHK: Tensor, cos_BS1K: Tensor, sin_BS1K: Tensor) -> Tensor:
    """Each pair (x[i], x[i + K/2]) turned by its position's angle; the first half of `sin` is negative."""

    def plainly(x_BSHK: Tensor) -> Tensor:
        first, second = x_BSHK.chunk(2, dim=-1)
        return x_BSHK * cos_BS1K + torch.cat((second, first), dim=-1) * sin_BS1K

    return _ordinary(_rotate, plainly, x_BSHK, cos_BS1K=cos_BS1K, sin_BS1K=sin_BS1K)


def _rotate(x_BSHK: Tensor, *, cos_BS1K: Tensor, sin_BS1K: Tensor) -> Tensor:
    batch, length, heads, width = x_BSHK.shape
    angles = batch, length, 1, width
    tables = (table.expand(angles).contiguous() for table in (cos_BS1K, sin_BS1K))
    rows = x_BSHK.contiguous()
    out = torch.empty_like(rows)
    _call("rotate", rows.dtype, (rows, *tables, out), batch * length, heads, width)
    return out


def attend_causal(layer: int, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
    """Each token sees itself and the tokens before it in its row. An `Attend`, by the generator's operation."""
    # `decoder` imports this module.
    from penstock.nodes.model.decoder import attend_causal as ordinary

    return _ordinary(_attend, functools.partial(ordinary, layer), q_BSHK, k_BSGK, v_BSGK)


def _attend(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
    # The generator imports models.
    from penstock.nodes.generate.attention import attend

    batch, length, groups, width = k_BSGK.shape
    keys_BGSK, values_BGSK = (k_BSGK.new_empty(batch, groups, length, width) for _ in range(2))
    slots_R = torch.arange(batch).repeat_interleave(length)
    positions_R = torch.arange(length).repeat(batch)
    q_RHK, k_RGK, v_RGK = (x.contiguous().flatten(0, 1) for x in (q_BSHK, k_BSGK, v_BSGK))
    out_RHK = attend(q_RHK, k_RGK, v_RGK, keys_BGSK, values_BGSK, slots_R, positions_R)
    return out_RHK.view(q_BSHK.shape)


def log_softmax(logits_RV: Tensor, temperature_R: Tensor | None = None) -> Tensor:
    """log softmax(logits / temperature) over the last dimension, float32, without a gradient; None: of temperature 1.
    The logits have the model's own dtype."""
    rows = logits_RV.contiguous()
    if temperature_R is None:
        temperature_R = torch.ones(len(rows))
    out = rows.new_empty(rows.shape, dtype=torch.float32)
    _call("log_softmax", rows.dtype, (rows, temperature_R.float().contiguous(), out), *rows.shape)
    return out


def _ordinary(forward: Callable[..., Tensor], plainly: Callable[..., Tensor], *given: Tensor, **more: Any) -> Tensor:
    """What `forward` makes of the tensors, with the gradients of the same computed `plainly`."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in given):
        return forward(*given, **more)
    return _Ordinary.apply(forward, plainly, more, *given)  # type: ignore[no-any-return,no-untyped-call]


class _Ordinary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Tensor], plainly: Callable[..., Tensor], more: dict[str, Any], *given: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*given)
        ctx.plainly = plainly
        return forward(*given, **more)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        with torch.enable_grad():
            given = [t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, needed, strict=True)]
            made = ctx.plainly(*given)
            found = iter(torch.autograd.grad(made, [t for t in given if t.requires_grad], grad))
        return None, None, None, *(next(found) if n else None for n in needed)
