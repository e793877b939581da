"""`attend` of `attention` on a GPU, by Triton: a kernel that writes the rows' keys and values, one that attends over a
run of a row's positions, and one that joins the runs of a row.

A run has the same positions for any lengths, and a program reads one row only: so a row's bits depend on no other row.
On a CPU the kernels run in Triton's interpreter (`TRITON_INTERPRET=1`).

Shapes: R rows, S slots, G key-value heads, N query heads of each, H = G · N, C positions of a slot, K width of a head,
U runs.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, BLOCK_BYTES = 64, 1 << 14
"""Most positions of a product, and most bytes of their keys: four such blocks must fit in the 99 KB of shared memory
that a program has on the smallest cards."""
RUN, MOST_RUNS = 256, 16
"""Least positions of a run, and most runs of a slot: this many programs at most read one row."""


def attend(
    q_RHK: Tensor,
    k_RGK: Tensor,
    v_RGK: Tensor,
    keys_S1GCK: Tensor,
    values_S1GCK: Tensor,
    slots_R: Tensor,
    positions_R: Tensor,
    window: int,
) -> Tensor:
    """As `attention.attend`, for slots of one page. A row at position -1 writes nothing, and its output has no
    meaning."""
    keys_SGCK, values_SGCK = keys_S1GCK.squeeze(1), values_S1GCK.squeeze(1)
    (rows, heads, width), (_, groups, length, _) = q_RHK.shape, keys_SGCK.shape
    each, wide = heads // groups, max(16, triton.next_power_of_2(width))  # 16 is a product's least width
    block = max(16, min(BLOCK, BLOCK_BYTES // (wide * keys_SGCK.itemsize)))
    run = max(RUN, -(-length // (MOST_RUNS * BLOCK)) * BLOCK)
    runs = -(-length // run)
    q_RHK = q_RHK.contiguous()
    out_RHK = torch.empty_like(q_RHK)
    sums_RGUNK = q_RHK.new_empty((rows, groups, runs, each, width), dtype=torch.float32)
    stats_RGUN2 = q_RHK.new_empty((rows, groups, runs, each, 2), dtype=torch.float32)
    where = slots_R, positions_R
    strides = keys_SGCK.stride()[:2]
    assert keys_SGCK.stride()[2:] == values_SGCK.stride()[2:] == (width, 1)
    assert values_SGCK.stride()[:2] == strides
    assert k_RGK.stride()[1:] == v_RGK.stride()[1:] == (width, 1)
    _write[(rows,)](
        k_RGK, v_RGK, keys_SGCK, values_SGCK, *where, k_RGK.stride(0), v_RGK.stride(0), *strides,
        G=groups, K=width, GP=triton.next_power_of_2(groups), KP=wide,
    )  # fmt: skip
    sizes = {"G": groups, "N": each, "K": width, "KP": wide, "RUN": run}
    _attend[(rows, groups, runs)](
        q_RHK, keys_SGCK, values_SGCK, *where, out_RHK, sums_RGUNK, stats_RGUN2, *strides, 1 / math.sqrt(width),
        window, **sizes, NP=max(16, triton.next_power_of_2(each)), BLOCK=block,
    )  # fmt: skip
    if runs > 1:
        _join[(rows, groups)](
            sums_RGUNK, stats_RGUN2, positions_R, out_RHK, window, **sizes, NP=triton.next_power_of_2(each), RUNS=runs
        )
    return out_RHK


@triton.jit
def _write(
    k, v, keys, values, slots, positions, k_row, v_row, of_slot, of_group,
    G: tl.constexpr, K: tl.constexpr, GP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    position = tl.load(positions + row)
    if position >= 0:
        group, element = tl.arange(0, GP)[:, None], tl.arange(0, KP)[None, :]
        inside = (group < G) & (element < K)
        to = tl.load(slots + row) * of_slot + group * of_group + position * K + element
        given = group * K + element
        tl.store(keys + to, tl.load(k + row * k_row + given, inside), inside)
        tl.store(values + to, tl.load(v + row * v_row + given, inside), inside)


@triton.jit
def _attend(
    q, keys, values, slots, positions, out, sums, stats, of_slot, of_group, scale, window,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RUN: tl.constexpr, NP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, group, run = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(positions + row) + 1
    first = tl.where(window > 0, tl.maximum(end - window, 0), 0)
    if (end > run * RUN) & (first < (run + 1) * RUN):
        head, element, at = tl.arange(0, NP), tl.arange(0, KP), tl.arange(0, BLOCK)
        inside = (head[:, None] < N) & (element[None, :] < K)
        own = row * G * N * K + (group * N + head[:, None]) * K + element[None, :]
        q_NK = tl.load(q + own, inside, 0.0)
        base = tl.load(slots + row) * of_slot + group * of_group
        sums_NK = tl.zeros((NP, KP), tl.float32)
        largest_N = tl.full((NP,), -float("inf"), tl.float32)
        total_N = tl.zeros((NP,), tl.float32)
        # From a block's first position, so that hidden positions do not change the bits of the rest.
        begin = tl.maximum(run * RUN, first // BLOCK * BLOCK)
        for start in range(begin, tl.minimum(end, (run + 1) * RUN), BLOCK):
            place = start + at
            there = (place[:, None] < end) & (element[None, :] < K)
            read = base + place[:, None] * K + element[None, :]
            k_CK = tl.load(keys + read, there, 0.0)
            scores_NC = tl.dot(q_NK, tl.trans(k_CK), input_precision="ieee") * scale
            seen = (place < end) & (place >= first)
            scores_NC = tl.where(seen[None, :], scores_NC, -float("inf"))
            # The first block has a visible position, so this is finite.
            larger_N = tl.maximum(largest_N, tl.max(scores_NC, 1))
            weights_NC = tl.exp(scores_NC - larger_N[:, None])
            before_N = tl.exp(largest_N - larger_N)
            v_CK = tl.load(values + read, there, 0.0)
            more_NK = tl.dot(weights_NC.to(v_CK.dtype), v_CK, input_precision="ieee")
            sums_NK = sums_NK * before_N[:, None] + more_NK
            total_N = total_N * before_N + tl.sum(weights_NC, 1)
            largest_N = larger_N
        if (first >= run * RUN) & (end <= (run + 1) * RUN):
            tl.store(out + own, (sums_NK / total_N[:, None]).to(out.dtype.element_ty), inside)
        else:
            part = ((row * G + group) * tl.num_programs(2) + run) * N
            tl.store(sums + (part + head[:, None]) * K + element[None, :], sums_NK, inside)
            tl.store(stats + (part + head) * 2, largest_N, head < N)
            tl.store(stats + (part + head) * 2 + 1, total_N, head < N)


@triton.jit
def _join(
    sums, stats, positions, out, window,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RUN: tl.constexpr, NP: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0), tl.program_id(1)
    end = tl.load(positions + row) + 1
    first = tl.where(window > 0, tl.maximum(end - window, 0), 0)
    if end - 1 - first // RUN * RUN >= RUN:
        head, element = tl.arange(0, NP), tl.arange(0, KP)
        inside = (head[:, None] < N) & (element[None, :] < K)
        sums_NK = tl.zeros((NP, KP), tl.float32)
        largest_N = tl.full((NP,), -float("inf"), tl.float32)
        total_N = tl.zeros((NP,), tl.float32)
        for run in range(first // RUN, (end - 1) // RUN + 1):
            part = ((row * G + group) * RUNS + run) * N
            own_N = tl.load(stats + (part + head) * 2, head < N, 0.0)
            larger_N = tl.maximum(largest_N, own_N)
            before_N, now_N = tl.exp(largest_N - larger_N), tl.exp(own_N - larger_N)
            own_NK = tl.load(sums + (part + head[:, None]) * K + element[None, :], inside, 0.0)
            sums_NK = sums_NK * before_N[:, None] + own_NK * now_N[:, None]
            total_N = total_N * before_N + tl.load(stats + (part + head) * 2 + 1, head < N, 1.0) * now_N
            largest_N = larger_N
        own = row * G * N * K + (group * N + head[:, None]) * K + element[None, :]
        tl.store(out + own, (sums_NK / total_N[:, None]).to(out.dtype.element_ty), inside)
