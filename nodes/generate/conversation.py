"""One turn of a prompt group: its rows, their conversations so far, and the rollouts made of them.

Invariants: sampled tokens never change. A reply of the environment is encoded once, when it arrives. No text is encoded
again.

Shapes: N rows (the samples of each prompt, one prompt after the other), S tokens of prompt and response, T tokens of a
response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from penstock.graph.types import Mean, Metrics, Prefixes, Prompts, Replies, Rollouts
from penstock.nodes.generate.sampling import Sampler
from penstock.nodes.learn.batching import behaviour_logprobs
from penstock.nodes.tokenizer import Tokenizer, TokenizerError

IntArray = np.ndarray[Any, np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]
# The experts of each token, [tokens, layers, K].
Experts = np.ndarray[Any, np.dtype[np.int16]]

# The version of tokens that were not sampled: those of an environment's reply.
NOT_SAMPLED = -1


class Response(NamedTuple):
    """Tokens that follow a prompt, the log-probability (nats) and the version of each, and whether the newest turn
    ended by itself: with a stop token or a stop string."""

    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    finished: bool

    def then(self, more: "Response") -> "Response":
        """This response, continued by `more`."""
        return Response(
            np.concatenate([self.tokens, more.tokens]),
            np.concatenate([self.logprobs, more.logprobs]),
            np.concatenate([self.versions, more.versions]),
            more.finished,
        )

    def after(self, count: int) -> "Response":
        """The response without its first `count` tokens."""
        return Response(self.tokens[count:], self.logprobs[count:], self.versions[count:], self.finished)


def never_said(text: Any, tokenizer: Tokenizer | None, max_tokens: int = 0) -> str:
    """What is needed in place of a stop string that always matches, or that never does in responses of at most
    `max_tokens` tokens (0: any number); "" for a valid one."""
    if not isinstance(text, str):
        return "texts"
    if not text:
        return "texts that are not empty"
    if tokenizer is None:
        return ""
    try:
        # Three times, so that the second copy is not changed as a tokenizer may change the beginning or end of a text.
        sayable = text in tokenizer.decode(tokenizer.encode(3 * text))
    except TokenizerError:
        sayable = False
    if not sayable:
        return "a text that the model can say, without special tokens and as its tokenizer writes it"
    if 0 < max_tokens < len(text.encode()):
        # Plus a space, which a token's text alone may lack.
        most = max_tokens * (1 + max(map(len, tokenizer.words)))
        if len(text) > most:
            return f"at most {most} characters: a response of {max_tokens} tokens (--max-tokens) cannot say more"
        # First what costs less: most texts are short enough as the tokenizer writes them.
        if len(tokenizer.encode(text)) > max_tokens and (least := tokenizer.fewest(text)) > max_tokens:
            return f"a text of at most {max_tokens} tokens (--max-tokens): to say this one takes {least} or more"
    return ""


class StopStrings:
    """Texts that end a response when its newest token completes one of them. Raises ValueError for a text that the
    model cannot generate."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        for text in texts:
            if needed := never_said(text, tokenizer):
                raise ValueError(f"generate: option 'stop': given {text!r}, needed {needed}")
        self.texts, self.tokenizer = tuple(texts), tokenizer
        # A text has at most as many tokens as bytes; a few more tokens may have no text.
        self.reach = max(len(text.encode()) for text in texts) + 4
        last = {text[-1] for text in texts}
        # Only tokens that can complete a text are checked, which are few. They include those whose own text is not
        # known alone: parts of a character, and words that may begin with a space.
        self.completing = np.array(
            [" " in last or not text.strip() or "\ufffd" in text or bool(last & {*text}) for text in tokenizer.words]
        )

    def end(self, tokens: IntArray) -> bool:
        """True if the last of a response's tokens ends it."""
        # A model may have a larger vocabulary than its tokenizer: the other tokens have no text.
        if tokens[-1] >= len(self.completing) or not self.completing[tokens[-1]]:
            return False
        said = self.tokenizer.decode(tokens[-self.reach :].tolist())
        return any(text in said for text in self.texts)


EMPTY = Response(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int64), True)


@dataclass
class SampledRow:
    """One conversation of a group.

    `before` has the earlier turns after the prompt, with the environment's reply to the last of them; its texts are the
    `transcript`. `rewards` are the environment's rewards after each earlier turn. `response` is the model's in this
    turn, None until it has ended or paused. `earlier_segments` is the part of it before its newest segment; the first
    `begun` tokens of that are a prefix, which another firing has sampled.

    A row that is not `open` gets no more tokens. `outgrown` is the number of tokens of a conversation that was closed
    because it has no room for the reply and another turn, otherwise 0. `experts`, [S, layers, K], are those of all
    tokens except the last one, which the model has not read; None if they are not recorded.
    """

    prompt: list[int]
    before: Response = EMPTY
    transcript: list[str] = field(default_factory=list)
    response: Response | None = None
    earlier_segments: Response = EMPTY
    begun: int = 0
    open: bool = True
    outgrown: int = 0
    rewards: list[float | None] = field(default_factory=list)
    experts: Experts | None = None

    def end_segment(self, segment: Response, experts: Experts | None) -> None:
        """End the turn or a segment. Tokens of earlier segments keep the experts that they were sampled with."""
        self.response = self.earlier_segments.then(segment)
        if experts is not None:
            earlier = experts[:0] if self.experts is None else self.experts
            self.experts = np.concatenate([earlier, experts[len(earlier) :]])

    @property
    def sampled(self) -> Response | None:
        """The tokens that this firing has sampled in this turn, without those of a prefix."""
        return None if self.response is None else self.response.after(self.begun)

    @property
    def prefix(self) -> list[int]:
        """The tokens that the model continues."""
        return [*self.prompt, *self.before.tokens.tolist(), *self.earlier_segments.tokens.tolist()]

    def paused(self, max_tokens: int) -> bool:
        """True if the turn, of at most `max_tokens`, has not ended yet."""
        response = self.response if self.open else None
        return response is not None and not response.finished and len(response.tokens) < max_tokens


def recorded_rows(rollouts: Rollouts, where: str) -> list[SampledRow]:
    """Rows whose `before` has the responses of rollouts. Raises ValueError, with `where`, for rollouts without
    log-probabilities."""
    arrays = rollouts.tokens_NS, behaviour_logprobs(rollouts, where), rollouts.versions_NT
    tokens_NS, logprobs_NT, versions_NT = (array.numpy(force=True) for array in arrays)
    lengths = zip(rollouts.prompt_lengths_N.tolist(), rollouts.response_lengths_N.tolist(), strict=True)
    rows = []
    for index, (begin, length) in enumerate(lengths):
        said, finished = tokens_NS[index, begin : begin + length], bool(rollouts.finished_N[index])
        before = Response(said, logprobs_NT[index, :length], versions_NT[index, :length], finished)
        row = SampledRow(tokens_NS[index, :begin].tolist(), before, rollouts.transcripts[index])
        if rollouts.experts_NSLK is not None:
            row.experts = rollouts.experts_NSLK[index, : begin + length - 1].numpy(force=True)
        rows.append(row)
    return rows


def begun_rows(prefixes: Prefixes) -> list[SampledRow]:
    """A row for each prefix, which continues it. Raises ValueError, with what was given and is needed, for arrays that
    do not fit together."""
    rows = len(prefixes.ordinals)
    tokens_NS, logprobs_NT, versions_NT = prefixes.tokens_NS, prefixes.logprobs_NT, prefixes.versions_NT
    arrays: dict[str, tuple[Any, int]] = {"tokens_NS": (tokens_NS, 2)}
    arrays |= {"logprobs_NT": (logprobs_NT, 2), "versions_NT": (versions_NT, 2)}
    arrays |= {name: (getattr(prefixes, name), 1) for name in ("numbers_N", "prompt_lengths_N", "lengths_N")}
    for name, (array, dims) in arrays.items():
        shape = list(getattr(array, "shape", ()))
        if len(shape) != dims or shape[0] != rows:
            needed = f"{dims} axes, the first of {rows} rows, one for each prefix"
            raise ValueError(f"given {name} of shape {shape}, needed {needed}")
    widths = tokens_NS.shape[1], min(logprobs_NT.shape[1], versions_NT.shape[1])
    found = []
    lengths = zip(prefixes.prompt_lengths_N.tolist(), prefixes.lengths_N.tolist(), strict=True)
    for row, (prompt, length) in enumerate(lengths):
        if prompt < 1 or length < 0 or prompt + length > widths[0] or length > widths[1]:
            given = f"prefix {row} of {prompt} + {length} tokens in arrays of {widths[0]} and {widths[1]}"
            raise ValueError(f"given {given}, needed a prompt of 1 or more tokens, and all tokens in them")
        tokens = tokens_NS[row, prompt : prompt + length].numpy(force=True)
        logprobs, versions = (array[row, :length].numpy(force=True) for array in (logprobs_NT, versions_NT))
        said = Response(tokens, logprobs, versions, finished=False)
        made = SampledRow(tokens_NS[row, :prompt].tolist(), earlier_segments=said, begun=length)
        if prefixes.experts_NSLK is not None:
            made.experts = prefixes.experts_NSLK[row, : prompt + length - 1].numpy(force=True)
        found.append(made)
    return found


@dataclass
class SampledGroup:
    """A firing of `generate` in work: `samples` rows for each of its prompts. A firing has one prompt, unless a caller
    has joined several. For a firing of `reply`, `earlier` are its replies of the previous turn.

    A firing that continues prefixes has a prompt for each of them, and `prefixes` are their numbers; `context` is True
    if nothing is learnt from the prefixes' tokens.
    """

    tag: Any
    prompts: Prompts
    samples: int
    rows: list[SampledRow]
    earlier: Replies | None = None
    prefixes: tuple[int, ...] | None = None
    context: bool = True

    @staticmethod
    def branch(
        tag: Any,
        prompts: Prompts,
        samples: int,
        prefixes: Prefixes,
        tokenizer: Tokenizer,
        max_tokens: int,
        num_words: int,
    ) -> "SampledGroup":
        """`samples` responses after each of `prefixes`, all of which must be shorter than `max_tokens`. The model's
        vocabulary has `num_words`, perhaps more than its tokenizer's.

        Raises ValueError for prefixes of other prompts or of another tokenizer, for two of one number, and for one that
        has ended or leaves no room for a token.
        """
        where = f"generate, group {prompts.ordinals[0]}"
        if strange := sorted({*prefixes.ordinals} - {*prompts.ordinals}):
            raise ValueError(f"{where}: given a prefix of group {strange[0]}, needed prefixes of its own prompt")
        try:
            begun = begun_rows(prefixes)
        except ValueError as error:
            raise ValueError(f"{where}: prefixes: {error}") from None
        numbers = tuple(prefixes.numbers_N.tolist())
        named = list(zip(prefixes.ordinals, numbers, strict=True))
        if twice := [f"{number} of group {ordinal}" for ordinal, number in named if named.count((ordinal, number)) > 1]:
            needed = "a number for each of a group, 0 or more: it keys the draws"
            raise ValueError(f"{where}: given prefix {twice[0]} twice, needed {needed}")
        encoded = [tokenizer.encode_prompt(text) for text in prompts.texts]
        # A group may have several prompts: the one that the prefix begins with, else any of its group, to be refused.
        of = [
            max(range(len(prompts)), key=lambda n: (prompts.ordinals[n] == ordinal, encoded[n] == row.prompt, -n))
            for ordinal, row in zip(prefixes.ordinals, begun, strict=True)
        ]
        for (ordinal, number), index, row in zip(named, of, begun, strict=True):
            said = row.earlier_segments.tokens.tolist()
            place = f"generate, group {ordinal}, prefix {number}"
            if number < 0:
                raise ValueError(f"{place}: given a negative number, needed 0 or more")
            if row.prompt != encoded[index] or not all(0 <= token < num_words for token in said):
                given = f"a prompt of {len(row.prompt)} tokens that are not those of {prompts.texts[index]!r:.40}"
                raise ValueError(f"{place}: given {given}, needed prefixes of this prompt by the model's own tokenizer")
            if ends := [step for step, token in enumerate(said) if token in tokenizer.stops]:
                given = f"a prefix that has ended: token {ends[0] + 1} of {len(said)} is a stop token"
                raise ValueError(f"{place}: given {given}, needed one that goes on")
            if len(said) >= max_tokens:
                needed = f"at most {max_tokens - 1}: a response of max_tokens {max_tokens} has one more"
                raise ValueError(f"{place}: given a prefix of {len(said)} tokens, needed {needed}")
        own = Prompts(prompts.ordinals, prompts.texts, prompts.answers).take(of)
        rows = [replace(row) for row in begun for _ in range(samples)]
        return SampledGroup(tag, own, samples, rows, prefixes=numbers)

    @staticmethod
    def go_on(
        tag: Any,
        prompts: Prompts,
        samples: int,
        conversation: Rollouts,
        replies: Replies,
        tokenizer: Tokenizer,
        max_prefix: int,
    ) -> "SampledGroup":
        """The next turn of a conversation that an earlier firing made, in the rows that have not ended. A row whose
        conversation would have more than `max_prefix` tokens ends there, without the reply and unfinished.

        Raises ValueError if the rows do not match, for a row that continues after a reply without a token, and for a
        conversation without log-probabilities.
        """
        where = f"generate, group {prompts.ordinals[0]}"
        needed, given, heard = len(prompts.texts) * samples, len(conversation), len(replies)
        if (given, heard) != (needed, needed):
            told = f"given a conversation of {given} rows and {heard} replies, needed {needed} of each"
            raise ValueError(f"{where}: {told}: {samples} samples of each prompt")
        done, rewards = conversation.settled(replies).done_N.tolist(), conversation.rewarded(replies)
        rows = recorded_rows(conversation, where)
        for index, row in enumerate(rows):
            row.open, row.rewards = not done[index], rewards[index]
            if not row.open:
                continue
            text = replies.texts[index]
            after_stop = row.before.finished and int(row.before.tokens[-1]) in tokenizer.stops
            tokens = np.array(tokenizer.encode_reply(text, replies.roles[index], after_stop), dtype=np.int64)
            if not len(tokens):
                told = f"given a reply without a token ({text!r}) to a row that is not done"
                place = f"generate, group {conversation.ordinals[index]}, row {index}"
                raise ValueError(f"{place}: {told}, needed one that says something, or done")
            size = len(row.prefix) + len(tokens)
            # An outgrown row must not end with a reply that nothing answers: it stays without the reply.
            if size > max_prefix:
                row.open, row.outgrown, row.before = False, size, row.before._replace(finished=False)
                continue
            unscored, unsampled = np.zeros(len(tokens), dtype=np.float32), np.full(len(tokens), NOT_SAMPLED)
            row.before = row.before.then(Response(tokens, unscored, unsampled, finished=True))
            row.transcript = [*row.transcript, text]
        return SampledGroup(tag, prompts, samples, rows)

    def resume(self, paused: Rollouts, max_tokens: int) -> None:
        """Let each open row continue its response at the time when the group `paused`."""
        for row, recorded in zip(
            self.rows, recorded_rows(paused, f"generate, group {paused.ordinals[0]}"), strict=True
        ):
            if row.open:
                row.earlier_segments = row.response = recorded.before.after(len(row.before.tokens))
                row.experts = recorded.experts
                if row.paused(max_tokens):
                    row.response = None

    @property
    def complete(self) -> bool:
        return all(row.response is not None or not row.open for row in self.rows)

    @property
    def versions(self) -> set[int]:
        """The versions of weights that sampled its tokens, in this turn and in earlier ones, without tokens of prefixes
        that are context."""
        said = [row.sampled if self.context else row.response for row in self.rows]
        parts = [part.versions for part in (*(row.before for row in self.rows), *said) if part is not None]
        return set(np.concatenate([EMPTY.versions, *parts]).tolist()) - {NOT_SAMPLED}

    def rollouts(self, tokenizer: Tokenizer, sampler: Sampler) -> Rollouts:
        """The whole conversations, including earlier turns. `sampler` has sampled all of them."""
        wholes = [row.before if row.response is None else row.before.then(row.response) for row in self.rows]
        tokens = [np.concatenate([row.prompt, whole.tokens]) for row, whole in zip(self.rows, wholes, strict=True)]
        transcripts = []
        for row in self.rows:
            said = [] if row.response is None else [row.response.tokens.tolist()]
            # The text of the newest turn is without the token that ended it.
            said = [tokens[:-1] if tokens[-1] in tokenizer.stops else tokens for tokens in said]
            transcripts.append([*row.transcript, *map(tokenizer.decode, said)])
        of_row = [index for index in range(len(self.prompts.texts)) for _ in range(self.samples)]
        return Rollouts(
            ordinals=tuple(self.prompts.ordinals[index] for index in of_row),
            prompts=tuple(self.prompts.texts[index] for index in of_row),
            answers=tuple(self.prompts.answers[index] for index in of_row),
            texts=tuple(transcript[-1] for transcript in transcripts),
            tokens_NS=_padded(tokens, torch.long),
            prompt_lengths_N=torch.tensor([len(row.prompt) for row in self.rows], dtype=torch.long),
            response_lengths_N=torch.tensor([len(whole.tokens) for whole in wholes], dtype=torch.long),
            logprobs_NT=_padded([whole.logprobs for whole in wholes], torch.float32),
            versions_NT=_padded([whole.versions for whole in wholes], torch.long),
            finished_N=torch.tensor([whole.finished for whole in wholes], dtype=torch.bool),
            transcripts=tuple(transcripts),
            turn_rewards=tuple(row.rewards for row in self.rows),
            temperature_N=torch.full((len(wholes),), sampler.temperature),
            cut_N=torch.full((len(wholes),), sampler.cuts),
            experts_NSLK=_padded_experts([row.experts for row in self.rows]),
            **self._columns(),
        )

    def _columns(self) -> dict[str, Tensor]:
        """The columns of rollouts that continue prefixes."""
        if self.prefixes is None:
            return {}
        lengths = [row.begun * self.context for row in self.rows]
        numbers_N = torch.tensor(self.prefixes, dtype=torch.long).repeat_interleave(self.samples)
        return {"prefixes_N": numbers_N, "prefix_lengths_N": torch.tensor(lengths, dtype=torch.long)}

    def metrics(self, segment: int = 0) -> Metrics:
        """Metrics of this turn, sampled in segments of `segment` tokens.

        `generated_tokens`: the number of sampled tokens. `response_length`: their mean per row. `stale_cache`: the
        share of them that were decoded on a cache with entries of older weights. A turn without tokens has neither of
        the last two. `outgrown`, from the second turn on: the share of rows that had no room for the turn.
        """
        said = [response for row in self.rows if (response := row.sampled) is not None]
        tokens = sum(len(response.tokens) for response in said)
        # Each segment begins with a cache of its own.
        stale = 0
        for versions in (response.versions for response in said):
            steps = np.arange(len(versions))
            stale += int((versions != versions[steps - steps % (segment or len(steps))]).sum())
        metrics = {"generated_tokens": float(tokens)}
        if tokens:
            metrics |= {
                "response_length": Mean(tokens / len(said), len(said)),
                "stale_cache": Mean(stale / tokens, tokens),
            }
        if any(row.transcript for row in self.rows):
            metrics["outgrown"] = Mean.of([row.outgrown > 0 for row in self.rows])
        return metrics


def _padded(rows: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype) -> Tensor:
    """Rows of different lengths, filled up with zeros."""
    if not rows:
        return torch.zeros(0, 0, dtype=dtype)
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)


def _padded_experts(rows: Sequence[Experts | None]) -> Tensor | None:
    """The same for experts; rows that the model has not read have none. None if no row has any."""
    known = next((experts for experts in rows if experts is not None), None)
    if known is None:
        return None
    each = [known[:0] if experts is None else experts for experts in rows]
    # A row's last token has none.
    return _padded([np.pad(experts, ((0, 1), (0, 0), (0, 0))) for experts in each], torch.int16)
