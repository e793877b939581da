"""The same algorithms as plain loops in one thread, which call the nodes one after the other, without the runtime.

The groups of update u are sampled with the weights of version max(0, u − lag).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.graph.context import Context
from penstock.graph.types import Advantages, Rewards, Rollouts, Weights
from penstock.nodes import fake
from penstock.nodes.advantage import group_advantage
from penstock.nodes.data import open_prompts
from penstock.nodes.generate import generate, make_engine
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.policy import LanguagePolicy, make_policy
from penstock.nodes.score import Rule, score


def toy_loop(updates: int, batch: int, *, samples: int = 4, lag: int = 0) -> dict[str, Tensor]:
    """Return the state of the fake policy after `updates`."""
    policy, source = fake.FakePolicy(Context()), fake.open_prompts(Context())
    engine, weights = fake.FakeEngine(samples, 0.0), _Versions(policy.weights)
    for update in range(updates):
        rollouts, rewards = [], []
        for ordinal in range(update * batch, (update + 1) * batch):
            behaviour = weights.of(max(0, update - lag))
            _, group = fake.fake_generate.fn(engine, source.read(ordinal), behaviour, samples=samples)
            rollouts.append(group)
            rewards.append(fake.fake_score.fn(group))
        policy, _ = fake.fake_update.fn(policy, Rollouts.concat(rollouts), Rewards.concat(rewards))
        weights.keep()
    return dict(policy.state()[0])


def aipo_loop(context: Context, rule: Rule, *, samples: int, lr: float, lag: int = 0) -> list[dict[str, Tensor]]:
    """Return the policy's state before the first and after every update."""
    torch.set_num_threads(context.threads)
    policy, source = make_policy(_named(context, "policy")), open_prompts(_named(context, "prompts"))
    assert isinstance(policy, LanguagePolicy)
    engine, weights = make_engine(_named(context, "generate"), samples=samples), _Versions(policy.weights)
    states = [_copy(policy.state()[0])]
    for update in range(context.updates):
        rollouts, advantages = [], []
        for ordinal in range(update * context.batch, (update + 1) * context.batch):
            behaviour = weights.of(max(0, update - lag))
            engine, group, _ = generate.fn(engine, source.read(ordinal), behaviour, samples=samples)
            rollouts.append(group)
            advantages.append(group_advantage.fn(score.fn(group, by=rule)[0]))
        policy, _ = aipo_update.fn(policy, Rollouts.concat(rollouts), Advantages.concat(advantages), lr=lr)
        weights.keep()
        states.append(_copy(policy.state()[0]))
    return states


class _Versions:
    """The weights of all versions so far."""

    def __init__(self, weights: Callable[[], Mapping[str, Any]]) -> None:
        self._weights, self._kept = weights, [_copy(weights())]

    def keep(self) -> None:
        self._kept.append(_copy(self._weights()))

    def of(self, version: int) -> Weights:
        return Weights(version, self._kept[version])


def _named(context: Context, node: str) -> Context:
    return Context(**{**context.to_json(), "node": node})


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
