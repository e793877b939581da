"""Keys and values of what has been decoded so far: a fixed place per slot, attended to in fixed blocks.

A row's result must not depend on its neighbours, to the bit. So every slot is computed at every step, and attention
takes the positions in blocks whose bounds never change, one after the other, carrying each row's maximum and sum
along. A block that a row does not need leaves that row exactly as it was (weights of exp(−∞) = 0, a factor of
exp(0) = 1), so blocks beyond the longest live row are not computed at all.

Memory is laid out block by block, so that a step reads one contiguous piece per block.

Shapes: S slots (rows), G key-value heads, H query heads, C positions, K width of a head, B positions of a block,
R rows of a prefill, P padded prompt length, M copies. X is slots × key-value heads, N the query heads of each.
"""

import math

import torch
from torch import Tensor

from penstock.nodes.model.config import ModelConfig
from penstock.nodes.model.llama import attend_causal

FIRST_BLOCK, LARGEST_BLOCK = 16, 256


def block_bounds(length: int) -> list[tuple[int, int]]:
    """Begin and end of each block: 16 positions, then as many as stand before it, up to 256."""
    bounds, begin = [], 0
    while begin < length:
        end = min(length, begin + min(LARGEST_BLOCK, max(FIRST_BLOCK, begin)))
        bounds.append((begin, end))
        begin = end
    return bounds


def stored_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """How keys and values of a model in `dtype` are kept. Attention computes in float32: a CPU would spend more time
    on converting all of them at each step than on the step (bfloat16: 1.5 times), so there they are kept so."""
    return torch.float32 if torch.device(device).type == "cpu" else dtype


class Cache:
    """Dense keys and values of all slots, and the attention of one decode step over them."""

    def __init__(self, config: ModelConfig, slots: int, length: int, dtype: torch.dtype, device: str) -> None:
        self.slots, self.groups, self.width = slots, config.num_key_value_heads, config.head_dim
        self.per_group = config.num_attention_heads // self.groups
        self.bounds = block_bounds(length)
        rows, places_C = slots * self.groups, torch.arange(length)
        shape = (config.num_hidden_layers, rows * length, self.width)
        stored = stored_dtype(dtype, device)
        self._keys, self._values = (torch.zeros(shape, dtype=stored, device=device) for _ in range(2))
        # Row x of a block [begin, end) keeps position c at rows · begin + x · (end − begin) + c − begin.
        sizes_C = torch.cat([torch.full((end - begin,), end - begin) for begin, end in self.bounds])
        begins_C = torch.cat([torch.full((end - begin,), begin) for begin, end in self.bounds])
        self._places_C, self._sizes_C = places_C.to(device), sizes_C.to(device)
        self._offsets_C = ((rows - 1) * begins_C + places_C).to(device)
        self._rows_X = torch.arange(rows, device=device)
        self._written_X = self._rows_X
        self._biases: list[Tensor] = []

    def blocks(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each block, both [X, B, K], as views."""
        rows = len(self._rows_X)
        keys, values = self._keys[layer], self._values[layer]
        pieces = [slice(rows * begin, rows * end) for begin, end in self.bounds]
        return [(keys[p].view(rows, -1, self.width), values[p].view(rows, -1, self.width)) for p in pieces]

    def begin(self, positions_S: Tensor, reach: int) -> None:
        """Prepare a step: row s writes at `positions_S[s]` and sees all up to it; live rows stay under `reach`."""
        positions_X = positions_S.repeat_interleave(self.groups)
        self._written_X = self._rows_X * self._sizes_C[positions_X] + self._offsets_C[positions_X]
        blocks = [(begin, end) for begin, end in self.bounds if begin < reach]
        hidden_XC = self._places_C[: blocks[-1][1]] > positions_X[:, None]
        bias_X1C = torch.zeros(hidden_XC.shape, device=hidden_XC.device).masked_fill_(hidden_XC, -math.inf)[:, None]
        self._biases = [bias_X1C[:, :, begin:end].repeat(1, self.per_group, 1) for begin, end in blocks]

    def attend(self, layer: int, q_S1HK: Tensor, k_S1GK: Tensor, v_S1GK: Tensor) -> Tensor:
        """One token per row, over the row's own positions; softmax in float32. An `Attend` of the model."""
        rows = len(self._rows_X)
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(0, self._written_X, k_S1GK.reshape(rows, self.width).to(keys.dtype))
        values.index_copy_(0, self._written_X, v_S1GK.reshape(rows, self.width).to(values.dtype))
        q_XNK = q_S1HK.reshape(rows, self.per_group, self.width).float()
        return self._attend(q_XNK, self.blocks(layer)).to(q_S1HK.dtype).view(q_S1HK.shape)

    def _attend(self, q_XNK: Tensor, blocks: list[tuple[Tensor, Tensor]]) -> Tensor:
        scale = 1 / math.sqrt(self.width)
        out_XNK = top_XN1 = total_XN1 = q_XNK  # each is set by the first block
        for index, bias_XNB in enumerate(self._biases):
            k_XBK, v_XBK = (x.float() for x in blocks[index])
            scores_XNB = torch.baddbmm(bias_XNB, q_XNK, k_XBK.transpose(1, 2), alpha=scale)
            peak_XN1 = scores_XNB.amax(-1, keepdim=True)
            if index > 0:
                peak_XN1 = torch.maximum(peak_XN1, top_XN1)
            weights_XNB = scores_XNB.sub_(peak_XN1).exp_()
            sum_XN1, part_XNK = weights_XNB.sum(-1, keepdim=True), torch.bmm(weights_XNB, v_XBK)
            if index > 0:
                shrink_XN1 = (top_XN1 - peak_XN1).exp_()
                sum_XN1 += total_XN1 * shrink_XN1
                part_XNK += out_XNK * shrink_XN1
            out_XNK, top_XN1, total_XN1 = part_XNK, peak_XN1, sum_XN1
        return out_XNK.div_(total_XN1)

    def place(self, prefix: "Prefix", rows_M: Tensor, slots_M: Tensor) -> None:
        """Copy computed prompts into slots: row `rows_M[m]` of the prefix to slot `slots_M[m]`."""
        for layer, (keys_RGPK, values_RGPK) in enumerate(prefix.layers):
            keys_MGPK, values_MGPK = (x[rows_M].to(self._keys.dtype) for x in (keys_RGPK, values_RGPK))
            for (begin, end), (k_XBK, v_XBK) in zip(self.bounds, self.blocks(layer), strict=True):
                end = min(end, keys_MGPK.shape[2])
                if begin < end:
                    shape = (self.slots, self.groups, -1, self.width)
                    k_XBK.view(shape)[:, :, : end - begin].index_copy_(0, slots_M, keys_MGPK[:, :, begin:end])
                    v_XBK.view(shape)[:, :, : end - begin].index_copy_(0, slots_M, values_MGPK[:, :, begin:end])


class Prefix:
    """Keys and values of padded prompts, kept while the model computes them causally."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, q_RPHK: Tensor, k_RPGK: Tensor, v_RPGK: Tensor) -> Tensor:
        """An `Attend` of the model."""
        assert layer == len(self.layers)
        self.layers.append((k_RPGK.transpose(1, 2), v_RPGK.transpose(1, 2)))
        return attend_causal(layer, q_RPHK, k_RPGK, v_RPGK)
