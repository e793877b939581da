"""The differences between the families of models that the decoder computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """The models of one `model_type`. Their sizes are in each `config.json`.

    name: the name of their classes in `transformers`, without the head's suffix.
    scorer_name: the same for classes of a `Scorer`, if it differs.
    qkv_bias: True if the maps to queries, keys and values have a bias.
    qk_norm: True if each head's query and key is normed before rotary embedding.
    branch_norms: True if the outputs of attention and MLP are normed before they are added.
    norm_offset: the number that is added to the weight of each norm.
    scaled_embedding: True if embeddings are multiplied by the root of their width.
    activation: that of an MLP's gate, one of `elementwise.ACTIVATIONS`; `activation_key` is its setting's name.
    experts: True if each layer's MLP is a mixture of experts.
    windows: True if a layer may attend to the last tokens only (`sliding_window`).
    windowed: the other settings that say which layers do.
    more: fields of `ModelConfig` that other families do not have.
    defaults: values of `transformers` for keys missing in a `config.json`, if they differ from those for most models.
    fixed: settings with one value that the decoder supports. Null and a missing key mean the same.
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
        """True if layers with a window have a rotary embedding of their own."""
        return "rope_local_base_freq" in self.more
