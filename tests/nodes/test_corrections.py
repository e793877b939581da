"""Weights by token and by response, truncated and masked; how many samples they are worth."""

import math

import pytest
import torch

from penstock.nodes.learn.losses import Bound, Level, effective_sample_size, importance_weights

# the first response has ratios 2, 3, ½ and product 3; the second one ½, ½ and product ¼
RATIOS = torch.tensor([2.0, 3.0, 0.5, 0.5, 0.5], dtype=torch.float64)
BEHAVIOUR = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0], dtype=torch.float64)
TARGET = BEHAVIOUR + RATIOS.log()
SEQUENCE = torch.tensor([0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("level", "bound", "cap", "floor", "by_hand"),
    [
        ("token", "truncate", 2.5, 0.0, [2.0, 2.5, 0.5, 0.5, 0.5]),
        ("token", "mask", 2.5, 0.0, [2.0, 0.0, 0.5, 0.5, 0.5]),
        ("token", "mask", 2.5, 0.8, [2.0, 0.0, 0.0, 0.0, 0.0]),
        ("sequence", "truncate", 2.5, 0.0, [2.5, 2.5, 2.5, 0.25, 0.25]),
        ("sequence", "mask", 2.5, 0.0, [0.0, 0.0, 0.0, 0.25, 0.25]),
        ("sequence", "mask", 3.5, 0.3, [3.0, 3.0, 3.0, 0.0, 0.0]),
        ("sequence", "truncate", 9.0, 0.3, [3.0, 3.0, 3.0, 0.3, 0.3]),
    ],
)
def test_weights_by_hand(level: Level, bound: Bound, cap: float, floor: float, by_hand: list[float]) -> None:
    weights = importance_weights(TARGET, BEHAVIOUR, SEQUENCE, level=level, bound=bound, cap=cap, floor=floor)
    torch.testing.assert_close(weights, torch.tensor(by_hand, dtype=torch.float64))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", ["truncate", "mask"])
def test_weights_are_constants(level: Level, bound: Bound) -> None:
    target = TARGET.clone().requires_grad_()
    assert not importance_weights(target, BEHAVIOUR, SEQUENCE, level=level, bound=bound, cap=2.5).requires_grad


def test_a_product_beyond_all_numbers_is_still_bounded() -> None:
    target, sequence = torch.full((2000,), 1.0), torch.zeros(2000, dtype=torch.long)
    behaviour = torch.zeros(2000)
    truncated = importance_weights(target, behaviour, sequence, level="sequence", bound="truncate", cap=2.0)
    assert set(truncated.tolist()) == {2.0}
    masked = importance_weights(target, behaviour, sequence, level="sequence", bound="mask", cap=2.0)
    assert set(masked.tolist()) == {0.0}


def test_a_product_that_overflows_half_way_is_the_product() -> None:
    logs = torch.tensor([100.0, 100.0, -100.0, -99.0])
    sequence = torch.zeros(4, dtype=torch.long)
    weights = importance_weights(logs, torch.zeros(4), sequence, level="sequence", bound="mask", cap=3.0)
    torch.testing.assert_close(weights, torch.full((4,), math.e))


def test_effective_sample_size_by_hand() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert effective_sample_size(weights).item() == pytest.approx(36 / 14)
    assert effective_sample_size(torch.full((7,), 0.3)).item() == pytest.approx(7.0)
    assert effective_sample_size(torch.tensor([0.0, 5.0, 0.0])).item() == 1.0
    assert effective_sample_size(torch.zeros(3)).item() == 0.0


def test_effective_sample_size_knows_no_scale() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])
    for scale in (1e-30, 1e30):
        assert effective_sample_size(scale * weights).item() == pytest.approx(36 / 14, rel=1e-5)
