"""The model that a run starts from: an HF directory, or a small untrained one made from the seed."""

from penstock.graph.types import Context
from penstock.nodes.model import Llama, ModelConfig, load_model, torch_dtype
from penstock.nodes.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer

ARITHMETIC_ALPHABET = "0123456789+-="


def open_model(context: Context, dtype: str | None = None) -> tuple[Llama, Tokenizer]:
    """The model in `dtype` (the run's, if None) on the run's device, and its tokenizer.

    With no `context.model` it is `initial_config`, its weights drawn from the seed alone: every pool makes the same.
    """
    dtype = dtype or context.dtype
    if context.model:
        return load_model(context.model, dtype, context.device), load_tokenizer(context.model)
    tokenizer = initial_tokenizer(context)
    model = Llama(initial_config(tokenizer), torch_dtype(dtype), context.device)
    model.init_weights(context.seed)
    return model, tokenizer


def initial_tokenizer(context: Context) -> Tokenizer:
    """One token per character of arithmetic; for other data one per byte."""
    arithmetic = context.data.partition(":")[0] in ("", "arithmetic")
    return byte_tokenizer(ARITHMETIC_ALPHABET if arithmetic else None)


def initial_config(tokenizer: Tokenizer) -> ModelConfig:
    """Two layers, 128 wide: as small as two-digit arithmetic allows."""
    return ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_ids=tokenizer.stops,
        pad_token_id=tokenizer.pad,
    )
