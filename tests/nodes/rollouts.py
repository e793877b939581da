"""Rollouts of random tokens, and oracles for the critic and the reward model that compute one sequence at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.graph.types import Rollouts
from penstock.nodes.model import Scorer
from penstock.nodes.trainable import Learner

LENGTHS = ((6, 3), (2, 1), (4, 4), (1, 2), (3, 3))
"""(prompt, response) of each row, in tokens."""


def random_rollouts(
    lengths: Sequence[tuple[int, int]] = LENGTHS, unsampled: Sequence[tuple[int, int]] = (), seed: int = 0
) -> Rollouts:
    """Return rollouts with one row per prompt group. The tokens (row, step) of `unsampled` are an environment's."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = torch.tensor(lengths).unbind(1)
    width, count = int(responses.max()), len(lengths)
    within = torch.arange(width) < responses[:, None]
    logprobs = (torch.randn(count, width, generator=generator) * 0.3 - 2.7) * within
    versions = torch.zeros(count, width, dtype=torch.long)
    for row, step in unsampled:
        logprobs[row, step], versions[row, step] = 0.0, -1
    return Rollouts(
        ordinals=tuple(range(count)),
        prompts=("",) * count,
        answers=("",) * count,
        texts=("",) * count,
        tokens_NS=torch.randint(13, (count, int((prompts + responses).max())), generator=generator),
        prompt_lengths_N=prompts,
        response_lengths_N=responses,
        logprobs_NT=logprobs,
        versions_NT=versions,
        finished_N=torch.ones(count, dtype=torch.bool),
    )


def numbers_of_row(model: Scorer, rollouts: Rollouts, row: int) -> Tensor:
    """Return the model's number at each token of a row, prompt included, without any padding."""
    length = int(rollouts.prompt_lengths_N[row] + rollouts.response_lengths_N[row])
    hidden_SD: Tensor = model(rollouts.tokens_NS[row, None, :length])[0]
    return hidden_SD @ model.score.weight[0]


def first_gradients(learner: Learner[Any]) -> dict[str, Tensor]:
    """Return the gradient of the first step from the optimizer's first moment, which is (1 − β₁) = 0.1 of it."""
    tensors, _ = learner.state()
    return {n.removeprefix("exp_avg."): t / 0.1 for n, t in tensors.items() if n.startswith("exp_avg.")}


def assert_gradients(learner: Learner[Any], loss: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Assert that the learner's first step had the gradient of `loss`, which was computed with `parameters`."""
    given = first_gradients(learner)
    needed = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    assert given.keys() == needed.keys()
    for name, gradient in needed.items():
        torch.testing.assert_close(given[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
