"""Model directories: what is written is read back by us and by transformers, and faults are named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.nodes.model import Llama, ModelConfig, ModelError, load_model, read_config, save_model
from penstock.nodes.tokenizer import byte_tokenizer, load_tokenizer


def tiny(tied: bool = True) -> Llama:
    model = Llama(ModelConfig(300, 32, 48, 2, 4, 2, 8, 64, tie_word_embeddings=tied, eos_token_ids=(256,)))
    model.init_weights(1)
    return model


def logits(model: Llama) -> Tensor:
    with torch.no_grad():
        return model.logits(model(torch.arange(60).view(2, 30)))


def broken(folder: Path, name: str, tensor: Tensor | None) -> Path:
    """The directory with one tensor changed, or taken out."""
    save_model(tiny(), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors if tensor is None else {**tensors, name: tensor}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 10_000])
def test_transformers_loads_what_is_written_with_the_same_logits(tmp_path: Path, tied: bool, shard_bytes: int) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny(tied)
    save_model(model, tmp_path, shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == 10_000)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = reference(torch.arange(60).view(2, 30)).logits
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits(load_model(tmp_path)), logits(model))


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
        expected = reference(torch.arange(60).view(2, 30)).logits
    torch.testing.assert_close(logits(load_model(tmp_path)), expected, rtol=1e-5, atol=1e-6)


def test_weights_are_converted_to_the_wanted_dtype(tmp_path: Path) -> None:
    save_model(tiny(), tmp_path)
    model = load_model(tmp_path, "bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.head_weight(), tiny().head_weight().bfloat16())
    save_model(model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ModelError, match="given dtype 'int3', needed one of: float32"):
        load_model(tmp_path, "int3")


def test_the_tokenizer_is_copied_along(tmp_path: Path) -> None:
    byte_tokenizer("abc").save(tmp_path / "source")
    save_model(tiny(), tmp_path / "copy", tokenizer_from=tmp_path / "source")
    assert load_tokenizer(tmp_path / "copy").encode("cab") == [2, 0, 1]


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing; the model needs 20 tensors"):
        load_model(broken(tmp_path, "model.norm.weight", None))


def test_a_shape_that_does_not_fit_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(ModelError, match=rf"model\.safetensors: {name}: given shape \[8, 32\], needed \[16, 32\]"):
        load_model(broken(tmp_path, name, torch.zeros(8, 32)))


def test_a_tensor_that_would_be_ignored_is_an_error(tmp_path: Path) -> None:
    save_model(tiny(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.bias is not known .*; needed the \d+ tensors of"):
        load_model(tmp_path)


def test_a_directory_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    save_model(tiny(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"given pytorch_model\.bin, needed model\.safetensors"):
        load_model(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"given no weights, needed model\.safetensors"):
        load_model(tmp_path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    save_model(tiny(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        load_model(tmp_path)
    save_model(tiny(), tmp_path, shard_bytes=10_000)
    (tmp_path / "model-00002-of-00005.safetensors").unlink(missing_ok=True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    (tmp_path / sorted(set(index["weight_map"].values()))[1]).unlink(missing_ok=True)
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(tmp_path)


def test_a_config_is_needed_and_must_be_of_a_supported_family(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match=r"config\.json: given model_type 'gpt2', needed one of: llama"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: given something that is not JSON \(.*line 1.*needed a JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json: given JSON of a list, needed an object"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
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
    ],
)
def test_a_value_of_the_config_that_is_none_is_named_by_its_key(
    tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    save_model(tiny(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ModelError, match=rf"config\.json: given {said}"):
        read_config(tmp_path)
