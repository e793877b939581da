"""The tokens of a batch are packed, split and shared out: no token is lost, and no figure depends on how."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from random import Random
from signal import SIGINT, pthread_kill
from threading import main_thread
from time import sleep
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.graph import Context, Rewards, Rollouts
from penstock.nodes.learn.batching import (
    ROWS,
    STEP,
    WIDTHS,
    behaviour_logprobs,
    optimizer_steps,
    pack,
    token_counts,
)
from penstock.nodes.learn.data_parallel_threads import DataParallelThreads
from penstock.nodes.learn.losses import Sampled
from penstock.nodes.learn.update import add_up, token_sums, update_metrics
from penstock.nodes.model import CausalLM
from penstock.nodes.open_model import open_model
from tests.nodes.rollouts import random_rollouts
from tests.nodes.updating import CONTEXT, batch

# Packing loses no token, puts sequences of similar length together, and shares them out evenly.


Lengths = list[tuple[int, int]]
LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12)


def numbered(lengths: Lengths) -> Rollouts:
    """Return rollouts with tokens 1, 2, 3, …, so that no two tokens are equal."""
    rollouts, first = random_rollouts(lengths), 1
    rollouts.tokens_NS.zero_()
    for row, length in enumerate(map(sum, lengths)):
        rollouts.tokens_NS[row, :length] = torch.arange(first, first + length)
        first += length
    return rollouts


@given(LENGTHS, st.integers(1, 120), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_every_response_token_is_predicted_once_by_the_token_before_it(
    lengths: Lengths, size: int, multiple: int, whole_groups: bool, random: Random
) -> None:
    rollouts = numbered(lengths)
    rollouts.ordinals = tuple(random.randrange(3) for _ in lengths)
    micros = pack(rollouts, size, multiple=multiple, whole_groups=whole_groups)
    places = [(s, t) for m in micros for s, t in zip(m.sequence_P.tolist(), m.step_P.tolist(), strict=True)]
    assert sorted(places) == [(s, t) for s, (_, response) in enumerate(lengths) for t in range(response)]
    held = [{rollouts.ordinals[s] for s in m.sequence_P} for m in micros]
    assert not whole_groups or sum(map(len, held)) == len(set(rollouts.ordinals))
    for m, found in zip(micros, held, strict=True):
        at = rollouts.prompt_lengths_N[m.sequence_P] + m.step_P
        assert torch.equal(m.targets_P, rollouts.tokens_NS[m.sequence_P, at])
        assert torch.equal(m.tokens_RW.flatten()[m.at_P], rollouts.tokens_NS[m.sequence_P, at - 1])
        assert torch.equal(m.at_P % m.tokens_RW.shape[1], at - 1)
        assert m.tokens_RW.numel() <= size or (len(found) if whole_groups else m.tokens_RW.shape[0]) == 1
        longest = int((m.tokens_RW > 0).sum(1).max())
        assert m.tokens_RW.shape[1] == min(-(-longest // WIDTHS) * WIDTHS, rollouts.tokens_NS.shape[1])
    order = list(dict.fromkeys(s for m in micros for s in m.sequence_P.tolist()))
    assert whole_groups or order == sorted(range(len(lengths)), key=lambda s: (-sum(lengths[s]), s))


@given(LENGTHS, st.integers(1, 200), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_sequences_lie_end_to_end_without_padding_but_to_a_step(
    lengths: Lengths, size: int, multiple: int, whole_groups: bool, random: Random
) -> None:
    rollouts = numbered(lengths)
    rollouts.ordinals = tuple(random.randrange(3) for _ in lengths)
    micros = pack(rollouts, size, multiple=multiple, whole_groups=whole_groups, end_to_end=True)
    units = len(set(rollouts.ordinals)) if whole_groups else len(lengths)
    assert len(micros) == units or len(micros) % multiple == 0
    places = [(s, t) for m in micros for s, t in zip(m.sequence_P.tolist(), m.step_P.tolist(), strict=True)]
    assert sorted(places) == [(s, t) for s, (_, response) in enumerate(lengths) for t in range(response)]
    held = [{rollouts.ordinals[s] for s in m.sequence_P} for m in micros]
    assert not whole_groups or sum(map(len, held)) == units
    for m, tokens in zip(micros, token_counts(micros), strict=True):
        assert m.positions_W is not None
        assert m.starts_C is not None
        rows = list(dict.fromkeys(m.sequence_P.tolist()))
        used = sum(sum(lengths[row]) - 1 for row in rows)
        assert tokens == m.tokens_RW.numel() == max(used, min(-(-used // STEP) * STEP, size))
        own = [rollouts.tokens_NS[row, : sum(lengths[row]) - 1] for row in rows]
        assert m.tokens_RW[0].tolist() == [*torch.cat(own).tolist(), *[0] * (tokens - used)]
        assert m.positions_W.tolist() == [*(t for x in own for t in range(len(x))), *[0] * (tokens - used)]
        ends = [*accumulate(len(x) for x in own), *([tokens] if tokens > used else [])]
        assert m.starts_C.tolist() == [0, *ends]
        at = rollouts.prompt_lengths_N[m.sequence_P] + m.step_P
        assert torch.equal(m.tokens_RW[0, m.at_P], rollouts.tokens_NS[m.sequence_P, at - 1])


GROUPS = st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 6), min_size=1, max_size=5)), max_size=5)


@given(GROUPS.filter(bool), st.integers(1, 200), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_a_prompt_lies_once_in_a_micro_batch_before_all_its_responses(
    groups: list[tuple[int, list[int]]], size: int, multiple: int, whole_groups: bool, random: Random
) -> None:
    lengths = [(prompt, response) for prompt, responses in groups for response in responses]
    rollouts, prompts = numbered(lengths), [number for number, (_, own) in enumerate(groups) for _ in own]
    for row, (prompt, _) in enumerate(lengths):
        rollouts.tokens_NS[row, :prompt] = rollouts.tokens_NS[prompts.index(prompts[row]), :prompt]
    rollouts.ordinals = tuple(prompts)
    mixed = random.sample(range(len(lengths)), len(lengths))
    rollouts, prompts = rollouts.take(mixed), [prompts[row] for row in mixed]
    micros = pack(rollouts, size, multiple=multiple, whole_groups=whole_groups, end_to_end=True)
    places = [(s, t) for m in micros for s, t in zip(m.sequence_P.tolist(), m.step_P.tolist(), strict=True)]
    responses = rollouts.response_lengths_N.tolist()
    assert sorted(places) == [(s, t) for s, response in enumerate(responses) for t in range(response)]
    for m, tokens in zip(micros, token_counts(micros), strict=True):
        assert m.positions_W is not None
        assert m.starts_C is not None
        starts = m.starts_C.tolist()
        heads = range(len(starts)) if m.families_F is None else m.families_F.tolist()
        assert m.rollouts is not None
        needed = sum(groups[prompt][0] for prompt in set(m.rollouts.ordinals))
        needed += sum(max(response - 1, 0) for response in m.rollouts.response_lengths_N.tolist())
        assert tokens == m.tokens_RW.numel() == max(needed, min(-(-needed // STEP) * STEP, size))
        assert tokens <= size or len(m.rollouts) == 1 or whole_groups
        # The tokens that attention lets each token see: its sequence up to itself.
        seen: list[list[int]] = [[] for _ in range(tokens)]
        for head, after in pairwise(heads):
            prefix = range(starts[head], starts[head + 1])
            for segment in range(head, after):
                own = range(starts[segment], starts[segment + 1])
                before = [] if segment == head else [*prefix]
                for token in own:
                    seen[token] = [*before, *range(own.start, token + 1)]
        for at, sequence, step in zip(m.at_P.tolist(), m.sequence_P.tolist(), m.step_P.tolist(), strict=True):
            known = int(rollouts.prompt_lengths_N[sequence]) + step
            assert m.tokens_RW[0, seen[at]].tolist() == rollouts.tokens_NS[sequence, :known].tolist()
            assert m.positions_W[seen[at]].tolist() == list(range(known))


def test_responses_to_one_prompt_part_where_workers_had_unequal_shares() -> None:
    def sizes(prompt: int, groups: int, multiple: int) -> list[int]:
        rollouts = numbered([(prompt, 20)] * 4 * groups)
        rollouts.tokens_NS[:, :prompt] = rollouts.tokens_NS[::4, :prompt].repeat_interleave(4, 0)
        return list(token_counts(pack(rollouts, 4096, multiple=multiple, end_to_end=True)))

    # Four responses have 76 tokens after their prompt, of 500: 576 in all.
    assert sizes(500, 3, 1) == [3 * 576]
    assert sizes(500, 2, 2) == [576] * 2
    # Half of the responses to each of three prompts are 3 * 39 tokens, padded to a step.
    assert sizes(1, 3, 2) == [128] * 2
    # Half of the responses to one prompt are 538 tokens.
    assert sizes(500, 1, 2) == [576] * 2


def test_end_to_end_micro_batches_are_as_few_as_hold_the_tokens_and_level() -> None:
    lengths = Random(0)
    rollouts = numbered([(2, lengths.randint(1, 60)) for _ in range(200)])
    tokens = int((rollouts.prompt_lengths_N + rollouts.response_lengths_N - 1).sum())
    micros = pack(rollouts, 1024, multiple=2, end_to_end=True)
    assert len(micros) == -(-tokens // 2048) * 2
    assert len(set(token_counts(micros))) == 1
    # A sequence longer than a micro-batch has one of its own, and changes no other.
    longer = pack(numbered([(2, 3000), *[(2, 500)] * 6]), 1024, end_to_end=True)
    assert sorted(token_counts(longer)) == [1024] * 3 + [3001]


@pytest.mark.parametrize(("size", "shapes"), [(40, [(3, 11)] * 3 + [(1, 11)]), (1000, [(5, 11)] * 2)])
def test_workers_get_equal_shares(size: int, shapes: list[tuple[int, int]]) -> None:
    assert [tuple(m.tokens_RW.shape) for m in pack(numbered([(3, 8)] * 10), size, multiple=2)] == shapes


@given(st.lists(st.integers(1, 60), min_size=1, max_size=100), st.integers(1, 4))
def test_shapes_come_in_steps_so_that_they_come_back(lengths: list[int], multiple: int) -> None:
    micros = pack(numbered([(1, length) for length in lengths] + [(1, 64)]), 1024, multiple=multiple)
    *shapes, _ = [m.tokens_RW.shape for m in micros]
    assert all(width % WIDTHS == 0 or width == 65 for _, width in shapes)
    assert multiple > 1 or all(rows % ROWS == 0 or rows < ROWS for rows, _ in shapes)


def test_no_row_is_padded_beyond_the_models_positions() -> None:
    rollouts = numbered([(2, 5), (2, 4)])
    rollouts.tokens_NS = F.pad(rollouts.tokens_NS, (0, 9))
    assert [m.tokens_RW.shape for m in pack(rollouts, 100)] == [(2, 8)]
    assert [m.tokens_RW.shape for m in pack(rollouts, 100, widest=6)] == [(2, 6)]


def test_what_is_in_a_row_after_a_sequence_does_not_count_and_an_empty_prompt_is_refused() -> None:
    rollouts = numbered([(2, 4), (1, 2)])
    rollouts.tokens_NS.fill_(7)
    (micro,) = pack(rollouts, 100)
    assert micro.tokens_RW.tolist() == [[7] * 5 + [0], [7] * 2 + [0] * 4]
    with pytest.raises(ValueError, match="empty prompt in row 1"):
        pack(replace(rollouts, prompt_lengths_N=torch.tensor([2, 0])), 100)


@given(LENGTHS, st.integers(1, 60), st.randoms(use_true_random=False))
def test_what_nobody_sampled_is_no_target_and_moves_nothing_else(lengths: Lengths, size: int, random: Random) -> None:
    rollouts = numbered(lengths)
    versions_NT = torch.tensor([[random.choice((-1, 2)) for _ in row] for row in rollouts.versions_NT])
    whole, masked = pack(rollouts, size), pack(replace(rollouts, versions_NT=versions_NT), size)
    marks = [versions_NT[each.sequence_P, each.step_P] >= 0 for each in whole]
    # A micro-batch without a target is left out.
    kept = [(each, chosen) for each, chosen in zip(whole, marks, strict=True) if chosen.any()]
    for (all_of, chosen), some in zip(kept, masked, strict=True):
        assert torch.equal(some.tokens_RW, all_of.tokens_RW)
        for name in ("at_P", "targets_P", "sequence_P", "step_P"):
            assert torch.equal(getattr(some, name), getattr(all_of, name)[chosen])


# Minibatches have whole prompt groups, each group in one of them, drawn by the seed, the version and the epoch.


ORDINALS = [4, 4, 6, 6, 6, 9, 12, 12]


def cut(ordinals: Sequence[int], minibatches: int, version: int = 0, **context: Any) -> list[list[int]]:
    steps = optimizer_steps(replace(CONTEXT, **context), version, ordinals, 1, minibatches)
    return [rows for _, rows in steps]


@pytest.mark.parametrize(
    ("ordinals", "sizes"),
    [
        (ORDINALS, [4]),
        (ORDINALS, [2, 2]),
        ([number // 3 for number in range(18)], [2] * 3),
        ([number // 3 for number in range(21)], [3, 2, 2]),
        (range(5), [1] * 5),
    ],
)
def test_minibatches_are_whole_groups_as_even_as_can_be(ordinals: Sequence[int], sizes: list[int]) -> None:
    for version in range(20):
        parts = cut(ordinals, len(sizes), version)
        assert parts == cut(ordinals, len(sizes), version)
        assert sorted(row for part in parts for row in part) == list(range(len(ordinals)))
        for part, size in zip(parts, sizes, strict=True):
            assert part == sorted(part)
            assert len(list(groupby(part, key=lambda row: ordinals[row]))) == size
    assert len(sizes) == 1 or len({str(cut(ordinals, len(sizes), version)) for version in range(20)}) > 2


def test_a_group_is_whole_wherever_its_rows_are_in_the_batch() -> None:
    def names(ordinals: Sequence[int], part: Sequence[int]) -> list[int]:
        return sorted(ordinals[row] for row in part)

    mixed = [4, 6, 9, 6, 4, 12, 6, 12]
    for version in range(20):
        parts = cut(mixed, 2, version)
        assert all(part == sorted(part) for part in parts)
        assert [names(mixed, part) for part in parts] == [names(ORDINALS, part) for part in cut(ORDINALS, 2, version)]


def test_each_seed_each_update_and_each_epoch_cuts_its_own_minibatches() -> None:
    def epochs(version: int) -> list[frozenset[frozenset[int]]]:
        steps = optimizer_steps(CONTEXT, version, range(12), epochs=4, minibatches=3)
        return [frozenset(frozenset(rows) for epoch, rows in steps if epoch == number) for number in range(4)]

    assert len({*epochs(0), *epochs(1), *epochs(2)}) == 12  # of 5775 ways to cut twelve groups in three
    assert cut(range(5), 5, seed=1) != cut(range(5), 5, seed=2)


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, -1), (1, 0), (1, 5), (1, 8), (0, 1)])
def test_groups_are_never_torn_and_no_step_is_empty(epochs: int, minibatches: int) -> None:
    given = (
        f"given epochs={epochs} and minibatches={minibatches} for a batch of 4 prompt groups, needed at least 1, and"
    )
    with pytest.raises(ValueError, match=given):
        optimizer_steps(CONTEXT, 0, ORDINALS, epochs, minibatches)


def test_a_batch_without_a_response_says_so() -> None:
    with pytest.raises(ValueError, match="given a batch without a response, needed one to learn from"):
        optimizer_steps(CONTEXT, 0, (), 1, 1)


# Rows are taken by numbers or by a mask, from arrays and from tuples alike.


def test_rows_are_taken_by_numbers_and_by_marks_and_none_at_all() -> None:
    rollouts, advantage = batch()
    rollouts.logprobs_NT = None
    assert rollouts.take([3, 1]).logprobs_NT is None
    values_N = advantage.values_N > 0
    marks: list[Any] = [values_N, values_N.tolist(), list(values_N), values_N.numpy()]
    numbers: list[Any] = [[0, 2, 4], range(0, 5, 2), torch.tensor([0, 2, 4]), list(torch.tensor([0, 2, 4]).numpy())]
    for rows in (*marks, *numbers):
        taken = rollouts.take(rows)
        assert (taken.ordinals, len(taken)) == ((0, 2, 4), 3)
        assert torch.equal(taken.tokens_NS, rollouts.tokens_NS[[0, 2, 4]])
    nothing = rollouts.take([])
    assert (len(nothing), nothing.tokens_NS.shape) == (0, (0, rollouts.tokens_NS.shape[1]))
    assert len(Rollouts.concat([nothing, taken, nothing])) == 3
    assert taken.take(torch.tensor([2, 2])).ordinals == (4, 4)
    assert Rewards(torch.tensor([5.0, 6.0])).take([1]).values_N.tolist() == [6]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([5], "row 5, needed 0 to 4"),
        ([-1], "row -1, needed 0 to 4"),
        ([True], "1 marks, needed 5, one for each row"),
        (torch.ones(5), "row 1.0, needed"),
    ],
)
def test_a_row_that_there_is_not_is_refused(rows: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"Rollouts\.take: given {said}"):
        batch()[0].take(rows)


# Figures are means over tokens, whatever their micro-batches and steps.


LOGPROBS = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5])
BEHAVIOUR = torch.tensor([-1.2, -1.0, -0.5, -3.5, -1.0])
CLIPPED = torch.tensor([False, True, False, True, False])


ALL = [0, 1, 2, 3, 4]


def figures(
    *steps: list[list[int]],
    version: int = 7,
    replayed: Sequence[int] | None = None,
    behaviour: Tensor = BEHAVIOUR,
    epochs: int = 1,
) -> dict[str, float]:
    """Return figures of tokens with versions 0 to 4, or 0 where none was sampled. `steps` has the tokens of each step's
    micro-batches."""
    old_P = None if replayed is None else torch.isin(torch.arange(5), torch.tensor(replayed))
    versions_P = torch.where(behaviour.isnan(), 0, torch.arange(5))

    def sums(rows: list[int]) -> dict[str, float]:
        ones_P = torch.ones(len(rows), dtype=torch.long)
        old = None if old_P is None else old_P[rows]
        known = Sampled(ones_P.float(), ones_P, versions_P[rows], ones_P * 0, {"behaviour": behaviour[rows]}, old)
        found = token_sums(LOGPROBS[rows], LOGPROBS[rows].exp(), CLIPPED[rows], known, version)
        return {name: float(total) for name, total in found.items()}

    whole = [add_up([{**sums(rows), "loss": 0.25} for rows in step if rows]) for step in steps]
    return update_metrics([{**step, "epoch": float(epoch)} for epoch in range(epochs) for step in whole])


def test_figures_do_not_depend_on_the_micro_batches_nor_on_the_steps() -> None:
    whole = figures([ALL])
    ratio = (LOGPROBS - BEHAVIOUR).exp()
    assert whole["ratio_mean"] == pytest.approx(float(ratio.mean()))
    assert whole["ratio_clipped"] == pytest.approx(0.4)
    assert (whole["lag_mean"], whole["lag_max"], whole["tokens"]) == (5, 7, 5)
    assert whole["ess"] == pytest.approx(float(ratio.sum() ** 2 / ratio.square().sum() / 5))
    assert figures([[0, 1], [2, 3, 4]]) == pytest.approx({**whole, "loss": 0.5})
    # The steps of an epoch are parts of its batch.
    assert figures([[0, 1]], [[2, 3, 4]]) == pytest.approx(whole)
    assert figures([[0, 1]], [[2, 3, 4]], epochs=2) == pytest.approx(whole)


@pytest.mark.parametrize("cut", [0, 2, 4])
def test_replayed_tokens_are_counted_apart_and_the_ratios_are_of_all(cut: int) -> None:
    """Tokens have versions 0 to 4 at version 7: the two replayed ones have lags 7 and 6, the others 5, 4 and 3."""
    plain, mixed = figures([ALL]), figures([ALL[:cut], ALL[cut:]], replayed=[0, 1], epochs=2)
    assert (mixed["lag_mean"], mixed["lag_max"]) == (4, 5)
    assert (mixed["replayed_tokens"], mixed["replayed_lag_max"], mixed["tokens"]) == (2, 7, 5)
    same = ("ess", "ratio_mean", "ratio_max", "ratio_clipped", "kl", "entropy")
    assert {name: mixed[name] for name in same} == pytest.approx({name: plain[name] for name in same})
    assert not plain.keys() & {"replayed_tokens", "replayed_lag_max"}
    alone = figures([ALL], replayed=ALL)
    assert (alone["lag_mean"], alone["lag_max"], alone["replayed_tokens"]) == (0, 0, 5)


def test_tokens_are_counted_by_lag_and_old_ones_together() -> None:
    def by_lag(found: dict[str, float]) -> dict[str, float]:
        return {name: count for name, count in found.items() if name.startswith("tokens_lag_")}

    old = figures([ALL], version=17, epochs=2)
    assert by_lag(old) == {"tokens_lag_13": 1, "tokens_lag_14": 1, "tokens_lag_15": 3}
    fresh = figures([ALL], replayed=[0, 1])
    assert by_lag(fresh) == {"tokens_lag_3": 1, "tokens_lag_4": 1, "tokens_lag_5": 1}


def test_kl_is_never_negative_and_a_huge_ratio_leaves_one_effective_token() -> None:
    found = figures([[0, 1]], behaviour=torch.tensor([-90.0, -1, 0, 0, 0]))
    assert found["ess"] == pytest.approx(0.5)
    assert found["kl"] > 0


def test_rows_that_nobody_sampled_have_no_part_in_lags_ratios_and_divergence() -> None:
    """Their log μ is NaN, wherever a micro-batch begins. Loss, entropy and the token count include them."""
    behaviour = BEHAVIOUR.clone()
    behaviour[[1, 4]] = torch.nan
    alone, beside = (figures([rows], behaviour=behaviour) for rows in ([0, 2, 3], ALL))
    cut = figures([[0, 1], [4], [2, 3]], behaviour=behaviour)
    assert {**beside, "loss": 0.75} == pytest.approx(cut)
    only = ("ratio_mean", "ratio_max", "ess", "kl", "lag_mean", "lag_max", "tokens_lag_5", "tokens_lag_4")
    assert {name: beside[name] for name in only} == pytest.approx({name: alone[name] for name in only})
    assert not {name for name in beside if name.startswith("tokens_lag_")} - alone.keys()
    assert (beside["tokens"], alone["tokens"]) == (5, 3)
    assert beside["entropy"] == pytest.approx(float(LOGPROBS.exp().mean()))
    assert not figures([[1, 4]], behaviour=behaviour).keys() & {*only}


# Data-parallel threads compute the same as one thread, in an order that does not depend on their speed.


INPUTS = [torch.arange(i, i + 7) % 13 for i in range(5)]


def lanes(threads: int, dtype: str = "float32") -> DataParallelThreads[CausalLM]:
    return DataParallelThreads(open_model(CausalLM, Context(seed=1, dtype=dtype))[0], threads)


def backward(model: CausalLM, tokens_S: Tensor) -> float:
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

        def work(
            model: CausalLM, tokens_S: Tensor, each: DataParallelThreads[CausalLM] = each, slow: int = slow
        ) -> float:
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
        each.models[0].get_parameter("lm_head.weight").zero_()
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
    def work(model: CausalLM, tokens_S: Tensor) -> None:
        if int(tokens_S[0]) == 3:
            raise ValueError("item 3")

    with pytest.raises(ValueError, match="item 3"):
        lanes(2).map(work, INPUTS)


def test_an_interrupted_call_leaves_no_lane_at_work() -> None:
    under_way = [0, 0]

    def work(model: CausalLM, item: int) -> None:
        under_way[item % 2] += 1
        if item == 10:  # by now the caller waits
            pthread_kill(main_thread().ident or 0, SIGINT)
        sleep(0.02)
        under_way[item % 2] -= 1

    each = lanes(2)
    with pytest.raises(KeyboardInterrupt):
        each.map(work, range(500))
    assert under_way == [0, 0]
    # The next call does not wait for anything of that call.
    assert each.each(str, [1, 2, 3]) == ["1", "2", "3"]


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


# A node that needs the log-probabilities of the policy that sampled is named if there are none.


def test_what_was_recorded_is_given_and_what_was_not_is_refused() -> None:
    rollouts = random_rollouts()
    assert behaviour_logprobs(rollouts, "some_node") is rollouts.logprobs_NT
    with pytest.raises(ValueError, match=r"^some_node: given rollouts without log μ \(logprobs_NT is None\), needed"):
        behaviour_logprobs(replace(rollouts, logprobs_NT=None), "some_node")
