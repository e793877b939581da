"""Gemma 3, text only (Gemma team, 2025, arXiv 2503.19786): 270M and 1B, and the language models of the larger ones.
Five of six layers have a window, and a rotary embedding of their own. Left out: the embedding model's bidirectional
attention.
"""

from penstock.nodes.model.families.family import Family

GEMMA3_TEXT = Family(
    "gemma3_text",
    "Gemma3",
    scorer_name="Gemma3Text",
    qk_norm=True,
    branch_norms=True,
    norm_offset=1.0,
    scaled_embedding=True,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    windows=True,
    windowed=("layer_types", "sliding_window_pattern"),
    more=("rope_local_base_freq", "query_pre_attn_scalar"),
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    fixed={
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
)
