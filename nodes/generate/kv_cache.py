"""The memory of a generator: how long prompts and responses may be, what a slot takes, the cache, and its attention.

A row's result must not depend on its neighbours, to the bit. So every slot is computed at every step, and attention
takes the positions in blocks whose bounds never change, one after the other, carrying each row's maximum and sum along.

Shapes: S slots (rows), G key-value heads, H query heads, C positions, K width of a head, B positions of a block,
R rows of a prefill, P padded prompt length, M copies, V vocabulary, T tokens of a response. X is slots × key-value
heads, N the query heads of each.
"""

import math
from heapq import nlargest

import psutil
import torch
from torch import Tensor

from penstock.graph.errors import Fault, GraphError
from penstock.graph.requires import Call
from penstock.graph.types import MAX_PROMPT, Context, Prompts
from penstock.nodes.data import FilePrompts
from penstock.nodes.model.config import ModelConfig
from penstock.nodes.model.decoder import attend_causal
from penstock.nodes.open_model import spec_of

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
    """How keys and values of a model in `dtype` are kept."""
    # Attention computes in float32. A CPU would spend more time on converting all of a bfloat16 cache at each step than
    # on the step itself (1.5 times), so it keeps float32.
    return torch.float32 if torch.device(device).type == "cpu" else dtype


class Cache:
    """Dense keys and values of all slots, and the attention of one decode step over them."""

    def __init__(self, config: ModelConfig, slots: int, length: int, dtype: torch.dtype, device: str) -> None:
        self.slots, self.groups, self.width = slots, config.num_key_value_heads, config.head_dim
        self.per_group = config.num_attention_heads // self.groups
        self.bounds = block_bounds(length)
        rows, places_C = slots * self.groups, torch.arange(length)
        # Block by block in memory, so that a step reads one contiguous piece per block.
        shape = (config.num_hidden_layers, rows * length, self.width)
        stored = stored_dtype(dtype, device)
        self._keys, self._values = (torch.zeros(shape, dtype=stored, device=device) for _ in range(2))
        # Row x of a block [begin, end) keeps position c at rows · begin + x · (end − begin) + c − begin.
        begins_C, sizes_C = torch.tensor([[b, e - b] for b, e in self.bounds for _ in range(b, e)]).T
        self._places_C, self._sizes_C = places_C.to(device), sizes_C.to(device)
        self._offsets_C = ((rows - 1) * begins_C + places_C).to(device)
        self._rows_X = torch.arange(rows, device=device)
        self._written_X = self._rows_X
        self._biases: list[Tensor] = []

    def blocks(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each block, both [X, B, K], as views."""
        rows = len(self._rows_X)
        sizes = [rows * (end - begin) for begin, end in self.bounds]
        keys, values = (torch.split(x[layer], sizes) for x in (self._keys, self._values))
        return [(k.view(rows, -1, self.width), v.view(rows, -1, self.width)) for k, v in zip(keys, values, strict=True)]

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
        scale = 1 / math.sqrt(self.width)
        # Softmax over blocks, one after the other (Milakov and Gimelshein, 2018, arXiv 1805.02867, section 3). A block
        # that a row does not need leaves that row exactly as it was: weights of exp(−∞) = 0, a factor of exp(0) = 1. So
        # blocks beyond the longest live row are not computed at all.
        out_XNK = top_XN1 = total_XN1 = q_XNK  # each is set by the first block
        for index, (bias_XNB, block) in enumerate(zip(self._biases, self.blocks(layer), strict=False)):
            k_XBK, v_XBK = (x.float() for x in block)
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
        return out_XNK.div_(total_XN1).to(q_S1HK.dtype).view(q_S1HK.shape)

    def place(self, prefix: "Prefix", rows_M: Tensor, slots_M: Tensor) -> None:
        """Copy computed prompts into slots: row `rows_M[m]` of the prefix to slot `slots_M[m]`."""
        shape = (self.slots, self.groups, -1, self.width)
        for layer, pair_RGPK in enumerate(prefix.layers):
            pair_MGPK = [x_RGPK[rows_M].to(self._keys.dtype) for x_RGPK in pair_RGPK]
            for (begin, end), block in zip(self.bounds, self.blocks(layer), strict=True):
                end = min(end, pair_MGPK[0].shape[2])
                for x_XBK, x_MGPK in zip(block, pair_MGPK, strict=True) if begin < end else ():
                    x_XBK.view(shape)[:, :, : end - begin].index_copy_(0, slots_M, x_MGPK[:, :, begin:end])


class Prefix:
    """Keys and values of padded prompts, kept while the model computes them causally."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, q_RPHK: Tensor, k_RPGK: Tensor, v_RPGK: Tensor) -> Tensor:
        """An `Attend` of the model."""
        assert layer == len(self.layers)
        self.layers.append((k_RPGK.transpose(1, 2), v_RPGK.transpose(1, 2)))
        return attend_causal(layer, q_RPHK, k_RPGK, v_RPGK)


class DecodeMemory:
    """What a generator keeps on its device: the cache of all slots, and the tensors of a step, as zeros.

    `tokens_S` were sampled last, the next ones are from `logits_SV`, and `uniform_TS` are the draws of whole responses.
    A slot has `length` positions, `max_tokens` of them for a response. `experts_SCLK` are those that the token at each
    position went through; None unless `routes` are recorded. Raises ValueError as `check` does: weights have come since
    it was asked.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        length: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: str,
        routes: bool = False,
    ) -> None:
        self.check(config, slots, length, max_tokens, dtype, device, routes)
        self.cache = Cache(config, slots, length, dtype, device)
        self.tokens_S = torch.zeros(slots, dtype=torch.long, device=device)
        self.logits_SV = torch.zeros(slots, config.vocab_size, dtype=dtype, device=device)
        self.uniform_TS = torch.zeros(max_tokens, slots, dtype=torch.float64, device=device)
        shape = slots, length, config.num_hidden_layers, config.num_experts_per_tok
        self.experts_SCLK = torch.zeros(shape, dtype=torch.int16, device=device) if routes else None

    @staticmethod
    def check(
        config: ModelConfig,
        slots: int,
        length: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: str,
        routes: bool = False,
    ) -> None:
        """Raises ValueError if the device has less memory left than the cache takes."""
        entries = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        taken = 2 * entries * length * slots * stored_dtype(dtype, device).itemsize
        taken += routes * 2 * config.num_hidden_layers * config.num_experts_per_tok * length * slots
        if torch.device(device).type == "cuda":
            # What torch holds and has not given out counts as taken for the driver.
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            available = torch.cuda.mem_get_info(device)[0] + unused
        else:
            available = psutil.virtual_memory().available
        if taken > available:
            raise ValueError(
                f"generate: given {slots} slots of {length} positions, whose keys and values take {taken} bytes "
                f"({taken / 2**30:.1f} GiB), needed at most the {available} bytes ({available / 2**30:.1f} GiB) that "
                f"{device} has left: give fewer --slots or fewer --max-tokens, or the program an option max_prompt "
                f"(tokens of the longest prompt) below {length - max_tokens}"
            )


# Prompts of a file that are encoded before a run starts, the longest texts first: a few seconds of work. Of those that
# are too long, the first `MOST_TOLD` are named.
MOST_ENCODED, MOST_TOLD = 20_000, 5


def cache_length(positions: int, context: Context) -> int:
    """Positions of a slot: a prompt of `max_prompt` tokens (an option of the program) and a response, at most the
    `positions` of the model's context.

    Raises GraphError for a `max_tokens` that leaves no room for a prompt.
    """
    # Every slot has its cache from the start. Of the whole context (128k tokens of some models) no machine has room.
    if not 1 <= context.max_tokens < positions:
        needed = f"1 to {positions - 1}: the model's context has {positions} tokens, and a prompt takes at least one"
        raise GraphError(Fault("out-of-range", "--max-tokens", str(context.max_tokens), needed))
    return min(positions, int(context.options.get("max_prompt", MAX_PROMPT)) + context.max_tokens)


def needed_prompt(length: int, context: Context) -> str:
    """The bound on a prompt, or a conversation so far, in a slot of `length` positions: a text for errors."""
    return f"at most {length - context.max_tokens}: the context of {length} less max_tokens {context.max_tokens}"


def room(call: Call) -> None:
    """Requirement of a node that samples: weights of a known model with a vocabulary, whose context has room for a
    response, and prompts with room for one after them.

    It looks at the longest `MOST_ENCODED` prompts of a file, and at the first prompt of another source. Raises
    GraphError.
    """
    spec = spec_of(call, "behaviour")
    if call.context is None or spec is None:
        return
    length, tokenizer = cache_length(spec.config.max_position_embeddings, call.context), spec.tokenizer
    source, most = call.source("prompts"), length - call.context.max_tokens
    if isinstance(source, FilePrompts):
        # `bound` costs nothing, and is enough for nearly all prompts.
        suspects = [(place, text) for place, text in source.texts() if tokenizer.bound(text) > most]
        longest = nlargest(MOST_ENCODED, range(len(suspects)), key=lambda index: len(suspects[index][1]))
        texts = [suspects[index] for index in sorted(longest)]
    elif isinstance(first := call.first("prompts"), Prompts):
        texts = [(f"group {ordinal}", text) for ordinal, text in zip(first.ordinals, first.texts, strict=True)]
    else:
        return
    sizes = [(place, len(tokenizer.encode_prompt(text))) for place, text in texts]
    found = [(place, size) for place, size in sizes if size > most]
    if found:
        needed = needed_prompt(length, call.context)
        more = f", one of {len(found)} that are too long" if len(found) > MOST_TOLD else ""
        told = found[:MOST_TOLD]
        raise GraphError(
            *(Fault("prompt-too-long", "a prompt", f"a prompt of {n} tokens{more}", needed, place) for place, n in told)
        )
