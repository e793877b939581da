"""Attention of one token per row over a cache of slots: one operation, `torch.ops.penstock.attend`, that writes the
row's key and value and attends over the row's own positions; a row's bits depend on no other row.

The cache is in pages: a slot's positions are some pages, each with all heads, so that what has been written so far is
adjacent in memory. On a GPU a slot is one page.

It is chosen by device: on a CPU `attention.c`, compiled for this processor and these heads when an engine is made, or,
without a C compiler, torch's products over blocks of positions; on a GPU `attention_triton`.

Shapes: R rows, S slots, B pages of a slot, P positions of a page, G key-value heads, H query heads, N query heads of a
key-value head, C = B · P positions of a slot, K width of a head.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.nodes.model.compiled import compiled_or_warned

PAGE = 16
"""Positions of a page on a CPU."""
BLOCK = 4 * PAGE
"""Positions of a block: products have the same shape for any lengths."""
_SOURCE = Path(__file__).with_name("attention.c")


def attend(
    q_RHK: Tensor,
    k_RGK: Tensor,
    v_RGK: Tensor,
    keys_SBGPK: Tensor,
    values_SBGPK: Tensor,
    slots_R: Tensor,
    positions_R: Tensor,
    window: int = 0,
) -> Tensor:
    """Row r writes its key and value at position `positions_R[r]` of slot `slots_R[r]`, then attends to all positions
    up to it, or only the last `window` unless that is 0; softmax in float32. Rows of one slot see each other's. A row
    at position -1 is empty: its output has no meaning, and it changes at most the last position of its slot. Returns
    [R, H, K]."""
    own = q_RHK, k_RGK, v_RGK, keys_SBGPK, values_SBGPK, slots_R, positions_R
    return _attend(*own, window)  # type: ignore[no-any-return]


def cache_shape(slots: int, length: int, groups: int, width: int, device: str | torch.device) -> tuple[int, ...]:
    """The shape [S, B, G, P, K] of the keys, or the values, of slots with at least `length` positions."""
    page = PAGE if torch.device(device).type == "cpu" else length
    return slots, -(-length // page), groups, page, width


def stored_dtype(dtype: torch.dtype, device: str, per_group: int, width: int) -> torch.dtype:
    """The best dtype of the cached keys and values of a model in `dtype`."""
    # Without the C kernel: torch's products in bfloat16 would round the scores, and converting the cache at each step
    # takes longer than the step.
    on_cpu = torch.device(device).type == "cpu"
    return torch.float32 if on_cpu and compiled(per_group, width, dtype) is None else dtype


@functools.cache
def compiled(per_group: int, width: int, dtype: torch.dtype) -> Callable[..., int] | None:
    """`attend` of attention.c for these heads; None for another dtype, or with a warning if it does not compile."""
    lanes = math.gcd(width // 2 if dtype == torch.bfloat16 else width, 16)  # rotary positions need an even width
    library = compiled_or_warned(
        _SOURCE, dtype, [f"-DK={width}", f"-DN={per_group}", f"-DPAGE={PAGE}", f"-DLANES={lanes}"]
    )
    if library is None:
        return None
    function = library.attend
    function.argtypes = [*[ctypes.c_void_p] * 8, *[ctypes.c_int64] * 7, ctypes.c_float, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


_library = torch.library.Library("penstock", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor positions, "
    "int window) -> Tensor"
)
_attend = torch.ops.penstock.attend.default


@torch.library.impl(_library, "attend", "Meta")
def _on_meta(q_RHK: Tensor, *_: Any) -> Tensor:
    return q_RHK.new_empty(q_RHK.shape)


@torch.library.impl(_library, "attend", "CPU")
def _on_cpu(*given: Any) -> Tensor:
    # `given` are the arguments of `attend`, here and below.
    (q_RHK, k_RGK, v_RGK, keys_SBGPK, values_SBGPK, *_), window = given, given[-1]
    (rows, heads, width), (_, pages, groups, page, _) = q_RHK.shape, keys_SBGPK.shape
    assert page == PAGE
    function = compiled(heads // groups, width, keys_SBGPK.dtype)
    if function is None or q_RHK.dtype != keys_SBGPK.dtype:
        return _by_blocks(*given)
    for tensor in (q_RHK, k_RGK, v_RGK):
        assert tensor.stride()[1:] == (width, 1)
    assert keys_SBGPK.is_contiguous()
    assert values_SBGPK.is_contiguous()
    out_RHK = torch.empty(q_RHK.shape, dtype=q_RHK.dtype)
    strides = q_RHK.stride(0), k_RGK.stride(0), v_RGK.stride(0)
    sizes = rows, groups, pages, *strides, window, 1 / math.sqrt(width), torch.get_num_threads()
    if function(*(tensor.data_ptr() for tensor in (*given[:-1], out_RHK)), *sizes):
        raise MemoryError(f"generate: no memory for the scores of {pages * PAGE} positions")
    return out_RHK


def _by_blocks(*given: Any) -> Tensor:
    """`attend` by torch's own operations. Blocks beyond all rows are not computed: their weights would be 0, so this
    changes no bits."""
    q_RHK, k_RGK, v_RGK, keys_SBGPK, values_SBGPK, slots_R, positions_R, window = given
    (rows, _, width), (_, pages, groups, _, _) = q_RHK.shape, keys_SBGPK.shape
    length, place = pages * PAGE, (slots_R, positions_R // PAGE, slice(None), positions_R % PAGE)
    keys_SBGPK[place] = k_RGK.to(keys_SBGPK.dtype)
    values_SBGPK[place] = v_RGK.to(keys_SBGPK.dtype)
    # An empty row attends to position 0, which is valid: a NaN would spread to the slot that it writes to.
    positions_R = positions_R.clamp(min=0)
    reach = int(positions_R.max()) + 1

    def block(cached_SBGPK: Tensor, begin: int, end: int) -> Tensor:
        """Positions of each row's slot, [R, G, positions, K]."""
        pages_RGBPK = cached_SBGPK.transpose(1, 2)[slots_R, :, begin // PAGE : end // PAGE]
        return pages_RGBPK.flatten(2, 3).float()

    q_RGNK = q_RHK.float().reshape(rows, groups, -1, width) / math.sqrt(width)
    scores_RGNC = torch.full((*q_RGNK.shape[:3], length), -math.inf, device=q_RHK.device)
    bounds = [(begin, min(length, begin + BLOCK)) for begin in range(0, reach, BLOCK)]
    for begin, end in bounds:
        scores_RGNC[..., begin:end] = q_RGNK @ block(keys_SBGPK, begin, end).transpose(2, 3)
    positions_C = torch.arange(length, device=q_RHK.device)
    hidden_RC = positions_C > positions_R[:, None]
    if window:
        hidden_RC |= positions_C <= positions_R[:, None] - window
    weights_RGNC = scores_RGNC.masked_fill_(hidden_RC[:, None, None], -math.inf).softmax(-1)
    out_RGNK = torch.zeros_like(q_RGNK)
    for begin, end in bounds:
        out_RGNK += weights_RGNC[..., begin:end] @ block(values_SBGPK, begin, end)
    return out_RGNK.to(q_RHK.dtype).view(q_RHK.shape)


@torch.library.impl(_library, "attend", "CUDA")
def _on_gpu(*given: Any) -> Tensor:
    # Triton is installed where a GPU is; importing it is slow.
    from penstock.nodes.generate import attention_triton

    return attention_triton.attend(*given)
