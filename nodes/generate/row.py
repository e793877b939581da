"""One conversation of a group: what has been said and heard in it, token by token.

What was sampled stays the tokens that were sampled. A reply of the environment is encoded once, when it is heard, and
no text is ever encoded again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from penstock.graph.types import Replies, Rollouts
from penstock.nodes.learn.behaviour import behaviour_logprobs
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
