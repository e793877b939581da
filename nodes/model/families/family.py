"""What sets a family of models apart from the others that the decoder computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """The models of one `model_type`. Their sizes are in each `config.json`.

    name: what `transformers` calls their classes, without what stands for the head.
    scorer_name: the same of those whose head gives a number, where it is another one.
    qkv_bias: have the maps to queries, keys and values a bias?
    qk_norm: is each head's query and key normed before it is turned?
    branch_norms: is what attention and MLP make normed, too, before it is added?
    norm_offset: what is added to the weight of each norm.
    scaled_embedding: are embeddings multiplied by the root of their width?
    activation: of an MLP's gate, one of `elementwise.ACTIVATIONS`; `activation_key` is the setting that says it.
    experts: is each layer's MLP a mixture of experts?
    windows: may a layer attend to the last tokens alone (`sliding_window`)?
    windowed: settings that say which of the layers do, beside it.
    more: fields of `ModelConfig` that other families do not have.
    defaults: what `transformers` takes for a key that a `config.json` does not have, where it is not what it takes for
        most models.
    fixed: settings of which the decoder has one value. Null and a missing key mean the same.
    """

    model_type: str
    name: str
    scorer_name: str = ""
    qkv_bias: bool = False
    qk_norm: bool = False
    branch_norms: bool = False
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    activation: str = "silu"
    activation_key: str = "hidden_act"
    experts: bool = False
    windows: bool = False
    windowed: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def local_rope(self) -> bool:
        """Do layers with a window turn queries and keys by other angles?"""
        return "rope_local_base_freq" in self.more
