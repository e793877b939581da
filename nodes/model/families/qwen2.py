"""Qwen2 and Qwen2.5 (Qwen team, arXiv 2407.10671 and 2412.15115)."""

from penstock.nodes.model.families.family import Family

QWEN2 = Family(
    "qwen2",
    "Qwen2",
    qkv_bias=True,
    windows=True,
    windowed=("use_sliding_window", "max_window_layers", "layer_types"),
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
