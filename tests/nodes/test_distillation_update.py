"""Distillation by hand: what the teacher thinks of tokens, the gradient of the whole divergence, the teacher."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.graph.protocols import Carried
from penstock.graph.types import Context, Logprobs, Teacher
from penstock.nodes.distill import distill_update, distillation_advantage, open_teacher, reference_logprobs
from penstock.nodes.model import ModelError
from penstock.nodes.policy import LanguageModel, LanguagePolicy, make_policy

from .rollouts import assert_gradients, random_rollouts

CONTEXT = Context(node="policy", seed=1)


def policy(**changes: Any) -> LanguagePolicy:
    made = make_policy(replace(CONTEXT, **changes))
    assert isinstance(made, LanguagePolicy)
    return made


def teacher(folder: Path) -> Teacher:
    """Another model than the policy's."""
    policy(seed=2).export(str(folder))
    made = open_teacher(replace(CONTEXT, options={"teacher_model": str(folder)}))
    assert isinstance(made, Teacher)
    assert isinstance(made, Carried)
    return made


def test_the_advantage_is_what_the_teacher_thinks_of_a_sampled_token() -> None:
    rollouts = random_rollouts([(2, 3), (1, 1)], unsampled=[(0, 1)])
    opinions = Logprobs(rollouts.logprobs_NT + torch.tensor([[0.5, 9.0, -0.25], [1.0, 9.0, 9.0]]))
    advantage, figures = distillation_advantage.fn(rollouts, opinions)
    torch.testing.assert_close(advantage.values_N, torch.tensor([[0.5, 0.0, -0.25], [1.0, 0.0, 0.0]]))
    assert figures["teacher_kl"] == pytest.approx(-(0.5 - 0.25 + 1.0) / 3)


def test_what_the_teacher_thinks_is_compared_with_mu() -> None:
    rollouts = random_rollouts()
    bare = replace(rollouts, logprobs_NT=None)
    needed = "distillation_advantage: given rollouts without log μ .*, needed rollouts whose logprobs_NT were recorded"
    with pytest.raises(ValueError, match=needed):
        distillation_advantage.fn(bare, Logprobs(rollouts.logprobs_NT))


@pytest.mark.parametrize("micro_tokens", [1, 1000])
def test_an_update_steps_along_the_reverse_kl(tmp_path: Path, micro_tokens: int) -> None:
    """An environment wrote the second token of the third response, and all of the second."""
    learner, twin, guide = policy(), policy(), teacher(tmp_path)
    rollouts = random_rollouts(unsampled=[(2, 1), (1, 0)])
    _, figures = distill_update.fn(learner, guide, rollouts, clip_norm=float("inf"), micro_tokens=micro_tokens)
    assert isinstance(guide, LanguageModel)
    divergences = []
    for row in range(len(rollouts)):
        prompt, length = int(rollouts.prompt_lengths_N[row]), int(rollouts.response_lengths_N[row])
        tokens = rollouts.tokens_NS[row, None, : prompt + length - 1]
        ours, theirs = (m.logits(m(tokens))[0, prompt - 1 :].log_softmax(-1) for m in (twin.model, guide.model))
        kl = (ours.exp() * (ours - theirs)).sum(-1)
        divergences += [kl[step] for step in range(length) if (row, step) not in ((2, 1), (1, 0))]
    loss = torch.stack(divergences).sum() / 11
    assert figures["teacher_kl"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert_gradients(learner, loss, twin.masters)


def test_a_student_that_has_written_nothing_learns_nothing(tmp_path: Path) -> None:
    rollouts = random_rollouts([(2, 1), (1, 1)], unsampled=[(0, 0), (1, 0)])
    with pytest.raises(ValueError, match=r"given 2 responses without a sampled token .* needed at least one"):
        distill_update.fn(policy(), teacher(tmp_path), rollouts)


def test_a_student_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    learner, guide, rollouts = policy(), teacher(tmp_path), random_rollouts()
    figures = [distill_update.fn(learner, guide, rollouts, lr=3e-3)[1] for _ in range(10)]
    assert figures[-1]["teacher_kl"] < figures[0]["teacher_kl"] / 2


def test_a_teacher_reads_tokens_as_a_reference_does(tmp_path: Path) -> None:
    logprobs = reference_logprobs.fn(teacher(tmp_path), random_rollouts()).logprobs_NT
    other = reference_logprobs.fn(policy(seed=2), random_rollouts()).logprobs_NT
    assert torch.equal(logprobs, other)


def test_a_teacher_without_a_directory_or_with_other_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="teacher_model: given no directory, needed a model directory"):
        open_teacher(CONTEXT)
    policy(data="other").export(str(tmp_path))
    with pytest.raises(
        ModelError, match=r"given a tokenizer of 258 tokens, needed the policy's own tokenizer, which has"
    ):
        open_teacher(replace(CONTEXT, options={"teacher_model": str(tmp_path)}))
