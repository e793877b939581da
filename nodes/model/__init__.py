"""Models: what they look like, what they compute, and their files."""

from penstock.nodes.model.config import ModelConfig, ModelError
from penstock.nodes.model.hf import (
    grow_scorer,
    load_model,
    load_scorer,
    read_config,
    save_model,
    save_tensors,
    torch_dtype,
)
from penstock.nodes.model.llama import Decoder, Llama, Scorer

__all__ = [
    "Decoder",
    "Llama",
    "ModelConfig",
    "ModelError",
    "Scorer",
    "grow_scorer",
    "load_model",
    "load_scorer",
    "read_config",
    "save_model",
    "save_tensors",
    "torch_dtype",
]
