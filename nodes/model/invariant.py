"""A forward pass whose bits depend on a row's own tokens only (`--invariant`): not on the number of rows in a pass, on
the chunks of a prefill, or on the threads. So a generator that computes token by token and a trainer that computes
whole sequences get the same bits, and the recorded log-probabilities are exactly the trainer's.

All operations that sum numbers, or that a compiler may compile in two ways, are in C that generator and trainer share:
products and the log-softmax in `invariant.c`, and those that are shared in every run in `elementwise.c`. Attention is
the generator's own operation, with each sequence as a slot. Look-ups and sums of two numbers are exact in any order.
Backward passes are the ordinary ones.

Shapes: R rows, D hidden width, O width of an output, B sequences, S tokens, H query heads, G key-value heads, K width
of a head, V vocabulary.
"""

import ctypes
import functools
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.nodes.model import causal, elementwise
from penstock.nodes.model.compiled import DTYPES, compile_c, compiler
from penstock.nodes.model.config import ModelError

_SOURCE = Path(__file__).with_name("invariant.c")


@functools.cache
def _functions(dtype: torch.dtype) -> ctypes.CDLL:
    """The functions of invariant.c. Raises ModelError for a dtype that they do not support, or if they do not
    compile."""
    if dtype not in DTYPES:
        raise ModelError(f"--invariant: given {str(dtype).removeprefix('torch.')}, needed float32 or bfloat16")
    try:
        found = compile_c(_SOURCE, dtype)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"--invariant: given {compiler()!r} ({error}), needed a C compiler with OpenMP") from error
    pointer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    found.linear.argtypes = [*[pointer] * 4, *[number] * 3, threads]
    found.log_softmax.argtypes, found.log_softmax.restype = [*[pointer] * 3, *[number] * 2, threads], None
    return found


def require_kernels(dtype: torch.dtype) -> None:
    """Raises ModelError for a dtype or a machine that the kernels do not support."""
    _functions(dtype)
    # If one of these does not compile, it has warned already.
    if elementwise.functions(dtype) is None or causal.functions(dtype) is None:
        raise ModelError(f"--invariant: given {compiler()!r}, needed a C compiler with OpenMP")


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
        # The fast products. Imported late, since `kernels` imports this module.
        from penstock.nodes.model.kernels import linear as multiply

        x, weight = ctx.saved_tensors
        rows, (of_x, of_weight, of_bias) = grad.reshape(-1, grad.shape[-1]), ctx.needs_input_grad
        grad_x = multiply(rows, weight.t()).view(x.shape) if of_x else None
        grad_weight = multiply(rows.t(), x.reshape(-1, x.shape[-1]).t()) if of_weight else None
        return grad_x, grad_weight, rows.sum(0) if of_bias else None


def attend_causal(layer: int, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, window: int = 0) -> Tensor:
    """Causal attention within each row, by the generator's operation. An `Attend`."""
    return _Attend.apply(q_BSHK, k_BSGK, v_BSGK, window)  # type: ignore[no-any-return,no-untyped-call]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, window: int) -> Tensor:
        ctx.save_for_backward(q_BSHK, k_BSGK, v_BSGK)
        ctx.window = window
        return _attend(q_BSHK, k_BSGK, v_BSGK, window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHK: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.penstock.causal_backward(grad_BSHK, *ctx.saved_tensors, ctx.window), None


def _attend(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, window: int) -> Tensor:
    # Imported late, since the generator imports models.
    from penstock.nodes.generate.attention import attend, cache_shape

    batch, length, groups, width = k_BSGK.shape
    shape = cache_shape(batch, length, groups, width, k_BSGK.device)
    # Positions beyond the last one have weight 0, which NaN times is NaN.
    keys, values = (k_BSGK.new_zeros(shape) for _ in range(2))
    slots_R = torch.arange(batch).repeat_interleave(length)
    positions_R = torch.arange(length).repeat(batch)
    q_RHK, k_RGK, v_RGK = (x.contiguous().flatten(0, 1) for x in (q_BSHK, k_BSGK, v_BSGK))
    out_RHK = attend(q_RHK, k_RGK, v_RGK, keys, values, slots_R, positions_R, window)
    return out_RHK.view(q_BSHK.shape)


def log_softmax(logits_RV: Tensor, temperature_R: Tensor | None = None) -> Tensor:
    """log softmax(logits / temperature) over the last dimension, float32, without a gradient; None is temperature 1.
    The logits have the model's dtype."""
    rows = logits_RV.contiguous()
    if temperature_R is None:
        temperature_R = torch.ones(len(rows))
    out = rows.new_empty(rows.shape, dtype=torch.float32)
    _call("log_softmax", rows.dtype, (rows, temperature_R.float().contiguous(), out), *rows.shape)
    return out
