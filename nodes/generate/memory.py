"""What a generator keeps on its device: the cache of all slots, and the tensors of a step. Its size is known ahead.

Shapes: S slots, V vocabulary, T tokens of a response.
"""

from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from penstock.nodes.generate.cache import Cache, stored_dtype
from penstock.nodes.model.config import ModelConfig


@dataclass
class Memory:
    """`tokens_S` were sampled last, and the next ones are from `logits_SV`; `uniform_TS` are whole responses' draws."""

    cache: Cache
    tokens_S: Tensor
    logits_SV: Tensor
    uniform_TS: Tensor


@dataclass(frozen=True)
class Room:
    """How much of it there is: `length` positions for each slot, `max_tokens` of them for a response."""

    config: ModelConfig
    slots: int
    length: int
    max_tokens: int
    dtype: torch.dtype
    device: str

    @property
    def cache_bytes(self) -> int:
        """Keys and values of every layer, for every position of every slot."""
        entries = self.config.num_hidden_layers * self.config.num_key_value_heads * self.config.head_dim
        return 2 * entries * self.length * self.slots * stored_dtype(self.dtype, self.device).itemsize

    def check(self) -> None:
        """Raises ValueError if the device has less memory left than the cache takes."""
        available = available_bytes(self.device)
        if self.cache_bytes > available:
            raise ValueError(
                f"generate: given {self.slots} slots of {self.length} positions, whose keys and values take "
                f"{self.cache_bytes} bytes ({_gib(self.cache_bytes)}), needed at most the {available} bytes "
                f"({_gib(available)}) that {self.device} has left: give fewer --slots or fewer --max-tokens, or the "
                f"program an option max_prompt (tokens of the longest prompt) below {self.length - self.max_tokens}"
            )

    def take(self) -> Memory:
        """All of it, as zeros. Raises ValueError as `check` does: weights have come since it was asked."""
        self.check()
        zeros = torch.zeros
        return Memory(
            Cache(self.config, self.slots, self.length, self.dtype, self.device),
            tokens_S=zeros(self.slots, dtype=torch.long, device=self.device),
            logits_SV=zeros(self.slots, self.config.vocab_size, dtype=self.dtype, device=self.device),
            uniform_TS=zeros(self.max_tokens, self.slots, dtype=torch.float64, device=self.device),
        )


def available_bytes(device: str) -> int:
    """Memory that this process could still take on a device."""
    if torch.device(device).type == "cuda":
        # What torch holds and has not given out counts as taken for the driver.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return int(psutil.virtual_memory().available)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
