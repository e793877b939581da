"""Deterministic stand-ins for the nodes of an algorithm, with given durations: schedules without a model.

Their results depend on everything that the real nodes' results depend on (prompts, the weights of each token, the
groups of an update), so a lost group, a wrong order or stale weights change the final policy. Durations never do.

Each firing takes `ms` plus a random time from 0 to `jitter_ms`, keyed by the firing.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil, inf
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.graph import node
from penstock.graph.context import Context, random_key
from penstock.graph.node import fire
from penstock.graph.protocols import Carried, Source
from penstock.graph.types import BY_LAG, Metrics, Policy, Prompts, Replies, Rewards, Rollouts, Weights
from penstock.nodes.environments.environment import environment
from penstock.nodes.learn.batching import behaviour_logprobs, sampled_mask

WIDTH = 64
TOKENS = 4
# The longest sleep of one step of the generator, so that messages do not wait.
STEP_S = 0.0005


@dataclass
class _Group:
    """A group in work. `due` is the time of its next token, infinite while it waits for slots.

    `made` has (tokens [N], log-probabilities [N], version of the weights) for each position so far. `before` is the
    conversation before this turn with the replies to it, `begin` the position of this turn's first token.
    """

    prompts: Prompts
    behaviour: Weights
    due: float = inf
    before: tuple[Rollouts, Replies] | None = None
    begin: int = 0
    made: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)


class FakeEngine:
    """Works on as many groups at once as fit its slots. Each token uses the weights that are live when it is due."""

    def __init__(self, samples: int, ms: float, jitter_ms: float = 0.0, slots: int = Context.slots) -> None:
        self.samples, self.ms, self.jitter_ms = samples, ms, jitter_ms
        self.most = ceil(slots / samples)
        # The first ones have slots.
        self.groups: dict[Any, _Group] = {}

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        prompts: Prompts = inputs["prompts"]
        group = _Group(prompts, inputs["behaviour"])
        conversation, replies = inputs.get("conversation"), inputs.get("replies")
        if conversation is not None and replies is not None:
            # All rows that continue have the same length.
            group.before = conversation, replies
            group.begin = int(conversation.response_lengths_N.max()) + 1
        self.groups[tag] = group
        self._begin()

    def step(self) -> Sequence[tuple[Any, Any]]:
        """Make the tokens that are due. With nothing due, wait for the next one, at most `STEP_S`."""
        # A step never waits for long: groups that are submitted meanwhile must not wait.
        wait = min(group.due for group in self.groups.values()) - time.monotonic()
        if wait > 0:
            time.sleep(min(wait, STEP_S))
        now, finished = time.monotonic(), []
        for tag, group in list(self.groups.items()):
            while group.due <= now and len(group.made) < TOKENS:
                self._make_token(group)
            if len(group.made) == TOKENS:
                del self.groups[tag]
                finished.append((tag, _rollouts(group, self.samples)))
        self._begin()
        return finished

    def busy(self) -> bool:
        return bool(self.groups)

    def reset(self) -> None:
        self.groups.clear()

    def _begin(self) -> None:
        for group in islice(self.groups.values(), self.most):
            if group.due == inf:
                group.due = time.monotonic() + self._token_s(group.prompts.ordinals[0])

    def _token_s(self, ordinal: int) -> float:
        return duration(self.ms, self.jitter_ms, "fake_generate", ordinal) / 1000 / TOKENS

    def _make_token(self, group: _Group) -> None:
        ordinal, place = group.prompts.ordinals[0], group.begin + len(group.made)
        weights_W = group.behaviour.tensors["values"]
        keys_N = torch.tensor([random_key("token", ordinal, sample, place) % WIDTH for sample in range(self.samples)])
        logprobs_N = -weights_W[keys_N].float().abs()
        # The token depends on the weights, too, so that stale weights change the next policy.
        group.made.append((keys_N + (logprobs_N * 1000).long().abs(), logprobs_N, group.behaviour.version))
        group.due += self._token_s(ordinal)


def _rollouts(group: _Group, samples: int) -> Rollouts:
    """One prompt token (0), then the response."""
    tokens, logprobs, versions = zip(*group.made, strict=True)
    tokens_NT = torch.stack(tokens, 1)
    made = Rollouts(
        ordinals=group.prompts.ordinals * samples,
        prompts=group.prompts.texts * samples,
        answers=group.prompts.answers * samples,
        texts=tuple(" ".join(map(str, row)) for row in tokens_NT.tolist()),
        tokens_NS=torch.cat([torch.zeros(samples, 1, dtype=torch.long), tokens_NT], 1),
        prompt_lengths_N=torch.ones(samples, dtype=torch.long),
        response_lengths_N=torch.full((samples,), TOKENS),
        logprobs_NT=torch.stack(logprobs, 1),
        versions_NT=torch.tensor(versions).expand(samples, TOKENS).clone(),
        finished_N=torch.ones(samples, dtype=torch.bool),
    )
    return made if group.before is None else _continued(*group.before, made)


def _continued(before: Rollouts, replies: Replies, made: Rollouts) -> Rollouts:
    """A conversation with the replies and then the new tokens appended, in the rows that were not done."""
    on_N = ~replies.done_N
    # A reply is a number as text, which is its only token.
    heard_N = torch.tensor([int(text) for text in replies.texts])

    def joined(old_NT: Tensor, heard_N: Tensor, new_NT: Tensor) -> Tensor:
        added_NT = torch.cat([heard_N[:, None].to(old_NT), new_NT], 1)
        return torch.cat([old_NT, added_NT * on_N[:, None]], 1)

    transcripts = tuple(
        [*old, reply, text] if on else old
        for old, reply, text, on in zip(before.transcripts, replies.texts, made.texts, on_N.tolist(), strict=True)
    )
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


def duration(ms: float, jitter_ms: float, name: str, index: int) -> float:
    """Milliseconds of one firing."""
    return ms + jitter_ms * (random_key("jitter", name, index) % 10_000) / 10_000


@contextmanager
def lasting(ms: float, jitter_ms: float, name: str, index: int) -> Iterator[None]:
    """Make the body last the given duration: after it, sleep for the rest."""
    end = time.monotonic() + duration(ms, jitter_ms, name, index) / 1000
    yield
    time.sleep(max(0.0, end - time.monotonic()))


class FakePolicy(Policy):
    """A vector and its momentum, in place of a model and its optimizer."""

    maker: ClassVar[str] = "penstock.nodes.fake:make_policy"

    def __init__(self, context: Context) -> None:
        self.version = 0
        self.sync_s = float(context.options.get("sync_ms", 0.0)) / 1000
        self.values_W = torch.linspace(0.5, 1.5, WIDTH)
        self.momentum_W = torch.zeros(WIDTH)

    def weights(self) -> Mapping[str, Tensor]:
        time.sleep(self.sync_s)
        return {"values": self.values_W}

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        return {"values": self.values_W, "momentum": self.momentum_W}, {"version": self.version}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.values_W = tensors["values"].clone()
        self.momentum_W = tensors["momentum"].clone()
        self.version = facts["version"]

    def export(self, folder: str) -> Callable[[], None] | None:
        """Write nothing: no other tool could read it."""
        return None


class FakePrompts(Prompts):
    """Prompts that are their own ordinals."""

    maker: ClassVar[str] = "penstock.nodes.fake:open_prompts"


class _Ordinals:
    def read(self, ordinal: int) -> Prompts:
        return FakePrompts((ordinal,), (f"prompt {ordinal}",), (str(ordinal),))


def make_policy(context: Context) -> Carried:
    return FakePolicy(context)


def open_prompts(context: Context) -> Source:
    return _Ordinals()


@node(pool="generator", init=lambda context, **options: FakeEngine(**options, slots=context.slots))
def fake_generate(
    engine: FakeEngine,
    prompts: Prompts,
    behaviour: Weights,
    conversation: Rollouts | None = None,
    replies: Replies | None = None,
    *,
    samples: int = 4,
    ms: float = 0.0,
    jitter_ms: float = 0.0,
) -> tuple[FakeEngine, Rollouts]:
    """`samples` responses of four tokens that depend on the prompt and on each token's weights, `ms` per group.

    With a `conversation` and `replies`, four tokens more in each row that is not done, after one for the reply.
    """
    inputs = {"prompts": prompts, "behaviour": behaviour, "conversation": conversation, "replies": replies}
    return engine, fire(engine, inputs)


@environment
def fake_environment(
    rollouts: Rollouts,
    *,
    most: int = 3,
    ms: float = 0.0,
    jitter_ms: float = 0.0,
) -> Replies:
    """Replies of one token. Each row is done after 1 to `most` turns, a number of its own, with a reward between 0 and
    1 that depends on all of its tokens."""
    ordinal, turn = rollouts.ordinals[0], max(rollouts.turns())
    with lasting(ms, jitter_ms, f"fake_environment.{turn}", ordinal):
        done = [spoken > random_key("turns", ordinal, row) % most for row, spoken in enumerate(rollouts.turns())]
        texts = tuple(str(random_key("reply", ordinal, row, turn) % 1000) for row in range(len(rollouts)))
        rewards_N = (rollouts.tokens_NS.sum(1) % 101).float() / 100
    return Replies(texts, ("user",) * len(texts), torch.tensor(done), rewards_N)


@node(pool="scorer")
def fake_score(rollouts: Rollouts, *, ms: float = 0.0, jitter_ms: float = 0.0) -> Rewards:
    """A reward between 0 and 1 that depends on every token."""
    ordinal = rollouts.ordinals[0]
    with lasting(ms, jitter_ms, "fake_score", ordinal):
        return Rewards((rollouts.tokens_NS.sum(1) % 101).float() / 100)


@node(pool="trainer", clock="update")
def fake_update(
    policy: FakePolicy,
    rollouts: Rollouts,
    rewards: Rewards,
    *,
    ms: float = 0.0,
    jitter_ms: float = 0.0,
) -> tuple[FakePolicy, Metrics]:
    """The next vector: depends on the old one and on each row's place, tokens, log-probabilities and reward."""
    with lasting(ms, jitter_ms, "fake_update", policy.version):
        return policy, _step(policy, rollouts, rewards)


def _step(policy: FakePolicy, rollouts: Rollouts, rewards: Rewards) -> Metrics:
    gradient_W = torch.zeros(WIDTH)
    sampled_NT, behaviour_NT = sampled_mask(rollouts), behaviour_logprobs(rollouts, "fake_update")
    for row, value in enumerate(rewards.values_N.tolist()):
        sampled_T = sampled_NT[row]
        place_T = rollouts.tokens_NS[row, 1:][sampled_T] % WIDTH
        # The row's number counts, so that another order of rows makes another policy.
        gradient_W[place_T] += (value + row * 0.01) * (1 + behaviour_NT[row, sampled_T])
    policy.momentum_W = 0.9 * policy.momentum_W + gradient_W / len(rollouts)
    policy.values_W = (policy.values_W + 0.01 * policy.momentum_W).clamp(0.01, 4.0)
    lags_P = policy.version - rollouts.versions_NT[sampled_NT]
    policy.version += 1
    return {
        "loss": float(gradient_W.mean()),
        "lag_mean": float(lags_P.float().mean()),
        "lag_max": float(lags_P.max()),
        "tokens": float(sampled_NT.sum()),
        **{f"{BY_LAG}{lag}": float((lags_P == lag).sum()) for lag in lags_P.unique().tolist()},
    }
