"""Packing loses no token, keeps the order, and fills rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.nodes.learn.packing import Packed, pack

Lengths = list[tuple[int, int]]
LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12)


def batch(lengths: Lengths) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens 1, 2, 3, … so that each one is told from all others."""
    prompts, responses = torch.tensor(lengths).unbind(1)
    tokens = torch.zeros(len(lengths), int((prompts + responses).max()), dtype=torch.long)
    count = 1
    for row, total in enumerate((prompts + responses).tolist()):
        tokens[row, :total] = torch.arange(count, count + total)
        count += total
    return tokens, prompts, responses


def packs(lengths: Lengths, max_tokens: int) -> tuple[Tensor, Tensor, list[Packed]]:
    tokens, prompts, responses = batch(lengths)
    return tokens, prompts, list(pack(tokens, prompts, responses, max_tokens))


@given(LENGTHS, st.integers(1, 60))
def test_every_response_token_is_predicted_once_in_order_by_the_token_before_it(lengths: Lengths, size: int) -> None:
    tokens, prompts, micros = packs(lengths, size)
    places = [(s, t) for m in micros for s, t in zip(m.sequence_P.tolist(), m.step_P.tolist(), strict=True)]
    assert places == [(s, t) for s, (_, response) in enumerate(lengths) for t in range(response)]
    for m in micros:
        at = prompts[m.sequence_P] + m.step_P
        assert torch.equal(m.targets_P, tokens[m.sequence_P, at])
        assert torch.equal(m.tokens_RW.flatten()[m.at_P], tokens[m.sequence_P, at - 1])


@given(LENGTHS, st.integers(1, 60))
def test_positions_count_from_the_start_of_each_sequence(lengths: Lengths, size: int) -> None:
    _, prompts, micros = packs(lengths, size)
    for m in micros:
        expected = prompts[m.sequence_P] + m.step_P - 1
        assert torch.equal(m.positions_RW.flatten()[m.at_P], expected)


@given(LENGTHS, st.integers(1, 60))
def test_micro_batches_keep_their_bound_and_share_rows_only_with_segments(lengths: Lengths, size: int) -> None:
    for m in packs(lengths, size)[2]:
        assert m.tokens_RW.numel() <= size or m.tokens_RW.shape[0] == 1
        if m.segments_RW is None:
            rows = m.at_P // m.tokens_RW.shape[1]
            assert len(set(zip(rows.tolist(), m.sequence_P.tolist(), strict=True))) == m.tokens_RW.shape[0]
        else:
            assert ((m.segments_RW >= 0) == (m.tokens_RW > 0)).all()


def test_short_sequences_share_a_row() -> None:
    (micro,) = packs([(2, 7), (1, 3), (2, 3)], 100)[2]
    assert micro.tokens_RW.shape == (2, 8)
    assert micro.segments_RW is not None
    assert micro.segments_RW[1].tolist() == [1, 1, 1, 2, 2, 2, 2, -1]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt in row 1"):
        list(pack(torch.ones(2, 3, dtype=torch.long), torch.tensor([1, 0]), torch.tensor([2, 3]), 10))
