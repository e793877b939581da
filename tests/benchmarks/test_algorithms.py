"""The table of algorithms: it is complete, only algorithms made for lag run at lag 2, and failures are reported."""

import pkgutil
from importlib import import_module
from inspect import signature
from typing import Any

import pytest

from penstock import programs
from penstock.graph import Program, load


def algorithms() -> Any:
    return import_module("algorithms")


def run(after: float | None, gain: float | None = 0.1, status: str = "done", error: str = "") -> dict[str, Any]:
    accuracy = {"accuracy_before": 0.25, "accuracy_after": after}
    about = {"algorithm": "aipo", "lag": 0, "seconds": 2.0, "cpu_s": 1.0}
    return {**about, **accuracy, "reward_gain": gain, "status": status, "error": error}


def test_every_program_with_a_lag_is_in_the_table_but_for_examples_and_one_with_a_test_of_its_own() -> None:
    """`vineppo` samples many times more responses; `test_an_algorithm_makes_the_base_better` shows that it learns."""
    loaded = {module.name: load(module.name) for module in pkgutil.iter_modules(programs.__path__)}
    lagging = {n for n, p in loaded.items() if isinstance(p, Program) and "lag" in signature(p.fn).parameters}
    assert lagging - set(algorithms().ENTRIES) == {"toy", "guessing", "vineppo"}


def test_lag_two_is_for_those_that_have_a_lag_of_their_own_accord() -> None:
    assert [algorithms().lags(name) for name in ("aipo", "decoupled_ppo", "grpo")] == [(0, 2), (0, 2), (0,)]


def test_what_is_needed_beside_the_base_is_trained_by_a_program_of_the_library() -> None:
    needed = {what for entry in algorithms().ENTRIES.values() for what in entry.needs.values()}
    assert needed == set(algorithms().TRAINED)
    assert all(isinstance(load(name), Program) for name, _, _ in algorithms().TRAINED.values())


def test_the_gain_is_that_of_the_rule_and_none_without_a_reward() -> None:
    by_rule = [{"reward_mean": value} for value in (0.2, 0.4, 0.6, 0.8, 0.8, 0.8)]
    learned = [{"reward_mean": 9.0, "accuracy": value} for value in (0.0, 0.0, 1.0, 1.0, 1.0, 1.0)]
    gains = [algorithms().reward_gain(rows) for rows in (by_rule, learned, [{"loss": 1.0}])]
    assert gains[:2] == pytest.approx([0.45, 1.0])
    assert gains[2] is None


def test_a_run_that_failed_is_told_and_left_out_of_the_figures() -> None:
    row = algorithms().row([run(0.5), run(None, None, "failed", "where\nwhy")])
    assert (row["failed"], row["seeds"], row["accuracy after"]["repeats"]) == ("why", 2, 1)
    assert "failed" not in algorithms().row([run(0.5)])
