"""A scorer is a LlamaForSequenceClassification with one label: transformers reads ours, and we read theirs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.nodes.model import Llama, ModelConfig, ModelError, Scorer, grow_scorer, load_scorer, save_model

TOKENS = torch.arange(1, 61).view(2, 30)
PAD = 0


def config(tied: bool = False) -> ModelConfig:
    return ModelConfig(300, 32, 48, 2, 4, 2, 8, 64, tie_word_embeddings=tied, eos_token_ids=(256,), pad_token_id=PAD)


def scorer() -> Scorer:
    model = Scorer(config())
    model.init_weights(1)
    return model


def numbers(model: Scorer) -> Tensor:
    with torch.no_grad():
        return model.values(model(TOKENS))


def test_transformers_reads_what_is_written_with_the_same_numbers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_model(scorer(), tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "LlamaForSequenceClassification"
    assert theirs.num_labels == 1
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    torch.testing.assert_close(numbers(scorer())[:, -1:], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(numbers(load_scorer(tmp_path)), numbers(scorer()))


def test_what_transformers_writes_is_read_with_the_same_numbers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    theirs = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**shape, **heads, num_labels=1, pad_token_id=PAD)
    ).eval()
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    torch.testing.assert_close(numbers(load_scorer(tmp_path))[:, -1:], expected, rtol=1e-5, atol=1e-6)


def test_a_directory_without_a_head_is_no_reward_model(tmp_path: Path) -> None:
    model = Llama(config())
    model.init_weights(1)
    save_model(model, tmp_path)
    with pytest.raises(
        ModelError, match=r"given a reward model without a head, needed score\.weight \[1, hidden_size\]"
    ):
        load_scorer(tmp_path)


def test_a_head_of_another_shape_is_named(tmp_path: Path) -> None:
    save_model(scorer(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "score.weight": torch.zeros(2, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: score\.weight: given shape \[2, 32\], needed \[1, 32\]"):
        load_scorer(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_scorer_grows_on_any_decoder_with_a_head_of_zero(tmp_path: Path, tied: bool) -> None:
    model = Llama(config(tied))
    model.init_weights(1)
    save_model(model, tmp_path / "language")
    save_model(scorer(), tmp_path / "reward")
    for folder in ("language", "reward"):
        grown = grow_scorer(tmp_path / folder)
        assert grown.score.weight.abs().max() == 0
        with torch.no_grad():
            assert torch.equal(grown(TOKENS), model(TOKENS))


def test_a_decoder_lacks_nothing_but_its_head(tmp_path: Path) -> None:
    model = Llama(config())
    model.init_weights(1)
    save_model(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing"):
        grow_scorer(tmp_path)
