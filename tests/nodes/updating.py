"""Helpers of the tests of updates: a tiny policy, a batch of random responses, and the same gradients by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.graph.context import BatchPart, Context
from penstock.graph.types import Advantages, Metrics, Rollouts
from penstock.nodes.learn.update import policy_update
from penstock.nodes.policy import LanguagePolicy, make_policy

from .rollouts import LENGTHS, first_gradients, random_rollouts

__all__ = ["LENGTHS"]

CONTEXT = Context(node="policy", seed=1, updates=10)
FREE = float("inf")


def policy(**changes: object) -> LanguagePolicy:
    made = make_policy(Context(**{**CONTEXT.to_json(), **changes}))
    assert isinstance(made, LanguagePolicy)
    return made


def batch(versions: int = 0) -> tuple[Rollouts, Advantages]:
    """Return five responses of random tokens; μ is near the new model's log π, so that some ratios are far from 1."""
    rollouts = random_rollouts()
    within = torch.arange(4) < rollouts.response_lengths_N[:, None]
    return replace(rollouts, versions_NT=versions * within), Advantages(torch.tensor([1.0, -0.5, 0.25, -2.0, 1.5]))


def conversation() -> tuple[Rollouts, Advantages]:
    """Return `batch()` with an environment's tokens: the second and third of the third response, and all of the second
    response."""
    rollouts, advantage = batch()
    versions_NT = rollouts.versions_NT.clone()
    versions_NT[2, 1:3] = versions_NT[1] = -1
    return replace(rollouts, versions_NT=versions_NT), advantage


def in_parts(
    learner: LanguagePolicy, rollouts: Rollouts, advantage: Advantages, rows: Sequence[Sequence[int]], **options: Any
) -> Metrics:
    """Update on these rows in parts, and return the metrics. Parts before the last give none and change no weight."""
    before = {name: tensor.clone() for name, tensor in learner.state()[0].items()}
    for number, own in enumerate(rows):
        part = BatchPart(number, len(rows))
        given = rollouts.take(own), Advantages(advantage.values_N[list(own)])
        made, metrics = policy_update.fn(learner, *given, part=part, **options)
        figures: Metrics = metrics
        assert made is learner
        assert part.last or not metrics
        same = all(torch.equal(before[name], tensor) for name, tensor in learner.state()[0].items() if name in before)
        assert same != part.last
    return figures


def unpacked(learner: LanguagePolicy, rollouts: Rollouts) -> list[Tensor]:
    """Return log π of each response, one sequence at a time, without any padding."""
    found = []
    for row, (prompt, response) in enumerate(LENGTHS):
        tokens = rollouts.tokens_NS[row, : prompt + response]
        logprobs = learner.model.logits(learner.model(tokens[None, :-1]))[0].log_softmax(-1)
        found.append(logprobs[range(prompt + response - 1), tokens[1:]][prompt - 1 :])
    return found


gradients = first_gradients


def by_autograd(learner: LanguagePolicy, loss: Tensor) -> dict[str, Tensor]:
    return dict(zip(learner.masters, torch.autograd.grad(loss, list(learner.masters.values())), strict=True))


def assert_same(given: dict[str, Tensor], needed: dict[str, Tensor]) -> None:
    assert given.keys() == needed.keys()
    for name, tensor in needed.items():
        torch.testing.assert_close(given[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def equal(a: LanguagePolicy, b: LanguagePolicy) -> bool:
    """True if weights and moments have the same bits."""
    ours, theirs = a.state()[0], b.state()[0]
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
