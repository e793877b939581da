"""The off-policy table: what counts as collapse, how the learning rate is chosen, and that the figure matches it."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def offpolicy() -> Any:
    return import_module("offpolicy")


def ended(after: float | None, status: str = "done", **more: Any) -> dict[str, Any]:
    return {"status": status, "accuracy_before": 0.25, "accuracy_after": after, **more}


def test_a_run_collapses_below_its_base_or_with_an_error() -> None:
    collapsed = offpolicy().collapsed
    assert [collapsed(ended(0.24)), collapsed(ended(0.25)), collapsed(ended(0.9))] == [True, False, False]
    assert collapsed(ended(None, "failed"))


def test_the_rate_is_the_one_at_which_lag_costs_most_among_those_that_learn_without() -> None:
    after = {1e-4: (0.9, 0.8), 2e-4: (0.9, 0.5), 3e-4: (0.9, 0.5), 6e-4: (0.2, 0.0)}
    runs = [
        ended(after[lr][lag > 0], method=method, lag=lag, lr=lr)
        for lr in offpolicy().PILOT_RATES
        for method in offpolicy().PILOT_METHODS
        for lag in offpolicy().PILOT_LAGS
    ]
    assert offpolicy().chosen_rate(runs) == 2e-4


def test_no_seed_of_the_table_has_chosen_the_rate() -> None:
    assert offpolicy().PILOT_SEED not in offpolicy().SEEDS


def test_the_picture_and_the_tables_are_of_the_kept_runs() -> None:
    path = ROOT / "benchmarks" / "results" / "offpolicy.json"
    if not path.exists():
        pytest.skip("not measured yet")
    result = json.loads(path.read_text())
    runs = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert offpolicy().PICTURE.read_text() == offpolicy().picture(result)
    assert {name: result[name] for name in offpolicy().tables(runs)} == offpolicy().tables(runs)
    assert result["order"] == offpolicy().findings(runs)
