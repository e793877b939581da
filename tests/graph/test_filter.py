"""A filter keeps or drops what its predicate says, and nothing else counts as an answer."""

from typing import Any

import numpy as np
import pytest
import torch

from penstock.graph.node import Dropped, Filter


def verdict(answer: Any) -> Any:
    return Filter().run(None, {"0": "rollouts", "1": "rewards"}, {"when": lambda rollouts, rewards: answer})


@pytest.mark.parametrize("answer", [True, np.True_, torch.tensor(True), torch.tensor([True])])
def test_what_is_true_keeps_the_values(answer: Any) -> None:
    assert verdict(answer) == ("rollouts", "rewards")


@pytest.mark.parametrize("answer", [False, np.False_, torch.tensor(False)])
def test_what_is_false_drops_the_group(answer: Any) -> None:
    assert isinstance(verdict(answer), Dropped)


@pytest.mark.parametrize("answer", [None, "no", 0.3, [True], torch.tensor([True, False]), torch.tensor(1)])
def test_anything_else_is_refused(answer: Any) -> None:
    with pytest.raises(TypeError, match="needed True or False for the whole group"):
        verdict(answer)
