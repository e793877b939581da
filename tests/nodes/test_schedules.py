"""Learning rates that change: by hand, by schedule, and as another node has computed them."""

from functools import partial

import pytest
import torch

from penstock.graph.types import LearningRate
from penstock.nodes.distill import policy_logprobs
from penstock.nodes.learn.dpo import dpo_update
from penstock.nodes.learn.losses import aipo
from penstock.nodes.learn.optimizer import Schedule, cosine, linear
from penstock.nodes.learn.update import policy_update

from .updating import batch, equal, policy

UPDATES = 10
"""Of the run that `policy` is made for."""


def rates(schedule: Schedule) -> list[float]:
    return [schedule(update, UPDATES) for update in range(UPDATES + 2)]


def test_a_line_up_then_a_line_down() -> None:
    falling = [2.0 * (1 - 0.1 * update) for update in range(UPDATES)] + [0.0, 0.0]
    assert rates(partial(linear, peak=2.0)) == pytest.approx(falling)
    rising = [0.25, 0.5, 0.75, *[1.0] * 9]
    assert rates(partial(linear, peak=1.0, warmup=3, final=1.0)) == pytest.approx(rising)
    assert rates(partial(linear, peak=1.0, warmup=3, final=0.5))[:4] == pytest.approx([0.25, 0.475, 0.675, 0.85])


def test_half_a_cosine_from_the_peak_to_its_final_share() -> None:
    found = rates(partial(cosine, peak=4.0, final=0.5))
    assert (found[0], found[5], found[10], found[11]) == pytest.approx((4.0, 3.0, 2.0, 2.0))
    assert found == sorted(found, reverse=True)
    assert rates(partial(cosine, peak=4.0, warmup=1, final=0.5))[0] == pytest.approx(2.0)


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_update_by_a_schedule_is_the_update_with_that_number_to_the_bit(epochs: int) -> None:
    schedule = partial(linear, peak=1e-2, warmup=2)
    one, other = policy(updates=UPDATES), policy(updates=UPDATES)
    for rate in rates(schedule)[:3]:
        _, figures = policy_update.fn(one, *batch(), loss=aipo, lr=schedule, epochs=epochs)
        policy_update.fn(other, *batch(), loss=aipo, lr=rate, epochs=epochs)
        assert figures["lr"] == rate
    assert equal(one, other)


def test_a_rate_that_a_node_has_computed_takes_the_place_of_the_number() -> None:
    one, other = policy(), policy()
    _, figures = policy_update.fn(one, *batch(), rate=LearningRate(3e-3), loss=aipo)
    policy_update.fn(other, *batch(), loss=aipo, lr=3e-3)
    assert equal(one, other)
    assert figures["lr"] == 3e-3


def test_other_updates_take_schedules_too() -> None:
    (rollouts, advantage), learners = batch(), [policy(), policy()]
    rollouts.ordinals = (0,) * 5
    reference = policy_logprobs.fn(learners[0], rollouts)
    for learner, lr in zip(learners, (partial(cosine, peak=1e-3, warmup=3), 2.5e-4), strict=True):
        dpo_update.fn(learner, rollouts, advantage, reference, lr=lr)
    assert equal(*learners)


@pytest.mark.parametrize("rate", [-1e-3, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused_before_the_weights_change(rate: float) -> None:
    learner = policy()
    with pytest.raises(ValueError, match=r"update 0 of 10: given a learning rate of .*, needed a finite number of at"):
        policy_update.fn(learner, *batch(), rate=LearningRate(rate), loss=aipo)
    assert equal(learner, policy())
    assert torch.isfinite(learner.weights()["model.norm.weight"]).all()
