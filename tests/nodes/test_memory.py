"""What a generator's memory takes is known before any of it is taken."""

import pytest
import torch

from penstock.nodes.generate.kv_cache import MemoryPlan, available_bytes
from penstock.nodes.model import ModelConfig

CONFIG = ModelConfig(40, 32, 40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


def room(slots: int, dtype: torch.dtype = torch.float32) -> MemoryPlan:
    return MemoryPlan(CONFIG, slots, length=72, max_tokens=8, dtype=dtype, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_the_cache_is_known_ahead(dtype: torch.dtype) -> None:
    cache = room(16, dtype).take().cache
    tensors = [tensor for layer in range(3) for pair in cache.blocks(layer) for tensor in pair]
    assert room(16, dtype).cache_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_memory_is_taken_as_zeros() -> None:
    memory = room(16).take()
    assert not any(x.any() for x in (memory.tokens_S, memory.logits_SV, memory.uniform_TS))
    assert not any(x.any() for pair in memory.cache.blocks(2) for x in pair)


def test_a_cache_that_does_not_fit_is_an_error_that_says_what_to_give() -> None:
    slots, entries = 10**10, 3 * 2 * 8  # keys or values of a position: layers, heads, width of a head
    needed = 2 * entries * 72 * slots * 4
    flags = r"fewer --slots or fewer --max-tokens, or the program an option max_prompt .* below 64"
    for use in (room(slots).check, room(slots).take):
        with pytest.raises(
            ValueError, match=rf"{slots} slots of 72 positions.* {needed} bytes .* at most the \d+ bytes .*{flags}"
        ):
            use()


def test_what_is_available_is_some_memory() -> None:
    assert 0 < available_bytes("cpu") < 1 << 60
