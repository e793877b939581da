"""Models: what they look like, what they compute, and their files."""

from penstock.nodes.model.config import ModelConfig, ModelError
from penstock.nodes.model.hf import load_model, read_config, save_model, torch_dtype
from penstock.nodes.model.llama import Llama

__all__ = ["Llama", "ModelConfig", "ModelError", "load_model", "read_config", "save_model", "torch_dtype"]
