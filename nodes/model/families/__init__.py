"""The families of models, one file each: how they differ from the decoder that they share."""

from penstock.nodes.model.families.family import Family as Family
from penstock.nodes.model.families.gemma3 import GEMMA3_TEXT
from penstock.nodes.model.families.llama import LLAMA
from penstock.nodes.model.families.mistral import MISTRAL
from penstock.nodes.model.families.qwen2 import QWEN2
from penstock.nodes.model.families.qwen3 import QWEN3
from penstock.nodes.model.families.qwen3_moe import QWEN3_MOE

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA3_TEXT)}
"""All families by `model_type`."""
REFUSED = {
    "gemma2": "it caps scores and logits, which this decoder does not",
    "gemma3": "it sees images; its language model alone is a gemma3_text",
}
"""Why some other model types are not supported."""
