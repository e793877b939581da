"""The decoder and its files equal the reference implementation; a policy's state is complete."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from penstock.graph.protocols import Carried
from penstock.nodes.data import Demonstrations
from penstock.nodes.learn.sft import rollouts_of, sft_update
from penstock.nodes.model import CausalLM, ModelConfig, ModelError, load_model, read_config
from penstock.nodes.model.config import RopeScaling
from penstock.nodes.model.elementwise import rms_norm
from penstock.nodes.model.kernels import linear
from penstock.nodes.model.merge import merge
from penstock.nodes.open_model import ALPHABET, initial_model, open_model
from penstock.nodes.policy import LanguagePolicy, make_reference
from penstock.nodes.tokenizer import Tokenizer, TokenizerError, byte_tokenizer, load_tokenizer
from tests.nodes.tiny_model import export, model, save
from tests.nodes.updating import CONTEXT, equal, policy

# The decoder equals the reference implementation, its rows do not see each other, and its kernels are exact.


TINY = ModelConfig(300, 32, 48, 2, 4, 2, 8, 64, tie_word_embeddings=True)
SHAPES: dict[str, dict[str, Any]] = {
    "tied, grouped": {},
    "untied": {"tie_word_embeddings": False},
    "one key-value head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "heads wider than hidden / heads": {"head_dim": 16},
    "linear rope": {"rope_scaling": RopeScaling("linear", 4.0)},
    "llama3 rope": {"rope_theta": 500000.0, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 16)},
    "several stop tokens": {"eos_token_ids": (3, 5), "pad_token_id": 4},
}


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, TINY.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))


def logits(model: CausalLM, tokens_BS: Tensor) -> Tensor:
    with torch.no_grad():
        return model.logits(model(tokens_BS))


@pytest.mark.parametrize("shard_bytes", [1 << 30, 10_000])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_transformers_loads_what_is_written_with_the_same_logits_and_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], shard_bytes: int
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("penstock.nodes.model.hf.SHARD_BYTES", shard_bytes)
    config, tokens_BS = replace(TINY, **shape), tokens(3, 40)
    ours = model(3, config=config)
    save(ours, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == 10_000)
    assert read_config(tmp_path) == config
    assert torch.equal(logits(load_model(CausalLM, tmp_path), tokens_BS), logits(ours, tokens_BS))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(ours.logits(ours(tokens_BS)), theirs(tokens_BS).logits, rtol=1e-5, atol=1e-6)
    ours.logits(ours(tokens_BS)).square().sum().backward()  # type: ignore[no-untyped-call]
    theirs(tokens_BS).logits.square().sum().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_writes_is_loaded_with_the_same_logits(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 5e5, "original_max_position_embeddings": 16, **scaling},
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    with torch.no_grad():
        expected = reference(tokens(2, 30)).logits
    torch.testing.assert_close(logits(load_model(CausalLM, tmp_path), tokens(2, 30)), expected, rtol=1e-5, atol=1e-6)


def test_a_second_head_beside_tied_embeddings_is_refused_unless_it_is_equal(tmp_path: Path) -> None:
    """`transformers` would compute with the head in the file."""
    save(model(config=TINY), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    assert torch.equal(
        logits(load_model(CausalLM, tmp_path), tokens(2, 9)), logits(model(config=TINY).eval(), tokens(2, 9))
    )
    head[7] += 1
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"another lm_head\.weight than model\.embed_tokens\.weight, needed equal"):
        load_model(CausalLM, tmp_path)


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    made, tokens_BS = model(config=TINY), tokens(2, 12)
    changed = tokens_BS.clone()
    changed[:, 9:] = 0
    with torch.no_grad():
        assert torch.equal(made(tokens_BS)[:, :9], made(changed)[:, :9])


def test_initial_weights_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first, other = model(3).state_dict(), model(4).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.random.manual_seed(99)
    second = model(3).state_dict()
    torch.random.set_rng_state(before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_model_is_made_without_torchs_compiler() -> None:
    """Its import takes as long as torch's, and each rank that has a model would wait for it."""
    code = f"import sys; from penstock.nodes.model import *; CausalLM({TINY!r}); print('torch._dynamo' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout == "False\n"


def test_weights_are_converted_to_the_wanted_dtype(tmp_path: Path) -> None:
    exact = model(config=TINY)
    save(exact, tmp_path)
    rounded = load_model(CausalLM, tmp_path, "bfloat16")
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}
    assert all(torch.equal(p, q.bfloat16()) for p, q in zip(rounded.parameters(), exact.parameters(), strict=True))
    expected, given = logits(exact, tokens(2, 30)), logits(rounded, tokens(2, 30))
    assert (given.float() - expected).abs().max() < 0.03 * expected.abs().max()
    save(rounded, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ModelError, match="given dtype 'int3', needed one of: float32"):
        load_model(CausalLM, tmp_path, "int3")


def test_linear_and_its_gradients_equal_the_ordinary_one() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    grad = torch.randn(3, 5, 6)
    expected = torch.autograd.grad(x @ weight.T, (x, weight), grad)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)
    torch.testing.assert_close(torch.autograd.grad(linear(x, weight), (x, weight), grad), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_and_its_gradients_are_those_of_the_formula(dtype: torch.dtype) -> None:
    """The bits are the same with gradients and without."""
    generator = torch.Generator().manual_seed(0)
    x, weight_D, grad = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 40, 96), (96,), (7, 40, 96))
    )
    ours, exact = (
        tuple(t.detach().to(kind, copy=True).requires_grad_() for t in (x, weight_D)) for kind in (dtype, torch.float64)
    )
    found = rms_norm(ours[0], ours[1], 1e-5)
    for given in ((x, weight_D), (ours[0], weight_D), (x, ours[1])):
        assert torch.equal(rms_norm(*given, 1e-5), found)
    needed = F.rms_norm(exact[0], (96,), exact[1], 1e-5)
    found.backward(grad)  # type: ignore[no-untyped-call]
    needed.backward(grad.double())  # type: ignore[no-untyped-call]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.double(), needed, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=tolerance, atol=10 * tolerance)


def test_gradients_of_the_norm_agree_with_differences() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    weight_D = torch.rand(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x, weight_D))


LINEAR = {"rope_type": "linear", "factor": 2.0}
OLD_LINEAR = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"rope_scaling": OLD_LINEAR, "rope_theta": 5e3, "rope_parameters": None}, (5e3, RopeScaling("linear", 2.0))),
        (
            {"rope_scaling": OLD_LINEAR, "rope_parameters": {**LINEAR, "rope_theta": 1e4}},
            (1e4, RopeScaling("linear", 2.0)),
        ),
        ({"sliding_window": 64}, (1e4, None)),  # no text can outgrow it
        ({"sliding_window": None}, (1e4, None)),
        ({"sliding_window": 4, "use_sliding_window": False}, (1e4, None)),
    ],
)
def test_older_and_unused_fields_of_a_config_are_read(said: dict[str, Any], found: Any) -> None:
    config = ModelConfig.from_json({**TINY.to_json(), **said})
    assert (config.rope_theta, config.rope_scaling) == found
    assert replace(config, rope_theta=1e4, rope_scaling=None) == TINY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba', needed one of: llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu', needed 'silu'"),
        ({"attention_bias": True}, "attention_bias True, needed False"),
        ({"vocab_size": None, "vocab_sizes": 5}, "vocab_size None.*there is 'vocab_sizes'"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\], needed one of: llama"),
        ({"sliding_window": 4}, r"sliding_window 4, needed null, or at least max_position_embeddings \(64\)"),
        ({"sliding_window": 0}, "sliding_window 0, needed a number of tokens, or null"),
        ({"layer_types": ["chunked_attention"]}, r"layer_types \['chunked_attention'\], needed 'full_attention' or"),
        ({"layer_types": 5}, "layer_types 5, needed 'full_attention' or"),
        ({"layer_types": ["full_attention"]}, "layer_types of 1 layers, needed 2"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
            "sliding_window None, needed a number of tok",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000, needed at most"),
        ({"hidden_size": 10**30}, "hidden_size 10+, needed at most"),
        ({"max_position_embeddings": 10**13}, "max_position_embeddings 10+, needed at most"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type \['yarn'\], needed one of: default, linear"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config .*awq.*, needed none"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, needed 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5, needed 1"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}},
            "rope_theta 1 of rope_type 'yarn'",
        ),
        ({"eos_token_id": 2**70}, "eos_token_id 1180591620717411303424, needed a token's number"),
        ({"num_key_value_heads": 3}, "4 attention heads over 3 key-value heads, needed a multiple"),
        (
            {"rope_parameters": {"rope_type": "dynamic"}},
            "rope_type 'dynamic', needed one of: default, linear, llama3, yarn",
        ),
        ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 4.0}}, "rope_scaling .*, which disagree"),
        ({"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 1e4}}, "rope_scaling .*, which disagree"),
        (
            {"rope_scaling": LINEAR, "rope_theta": 1e4, "rope_parameters": {**LINEAR, "rope_theta": 5e5}},
            "rope_scaling .*, which disagree",
        ),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps '1e-5', needed a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan, needed a number above 0"),
        ({"max_position_embeddings": None}, "max_position_embeddings None, needed a positive whole number"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads '2', needed a positive whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers True, needed a positive whole number"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta 'x', needed a number above 0"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor None, needed a number above 0"),
        ({"rope_parameters": [1]}, r"rope_parameters \[1\], needed an object with rope_type"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes', needed true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id '</s>', needed a token's number"),
        ({"pad_token_id": "3"}, "pad_token_id '3', needed null, or one of the 300 words"),
        ({"pad_token_id": 300}, "pad_token_id 300, needed null, or one of the 300 words"),
    ],
)
def test_what_a_config_says_wrongly_is_named_with_its_file(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY.to_json(), **change}))
    with pytest.raises(ModelError, match=rf"config\.json: given {message}"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "given no such file, needed a model's directory"),
        ("a directory", "given what cannot be read: Is a directory, needed a file with a JSON object"),
        ("{", r"given something that is not JSON \(.*line 1.*needed a JSON"),
        ("[]", "given JSON of a list, needed an object"),
    ],
)
def test_a_config_is_a_json_object(tmp_path: Path, text: str | None, said: str) -> None:
    if text == "a directory":
        (tmp_path / "config.json").mkdir()
    elif text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"config\.json: {said}"):
        read_config(tmp_path)


def test_a_directory_that_is_not_there_is_named_and_no_file_in_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent: given no such directory, needed a model's directory .* Hub"):
        read_config(tmp_path / "absent")


def test_the_folder_of_a_run_is_told_with_its_newest_policy(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text('{"format": 3}')
    for number in ("NUMBER", "00000040", "00000080"):
        if number.isdigit():
            (tmp_path / "checkpoints" / number / "policy").mkdir(parents=True)
        with pytest.raises(
            ModelError, match=rf"given the folder of a run, needed a model, such as \S+/{number}/policy"
        ):
            read_config(tmp_path)


# Model directories: faults are named.


def test_one_file_of_weights_goes_before_an_index_beside_it_as_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    save(model(config=TINY), tmp_path)
    monkeypatch.setattr("penstock.nodes.model.hf.SHARD_BYTES", 10_000)
    save(model(config=TINY, seed=2), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, parameter in load_model(CausalLM, tmp_path).named_parameters():
        assert torch.equal(parameter, theirs[name])
        assert torch.equal(parameter, dict(model(config=TINY).named_parameters())[name])


WEIGHTS, INDEX, NORM = "model.safetensors", "model.safetensors.index.json", "model.norm.weight"
KEYS = "model.layers.1.self_attn.k_proj.weight"


def changed(**tensors: Tensor | None) -> Callable[[Path], None]:
    """Return a function that changes some tensors of a directory, or takes them out."""

    def change(folder: Path) -> None:
        found = {**load_file(folder / WEIGHTS), **tensors}
        save_file({name: tensor for name, tensor in found.items() if tensor is not None}, folder / WEIGHTS)

    return change


def indexed(text: str) -> Callable[[Path], None]:
    """Return a function that puts an index in place of a directory's one file."""

    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(text)

    return change


def without_shard(folder: Path) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / sorted(set(weight_map.values()))[1]).unlink()


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (changed(**{NORM: None}), r"given no model\.norm\.weight, needed all 20 tensors"),
        (
            changed(**{KEYS: torch.zeros(8, 32)}),
            rf"{KEYS}: given shape \[8, 32\], needed \[16, 32\]",
        ),
        (changed(**{"model.bias": torch.zeros(32)}), r"given model\.bias, not known .*; needed the \d+ tensors of"),
        (changed(**{NORM: torch.full((32,), torch.nan)}), rf"{NORM}: given NaN or infinity"),
        (changed(**{KEYS: torch.ones(16, 32, dtype=torch.int8)}), rf"{KEYS}: given numbers of I8, needed one of F64"),
        (lambda folder: (folder / WEIGHTS).rename(folder / "x.bin"), r"given x\.bin, needed model\.safetensors"),
        (lambda folder: (folder / WEIGHTS).unlink(), r"given no weights, needed model\.safetensors"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), "cannot be read: .*, needed a whole safetensors file"),
        (
            lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1]),
            r"model\.safetensors: given a file that cannot be read: .*, needed a whole safetensors file: is",
        ),
        (
            lambda folder: (folder / WEIGHTS).write_bytes(
                b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"
            ),
            r"model\.safetensors: given a pointer of Git LFS, needed the file: git lfs pull",
        ),
        (indexed("{}"), "given weight_map None, needed the file of each tensor"),
        (indexed('{"weight_map": {"a": 1}}'), "given weight_map .*, needed the file"),
        (without_shard, r"given no model-00002-of-\d+\.safetensors, needed all files that .*\.index\.json names"),
    ],
)
def test_a_directory_that_is_not_the_models_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: Callable[[Path], None], said: str
) -> None:
    if breaks is without_shard:
        monkeypatch.setattr("penstock.nodes.model.hf.SHARD_BYTES", 10_000)
    save(model(config=TINY), tmp_path)
    breaks(tmp_path)
    for device in ("cpu", "meta"):  # as a run makes it, and as `check` tries it
        with pytest.raises(ModelError, match=said):
            load_model(CausalLM, tmp_path, device=device)


# A policy's state is complete: a restored policy goes on to the bit, and other tools load an exported one.


LESSON = Demonstrations(("12+34=", "50-9="), ("046", "041"))


def learn(learner: LanguagePolicy, steps: int) -> None:
    for _ in range(steps):
        sft_update.fn(learner, LESSON)


def saved(learner: LanguagePolicy) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, facts = learner.state()
    return {name: t.clone() for name, t in tensors.items()}, dict(facts)


def same(a: LanguagePolicy, b: LanguagePolicy) -> bool:
    return equal(a, b) and a.state()[1] == b.state()[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_restored_policy_goes_on_to_the_bit(dtype: str, steps: int) -> None:
    whole, resumed = policy(dtype=dtype), policy(dtype=dtype, seed=2)
    learn(whole, steps)
    resumed.restore(*saved(whole))
    assert same(whole, resumed)
    learn(whole, 2)
    learn(resumed, 2)
    assert same(whole, resumed)
    assert resumed.version == steps + 2


def test_restoring_forgets_what_was_learnt_since() -> None:
    learner = policy()
    state = saved(learner)
    learn(learner, 2)
    learner.restore(*state)
    learn(learner, 1)
    fresh = policy()
    learn(fresh, 1)
    assert same(learner, fresh)


def test_what_a_rank_has_no_elements_of_is_not_restored() -> None:
    """For example, a pipeline stage is given the layers of other stages from a state of another mesh."""
    learner, other = policy(), policy(seed=9)
    tensors, facts = saved(other)
    learner.restore({**tensors, "master.model.layers.9.mlp.up_proj.weight": torch.empty(0, 64)}, facts)
    assert same(learner, other)


def test_the_state_of_another_model_is_refused() -> None:
    learner = policy()
    tensors, facts = saved(learner)
    with pytest.raises(ModelError, match=r"master\.lm_head\.weight.*given shape \[1\]"):
        learner.restore({**tensors, "master.lm_head.weight": torch.zeros(1)}, facts)
    del tensors["master.model.norm.weight"]
    with pytest.raises(ModelError, match=r"master\.model\.norm\.weight"):
        learner.restore(tensors, facts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_policy_is_what_a_run_starts_from_and_transformers_reads(tmp_path: Path, dtype: str) -> None:
    transformers = pytest.importorskip("transformers")
    learner = policy(dtype=dtype)
    learn(learner, 2)
    export(learner, tmp_path)
    loaded = policy(dtype=dtype, model=str(tmp_path), seed=9)
    assert all(torch.equal(w, loaded.weights()[name]) for name, w in learner.weights().items())
    assert loaded.version == 0
    ids = torch.tensor([learner.tokenizer.encode("12+34=")])
    assert loaded.tokenizer.encode("12+34=") == ids[0].tolist()
    text = transformers.AutoTokenizer.from_pretrained(tmp_path)("12+34=", add_special_tokens=False)
    assert text["input_ids"] == ids[0].tolist()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_model(CausalLM, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(ids)), theirs(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize(
    ("settings", "stops"),
    [
        ({"eos_token_id": 258, "do_sample": True, "temperature": 0.7, "pad_token_id": 9}, (258,)),
        ({"eos_token_id": [256], "_from_model_config": True}, (258, 256)),
        ({"do_sample": True}, (258, 256)),
        (None, (258, 256)),
    ],
)
def test_an_exported_policy_stops_where_the_runs_responses_do_and_keeps_the_settings_of_its_base(
    tmp_path: Path, lora: int, settings: dict[str, Any] | None, stops: tuple[int, ...]
) -> None:
    """The tokenizer of the base ends a text otherwise than its config.json, as in mixes of base and chat models."""
    transformers = pytest.importorskip("transformers")
    words, base, folder = byte_tokenizer(), tmp_path / "base", tmp_path / "export"
    words.backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    words.stops = (258,)
    words.save(base)
    prompt = torch.tensor([words.encode("12+34=")])
    made = model(config=replace(TINY, tie_word_embeddings=False, eos_token_ids=(256,), pad_token_id=257))
    with torch.no_grad():
        head_VD = made.state_dict()["lm_head.weight"]
        head_VD[258] = 2 * head_VD[int(made.logits(made(prompt))[0, -1].argmax())]
    save(made, base)
    (base / "generation_config.json").unlink()
    if settings is not None:
        (base / "generation_config.json").write_text(json.dumps(settings))
    learner = policy(model=str(base), lora=lora)
    assert learner.tokenizer.stops == stops
    export(learner, folder)
    assert policy(model=str(folder)).tokenizer.stops == stops
    says = transformers.GenerationConfig.from_pretrained(folder).to_dict()
    assert says["eos_token_id"] == (list(stops) if len(stops) > 1 else stops[0])
    kept = {"pad_token_id": 257} if settings is None else settings
    assert {key: says.get(key) for key in kept.keys() - {"eos_token_id", "_from_model_config"}}.items() <= kept.items()
    if lora:
        (tmp_path / "merged").mkdir()
        merge(folder, tmp_path / "merged")
        folder = tmp_path / "merged"
        assert load_tokenizer(folder).stops == stops
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.generation_config.to_dict() == says
    assert theirs.generate(prompt, do_sample=False, max_new_tokens=4)[0, prompt.shape[1] :].tolist() == [258]


def test_every_pool_opens_the_same_model_and_a_reference_is_frozen() -> None:
    reference, ours = make_reference(CONTEXT), policy().weights()
    assert isinstance(reference, Carried)
    assert isinstance(policy(), Carried)
    for other in (reference.weights(), policy(node="elsewhere").weights()):
        assert all(torch.equal(ours[name], tensor) for name, tensor in other.items())
    assert not torch.equal(policy(seed=2).weights()["lm_head.weight"], ours["lm_head.weight"])
    assert reference.state() == ({}, {})


def test_the_initial_model_reads_arithmetic_by_characters_and_other_data_by_bytes() -> None:
    for data in ("", "arithmetic", "arithmetic:2"):
        config, tokenizer = initial_model(data)
        assert len(tokenizer.encode(ALPHABET)) == len(ALPHABET)
        assert config.vocab_size == tokenizer.vocab_size < 20
        assert config.eos_token_ids == tokenizer.stops
    config, tokenizer = initial_model("problems.jsonl")
    assert tokenizer.decode(tokenizer.encode("How many? é")) == "How many? é"
    assert config.max_position_embeddings >= 1024


def test_a_directory_is_opened_in_the_dtype_asked_for(tmp_path: Path) -> None:
    export(policy(), tmp_path)
    context = replace(CONTEXT, model=str(tmp_path), dtype="bfloat16", seed=99)
    opened, tokenizer = open_model(CausalLM, context)
    assert opened.dtype == torch.bfloat16
    for name, tensor in open_model(CausalLM, context, "float32")[0].state_dict().items():
        assert torch.equal(tensor, policy().weights()[name])
    assert tokenizer.encode("12+3=") == policy().tokenizer.encode("12+3=")


# Tokenizers of bytes or of a directory: decoding gives the encoded text, and a text without tokens is an error.


TEMPLATE = (
    "{{ bos_token }}{%- for message in messages %}\n"
    "[{{ message['role'] }}] {{ message.content | trim }} {{ {'a': 'é<'} | tojson }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def words_folder(folder: Path, **changes: Any) -> Path:
    """Write a directory with a word-level tokenizer that begins each text with <s>."""
    vocab = {
        word: i for i, word in enumerate(["<s>", "</s>", "<end>", "what", "is", "two", "[", "]", "user", "assistant"])
    }
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="two"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<end>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **changes}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_bytes_are_their_own_tokens_or_an_alphabets() -> None:
    tokenizer, text = byte_tokenizer(), "37+58=\n é 数 \x00"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), 256, 257]) == text
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.pad) == (258, 256, 257)
    small = byte_tokenizer("0123456789+-=")
    assert small.vocab_size == 16
    assert small.decode(small.encode("37+58=")) == "37+58="
    assert small.encode_prompt("0") == small.encode("0")
    with pytest.raises(TokenizerError, match=r"given '37\*58', needed a text without '\*'"):
        small.encode("37*58")


def test_a_saved_tokenizer_comes_back_equal(tmp_path: Path) -> None:
    for index, tokenizer in enumerate((byte_tokenizer(), byte_tokenizer("ab <>"))):
        tokenizer.template, tokenizer.stops = "{{ messages[0].content }}", (tokenizer.eos, 0)
        tokenizer.save(tmp_path / str(index))
        again = load_tokenizer(tmp_path / str(index))
        assert again.encode("ab <eos> ba") == tokenizer.encode("ab <eos> ba")
        assert (again.stops, again.pad, again.template) == (tokenizer.stops, tokenizer.pad, tokenizer.template)
        assert again.vocab_size == tokenizer.vocab_size
    transformers = pytest.importorskip("transformers")
    byte_tokenizer().save(tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert other.encode("12 + é") == byte_tokenizer().encode("12 + é")
    assert (other.eos_token_id, other.pad_token_id) == (256, 257)


def test_a_prompt_begins_as_the_model_wants_it_and_a_response_may_end_in_several_ways(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(words_folder(tmp_path))
    assert tokenizer.encode_prompt("what is") == [0, 3, 4]
    assert tokenizer.encode("what is") == [3, 4]
    assert (tokenizer.stops, tokenizer.pad) == ((1,), 1)
    folder = words_folder(tmp_path, pad_token={"content": "<end>"})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.stops, tokenizer.eos, tokenizer.pad) == ((1, 2), 1, 2)
    # If generation_config.json has no stop tokens, those of config.json count, as in transformers.
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": [1, 0]}))
    assert load_tokenizer(folder).stops == (1, 2)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True}))
    assert load_tokenizer(folder).stops == (1, 0)


def test_a_demonstration_ends_as_the_chat_template_ends_a_turn(tmp_path: Path) -> None:
    """Also of a base whose own end is another token. A response may end with either."""
    chat = "{% for m in messages %}what {{ m.content }}{% if m.role == 'assistant' %}%s{% endif %} {% endfor %}is"
    for end, token in (("<end>", 2), ("</s>", 1), ("what", 1)):
        tokenizer = load_tokenizer(words_folder(tmp_path, chat_template=chat.replace("%s", end)))
        assert (tokenizer.end, tokenizer.eos, {*tokenizer.stops}) == (token, 1, {1, token})
        rows = rollouts_of(tokenizer, ["is"], ["what"])
        assert rows.tokens_NS[0, -2:].tolist() == [3, token]
    tokenizer = load_tokenizer(words_folder(tmp_path))
    assert (tokenizer.end, tokenizer.stops) == (1, (1,))


@pytest.mark.parametrize("place", ["tokenizer_config.json", "a list", "chat_template.jinja"])
def test_a_chat_template_gives_the_same_prompt_as_transformers(tmp_path: Path, place: str) -> None:
    transformers = pytest.importorskip("transformers")
    listed = [{"name": "default", "template": TEMPLATE}, {"name": "other", "template": "x"}]
    given: dict[str, Any] = {"tokenizer_config.json": {"chat_template": TEMPLATE}, "a list": {"chat_template": listed}}
    folder = words_folder(tmp_path, **given.get(place, {}))
    if place == "chat_template.jinja":
        (folder / place).write_text(TEMPLATE)
    tokenizer = load_tokenizer(folder)
    message = [{"role": "user", "content": " what is "}]
    other = transformers.AutoTokenizer.from_pretrained(folder)
    expected = other.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render(" what is ") == expected
    assert tokenizer.encode_prompt("what is")[:2] == [0, 6]
    assert tokenizer.encode_prompt("what is").count(0) == 1


def test_variables_of_a_chat_template_give_the_same_prompt_as_transformers(tmp_path: Path) -> None:
    """Qwen3 thinks unless `enable_thinking` is false."""
    transformers = pytest.importorskip("transformers")
    template = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %} is{% endif %}{{ effort }}"
    folder = words_folder(tmp_path, chat_template=template)
    message = [{"role": "user", "content": "what"}]
    other = transformers.AutoTokenizer.from_pretrained(folder)
    said = set[str]()
    for words, given in (
        ((), {}),
        (("enable_thinking=false",), {"enable_thinking": False}),
        (("enable_thinking=False",), {"enable_thinking": False}),
        (("effort=NaN",), {"effort": "NaN"}),
        (["enable_thinking=true", "effort=what is"], {"enable_thinking": True, "effort": "what is"}),
        (("effort=",), {"effort": ""}),
        (("effort=3",), {"effort": 3}),
    ):
        tokenizer = load_tokenizer(folder, words)
        expected = other.apply_chat_template(message, tokenize=False, add_generation_prompt=True, **given)
        assert tokenizer.render("what") == expected
        tokenizer.require_variables(words)
        said.add(expected)
    assert len(said) == 5


@pytest.mark.parametrize("word", ["enable_thinking", "=1", "a b=1", "effort=1"])
def test_words_that_are_no_variables_are_refused(tmp_path: Path, word: str) -> None:
    folder = words_folder(tmp_path, chat_template=TEMPLATE)
    with pytest.raises(TokenizerError, match=r"--chat-template-kwargs: given '.*', needed NAME=VALUE"):
        load_tokenizer(folder, ["effort=1", word])


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "add_generation_prompt", "bos_token"])
def test_variables_that_the_chat_template_does_not_read_are_refused(tmp_path: Path, name: str) -> None:
    read = TEMPLATE + "{{ bos_token }}{% if enable_thinking %} is{% endif %}"
    said = f"given {name}, needed variables that the model's chat template reads: "
    with pytest.raises(TokenizerError, match=f"{said}enable_thinking$"):
        load_tokenizer(words_folder(tmp_path, chat_template=read)).require_variables([f"{name}=1"])
    with pytest.raises(TokenizerError, match=f"{said}there are none$"):
        byte_tokenizer().require_variables([f"{name}=1"])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("tool_use", "rag"), "given chat_template with the names tool_use, rag, needed one named default, or a text"),
        ((), "given an empty list as chat_template, needed one named default"),
    ],
)
def test_templates_without_a_default_are_refused_as_transformers_does(
    tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = words_folder(tmp_path, chat_template=[{"name": name, "template": TEMPLATE} for name in names])
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: {said}"):
        load_tokenizer(folder)
    with pytest.raises(ValueError, match="template"):
        transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "what"}])


def test_a_template_may_mark_what_the_assistant_says_and_ask_for_tools(tmp_path: Path) -> None:
    """The marks are for training on demonstrations, which uses only the marked text."""
    transformers = pytest.importorskip("transformers")
    marked = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}.{% endgeneration %} {% endfor %}"
    marked += "{% if tools is not none or documents is not none %}tools{% endif %}"
    folder = words_folder(tmp_path, chat_template=marked)
    message = [{"role": "user", "content": "what is"}]
    expected = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(message, tokenize=False)
    assert load_tokenizer(folder).render("what is") == expected == "user: what is. "


def test_a_template_that_writes_the_date_says_the_same_on_every_day(tmp_path: Path) -> None:
    folder = words_folder(tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}")
    assert load_tokenizer(folder).render("what is") == "26 Jul 2024: what is"


def test_how_a_tokenizer_was_used_when_it_was_saved_changes_no_prompt(tmp_path: Path) -> None:
    """A tokenizer's file keeps how the last batch was truncated and padded."""
    tokenizer = byte_tokenizer("ab")
    needed = tokenizer.encode("abab")
    tokenizer.backend.enable_truncation(max_length=3)
    tokenizer.backend.enable_padding(length=8)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode("abab") == needed


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (b"{% for m in messages %}", "chat template: given one that fails: Unexpected end of template"),
        (b"{{ foo.bar }}", "one that fails: 'foo' is undefined, needed a template that renders messages of user"),
        (b"{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),  # which could do harm
        (b"{{ raise_exception('only system messages') }}", "only system messages, needed a template that renders"),
        (b"{{ 1 + messages[0].content }}", "fails: TypeError: unsupported operand.*, needed a template that renders"),
        (b"{% for i in range(10 ** 9) %}x{% endfor %}", "fails: OverflowError: Range too big.*, needed a template"),
        (b"hello", "given 'hello' for every question, needed the question in it"),
        (b"\xff\xfe", r"chat_template\.jinja: given a file that cannot be read: 'utf-8' codec.*, needed text in UTF-8"),
    ],
)
def test_a_template_that_cannot_say_a_question_is_refused_with_its_directory(
    tmp_path: Path, template: bytes, said: str
) -> None:
    byte_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(template)
    with pytest.raises(TokenizerError, match=rf"{re.escape(str(tmp_path))}.*{said}"):
        load_tokenizer(tmp_path)


def test_a_directory_without_a_tokenizer_that_can_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": 2}))
    for name, said in (
        ("config.json", r"given no file of a tokenizer, needed tokenizer\.json"),
        ("tokenizer.model", r"given tokenizer\.model, needed tokenizer\.json"),
        ("tokenizer.json", r"tokenizer\.json: given a file that cannot be read: .*, needed one as save_pretrained"),
    ):
        (tmp_path / name).write_text("{")
        with pytest.raises(TokenizerError, match=said):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("generation_config.json", "[3]", r"generation_config\.json: given JSON of a list, needed an object"),
        ("tokenizer_config.json", '{"eos_token": 3}', "given eos_token 3, needed a text"),
        ("tokenizer_config.json", '{"eos_token": {"id": 3}}', r"given eos_token \{'id': 3\}, needed a text"),
        ("generation_config.json", '{"eos_token_id": "x"}', "given eos_token_id 'x', needed a token's number"),
        ("generation_config.json", '{"eos_token_id": 99}', "given eos_token_id 99, needed one of the 5 of tokenizer"),
        ("config.json", '{"vocab_size": 999, "eos_token_id": [2, 900]}', "given eos_token_id 900.*of another model?"),
        ("config.json", '{"vocab_size": 3, "eos_token_id": 0}', "given token 4, needed tokens below 3, the vocab"),
        ("tokenizer_config.json", '{"eos_token": "a", "chat_template": 5}', "given chat_template 5, needed a text"),
        ("tokenizer_config.json", '{"eos_token": "a", "chat_template": ["x"]}', r"chat_template \['x'\], needed a"),
        (
            "tokenizer_config.json",
            '{"eos_token": "a", "chat_template": [{"name": "default"}]}',
            r"given chat_template \{'name': 'default'\}, needed a text, or a list of objects with name and template",
        ),
    ],
)
def test_what_a_tokenizers_files_say_wrongly_is_named(tmp_path: Path, file: str, text: str, said: str) -> None:
    byte_tokenizer("ab").save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / file).write_text(text)
    with pytest.raises(TokenizerError, match=said):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_ordinary_word_that_would_end_every_response_is_refused(tmp_path: Path, file: str) -> None:
    """Stops may be added tokens, special or not, the word that the tokenizer names, and words that have the form of a
    special token."""

    def load(word: str, folder: Path) -> Tokenizer:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        (folder / file).write_text(json.dumps({"vocab_size": 300, "eos_token_id": [1, backend.token_to_id(word)]}))
        return load_tokenizer(folder)

    said = r"given eos_token_id 5, which is the text 'two', needed a special token: a tokenizer of another model\?"
    folder = words_folder(tmp_path)
    with pytest.raises(TokenizerError, match=said):
        load("two", folder)
    assert load("two", words_folder(tmp_path, eos_token="two")).stops == (5, 1)
    # config.json's are not used beside those of generation_config.json.
    other = tmp_path / "both"
    other.mkdir()
    folder = words_folder(other)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    (folder / "config.json").write_text('{"vocab_size": 300, "eos_token_id": 5}')
    assert load_tokenizer(folder).stops == (1,)
    folder = words_folder(tmp_path)
    more = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert more.add_tokens([AddedToken("is", special=False), AddedToken("stop", special=False)]) == 2
    more.save(str(folder / "tokenizer.json"))
    for word in ("is", "stop", "<end>"):
        assert load(word, folder).stops == (1, more.token_to_id(word))
    # In the vocabulary itself: a bracketed word, a new line and a control character.
    for index, word in enumerate(("<|end|>", "\n", "\x03")):
        other = tmp_path / str(index)
        other.mkdir()
        backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1, word: 2}, unk_token="a"))
        backend.add_special_tokens([AddedToken("</s>", special=True)])
        backend.save(str(other / "tokenizer.json"))
        (other / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        assert load(word, other).stops == (1, 2)


def test_a_reply_that_the_template_writes_as_json_is_that_of_transformers(tmp_path: Path) -> None:
    """Llama 3's templates do so with a tool's replies."""
    transformers = pytest.importorskip("transformers")
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}"
        "{{ m.content }}{% endif %}<eos>{% endfor %}assistant: "
    )
    byte_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer, reply = load_tokenizer(tmp_path), 'a "b"\n\\ é'
    talk = [("user", "q"), ("assistant", "a"), ("tool", reply)]
    messages = [{"role": role, "content": text} for role, text in talk]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages)["input_ids"]
    ours = [*tokenizer.encode_prompt("q"), *tokenizer.encode("a"), *tokenizer.encode_reply(reply, "tool", False)]
    assert ours == theirs
    assert tokenizer.decode(tokenizer.encode_reply(reply, "user", True)) == f"user: {reply}assistant: "


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TRIMS = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ eos_token }}{% endfor %}assistant: "


def sentence_pieces(folder: Path, template: str | None, adds: str, ends: str = "") -> Path:
    """Write a tokenizer of letters in the form of Llama 2's, which by `adds` puts a space before each text, before the
    first one, or before none. `ends` is what it puts behind a text."""
    words = [*(f"<0x{value:02X}>" for value in range(256)), "\u2581", *map(chr, range(33, 127))]
    vocab = {word: token for token, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    if adds == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        scheme: Any = adds
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(strip)
    backend.add_special_tokens(["<s>", "</s>"])
    numbers = [(word, backend.token_to_id(word)) for word in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single=f"<s> $A {ends}".strip(), special_tokens=numbers)
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    config |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("adds", ["normalizer", "always", "first", "never"])
@pytest.mark.parametrize("template", [MISTRAL, ZEPHYR, TRIMS])
def test_a_conversation_has_the_tokens_of_transformers_whatever_the_tokenizer_puts_before_a_text(
    tmp_path: Path, template: str, adds: str
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = sentence_pieces(tmp_path / "m", template, adds)
    tokenizer, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for texts in (("q", "a", "42"), ("q 1?", "a, b", " 42\n")):
        said = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]
        first = theirs.apply_chat_template(said[:1], add_generation_prompt=True)["input_ids"]
        whole = theirs.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
        assert tokenizer.encode_prompt(texts[0]) == tokenizer.encode_prompt(texts[0], plain=True) == first
        assert tokenizer.encode_dialogue(texts) == whole
        shown = rollouts_of(tokenizer, texts[:1], texts[1:2])
        assert whole[: shown.tokens_NS.shape[1]] == shown.tokens_NS[0].tolist()
        # What looks like a special token stays text.
        reply = tokenizer.encode_reply(f"{texts[2]}</s>", "tool", after_stop=True)
        assert reply.count(tokenizer.eos) == tokenizer.encode_reply(texts[2], "tool", True).count(tokenizer.eos)
        assert tokenizer.decode(reply).count("</s>") == 1


def test_a_prompt_without_a_template_does_not_end_with_a_token_that_ends_a_response(tmp_path: Path) -> None:
    plain, ended = (sentence_pieces(tmp_path / str(len(ends)), None, "always", ends) for ends in ("", "</s>"))
    assert load_tokenizer(ended).encode_prompt("a b") == load_tokenizer(plain).encode_prompt("a b")
    # After its prompt, a demonstration has no space in front.
    tokenizer = load_tokenizer(plain)
    assert tokenizer.decode(rollouts_of(tokenizer, ["12+34="], ["46"]).tokens_NS[0].tolist()) == "12+34=46"


@pytest.mark.parametrize("file", ["added_tokens_decoder", "additional_special_tokens", "added_tokens.json"])
def test_a_special_token_that_only_another_file_names_is_refused_where_the_template_has_it(
    tmp_path: Path, file: str
) -> None:
    byte_tokenizer().save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    values: dict[str, Any] = {"added_tokens_decoder": {"258": {"content": "<|im_start|>"}}}
    values["additional_special_tokens"] = ["<|im_start|>"]
    if file == "added_tokens.json":
        (tmp_path / file).write_text('{"<|im_start|>": 258}')
    else:
        config[file] = values[file]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": "{{ messages[0].content }}"})
    )
    assert load_tokenizer(tmp_path).encode_prompt("a") == [97]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    with pytest.raises(TokenizerError, match=r"given a tokenizer.json without the token '<\|im_start\|>', needed one"):
        load_tokenizer(tmp_path)


def test_tokens_that_only_the_map_of_special_tokens_names_are_known(tmp_path: Path) -> None:
    folder = sentence_pieces(tmp_path / "m", MISTRAL, "normalizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    whole = load_tokenizer(folder).encode_prompt("q")
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": config.pop("bos_token")}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).encode_prompt("q") == whole


def test_a_special_token_that_the_model_has_no_word_for_is_text(tmp_path: Path) -> None:
    """For example the image token, which Gemma 3's language models lack but their tokenizer has. A token that the model
    needs, or that is not special, means that the tokenizer is another model's."""
    folder = words_folder(tmp_path)
    (folder / "config.json").write_text('{"vocab_size": 10}')
    tokenizer = load_tokenizer(folder)
    for special, changes in ((True, {}), (False, {}), (True, {"pad_token": "[is]"}), (True, {"chat_template": "[is]"})):
        more = tokenizers.Tokenizer.from_file(str(words_folder(tmp_path, **changes) / "tokenizer.json"))
        more.add_tokens([AddedToken("[is]", special=special)])
        more.save(str(folder / "tokenizer.json"))
        if not special or changes:
            with pytest.raises(TokenizerError, match="given token 10, needed tokens below 10"):
                load_tokenizer(folder)
            continue
        found = load_tokenizer(folder)
        assert found.vocab_size == 10
        assert found.encode("what [is] two") == tokenizer.encode("what [ is ] two")
        assert found.encode_prompt("what") == tokenizer.encode_prompt("what") == [0, 3]
        found.save(tmp_path / "saved")
        assert load_tokenizer(tmp_path / "saved").backend.get_vocab() == tokenizer.backend.get_vocab()


def test_a_text_may_say_the_words_of_the_unknown_token(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "unk_token": "<unk>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a <unk> a") == [1, 0, 1]
    with pytest.raises(TokenizerError, match="the tokenizer has no token for it"):
        tokenizer.encode("a <unk> b")
    # In a text of another speaker they are letters.
    spelled = byte_tokenizer("<unk>a")
    assert spelled.decode(spelled.encode_prompt("a<unk>", plain=True)) == "a<unk>"
    with pytest.raises(TokenizerError, match="needed a text without 'b'"):
        spelled.encode_prompt("a<unk>b", plain=True)


def test_a_reply_goes_through_the_template_and_says_no_stop_token_twice(tmp_path: Path) -> None:
    """The template has, after the model's turn: its end, the reply in its role, and the beginning of the next turn."""
    template = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{{ '<end>' if m.role == 'assistant' else ' is ' }}{% endfor %}what"
    )
    tokenizer = load_tokenizer(words_folder(tmp_path, chat_template=template, eos_token="<end>"))
    end, what, is_ = tokenizer.eos, *tokenizer.encode("what is")
    assert tokenizer.encode_reply("what", "user", after_stop=True) == [what, is_, what]
    assert tokenizer.encode_reply("what", "user", after_stop=False) == [end, what, is_, what]
    assert tokenizer.encode_reply("what", "tool", after_stop=True) == [what, is_, what]
    plain = byte_tokenizer()
    assert plain.encode_reply("a<eos>", "tool", after_stop=True) == list(b"a<eos>")
    assert plain.encode("a<eos>") == [97, plain.eos]
    silent = load_tokenizer(words_folder(tmp_path, chat_template="{{ messages[0].content }}"))
    with pytest.raises(TokenizerError, match="needed one that has a 'tool' or user"):
        silent.encode_reply("what", "tool", after_stop=True)
