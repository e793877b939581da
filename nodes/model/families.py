"""The families of models: what the decoder does for each beyond what it does for all."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """The models of one `model_type`. Their sizes are in each `config.json`.

    name: what `transformers` calls their classes, without what stands for the head.
    qkv_bias: have the maps to queries, keys and values a bias?
    qk_norm: is each head's query and key normed before it is turned?
    experts: is each layer's MLP a mixture of experts?
    windows: may a layer attend to the last tokens alone (`sliding_window`)?
    defaults: what `transformers` takes for a key that a `config.json` does not have, where it is not what it takes for
        most models.
    fixed: settings of which the decoder has one value. Null and a missing key mean the same.
    """

    model_type: str
    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    windows: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


# By `model_type`.
FAMILIES = {
    family.model_type: family
    for family in (
        # Llama 2, 3, 3.1, 3.2, 3.3 (Meta, arXiv 2307.09288 and 2407.21783), and what has their `config.json`.
        Family("llama", "Llama", fixed={"attention_bias": False, "mlp_bias": False}),
        # Mistral 7B (Jiang et al., 2023, arXiv 2310.06825), Nemo, Small: Llama with fewer key-value heads. All layers
        # of the first version attend to a window of 4096 tokens.
        Family(
            "mistral",
            "Mistral",
            windows=True,
            defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        ),
        # Qwen2 and Qwen2.5 (Qwen team, arXiv 2407.10671 and 2412.15115).
        Family(
            "qwen2",
            "Qwen2",
            qkv_bias=True,
            windows=True,
            defaults={
                "num_key_value_heads": 32,
                "max_position_embeddings": 32768,
                "use_sliding_window": False,
                "sliding_window": 4096,
                "max_window_layers": 28,
            },
        ),
        # Qwen3, dense (Qwen team, arXiv 2505.09388).
        Family(
            "qwen3",
            "Qwen3",
            qk_norm=True,
            windows=True,
            defaults={
                "num_key_value_heads": 32,
                "head_dim": 128,
                "max_position_embeddings": 32768,
                "use_sliding_window": False,
                "sliding_window": 4096,
                "max_window_layers": 28,
            },
            fixed={"attention_bias": False},
        ),
        # Its mixtures: routed experts in place of each MLP. Left out: the loss that balances experts, which only
        # pre-training has.
        Family(
            "qwen3_moe",
            "Qwen3Moe",
            qk_norm=True,
            experts=True,
            windows=True,
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
        ),
    )
}
