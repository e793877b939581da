"""Who cannot do without the log-probabilities of the policy that sampled is named where there are none."""

from dataclasses import replace

import pytest

from penstock.nodes.learn.batching import behaviour_logprobs

from .rollouts import random_rollouts


def test_what_was_recorded_is_given_and_what_was_not_is_refused() -> None:
    rollouts = random_rollouts()
    assert behaviour_logprobs(rollouts, "some_node") is rollouts.logprobs_NT
    with pytest.raises(ValueError, match=r"^some_node: given rollouts without log μ \(logprobs_NT is None\), needed"):
        behaviour_logprobs(replace(rollouts, logprobs_NT=None), "some_node")
