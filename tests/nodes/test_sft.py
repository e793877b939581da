"""Imitation learns demonstrations, end tokens included."""

import pytest

from penstock.nodes.data import Demonstrations
from penstock.nodes.learn.sft import sft_update

from .updating import policy


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
