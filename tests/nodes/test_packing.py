"""Packing loses no token, puts sequences of about one length together, and shares them out evenly."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.nodes.learn.batching import Packed, pack

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


def packs(lengths: Lengths, max_tokens: int, multiple: int) -> tuple[Tensor, Tensor, list[Packed]]:
    tokens, prompts, responses = batch(lengths)
    return tokens, prompts, pack(tokens, prompts, responses, max_tokens, multiple)


@given(LENGTHS, st.integers(1, 60), st.integers(1, 3))
def test_every_response_token_is_predicted_once_by_the_token_before_it(
    lengths: Lengths, size: int, multiple: int
) -> None:
    tokens, prompts, micros = packs(lengths, size, multiple)
    places = [(s, t) for m in micros for s, t in zip(m.sequence_P.tolist(), m.step_P.tolist(), strict=True)]
    assert sorted(places) == [(s, t) for s, (_, response) in enumerate(lengths) for t in range(response)]
    for m in micros:
        at = prompts[m.sequence_P] + m.step_P
        assert torch.equal(m.targets_P, tokens[m.sequence_P, at])
        assert torch.equal(m.tokens_RW.flatten()[m.at_P], tokens[m.sequence_P, at - 1])
        assert torch.equal(m.at_P % m.tokens_RW.shape[1], at - 1)


@given(LENGTHS, st.integers(1, 60), st.integers(1, 3))
def test_micro_batches_keep_their_bound_and_hold_the_longest_sequences_first(
    lengths: Lengths, size: int, multiple: int
) -> None:
    micros = packs(lengths, size, multiple)[2]
    for m in micros:
        assert m.tokens_RW.numel() <= size or m.tokens_RW.shape[0] == 1
        assert int((m.tokens_RW > 0).sum(1).max()) == m.tokens_RW.shape[1]
    order = list(dict.fromkeys(s for m in micros for s in m.sequence_P.tolist()))
    assert order == sorted(range(len(lengths)), key=lambda s: (-sum(lengths[s]), s))


def test_lanes_get_equal_shares() -> None:
    shapes = [tuple(m.tokens_RW.shape) for m in packs([(3, 8)] * 10, 40, multiple=2)[2]]
    assert shapes == [(3, 10), (3, 10), (3, 10), (1, 10)]
    shapes = [tuple(m.tokens_RW.shape) for m in packs([(3, 8)] * 10, 1000, multiple=2)[2]]
    assert shapes == [(5, 10), (5, 10)]


def test_what_is_in_a_row_after_a_sequence_does_not_count() -> None:
    tokens = torch.full((2, 9), 7)
    (micro,) = pack(tokens, torch.tensor([2, 1]), torch.tensor([4, 2]), 100)
    assert micro.tokens_RW.tolist() == [[7] * 5, [7] * 2 + [0] * 3]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt in row 1"):
        pack(torch.ones(2, 3, dtype=torch.long), torch.tensor([1, 0]), torch.tensor([2, 3]), 10)


@given(LENGTHS, st.integers(1, 60), st.randoms(use_true_random=False))
def test_what_nobody_sampled_is_no_target_and_moves_nothing_else(lengths: Lengths, size: int, random: Random) -> None:
    tokens, prompts, responses = batch(lengths)
    sampled = torch.tensor([[random.random() < 0.5 for _ in range(int(responses.max()))] for _ in lengths])
    whole = pack(tokens, prompts, responses, size)
    masked = pack(tokens, prompts, responses, size, sampled_NT=sampled)
    marks = [sampled[each.sequence_P, each.step_P] for each in whole]
    kept = [(each, chosen) for each, chosen in zip(whole, marks, strict=True) if chosen.any()]
    for (all_of, chosen), some in zip(kept, masked, strict=True):
        assert torch.equal(some.tokens_RW, all_of.tokens_RW)
        for name in ("at_P", "targets_P", "sequence_P", "step_P"):
            assert torch.equal(getattr(some, name), getattr(all_of, name)[chosen])


def test_no_micro_batch_is_without_a_target() -> None:
    tokens, prompts, responses = batch([(2, 3), (1, 2), (3, 1)])
    nothing = torch.zeros(3, 3, dtype=torch.bool)
    assert pack(tokens, prompts, responses, 1, sampled_NT=nothing) == []
    nothing[1, 1] = True
    (micro,) = pack(tokens, prompts, responses, 1, sampled_NT=nothing)
    assert (micro.sequence_P.tolist(), micro.step_P.tolist()) == ([1], [1])


@given(LENGTHS, st.integers(1, 120), st.integers(1, 3), st.randoms(use_true_random=False))
def test_groups_stay_whole_and_nothing_is_lost(lengths: Lengths, size: int, multiple: int, random: Random) -> None:
    tokens, prompts, responses = batch(lengths)
    groups = torch.tensor([random.randrange(3) for _ in lengths])
    micros = pack(tokens, prompts, responses, size, multiple, group_N=groups)
    places = [(s, t) for m in micros for s, t in zip(m.sequence_P.tolist(), m.step_P.tolist(), strict=True)]
    assert sorted(places) == [(s, t) for s, (_, response) in enumerate(lengths) for t in range(response)]
    held = [set(groups[m.sequence_P].tolist()) for m in micros]
    assert sum(map(len, held)) == len(set(groups.tolist()))
    for m, found in zip(micros, held, strict=True):
        assert m.tokens_RW.numel() <= size or len(found) == 1
        at = prompts[m.sequence_P] + m.step_P
        assert torch.equal(m.tokens_RW.flatten()[m.at_P], tokens[m.sequence_P, at - 1])
