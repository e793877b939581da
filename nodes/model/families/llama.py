"""Llama 2, 3, 3.1, 3.2, 3.3 (Meta, arXiv 2307.09288 and 2407.21783), and models with the same `config.json`."""

from penstock.nodes.model.families.family import Family

LLAMA = Family("llama", "Llama", fixed={"attention_bias": False, "mlp_bias": False})
