"""The cost model's description of a decoder, and of the mesh of one replica. Pure except for files that are read.

`Shape` has the sizes from which FLOPs, bytes and tensors follow, for dense and mixture-of-experts decoders such as
Llama, Qwen, Gemma and DeepSeek: read from the `config.json` of a model directory, or one of the names in `SHAPES`.

`Parallel` has the sizes of a mesh's axes. Rank numbers vary fastest along `tp`, then `ep`, `fsdp`, `dp`, and slowest
along `pp`, so that tensor parallelism stays within a machine if it can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from penstock.graph.hub import HubError, at_revision, model_folder, model_name
from penstock.graph.protocols import Axes, stage_of_layer
from penstock.runtime.cluster.cluster import nearest
from penstock.runtime.record.typed_json import parse_json

# The linear maps that tensor parallelism cuts along their input.
NARROWING = ("o_proj", "down_proj")
# The maps of attention, which may have adapters even if the MLP is a mixture of experts.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# Families with biases of queries, keys and values; with norms of each head's queries and keys; with norms of the
# outputs of attention and MLP; whose sliding-window layers have other rotary positions; and the defaults of
# `transformers` for sizes that a file leaves out. The nodes have their own table, and a test compares them.
QKV_BIAS, QK_NORM = ("qwen2",), ("qwen3", "qwen3_moe", "gemma3_text")
BRANCH_NORMS = LOCAL_ROPE = ("gemma3_text",)
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}


class ShapeError(ValueError):
    """The cost model cannot describe a model. The message says what was given, what is needed, and where."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): the ranks of the two down-projections, and the sizes of a
    head's parts without and with rotary embedding, and of its value. The cache holds `kv_rank + rope_dim` numbers per
    token."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters (LoRA) of this rank for the linear maps with these names in each layer."""

    rank: int
    targets: tuple[str, ...]

    def __str__(self) -> str:
        return f"rank {self.rank}, targets {', '.join(self.targets)}"


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. A layer's MLP has width `inner`. With `experts`, all layers but the first `dense_layers` have
    that many experts of width `expert_inner`; a token uses `active` of them, and always `shared` more. With `lora`,
    only adapters learn and are sent; parameters are those of the base. `family` is the `model_type`, `context` the
    longest sequence, 0 if unknown."""

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    tied: bool = False
    experts: int = 0
    active: int = 0
    expert_inner: int = 0
    shared: int = 0
    dense_layers: int = 0
    latent: Latent | None = None
    lora: Adapters | None = None
    family: str = "llama"
    context: int = 0

    @cached_property
    def maps(self) -> dict[str, tuple[int, int]]:
        """(input, output) width of the linear maps of a layer that may have adapters."""
        keys = self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, self.qk_width),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (self.qk_width, self.hidden),
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }

    def adapted(self, tp: int = 1) -> float:
        """Parameters of one layer's adapters on a rank: `tp` cuts one of the two matrices of each adapter, on the same
        side as the linear map."""
        if self.lora is None:
            return 0.0
        sides = ((self.maps[name], name in NARROWING) for name in self.lora.targets)
        return float(sum(self.lora.rank * (a / tp + b if narrows else a + b / tp) for (a, b), narrows in sides))

    def with_lora(self, rank: int, targets: Sequence[str] = ()) -> "Shape":
        """The shape with adapters; unchanged with rank 0. Raises ShapeError for an unknown target, and for models whose
        maps cannot have adapters."""
        if not rank:
            return self
        if unknown := [name for name in targets if name not in self.maps]:
            raise ShapeError(f"--lora-targets: given {unknown[0]!r}, needed some of {', '.join(self.maps)}")
        if self.latent is not None:
            raise ShapeError(f"--lora: given {self.name}, needed a model without latent attention")
        if self.experts and (others := [name for name in targets or self.maps if name not in ATTENTION]):
            given = f"{', '.join(others)} of {self.name}, whose experts have no adapters"
            raise ShapeError(f"--lora-targets: given {given}, needed some of {', '.join(ATTENTION)}")
        return replace(self, lora=Adapters(rank, tuple(name for name in self.maps if name in (targets or self.maps))))

    @cached_property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @cached_property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention projections."""
        if (latent := self.latent) is None:
            return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        queries = latent.q_rank * (self.hidden + self.heads * (latent.nope_dim + latent.rope_dim))
        keys = self.hidden * (latent.kv_rank + latent.rope_dim)
        values = latent.kv_rank * self.heads * (latent.nope_dim + latent.value_dim)
        return queries + keys + values + self.heads * latent.value_dim * self.hidden

    @property
    def branch_norms(self) -> bool:
        """True if the outputs of attention and MLP are normed, too."""
        return self.family in BRANCH_NORMS

    @property
    def ropes(self) -> int:
        """How many kinds of rotary positions there are."""
        return 2 if self.family in LOCAL_ROPE else 1

    @cached_property
    def vectors(self) -> dict[str, int]:
        """The lengths of one layer's biases and norms."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = {"q_proj.bias": queries, "k_proj.bias": keys, "v_proj.bias": keys} if self.family in QKV_BIAS else {}
        norms = dict.fromkeys(("q_norm.weight", "k_norm.weight"), self.head_dim) if self.family in QK_NORM else {}
        found = {f"self_attn.{name}": length for name, length in (biases | norms).items()}
        kinds = ["input", "post_attention"]
        kinds += ["pre_feedforward", "post_feedforward"] if self.branch_norms else []
        return found | dict.fromkeys((f"{kind}_layernorm.weight" for kind in kinds), self.hidden)

    @cached_property
    def expert_parameters(self) -> int:
        """Weights of all routed experts in all layers."""
        return self.moe_layers * self.experts * 3 * self.hidden * self.expert_inner

    @cached_property
    def dense_parameters(self) -> int:
        """Weights that every token uses: all but the routed experts. A tied embedding counts once."""
        mlp = (self.layers - self.moe_layers) * 3 * self.hidden * self.inner
        routed = self.moe_layers * self.hidden * (self.experts + 3 * self.shared * self.expert_inner)
        layers = self.layers * (self.attention_parameters + sum(self.vectors.values()))
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return embeddings + layers + mlp + routed + self.hidden

    @cached_property
    def parameters(self) -> int:
        return self.dense_parameters + self.expert_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with: the head, but not the embedding, which is looked up."""
        # A tied head is the embedding itself, and multiplies.
        embedding = 0 if self.tied else self.vocab * self.hidden
        used = self.expert_parameters * self.active // self.experts if self.experts else 0
        return self.dense_parameters - embedding + used

    @cached_property
    def qk_width(self) -> int:
        """The width of all heads' queries."""
        return self.heads * (self.latent.nope_dim + self.latent.rope_dim if self.latent else self.head_dim)

    @cached_property
    def value_width(self) -> int:
        return self.heads * (self.latent.value_dim if self.latent else self.head_dim)

    @cached_property
    def cache_width(self) -> int:
        """How many numbers the cache holds for one token in one layer."""
        return self.latent.kv_rank + self.latent.rope_dim if self.latent else 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class StageShape:
    """The weights of one pipeline stage. `dense` are weights that every token uses, with the embedding on the first
    stage, and norm and head on the last one; a tied embedding is on both. `active` are the weights that a token is
    multiplied with."""

    layers: int
    moe_layers: int
    dense: int
    experts: int
    active: int
    head: bool

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


@lru_cache(maxsize=1024)
def stages_of(shape: Shape, count: int) -> tuple[StageShape, ...]:
    """The `count` stages of a model, cut as the trainer cuts it: whole layers, in runs of nearly equal length."""
    each_expert = 3 * shape.hidden * shape.expert_inner
    attention = shape.attention_parameters + sum(shape.vectors.values())
    words, found = shape.vocab * shape.hidden, []
    for stage in range(count):
        own = [layer for layer in range(shape.layers) if stage_of_layer(layer, shape.layers, count) == stage]
        routed = sum(layer >= shape.dense_layers for layer in own) if shape.experts else 0
        dense = len(own) * attention + (len(own) - routed) * 3 * shape.hidden * shape.inner
        dense += routed * (shape.hidden * shape.experts + shape.shared * each_expert)
        first, last = stage == 0, stage == count - 1
        norm = shape.hidden * last
        held = words * (1 if shape.tied and (first or last) else first + last)
        active = dense + norm + words * last + routed * shape.active * each_expert
        experts = routed * shape.experts * each_expert
        found.append(StageShape(len(own), routed, dense + norm + held, experts, active, last))
    return tuple(found)


def read_shape(given: str) -> Shape:
    """The shape of a model: a directory, its `config.json`, a name in `SHAPES` or on the Hub. For a directory of
    adapters, the shape of their base with the adapters. Raises ShapeError."""
    if given in SHAPES:
        return SHAPES[given]
    file, data, adapters = model_config(given)
    name = model_name(file.parent) if file.name == "config.json" else file.stem
    shape = shape_of(data, name, str(file))
    return shape if adapters is None else shape.with_lora(*adapters)


def model_config(given: str) -> tuple[Path, object, tuple[int, tuple[str, ...]] | None]:
    """The `config.json` of a model, as for `read_shape`, and its content. For a directory of adapters: those of their
    base, with the adapters' rank and the names of the matrices that have some, () for all. Raises ShapeError."""
    try:
        path = Path(model_folder(given, weights=False))
    except HubError as error:
        raise ShapeError(f"--model: {error}") from error
    if (adapters := path / "adapter_config.json").is_file():
        try:
            said = parse_json(adapters.read_bytes(), str(adapters))
            base = at_revision(str(said["base_model_name_or_path"]), said.get("revision"))
            targets = said["target_modules"]
            named = () if targets == "all-linear" else {str(name).rpartition(".")[2] for name in targets}
            return *model_config(base)[:2], (int(said["r"]), tuple(named))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ShapeError(f"{adapters}: {error}; needed what peft writes") from error
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        needed = f"a model directory with a config.json, or a shape; {nearest(given, SHAPES)}"
        raise ShapeError(f"--model: given {given!r}, needed {needed}")
    try:
        return file, parse_json(file.read_bytes(), str(file)), None
    except (OSError, ValueError) as error:
        raise ShapeError(f"{file}: not JSON: {error}") from error


def shape_of(data: object, name: str, where: str = "config.json") -> Shape:
    """The shape from the content of a `config.json`. Raises ShapeError for a missing key that the family needs, and for
    a value that is not a size."""
    if not isinstance(data, dict):
        raise ShapeError(f"{where}: given {type(data).__name__}, needed an object with the model's sizes")
    family = str(data.get("model_type", Shape.family))
    if "num_local_experts" in data:
        data = {"num_experts": data["num_local_experts"], **data}
    data = {**DEFAULTS.get(family, {}), **data}

    def need(*keys: str) -> int:
        """The value of the first of these keys that is there."""
        key = next((key for key in keys if data.get(key) is not None), None)
        if key is None:
            # Models with several parts, such as text and vision, have their sizes one level deeper.
            parts = [name for name, part in data.items() if isinstance(part, Mapping) and keys[0] in part]
            hint = f"; {parts[0]} has one: put its content into a file of its own" if parts else ""
            raise ShapeError(f"{where}: given no {keys[0]}, needed a positive whole number{hint}")
        found = data[key]
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise ShapeError(f"{where}: given {key} {found!r}, needed a positive whole number")
        return found

    def may(*keys: str, otherwise: int = 0) -> int:
        """The same; `otherwise` if all are missing, null or 0."""
        there = [key for key in keys if data.get(key)]
        return need(*there) if there else otherwise

    heads, hidden = need("num_attention_heads"), need("hidden_size")
    kv_heads = may("num_key_value_heads", otherwise=heads)
    # Each key-value head serves the same number of query heads.
    if heads % kv_heads:
        raise ShapeError(f"{where}: given num_key_value_heads {kv_heads}, needed a divisor of the {heads} heads")
    experts = may("num_experts", "n_routed_experts", "num_local_experts")
    latent = None
    if data.get("kv_lora_rank"):
        parts = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        latent = Latent(*(need(key) for key in parts))
    return Shape(
        name=name,
        vocab=need("vocab_size"),
        hidden=hidden,
        layers=need("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=may("head_dim", otherwise=hidden // heads),
        inner=need("intermediate_size", "moe_intermediate_size"),
        tied=bool(data.get("tie_word_embeddings", False)),
        experts=experts,
        active=need("num_experts_per_tok") if experts else 0,
        expert_inner=need("moe_intermediate_size", "intermediate_size") if experts else 0,
        shared=may("n_shared_experts"),
        dense_layers=may("first_k_dense_replace") if experts else 0,
        latent=latent,
        family=family,
        context=may("max_position_embeddings"),
    )


_QWEN3, _GEMMA3 = 151936, 262144

# By name, from each model's `config.json`: Llama 3.1 and 3.2, Qwen3, Gemma 3, GLM-4.5-Air, DeepSeek-V3.
SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("llama-1b", 128256, 2048, 16, 32, 8, 64, 8192, tied=True),
        Shape("llama-3b", 128256, 3072, 28, 24, 8, 128, 8192, tied=True),
        Shape("llama-8b", 128256, 4096, 32, 32, 8, 128, 14336),
        Shape("llama-70b", 128256, 8192, 80, 64, 8, 128, 28672),
        Shape("llama-405b", 128256, 16384, 126, 128, 8, 128, 53248),
        Shape("qwen3-0.6b", _QWEN3, 1024, 28, 16, 8, 128, 3072, tied=True, family="qwen3"),
        Shape("qwen3-1.7b", _QWEN3, 2048, 28, 16, 8, 128, 6144, tied=True, family="qwen3"),
        Shape("qwen3-4b", _QWEN3, 2560, 36, 32, 8, 128, 9728, tied=True, family="qwen3"),
        Shape("qwen3-8b", _QWEN3, 4096, 36, 32, 8, 128, 12288, family="qwen3"),
        Shape("qwen3-14b", _QWEN3, 5120, 40, 40, 8, 128, 17408, family="qwen3"),
        Shape("qwen3-32b", _QWEN3, 5120, 64, 64, 8, 128, 25600, family="qwen3"),
        Shape("qwen3-30b-a3b", _QWEN3, 2048, 48, 32, 4, 128, 6144, False, 128, 8, 768, family="qwen3_moe"),
        Shape("qwen3-235b-a22b", _QWEN3, 4096, 94, 64, 4, 128, 12288, False, 128, 8, 1536, family="qwen3_moe"),
        Shape("gemma-3-270m", _GEMMA3, 640, 18, 4, 1, 256, 2048, tied=True, family="gemma3_text"),
        Shape("gemma-3-1b", _GEMMA3, 1152, 26, 4, 1, 256, 6912, tied=True, family="gemma3_text"),
        Shape("glm-4.5-air", 151552, 4096, 46, 96, 8, 128, 10944, False, 128, 8, 1408, 1, 1, family="glm4_moe"),
        Shape(
            "deepseek-v3", 129280, 7168, 61, 128, 128, 128, 18432, False, 256, 8, 2048, 1, 3,
            Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128), family="deepseek_v3",
        ),
    )
}  # fmt: skip


# The axes of a mesh, outermost first.
AXES = ("pp", "dp", "fsdp", "ep", "tp")
Size = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Parallel:
    """Copies of the model (`dp`), shards of each tensor (`fsdp`), parts of each layer (`tp`), pipeline stages (`pp`).
    `ep` neighbours among the `fsdp` ranks divide the experts among them, and `fsdp / ep` ranks shard each part; `ep`
    must divide `fsdp`."""

    dp: Size = 1
    fsdp: Size = 1
    tp: Size = 1
    pp: Size = 1
    ep: Size = 1

    @classmethod
    def of(cls, axes: Axes) -> Self:
        """From a plan's mesh, in which the size of axis "fsdp" is `fsdp / ep`."""
        sizes = dict(axes)
        return cls(**{**sizes, "fsdp": sizes.get("fsdp", 1) * sizes.get("ep", 1)})

    @property
    def ranks(self) -> int:
        return self.stage * self.pp

    @property
    def stage(self) -> int:
        """How many ranks one pipeline stage has."""
        return self.data * self.tp

    @property
    def data(self) -> int:
        """The number of data-parallel ranks, among which sequences are divided."""
        return self.dp * self.fsdp

    @property
    def axes(self) -> Axes:
        """The axes as in a plan's mesh, outermost first, without axes of size 1."""
        sizes = {name: getattr(self, name) for name in AXES} | {"fsdp": self.fsdp // self.ep}
        return tuple((name, size) for name, size in sizes.items() if size > 1)

    def divides(self, shape: Shape) -> bool:
        """True if the model can be cut so: heads over `tp`, layers over `pp`."""
        # Fewer key-value heads than ranks are copied, so a multiple works, too. A latent cache is not cut.
        heads = shape.latent is not None or shape.kv_heads % self.tp == 0 or self.tp % shape.kv_heads == 0
        return heads and shape.heads % self.tp == 0 and self.pp <= shape.layers

    def __str__(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self.axes) or "one GPU"
