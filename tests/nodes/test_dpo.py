"""A DPO update by hand: the gradient of equation 7 on each prompt's best and worst response."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.graph.types import Context, Logprobs, Rewards, Rollouts
from penstock.nodes.distill import policy_logprobs
from penstock.nodes.learn.dpo import dpo_update
from penstock.nodes.policy import LanguagePolicy, make_policy

from .rollouts import assert_gradients, random_rollouts

FREE = float("inf")
BETA = 0.3
LENGTHS = [(2, 3), (2, 1), (2, 4), (1, 2), (1, 3), (1, 1), (3, 2), (3, 2)]
REWARDS = Rewards(torch.tensor([0.0, 2.0, 1.0, 0.5, -1.0, 0.0, 1.0, 1.0]))
PAIRS = [(1, 0), (3, 4)]
"""(best, worst) of the first two prompts; those of the third are equal."""


def batch() -> tuple[Rollouts, Logprobs]:
    """Three prompts; an environment's token in the first response. The reference is someone else."""
    rollouts = replace(random_rollouts(LENGTHS, unsampled=[(0, 1)]), ordinals=(4, 4, 4, 9, 9, 9, 7, 7))
    generator = torch.Generator().manual_seed(5)
    return rollouts, Logprobs(torch.randn(8, 4, generator=generator) * 0.3 - 2.7)


def policy(**changes: Any) -> LanguagePolicy:
    made = make_policy(replace(Context(node="policy", seed=1), **changes))
    assert isinstance(made, LanguagePolicy)
    return made


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("micro_tokens", [1, 1000])
def test_an_update_steps_along_equation_7(micro_tokens: int, silent: bool) -> None:
    """`silent`: in the best response to the first prompt there is no token that the policy sampled."""
    learner, twin, (rollouts, reference) = policy(), policy(), batch()
    if silent:
        rollouts.versions_NT[1] = -1
    options = {"beta": BETA, "clip_norm": FREE, "micro_tokens": micro_tokens}
    _, figures = dpo_update.fn(learner, rollouts, REWARDS, reference, **options)

    def against_reference(row: int) -> torch.Tensor:
        """log π / π_ref of the sampled tokens of a response."""
        prompt, length = LENGTHS[row]
        tokens = rollouts.tokens_NS[row, : prompt + length]
        logprobs = twin.model.logits(twin.model(tokens[None, :-1]))[0].log_softmax(-1)
        own = logprobs[range(prompt + length - 1), tokens[1:]][prompt - 1 :]
        gaps: torch.Tensor = own - reference.logprobs_NT[row, :length]
        return gaps[rollouts.versions_NT[row, :length] >= 0].sum()

    margins = torch.stack([against_reference(best) - against_reference(worst) for best, worst in PAIRS])
    loss = -torch.log(1 / (1 + torch.exp(-BETA * margins))).mean()
    assert_gradients(learner, loss, twin.masters)
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert figures["margin"] == pytest.approx(float(margins.detach().mean()), rel=1e-3)
    assert (figures["pairs"], figures["tokens"]) == (2.0, (not silent) + 2 + 2 + 3)
    assert figures["preferred"] == float((margins > 0).float().mean())


def test_without_a_preference_no_weight_moves_and_the_version_goes_on() -> None:
    learner, (rollouts, reference) = policy(), batch()
    before = {name: w.clone() for name, w in learner.weights().items()}
    _, figures = dpo_update.fn(learner, rollouts, Rewards(torch.ones(8)), reference)
    assert (figures["pairs"], figures["grad_norm"], learner.version) == (0.0, 0.0, 1)
    assert all(torch.equal(w, before[name]) for name, w in learner.weights().items())


def test_the_chosen_becomes_likelier_against_the_rejected() -> None:
    learner, (rollouts, _) = policy(), batch()
    reference = policy_logprobs.fn(learner, rollouts)
    figures = [dpo_update.fn(learner, rollouts, REWARDS, reference, lr=1e-3)[1] for _ in range(10)]
    assert figures[0]["margin"] == 0.0
    assert figures[-1]["margin"] > 1.0
    assert figures[-1]["preferred"] == 1.0
