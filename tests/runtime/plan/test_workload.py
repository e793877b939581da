"""Lengths are deterministic and keep their mean and tail; a batch takes as long as its steps, simulated one by one."""

import json
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from penstock.graph import load, trace
from penstock.runtime.cluster.gpus import GPUS, HostTime
from penstock.runtime.plan.decode_cost import Generator, Lines, rollout
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.roles import PlanError, roles_of, work_of
from penstock.runtime.plan.train_cost import Trainer
from penstock.runtime.plan.workload import LengthError, Listed, Lognormal, Workload, fitted, given_lengths, read_lengths


@given(st.floats(50, 5000), st.floats(0.1, 1.2), st.floats(1.2, 8))
def test_a_cut_lognormal_keeps_its_mean_and_its_longest(mean: float, sigma: float, times: float) -> None:
    longest = int(mean * times)
    lengths = Lognormal(mean, sigma, longest).take(4096)
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert lengths.min() >= 1
    assert lengths.max() <= longest


def test_the_largest_spread_still_keeps_its_mean() -> None:
    assert Lognormal(1000, 5.0, 4096).take(4096).mean() == pytest.approx(1000, rel=0.01)


def test_taking_twice_gives_the_same_and_not_in_order() -> None:
    first, second = (Lognormal(1000, 0.7, 4096).take(1000) for _ in range(2))
    assert np.array_equal(first, second)
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.1


def test_listed_lengths_come_back_as_they_are() -> None:
    assert sorted(Listed((5, 1, 9)).take(3).tolist()) == [1, 5, 9]
    assert sorted(Listed((5, 1, 9)).take(6).tolist()) == [1, 1, 5, 5, 9, 9]


def test_a_fit_finds_the_spread_that_share_and_mean_speak_for() -> None:
    lengths = Lognormal(1000, 0.9, 4096)
    finished = float((lengths.take(100_000) < 4096).mean())
    assert fitted(1000, finished, 4096).sigma == pytest.approx(0.9, abs=0.02)


def test_a_file_and_two_numbers_are_read(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("3\n\n700\n")
    assert given_lengths(str(tmp_path / "lengths"), 500) == Listed((3, 500))
    assert given_lengths("1000,0.5", 4096) == Lognormal(1000, 0.5, 4096)


def test_a_run_is_read_whatever_its_rows_lack(tmp_path: Path) -> None:
    figures: list[dict[str, float | None]] = [{}, {"response_length": 90.0, "finished": 1.0}]
    figures += [{"response_length": 110.0}, {"response_length": None}]
    rows = [json.dumps({"update": update, **row}) for update, row in enumerate(figures)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    found = given_lengths(str(tmp_path), 256)
    assert (found.mean, found.longest) == (100, 256)


def _run(folder: Path, cut: int, mean: float, finished: float) -> str:
    """Write the files of a run whose responses were cut at `cut` tokens."""
    (folder / "config.json").write_text(json.dumps({"flags": {"max_tokens": cut}}))
    row = {"update": 0, "response_length": mean, "finished": finished}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return str(folder)


def test_a_runs_lengths_are_those_below_its_own_cut_whatever_is_asked_for(tmp_path: Path) -> None:
    true = Lognormal(1000, 0.9, 2048)
    finished = float((true.take(100_000) < 2048).mean())
    for longest in (512, 2048, 8192):
        found = given_lengths(_run(tmp_path, 2048, 1000, finished), longest)
        assert isinstance(found, Lognormal)
        assert found.longest == longest
        assert found.sigma == pytest.approx(0.9, abs=0.02)
        assert found.location == pytest.approx(true.location, abs=0.02)


def test_a_run_whose_responses_were_all_cut_tells_nothing_of_longer_ones(tmp_path: Path) -> None:
    folder = _run(tmp_path, 64, 64, 0)
    assert given_lengths(folder, 64).mean == pytest.approx(64)
    with pytest.raises(LengthError, match=r"all cut at 64 tokens, .* needed --max-tokens 64 or less"):
        given_lengths(folder, 4096)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(LengthError, match=r"config\.json: given no flags of a run"):
        given_lengths(folder, 64)


@pytest.mark.parametrize(
    ("text", "message"), [("", "given no lengths"), ("5\n-1\n", ":2: given '-1'"), ("x\n", ":1: given 'x', needed a")]
)
def test_a_file_of_nonsense_is_refused_by_its_lines(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(LengthError, match=message):
        read_lengths(tmp_path / "lengths")


@pytest.mark.parametrize("given_", ["1000", "a,b", "5000,0.5", "1000,-1", "nan,1", "1000,5.1", "1000,inf"])
def test_other_nonsense_is_refused(given_: str) -> None:
    with pytest.raises(LengthError, match="lengths: given"):
        given_lengths(given_, 4096)


def test_a_folder_without_the_metrics_of_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LengthError, match="no metrics of a run"):
        given_lengths(str(tmp_path), 4096)
    (tmp_path / "metrics.jsonl").write_text('{"update": 0}\n')
    with pytest.raises(LengthError, match="given 1 rows, needed one or more with response_length"):
        given_lengths(str(tmp_path), 4096)


def test_a_workload_counts_and_refuses() -> None:
    work = Workload(SHAPES["llama-8b"], 64, 8, Lognormal(1000, 0.7, 4096))
    assert work.responses == len(work.response_tokens) == 512
    assert (work.sequence_tokens - work.response_tokens == 128).all()
    assert work.context == 4224
    with pytest.raises(ValueError, match="given 9 minibatches of 8 responses"):
        Workload(SHAPES["llama-8b"], 1, 8, work.lengths, minibatches=9)


def test_groups_of_a_part_are_there_with_the_longest_response_so_far() -> None:
    lengths = Listed((10, 30, 20, 40))
    assert Workload(SHAPES["llama-8b"], 4, 1, lengths).arrivals == ()
    work = Workload(SHAPES["llama-8b"], 4, 1, lengths, parts=4)
    ends = np.maximum.accumulate(work.response_tokens) / 40
    assert work.arrivals == tuple(ends.tolist())
    assert Workload(SHAPES["llama-8b"], 4, 1, lengths, parts=2).arrivals == (ends[1], 1.0)


def test_a_program_in_parts_is_costed_so_and_a_batch_that_they_do_not_divide_is_refused() -> None:
    graph = trace(load("grpo"), {"accumulate": 4})
    found = work_of(roles_of(graph), SHAPES["llama-8b"], 16, Lognormal(100, 0.7, 256), 256)
    assert found.parts == 4
    with pytest.raises(PlanError, match="in parts of 4 groups, and a batch of 18"):
        work_of(roles_of(graph), SHAPES["llama-8b"], 18, Lognormal(100, 0.7, 256), 256)
    trainer = Trainer(SHAPES["llama-8b"], GPUS["H100"], Parallel(pp=2))
    whole, parts = (trainer.update(found.sequence_tokens, parts=n) for n in (1, 4))
    once, stage = trainer.once().seconds, whole.parts["stage"]
    # There is one optimizer step; each part fills the pipeline again.
    assert parts.parts["optimizer"] == whole.parts["optimizer"] > 0
    assert parts.parts["bubble"] > whole.parts["bubble"]
    assert trainer.update(found.sequence_tokens, minibatches=4).seconds == pytest.approx(parts.seconds + 3 * once)
    assert parts.seconds > once + stage


@pytest.mark.parametrize(
    ("name", "value"), [("prompts", 0), ("samples", 0), ("prompt_tokens", -1), ("kept", 0.0), ("environment_s", -1.0)]
)
def test_a_file_with_a_workload_that_cannot_be_is_refused(name: str, value: float) -> None:
    adapter = TypeAdapter(Workload)
    said = adapter.dump_python(Workload(SHAPES["llama-8b"], 64, 8, Lognormal(1000, 0.7, 4096)))
    assert adapter.validate_python(said).prompts == 64
    with pytest.raises(ValidationError, match=name):
        adapter.validate_python({**said, name: value})


TP4 = Parallel(tp=4)
ONE = Generator(SHAPES["llama-8b"], GPUS["H100"], Parallel(), slots=4)


EXACT = Lines(np.array([0, 8, 9, 11, 14]) / 2**10, np.array([0, 1, 2, 2, 3]) / 2**20)
"""Sums of these are exact in any order, so that simultaneous events are so in both simulations that are compared."""


def _replicas_step_by_step(lengths: list[int], count: int, prompt: int, prefill_s: float) -> list[float]:
    """Simulate replicas, always advancing the one whose next step ends first; return the end of each response."""
    slots, first = 4, min(len(lengths), count * 4)
    waiting, ends = deque(range(first, len(lengths))), [0.0] * len(lengths)
    rows = [{row: lengths[row] for row in range(number, first, count)} for number in range(count)]
    now = [len(own) * prefill_s for own in rows]

    def step(number: int) -> float:
        own = rows[number]
        context = sum(prompt + lengths[row] - left for row, left in own.items())
        return float(EXACT.fixed[len(own)] + EXACT.slope[len(own)] * context)

    while any(rows):
        number = min((n for n in range(count) if rows[n]), key=lambda n: (now[n] + step(n), n))
        now[number] += step(number)
        rows[number] = {row: left - 1 for row, left in rows[number].items()}
        for row in [row for row, left in rows[number].items() if not left]:
            ends[row] = now[number]
            del rows[number][row]
        while waiting and len(rows[number]) < slots:
            now[number] += prefill_s
            row = waiting.popleft()
            rows[number][row] = lengths[row]
    return ends


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 4))
@example([1, 11, 5, 12, 10, 12, 11, 11, 12, 11, 11, 12, 10, 7, 1, 1], 3)  # here two replicas are free at once
def test_replicas_take_what_waits_in_the_order_in_which_their_slots_fall_free(lengths: list[int], count: int) -> None:
    """With slots for all responses at once, and with fewer slots."""
    ends = rollout(np.array(lengths), EXACT, slots=4, replicas=count, prompt=16, prefill_s=3 / 2**10)
    assert ends.tolist() == _replicas_step_by_step(lengths, count, 16, 3 / 2**10)


def test_a_prompt_is_computed_once_for_its_samples() -> None:
    lengths = np.full(8, 10)
    once, each = ONE.rollout(lengths, 1000, samples=8), ONE.rollout(lengths, 1000, samples=1)
    assert each.max() - once.max() == pytest.approx(7 * ONE.prefill_s(1000))


def test_a_step_reads_weights_and_cache_once() -> None:
    """8B on an H100 by hand: the head counts, the embedding is a lookup, and a token's cache takes 128 KiB."""
    parts = ONE.step(4, 10_000).parts
    weights = (8.03e9 - 128256 * 4096) * 2
    assert parts["weights"] == pytest.approx(weights / (3.35e12 * 0.8), rel=1e-3)
    assert parts["cache"] == pytest.approx(10_000 * 131072 / (3.35e12 * 0.8), rel=1e-3)


def test_a_step_waits_for_the_host_and_an_eager_one_for_its_launches() -> None:
    """0.5 ms per step and 3 µs per row. On two GPUs, 13 operations in each of 32 layers are launched 40 µs apart, less
    the time of the GPUs' work; one GPU replays a graph."""
    assert ONE.step(64, 0).parts["host"] == pytest.approx(0.5e-3 + 64 * 3e-6)
    assert ONE.step(64, 0).parts["launches"] == pytest.approx(32 * 13 * 3e-6)
    two = replace(ONE, mesh=Parallel(tp=2))
    parts = two.step(64, 0).parts
    work = sum(parts[name] for name in ("weights", "logits", "tp", "pp"))
    assert parts["launches"] == pytest.approx(32 * 13 * 40e-6 - work)
    graphs = GPUS["H100"].model_copy(update={"engine": HostTime(eager=False, step_ms=0, row_us=0)})
    replayed = replace(two, gpu=graphs).step(64, 0).parts
    assert replayed["host"] == 0
    assert replayed["launches"] == pytest.approx(32 * 13 * 3e-6)
    large = replace(two, shape=SHAPES["llama-405b"]).step(64, 0).parts
    assert large["launches"] == 0


def test_products_of_some_hundred_rows_reach_less_than_those_of_training() -> None:
    many = ONE.step(4096, 0).parts["weights"]
    assert many == pytest.approx(2 * ONE.shape.active_parameters * 4096 / (989e12 * 0.6 * 0.75))


def test_a_mixture_reads_the_experts_that_its_tokens_use() -> None:
    moe = Generator(SHAPES["qwen3-30b-a3b"], GPUS["H100"], Parallel(), slots=512)
    few, many = moe.step(1, 0).parts["weights"], moe.step(512, 0).parts["weights"]
    assert few < many / 5
    assert many <= 30.6e9 * 2 / (3.35e12 * 0.8)


def test_narrower_weights_are_read_faster_and_more_gpus_share_them() -> None:
    base, fp8, wide = (each.step(1, 0).parts for each in (ONE, replace(ONE, precision="fp8"), replace(ONE, mesh=TP4)))
    assert fp8["weights"] == pytest.approx(base["weights"] / 2)
    assert wide["weights"] == pytest.approx(base["weights"] / 4)
    assert wide["tp"] > 0 == base["tp"]
