"""The three ways to weigh tokens, by hand, and over micro-batches."""

import pytest
import torch

from penstock.nodes.learn.batching import Aggregation, normaliser, token_weights

LENGTHS = torch.tensor([1, 3])
LENGTHS_P = torch.tensor([1, 3, 3, 3])
LOSSES = torch.tensor([6.0, 1.0, 2.0, 6.0])


def aggregate(aggregation: Aggregation, micro_batches: list[list[int]]) -> float:
    total = torch.tensor(0.0)
    for rows in micro_batches:
        total = total + (token_weights(LENGTHS_P[rows], aggregation=aggregation) * LOSSES[rows]).sum()
    return float(total / normaliser(LENGTHS, aggregation=aggregation, max_tokens=5))


@pytest.mark.parametrize(
    ("aggregation", "by_hand"),
    [("token_mean", 15 / 4), ("sequence_mean", (6 + 9 / 3) / 2), ("constant", 15 / (2 * 5))],
)
@pytest.mark.parametrize("micro_batches", [[[0, 1, 2, 3]], [[0], [1, 2, 3]]])
def test_an_update_by_hand_however_it_is_cut(
    aggregation: Aggregation, by_hand: float, micro_batches: list[list[int]]
) -> None:
    assert aggregate(aggregation, micro_batches) == pytest.approx(by_hand)


def test_a_mean_of_micro_batch_means_would_be_another_number() -> None:
    assert (LOSSES[:1].mean() + LOSSES[1:].mean()) / 2 != pytest.approx(aggregate("token_mean", [[0], [1, 2, 3]]))


def test_a_constant_without_its_length_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        normaliser(LENGTHS, aggregation="constant")
