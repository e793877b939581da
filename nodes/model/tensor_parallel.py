"""How models are sharded over ranks, as plain data: tensor parallelism, experts, pipeline stages. Also one rank's part
of a language model for generation (`CausalLMPart`, `CausalLMWithOwnExperts`).

Tensor parallelism is that of Megatron-LM (Shoeybi et al., 2019, section 3). The matrices that widen (queries, keys,
values, gate, up) are cut by output rows, those that narrow (attention output, down) by input columns, embedding and
head over the vocabulary; norms, routers of experts, and the head of a scorer are whole on every rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.graph.protocols import Rule, stage_of_layer
from penstock.nodes.model.config import ModelConfig, ModelError
from penstock.nodes.model.decoder import CausalLM
from penstock.nodes.model.expert_parallel import Gather
from penstock.nodes.model.lora import TARGETS, A, B, Lora
from penstock.nodes.model.vocab_parallel import VocabShard


def tensor_parallel(config: ModelConfig) -> dict[str, Rule]:
    """The rule of every parameter, by the end of its name. Attention is cut between heads, keys and values between
    key-value heads: with more ranks than key-value heads, neighbours hold the same ones. One matrix of an adapter is
    cut like its linear map, the other is whole.
    """
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    rules: dict[str, Rule] = {
        "embed_tokens.weight": (0, 0),
        "q_proj.weight": (0, heads),
        "k_proj.weight": (0, groups),
        "v_proj.weight": (0, groups),
        "q_proj.bias": (0, heads),
        "k_proj.bias": (0, groups),
        "v_proj.bias": (0, groups),
        "o_proj.weight": (1, heads),
        "gate_proj.weight": (0, 0),
        "up_proj.weight": (0, 0),
        "down_proj.weight": (1, 0),
        "mlp.gate.weight": None,
        "norm.weight": None,
        "layernorm.weight": None,
        "lm_head.weight": (0, 0),
        "score.weight": None,
    }
    for target in TARGETS:
        rule = rules[f"{target}.weight"]
        assert rule is not None
        rules[f"{target}.{A}"], rules[f"{target}.{B}"] = (None, rule) if rule[0] == 0 else (rule, None)
    return rules


def part_of(shape: Sequence[int], rule: Rule, parts: int, part: int) -> tuple[slice, ...]:
    """The region of a tensor of this shape that part `part` of `parts` has in generation, by `tensor_parallel`."""
    region = [slice(0, size) for size in shape]
    if rule is not None:
        dim, units = rule
        # Without units it is cut like a vocabulary: into equal runs, of which the last one may be shorter.
        whole = shape[dim] // units if units else -(-shape[dim] // parts)
        first, count = (part * units // parts, max(1, units // parts)) if units else (part, 1)
        region[dim] = slice(min(shape[dim], first * whole), min(shape[dim], (first + count) * whole))
    return tuple(region)


def check_tensor_parallel(config: ModelConfig, parts: int, *, shared_heads: bool) -> None:
    """Raises ModelError for a model that cannot be cut into this many parts, or with a vocabulary so small that a rank
    would have no word. With `shared_heads` several ranks may hold the same key-value head."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    width = "moe_intermediate_size" if config.family.experts else "intermediate_size"
    inner = getattr(config, width)
    # DTensor cuts keys and values into equal parts. Only a generator's ranks can hold a head twice.
    divided = groups % parts == 0 or (shared_heads and parts % groups == 0)
    faults = [f"{heads} attention heads"] if heads % parts else []
    faults += [] if divided else [f"{groups} key-value heads"]
    faults += [f"{'a' if config.family.experts else 'an'} {width} of {inner}"] if inner % parts else []
    if faults:
        needed = f"numbers that tp {parts} divides" + (", or fewer key-value heads that divide it" * shared_heads)
        raise ModelError(f"tensor parallelism: given {', '.join(faults)}, needed {needed}")
    if not VocabShard(config.vocab_size, parts, parts - 1).count:
        raise ModelError(f"tensor parallelism: given {config.vocab_size} words over tp {parts}, needed some for each")


def check_experts(config: ModelConfig, ranks: int) -> None:
    """Raises ModelError for a model whose experts cannot be distributed evenly over this many ranks."""
    if config.num_experts % ranks or (ranks > 1 and not config.num_experts):
        given = f"{config.num_experts} experts" if config.num_experts else f"a {config.model_type} without experts"
        raise ModelError(f"expert parallelism: given {given}, needed a number of experts that ep {ranks} divides")


def part_config(config: ModelConfig, parts: int, part: int) -> ModelConfig:
    """The shapes of one rank's part by `tensor_parallel`, as a configuration: heads, inner width and vocabulary.

    Raises ModelError as `check_tensor_parallel` does.
    """
    check_tensor_parallel(config, parts, shared_heads=True)
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // parts,
        num_key_value_heads=max(1, config.num_key_value_heads // parts),
        intermediate_size=config.intermediate_size // parts,
        moe_intermediate_size=config.moe_intermediate_size // parts,
        vocab_size=VocabShard(config.vocab_size, parts, part).count,
    )


def stages_of(config: ModelConfig, names: Iterable[str], stages: int) -> dict[str, tuple[int, ...]]:
    """The stages that hold each of these parameters: layers are in runs of nearly equal length, the embedding is on the
    first stage, norm and head on the last. A tied embedding is on both.

    Raises ModelError for more stages than layers.
    """
    if not 1 <= stages <= config.num_hidden_layers:
        needed = f"1 to {config.num_hidden_layers}, the number of layers"
        raise ModelError(f"pipeline: given {stages} stages, needed {needed}")
    last = stages - 1
    found = dict[str, tuple[int, ...]]()
    for name in names:
        if name.startswith("model.layers."):
            found[name] = (stage_of_layer(int(name.split(".")[2]), config.num_hidden_layers, stages),)
        elif name == "model.embed_tokens.weight":
            found[name] = tuple(sorted({0, last})) if config.tie_word_embeddings else (0,)
        else:
            found[name] = (last,)
    return found


class CausalLMPart(CausalLM):
    """Part `part` of `parts`, which are the ranks of the default group in order. It has plain tensors and explicit
    collectives, and no gradients.

    Each rank has some of the heads and of the MLP's inner width; outputs of attention and MLP are summed over the
    ranks. The embedding is cut over the vocabulary, so a look-up is such a sum, too. The head is cut as well, and
    logits are gathered: all ranks sample from logits that are equal to the bit. `config` is that of the whole model.
    Raises ModelError for a model that cannot be cut so.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: str, parts: int, part: int, lora: Lora | None = None
    ) -> None:
        super().__init__(part_config(config, parts, part), dtype, device, lora=lora)
        self._heads, self.config = self.config, config
        self.shard_vocab(VocabShard(config.vocab_size, parts, part))
        for name, module in self.model.named_modules():
            if name.endswith(("o_proj", "mlp")):
                module.register_forward_hook(_sum)

    @property
    def attention_config(self) -> ModelConfig:
        return replace(self._heads, vocab_size=self.config.vocab_size)


class CausalLMWithOwnExperts(CausalLM):
    """Part `part` of `parts`, which are the ranks of the default group in order: each has a share of every layer's
    experts, and all other weights. All ranks compute the same tokens; their logits have the bits of a single rank's.
    There are no gradients. Raises ModelError for experts that cannot be distributed so.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: str, parts: int, part: int, lora: Lora | None = None
    ) -> None:
        check_experts(config, parts)
        super().__init__(config, dtype, device, lora=lora, unread=True)
        self.distribute_experts(Gather(parts, part))
        # Other ranks' experts never had memory. Buffers keep theirs.
        buffers = dict(self.named_buffers())
        self.to_empty(device=device)
        for name, buffer in buffers.items():
            setattr(self, name, buffer)


def _sum(module: nn.Module, given: tuple[Tensor, ...], own: Tensor) -> Tensor:
    """Sum `own` over all ranks: a forward hook of modules whose output is one rank's summand."""
    dist.all_reduce(own)
    return own
