"""The memory of a generator: lengths of prompts and responses, the size of a slot, the cache, and attention over it.

Shapes: R rows of a pass, S slots, B pages of a slot, P positions of a page, G key-value heads, H query heads, K width
of a head, M copies, T tokens of a response.
"""

import ctypes
import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.graph.context import Context
from penstock.graph.errors import Fault, GraphError
from penstock.graph.machine import free_memory
from penstock.graph.requires import Call
from penstock.graph.types import Prompts
from penstock.nodes.data import FilePrompts
from penstock.nodes.generate.attention import attend, cache_shape, stored_dtype
from penstock.nodes.generate.cuda_graph import Graphs
from penstock.nodes.model.config import ModelConfig
from penstock.nodes.open_model import refuse_long, spec_of, suspects

_libc = ctypes.CDLL(None)
WIDE = 256
"""The most rows of a pass on a CPU with `DecodePass`."""
PROMPT_ROWS = 512
"""Tokens of prompts that a GPU computes at once: their product takes little longer than reading its weights."""


@dataclass(frozen=True)
class CacheSize:
    """The size of a cache: `slots` of `length` positions each, `max_tokens` of them for a response, for a model of this
    shape and dtype. `routes`: the experts of each token are recorded."""

    config: ModelConfig
    slots: int
    length: int
    max_tokens: int
    dtype: torch.dtype
    device: str
    routes: bool = False

    @property
    def stored(self) -> torch.dtype:
        """The dtype of keys and values in the cache."""
        groups = self.config.num_key_value_heads
        return stored_dtype(self.dtype, self.device, self.config.num_attention_heads // groups, self.config.head_dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the cached keys, or values, [layers, S, B, G, P, K]."""
        config = self.config
        sizes = self.slots, self.length, config.num_key_value_heads, config.head_dim
        return config.num_hidden_layers, *cache_shape(*sizes, self.device)

    def require_memory(self, coming: int = 0) -> None:
        """Raises ValueError if the device has less memory left than the cache takes, beside weights of `coming` bytes
        that will arrive."""
        config = self.config
        positions = config.num_hidden_layers * self.length * self.slots
        experts = positions * config.num_experts_per_tok if self.routes else 0
        taken = 2 * math.prod(self.shape) * self.stored.itemsize + 2 * experts
        require_memory(taken, coming, self.slots, self.length, self.max_tokens, self.device)


def require_memory(nbytes: int, coming: int, slots: int, length: int, max_tokens: int, device: str) -> None:
    """Raises ValueError if a device has less memory left than the cache of these slots takes, of `nbytes`, beside
    weights of `coming` bytes that will arrive."""
    if torch.device(device).type == "cuda":
        # The driver counts memory that torch has reserved but not allocated as used.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        available = torch.cuda.mem_get_info(device)[0] + unused
    else:
        available = free_memory()
    available -= coming
    if nbytes > available:
        raise ValueError(
            f"generate: given {slots} slots of {length} positions, whose keys and values take {nbytes} "
            f"bytes ({nbytes / 2**30:.1f} GiB), needed at most the {available} bytes ({available / 2**30:.1f} GiB) "
            f"that {device} has left beside the weights: give fewer --slots or fewer --max-tokens, or "
            f"--max-prompt (tokens of the longest prompt) below {length - max_tokens}"
        )


class Cache:
    """Keys and values of all slots, and the attention of one forward pass over them.

    `keys` and `values` are [layers, S, B, G, P, K]; the last position of a slot is never part of a conversation.
    """

    def __init__(self, size: CacheSize) -> None:
        self.keys, self.values = (zeros(size.shape, size.stored, size.device) for _ in range(2))
        self._slots_R = self._positions_R = torch.arange(size.slots, device=size.device)

    def begin(self, slots_R: Tensor, positions_R: Tensor) -> None:
        """Prepare a pass: row r is the token at `positions_R[r]` of slot `slots_R[r]`. Earlier tokens of the slot are
        in the cache or in this pass. An empty row is at -1."""
        self._slots_R, self._positions_R = slots_R, positions_R

    def attend(self, layer: int, q_R1HK: Tensor, k_R1GK: Tensor, v_R1GK: Tensor, window: int) -> Tensor:
        """Attention of one token per row to its slot's positions up to it. An `Attend` of the model."""
        rows = q_R1HK[:, 0], k_R1GK[:, 0], v_R1GK[:, 0]
        given = self.keys[layer], self.values[layer], self._slots_R, self._positions_R
        return attend(*rows, *given, window)[:, None]

    def copy(self, source: int, slots_M: Tensor, length: int) -> None:
        """Copy the first `length` positions of slot `source` to other slots."""
        # Whole pages, unless it is less than one: their positions beyond `length` have no meaning in the target.
        page = self.keys.shape[4]
        pages, within = -(-length // page), min(length, page)
        for each in (self.keys, self.values):
            each[:, slots_M, :pages, :, :within] = each[:, source, None, :pages, :, :within]


class DecodeMemory:
    """The device memory of a generator, zero at first: the cache of all slots; the inputs of a pass over `rows` tokens,
    or `prompt_rows` if all are of prompts, unless it is one call of C (`inputs_4R`: tokens, slots, positions, and the
    number of the next token in its response); and the draws of whole responses. Addresses never change, and `graphs`
    of passes rely on that. `experts_SCLK` are the experts of the token at each position; None unless `size` says that
    they are recorded.

    Raises ValueError as `CacheSize.require_memory` does, which may have passed before the weights were loaded.
    """

    def __init__(self, size: CacheSize, rows: int = 0, prompt_rows: int = 0) -> None:
        size.require_memory()
        config, slots, device = size.config, size.slots, size.device
        self.cache = Cache(size)
        self.rows = max(slots, rows)
        self.prompt_rows = max(self.rows, prompt_rows)
        self.inputs_4R = torch.zeros(4, self.prompt_rows, dtype=torch.long, device=device)
        self.uniform_ST = torch.zeros(slots, size.max_tokens, dtype=torch.float64, device=device)
        shape = slots, size.length, config.num_hidden_layers, config.num_experts_per_tok
        self.experts_SCLK = torch.zeros(shape, dtype=torch.int16, device=device) if size.routes else None
        self.graphs = Graphs()

    def copy(self, source: int, slots_M: Tensor, length: int) -> None:
        """Copy the first `length` positions of slot `source` to other slots."""
        self.cache.copy(source, slots_M, length)
        if self.experts_SCLK is not None:
            self.experts_SCLK[slots_M, :length] = self.experts_SCLK[source, None, :length]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Zeros on a device; on a CPU in pages of 2 MB if the kernel has some."""
    # A step over hundreds of megabytes reads more small pages than the processor's TLB holds (on a virtual machine 12
    # against 17 GB/s).
    made = torch.empty(shape, dtype=dtype, device=device)
    if made.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        first = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (made.data_ptr() + made.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            # If it is refused, the pages are small.
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return made.zero_()


def cache_length(positions: int, context: Context) -> int:
    """Positions of a slot: a prompt of `max_prompt` tokens and a response, at most the `positions` of the model's
    context.

    Raises GraphError for a `max_tokens` that leaves no room for a prompt.
    """
    # Every slot has its cache from the start. No machine has room for the whole context (128k tokens of some models).
    if not 1 <= context.max_tokens < positions:
        needed = f"1 to {positions - 1}: the model's context has {positions} tokens, and a prompt takes at least one"
        raise GraphError(Fault("out-of-range", "--max-tokens", str(context.max_tokens), needed))
    return min(positions, context.max_prompt + context.max_tokens)


def needed_prompt(length: int, context: Context) -> str:
    """The bound on a prompt, or on a conversation so far, in a slot of `length` positions, as a text for errors."""
    most = length - context.max_tokens
    if most == context.max_prompt:
        return f"at most {most} (--max-prompt)"
    return f"at most {most}: the model's context of {length} less --max-tokens {context.max_tokens}"


def room(call: Call) -> None:
    """Requirement of a node that samples: weights of a known model that generates text, whose context has room for a
    response, and prompts that leave room for one.

    It checks the longest prompts of a file, or the first prompts of another source. Raises GraphError.
    """
    spec = spec_of(call, "behaviour")
    if call.context is None or spec is None:
        return
    length, tokenizer = cache_length(spec.config.max_position_embeddings, call.context), spec.tokenizer
    source, most = call.source("prompts"), length - call.context.max_tokens
    rows: list[tuple[str, str, str | None]]
    if isinstance(source, FilePrompts):
        rows = suspects(tokenizer, ((place, text, None) for place, text in source.texts()), most)
    elif isinstance(first := call.first("prompts"), Prompts):
        rows = [(f"group {ordinal}", text, None) for ordinal, text in zip(first.ordinals, first.texts, strict=True)]
    else:
        return
    refuse_long("a prompt", "prompt-too-long", tokenizer, rows, most, needed_prompt(length, call.context))
