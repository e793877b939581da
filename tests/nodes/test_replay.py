"""A buffer of past groups: what is drawn and forgotten, what a learner is given, and that a checkpoint keeps it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.graph.types import Advantages, Context, Rollouts, TokenAdvantages
from penstock.nodes.learn.losses import aipo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.replay_buffer import ReplayBuffer, open_buffer, replay
from penstock.runtime.tensor.codec import decode, encode

from .rollouts import random_rollouts
from .updating import policy

CONTEXT = Context(node="replay", seed=3)
BATCH, SAMPLES = 3, 2


def memory(seed: int = 3) -> ReplayBuffer:
    return open_buffer(replace(CONTEXT, seed=seed))


def batch(update: int) -> tuple[Rollouts, Advantages]:
    """`BATCH` prompt groups of `SAMPLES`, the update in every μ; responses of later updates are longer."""
    rows = BATCH * SAMPLES
    rollouts = random_rollouts([(2, 1 + (update + row) % 3 + update) for row in range(rows)], seed=update)
    ordinals = tuple(update * BATCH + row // SAMPLES for row in range(rows))
    versions = torch.full_like(rollouts.versions_NT, update)
    return replace(rollouts, ordinals=ordinals, versions_NT=versions), Advantages(torch.arange(rows) + 10.0 * update)


def play(
    state: ReplayBuffer, updates: range, **options: Any
) -> tuple[ReplayBuffer, list[tuple[Rollouts, Advantages]], list[Any]]:
    made, figures = [], []
    for update in updates:
        state, out, figure = replay.fn(state, *batch(update), **options)
        made.append(out)
        figures.append(figure)
    return state, made, figures


def groups(rollouts: Rollouts) -> list[int]:
    return list(dict.fromkeys(rollouts.ordinals))


def test_the_first_batch_is_learnt_from_as_it_is() -> None:
    _, ((rollouts, advantage),), (figures,) = play(memory(), range(1))
    fresh, worth = batch(0)
    assert torch.equal(rollouts.tokens_NS, fresh.tokens_NS)
    assert rollouts.ordinals == fresh.ordinals
    assert rollouts.replayed_N.tolist() == [False] * len(fresh)
    assert torch.equal(advantage.values_N, worth.values_N)
    assert figures == {"replayed": 0.0, "replayed_age": 0.0, "buffered": 3.0}


def test_past_groups_come_whole_after_the_fresh_ones_with_all_that_belongs_to_them() -> None:
    _, made, figures = play(memory(), range(4), take=2)
    rollouts, advantage = made[3]
    assert groups(rollouts)[:BATCH] == [9, 10, 11]
    old = groups(rollouts)[BATCH:]
    assert len(old) == 2
    assert set(old) < set(range(9))
    assert rollouts.replayed_N.tolist() == [False] * BATCH * SAMPLES + [True] * 2 * SAMPLES
    assert figures[3]["replayed"] == 2.0
    assert figures[3]["replayed_age"] == pytest.approx(sum(3 - ordinal // BATCH for ordinal in old) / 2)
    for row in range(BATCH * SAMPLES, len(rollouts)):
        update, place = divmod(rollouts.ordinals[row], BATCH)
        fresh, worth = batch(update)
        there = place * SAMPLES + row % SAMPLES
        length, width = int(fresh.response_lengths_N[there]), fresh.tokens_NS.shape[1]
        assert torch.equal(rollouts.tokens_NS[row, :width], fresh.tokens_NS[there])
        assert torch.equal(rollouts.logprobs_NT[row, :length], fresh.logprobs_NT[there, :length])
        assert rollouts.versions_NT[row, 0] == update
        assert advantage.values_N[row] == worth.values_N[there]


@pytest.mark.parametrize("max_age", [1, 2, 3])
def test_no_group_is_older_than_its_bound(max_age: int) -> None:
    _, made, figures = play(memory(), range(8), take=100, max_age=max_age)
    for update, (rollouts, _) in enumerate(made):
        first = max(0, update - max_age) * BATCH
        assert sorted(groups(rollouts)) == list(range(first, (update + 1) * BATCH))
    assert figures[-1] == {"replayed": 3.0 * max_age, "replayed_age": (max_age + 1) / 2, "buffered": 3.0 * max_age}


def test_a_full_buffer_forgets_the_oldest_groups() -> None:
    state, made, _ = play(memory(), range(5), take=100, capacity=4, max_age=100)
    assert groups(state.past()) == [11, 12, 13, 14]
    assert sorted(groups(made[-1][0])) == [8, 9, 10, 11, 12, 13, 14]


def test_draws_are_keyed() -> None:
    def drawn(seed: int) -> list[list[int]]:
        return [groups(rollouts) for rollouts, _ in play(memory(seed), range(6), take=2)[1]]

    assert drawn(3) == drawn(3) != drawn(4)


def test_each_update_draws_anew() -> None:
    """From a buffer that stays as it is, all groups come sooner or later: draws do not repeat."""
    state, _, _ = play(memory(), range(1), max_age=100)
    drawn = []
    for update in range(20):
        state = replace(state, update=1 + update)
        _, (rollouts, _), _ = replay.fn(state, *batch(30), take=1, max_age=100)
        drawn += groups(rollouts)[BATCH:]
    assert set(drawn) == set(range(BATCH))


@pytest.mark.parametrize("before", [0, 3])
def test_a_buffer_goes_on_from_a_checkpoint_to_the_bit(before: int) -> None:
    whole = play(memory(), range(before), take=2)[0]
    resumed = decode(ReplayBuffer, *encode(whole))
    assert type(resumed) is ReplayBuffer
    ours, theirs = (play(state, range(before, before + 3), take=2)[1] for state in (whole, resumed))
    for (rollouts, advantage), (others, other) in zip(ours, theirs, strict=True):
        assert rollouts.ordinals == others.ordinals
        assert rollouts.transcripts == others.transcripts
        assert torch.equal(rollouts.tokens_NS, others.tokens_NS)
        assert torch.equal(rollouts.logprobs_NT, others.logprobs_NT)
        assert torch.equal(advantage.values_N, other.values_N)


def test_an_update_counts_replayed_groups_apart_and_cuts_all_of_them_into_minibatches() -> None:
    """Three fresh groups of lag 0, and two past ones whose lags are their ages: minibatches of three and of two."""
    learner, state = policy(), memory()
    for update in range(3):
        state, (rollouts, advantage), figures = replay.fn(state, *batch(update), take=2)
        _, found = policy_update.fn(learner, rollouts, advantage, loss=aipo, minibatches=2, lr=0.0)
        old = [ordinal for ordinal in groups(rollouts) if ordinal < update * BATCH]
        fresh = batch(update)[0].response_lengths_N.sum()
        assert len(old) == figures["replayed"] == (2 if update else 0)
        assert (found["lag_mean"], found["lag_max"]) == (0, 0)
        assert found["replayed_lag_max"] == max((update - ordinal // BATCH for ordinal in old), default=0)
        assert found["replayed_tokens"] == found["tokens"] - fresh
        assert (found["replayed_tokens"] > 0) == (update > 0)


def test_advantages_of_tokens_stay_of_tokens() -> None:
    state = memory()
    for update in range(2):
        rollouts, _ = batch(update)
        state, (mixed, advantage), _ = replay.fn(state, rollouts, TokenAdvantages(rollouts.logprobs_NT * 2))
    assert isinstance(advantage, TokenAdvantages)
    assert len(mixed) == 4 * BATCH
    assert torch.equal(advantage.values_N, mixed.logprobs_NT * 2)
