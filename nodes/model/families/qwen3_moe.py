"""Qwen3's mixtures of experts (arXiv 2505.09388): routed experts in place of each MLP. Left out: the load-balancing
loss, which only pre-training has.
"""

from penstock.nodes.model.families.family import Family

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3Moe",
    qk_norm=True,
    experts=True,
    windows=True,
    windowed=("use_sliding_window",),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    fixed={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
