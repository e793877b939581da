"""Conversations in whole runs: they learn, and are the same bits with processes as without."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.record.folder import RunFolder, latest_checkpoint

from .running import assert_equal_bits, final_state, make_run, rows, run_here, run_to_end

MARGIN = 0.1
GAME = RunOptions(updates=32, batch=16, max_tokens=1, slots=256)
TOOL = RunOptions(updates=12, batch=8, max_tokens=24, slots=64, data="calculator")


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def rewards(run: Path) -> list[float]:
    return [row["reward_mean"] for row in rows(run)]


@pytest.mark.slow
def test_an_untrained_policy_learns_to_guess(tmp_path: Path) -> None:
    """It guesses right in a fifth of its games at first; at the end in a tenth more of all at least."""
    found = rewards(run_here(make_run(tmp_path / "run", "guessing", {"lag": 0}, GAME)))
    assert mean(found[-8:]) > mean(found[:8]) + MARGIN


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The base of `tool_use`, which takes longer to make than the run that starts from it; fewer updates make one that
    solves too little to learn from."""
    flags = RunOptions(updates=800, batch=2, max_tokens=24, slots=64, data="calculator")
    taught = run_here(make_run(tmp_path_factory.mktemp("caller") / "base", "tool_sft", {}, flags))
    cut = latest_checkpoint(RunFolder.open(taught))
    assert cut is not None
    return str(cut.folder / "policy")


@pytest.mark.slow
def test_a_policy_that_seldom_calls_a_tool_learns_to_call_it(tmp_path: Path, caller: str) -> None:
    """The base solves about two thirds; calling more often solves a tenth more of all at least."""
    tool = replace(TOOL, model=caller)
    run = run_here(make_run(tmp_path / "run", "tool_use", {"lag": 0}, tool))
    found = rewards(run)
    assert mean(found[-4:]) > mean(found[:4]) + MARGIN
    calls = [row["tool_calls"] for row in rows(run)]
    assert mean(calls[-4:]) > mean(calls[:4]) + MARGIN


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
def test_conversations_are_the_same_bits_with_processes_as_without(tmp_path: Path, lag: int) -> None:
    flags = replace(GAME, updates=4, batch=4, slots=32, versions="pinned")
    options = {"lag": lag, "samples": 4}
    here = run_here(make_run(tmp_path / "here", "guessing", options, flags))
    there = run_to_end(make_run(tmp_path / "there", "guessing", options, flags, generators=2))
    assert_equal_bits(final_state(here, 4), final_state(there, 4))
    assert rewards(here) == rewards(there)


@pytest.mark.slow
def test_the_tool_runs_in_a_pool_of_its_own_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Of an untrained policy no turn has a call; that every process and segment is gone `run_to_end` sees."""
    flags = replace(TOOL, updates=2, batch=2, slots=16)
    run = run_to_end(make_run(tmp_path / "run", "tool_use", {"samples": 2}, flags))
    assert len(rows(run)) == 2
    assert "environment" in rows(run)[-1]["pools"]
