"""The decoder: rotary positions, RMS norms, gated MLP, grouped-query attention. One definition for all uses and
families of models.

Trainer and generator differ only in `attend`, which gets each layer's queries, keys and values: causal, or over a
cache. On top is a language model's head (`CausalLM`) or one that computes a number (`Scorer`). Parameters are named as
in Hugging Face's checkpoints. Left out: dropout, attention weights as output.

Shapes: B rows, S tokens of a row, D hidden width, H query heads, G key-value heads, K width of a head, V vocabulary,
W words of a rank, P positions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.nodes.model import causal, invariant
from penstock.nodes.model.config import ModelConfig, ModelError, RopeScaling
from penstock.nodes.model.elementwise import rms_norm, rotate
from penstock.nodes.model.expert_parallel import ExpertPlacement
from penstock.nodes.model.kernels import Linear, linear, multiplied, pack, packed, together
from penstock.nodes.model.lora import ATTENTION, Lora, LoraLinear, initial, is_adapter
from penstock.nodes.model.mlp import Experts, Mlp, Route
from penstock.nodes.model.vocab_parallel import VocabShard, WordEmbedding, own_part, shared

# A sixteenth of what fits in a GPU's memory; on a CPU no other number is faster (`benchmarks/logprobs.py`).
LOGIT_ELEMENTS = 1 << 26
# Cosines and sines of each of a model's `ropes`.
_TABLES = ("cos_PK", "sin_PK"), ("local_cos_PK", "local_sin_PK")

Result = TypeVar("Result")
# (layer, q_BSHK, k_BSGK, v_BSGK, window) → [B, S, H, K]; keys and queries are already rotated. Each token sees the
# last `window` tokens, itself included; 0 is all.
Attend = Callable[[int, Tensor, Tensor, Tensor, int], Tensor]


class Decoder(nn.Module):
    """The decoder that all models share; a subclass adds its head.

    Weights are uninitialised until `init_weights` or a loader fills them. With `unread` they also have no memory;
    `source` reads a region of one of the whole model's weights, so that a rank reads only what it keeps. With `lora`
    the model has adapters, which are float32 for any `dtype`.
    """

    head: ClassVar[str]
    """The suffix of the names of `transformers`' classes with this head."""
    cos_PK: Tensor
    sin_PK: Tensor
    logit_elements: int = LOGIT_ELEMENTS
    """The most logits in memory at once in a pass over many tokens."""
    replays_routing: bool = False
    """True if the tokens of rollouts go through the experts that their generator has recorded."""
    invariant: bool = False
    """True if a token's bits depend on the token and those before it only: see `be_invariant`."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        lora: Lora | None = None,
        unread: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.lora = config, lora
        self.vocab = VocabShard(config.vocab_size)
        # Draws nothing from the global generator, and touches no memory.
        with torch.device("meta"):
            self.model = _Layers(config)
            self._add_head()
            self.to(dtype)
            self._add_adapters()
        self.source: Callable[[str, tuple[slice, ...]], Tensor] | None = None
        if not unread:
            # Not `to_empty`: its `empty_like` of a tensor without memory imports sympy, which takes half a second.
            self._apply(lambda each: torch.empty(each.shape, dtype=each.dtype, device=device))  # type: ignore[no-untyped-call]
        for names, rope in zip(_TABLES, config.ropes, strict=False):
            for name, table_PK in zip(names, rope_tables(config, *rope), strict=True):
                self.register_buffer(name, table_PK.to(device, dtype), persistent=False)

    def _add_head(self) -> None:
        raise NotImplementedError

    def _add_adapters(self) -> None:
        if self.lora is not None and self.config.family.experts and (others := self.lora.beyond_attention):
            given = f"the targets {', '.join(others)} of a {self.config.model_type}"
            needed = f"--lora-targets {' '.join(ATTENTION)}, or some of them: its experts have no adapters"
            raise ModelError(f"LoRA: given {given}, needed {needed}")
        for name, module in list(self.model.layers.named_modules()):
            if self.lora is not None and isinstance(module, Linear) and name.endswith(self.lora.targets):
                self.model.layers.set_submodule(name, LoraLinear(module, self.lora))

    def quantise(self, precision: str) -> None:
        """Compute a layer's products in eight bits (`eight_bit`), except those of embedding, head and routers."""
        for name, module in self.model.layers.named_modules():
            if isinstance(module, Linear) and not name.endswith("mlp.gate"):
                module.quantise(precision)

    def be_invariant(self) -> None:
        """From now on compute the same bits for a token in a pass over it alone and over many (`model/invariant.py`).

        Raises ModelError for experts, another dtype than float32 and bfloat16, and a machine without a C compiler.
        """
        if self.config.family.experts:
            raise ModelError(f"--invariant: given a {self.config.model_type}, needed a model without experts")
        invariant.require_kernels(self.dtype)
        self.invariant = True
        for module in self.modules():
            if isinstance(module, Linear):
                module.invariant = True

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that a carried value with this model trains, saves and sends: its adapters if it has some,
        else all. Other parameters belong to the base, which never changes."""
        # Scales of a weight have the name under which they are sent.
        named = {name.replace(".row_scales", ".weight.scale"): p for name, p in self.named_parameters()}
        return named if self.lora is None else {name: p for name, p in named.items() if is_adapter(name)}

    def await_weights(self) -> int:
        """Free the memory of `own_parameters`: until others arrive (`point_at`), they only have their shapes. Return
        the bytes that will arrive: two versions of them."""
        parameters = self.own_parameters().values()
        for parameter in parameters:
            parameter.data = parameter.new_empty(()).expand(parameter.shape)
        return 2 * sum(parameter.nbytes for parameter in parameters)

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None = None,
        attend: Attend | None = None,
        route: Route | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [B, S, D]. Positions default to 0, 1, …; attention is causal by default;
        the router chooses the experts by default."""
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        ropes = [(cos[positions_BS].unsqueeze(-2), sin[positions_BS].unsqueeze(-2)) for cos, sin in self.tables]
        ordinary = invariant.attend_causal if self.invariant else attend_causal
        hidden_BSD: Tensor = self.model(tokens_BS, ropes, attend or ordinary, route)
        return hidden_BSD

    @property
    def tables(self) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines of rotary positions, [P, K] both, of each of the model's `ropes`."""
        return [(getattr(self, cos), getattr(self, sin)) for cos, sin in _TABLES[: len(self.config.ropes)]]

    @property
    def takes_end_to_end(self) -> bool:
        """True if the model can train on sequences laid end to end in a row, without padding."""
        return self.device.type == "cpu" and not self.invariant and causal.functions(self.dtype) is not None

    @property
    def architecture(self) -> str:
        """The name of `transformers`' class for this model."""
        return self.config.family.name + self.head

    @property
    def device(self) -> torch.device:
        return self.cos_PK.device

    @property
    def dtype(self) -> torch.dtype:
        return self.cos_PK.dtype

    def shard_vocab(self, vocab: VocabShard) -> None:
        """Compute with an embedding and a head of only these words, together with the other ranks of `words`."""
        self.vocab = self.model.embed_tokens.vocab = vocab

    def distribute_experts(self, placement: ExpertPlacement) -> None:
        """Keep only this rank's experts of each layer. Without experts do nothing."""
        for module in self.modules():
            if isinstance(module, Experts):
                module.distribute(placement)

    def recompute_layers(self) -> None:
        """From now on a layer keeps only its input, and computes the rest again in the backward pass, to the bit."""
        for layer in self.model.layers.values():
            assert isinstance(layer, _Layer)
            layer.recompute = True

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal weights of `initializer_range`, scaled down if they write into the residual stream (GPT-2).

        A function of the seed only: device, dtype and the global generator do not change what is drawn, and models with
        different heads have the same decoder. The head of a `Scorer` and biases are zero.
        """
        generator, neutral = torch.Generator().manual_seed(seed), 1.0 - self.config.family.norm_offset
        for name, parameter in self.named_parameters():
            if is_adapter(name):
                parameter.copy_(initial(name, parameter.shape, seed))
                continue
            if parameter.dim() == 1 or name == "score.weight":
                parameter.fill_(neutral if name.endswith("norm.weight") else 0.0)
                continue
            std = self.config.initializer_range
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * self.config.num_hidden_layers)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


class CausalLM(Decoder):
    """The language model."""

    head = "ForCausalLM"
    lm_head: "_Head | None"
    _packed_head: Tensor | None = None

    def _add_head(self) -> None:
        config = self.config
        self.lm_head = None if config.tie_word_embeddings else _Head(config.hidden_size, config.vocab_size)

    @property
    def attention_config(self) -> ModelConfig:
        """The configuration with the heads that `attend` gets on this rank, which may be a part of all."""
        return self.config

    def with_head(self, hidden: Tensor, compute: Callable[[Tensor, Tensor], Result]) -> Result:
        """`compute(hidden states, matrix)`, where the matrix [W, D] maps them to logits of this rank's words; it is the
        embedding's if they are tied. `compute` must not return views, since FSDP hooks into their gradients."""
        if self.lm_head is None:
            return compute(hidden, own_part(self.model.embed_tokens.weight))
        return self.lm_head(hidden, compute)  # type: ignore[no-any-return]

    def own_logits(self, hidden_BSD: Tensor) -> Tensor:
        """Unnormalised log-probabilities of the next token for this rank's words, [B, S, W]."""
        if self._packed_head is not None:
            return multiplied(hidden_BSD, self._packed_head)
        return self.with_head(self.vocab.shared(hidden_BSD), invariant.linear if self.invariant else linear)

    def neighbours(self) -> list[tuple[str, ...]]:
        """Names of parameters that can be used as one product if they are contiguous in memory: see `pack`."""
        found: list[tuple[str, ...]] = []
        names = self.own_parameters()
        for index in self.model.layers:
            for part, maps in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
                for kind in ("weight", "weight.scale", "bias"):
                    each = tuple(f"model.layers.{index}.{part}.{name}.{kind}" for name in maps)
                    found += [each] if all(name in names for name in each) else []
        return found

    def pack(self, rows: int) -> None:
        """Prepare products of passes over this many tokens with the present weights. See `kernels.pack`."""
        if self.invariant:
            return
        for layer in self.model.layers.values():
            assert isinstance(layer, _Layer)
            attention, mlp = layer.self_attn, layer.mlp
            pack((attention.q_proj, attention.k_proj, attention.v_proj), rows)
            pack((attention.o_proj,), rows)
            if isinstance(mlp, Mlp):
                pack((mlp.gate_proj, mlp.up_proj), rows)
                pack((mlp.down_proj,), rows)
        self._packed_head = self.with_head(torch.empty(0), lambda _, weight_WD: packed(weight_WD.detach(), rows))

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """Unnormalised log-probabilities of the next token, [B, S, V]."""
        return self.vocab.gather(self.own_logits(hidden_BSD))


class Scorer(Decoder):
    """A decoder that computes a number for each token: a critic, or a reward model.

    Named and shaped as `LlamaForSequenceClassification` with one label, or another family's: the head is
    `score.weight`, [1, D].
    """

    head = "ForSequenceClassification"

    def _add_head(self) -> None:
        self.score = Linear(self.config.hidden_size, 1)

    @property
    def architecture(self) -> str:
        family = self.config.family
        return (family.scorer_name or family.name) + self.head

    def values(self, hidden_PD: Tensor) -> Tensor:
        """The number of each hidden state, float32, without the last dimension."""
        return F.linear(hidden_PD, self.score.weight).float().squeeze(-1)


class _Head(Linear):
    """A head whose weights are used only within its forward pass, since FSDP gathers them around that."""

    def forward(self, x: Tensor, compute: Callable[[Tensor, Tensor], Any] = linear) -> Any:
        return compute(x, own_part(self.weight))


class _Layers(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        scale = math.sqrt(config.hidden_size) if config.family.scaled_embedding else 1.0
        self.embed_tokens = WordEmbedding(VocabShard(config.vocab_size), config.hidden_size, scale, config.pad_token_id)
        self.layers = nn.ModuleDict({str(i): _Layer(config, i) for i in range(config.num_hidden_layers)})
        self.norm: nn.Module = Norm(config.hidden_size, config)

    def forward(
        self, tokens_BS: Tensor, ropes: Sequence[tuple[Tensor, Tensor]], attend: Attend, route: Route | None
    ) -> Tensor:
        x_BSD = self.embed_tokens(tokens_BS)
        for layer in self.layers.values():
            assert isinstance(layer, _Layer)
            x_BSD = layer(x_BSD, ropes[layer.rope], attend, route)
        return self.norm(x_BSD)  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config)
        self.self_attn = _Attention(config, index)
        self.post_attention_layernorm = Norm(config.hidden_size, config)
        self.mlp = Experts(config, index) if config.family.experts else Mlp(config, config.intermediate_size)
        self.branch_norms, self.rope, self.recompute = config.family.branch_norms, config.rope_of(index), False
        if self.branch_norms:
            # The norms before and after the MLP; then `post_attention_layernorm` is that after attention.
            self.pre_feedforward_layernorm = Norm(config.hidden_size, config)
            self.post_feedforward_layernorm = Norm(config.hidden_size, config)

    def forward(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, route: Route | None) -> Tensor:
        # Inside the module that FSDP wraps, so that its hooks gather the layer's weights once for the backward pass.
        # A layer computes nothing random, so no generator's state has to be kept.
        if self.recompute and torch.is_grad_enabled():
            given = self._compute, x_BSD, rope, attend, route
            return checkpoint(*given, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return self._compute(x_BSD, rope, attend, route)

    def _compute(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, route: Route | None) -> Tensor:
        # In two functions, so that the output of one branch is freed while the next one computes.
        x_BSD = x_BSD + self._seen(x_BSD, rope, attend)
        return x_BSD + self._made(x_BSD, route)

    def _seen(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """The output of the attention branch."""
        seen_BSD: Tensor = self.self_attn(self.input_layernorm(x_BSD), rope, attend)
        return self.post_attention_layernorm(seen_BSD) if self.branch_norms else seen_BSD

    def _made(self, x_BSD: Tensor, route: Route | None) -> Tensor:
        """The output of the MLP branch."""
        if not self.branch_norms:
            return self.mlp(self.post_attention_layernorm(x_BSD), route)  # type: ignore[no-any-return]
        made_BSD = self.mlp(self.pre_feedforward_layernorm(x_BSD), route)
        return self.post_feedforward_layernorm(made_BSD)  # type: ignore[no-any-return]


class Norm(nn.RMSNorm):
    """Root-mean-square norm of a last dimension of this width, computed in float32."""

    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__(width, config.rms_norm_eps)
        self.offset = config.family.norm_offset
        # With tensor parallelism: the ranks that each apply this norm to some of the heads.
        self.sharers: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.sharers is None else shared(self.weight, self.sharers)
        return rms_norm(x, weight, self.eps, self.offset)  # type: ignore[arg-type]


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index, self.head_dim, self.window = index, config.head_dim, config.window_of(index)
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        family = config.family
        self.q_proj = Linear(config.hidden_size, queries, family.qkv_bias)
        self.k_proj = Linear(config.hidden_size, keys, family.qkv_bias)
        self.v_proj = Linear(config.hidden_size, keys, family.qkv_bias)
        self.o_proj = Linear(queries, config.hidden_size)
        self.q_norm, self.k_norm = (
            Norm(config.head_dim, config) if family.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = (*x_BSD.shape[:2], -1, self.head_dim)
        q_BSHK, k_BSGK, v_BSGK = (x.view(heads) for x in together(x_BSD, self.q_proj, self.k_proj, self.v_proj))
        q_BSHK, k_BSGK = self.q_norm(q_BSHK), self.k_norm(k_BSGK)
        q_BSHK, k_BSGK = rotate(q_BSHK, k_BSGK, *rope)
        out_BSHK = attend(self.index, q_BSHK, k_BSGK, v_BSGK, self.window)
        return self.o_proj(out_BSHK.flatten(2))  # type: ignore[no-any-return]


def attend_causal(layer: int, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, window: int = 0) -> Tensor:
    """Causal attention within each row. An `Attend`."""
    if causal.suits(q_BSHK, k_BSGK, v_BSGK):
        return causal.attend(q_BSHK, k_BSGK, v_BSGK, window)
    dtype, length = q_BSHK.dtype, q_BSHK.shape[1]
    # The backward pass of torch's CPU kernel for bfloat16 is three times as slow.
    if q_BSHK.device.type == "cpu":
        q_BSHK, k_BSGK, v_BSGK = q_BSHK.float(), k_BSGK.float(), v_BSGK.float()
    q_BHSK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
    grouped = q_BHSK.shape[1] != k_BGSK.shape[1]
    seen_SS = None
    if 0 < window < length:
        seen_SS = torch.ones(length, length, dtype=torch.bool, device=q_BSHK.device).tril().triu(1 - window)
    plain = seen_SS is None
    if grouped and q_BHSK.device.type == "cuda" and not (plain and dtype != torch.float32):
        # torch's kernels for a mask or for float32 (2.11 to 2.13) do not support groups, except cuDNN's for some heads
        # on some GPUs: torch would fall back to one that keeps the scores of all pairs of tokens.
        each, grouped = q_BHSK.shape[1] // k_BGSK.shape[1], False
        k_BGSK, v_BGSK = (x.repeat_interleave(each, 1) for x in (k_BGSK, v_BGSK))
    out_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BGSK, v_BGSK, seen_SS, is_causal=plain, enable_gqa=grouped)
    return out_BHSK.transpose(1, 2).to(dtype)


def attend_end_to_end(starts_C: Tensor, families_F: Tensor | None = None) -> Attend:
    """Causal attention of sequences laid end to end, as in `causal.attend`; see `Decoder.takes_end_to_end`."""
    lie = starts_C, families_F
    return lambda layer, q_BSHK, k_BSGK, v_BSGK, window: causal.attend(q_BSHK, k_BSGK, v_BSGK, window, *lie)


def rope_tables(config: ModelConfig, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position, [P, K] both, of one of `config.ropes`."""
    frequencies_F = rope_frequencies(config.head_dim, theta, scaling)
    angles_PF = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies_F)
    # The table's sine carries the signs of `rotate`: one fused operation instead of a negation and two products.
    scale = 1.0 if scaling is None else scaling.attention_factor
    if config.query_pre_attn_scalar is not None:
        # Attention divides by the root of `head_dim`. The tables make up the difference: half in queries, half in keys.
        scale *= (config.head_dim / config.query_pre_attn_scalar) ** 0.25
    cos_PF, sin_PF = angles_PF.cos() * scale, angles_PF.sin() * scale
    return torch.cat((cos_PF, cos_PF), 1), torch.cat((-sin_PF, sin_PF), 1)


def rope_frequencies(width: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each pair, [K / 2], for heads of this width, scaled by `scaling`."""
    frequencies_F = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
    if scaling is None:
        return frequencies_F
    if scaling.rope_type == "linear":
        return frequencies_F / scaling.factor
    if scaling.rope_type == "yarn":
        low, high = (
            width * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        low, high = (math.floor(low), math.ceil(high)) if scaling.truncate else (low, high)
        low, high = max(low, 0), min(high, width - 1)
        pairs_F = torch.arange(width // 2).float()
        keep_F = 1 - ((pairs_F - low) / (high - low or 0.001)).clamp(0, 1)
    else:
        turns_F = scaling.original_max_position_embeddings * frequencies_F / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep_F = ((turns_F - low) / (high - low)).clamp(0, 1)
    return keep_F * frequencies_F + (1 - keep_F) * frequencies_F / scaling.factor
