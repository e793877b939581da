"""The model and the tokenizer of tests that sample: two layers, and weights large enough that words differ."""

from pathlib import Path

import torch

from penstock.graph import Weights
from penstock.graph.protocols import Carried
from penstock.nodes.model import CausalLM, Decoder, ModelConfig, save_model
from penstock.nodes.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer("0123456789+-=abc<eos>")
CONFIG = ModelConfig(
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=96,
    initializer_range=0.25,
    eos_token_ids=TOKENIZER.stops,
)


def model(seed: int = 1, dtype: torch.dtype = torch.float32, config: ModelConfig = CONFIG) -> CausalLM:
    made = CausalLM(config, dtype)
    made.init_weights(seed)
    return made


def weights(version: int = 0, seed: int = 1, dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(version, model(seed, dtype).state_dict())


def save(model: Decoder, folder: Path) -> None:
    save_model(model, model.state_dict(), folder)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in CausalLM(config, device="meta").named_parameters()}


def export(value: Carried, folder: Path | str) -> None:
    """Export a carried value for other tools, and write all of it at once."""
    later = value.export(str(folder))
    if later is not None:
        later()
