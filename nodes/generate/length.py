"""How long prompts and responses may be: a slot's room, and what is looked at before a run starts."""

from collections.abc import Iterable
from heapq import nlargest

from penstock.graph.call import Call
from penstock.graph.faults import Fault, GraphError
from penstock.graph.types import Context, Prompts
from penstock.nodes.base import spec_of
from penstock.nodes.data import FilePrompts
from penstock.nodes.tokenizer import Tokenizer

MAX_PROMPT = 2048
"""Tokens of the longest prompt, or conversation before its last turn, that a slot's cache has room for, unless the
program has an option `max_prompt`."""
MOST_LOOKED_AT, MOST_TOLD = 20_000, 5
"""Prompts of a file that are turned into tokens before a run starts, the longest texts first: a few seconds' worth. And
how many of those that are too long are told."""


def cache_length(positions: int, context: Context) -> int:
    """Positions of a slot: a prompt of `max_prompt` tokens (an option of the program) and a response, at most those of
    the model's context. Every slot has its cache from the start: a context of 128k tokens would fit no machine.

    Raises GraphError for a `max_tokens` that leaves no room for a prompt.
    """
    if not 1 <= context.max_tokens < positions:
        needed = f"1 to {positions - 1}: the model's context has {positions} tokens, and a prompt takes at least one"
        raise GraphError(Fault("--max-tokens", str(context.max_tokens), needed))
    return min(positions, int(context.options.get("max_prompt", MAX_PROMPT)) + context.max_tokens)


def needed_prompt(length: int, context: Context) -> str:
    """What is needed of a prompt, or a conversation so far, where a slot has so many positions."""
    return f"at most {length - context.max_tokens}: the context of {length} less max_tokens {context.max_tokens}"


def room(call: Call) -> None:
    """What sampling requires: weights of a model that is known and says words, with room for a response, and prompts
    with room for one after them.

    All prompts of a file are looked at, as far as `MOST_LOOKED_AT` goes, and of another source the first.
    """
    spec = spec_of(call, "behaviour")
    if call.context is None or spec is None:
        return
    length = cache_length(spec.config.max_position_embeddings, call.context)
    source, most = call.source("prompts"), length - call.context.max_tokens
    if isinstance(source, FilePrompts):
        found = _too_long(source, spec.tokenizer, most)
    elif isinstance(first := call.first("prompts"), Prompts):
        texts = [(f"group {ordinal}", text) for ordinal, text in zip(first.ordinals, first.texts, strict=True)]
        found = _measured(spec.tokenizer, texts, most)
    else:
        return
    if found:
        needed = needed_prompt(length, call.context)
        more = f", one of {len(found)} that are too long" if len(found) > MOST_TOLD else ""
        told = found[:MOST_TOLD]
        raise GraphError(*(Fault("a prompt", f"a prompt of {n} tokens{more}", needed, place) for place, n in told))


def _too_long(source: FilePrompts, tokenizer: Tokenizer, most: int) -> list[tuple[str, int]]:
    """The file's prompts that have more tokens, with their places, in the file's order."""
    suspects = [(place, text) for place, text in source.texts() if tokenizer.bound(text) > most]
    longest = {place for place, _ in nlargest(MOST_LOOKED_AT, suspects, key=lambda suspect: len(suspect[1]))}
    found = _measured(tokenizer, (suspect for suspect in suspects if suspect[0] in longest), most)
    return sorted(found, key=lambda item: int(item[0].rpartition(":")[2]))


def _measured(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]], most: int) -> list[tuple[str, int]]:
    counts = ((place, len(tokenizer.encode_prompt(text))) for place, text in texts)
    return [(place, count) for place, count in counts if count > most]
