"""Lengths are taken without chance and keep their mean and tail; nonsense is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.plan.model_shape import SHAPES
from penstock.runtime.plan.workload import LengthError, Listed, Lognormal, Workload, fitted, given_lengths, read_lengths


@given(st.floats(50, 5000), st.floats(0.1, 1.2), st.floats(1.2, 8))
def test_a_cut_lognormal_keeps_its_mean_and_its_longest(mean: float, sigma: float, times: float) -> None:
    longest = int(mean * times)
    lengths = Lognormal(mean, sigma, longest).take(4096)
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert lengths.min() >= 1
    assert lengths.max() <= longest


@pytest.mark.parametrize("sigma", [-0.1, 5.1, 99.0, float("inf"), float("nan")])
def test_a_spread_that_no_lengths_have_is_refused(sigma: float) -> None:
    with pytest.raises(LengthError, match="needed 1 <= mean <= longest and a sigma from 0 to 5"):
        Lognormal(1000, sigma, 4096)
    assert Lognormal(1000, 5.0, 4096).take(4096).mean() == pytest.approx(1000, rel=0.01)


def test_taking_twice_gives_the_same_and_not_in_order() -> None:
    lengths = Lognormal(1000, 0.7, 4096)
    first, second = lengths.take(1000), lengths.take(1000)
    assert np.array_equal(first, second)
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.1


def test_listed_lengths_come_back_as_they_are() -> None:
    assert sorted(Listed((5, 1, 9)).take(3).tolist()) == [1, 5, 9]
    assert sorted(Listed((5, 1, 9)).take(6).tolist()) == [1, 1, 5, 5, 9, 9]


def test_a_fit_finds_the_spread_that_share_and_mean_speak_for() -> None:
    lengths = Lognormal(1000, 0.9, 4096)
    finished = float((lengths.take(100_000) < 4096).mean())
    assert fitted(1000, finished, 4096).sigma == pytest.approx(0.9, abs=0.02)


def test_a_file_a_run_and_two_numbers_are_read(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("3\n\n700\n")
    assert given_lengths(str(tmp_path / "lengths"), 500) == Listed((3, 500))
    assert given_lengths("1000,0.5", 4096) == Lognormal(1000, 0.5, 4096)
    figures: list[dict[str, float | None]] = [
        {},
        {"response_length": 90.0, "finished": 1.0},
        {"response_length": 110.0},
        {"response_length": None},
    ]
    rows = [json.dumps({"update": update, **row}) for update, row in enumerate(figures)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    found = given_lengths(str(tmp_path), 256)
    assert (found.mean, found.longest) == (100, 256)


def _run(folder: Path, cut: int, mean: float, finished: float) -> str:
    """What is left of a run whose responses were cut at `cut` tokens."""
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
    with pytest.raises(LengthError) as caught:
        read_lengths(tmp_path / "lengths")
    assert message in str(caught.value)


def test_other_nonsense_is_refused(tmp_path: Path) -> None:
    for given_ in ("1000", "a,b", "5000,0.5", "1000,-1", "nan,1"):
        with pytest.raises(LengthError, match="lengths: given"):
            given_lengths(given_, 4096)
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
    with pytest.raises(ValueError, match="given prompts 0, needed 1 or more"):
        Workload(SHAPES["llama-8b"], 0, 8, work.lengths)
    with pytest.raises(ValueError, match="given 9 minibatches of 8 responses"):
        Workload(SHAPES["llama-8b"], 1, 8, work.lengths, minibatches=9)
