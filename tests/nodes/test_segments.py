"""Segments of rows in any order; an empty segment sums to nothing; the gradient goes back to the rows."""

import torch

from penstock.nodes.learn.losses import segment_lengths, segment_max, segment_mean, segment_sum

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
SEGMENTS = torch.tensor([2, 0, 2, 0, 0])


def test_segments_are_summed_in_any_order_of_rows_and_empty_ones_are_zero() -> None:
    assert segment_lengths(SEGMENTS, 4).tolist() == [3, 0, 2, 0]
    assert segment_sum(VALUES, SEGMENTS, 4).tolist() == [26.0, 0.0, 5.0, 0.0]
    torch.testing.assert_close(segment_mean(VALUES, SEGMENTS, 4), torch.tensor([26 / 3, 0, 2.5, 0]).double())
    assert segment_max(VALUES, SEGMENTS, 4).tolist() == [16.0, float("-inf"), 4.0, float("-inf")]


def test_without_a_number_there_are_as_many_segments_as_the_largest_index_needs() -> None:
    assert segment_sum(VALUES, SEGMENTS).tolist() == [26.0, 0.0, 5.0]


def test_the_gradient_of_a_mean_is_one_over_the_length() -> None:
    values = VALUES.clone().requires_grad_()
    weights = torch.tensor([3.0, 5.0, 7.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad((weights * segment_mean(values, SEGMENTS)).sum(), values)
    assert grad.tolist() == [3.5, 1.0, 3.5, 1.0, 1.0]
    assert torch.autograd.gradcheck(lambda x: segment_sum(x, SEGMENTS), (values,))


def test_a_segment_sums_to_the_same_bits_wherever_its_rows_lie() -> None:
    torch.manual_seed(0)
    values, segments = torch.randn(999), torch.arange(999) % 3
    end_to_end = torch.argsort(segments, stable=True)
    assert torch.equal(segment_sum(values, segments), segment_sum(values[end_to_end], segments[end_to_end]))
