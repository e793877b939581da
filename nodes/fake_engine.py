"""The stand-in for a generator: tokens that depend on all that real ones do, at given times (see `fake`)."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penstock.graph.types import Prompts, Replies, Rollouts, Weights

WIDTH = 64
TOKENS = 4
HANG_S = 3600.0
STEP_S = 0.0005
"""The longest that one step of the generator sleeps, so that messages are not kept waiting."""


class FakeError(RuntimeError):
    """Raised where `raise_at` says so."""


@dataclass
class _Group:
    """A group in work: the time of its next token, and the samples' tokens so far, each [N, 1].

    `before` is what the turn before made with the replies to it, `begin` the place of this turn's first token.
    """

    prompts: Prompts
    behaviour: Weights
    due: float
    before: tuple[Rollouts, Replies] | None = None
    begin: int = 0
    tokens: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class FakeEngine:
    """Works on any number of groups at once; each token is made with the weights that are live when it is due."""

    def __init__(self, samples: int, ms: float, jitter_ms: float = 0.0, raise_at: int = -1, hang_at: int = -1) -> None:
        self.samples, self.ms, self.jitter_ms = samples, ms, jitter_ms
        self.raise_at, self.hang_at = raise_at, hang_at
        self.groups: dict[Any, _Group] = {}

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        prompts: Prompts = inputs["prompts"]
        ordinal = prompts.ordinals[0]
        fault("fake_generate", ordinal, self.raise_at, self.hang_at)
        group = _Group(prompts, inputs["behaviour"], time.monotonic() + self._token_s(ordinal))
        conversation, replies = inputs.get("conversation"), inputs.get("replies")
        if conversation is not None and replies is not None:
            # Rows that go on have all said and heard equally much.
            group.before = conversation, replies
            group.begin = int(conversation.response_lengths_N.max()) + 1
        self.groups[tag] = group

    def step(self) -> Sequence[tuple[Any, Any]]:
        """Make the tokens that are due. With nothing due, wait for the next one, at most `STEP_S`."""
        wait = min(group.due for group in self.groups.values()) - time.monotonic()
        if wait > 0:
            time.sleep(min(wait, STEP_S))
        now, finished = time.monotonic(), []
        for tag, group in list(self.groups.items()):
            while group.due <= now and len(group.tokens) < TOKENS:
                self._make_token(group)
            if len(group.tokens) == TOKENS:
                del self.groups[tag]
                finished.append((tag, _rollouts(group, self.samples)))
        return finished

    def busy(self) -> bool:
        return bool(self.groups)

    def reset(self) -> None:
        self.groups.clear()

    def _token_s(self, ordinal: int) -> float:
        return duration(self.ms, self.jitter_ms, "fake_generate", ordinal) / 1000 / TOKENS

    def _make_token(self, group: _Group) -> None:
        ordinal, place = group.prompts.ordinals[0], group.begin + len(group.tokens)
        weights_W = group.behaviour.tensors["values"]
        keys_N = torch.tensor([key("token", ordinal, sample, place) % WIDTH for sample in range(self.samples)])
        logprobs_N = -weights_W[keys_N].float().abs()
        group.tokens.append(keys_N[:, None] + (logprobs_N * 1000).long()[:, None].abs())
        group.logprobs.append(logprobs_N[:, None])
        group.versions.append(group.behaviour.version)
        group.due += self._token_s(ordinal)


def _rollouts(group: _Group, samples: int) -> Rollouts:
    """One prompt token (0), then the response."""
    tokens_NT, logprobs_NT = torch.cat(group.tokens, 1), torch.cat(group.logprobs, 1)
    made = Rollouts(
        ordinals=group.prompts.ordinals * samples,
        prompts=group.prompts.texts * samples,
        answers=group.prompts.answers * samples,
        texts=tuple(" ".join(map(str, row)) for row in tokens_NT.tolist()),
        tokens_NS=torch.cat([torch.zeros(samples, 1, dtype=torch.long), tokens_NT], 1),
        prompt_lengths_N=torch.ones(samples, dtype=torch.long),
        response_lengths_N=torch.full((samples,), TOKENS),
        logprobs_NT=logprobs_NT,
        versions_NT=torch.tensor(group.versions).expand(samples, TOKENS).clone(),
        finished_N=torch.ones(samples, dtype=torch.bool),
    )
    return made if group.before is None else _continued(*group.before, made)


def _continued(before: Rollouts, replies: Replies, made: Rollouts) -> Rollouts:
    """A conversation with what was said to it and then by it, in the rows that were not done."""
    on_N = ~replies.done_N
    heard_N = torch.tensor([int(text) for text in replies.texts])
    width = before.versions_NT.shape[1]

    def joined(old_NT: Tensor, heard_N: Tensor, new_NT: Tensor) -> Tensor:
        added_NT = torch.cat([heard_N[:, None].to(old_NT), new_NT], 1)
        return torch.cat([old_NT, added_NT * on_N[:, None]], 1)

    transcripts = tuple(
        [*old, reply, text] if on else old
        for old, reply, text, on in zip(before.transcripts, replies.texts, made.texts, on_N.tolist(), strict=True)
    )
    assert all(length == width for length, on in zip(before.response_lengths_N, on_N, strict=True) if on)
    return replace(
        before,
        texts=tuple(transcript[-1] for transcript in transcripts),
        tokens_NS=joined(before.tokens_NS, heard_N, made.tokens_NS[:, 1:]),
        response_lengths_N=before.response_lengths_N + on_N * (TOKENS + 1),
        logprobs_NT=joined(before.logprobs_NT, torch.zeros(len(on_N)), made.logprobs_NT),
        versions_NT=joined(before.versions_NT, torch.full((len(on_N),), -1), made.versions_NT),
        transcripts=transcripts,
        turn_rewards=before.rewarded(replies),
    )


def key(*parts: str | int) -> int:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def duration(ms: float, jitter_ms: float, name: str, index: int) -> float:
    """Milliseconds of one firing."""
    return ms + jitter_ms * (key("jitter", name, index) % 10_000) / 10_000


@contextmanager
def lasting(ms: float) -> Iterator[None]:
    """What is done meanwhile is part of the given duration: sleep for what is left of it."""
    end = time.monotonic() + ms / 1000
    yield
    time.sleep(max(0.0, end - time.monotonic()))


def fault(name: str, index: int, raise_at: int, hang_at: int) -> None:
    if index == raise_at:
        raise FakeError(f"{name}[{index}] was told to raise")
    if index == hang_at:
        time.sleep(HANG_S)
