"""`cut` makes prefixes: beginnings of responses as they were sampled, which `generate(…, after=prefixes)` continues.

They are the start of Monte-Carlo values of states within a response (VinePPO), of branching and of tree search:
responses that continue prefixes may be cut again. A function `at` of the response says where it is cut.

Shapes: N prefixes, S tokens of prompt and response, T tokens of a response.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.graph import node, requires
from penstock.graph.context import Context
from penstock.graph.requires import Call
from penstock.graph.types import Mean, Metrics, Prefixes, Rollouts
from penstock.nodes.learn.batching import behaviour_logprobs
from penstock.nodes.open_model import ModelSpec, run_spec
from penstock.nodes.option_checks import count


class Said(NamedTuple):
    """A response as `at` sees it: the text of each token, and its log μ (nats). A stop token at the end is left out."""

    texts: list[str]
    logprobs: list[float]


# How many tokens each prefix of a response keeps; 0 is the prompt alone.
At = Callable[[Said], Sequence[int]]


def after_text(said: Said, *, text: str = "\n") -> Sequence[int]:
    """After each token that completes `text`, such as the end of a reasoning step."""
    whole, ends = "", []
    for number, piece in enumerate(said.texts, 1):
        # `text` has to end within this token. It may have several tokens, or begin in the middle of one.
        begin = max(0, len(whole) + 1 - len(text))
        whole += piece
        if text in whole[begin:]:
            ends.append(number)
    return [end for end in ends if end < len(said.texts)]


@requires(count(1, "tokens"))
def after_tokens(said: Said, *, tokens: int = 16) -> Sequence[int]:
    """After every `tokens` tokens."""
    return range(tokens, len(said.texts), tokens)


def whole_responses(call: Call) -> None:
    """Requirement of `cut`: responses of one turn."""
    for name in call.behind("rollouts"):
        if call.view.nodes[name].turns is not None:
            needed = "responses of one turn: no prefix says what an environment had replied"
            raise call.lack(f"conversations of {name}", needed, input="rollouts", code="prefix-in-conversation")


@requires(count(1, "most"), whole_responses)
@node(pool="scorer")
def cut(
    rollouts: Rollouts, *, at: At = after_text, most: int = 8, context: Context | None = None
) -> tuple[Prefixes, Metrics]:
    """Prefixes of each response, cut where `at` says: the sub-prompts of the group, numbered in the order of its rows.

    `at(said)` returns how many tokens each prefix keeps, at least 0 and fewer than `said` has; `after_text` and
    `after_tokens` are two such functions. Of more than `most` places in a row, `most` are taken, spread evenly. A row
    that itself continues a prefix is cut only after that. A row without a place has no prefix, so a group may have
    none.

    Tokens, log μ, versions and experts are those of the rollouts: nothing is encoded again. Metrics: `prefixes` (of the
    group), `prefix_length` (response tokens of a prefix, on average).

    Raises ValueError for a place that is out of range, for conversations, and for rollouts of another tokenizer than
    that of the run's model.
    """
    spec = _spec(context.model, context.data) if context is not None else _spec("", "")
    logprobs_NT = behaviour_logprobs(rollouts, "cut")
    rows, lengths = list[int](), list[int]()
    for row in range(len(rollouts)):
        places = _places(rollouts, row, logprobs_NT, spec, at)
        if len(places) > most:  # the middles of equal parts
            places = [places[len(places) * (2 * number + 1) // (2 * most)] for number in range(most)]
        rows += [row] * len(places)
        lengths += places
    of_N, lengths_N = torch.tensor(rows, dtype=torch.long), torch.tensor(lengths, dtype=torch.long)
    begins_N = rollouts.prompt_lengths_N[of_N]
    ordinals = tuple(rollouts.ordinals[row] for row in rows)
    own_rows = [rollouts.ordinals[:row].count(rollouts.ordinals[row]) for row in rows]
    prefixes = Prefixes(
        ordinals=ordinals,
        numbers_N=torch.tensor([ordinals[:n].count(o) for n, o in enumerate(ordinals)], dtype=torch.long),
        rows_N=torch.tensor(own_rows, dtype=torch.long),
        tokens_NS=_begins(rollouts.tokens_NS, of_N, begins_N + lengths_N),
        prompt_lengths_N=begins_N,
        lengths_N=lengths_N,
        logprobs_NT=_begins(logprobs_NT, of_N, lengths_N),
        versions_NT=_begins(rollouts.versions_NT, of_N, lengths_N),
        temperature_N=rollouts.temperature_N[of_N],
        cut_N=rollouts.cut_N[of_N],
        experts_NSLK=(
            None if rollouts.experts_NSLK is None else _begins(rollouts.experts_NSLK, of_N, begins_N + lengths_N)
        ),
    )
    return prefixes, {"prefixes": float(len(rows)), "prefix_length": Mean.of(lengths)}


def _places(rollouts: Rollouts, row: int, logprobs_NT: Tensor, spec: ModelSpec, at: At) -> list[int]:
    """The number of tokens that each prefix of a row keeps, in order. Raises ValueError as `cut` does."""
    where, tokenizer = f"cut, {rollouts.place(row)}", spec.tokenizer
    if len(rollouts.transcripts[row]) != 1:
        given = f"a conversation of {len(rollouts.transcripts[row])} texts"
        raise ValueError(f"{where}: given {given}, needed a response of one turn")
    begin, length = int(rollouts.prompt_lengths_N[row]), int(rollouts.response_lengths_N[row])
    tokens = rollouts.tokens_NS[row, begin : begin + length].tolist()
    if tokens and tokens[-1] in tokenizer.stops:
        tokens = tokens[:-1]
    # A model may have a larger vocabulary than its tokenizer.
    if not all(0 <= token < spec.config.vocab_size for token in tokens) or (
        tokenizer.decode(tokens) != rollouts.texts[row]
    ):
        given = f"tokens that do not say {rollouts.texts[row]!r:.40} in the words of the run's model"
        raise ValueError(f"{where}: given {given}, needed rollouts of its own tokenizer")
    # Decode each token with the one before it: alone, a token may lose the space that it begins with.
    pairs = tokenizer.backend.decode_batch([tokens[max(0, n - 1) : n + 1] for n in range(len(tokens))])
    alone = tokenizer.backend.decode_batch([[token] for token in tokens])
    texts = [
        pair[len(before) :] if pair.startswith(before) else own
        for pair, before, own in zip(pairs, ["", *alone], alone, strict=False)
    ]
    try:
        named = list(at(Said(texts, logprobs_NT[row, : len(tokens)].tolist())))
    except Exception as error:
        error.add_note(f"{where}: response {rollouts.texts[row]!r:.80}")
        raise
    for place in named:
        if not (isinstance(place, int) and 0 <= place < max(1, len(tokens))):
            given = f"{place!r} by {getattr(at, '__name__', repr(at))}"
            raise ValueError(
                f"{where}: given {given}, needed 0 to {len(tokens) - 1}: what a prefix keeps of its tokens"
            )
    behind = -1
    if rollouts.prefixes_N is not None and int(rollouts.prefixes_N[row]) >= 0:
        behind = int(rollouts.prefix_lengths_N[row])
    return sorted({place for place in named if place > behind})


def _begins(values: Tensor, of_N: Tensor, lengths_N: Tensor) -> Tensor:
    """The first `lengths_N` entries of the rows `of_N`, padded with zeros."""
    width = int(lengths_N.max()) if len(lengths_N) else 0
    found = values[of_N, :width]
    beyond_NW = torch.arange(width) >= lengths_N[:, None]
    return found.masked_fill(beyond_NW.reshape(beyond_NW.shape + (1,) * (found.dim() - 2)), 0)


@lru_cache(maxsize=4)
def _spec(model: str, data: str) -> ModelSpec:
    return run_spec(Context(model=model, data=data))
