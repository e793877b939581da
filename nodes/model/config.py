"""A model's configuration: a frozen value, read from and written to Hugging Face's `config.json`."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from penstock.nodes.model.families import FAMILIES, REFUSED, Family

# The fields of each kind of scaling of rotary frequencies.
_ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
        "original_max_position_embeddings",
    ),
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
# Upper bounds on a model's sizes: more would need memory that no machine has, or endless lists of names.
MOST, MOST_LAYERS = 1 << 24, 1 << 14
# Settings with one value that the decoder supports, in all families; null and a missing key mean the same.
_FIXED = {"attention_dropout": 0.0, "is_causal": True}
_KINDS = ("full_attention", "sliding_attention")
# Fields that were added to `ModelConfig` later; they are None by default.
_ADDED = ("rope_local_base_freq", "query_pre_attn_scalar")


class ModelError(ValueError):
    """A model directory cannot be used: what was given, what is needed, and where."""


def read_json(path: Path, error: type[ValueError] = ModelError) -> dict[str, Any]:
    """The object in a JSON file. Raises `error`, with the file's name, for anything else."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as fault:
        raise error(f"{path}: given what cannot be read: {fault.strerror}, needed a file with a JSON object") from fault
    except ValueError as fault:
        raise error(f"{path}: given something that is not JSON ({fault}), needed a JSON object") from fault
    if not isinstance(data, dict):
        raise error(f"{path}: given JSON of a {type(data).__name__}, needed an object")
    return data


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context that a model was first trained on.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1, section 3.4.1, and its reference code) divides
    those whose wavelength is over `original_max_position_embeddings / low_freq_factor`, keeps those under
    `original_max_position_embeddings / high_freq_factor`, and blends in between. `yarn` (Peng et al., 2023, arXiv
    2309.00071, sections 3.2 to 3.4) divides those with fewer than `beta_slow` turns in
    `original_max_position_embeddings` tokens, keeps those with over `beta_fast` turns, and blends in between, over
    whole pairs if `truncate`; sines and cosines are multiplied by `attention_factor`.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def to_json(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("rope_type", *_ROPE[self.rope_type])}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape; the fields are named as in `config.json`. JSON-able through `to_json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    model_type: str = "llama"
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    rope_local_base_freq: float | None = None
    query_pre_attn_scalar: int | None = None

    def __post_init__(self) -> None:
        if self.family.local_rope and not (self.sliding_window and len(self.layer_types) == self.num_hidden_layers):
            given = f"a {self.model_type} with layer_types {self.layer_types} and sliding_window {self.sliding_window}"
            raise ModelError(f"given {given}, needed the kind of each of {self.num_hidden_layers} layers and a number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"given {self.num_attention_heads} attention heads over {self.num_key_value_heads} key-value heads, "
                "needed a multiple"
            )
        if self.head_dim % 2:
            raise ModelError(f"given head_dim {self.head_dim}, needed an even one: rotary embedding turns pairs")
        if self.num_experts_per_tok > self.num_experts:
            given = f"num_experts_per_tok {self.num_experts_per_tok} and num_experts {self.num_experts}"
            raise ModelError(f"given {given}, needed at most as many for a token as there are")

    def __repr__(self) -> str:
        # Digests of models are made from it, so new fields that are None must not change it: older runs can resume.
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        unsaid = [name for name in _ADDED if told[name] is None]
        return f"ModelConfig({', '.join(f'{name}={value!r}' for name, value in told.items() if name not in unsaid)})"

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def window_of(self, layer: int) -> int:
        """The window of a layer: the number of last tokens, itself included, that each token sees; 0 is all."""
        slides = not self.layer_types or self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if self.sliding_window and slides else 0

    @property
    def ropes(self) -> tuple[tuple[float, RopeScaling | None], ...]:
        """The base and the scaling of rotary embedding, and if layers with a window have others, those, too."""
        whole = self.rope_theta, self.rope_scaling
        return (whole,) if self.rope_local_base_freq is None else (whole, (self.rope_local_base_freq, None))

    def rope_of(self, layer: int) -> int:
        """The index in `ropes` of a layer's rotary embedding."""
        return int(len(self.ropes) > 1 and self.window_of(layer) > 0)

    def to_json(self, dtype: str = "float32") -> dict[str, Any]:
        """The content of `config.json` without the keys of the head."""
        # Newer readers know `rope_parameters` and `dtype`, older ones `rope_scaling` and `torch_dtype`.
        facts = asdict(self)
        if not self.family.experts:
            facts = {key: value for key, value in facts.items() if key not in (*_EXPERT_SIZES, "norm_topk_prob")}
        for key in {key for family in FAMILIES.values() for key in family.more} - {*self.family.more}:
            del facts[key]
        eos, scaling = facts.pop("eos_token_ids"), {} if self.rope_scaling is None else self.rope_scaling.to_json()
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default", **scaling}
        if self.family.local_rope:
            local = {"rope_theta": self.rope_local_base_freq, "rope_type": "default"}
            rope = dict(zip(_KINDS, (rope, local), strict=True))
        if layer_types := facts.pop("layer_types"):
            facts |= {"layer_types": list(layer_types)}
        if self.sliding_window and "use_sliding_window" in self.family.defaults:
            facts |= {"use_sliding_window": True}
        return {
            **facts,
            **_fixed(self.family),
            "rope_scaling": scaling or None,
            "rope_parameters": rope,
            "eos_token_id": list(eos) if len(eos) > 1 else next(iter(eos), None),
            "dtype": dtype,
            "torch_dtype": dtype,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "ModelConfig":
        """The configuration in a `config.json`. Raises ModelError for a model that this decoder would compute
        differently."""
        if (family := FAMILIES.get(str(data.get("model_type")))) is None:
            kind, others = data.get("model_type"), f"one of: {', '.join(FAMILIES)}"
            why = f" ({REFUSED[str(kind)]})" if str(kind) in REFUSED else ""
            raise ModelError(f"given model_type {kind!r}{why}, needed {others}")
        if "num_local_experts" in data:  # the name in newer files
            data = {"num_experts": data["num_local_experts"], **data}
        data = {"max_position_embeddings": 2048, **family.defaults, **data}
        for key, value in _fixed(family).items():
            if data.get(key) not in (None, value):
                needed = "nothing" if value is None else f"{value!r}, or nothing"
                raise ModelError(f"given {key} {data[key]!r}, needed {needed}")
        if quantised := data.get("quantization_config"):
            given = f"quantization_config {quantised!r:.200}"
            raise ModelError(f"given {given}, needed none: weights as they are, unquantised")
        sizes: dict[str, Any] = {key: _need(data, key) for key in _SIZES}
        if family.experts:
            sizes |= {key: _need(data, key) for key in _EXPERT_SIZES}
            sizes["norm_topk_prob"] = _flag(data, "norm_topk_prob")
        heads = sizes["num_attention_heads"]
        usual = {"num_key_value_heads": heads, "head_dim": sizes["hidden_size"] // heads}
        sizes |= {key: size if data.get(key) is None else _need(data, key) for key, size in usual.items()}
        longest = _need(data, "max_position_embeddings")
        window, layer_types = _window(data, family, longest)
        rope_theta, rope_scaling, local = _ropes(data, family)
        return ModelConfig(
            **sizes,
            max_position_embeddings=longest,
            rms_norm_eps=_number(data, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=_flag(data, "tie_word_embeddings"),
            initializer_range=_number(data, "initializer_range", 0.02),
            bos_token_id=data.get("bos_token_id"),
            eos_token_ids=token_ids(data.get("eos_token_id")),
            pad_token_id=_pad(data, sizes["vocab_size"]),
            model_type=family.model_type,
            sliding_window=window,
            layer_types=layer_types,
            rope_local_base_freq=local,
            query_pre_attn_scalar=_need(data, key) if (key := "query_pre_attn_scalar") in family.more else None,
        )


def _fixed(family: Family) -> dict[str, Any]:
    """The settings with one value that the decoder supports for a family."""
    return {family.activation_key: family.activation, **_FIXED, **family.fixed}


def token_ids(value: Any) -> tuple[int, ...]:
    """The tokens of `eos_token_id` in a JSON file: a number, a list, or null. Raises ModelError for anything else."""
    tokens = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(type(token) is int and 0 <= token < MOST for token in tokens):
        raise ModelError(f"given eos_token_id {value!r}, needed a token's number, a list of such, or null")
    return tokens


def _pad(data: Mapping[str, Any], words: int) -> int | None:
    """The word without a gradient in the embedding; a negative one counts from the end, as in torch."""
    pad = data.get("pad_token_id")
    if pad is None or (type(pad) is int and -words <= pad < words):
        return pad
    raise ModelError(f"given pad_token_id {pad!r}, needed null, or one of the {words} words of vocab_size")


def _need(data: Mapping[str, Any], key: str) -> int:
    value, most = data.get(key), MOST_LAYERS if key == "num_hidden_layers" else MOST
    if type(value) is int and 0 < value <= most:
        return value
    if type(value) is int and value > most:
        raise ModelError(f"given {key} {value}, needed at most {most}")
    near = get_close_matches(key, [k for k in data if k != key], n=1, cutoff=0.8)
    hint = f" (there is {near[0]!r})" if near and value is None else ""
    raise ModelError(f"given {key} {value!r}, needed a positive whole number{hint}")


def _flag(data: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = data.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"given {key} {value!r}, needed true or false")
    return value


def _number(data: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = data.get(key, default)
    if type(value) in (int, float) and 0 < value < math.inf:
        return float(value)
    raise ModelError(f"given {key} {value!r}, needed a number above 0")


def _layer_kinds(data: Mapping[str, Any], family: Family) -> tuple[Sequence[str], str]:
    """(the kind of each layer, the key that says so); no kinds if the layers are all alike."""
    key = "layer_types"
    kinds = data.get(key) or ()
    if not isinstance(kinds, list | tuple) or (set(map(str, kinds)) - {*_KINDS}):
        needed = "'full_attention' or 'sliding_attention' for each layer"
        raise ModelError(f"given {key} {data[key]!r:.80}, needed {needed}")
    layers = _need(data, "num_hidden_layers")
    if kinds and len(kinds) != layers:
        raise ModelError(f"given {key} of {len(kinds)} layers, needed {layers}, which num_hidden_layers says")
    if not kinds and (pattern := "sliding_window_pattern") in family.windowed:
        every = _need(data, pattern)
        kinds = [_KINDS[(index + 1) % every > 0] for index in range(layers)]
    if not kinds and "max_window_layers" in data:
        full, key = data["max_window_layers"], "max_window_layers"
        if type(full) is not int:
            raise ModelError(f"given {key} {full!r}, needed a whole number")
        kinds = ["full_attention" if index < full else "sliding_attention" for index in range(layers)]
    return kinds, key


def _window(data: Mapping[str, Any], family: Family, longest: int) -> tuple[int | None, tuple[str, ...]]:
    """(the window of layers that have one, the kind of each layer; () if all have it). (None, ()) without such a layer,
    or if no text (of at most `longest` tokens) is longer than the window.
    """
    window, off = data.get("sliding_window"), not data.get("use_sliding_window", True)
    kinds, key = _layer_kinds(data, family)
    # A window that no text outgrows has no effect, unless layers with a window have another rotary embedding.
    counts = type(window) is int and (window < longest or family.local_rope)
    if family.windows and counts:
        # Refuse keys that transformers ignores for this family.
        said = {"use_sliding_window": off, key: not off and "full_attention" in kinds}
        if unknown := [key for key, matters in said.items() if matters and key not in family.windowed]:
            given = f"{unknown[0]} {data[unknown[0]]!r:.80} with sliding_window {window}"
            raise ModelError(f"given {given}, needed none: all layers of a {family.model_type} have the window")
    slides, listed = "sliding_attention" in kinds or not kinds, bool(data.get("layer_types"))
    if off and listed and slides and "layer_types" in family.windowed:
        raise ModelError(f"given layer_types {data['layer_types']!r:.80} without use_sliding_window, needed it true")
    if not family.local_rope and (off or not slides or (window is None and not listed)):
        return None, ()
    if type(window) is not int or window < 1:
        needed = "a number of tokens, or null and no layer that has one"
        raise ModelError(f"given sliding_window {window!r}, needed {needed}")
    if window < longest and not family.windows:
        needed = f"null, or at least max_position_embeddings ({longest}): no {family.model_type} has one"
        raise ModelError(f"given sliding_window {window}, needed {needed}")
    return (window, tuple(kinds)) if counts else (None, ())


def _ropes(data: Mapping[str, Any], family: Family) -> tuple[float, RopeScaling | None, float | None]:
    """(base of rotary embedding, its scaling, base of layers with a window if these have their own). Newer files have
    all of it in `rope_parameters`, by the kind of a layer."""
    if not family.local_rope:
        return *_rope(data), None
    said, old = data.get("rope_parameters") or {}, data.get("rope_scaling")
    named = isinstance(said, Mapping) and all(isinstance(own or {}, Mapping) for own in said.values())
    if not (named and said.keys() <= {*_KINDS}):
        raise ModelError(f"given rope_parameters {said!r:.200}, needed an object for each of {', '.join(_KINDS)}")
    if isinstance(old, Mapping) and "rope_type" not in old and "type" in old:
        # Some versions of transformers ignore `type`.
        raise ModelError(f"given rope_scaling {old!r}, needed rope_type in place of type")
    whole, own = (said.get(kind) or {} for kind in _KINDS)
    base = _number(data, "rope_local_base_freq")
    local, scaling = _rope({**data, "rope_theta": base, "rope_scaling": None, "rope_parameters": own})
    if scaling is not None:
        raise ModelError(f"given rope_parameters {dict(own)!r} of sliding_attention, needed rope_type 'default'")
    return *_rope({**data, "rope_parameters": whole}), local


def _rope(data: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The base and the scaling of rotary embedding."""
    # Newer files have them in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`, many in both.
    # transformers prefers `rope_scaling`, so both must have equal values.
    found = {}
    for key in ("rope_scaling", "rope_parameters"):
        said = data.get(key) or {}
        if not isinstance(said, Mapping):
            raise ModelError(f"given {key} {said!r}, needed an object with rope_type")
        if kinds := [kind for kind, own in said.items() if isinstance(own, Mapping)]:
            raise ModelError(f"given {key} of {', '.join(kinds)}, needed one for all layers, with rope_type")
        if said:
            found[key] = _number({**data, **said}, "rope_theta", 10000.0), _scaling_from_json(said, data)
        for partial in (data.get("partial_rotary_factor"), said.get("partial_rotary_factor")):
            if partial not in (None, 1):
                raise ModelError(f"given partial_rotary_factor {partial!r}, needed 1, or nothing")
    if len(set(found.values())) > 1:
        given = " and ".join(f"{key} {data[key]!r}" for key in found)
        raise ModelError(f"given {given}, which disagree, needed one of them, or both with equal values")
    return next(iter(found.values()), (_number(data, "rope_theta", 10000.0), None))


def _scaling_from_json(said: Mapping[str, Any], data: Mapping[str, Any]) -> RopeScaling | None:
    """The scaling in `said`, an object with a `rope_type` in a file with the content `data`."""
    kind = said.get("rope_type", said.get("type", "default"))
    if str(kind) not in _ROPE:
        raise ModelError(f"given rope_type {kind!r}, needed one of: {', '.join(_ROPE)}")
    if kind == "default":
        return None
    said = {key: value for key, value in said.items() if value is not None}
    found: dict[str, Any] = {"factor": _number(said, "factor")}
    if kind == "linear":
        return RopeScaling(kind, **found)
    key = "original_max_position_embeddings"
    found[key] = _need({key: data["max_position_embeddings"], **said}, key)
    if data.get(key) not in (None, found[key]):  # transformers would use this one
        raise ModelError(f"given {key} {found[key]} of rope_type {kind!r} and {data[key]!r}, needed one of them")
    if kind == "llama3":
        found |= {name: _number(said, name) for name in ("low_freq_factor", "high_freq_factor")}
        return RopeScaling(kind, **found)
    if _number({**data, **said}, "rope_theta", 10000.0) == 1:  # all pairs turn alike
        raise ModelError("given rope_theta 1 of rope_type 'yarn', needed another one")
    found |= {"beta_fast": _number(said, "beta_fast", 32.0), "beta_slow": _number(said, "beta_slow", 1.0)}
    if "attention_factor" in said:
        amount = _number(said, "attention_factor")
    else:
        # Equation 22, or the ratio of two such values (DeepSeek-V2's code).
        scales = [_number(said, key) for key in ("mscale", "mscale_all_dim") if said.get(key)]
        above, below = scales if len(scales) == 2 else (1.0, 0.0)
        grown = 0.1 * math.log(max(found["factor"], 1.0))
        amount = (above * grown + 1.0) / (below * grown + 1.0)
    return RopeScaling(kind, **found, truncate=_flag(said, "truncate", True), attention_factor=amount)
