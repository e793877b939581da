"""A group is worth learning from if its rewards differ; what is too long costs, up to one."""

import pytest
import torch

from penstock.graph.types import Context, Rewards
from penstock.nodes.score import mixed, penalize_overlong

from .updating import batch


@pytest.mark.parametrize(
    ("values", "differ"), [([1, 0, 1], True), ([1, 1, 1], False), ([0, 0, 0], False), ([0.3], False)]
)
def test_a_group_is_mixed_if_its_rewards_differ(values: list[float], differ: bool) -> None:
    rollouts, _ = batch()
    assert mixed(rollouts, Rewards(torch.tensor(values))) is differ


def test_a_penalty_falls_along_a_line_to_the_longest_length() -> None:
    rollouts, _ = batch()
    assert rollouts.response_lengths_N.tolist() == [3, 1, 4, 2, 3]
    found = penalize_overlong.fn(Rewards(torch.ones(5)), rollouts, max_length=4, buffer=2)
    assert found.values_N.tolist() == [0.5, 1.0, 0.0, 1.0, 0.5]


def test_a_penalty_is_one_at_most() -> None:
    rollouts, _ = batch()
    found = penalize_overlong.fn(Rewards(torch.ones(5)), rollouts, max_length=3, buffer=2)
    assert found.values_N.tolist() == [0.0, 1.0, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("buffer", [0, 5])
def test_a_buffer_outside_the_length_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"buffer={buffer}"):
        penalize_overlong.fn(Rewards(torch.ones(5)), batch()[0], max_length=4, buffer=buffer)


def test_the_longest_length_is_the_runs_bound_on_responses() -> None:
    rollouts, _ = batch()
    rewards = Rewards(torch.ones(5))
    found = penalize_overlong.fn(rewards, rollouts, buffer=2, context=Context(max_tokens=4))
    assert found.values_N.tolist() == [0.5, 1.0, 0.0, 1.0, 0.5]
    with pytest.raises(ValueError, match="given no max_length outside of a run"):
        penalize_overlong.fn(rewards, rollouts, buffer=2)
