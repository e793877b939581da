"""The families of models, one file each: what the decoder does for them beyond what it does for all."""

from penstock.nodes.model.families.family import Family as Family
from penstock.nodes.model.families.llama import LLAMA
from penstock.nodes.model.families.mistral import MISTRAL
from penstock.nodes.model.families.qwen2 import QWEN2
from penstock.nodes.model.families.qwen3 import QWEN3
from penstock.nodes.model.families.qwen3_moe import QWEN3_MOE

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)}
"""By `model_type`."""
