"""Imitation learns demonstrations, end tokens included."""

from typing import Any

import pytest
import torch

from penstock.graph.types import Advantages
from penstock.nodes.data import Demonstrations
from penstock.nodes.learn.losses import aipo, imitate
from penstock.nodes.learn.sft import demonstrated, rollouts_of, sft_update
from penstock.nodes.learn.update import policy_update

from .updating import equal, policy


def test_sft_learns_the_demonstrations_and_ends_each_with_the_end_token() -> None:
    learner = policy(updates=30)
    demonstrations = Demonstrations(("1+1=", "10-3="), ("2", "7"))
    losses = [sft_update.fn(learner, demonstrations, lr=3e-3, warmup=2, final=0.1)[1] for _ in range(30)]
    assert losses[0]["tokens"] == 4
    assert losses[-1]["loss"] < 0.1 * losses[0]["loss"]
    assert losses[0]["lr"] < losses[2]["lr"] == pytest.approx(3e-3, rel=0.02)
    assert losses[-1]["lr"] == pytest.approx(3e-4, rel=0.1)


def test_a_demonstration_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="given 37 tokens, needed at most 32"):
        sft_update.fn(policy(), Demonstrations(("1+1=",), ("2" * 32,)))


def test_demonstrations_as_rollouts_are_learnt_from_as_they_are() -> None:
    """One step on their cross-entropy, by `sft_update` and by `policy_update`."""
    shown = Demonstrations(("1+1=", "20+3="), ("2", "23"))
    one, other = policy(), policy()
    _, figures = sft_update.fn(one, shown, lr=1e-3, warmup=0, weight_decay=0.0)
    rollouts = demonstrated.fn(other, shown)
    _, found = policy_update.fn(other, rollouts, Advantages(torch.ones(2)), loss=imitate, lr=figures["lr"])
    assert equal(one, other)
    assert (found["tokens"], found["loss"]) == (figures["tokens"], pytest.approx(figures["loss"]))
    assert not {"lag_mean", "ratio_mean", "kl"} & found.keys()
    assert rollouts.finished_N.all()
    assert (rollouts.ordinals, rollouts.texts, rollouts.logprobs_NT) == ((0, 1), ("2", "23"), None)
    with pytest.raises(ValueError, match="given no behaviour_P"):
        policy_update.fn(other, rollouts, Advantages(torch.ones(2)), loss=aipo)


def test_texts_become_rollouts_in_groups_and_within_a_limit() -> None:
    with pytest.raises(ValueError, match=r"demonstration '1\+1=': given 45 tokens, needed at most 32"):
        demonstrated.fn(policy(), Demonstrations(("1+1=",), ("2" * 40,)))
    tokenizer = policy().tokenizer
    made = rollouts_of(tokenizer, ["1+1="] * 2, ["2", "3"], ordinals=[7, 7], answers=["2", "2"])
    assert (made.ordinals, made.answers) == ((7, 7), ("2", "2"))
    assert len(rollouts_of(tokenizer, [], [])) == 0
    with pytest.raises(ValueError, match="given 1 answers, needed 2, one for each text"):
        rollouts_of(tokenizer, ["1+1="] * 2, ["2", "3"], answers=["2"])


def test_rows_are_taken_by_numbers_or_by_marks() -> None:
    made = rollouts_of(policy().tokenizer, ["1+1=", "1+2=", "2+2="], ["2", "3", "4"])
    scores_N = torch.tensor([1.0, 0.0, 1.0])
    marks: list[Any] = [[True, False, True], scores_N > 0, [score > 0 for score in scores_N], (scores_N > 0).numpy()]
    numbers: list[Any] = [[0, 2], range(0, 3, 2), torch.tensor([0, 2]), list(torch.tensor([0, 2]).numpy())]
    for rows in (*marks, *numbers):
        assert made.take(rows).texts == ("2", "4")
        assert torch.equal(made.take(rows).tokens_NS, made.tokens_NS[[0, 2]])
    for wrong, told in ((scores_N, "given row 1.0"), ([3], "given row 3"), ([-1], "given row -1")):
        with pytest.raises(ValueError, match=told):
            made.take(wrong)
    assert len(made.take(scores_N > 2)) == 0
