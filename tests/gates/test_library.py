"""Every algorithm of the library runs with tiny batches: synchronous, and at a lag; from the untrained model."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import penstock.programs
from penstock.graph import Program, load
from penstock.runtime.control.run_config import RunOptions

from .running import make_run, rows, run_here, run_to_end, summary

pytestmark = pytest.mark.timeout(400)
ELSEWHERE = {"sft", "tool_sft", "evaluate", "toy", "rlhf", "distill", "tool_use", "reward_model"}
"""Programs that no policy samples in, or that need a directory of another model: their own tests run them."""
NAMES = [m.name for m in iter_modules(penstock.programs.__path__) if m.name not in ELSEWHERE]
TINY = RunOptions(updates=2, batch=2, max_tokens=6, slots=16, seed=3, data="arithmetic", deadline=60.0, drops=500)
SMALL = {"samples": 4, "max_length": 6, "buffer": 2, "high": 4, "turns": 2, "look": 2, "minibatches": 2}


def options(name: str, lag: int) -> dict[str, object]:
    """Small ones, of those that the program has."""
    program = load(name)
    assert isinstance(program, Program)
    has = {flag.name for flag in program.flags}
    return {key: value for key, value in {**SMALL, "lag": lag}.items() if key in has}


def test_the_list_is_that_of_the_folder() -> None:
    assert len(NAMES) >= 18
    assert all(hasattr(import_module(f"penstock.programs.{name}"), name) for name in [*NAMES, *ELSEWHERE])


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_runs(tmp_path: Path, name: str, lag: int) -> None:
    if name == "dapo":
        pytest.skip("the untrained model solves too few problems for a group to be kept")
    folder = run_here(make_run(tmp_path / "r", name, options(name, lag), TINY))
    assert summary(folder)["status"] == "done"
    assert [row["groups"] for row in rows(folder)] == [2, 2]
    assert all(row["lag_max"] <= lag for row in rows(folder) if "lag_max" in row)


@pytest.mark.slow
def test_the_greedy_baseline_of_remax_is_reported_apart(tmp_path: Path) -> None:
    """Its responses are one to a prompt, so the mean of their rewards is 0, a half or 1 for two prompts."""
    for row in rows(run_here(make_run(tmp_path / "r", "remax", options("remax", 0), TINY))):
        assert row["score_2.reward_mean"] in (0.0, 0.5, 1.0)
        assert row["reward_mean"] * 8 == int(row["reward_mean"] * 8)
        assert {"response_length", "generate_2.response_length"} <= row.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "curriculum", "guessing", "moving_reference", "remax"])
def test_an_algorithm_of_several_pools_runs_in_processes(tmp_path: Path, name: str) -> None:
    folder = run_to_end(make_run(tmp_path / "r", name, options(name, 2), TINY))
    assert summary(folder)["fates"]["consumed"] == 4
