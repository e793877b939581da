"""The model that a run starts from: an HF directory, or a small untrained one made from the seed."""

from dataclasses import replace

from torch import nn

from penstock.graph.sharding import num_ranks
from penstock.graph.types import Context
from penstock.nodes.model import Llama, ModelConfig, Scorer, grow_scorer, load_model, read_config, torch_dtype
from penstock.nodes.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer

ALPHABET = "0123456789+-=:"
"""What arithmetic is written in."""
ARITHMETIC_CONTEXT, BYTE_CONTEXT = 32, 2048
"""Tokens of prompt and response together; attention over a cache costs as much as it can hold."""


def open_model(context: Context, dtype: str | None = None) -> tuple[Llama, Tokenizer]:
    """The model in `dtype` (the run's, if None) on the run's device, and its tokenizer.

    With no `context.model` it is `initial_model`, its weights drawn from the seed alone: every pool makes the same.
    """
    dtype = dtype or context.dtype
    if context.model:
        unread = num_ranks(context.mesh) > 1  # each rank reads what it cuts, layer by layer
        return load_model(context.model, dtype, context.device, unread=unread), load_tokenizer(context.model)
    config, tokenizer = initial_model(context.data)
    model = Llama(config, torch_dtype(dtype), context.device)
    model.init_weights(context.seed)
    return model, tokenizer


def open_scorer(context: Context, dtype: str) -> tuple[Scorer, Tokenizer]:
    """The same model with a head that gives every token the number zero, until it has learnt."""
    if context.model:
        unread = num_ranks(context.mesh) > 1
        return grow_scorer(context.model, dtype, context.device, unread=unread), load_tokenizer(context.model)
    config, tokenizer = initial_model(context.data)
    model = Scorer(config, torch_dtype(dtype), context.device)
    model.init_weights(context.seed)
    nn.init.zeros_(model.score.weight)
    return model, tokenizer


def require_model(context: Context) -> None:
    """What makers that open it require. Raises ModelError for a directory that holds no such model; its weights are not
    read."""
    open_model(replace(context, device="meta"))


def require_scorer(context: Context) -> None:
    """The same for those that put a head on it."""
    open_scorer(replace(context, device="meta"), context.dtype)


def model_config(context: Context) -> ModelConfig:
    """The shape of the model that both open."""
    return read_config(context.model) if context.model else initial_model(context.data)[0]


def model_tokenizer(model: str, data: str) -> Tokenizer:
    """The tokenizer of that model."""
    return load_tokenizer(model) if model else initial_model(data)[1]


def initial_model(data: str) -> tuple[ModelConfig, Tokenizer]:
    """Two layers, 128 wide: enough for three-digit arithmetic. Other data than arithmetic is read by bytes.

    Weights start near 1 / √width: from the usual 0.02 so narrow a model stays on its first plateau for over 1000
    updates of arithmetic, instead of some 200.
    """
    arithmetic = data.partition(":")[0] in ("", "arithmetic")
    tokenizer = byte_tokenizer(ALPHABET if arithmetic else None)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.08,
        max_position_embeddings=ARITHMETIC_CONTEXT if arithmetic else BYTE_CONTEXT,
        eos_token_ids=tokenizer.stops,
        pad_token_id=tokenizer.pad,
    )
    return config, tokenizer
