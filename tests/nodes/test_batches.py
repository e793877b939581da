"""How the tokens of a batch are packed, cut and shared out: no token is lost, and no figure depends on it."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.graph import Context, Rewards
from penstock.nodes.learn.batching import Packed, behaviour_logprobs, minibatch_rows, pack
from penstock.nodes.learn.data_parallel_threads import DataParallelThreads
from penstock.nodes.learn.losses import Sampled
from penstock.nodes.learn.update import StepSums, add_up, token_sums, update_metrics
from penstock.nodes.model import Llama
from penstock.nodes.open_model import open_model
from tests.nodes.rollouts import random_rollouts
from tests.nodes.updating import batch

# Packing loses no token, puts sequences of about one length together, and shares them out evenly.


Lengths = list[tuple[int, int]]
LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12)


def packing_batch(lengths: Lengths) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens 1, 2, 3, … so that each one is told from all others."""
    prompts, responses = torch.tensor(lengths).unbind(1)
    tokens = torch.zeros(len(lengths), int((prompts + responses).max()), dtype=torch.long)
    count = 1
    for row, total in enumerate((prompts + responses).tolist()):
        tokens[row, :total] = torch.arange(count, count + total)
        count += total
    return tokens, prompts, responses


def packs(lengths: Lengths, max_tokens: int, multiple: int) -> tuple[Tensor, Tensor, list[Packed]]:
    tokens, prompts, responses = packing_batch(lengths)
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
    tokens, prompts, responses = packing_batch(lengths)
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
    tokens, prompts, responses = packing_batch([(2, 3), (1, 2), (3, 1)])
    nothing = torch.zeros(3, 3, dtype=torch.bool)
    assert pack(tokens, prompts, responses, 1, sampled_NT=nothing) == []
    nothing[1, 1] = True
    (micro,) = pack(tokens, prompts, responses, 1, sampled_NT=nothing)
    assert (micro.sequence_P.tolist(), micro.step_P.tolist()) == ([1], [1])


@given(LENGTHS, st.integers(1, 120), st.integers(1, 3), st.randoms(use_true_random=False))
def test_groups_stay_whole_and_nothing_is_lost(lengths: Lengths, size: int, multiple: int, random: Random) -> None:
    tokens, prompts, responses = packing_batch(lengths)
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


# Minibatches are whole prompt groups, each in one of them, drawn by a key.


ORDINALS = [4, 4, 6, 6, 6, 9, 12, 12]


def test_every_row_is_in_one_minibatch_with_its_group() -> None:
    for key in range(20):
        parts = minibatch_rows(ORDINALS, 2, key)
        assert sorted(row for part in parts for row in part) == list(range(8))
        for part in parts:
            assert part == sorted(part)
            assert len({ORDINALS[row] for row in part}) == 2
    assert len({str(minibatch_rows(ORDINALS, 2, key)) for key in range(20)}) > 2


def test_one_minibatch_is_the_batch_as_it_is() -> None:
    assert all(minibatch_rows(ORDINALS, 1, key) == [list(range(8))] for key in range(5))


def test_a_key_says_which() -> None:
    assert minibatch_rows(ORDINALS, 4, 3) == minibatch_rows(ORDINALS, 4, 3)


@pytest.mark.parametrize(("groups", "minibatches", "sizes"), [(6, 3, [2] * 3), (7, 3, [3, 2, 2]), (5, 5, [1] * 5)])
def test_minibatches_are_as_even_as_whole_groups_can_be(groups: int, minibatches: int, sizes: list[int]) -> None:
    ordinals = [ordinal for ordinal in range(groups) for _ in range(3)]
    for key in range(10):
        parts = minibatch_rows(ordinals, minibatches, key)
        assert [len(part) for part in parts] == [3 * size for size in sizes]
        assert sorted(row for part in parts for row in part) == list(range(3 * groups))


@pytest.mark.parametrize("minibatches", [-1, 0, 5, 8])
def test_groups_are_never_torn(minibatches: int) -> None:
    given = f"given minibatches={minibatches} for a batch of 4 prompt groups, needed at least 1, and a prompt group for"
    with pytest.raises(ValueError, match=given):
        minibatch_rows(ORDINALS, minibatches, 0)


def test_rows_are_taken_of_arrays_and_of_tuples_alike() -> None:
    rollouts, _ = batch()
    rollouts.logprobs_NT = None
    taken = rollouts.take([3, 1])
    assert taken.ordinals == (3, 1)
    assert taken.logprobs_NT is None
    assert torch.equal(taken.tokens_NS, rollouts.tokens_NS[[3, 1]])
    assert Rewards(torch.tensor([5.0, 6.0])).take([1]).values_N.tolist() == [6]


def test_rows_are_taken_by_marks_too_and_none_at_all() -> None:
    rollouts, advantage = batch()
    for marks in (advantage.values_N > 0, [True, False, True, False, True]):
        taken = rollouts.take(marks)
        assert (taken.ordinals, len(taken)) == ((0, 2, 4), 3)
        assert torch.equal(taken.tokens_NS, rollouts.tokens_NS[[0, 2, 4]])
    nothing = rollouts.take([])
    assert (len(nothing), nothing.tokens_NS.shape) == (0, (0, rollouts.tokens_NS.shape[1]))
    assert len(type(rollouts).concat([nothing, taken, nothing])) == 3
    assert taken.take(torch.tensor([2, 2])).ordinals == (4, 4)


@pytest.mark.parametrize(
    ("rows", "said"),
    [([5], "row 5, needed 0 to 4"), ([-1], "row -1, needed 0 to 4"), ([True], "1 marks, needed 5, one for each row")],
)
def test_a_row_that_there_is_not_is_refused(rows: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=rf"Rollouts\.take: given {said}"):
        batch()[0].take(rows)


# Figures are means over tokens, whatever the micro-batches and the steps they came in.


LOGPROBS = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5])
BEHAVIOUR = torch.tensor([-1.2, -1.0, -0.5, -3.5, -1.0])
CLIPPED = torch.tensor([False, True, False, True, False])


def sums(rows: slice, version: int = 7, replayed: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    ones_P = torch.ones(5, dtype=torch.long)[rows]
    old_P = None if replayed is None else replayed[rows]
    known = Sampled(ones_P.float(), ones_P, torch.arange(5)[rows], ones_P * 0, {"behaviour": BEHAVIOUR[rows]}, old_P)
    return {**token_sums(LOGPROBS[rows], LOGPROBS[rows].exp(), CLIPPED[rows], known, version)}


def test_figures_do_not_depend_on_the_micro_batches() -> None:
    whole = update_metrics([StepSums(add_up([sums(slice(None))]), 0.5, 2.0, 0)])
    parts = update_metrics([StepSums(add_up([sums(slice(0, 2)), sums(slice(2, 5))]), 0.5, 2.0, 0)])
    assert whole == pytest.approx(parts)
    ratio = (LOGPROBS - BEHAVIOUR).exp()
    assert whole["ratio_mean"] == pytest.approx(float(ratio.mean()))
    assert whole["ratio_clipped"] == pytest.approx(0.4)
    assert (whole["lag_mean"], whole["lag_max"]) == (5, 7)
    assert whole["ess"] == pytest.approx(float(ratio.sum() ** 2 / ratio.square().sum() / 5))


def test_steps_of_an_epoch_are_parts_of_its_batch() -> None:
    once = update_metrics([StepSums(add_up([sums(slice(None))]), 0.5, 2.0, 0)])
    halves = [add_up([sums(slice(0, 2))]), add_up([sums(slice(2, 5))])]
    cut = update_metrics([StepSums(halves[0], 0.4, 1.0, 0), StepSums(halves[1], 0.6, 3.0, 0)])
    twice = update_metrics([StepSums(half, 0.5, 2.0, epoch) for epoch in range(2) for half in halves])
    assert {**cut, "optimizer_steps": 1.0} == pytest.approx(once)
    assert {**twice, "optimizer_steps": 1.0} == pytest.approx(once)
    assert (cut["optimizer_steps"], twice["optimizer_steps"], twice["tokens"]) == (2, 4, 5)


@pytest.mark.parametrize("cut", [0, 2, 4])
def test_replayed_tokens_are_counted_apart_and_the_ratios_are_of_all(cut: int) -> None:
    """Versions are 0 to 4 at version 7: the two replayed tokens have lags 7 and 6, the others 5, 4 and 3."""
    replayed = torch.tensor([True, True, False, False, False])
    parts = [sums(rows, replayed=replayed) for rows in (slice(0, cut), slice(cut, 5)) if rows.start != rows.stop]
    plain = update_metrics([StepSums(add_up([sums(slice(None))]), 0.5, 2.0, 0)])
    mixed = update_metrics([StepSums(add_up(parts), 0.5, 2.0, epoch) for epoch in range(2)])
    assert (mixed["lag_mean"], mixed["lag_max"]) == (4, 5)
    assert (mixed["replayed_tokens"], mixed["replayed_lag_max"], mixed["tokens"]) == (2, 7, 5)
    same = ("ess", "ratio_mean", "ratio_max", "ratio_clipped", "kl", "entropy")
    assert {name: mixed[name] for name in same} == pytest.approx({name: plain[name] for name in same})
    assert not plain.keys() & {"replayed_tokens", "replayed_lag_max"}


def test_an_update_of_replayed_tokens_alone_has_no_lag_of_fresh_ones() -> None:
    figures = update_metrics(
        [StepSums(add_up([sums(slice(None), replayed=torch.ones(5, dtype=torch.bool))]), 0.5, 2.0, 0)]
    )
    assert (figures["lag_mean"], figures["lag_max"], figures["replayed_tokens"]) == (0, 0, 5)


def test_tokens_are_counted_by_lag_and_old_ones_together() -> None:
    figures = update_metrics([StepSums(add_up([sums(slice(None), version=17)]), 0.5, 2.0, epoch) for epoch in range(2)])
    counts = {name: count for name, count in figures.items() if name.startswith("tokens_lag_")}
    assert counts == {"tokens_lag_13": 1, "tokens_lag_14": 1, "tokens_lag_15": 3}
    replayed = torch.tensor([True, True, False, False, False])
    fresh = update_metrics([StepSums(add_up([sums(slice(None), replayed=replayed)]), 0.5, 2.0, 0)])
    assert {n for n in fresh if n.startswith("tokens_lag_")} == {"tokens_lag_3", "tokens_lag_4", "tokens_lag_5"}


def test_kl_is_never_negative_and_a_huge_ratio_leaves_one_effective_token() -> None:
    known = Sampled(
        torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2), {"behaviour": torch.tensor([-90.0, -1])}
    )
    found = add_up([token_sums(torch.tensor([-0.1, -1.0]), torch.zeros(2), torch.zeros(2), known, 0)])
    figures = update_metrics([StepSums(found, 0.0, 0.0, 0)])
    assert figures["ess"] == pytest.approx(0.5)
    assert figures["kl"] > 0


def test_rows_that_nobody_sampled_have_no_part_in_lags_ratios_and_divergence() -> None:
    """Their log μ is NaN, wherever a micro-batch begins; loss, entropy and the count of tokens are of all."""
    sampled, shown = [0, 2, 3], [1, 4]
    behaviour = BEHAVIOUR.clone()
    behaviour[shown] = torch.nan

    def figures(parts: list[list[int]]) -> dict[str, float]:
        found = []
        for rows in parts:
            ones_P = torch.ones(len(rows), dtype=torch.long)
            versions_P = torch.where(behaviour[rows].isnan(), 0, 5 + torch.tensor(rows))
            known = Sampled(ones_P.float(), ones_P, versions_P, ones_P * 0, {"behaviour": behaviour[rows]})
            found.append(token_sums(LOGPROBS[rows], LOGPROBS[rows].exp(), CLIPPED[rows], known, 10))
        return update_metrics([StepSums(add_up(found), 0.5, 2.0, 0)])

    alone, beside = figures([sampled]), figures([[0, 1, 2, 3, 4]])
    assert beside == pytest.approx(figures([[0, 1], [4], [2, 3]]))
    only = ("ratio_mean", "ratio_max", "ess", "kl", "lag_mean", "lag_max", "tokens_lag_5", "tokens_lag_3")
    assert {name: beside[name] for name in only} == pytest.approx({name: alone[name] for name in only})
    assert not {name for name in beside if name.startswith("tokens_lag_")} - alone.keys()
    assert (beside["tokens"], alone["tokens"]) == (5, 3)
    assert beside["entropy"] == pytest.approx(float(LOGPROBS.exp().mean()))
    assert not figures([shown]).keys() & {*only, "lag_max"}


# Data-parallel threads compute what one thread does, in an order that does not depend on which of them is faster.


INPUTS = [torch.arange(i, i + 7) % 13 for i in range(5)]


def lanes(threads: int, dtype: str = "float32") -> DataParallelThreads[Llama]:
    return DataParallelThreads(open_model(Context(seed=1, dtype=dtype))[0], threads)


def backward(model: Llama, tokens_S: Tensor) -> float:
    loss = model.logits(model(tokens_S[None])).float().square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


@pytest.mark.parametrize("count", [2, 3, 7])
def test_lanes_add_up_to_one_thread(count: int) -> None:
    alone, together = lanes(1), lanes(count)
    assert together.map(backward, INPUTS) == pytest.approx(alone.map(backward, INPUTS), rel=1e-5)
    ours, theirs = together.collect(), alone.collect()
    assert ours.keys() == theirs.keys() == dict(alone.models[0].named_parameters()).keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-4)


def test_equal_items_make_equal_sums_to_the_bit_whichever_lane_is_faster() -> None:
    found = []
    for slow in (0, 1):
        each = lanes(2)

        def work(model: Llama, tokens_S: Tensor, each: DataParallelThreads[Llama] = each, slow: int = slow) -> float:
            if model is each.models[slow]:
                torch.randn(1000, 1000).mm(torch.randn(1000, 1000))
            return backward(model, tokens_S)

        found.append((each.map(work, INPUTS), each.collect()))
    (first, ours), (second, theirs) = found
    assert first == second
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_all_lanes_see_a_change_of_the_weights() -> None:
    each = lanes(3)
    with torch.no_grad():
        each.models[0].head_weight().zero_()
    assert each.map(backward, INPUTS) == [0.0] * len(INPUTS)


def test_gradients_are_summed_in_float32_and_forgotten_once_collected() -> None:
    each = lanes(2, "bfloat16")
    each.map(backward, INPUTS)
    assert {g.dtype for g in each.collect().values()} == {torch.float32}
    assert each.collect() == {}
    assert all(p.grad is None for model in each.models for p in model.parameters())


def test_no_gradient_is_kept_where_none_is_wanted() -> None:
    with torch.no_grad():
        logits = lanes(2).map(lambda model, tokens_S: model.logits(model(tokens_S[None])), INPUTS)
    assert not any(t.requires_grad for t in logits)


def test_an_error_in_a_lane_is_raised() -> None:
    def work(model: Llama, tokens_S: Tensor) -> None:
        if int(tokens_S[0]) == 3:
            raise ValueError("item 3")

    with pytest.raises(ValueError, match="item 3"):
        lanes(2).map(work, INPUTS)


@pytest.mark.parametrize(("threads", "count", "inner"), [(2, 2, 1), (4, 4, 1), (9, 4, 2)])
def test_lanes_share_out_the_threads_and_leave_the_callers_alone(threads: int, count: int, inner: int) -> None:
    before, each = torch.get_num_threads(), lanes(threads)
    assert len(each.models) == count
    torch.set_num_threads(3)
    try:
        assert each.map(lambda model, tokens_S: torch.get_num_threads(), INPUTS) == [inner] * len(INPUTS)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# Who cannot do without the log-probabilities of the policy that sampled is named where there are none.


def test_what_was_recorded_is_given_and_what_was_not_is_refused() -> None:
    rollouts = random_rollouts()
    assert behaviour_logprobs(rollouts, "some_node") is rollouts.logprobs_NT
    with pytest.raises(ValueError, match=r"^some_node: given rollouts without log μ \(logprobs_NT is None\), needed"):
        behaviour_logprobs(replace(rollouts, logprobs_NT=None), "some_node")
