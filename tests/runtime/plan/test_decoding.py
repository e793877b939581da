"""A batch of responses takes what its steps take, one by one; the tail is paid for."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.decode_cost import Batch, Generator, Lines, rollout
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.workload import Lognormal

ONE = Generator(SHAPES["llama-8b"], GPUS["H100"], Parallel(), slots=4)


def _step_by_step(generator: Generator, lengths: list[int], prompt: int) -> float:
    """One replica, one step after the other, for every token."""
    waiting, now = list(lengths), 0.0
    rows: list[list[int]] = []
    while waiting or rows:
        while waiting and len(rows) < generator.slots:
            now += generator.prefill_s(prompt)
            rows.append([prompt, waiting.pop(0)])
        context = sum(have for have, _ in rows)
        fixed, million = generator.step(len(rows), 0).seconds, generator.step(len(rows), 1e6).seconds
        now += fixed + (million - fixed) * context / 1e6
        rows = [[have + 1, left - 1] for have, left in rows if left > 1]
    return now


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 64))
def test_going_from_event_to_event_is_going_step_by_step(lengths: list[int], prompt: int) -> None:
    ends = ONE.rollout(np.array(lengths), prompt)
    assert ends.max() == pytest.approx(_step_by_step(ONE, lengths, prompt), rel=1e-9)


EXACT = Lines(np.array([0, 8, 9, 11, 14]) / 2**10, np.array([0, 1, 2, 2, 3]) / 2**20)
"""Sums of these are exact in any order, so that events at one time are at one time for both of those compared."""


def _replicas_step_by_step(batch: Batch, count: int, slots: int = 4) -> list[float]:
    """Several replicas, always the one whose next step ends first: when each response ends."""
    lengths = batch.lengths.tolist()
    first = min(len(lengths), count * slots)
    waiting, ends = deque(range(first, len(lengths))), [0.0] * len(lengths)
    rows = [{row: lengths[row] for row in range(number, first, count)} for number in range(count)]
    now = [len(own) * batch.prefill_s for own in rows]

    def step(number: int) -> float:
        own = rows[number]
        context = sum(batch.prompt + lengths[row] - left for row, left in own.items())
        return float(EXACT.fixed[len(own)] + EXACT.slope[len(own)] * context)

    while any(rows):
        number = min((n for n in range(count) if rows[n]), key=lambda n: (now[n] + step(n), n))
        now[number] += step(number)
        rows[number] = {row: left - 1 for row, left in rows[number].items()}
        for row in [row for row, left in rows[number].items() if not left]:
            ends[row] = now[number]
            del rows[number][row]
        while waiting and len(rows[number]) < slots:
            now[number] += batch.prefill_s
            row = waiting.popleft()
            rows[number][row] = lengths[row]
    return ends


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 4))
@example([1, 11, 5, 12, 10, 12, 11, 11, 12, 11, 11, 12, 10, 7, 1, 1], 3)  # where two replicas are free at one time
def test_replicas_take_what_waits_in_the_order_in_which_their_slots_fall_free(lengths: list[int], count: int) -> None:
    """With slots for all responses at once, and with fewer."""
    batch = Batch(np.array(lengths), prompt=16, samples=1, prefill_s=3 / 2**10)
    assert rollout(batch, count, 4, EXACT).tolist() == _replicas_step_by_step(batch, count)


def test_the_longest_response_is_a_floor_that_replicas_do_not_lower() -> None:
    lengths = Lognormal(1000, 0.9, 8192).take(256)
    alone = ONE.rollout(np.array([lengths.max()]), 0).max()
    assert alone <= ONE.rollout(lengths, 0, replicas=64).max() <= ONE.rollout(lengths, 0, replicas=8).max()


def test_a_long_tail_costs_more_than_its_mean() -> None:
    lengths = Lognormal(1000, 0.9, 8192).take(256)
    mean = np.full(256, int(lengths.mean()))
    wide = Generator(SHAPES["llama-8b"], GPUS["H100"], Parallel(), slots=64)
    tailed, level = wide.rollout(lengths, 0, replicas=4), wide.rollout(mean, 0, replicas=4)
    assert tailed.max() > 2 * level.max()


def test_the_tail_of_one_batch_is_filled_by_the_next() -> None:
    lengths = Lognormal(1000, 0.9, 8192).take(256)
    wide = Generator(SHAPES["llama-8b"], GPUS["H100"], Parallel(), slots=32)
    one, two = (wide.rollout(np.tile(lengths, count), 128, 8, replicas=2).max() for count in (1, 2))
    assert two < 2 * one


def test_a_prompt_is_computed_once_for_its_samples() -> None:
    lengths = np.full(8, 10)
    once, each = ONE.rollout(lengths, 1000, samples=8), ONE.rollout(lengths, 1000, samples=1)
    assert each.max() - once.max() == pytest.approx(7 * ONE.prefill_s(1000))


def test_a_step_reads_weights_and_cache_once() -> None:
    """8B on an H100, by hand: the head counts, the embedding is looked up; 128 KiB of cache per token."""
    parts = ONE.step(4, 10_000).parts
    weights = (8.03e9 - 128256 * 4096) * 2
    assert parts["weights"] == pytest.approx(weights / (3.35e12 * 0.8), rel=1e-3)
    assert parts["cache"] == pytest.approx(10_000 * 131072 / (3.35e12 * 0.8), rel=1e-3)


def test_a_mixture_reads_the_experts_that_its_tokens_use() -> None:
    moe = Generator(SHAPES["qwen3-30b-a3b"], GPUS["H100"], Parallel(), slots=512)
    few, many = moe.step(1, 0).parts["weights"], moe.step(512, 0).parts["weights"]
    assert few < many / 5
    assert many <= 30.6e9 * 2 / (3.35e12 * 0.8)


def test_narrower_weights_are_read_faster_and_more_gpus_share_them() -> None:
    fp8, wide = replace(ONE, precision="fp8"), replace(ONE, mesh=Parallel(tp=4))
    base = ONE.step(1, 0).parts["weights"]
    assert fp8.step(1, 0).parts["weights"] == pytest.approx(base / 2)
    assert wide.step(1, 0).parts["weights"] == pytest.approx(base / 4)
    assert wide.step(1, 0).parts["tp"] > 0 == ONE.step(1, 0).parts["tp"]
