"""Mistral 7B (Jiang et al., 2023, arXiv 2310.06825) from v0.2 on, Nemo, Small: Llama with fewer key-value heads. The
first version attends to a window of 4096 tokens, which is refused."""

from penstock.nodes.model.families.family import Family

MISTRAL = Family(
    "mistral",
    "Mistral",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)
