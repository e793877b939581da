"""Causal self-attention of whole sequences on a CPU, with gradients, by `causal.c`. It keeps no scores and no float32
copies for the backward pass, but computes them again in the processor's caches.

Shapes: B sequences, S tokens, C segments and one more, F families and one more, H query heads, G key-value heads, K
width of a head.
"""

import ctypes
import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.nodes.model.compiled import compiled_or_warned

_SOURCE = Path(__file__).with_name("causal.c")


def suits(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> bool:
    """True if `attend` supports these tensors on this machine: plain ones on a CPU, float32 or bfloat16, and with a C
    compiler. Without one it warns."""
    plain = all(type(x) is Tensor and x.device.type == "cpu" and x.dtype == q_BSHK.dtype for x in (k_BSGK, v_BSGK))
    return plain and q_BSHK.device.type == "cpu" and functions(q_BSHK.dtype) is not None


def attend(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    window: int = 0,
    starts_C: Tensor | None = None,
    families_F: Tensor | None = None,
) -> Tensor:
    """Attention of each token to itself and the tokens before it in its sequence, at most the last `window` unless that
    is 0: [B, S, H, K]. H / G query heads share a key-value head. Computed in float32 and rounded once. A sequence's
    bits do not depend on other sequences or on the threads.

    With `starts_C` (int64) segments are laid end to end in the first two dimensions; it has the start of each, and the
    end of the last. Each segment is a sequence, unless there is `families_F` (int64), which has the first segment of
    each family, and the number of segments. A family's first segment is stored once, and is the beginning of all of its
    sequences."""
    given = q_BSHK, k_BSGK, v_BSGK
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return _Attend.apply(*given, window, starts_C, families_F)  # type: ignore[no-any-return,no-untyped-call]
    return torch.ops.penstock.causal(*given, window, starts_C, families_F)  # type: ignore[no-any-return]


@functools.cache
def functions(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The functions of causal.c; None for a dtype that they do not support, or with a warning if they do not
    compile."""
    found = compiled_or_warned(_SOURCE, dtype)
    if found is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.causal.argtypes = [*[pointer] * 7, *[number] * 5, ctypes.c_float, ctypes.c_int]
    found.causal_backward.argtypes = [*[pointer] * 10, *[number] * 5, ctypes.c_float, ctypes.c_int]
    return found


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        window: int,
        starts_C: Tensor | None,
        families_F: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(q_BSHK, k_BSGK, v_BSGK)
        ctx.how = window, starts_C, families_F
        return torch.ops.penstock.causal(q_BSHK, k_BSGK, v_BSGK, *ctx.how)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHK: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.penstock.causal_backward(grad_BSHK, *ctx.saved_tensors, *ctx.how), None, None, None


_library = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "causal(Tensor q, Tensor k, Tensor v, int window, Tensor? starts=None, Tensor? families=None) -> Tensor",
    "causal_backward(Tensor grad, Tensor q, Tensor k, Tensor v, int window, Tensor? starts=None,"
    " Tensor? families=None) -> (Tensor, Tensor, Tensor)",
):
    _library.define(_schema)  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "causal", "Meta")
def _on_meta(q_BSHK: Tensor, *_: Any) -> Tensor:
    return q_BSHK.new_empty(q_BSHK.shape)


@torch.library.impl(_library, "causal_backward", "Meta")
def _backward_on_meta(grad_BSHK: Tensor, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *_: Any) -> tuple[Tensor, ...]:
    given = q_BSHK, k_BSGK, v_BSGK
    return tuple(x.new_empty(x.shape) for x in given)


@torch.library.impl(_library, "causal", "CPU")
def _on_cpu(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, window: int, *lie: Tensor | None) -> Tensor:
    return _call("causal", (q_BSHK, k_BSGK, v_BSGK), (q_BSHK,), window, *lie)[0]


@torch.library.impl(_library, "causal_backward", "CPU")
def _backward_on_cpu(
    grad_BSHK: Tensor, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, window: int, *lie: Tensor | None
) -> tuple[Tensor, ...]:
    given = q_BSHK, k_BSGK, v_BSGK
    return _call("causal_backward", (*given, grad_BSHK), given, window, *lie)


def _call(
    name: str,
    given: tuple[Tensor, ...],
    like: tuple[Tensor, ...],
    window: int,
    starts_C: Tensor | None = None,
    families_F: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Call a function of `causal.c` with tensors [B, S, heads, K]. Return its results, which have the shapes of
    `like`."""
    (batch, length, heads, width), groups = given[0].shape, given[1].shape[2]
    if starts_C is None:
        starts_C = torch.arange(batch + 1) * length
    if families_F is None:
        families_F = torch.arange(len(starts_C))
    # Sequences end to end; `flatten` copies tensors that are laid out otherwise.
    given = tuple((x if x.stride(-1) == 1 else x.contiguous()).flatten(0, 1) for x in given)
    made = tuple(torch.empty(x.shape, dtype=x.dtype) for x in like)
    strides = [x.stride(dim) for x in given for dim in range(2)]
    sizes = len(families_F) - 1, groups, heads // groups, width, window, 1 / math.sqrt(width), torch.get_num_threads()
    library = functions(given[0].dtype)
    assert library is not None
    addresses, lie = ([x.data_ptr() for x in each] for each in ((*given, *made), (starts_C, families_F)))
    if getattr(library, name)(*addresses, (ctypes.c_int64 * len(strides))(*strides), *lie, *sizes):
        raise MemoryError(f"attention: no memory for the scores of {int(starts_C.diff().max())} tokens")
    return made
