"""Qwen3, dense (Qwen team, arXiv 2505.09388)."""

from penstock.nodes.model.families.family import Family

QWEN3 = Family(
    "qwen3",
    "Qwen3",
    qk_norm=True,
    windows=True,
    windowed=("use_sliding_window", "max_window_layers", "layer_types"),
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    fixed={"attention_bias": False},
)
