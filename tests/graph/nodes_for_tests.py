"""Nodes that do nothing, for programs with faults: the tests load them by this file's path."""

from typing import Any

from penstock.graph import (
    Advantages,
    Logprobs,
    Metrics,
    Policy,
    Prompts,
    Rewards,
    Rollouts,
    Weights,
    broadcast,
    node,
)


@node(pool="generator")
def generate(prompts: Prompts, behaviour: Weights, *, samples: int = 4) -> Rollouts:
    raise NotImplementedError


@node(pool="scorer")
def score(rollouts: Rollouts) -> Rewards:
    raise NotImplementedError


@node(pool="scorer")
def advise(rewards: Rewards) -> Advantages:
    raise NotImplementedError


@node(pool="trainer", clock="update")
def learn(policy: Policy, rollouts: Rollouts, rewards: Rewards) -> Policy:
    raise NotImplementedError


@node(pool="trainer")
def measure(policy: Policy, rollouts: Rollouts) -> Logprobs:
    raise NotImplementedError


@node(pool="trainer", clock="update")
def learn_from(policy: Policy, logprobs: Logprobs) -> Policy:
    raise NotImplementedError


@node(pool="trainer", clock="update")
def merge(first: Policy, second: Policy) -> Policy:
    raise NotImplementedError


@node(pool="trainer", clock="update")
def norm(policy: Policy) -> Metrics:
    raise NotImplementedError


def samples_of(prompts: Prompts, policy: Policy, lag: Any = 1) -> tuple[Rollouts, Rewards]:
    rollouts = generate(prompts, broadcast(policy, lag=lag))
    return rollouts, score(rollouts)
