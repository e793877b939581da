"""The node that samples responses."""

from typing import Any

from penstock.graph import node, requires
from penstock.graph.types import Context, Metrics, Prompts, Replies, Rollouts, Weights
from penstock.nodes.base import same_words, weights_spec
from penstock.nodes.generate.engine import Engine
from penstock.nodes.generate.length import room
from penstock.nodes.generate.reply import reply
from penstock.nodes.generate.sampling import Sampler, scorable
from penstock.nodes.model import Llama, ModelConfig, torch_dtype
from penstock.nodes.model.part import LlamaPart
from penstock.nodes.numbers import count, not_negative, positive, share
from penstock.nodes.parallel.fits import check_decoding
from penstock.nodes.parallel.ranks import Ranks


def make_engine(
    context: Context, *, samples: int = 8, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Engine:
    """An engine for the model whose weights `behaviour` is. It reads none of them: they come with the firings."""
    if samples < 1 or context.slots < 1:
        raise ValueError(f"generate: given samples {samples} and {context.slots} slots, needed 1 or more of each")
    spec = weights_spec(context)
    return Engine(_model(spec.config, context), spec.tokenizer, context, Sampler(temperature, top_k, top_p), samples)


def _model(config: ModelConfig, context: Context) -> Llama:
    """The model, or this rank's part of it."""
    ranks = Ranks.of(context)
    check_decoding(config, ranks.mesh)
    kind = torch_dtype(context.dtype), context.device
    return Llama(config, *kind) if ranks.count == 1 else LlamaPart(config, *kind, ranks.count, ranks.rank)


@requires(room, same_words, not_negative("temperature"), count(0, "top_k"), share("top_p"), positive("top_p"), scorable)
@node(pool="generator", init=make_engine)
def generate(
    engine: Engine,
    prompts: Prompts,
    behaviour: Weights,
    conversation: Rollouts | None = None,
    replies: Replies | None = None,
    *,
    samples: int = 8,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Engine, Rollouts, Metrics]:
    """`samples` responses to each prompt, sampled token by token with the live weights.

    The model is that of the carried value whose weights `behaviour` is: its shape, and its tokenizer.

    The recorded log-probabilities are those of the distribution that was sampled from (see `Sampler`). The temperature
    travels with the rollouts, and updates and other nodes that score them apply it: the policy is softmax(logits /
    temperature), whoever computes it. Rollouts of temperature 0, and of `top_k` or `top_p`, cannot be scored: `check`
    refuses a program in which an update of a policy learns from them (see `scorable`). A response ends with a stop
    token, or after `max_tokens`.

    With a `conversation` (what this node made in the turn before) and the environment's `replies` to it, each row that
    is not done goes on for another turn of at most `max_tokens`, after its tokens as they were sampled and those of
    the reply; the others pass through. A row without room for the reply and a turn (see `max_prompt` in `engine.py`)
    ends as it was, with `finished_N` False, so an environment should take an unfinished row for done. What comes out
    is the whole conversation each time; `converse` plays all turns.

    Metrics: `generated_tokens` (of the turn), `response_length` (tokens of a row in it), `stale_cache` (share of tokens
    whose cache holds entries of older weights), from the second turn on `outgrown` (share of rows that ended for want
    of room), and once per batch, for its first group or else the next one that the live weights alone have made,
    `mismatch` (mean |difference| to the trainer's log-probabilities at equal weights, nats).
    """
    given, made = (samples, Sampler(temperature, top_k, top_p)), (engine.samples, engine.sampler)
    if given != made:
        raise ValueError(f"generate: given {given}, needed the options that its engine was made with: {made}")
    tag = object()
    inputs = {"prompts": prompts, "behaviour": behaviour, "conversation": conversation, "replies": replies}
    engine.submit(tag, inputs)
    while True:
        results: dict[Any, tuple[Rollouts, Metrics]] = dict(engine.step())
        if tag in results:
            return engine, *results[tag]


generate.answering = reply
