"""The decoder equals the reference implementation, its rows do not see each other, and its kernels are exact."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.nodes.model import Llama, ModelConfig, ModelError
from penstock.nodes.model.config import RopeScaling
from penstock.nodes.model.kernels import linear, rms_norm

TINY = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


def tiny(**changes: Any) -> Llama:
    model = Llama(ModelConfig(**{**{s: getattr(TINY, s) for s in ModelConfig.__slots__}, **changes}))
    model.init_weights(3)
    return model


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, TINY.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))


def reference_logits(model: Llama, tokens_BS: Tensor) -> Tensor:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**model.config.to_json())
    reference = transformers.LlamaForCausalLM(config).eval()
    missing, unexpected = reference.load_state_dict(dict(model.named_parameters()), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    with torch.no_grad():
        logits: Tensor = reference(tokens_BS).logits
    return logits


SHAPES: dict[str, dict[str, Any]] = {
    "tied, grouped": {},
    "untied": {"tie_word_embeddings": False},
    "one key-value head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "heads wider than hidden / heads": {"head_dim": 16},
    "linear rope": {"rope_scaling": RopeScaling("linear", 4.0)},
    "llama3 rope": {"rope_theta": 500000.0, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 16)},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_equal_the_reference(shape: dict[str, Any]) -> None:
    model = tiny(**shape)
    tokens_BS = tokens(3, 40)
    with torch.no_grad():
        logits_BSV = model.logits(model(tokens_BS))
    torch.testing.assert_close(logits_BSV, reference_logits(model, tokens_BS), rtol=1e-5, atol=1e-6)


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    model, tokens_BS = tiny(), tokens(2, 12)
    changed = tokens_BS.clone()
    changed[:, 9:] = 0
    with torch.no_grad():
        assert torch.equal(model(tokens_BS)[:, :9], model(changed)[:, :9])


def test_gradients_equal_the_reference() -> None:
    transformers = pytest.importorskip("transformers")
    model, tokens_BS = tiny(), tokens(2, 20)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**model.config.to_json()))
    reference.load_state_dict(dict(model.named_parameters()), strict=False)
    model.logits(model(tokens_BS)).square().sum().backward()  # type: ignore[no-untyped-call]
    reference(tokens_BS).logits.square().sum().backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-5)


def test_a_tied_embedding_is_one_parameter() -> None:
    tied, untied = dict(tiny().named_parameters()), dict(tiny(tie_word_embeddings=False).named_parameters())
    assert untied.keys() - tied.keys() == {"lm_head.weight"}


def test_initial_weights_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first = tiny().state_dict()
    torch.random.manual_seed(99)
    second = tiny().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = tiny()
    other.init_weights(4)
    assert not torch.equal(other.head_weight(), first["model.embed_tokens.weight"])
    torch.random.set_rng_state(before)
    tiny()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_is_made_without_torchs_compiler() -> None:
    """Its import takes as long as torch's, and each rank that has a model would wait for it."""
    code = f"import sys; from penstock.nodes.model import *; Llama({TINY!r}); print('torch._dynamo' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout == "False\n"


def test_bfloat16_is_near_float32() -> None:
    exact = tiny()
    rounded = Llama(exact.config, torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    with torch.no_grad():
        expected, given = exact.logits(exact(tokens(2, 30))), rounded.logits(rounded(tokens(2, 30)))
    assert (given.float() - expected).abs().max() < 0.03 * expected.abs().max()


def test_linear_and_its_gradients_equal_the_ordinary_one() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    grad = torch.randn(3, 5, 6)
    expected = torch.autograd.grad(x @ weight.T, (x, weight), grad)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)
    torch.testing.assert_close(torch.autograd.grad(linear(x, weight), (x, weight), grad), expected)


def test_a_config_comes_back_equal_from_json() -> None:
    for shape in SHAPES.values():
        config = tiny(**shape, eos_token_ids=(3, 5), pad_token_id=4).config
        assert ModelConfig.from_json(config.to_json()) == config


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "said",
    [
        {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 4.0}},
        {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_scaling": LINEAR, "rope_theta": 1e4, "rope_parameters": {**LINEAR, "rope_theta": 5e5}},
    ],
)
def test_two_ways_of_saying_the_rotary_embedding_must_agree(said: dict[str, Any]) -> None:
    base = TINY.to_json()
    with pytest.raises(ModelError, match=r"given rope_scaling .* and rope_parameters .*, which disagree"):
        ModelConfig.from_json({**base, **said})
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {**LINEAR, "rope_theta": 1e4}}
    assert ModelConfig.from_json({**base, "rope_theta": 1e4, **both}).rope_scaling == RopeScaling("linear", 2.0)


def test_a_window_that_no_text_can_outgrow_changes_nothing() -> None:
    data = TINY.to_json()
    longest = data["max_position_embeddings"]
    unused: dict[str, Any] = {"sliding_window": 4, "use_sliding_window": False}
    for said in ({"sliding_window": longest}, {"sliding_window": None}, unused):
        assert ModelConfig.from_json({**data, **said}) == TINY


def test_older_rope_fields_are_read() -> None:
    data = tiny(rope_scaling=RopeScaling("linear", 2.0), rope_theta=5000.0).config.to_json()
    del data["rope_parameters"]
    data["rope_scaling"] = {"type": "linear", "factor": 2.0}
    config = ModelConfig.from_json(data)
    assert (config.rope_scaling, config.rope_theta) == (RopeScaling("linear", 2.0), 5000.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "given model_type 'mamba', needed one of: llama"),
        ({"hidden_act": "gelu"}, "given hidden_act 'gelu', needed 'silu'"),
        ({"attention_bias": True}, "given attention_bias True, needed False"),
        ({"vocab_size": None, "vocab_sizes": 5}, "given vocab_size None.*there is 'vocab_sizes'"),
        ({"sliding_window": 4}, "given sliding_window 4, needed null, or at least max_position_embeddings"),
        ({"layer_types": ["chunked_attention"]}, "given layer_types with 'chunked_attention', needed 'full_attention'"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 4}, "given sliding_window 4"),
        ({"quantization_config": {"quant_method": "awq"}}, "given quantization_config .*awq.*, needed none"),
        ({"partial_rotary_factor": 0.5}, "given partial_rotary_factor 0.5, needed 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "given partial_rotary_factor 0.5, needed 1"),
        ({"num_key_value_heads": 3}, "given 4 attention heads over 3 key-value heads, needed a multiple"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "given rope_type 'yarn', needed one of: default, linear, llama3"),
    ],
)
def test_what_is_not_supported_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_json({**TINY.to_json(), **change})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_and_its_gradients_are_those_of_the_formula(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight_D, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 5, 24), (24,), (3, 5, 24)))
    ours, exact = (
        tuple(t.detach().to(kind, copy=True).requires_grad_() for t in (x, weight_D)) for kind in (dtype, torch.float64)
    )
    found = rms_norm(ours[0], ours[1], 1e-5)
    needed = F.rms_norm(exact[0], (24,), exact[1], 1e-5)
    found.backward(grad)  # type: ignore[no-untyped-call]
    needed.backward(grad.double())  # type: ignore[no-untyped-call]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.double(), needed, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=tolerance, atol=4 * tolerance)


def test_gradients_agree_with_differences() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    weight_D = torch.rand(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x, weight_D))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_the_same_bits_with_gradients_and_without(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight_D = (torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 40, 96), (96,)))
    without = rms_norm(x, weight_D, 1e-5)
    for given in ((x.clone().requires_grad_(), weight_D), (x, weight_D.clone().requires_grad_())):
        assert torch.equal(rms_norm(*given, 1e-5), without)
