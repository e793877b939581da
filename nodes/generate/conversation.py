"""A firing in work: one turn of each conversation of a group, and the rollouts that they become.

Shapes: N rows (the samples of each prompt in turn), S tokens of prompt and response, T tokens of a response.

One conversation of a group: what has been said and heard in it, token by token.

What was sampled stays the tokens that were sampled. A reply of the environment is encoded once, when it is heard, and
no text is ever encoded again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.graph.types import Metrics, Prompts, Replies, Rollouts
from penstock.nodes.generate.sampling import Sampler
from penstock.nodes.learn.batching import behaviour_logprobs
from penstock.nodes.tokenizer import Tokenizer

IntArray = np.ndarray[Any, np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]

NOBODY = -1
"""The version of tokens that nobody sampled."""


class Response(NamedTuple):
    """Tokens that follow a prompt, what `Rollouts` says of each, and whether the newest turn ended by itself."""

    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    finished: bool

    @staticmethod
    def heard(tokens: list[int]) -> "Response":
        """An environment's tokens."""
        size = len(tokens)
        logprobs, versions = np.zeros(size, dtype=np.float32), np.full(size, NOBODY, dtype=np.int64)
        return Response(np.array(tokens, dtype=np.int64), logprobs, versions, finished=True)

    def then(self, more: "Response") -> "Response":
        """This one, continued."""
        return Response(
            np.concatenate([self.tokens, more.tokens]),
            np.concatenate([self.logprobs, more.logprobs]),
            np.concatenate([self.versions, more.versions]),
            more.finished,
        )

    @property
    def drifted(self) -> bool:
        """Did the weights change while it was sampled?"""
        return bool(self.versions[0] != self.versions[-1])


@dataclass
class Row:
    """A prompt, what followed it in earlier turns (`before`, with the texts of its turns in `transcript`), the
    environment's reply to that (`heard`, in words `reply`), and what the model says now. `rewards` are what the
    environment gave after each of the earlier turns.

    A row that is not `open` says nothing more and stays as it was before. An `outgrown` one would have gone on.
    """

    prompt: list[int]
    before: Response | None = None
    transcript: list[str] = field(default_factory=list)
    heard: Response | None = None
    reply: str = ""
    said: Response | None = None
    open: bool = True
    outgrown: bool = False
    rewards: list[float | None] = field(default_factory=list)

    @property
    def prefix(self) -> list[int]:
        """The tokens that the model goes on from."""
        return [*self.prompt, *(token for part in (self.before, self.heard) if part for token in part.tokens.tolist())]

    def outgrow(self) -> None:
        """End a row that has no room for the reply and another turn: without either, and unfinished."""
        self.open, self.outgrown = False, True

    def whole(self) -> Response:
        """All that follows the prompt."""
        if self.said is None:
            assert self.before is not None
            return self.before._replace(finished=self.before.finished and not self.outgrown)
        if self.before is None or self.heard is None:
            return self.said
        return self.before.then(self.heard).then(self.said)

    def texts(self, tokenizer: Tokenizer) -> list[str]:
        """Its transcript: all turns' texts, the newest one's without the token that ended it."""
        if self.said is None:
            return self.transcript
        tokens = self.said.tokens[: len(self.said.tokens) - self.said.finished]
        reply = [] if self.heard is None else [self.reply]
        return [*self.transcript, *reply, tokenizer.decode(tokens.tolist())]


def resume(conversation: Rollouts, replies: Replies, tokenizer: Tokenizer) -> Iterator[Row]:
    """The rows of an earlier turn with the replies to it. Raises ValueError for a row that is to go on from nothing,
    and for a conversation without log μ."""
    recorded_NT = behaviour_logprobs(conversation, f"generate, group {conversation.ordinals[0]}")
    tokens_NS, logprobs_NT, versions_NT = (
        array.numpy(force=True) for array in (conversation.tokens_NS, recorded_NT, conversation.versions_NT)
    )
    begins, lengths = conversation.prompt_lengths_N.tolist(), conversation.response_lengths_N.tolist()
    finished, done = conversation.finished_N.tolist(), replies.done_N.tolist()
    rewards = conversation.rewarded(replies)
    for index, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        before = Response(
            tokens_NS[index, begin : begin + length],
            logprobs_NT[index, :length],
            versions_NT[index, :length],
            finished[index],
        )
        prompt, transcript = tokens_NS[index, :begin].tolist(), conversation.transcripts[index]
        row = Row(prompt, before, transcript, open=not done[index], rewards=rewards[index])
        if row.open:
            row.reply = replies.texts[index]
            row.heard = Response.heard(tokenizer.encode_reply(row.reply, replies.roles[index], finished[index]))
            if not len(row.heard.tokens):
                raise ValueError(
                    f"generate, group {conversation.ordinals[index]}, row {index}: given a reply without a token "
                    f"({row.reply!r}) to a row that is not done, needed one that says something, or done"
                )
        yield row


@dataclass
class Group:
    """`samples` rows for each of its prompts (one, unless a caller joined several)."""

    tag: Any
    prompts: Prompts
    samples: int
    rows: list[Row]

    @staticmethod
    def begin(tag: Any, prompts: Prompts, samples: int, tokenizer: Tokenizer) -> "Group":
        """The first turn."""
        encoded = [tokenizer.encode_prompt(text) for text in prompts.texts]
        return Group(tag, prompts, samples, [Row(prompt) for prompt in encoded for _ in range(samples)])

    @staticmethod
    def go_on(
        tag: Any, prompts: Prompts, samples: int, conversation: Rollouts, replies: Replies, tokenizer: Tokenizer
    ) -> "Group":
        """The next turn of what an earlier firing made. Raises ValueError where the rows do not match."""
        needed, given, heard = len(prompts.texts) * samples, len(conversation), len(replies)
        if (given, heard) != (needed, needed):
            raise ValueError(
                f"generate, group {prompts.ordinals[0]}: given a conversation of {given} rows and {heard} replies, "
                f"needed {needed} of each: {samples} samples of each prompt"
            )
        return Group(tag, prompts, samples, list(resume(conversation, replies, tokenizer)))

    @property
    def complete(self) -> bool:
        return all(row.said is not None or not row.open for row in self.rows)

    @property
    def versions(self) -> set[int]:
        """All versions that made its tokens, in this turn and in earlier ones."""
        parts = [part for row in self.rows for part in (row.before, row.said) if part is not None]
        return {version for part in parts for version in part.versions.tolist()} - {NOBODY}

    def rollouts(self, tokenizer: Tokenizer, sampler: Sampler) -> Rollouts:
        """What its rows have become, of this turn and earlier ones, all sampled by `sampler`."""
        wholes = [row.whole() for row in self.rows]
        lengths = np.array([len(whole.tokens) for whole in wholes])
        prompt_lengths = np.array([len(row.prompt) for row in self.rows])
        tokens_NS = np.zeros((len(wholes), int((prompt_lengths + lengths).max())), dtype=np.int64)
        logprobs_NT = np.zeros((len(wholes), int(lengths.max())), dtype=np.float32)
        versions_NT = np.zeros(logprobs_NT.shape, dtype=np.int64)
        for index, (row, whole) in enumerate(zip(self.rows, wholes, strict=True)):
            begin, length = len(row.prompt), len(whole.tokens)
            tokens_NS[index, :begin] = row.prompt
            tokens_NS[index, begin : begin + length] = whole.tokens
            logprobs_NT[index, :length] = whole.logprobs
            versions_NT[index, :length] = whole.versions
        transcripts = tuple(row.texts(tokenizer) for row in self.rows)
        return Rollouts(
            ordinals=self._each(self.prompts.ordinals),
            prompts=self._each(self.prompts.texts),
            answers=self._each(self.prompts.answers),
            texts=tuple(transcript[-1] for transcript in transcripts),
            tokens_NS=torch.from_numpy(tokens_NS),
            prompt_lengths_N=torch.from_numpy(prompt_lengths),
            response_lengths_N=torch.from_numpy(lengths),
            logprobs_NT=torch.from_numpy(logprobs_NT),
            versions_NT=torch.from_numpy(versions_NT),
            finished_N=torch.tensor([whole.finished for whole in wholes]),
            transcripts=transcripts,
            turn_rewards=tuple(row.rewards for row in self.rows),
            temperature_N=torch.full((len(wholes),), sampler.temperature),
            cut_N=torch.full((len(wholes),), sampler.cuts),
        )

    def metrics(self) -> Metrics:
        """Of this turn: `generated_tokens` is how many were sampled, `response_length` their mean by row, `stale_cache`
        the share of them that were decoded on a cache that holds entries of older weights, `outgrown` that of the rows
        that had no room for it."""
        said: list[Response] = [row.said for row in self.rows if row.said is not None]
        tokens = sum(len(response.tokens) for response in said)
        stale = sum(int((r.versions != r.versions[0]).sum()) for r in said if r.drifted)
        metrics = {
            "generated_tokens": float(tokens),
            "response_length": tokens / max(1, len(said)),
            "stale_cache": stale / max(1, tokens),
        }
        if any(row.before is not None for row in self.rows):
            metrics["outgrown"] = sum(row.outgrown for row in self.rows) / len(self.rows)
        return metrics

    def _each(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value for value in values for _ in range(self.samples))
