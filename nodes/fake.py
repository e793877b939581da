"""Deterministic stand-ins for the nodes of an algorithm, with given durations: schedules without a model.

What they compute depends on all that the real nodes' results depend on (prompts, the weights of each token, the
groups of an update), so a lost group, a wrong order or stale weights change the final policy. Durations never do.

`raise_at` and `hang_at` name a firing (a group's ordinal, an update) that raises or never ends; −1 is none.
`jitter_ms` adds to each firing's `ms` between nothing and so much more, keyed by the firing.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.graph import node
from penstock.graph.protocols import Carried, Source
from penstock.graph.types import Context, Metrics, Policy, Prompts, Replies, Rewards, Rollouts, Weights
from penstock.nodes.environments.environment import environment
from penstock.nodes.fake_engine import HANG_S, WIDTH, FakeEngine, FakeError, duration, fault, key, lasting
from penstock.nodes.learn.behaviour import behaviour_logprobs
from penstock.nodes.learn.packing import sampled_mask

__all__ = [
    "HANG_S",
    "FakeEngine",
    "FakeError",
    "FakePolicy",
    "FakePrompts",
    "fake_environment",
    "fake_generate",
    "fake_score",
    "fake_update",
]


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

    def export(self, folder: str) -> None:
        """There is nothing that other tools could read."""


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


def _init_engine(context: Context, **options: Any) -> FakeEngine:
    return FakeEngine(**options)


@node(pool="generator", init=_init_engine)
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
    raise_at: int = -1,
    hang_at: int = -1,
) -> tuple[FakeEngine, Rollouts]:
    """`samples` responses of four tokens that depend on the prompt and on each token's weights, `ms` per group.

    With a `conversation` and `replies`, four tokens more in each row that is not done, after one for the reply.
    """
    inputs = {"prompts": prompts, "behaviour": behaviour, "conversation": conversation, "replies": replies}
    engine.submit(0, inputs)
    finished: Sequence[tuple[Any, Any]] = ()
    while not finished:
        finished = engine.step()
    return engine, finished[0][1]


@environment
def fake_environment(
    rollouts: Rollouts,
    *,
    most: int = 3,
    ms: float = 0.0,
    jitter_ms: float = 0.0,
    raise_at: int = -1,
    hang_at: int = -1,
) -> Replies:
    """Replies of one token. Each row is done after a number of turns of its own, 1 to `most`, with a reward between 0
    and 1 that depends on all of its tokens."""
    ordinal, turn = rollouts.ordinals[0], max(rollouts.turns())
    fault("fake_environment", ordinal, raise_at, hang_at)
    with lasting(duration(ms, jitter_ms, f"fake_environment.{turn}", ordinal)):
        done = [spoken > key("turns", ordinal, row) % most for row, spoken in enumerate(rollouts.turns())]
        texts = tuple(str(key("reply", ordinal, row, turn) % 1000) for row in range(len(rollouts)))
        rewards_N = (rollouts.tokens_NS.sum(1) % 101).float() / 100
    return Replies(texts, ("user",) * len(texts), torch.tensor(done), rewards_N)


@node(pool="scorer")
def fake_score(
    rollouts: Rollouts, *, ms: float = 0.0, jitter_ms: float = 0.0, raise_at: int = -1, hang_at: int = -1
) -> tuple[Rewards, Metrics]:
    """A reward between 0 and 1 that depends on every token."""
    ordinal = rollouts.ordinals[0]
    fault("fake_score", ordinal, raise_at, hang_at)
    with lasting(duration(ms, jitter_ms, "fake_score", ordinal)):
        values_N = (rollouts.tokens_NS.sum(1) % 101).float() / 100
        return Rewards(values_N), {"reward_mean": float(values_N.mean())}


@node(pool="trainer", clock="update")
def fake_update(
    policy: FakePolicy,
    rollouts: Rollouts,
    rewards: Rewards,
    *,
    ms: float = 0.0,
    jitter_ms: float = 0.0,
    raise_at: int = -1,
    hang_at: int = -1,
) -> tuple[FakePolicy, Metrics]:
    """The next vector: depends on the old one and on each row's place, tokens, log-probabilities and reward."""
    fault("fake_update", policy.version, raise_at, hang_at)
    with lasting(duration(ms, jitter_ms, "fake_update", policy.version)):
        return policy, _step(policy, rollouts, rewards)


def _step(policy: FakePolicy, rollouts: Rollouts, rewards: Rewards) -> Metrics:
    gradient_W = torch.zeros(WIDTH)
    sampled_NT, behaviour_NT = sampled_mask(rollouts), behaviour_logprobs(rollouts, "fake_update")
    for row, value in enumerate(rewards.values_N.tolist()):
        sampled_T = sampled_NT[row]
        place_T = rollouts.tokens_NS[row, 1:][sampled_T] % WIDTH
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
        **{f"tokens_lag_{lag}": float((lags_P == lag).sum()) for lag in lags_P.unique().tolist()},
    }
