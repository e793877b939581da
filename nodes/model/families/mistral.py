"""Mistral 7B (Jiang et al., 2023, arXiv 2310.06825), Nemo, Small: Llama with fewer key-value heads. All layers of the
first version attend to a window of 4096 tokens.
"""

from penstock.nodes.model.families.family import Family

MISTRAL = Family(
    "mistral",
    "Mistral",
    windows=True,
    windowed=("layer_types",),
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)
