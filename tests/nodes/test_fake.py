"""Fake nodes are deterministic in all but time, and break where they are told to."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.graph.protocols import Carried, Stream
from penstock.graph.types import Context, Prompts, Rewards, Rollouts, Weights
from penstock.nodes import fake
from penstock.nodes.fake import (
    FakeEngine,
    FakeError,
    FakePolicy,
    fake_environment,
    fake_generate,
    fake_score,
    fake_update,
)

CONTEXT = Context(node="policy")


class Clock:
    """Time that passes only while somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's: between two of its steps no more than one token is due, however slow the machine is."""
    monkeypatch.setattr("penstock.nodes.fake.time", Clock())


def policy() -> FakePolicy:
    made = fake.make_policy(CONTEXT)
    assert isinstance(made, FakePolicy)
    return made


def prompt(ordinal: int) -> Prompts:
    read: Prompts = fake.open_prompts(CONTEXT).read(ordinal)
    return read


def generate(ordinal: int, behaviour: Weights, **options: Any) -> Rollouts:
    made: Rollouts = fake_generate.fn(FakeEngine(4, 0.0), prompt(ordinal), behaviour, **options)[1]
    return made


def weights(learner: FakePolicy) -> Weights:
    return Weights(learner.version, {"values": learner.weights()["values"].clone()})


def train(updates: int, *, lag: int = 0, jitter_ms: float = 0.0, order: tuple[int, ...] = (0, 1)) -> FakePolicy:
    """A plain loop of two groups per update."""
    learner, versions = policy(), []
    for update in range(updates):
        versions.append(weights(learner))
        behaviour = versions[max(0, update - lag)]
        parts = [generate(2 * update + i, behaviour) for i in order]
        rewards = [fake_score.fn(part, jitter_ms=jitter_ms)[0] for part in parts]
        fake_update.fn(learner, Rollouts.concat(parts), Rewards.concat(rewards), jitter_ms=jitter_ms)
    return learner


def test_a_run_depends_on_lag_and_order_but_not_on_time() -> None:
    values = train(3).values_W
    assert torch.equal(values, train(3, jitter_ms=2.0).values_W)
    assert not torch.equal(values, train(3, lag=1).values_W)
    assert not torch.equal(values, train(3, order=(1, 0)).values_W)
    assert not torch.equal(values, policy().values_W)


@pytest.mark.usefixtures("clock")
def test_a_token_keeps_the_version_that_made_it() -> None:
    engine, behaviour = FakeEngine(samples=2, ms=40.0), weights(policy())
    engine.submit("a", {"prompts": prompt(0), "behaviour": behaviour})
    assert engine.busy()
    while not engine.groups["a"].tokens:
        engine.step()
    behaviour.version = 1
    behaviour.tensors = {"values": behaviour.tensors["values"] + 1}
    finished: list[Any] = []
    while engine.busy():
        finished += engine.step()
    ((tag, rollouts),) = finished
    assert tag == "a"
    versions = rollouts.versions_NT[0].tolist()
    assert (versions[0], versions[-1]) == (0, 1)
    old = generate(0, weights(policy())).logprobs_NT
    assert torch.equal(rollouts.logprobs_NT[:, 0], old[:2, 0])
    assert not torch.equal(rollouts.logprobs_NT[:, -1], old[:2, -1])


def test_several_groups_are_in_work_at_once_and_come_out_as_if_alone() -> None:
    engine, behaviour = FakeEngine(samples=4, ms=1.0, jitter_ms=3.0), weights(policy())
    assert isinstance(engine, Stream)
    for ordinal in range(5):
        engine.submit(ordinal, {"prompts": prompt(ordinal), "behaviour": behaviour})
    finished: dict[int, Rollouts] = {}
    while engine.busy():
        finished.update(engine.step())
    for ordinal, rollouts in finished.items():
        alone = generate(ordinal, behaviour)
        assert rollouts.ordinals == (ordinal,) * 4
        assert torch.equal(rollouts.tokens_NS, alone.tokens_NS)
        assert rollouts.texts == alone.texts
    assert set(finished) == set(range(5))


@pytest.mark.usefixtures("clock")
def test_a_reset_engine_has_forgotten_its_groups() -> None:
    engine, behaviour = FakeEngine(samples=4, ms=1.0), weights(policy())
    engine.submit("lost", {"prompts": prompt(0), "behaviour": behaviour})
    engine.step()
    assert engine.busy()
    engine.reset()
    assert not engine.busy()
    engine.submit("kept", {"prompts": prompt(0), "behaviour": behaviour})
    finished: list[Any] = []
    while engine.busy():
        finished += engine.step()
    ((tag, rollouts),) = finished
    assert tag == "kept"
    assert torch.equal(rollouts.tokens_NS, generate(0, behaviour).tokens_NS)


def test_metrics_report_the_lag() -> None:
    learner = policy()
    rollouts = generate(0, weights(learner))
    learner.version = 3
    _, metrics = fake_update.fn(learner, rollouts, fake_score.fn(rollouts)[0])
    assert (metrics["lag_mean"], metrics["lag_max"], learner.version) == (3.0, 3.0, 4)


def test_a_firing_raises_where_it_is_told_to() -> None:
    learner = policy()
    behaviour = weights(learner)
    rollouts = generate(5, behaviour)
    rewards, _ = fake_score.fn(rollouts, raise_at=4)
    with pytest.raises(FakeError, match=r"fake_generate\[5\] was told to raise"):
        fake_generate.fn(FakeEngine(4, 0.0, raise_at=5), prompt(5), behaviour)
    with pytest.raises(FakeError, match=r"fake_score\[5\] was told to raise"):
        fake_score.fn(rollouts, raise_at=5)
    with pytest.raises(FakeError, match=r"fake_update\[0\] was told to raise"):
        fake_update.fn(learner, rollouts, rewards, raise_at=0)


def test_a_firing_hangs_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    rollouts = generate(5, weights(policy()))
    fake_score.fn(rollouts, hang_at=4)
    assert fake.HANG_S not in slept
    fake_score.fn(rollouts, hang_at=5)
    assert fake.HANG_S in slept


def test_the_options_of_the_program_delay_the_publishing_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    fake.make_policy(replace(CONTEXT, options={"sync_ms": 5.0})).weights()
    assert slept == [0.005]


def test_a_restored_fake_policy_goes_on_to_the_bit() -> None:
    whole, resumed = train(2), policy()
    assert isinstance(resumed, Carried)
    resumed.restore(*whole.state())
    for learner in (whole, resumed):
        rollouts = generate(9, weights(learner))
        fake_update.fn(learner, rollouts, fake_score.fn(rollouts)[0])
    assert torch.equal(whole.values_W, resumed.values_W)
    assert whole.version == resumed.version == 3


def test_a_fake_conversation_goes_on_in_the_rows_that_are_not_done() -> None:
    behaviour = weights(policy())
    engine = FakeEngine(8, 0.0)
    _, rollouts = fake_generate.fn(engine, prompt(5), behaviour, samples=8)
    for _ in range(2):
        replies = fake_environment.fn(rollouts)
        assert not replies.done
        _, after = fake_generate.fn(engine, prompt(5), behaviour, rollouts, replies, samples=8)
        for row, done in enumerate(replies.done_N.tolist()):
            assert after.turns()[row] == rollouts.turns()[row] + (not done)
            old = int(rollouts.response_lengths_N[row])
            assert torch.equal(after.tokens_NS[row, : 1 + old], rollouts.tokens_NS[row, : 1 + old])
            if not done:
                assert after.versions_NT[row, old:].tolist() == [-1] + [behaviour.version] * 4
                assert after.tokens_NS[row, 1 + old] == int(replies.texts[row])
        rollouts = after
    assert fake_environment.fn(rollouts).done
    assert sorted(set(rollouts.turns())) == [1, 2, 3]
