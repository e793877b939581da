"""The reward model by hand: a response's score is the number at its last token, and pairs teach it their order."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.graph.protocols import Carried
from penstock.graph.types import Context, PreferenceModel, RewardModel
from penstock.nodes.data import Pairs
from penstock.nodes.model import ModelError
from penstock.nodes.policy import make_policy
from penstock.nodes.reward_model import (
    FrozenRewardModel,
    LearningRewardModel,
    make_preference_model,
    open_reward_model,
    preference_update,
    reward_scores,
)

from .rollouts import assert_gradients, numbers_of_row, random_rollouts

CONTEXT = Context(node="reward_model", seed=1, updates=10)
FREE = float("inf")
PAIRS = Pairs(("12+34=", "50-9=", "7+8="), ("046", "041", "15"), ("45", "1:041", "16"))


def learning(head: float = 0.3, **changes: Any) -> LearningRewardModel:
    """A reward model whose head has weights of about `head`."""
    made = make_preference_model(replace(CONTEXT, **changes))
    assert isinstance(made, LearningRewardModel)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(7)
        made.masters["score.weight"].copy_(torch.randn(1, 128, generator=generator) * head)
    return made


def frozen(folder: Path, **changes: Any) -> FrozenRewardModel:
    made = open_reward_model(replace(CONTEXT, options={"reward_model": str(folder)}, **changes))
    assert isinstance(made, FrozenRewardModel)
    return made


@pytest.mark.parametrize("micro_tokens", [1, 20, 1000])
def test_a_score_is_the_number_at_the_last_token_whatever_the_packing(tmp_path: Path, micro_tokens: int) -> None:
    learning().export(str(tmp_path))
    model, rollouts = frozen(tmp_path), random_rollouts(unsampled=[(2, 3)])
    rewards, figures = reward_scores.fn(model, rollouts, micro_tokens=micro_tokens)
    needed = torch.stack([numbers_of_row(model.model, rollouts, row)[-1] for row in range(len(rollouts))])
    torch.testing.assert_close(rewards.values_N, needed, rtol=1e-4, atol=1e-5)
    assert figures["learned_reward"] == pytest.approx(float(needed.mean()), rel=1e-4)


@pytest.mark.parametrize("micro_tokens", [1, 1000])
def test_an_update_steps_along_the_bradley_terry_loss(micro_tokens: int) -> None:
    """The mean of −log σ(r(chosen) − r(rejected)), each score the number at the end token."""
    learner, twin = learning(), learning()
    _, figures = preference_update.fn(learner, PAIRS, clip_norm=FREE, micro_tokens=micro_tokens)
    losses = []
    for text, chosen, rejected in zip(PAIRS.texts, PAIRS.chosen, PAIRS.rejected, strict=True):
        scores = []
        for response in (chosen, rejected):
            words = twin.tokenizer
            tokens = torch.tensor([[*words.encode(text), *words.encode(response), words.eos]])
            scores.append((twin.model(tokens)[0, -1] @ twin.model.score.weight[0]).double())
        losses.append(-torch.log(1 / (1 + torch.exp(scores[1] - scores[0]))))
    loss = torch.stack(losses).mean()
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_gradients(learner, loss, twin.masters)


def test_a_new_reward_model_has_no_preference_and_soon_has_one() -> None:
    learner = learning(head=0.0)
    figures = [preference_update.fn(learner, PAIRS, lr=3e-3)[1] for _ in range(15)]
    assert (figures[0]["accuracy"], figures[0]["margin"]) == (0.5, 0.0)
    assert figures[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert figures[-1]["accuracy"] == 1.0
    assert figures[-1]["loss"] < 0.2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_reward_model_goes_on_to_the_bit(dtype: str) -> None:
    whole, resumed = learning(dtype=dtype), learning(dtype=dtype, seed=2)
    preference_update.fn(whole, PAIRS)
    tensors, facts = whole.state()
    resumed.restore({name: t.clone() for name, t in tensors.items()}, dict(facts))
    for learner in (whole, resumed):
        preference_update.fn(learner, PAIRS)
    (ours, our_facts), (theirs, their_facts) = whole.state(), resumed.state()
    assert our_facts == their_facts
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_checkpoint_exports_is_what_rlhf_reads(tmp_path: Path, dtype: str) -> None:
    learner = learning(dtype=dtype)
    preference_update.fn(learner, PAIRS)
    learner.export(str(tmp_path))
    model = frozen(tmp_path, dtype=dtype)
    assert all(torch.equal(w, model.weights()[name]) for name, w in learner.weights().items())
    assert model.tokenizer.encode("1+2=") == learner.tokenizer.encode("1+2=")
    assert isinstance(model, Carried)
    assert model.state() == ({}, {})


def test_a_reward_model_without_a_directory_or_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="reward_model: given no directory, needed a directory that a run of"):
        open_reward_model(CONTEXT)
    make_policy(CONTEXT).export(str(tmp_path))
    with pytest.raises(ModelError, match=r"given a reward model without a head, needed score\.weight"):
        frozen(tmp_path)


def test_a_model_of_another_maker_is_refused() -> None:
    with pytest.raises(TypeError, match="reward_scores: given a RewardModel, needed a FrozenRewardModel"):
        reward_scores.fn(RewardModel(), random_rollouts())
    with pytest.raises(TypeError, match="preference_update: given a PreferenceModel, needed a LearningRewardModel"):
        preference_update.fn(PreferenceModel(), PAIRS)


def test_a_pair_longer_than_the_models_context_is_named() -> None:
    with pytest.raises(ValueError, match=r"demonstration '1\+1=': given 46 tokens, needed at most 32"):
        preference_update.fn(learning(), Pairs(("1+1=",), ("2",), ("3" * 41,)))
