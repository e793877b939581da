"""Gemma 3 computes the same as in `transformers`, in whatever form its `config.json` is, or is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock.graph.context import Context
from penstock.graph.types import Rollouts, Weights
from penstock.nodes.generate import make_engine
from penstock.nodes.generate.engines import engine_lacks
from penstock.nodes.learn.logprobs import packed_logprobs
from penstock.nodes.model import CausalLM, ModelConfig, ModelError, load_model, read_config
from penstock.nodes.open_model import directory_spec
from penstock.nodes.policy import LanguagePolicy, make_policy
from penstock.runtime.plan.model_shape import read_shape
from tests.nodes.family_cases import CONFIGS, config_of, directory, random_model
from tests.nodes.test_generate import run
from tests.nodes.tiny_model import model, save

CONFIG = config_of("gemma3_text", ModelConfig(301, 36, 52, 3, 6, 2, 10, 128))
TOKENS = torch.randint(0, 301, (2, 50), generator=torch.Generator().manual_seed(0))
# Value of a key that is taken out.
OUT: Any = object()
OLD: dict[str, Any] = {"rope_parameters": OUT}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 8.0}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def write(folder: Path, **changes: Any) -> None:
    """Write a model's directory with another `config.json`."""
    save(random_model(CONFIG), folder)
    data = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in data.items() if value is not OUT}))


@pytest.mark.parametrize(
    "changes",
    [
        OLD,
        {**OLD, "layer_types": OUT},
        {**OLD, "layer_types": None, "sliding_window_pattern": 2},
        {"layer_types": OUT, "sliding_window_pattern": 1},
        {"layer_types": OUT, "max_window_layers": 1},
        {"sliding_window_pattern": 1},
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": ["sliding_attention"] * 3},
        {"sliding_window": OUT},
        {"sliding_window": 1},
        {"sliding_window": 4096},
        {**OLD, "rope_scaling": LINEAR},
        {**OLD, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}},
        {**OLD, "rope_theta": OUT, "rope_local_base_freq": OUT},
        {**OLD, "rope_theta": 300000, "rope_local_base_freq": 7e3},
        {"rope_theta": 3e5, "rope_local_base_freq": 7e3},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 2e4}}},
        {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 5e5}}, "rope_theta": OUT},
        {"rope_parameters": {"full_attention": None, "sliding_attention": None}},
        {"rope_parameters": {}},
        {"query_pre_attn_scalar": OUT},
        {"query_pre_attn_scalar": 168},
        {"hidden_activation": OUT, "use_bidirectional_attention": None, "rms_norm_eps": OUT},
        {"eos_token_id": [1, 106]},
        {"eos_token_id": OUT, "bos_token_id": OUT, "pad_token_id": OUT},
    ],
)
def test_a_file_says_what_it_says_to_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, **changes)
    ours, theirs = load_model(CausalLM, tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(TOKENS)), theirs(TOKENS).logits, rtol=0, atol=1e-5)
    stops = theirs.config.eos_token_id
    assert ours.config.eos_token_ids == tuple(stops if isinstance(stops, list) else [] if stops is None else [stops])
    for name in ("bos_token_id", "pad_token_id", "query_pre_attn_scalar", "rms_norm_eps", "sliding_window"):
        assert getattr(ours.config, name) == getattr(theirs.config, name)
    assert list(ours.config.layer_types) == theirs.config.layer_types
    # The files that we write say the same.
    save(ours, tmp_path / "again")
    assert read_config(tmp_path / "again") == ours.config
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0, needed nothing"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0, needed nothing"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True, needed False"),
        ({"attention_bias": True}, "attention_bias True, needed False"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1, needed 0.0"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu', needed 'gelu_pytorch_tanh'"),
        ({"sliding_window": None}, "sliding_window None, needed a number of tokens"),
        ({"sliding_window": 0}, "sliding_window 0, needed a number of tokens"),
        ({"use_sliding_window": False}, "use_sliding_window False with sliding_window 7, needed none"),
        ({"layer_types": ["chunked_attention"] * 3}, "needed 'full_attention' or 'sliding_attention' for each layer"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types of 2 layers, needed 3"),
        ({"layer_types": OUT, "sliding_window_pattern": 0}, "sliding_window_pattern 0, needed a positive"),
        ({"rope_parameters": LINEAR}, "needed an object for each of full_attention, sliding_attention"),
        ({"rope_parameters": {"chunked_attention": {}}}, "needed an object for each of full_attention, sliding_att"),
        ({"rope_parameters": {"sliding_attention": LINEAR}}, "of sliding_attention, needed rope_type 'default'"),
        ({"rope_scaling": LINEAR}, "which disagree"),
        ({**OLD, "rope_scaling": {"type": "linear", "factor": 8.0}}, "needed rope_type in place of type"),
        ({**OLD, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope_type 'dynamic', needed one of"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, needed 1"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0, needed a positive"),
        ({"query_pre_attn_scalar": 10.5}, "query_pre_attn_scalar 10.5, needed a positive"),
        ({"rope_local_base_freq": 0}, "rope_local_base_freq 0, needed a number above 0"),
        ({"head_dim": 7}, "head_dim 7, needed an even one"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ModelError, match=re.escape(said)):
        read_config(tmp_path)


def test_sizes_that_a_file_leaves_out_are_those_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    ours, theirs = read_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name)
    shape = read_shape(str(tmp_path))
    assert (shape.vocab, shape.hidden, shape.inner, shape.layers) == (262208, 2304, 9216, 26)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.tied, shape.context) == (8, 4, 256, True, 131072)


def test_an_untrained_model_norms_and_no_more() -> None:
    for name, parameter in model(config=CONFIG).named_parameters():
        assert not name.endswith("norm.weight") or not parameter.any()


def test_packed_sequences_learn_what_each_of_them_does_in_transformers(tmp_path: Path) -> None:
    """Rows outgrow the window, and the prompt of several responses is packed once."""
    folder = directory("gemma3_text", tmp_path)
    learner = make_policy(Context(node="policy", seed=1, updates=9, model=folder))
    assert isinstance(learner, LanguagePolicy)
    context = Context(node="generate", seed=3, model=folder, slots=32, max_tokens=40, batch=1)
    found = run(make_engine(context, samples=3), range(3), Weights(0, learner.weights()))
    rollouts = Rollouts.concat([each for each, _ in found.values()])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    needed = list[Tensor]()
    for tokens_S, prompt, response in zip(
        rollouts.tokens_NS, rollouts.prompt_lengths_N.tolist(), rollouts.response_lengths_N.tolist(), strict=True
    ):
        logprobs_SV = theirs(tokens_S[None, : prompt + response]).logits[0].log_softmax(-1)
        needed.append(logprobs_SV[prompt - 1 : -1].gather(1, tokens_S[prompt : prompt + response, None]).sum())
    torch.stack(needed).sum().backward()  # type: ignore[no-untyped-call]
    ours, total = load_model(CausalLM, folder), torch.zeros(())
    for packed in learner.pack(rollouts):
        assert packed.starts_C is not None
        total = total + packed_logprobs(ours, packed)[0].sum()
    total.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(total, torch.stack(needed).sum(), rtol=1e-5, atol=0)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-3, msg=name)


def test_what_vllm_is_not_shown_to_do_with_it_is_refused(tmp_path: Path) -> None:
    spec = directory_spec(directory("gemma3_text", tmp_path))
    assert spec.config == CONFIGS["gemma3_text"]
    assert [given for given, _ in engine_lacks("vllm", Context(device="cuda:0"), 1.0, spec)] == ["a gemma3_text"]
    assert not engine_lacks("penstock", Context(), 1.0, spec)
