"""Keys and values of what has been decoded so far: a fixed place per slot, attended to in fixed blocks.

A row's result must not depend on its neighbours, to the bit. So every slot is computed at every step, and attention
takes the positions in blocks whose bounds never change, one after the other, carrying each row's maximum and sum
along. A block that a row does not need leaves that row exactly as it was (weights of exp(−∞) = 0, a factor of
exp(0) = 1), so blocks beyond the longest live row are not computed at all.

Shapes: L layers, S slots (rows), G key-value heads, H query heads, C positions, K width of a head, B positions of a
block, R rows of a prefill, P padded prompt length, M copies.
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


class Cache:
    """Dense keys and values of all slots, and the attention of one decode step over them."""

    def __init__(self, config: ModelConfig, slots: int, length: int, dtype: torch.dtype, device: str) -> None:
        groups, width = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, slots, groups, length, width)
        self.keys_LSGCK = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LSGCK = torch.zeros(shape, dtype=dtype, device=device)
        self.bounds = block_bounds(length)
        self.per_group = config.num_attention_heads // groups
        self._rows_X = torch.arange(slots * groups, device=device) * length
        self._places_C = torch.arange(length, device=device)
        self._written_X = self._rows_X
        self._biases: list[Tensor] = []

    def begin(self, positions_S: Tensor, reach: int) -> None:
        """Prepare a step: row s writes at `positions_S[s]` and sees all up to it; live rows stay under `reach`."""
        slots, groups = self.keys_LSGCK.shape[1:3]
        self._written_X = self._rows_X + positions_S.repeat_interleave(groups)
        blocks = [(begin, end) for begin, end in self.bounds if begin < reach]
        hidden_SC = self._places_C[: blocks[-1][1]] > positions_S[:, None]
        bias_SC = torch.zeros(hidden_SC.shape, device=positions_S.device).masked_fill_(hidden_SC, -math.inf)
        shape = (slots, groups, self.per_group, -1)
        self._biases = [
            bias_SC[:, None, None, begin:end].expand(shape).reshape(slots * groups, self.per_group, end - begin)
            for begin, end in blocks
        ]

    def attend(self, layer: int, q_S1HK: Tensor, k_S1GK: Tensor, v_S1GK: Tensor) -> Tensor:
        """One token per row, over the row's own positions; softmax in float32. An `Attend` of the model."""
        slots, groups, length, width = self.keys_LSGCK.shape[1:]
        rows = slots * groups
        keys, values = self.keys_LSGCK[layer].view(-1, width), self.values_LSGCK[layer].view(-1, width)
        keys.index_copy_(0, self._written_X, k_S1GK.reshape(rows, width))
        values.index_copy_(0, self._written_X, v_S1GK.reshape(rows, width))
        q_XHK = q_S1HK.reshape(rows, self.per_group, width).float()
        k_XCK, v_XCK = keys.view(rows, length, width), values.view(rows, length, width)
        out_XHK = self._attend(q_XHK, k_XCK, v_XCK)
        return out_XHK.to(q_S1HK.dtype).view(slots, 1, groups * self.per_group, width)

    def _attend(self, q_XHK: Tensor, k_XCK: Tensor, v_XCK: Tensor) -> Tensor:
        scale = 1 / math.sqrt(q_XHK.shape[-1])
        out_XHK = top_XH1 = total_XH1 = q_XHK  # each is set by the first block
        for bias_XHB, (begin, end) in zip(self._biases, self.bounds, strict=False):
            k_XBK, v_XBK = k_XCK[:, begin:end].float(), v_XCK[:, begin:end].float()
            scores_XHB = torch.baddbmm(bias_XHB, q_XHK, k_XBK.transpose(1, 2), alpha=scale)
            peak_XH1 = scores_XHB.amax(-1, keepdim=True)
            if begin > 0:
                peak_XH1 = torch.maximum(peak_XH1, top_XH1)
            weights_XHB = scores_XHB.sub_(peak_XH1).exp_()
            sum_XH1, part_XHK = weights_XHB.sum(-1, keepdim=True), torch.bmm(weights_XHB, v_XBK)
            if begin > 0:
                shrink_XH1 = (top_XH1 - peak_XH1).exp_()
                sum_XH1 += total_XH1 * shrink_XH1
                part_XHK += out_XHK * shrink_XH1
            out_XHK, top_XH1, total_XH1 = part_XHK, peak_XH1, sum_XH1
        return out_XHK.div_(total_XH1)

    def place(self, prefix: "Prefix", rows_M: Tensor, slots_M: Tensor) -> None:
        """Copy computed prompts into slots: row `rows_M[m]` of the prefix to slot `slots_M[m]`."""
        for layer, (keys_RGPK, values_RGPK) in enumerate(prefix.layers):
            length = keys_RGPK.shape[2]
            self.keys_LSGCK[layer, :, :, :length].index_copy_(0, slots_M, keys_RGPK[rows_M])
            self.values_LSGCK[layer, :, :, :length].index_copy_(0, slots_M, values_RGPK[rows_M])


class Prefix:
    """Keys and values of padded prompts, kept while the model computes them causally."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, q_RPHK: Tensor, k_RPGK: Tensor, v_RPGK: Tensor) -> Tensor:
        """An `Attend` of the model."""
        assert layer == len(self.layers)
        self.layers.append((k_RPGK.transpose(1, 2), v_RPGK.transpose(1, 2)))
        return attend_causal(layer, q_RPHK, k_RPGK, v_RPGK)
