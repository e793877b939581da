"""A pass in C computes the same as the model's own forward pass, and each row depends on itself alone."""

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.nodes.generate import decode
from penstock.nodes.generate.decode import DecodePass
from penstock.nodes.generate.kv_cache import Cache, CacheSize
from penstock.nodes.generate.sampling import Sampler
from penstock.nodes.model import CausalLM, Lora, ModelConfig
from penstock.nodes.model.eight_bit import QuantisedRows
from tests.nodes.family_cases import config_of

# Numbers of heads, widths and words that are no multiples of a processor's vectors and tiles, and some that are. Inner
# widths are more than what is multiplied at a time, and so are the slots.
ODD = ModelConfig(53, 36, 427, 3, 4, 2, 6, 64, initializer_range=0.2)
EVEN = ModelConfig(64, 64, 448, 2, 4, 4, 32, 64, initializer_range=0.2, tie_word_embeddings=True)
SLOTS, LENGTH = 144, 24
PROCESSOR = Path("/proc/cpuinfo").read_text()
# Compiler flags for x86 with tiles, without them, without products of bfloat16, and with AVX2 alone.
AVX2 = "-mno-avx512f -mno-amx-int8 -Wno-psabi"
LACKS = ["", "-mno-amx-bf16 -mno-amx-int8", "-mno-amx-bf16 -mno-avx512bf16", AVX2]
pytestmark = pytest.mark.skipif("avx2" not in PROCESSOR, reason="a CPU without AVX2")
VNNI = "avx512_vnni" if "avx512f" in PROCESSOR else "avx_vnni"
needs_vnni = pytest.mark.skipif(VNNI not in PROCESSOR, reason="a CPU without VNNI")


@pytest.fixture(params=LACKS if "avx512f" in PROCESSOR else LACKS[:1])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} {request.param}")
    decode._functions.cache_clear()
    yield
    decode._functions.cache_clear()


def random(config: ModelConfig, dtype: torch.dtype) -> CausalLM:
    """Return a model whose biases are not zero and whose norms have weights other than one."""
    model = CausalLM(config, dtype)
    model.init_weights(0)
    for number, parameter in enumerate(model.parameters()):
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 4
            parameter.data += noise.to(dtype)
    return model.requires_grad_(False)


def in_eight_bits(model: CausalLM) -> CausalLM:
    """Return the model with the weights of its layers in int8."""
    wide = {name: parameter.detach() for name, parameter in model.named_parameters()}
    model.quantise("int8")
    for name, parameter in model.own_parameters().items():
        if parameter.dtype == torch.int8:
            rows = QuantisedRows.of(wide[name], torch.int8)
            parameter.data = rows.elements
            model.own_parameters()[f"{name}.scale"].data = rows.scales[:, 0].clone()
    return model


def packed(model: CausalLM) -> DecodePass:
    made = DecodePass.of(model)
    assert made is not None
    made.pack()
    return made


def filled(model: CausalLM) -> Cache:
    cache = Cache(CacheSize(model.config, SLOTS, LENGTH, 8, model.dtype, "cpu"))
    generator = torch.Generator().manual_seed(1)
    for each in (cache.keys, cache.values):
        each.copy_(torch.randn(each.shape, generator=generator))
    return cache


def rows(count: int) -> Tensor:
    """Return tokens, slots in any order, and positions; one slot has two successive tokens."""
    generator = torch.Generator().manual_seed(count)
    tokens_R = torch.randint(53, (count,), generator=generator)
    slots_R = torch.randperm(SLOTS, generator=generator)[:count]
    positions_R = torch.randint(LENGTH - 2, (count,), generator=generator)
    if count > 1:
        slots_R[-1], positions_R[-1] = slots_R[0], positions_R[0] + 1
    return torch.stack([tokens_R, slots_R, positions_R])


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("count", [1, 7, 16, 45, 65, 130])
@pytest.mark.parametrize(
    "config", [ODD, EVEN, *(config_of(name, ODD) for name in ("mistral", "qwen2", "qwen3", "gemma3_text"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_is_the_models_own(config: ModelConfig, dtype: torch.dtype, count: int) -> None:
    model = random(config, dtype)
    caches, given = [filled(model) for _ in range(2)], rows(count)
    tokens_R, slots_R, positions_R = given
    caches[0].begin(slots_R, positions_R)
    expected_RD = model(tokens_R[:, None], positions_R[:, None], caches[0].attend)[:, 0]
    made = packed(model)
    found_RD = made.hidden(given.numpy(), caches[1])
    pairs = [(expected_RD, found_RD), (model.logits(expected_RD), made.logits(found_RD))]
    pairs += [(caches[0].keys, caches[1].keys), (caches[0].values, caches[1].values)]
    for expected, found in pairs:
        scale = expected.float().abs().max()
        assert (found - expected).float().abs().max() < scale * (2e-6 if dtype == torch.float32 else 0.02)


@needs_vnni
@pytest.mark.parametrize("lacks", ["", "-mno-amx-int8", "-mno-amx-bf16 -mno-avx512bf16", AVX2])
@pytest.mark.parametrize("count", [1, 7, 45, 130])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_in_eight_bits_is_the_models_own_to_the_bit(
    dtype: torch.dtype, name: str, count: int, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} {lacks}")
    monkeypatch.setattr(decode, "_functions", functools.cache(decode._functions.__wrapped__))
    if lacks == AVX2 and "avx_vnni" not in PROCESSOR:
        pytest.skip("a CPU without VNNI of 256 bits")
    model = in_eight_bits(random(config_of(name, ODD), dtype))
    model.model.embed_tokens.weight[::2] = 0  # rows that are all 0
    caches, given = [filled(model) for _ in range(2)], rows(count)
    tokens_R, slots_R, positions_R = given
    caches[0].begin(slots_R, positions_R)
    expected_RD = model(tokens_R[:, None], positions_R[:, None], caches[0].attend)[:, 0]
    found_RD = packed(model).hidden(given.numpy(), caches[1])
    assert torch.equal(found_RD, expected_RD)
    assert torch.equal(caches[1].keys, caches[0].keys)
    assert torch.equal(caches[1].values, caches[0].values)


@needs_vnni
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_none_stays_in_its_row_in_eight_bits(bad: float) -> None:
    model, given = in_eight_bits(random(EVEN, torch.float32)), rows(17)
    given[1] = torch.arange(17)
    given[0] = torch.where(given[0] == 5, 6, given[0])
    given[0, 3] = 5
    model.model.embed_tokens.weight[5, 7] = bad
    caches = [filled(model) for _ in range(2)]
    caches[0].begin(given[1], given[2])
    expected_RD = model(given[0][:, None], given[2][:, None], caches[0].attend)[:, 0]
    found_RD = packed(model).hidden(given.numpy(), caches[1])
    assert found_RD.isfinite().all(1).tolist() == [row != 3 for row in range(17)]
    pairs = [(expected_RD, found_RD), (caches[0].keys, caches[1].keys), (caches[0].values, caches[1].values)]
    for expected, found in pairs:
        assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("config", [ODD, EVEN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["", "int8"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    config: ModelConfig, dtype: torch.dtype, precision: str
) -> None:
    model, given = random(config, dtype), rows(SLOTS)
    if precision and DecodePass.of(in_eight_bits(model)) is None:
        pytest.skip("a processor without products of int8")
    made = packed(model)
    given[1, -1] = torch.arange(SLOTS).sum() - given[1, :-1].sum()  # each row has a slot of its own
    together_RD = made.hidden(given.numpy(), filled(made.model))
    logits_RV = made.logits(together_RD)
    for some in (slice(0, 1), slice(3, 20), slice(7, 39), slice(40, 129), torch.arange(SLOTS).flip(0)):
        threads = torch.get_num_threads()
        torch.set_num_threads(3 - min(2, threads))
        found_RD = made.hidden(given[:, some].contiguous().numpy(), filled(made.model))
        found_RV = made.logits(found_RD)
        torch.set_num_threads(threads)
        assert torch.equal(found_RD, together_RD[some])
        assert torch.equal(found_RV, logits_RV[some])


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("count", [0, 1, 17, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_a_pass_are_drawn_as_from_its_logits(dtype: torch.dtype, count: int) -> None:
    made, given, steps = packed(random(EVEN, dtype)), rows(130), 5
    uniform_ST = torch.rand(SLOTS, steps, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    numbers_R = torch.arange(130) % steps
    inputs_4R, cache = torch.cat([given, numbers_R[None]]).numpy(), filled(made.model)
    tokens_N, logprobs_N = made.sample(inputs_4R, count, cache, uniform_ST, 0.7)
    expected = filled(made.model)
    logits_NV = made.logits(made.hidden(given.numpy(), expected)[:count])
    drawn_N, their_logprobs_N = Sampler(0.7)(logits_NV, uniform_ST[given[1], numbers_R][:count])
    assert (tokens_N.tolist(), logprobs_N.tolist()) == (drawn_N.tolist(), their_logprobs_N.tolist())
    assert torch.equal(cache.keys, expected.keys)
    assert torch.equal(cache.values, expected.values)


@pytest.mark.parametrize("precision", ["", pytest.param("int8", marks=needs_vnni)])
def test_weights_are_those_of_the_last_packing(precision: str) -> None:
    models = [random(replace(ODD, initializer_range=width), torch.float32) for width in (0.2, 0.3)]
    if precision:
        models = [in_eight_bits(model) for model in models]
    made, given = packed(models[0]), rows(16)
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        own.data = other.data
    made.pack()
    expected = packed(models[1])
    found_RD = made.hidden(given.numpy(), filled(models[0]))
    assert torch.equal(found_RD, expected.hidden(given.numpy(), filled(models[0])))
    assert torch.equal(made.logits(found_RD), expected.logits(found_RD))


@pytest.mark.parametrize("kind", ["adapters", "experts", "fp8", "invariant", "no compiler", "no VNNI", "no AVX2"])
def test_other_models_and_machines_have_no_such_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"lora": Lora(4, 8.0)} if kind == "adapters" else {}
    model = CausalLM(config_of("qwen3_moe", ODD) if kind == "experts" else ODD, **given)
    if kind in ("fp8", "no VNNI"):
        model.quantise("fp8" if kind == "fp8" else "int8")
    if kind == "invariant":
        model.be_invariant()
    if kind == "no compiler":
        monkeypatch.setattr(decode, "_functions", lambda _: None)
    if kind in ("no AVX2", "no VNNI"):
        without = "-mno-avx512vnni -mno-avxvnni" if kind == "no VNNI" else "-mno-avx512f -mno-avx2 -Wno-psabi"
        monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} {without}")
        monkeypatch.setattr(decode, "_functions", decode._functions.__wrapped__)
    assert DecodePass.of(model) is None
