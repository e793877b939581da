"""What sets a family of models apart from the others that the decoder computes."""

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
    windowed: settings that say which of the layers do, beside it.
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
    windowed: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
