"""Models: their configuration, their computation, and their files."""

from penstock.nodes.model.config import ModelConfig as ModelConfig
from penstock.nodes.model.config import ModelError as ModelError
from penstock.nodes.model.decoder import CausalLM as CausalLM
from penstock.nodes.model.decoder import Decoder as Decoder
from penstock.nodes.model.decoder import Scorer as Scorer
from penstock.nodes.model.hf import load_model as load_model
from penstock.nodes.model.hf import read_config as read_config
from penstock.nodes.model.hf import save_model as save_model
from penstock.nodes.model.hf import torch_dtype as torch_dtype
from penstock.nodes.model.lora import Lora as Lora
