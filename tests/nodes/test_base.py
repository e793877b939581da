"""Every pool of a run opens the same model."""

from dataclasses import replace
from pathlib import Path

import torch

from penstock.graph.types import Context
from penstock.nodes.model import Llama, save_model
from penstock.nodes.open_model import ALPHABET, initial_model, open_model

CONTEXT = Context(node="policy", seed=3)


def equal(a: Llama, b: Llama) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_without_a_directory_the_model_is_drawn_from_the_seed() -> None:
    first, _ = open_model(CONTEXT)
    assert equal(first, open_model(replace(CONTEXT, node="generate"))[0])
    assert not equal(first, open_model(replace(CONTEXT, seed=4))[0])


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
    model, tokenizer = open_model(CONTEXT)
    save_model(model, tmp_path)
    tokenizer.save(tmp_path)
    context = replace(CONTEXT, model=str(tmp_path), dtype="bfloat16", seed=99)
    opened, same = open_model(context)
    assert next(opened.parameters()).dtype == torch.bfloat16
    assert equal(open_model(context, "float32")[0], model)
    assert same.encode("12+3=") == tokenizer.encode("12+3=")
