"""A tiny policy, a batch of random responses, and the same gradients by hand: what tests of updates share."""

from dataclasses import replace

import torch
from torch import Tensor

from penstock.graph.types import Advantages, Context, Rollouts
from penstock.nodes.policy import LanguagePolicy, make_policy

CONTEXT = Context(node="policy", seed=1, updates=10)
FREE = float("inf")
LENGTHS = ((6, 3), (2, 1), (4, 4), (1, 2), (3, 3))
"""(tokens of the prompt, tokens of the response) of each row; 13 tokens of responses in all."""


def policy(**changes: object) -> LanguagePolicy:
    made = make_policy(Context(**{**CONTEXT.to_json(), **changes}))
    assert isinstance(made, LanguagePolicy)
    return made


def batch(versions: int = 0) -> tuple[Rollouts, Advantages]:
    """Five responses of random tokens; μ is near the new model's log π, so that some ratios are far from 1."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = torch.tensor(LENGTHS).unbind(1)
    width = int(responses.max())
    within = torch.arange(width) < responses[:, None]
    rollouts = Rollouts(
        ordinals=tuple(range(5)),
        prompts=("",) * 5,
        answers=("",) * 5,
        texts=("",) * 5,
        tokens_NS=torch.randint(13, (5, int((prompts + responses).max())), generator=generator),
        prompt_lengths_N=prompts,
        response_lengths_N=responses,
        logprobs_NT=(torch.randn(5, width, generator=generator) * 0.3 - 2.7) * within,
        versions_NT=versions * within,
        finished_N=torch.ones(5, dtype=torch.bool),
    )
    return rollouts, Advantages(torch.tensor([1.0, -0.5, 0.25, -2.0, 1.5]))


def conversation() -> tuple[Rollouts, Advantages]:
    """The same, but an environment wrote the second and third token of the third response, and all of the second."""
    rollouts, advantage = batch()
    versions_NT = rollouts.versions_NT.clone()
    versions_NT[2, 1:3] = versions_NT[1] = -1
    return replace(rollouts, versions_NT=versions_NT), advantage


def unpacked(learner: LanguagePolicy, rollouts: Rollouts) -> list[Tensor]:
    """log π of each response, one sequence at a time, without any padding."""
    found = []
    for row, (prompt, response) in enumerate(LENGTHS):
        tokens = rollouts.tokens_NS[row, : prompt + response]
        logprobs = learner.model.logits(learner.model(tokens[None, :-1]))[0].log_softmax(-1)
        found.append(logprobs[range(prompt + response - 1), tokens[1:]][prompt - 1 :])
    return found


def gradients(learner: LanguagePolicy) -> dict[str, Tensor]:
    """The gradient of the first step, out of the optimizer's first moment (1 − β₁ = 0.1 of it)."""
    tensors, _ = learner.state()
    return {name: t / 0.1 for name, t in tensors.items() if name.startswith("exp_avg.")}


def by_autograd(learner: LanguagePolicy, loss: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(loss, list(learner.masters.values()))
    return {f"exp_avg.{name}": grad for name, grad in zip(learner.masters, grads, strict=True)}


def assert_same(given: dict[str, Tensor], needed: dict[str, Tensor]) -> None:
    assert given.keys() == needed.keys()
    for name, tensor in needed.items():
        torch.testing.assert_close(given[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def equal(a: LanguagePolicy, b: LanguagePolicy) -> bool:
    """Are weights and moments the same bits?"""
    ours, theirs = a.state()[0], b.state()[0]
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
