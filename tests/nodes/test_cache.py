"""The cache attends in blocks whose number changes no row; what it takes is known before any of it is taken."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.nodes.generate.kv_cache import Cache, MemoryPlan, Prefix, available_bytes, block_bounds
from penstock.nodes.model import Llama, ModelConfig

CONFIG = ModelConfig(40, 32, 40, 2, 4, 2, 8, 64, initializer_range=0.2)
SLOTS = 16


def filled(length: int) -> tuple[Cache, Tensor, Tensor, Tensor]:
    """A cache of random entries, and one step's queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    cache = Cache(CONFIG, SLOTS, length, torch.float32, "cpu")
    for keys_XBK, values_XBK in cache.blocks(1):
        keys_XBK.normal_(generator=generator)
        values_XBK.normal_(generator=generator)
    q, k, v = (torch.randn(SLOTS, 1, heads, 8, generator=generator) for heads in (4, 2, 2))
    return cache, q, k, v


def held(cache: Cache, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a slot in layer 1, [G, C, K]."""
    blocks = [(keys.view(SLOTS, 2, -1, 8)[row], values.view(SLOTS, 2, -1, 8)[row]) for keys, values in cache.blocks(1)]
    return torch.cat([keys for keys, _ in blocks], 1), torch.cat([values for _, values in blocks], 1)


def test_blocks_cover_a_cache_and_do_not_depend_on_its_length() -> None:
    assert block_bounds(20) == [(0, 16), (16, 20)]
    assert block_bounds(1000)[:5] == [(0, 16), (16, 32), (32, 64), (64, 128), (128, 256)]
    assert [end for _, end in block_bounds(1000)][4:] == [256, 512, 768, 1000]


def test_blocks_beyond_a_row_do_not_change_its_bits() -> None:
    cache, q_S1HK, k_S1GK, v_S1GK = filled(600)
    outs = []
    for reach in (41, 600):
        cache.begin(torch.arange(25, 41), reach)
        outs.append(cache.attend(1, q_S1HK, k_S1GK, v_S1GK))
    assert torch.equal(outs[0], outs[1])


def test_attention_by_blocks_is_attention() -> None:
    cache, q_S1HK, k_S1GK, v_S1GK = filled(600)
    positions_S = torch.arange(SLOTS) * 39 + 3
    cache.begin(positions_S, 600)
    out_S1HK = cache.attend(1, q_S1HK, k_S1GK, v_S1GK)
    for row, position in enumerate(positions_S.tolist()):
        keys_HCK, values_HCK = (x[:, : position + 1].repeat_interleave(2, 0) for x in held(cache, row))
        expected_H1K = F.scaled_dot_product_attention(q_S1HK[row].transpose(0, 1), keys_HCK, values_HCK)
        torch.testing.assert_close(out_S1HK[row].transpose(0, 1), expected_H1K)
        assert torch.equal(keys_HCK[0, position], k_S1GK[row, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_on_a_cache_equals_the_whole_forward(dtype: torch.dtype) -> None:
    model = Llama(CONFIG, dtype)
    model.init_weights(0)
    tokens_SC = torch.randint(0, 40, (SLOTS, 30), generator=torch.Generator().manual_seed(1))
    cache, prefix = Cache(CONFIG, SLOTS, 64, dtype, "cpu"), Prefix()
    with torch.no_grad():
        whole_SCD = model(tokens_SC)
        model(tokens_SC[:, :10], None, prefix.attend)
        order = torch.randperm(SLOTS)
        cache.place(prefix, order, order)
        for position in range(10, 30):
            positions_S = torch.full((SLOTS,), position)
            cache.begin(positions_S, position + 1)
            step_S1D = model(tokens_SC[:, position, None], positions_S[:, None], cache.attend)
            error_SD = (step_S1D[:, 0] - whole_SCD[:, position]).float().abs()
            assert error_SD.max() < (1e-4 if dtype == torch.float32 else 0.15)
            assert error_SD.mean() < (1e-5 if dtype == torch.float32 else 0.02)


SMALL = ModelConfig(40, 32, 40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


def room(slots: int, dtype: torch.dtype = torch.float32) -> MemoryPlan:
    return MemoryPlan(SMALL, slots, length=72, max_tokens=8, dtype=dtype, device="cpu")


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
