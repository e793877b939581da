"""At lag 0, and at any lag with pinned versions, a run equals a plain loop to the bit: with processes or without,
with one generator or two, whatever the timing.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.graph.types import Context
from penstock.nodes.score import math_answer
from penstock.runtime.control.run_config import RunOptions

from .plain import aipo_loop, toy_loop
from .programs_for_gates import more_digits
from .running import FAULTS, assert_equal_bits, final_state, make_run, rows, run_here, run_to_end

pytestmark = pytest.mark.timeout(400)
UPDATES, SAMPLES, LR = 5, 4, 1e-3
TOY = RunOptions(updates=UPDATES, batch=4, slots=16, deadline=60.0)
REAL = RunOptions(updates=UPDATES, batch=2, max_tokens=6, slots=16, seed=3, data="arithmetic", deadline=60.0)
DELAYS = {"generate_ms": 4.0, "score_ms": 1.0, "update_ms": 4.0, "sync_ms": 0.0, "jitter_ms": 20.0}
GENERATORS = pytest.mark.parametrize("generators", [1, 2])
LAGS = pytest.mark.parametrize("lag", [0, 2])
PROCESSES = pytest.mark.parametrize("generators", [1, pytest.param(2, marks=pytest.mark.slow)])


def flags(base: RunOptions, lag: int) -> RunOptions:
    """At lag 0 there is but one version to use; at another lag it has to be pinned."""
    return RunOptions(**{**vars(base), "versions": "pinned" if lag else "free"})


def real_loop(lag: int) -> list[dict[str, Tensor]]:
    facts = {name: getattr(REAL, name) for name in ("seed", "data", "max_tokens", "batch", "updates", "slots")}
    return aipo_loop(Context(**facts), more_digits, samples=SAMPLES, lr=LR, lag=lag)


def test_every_update_of_the_plain_loop_changes_every_weight() -> None:
    """What the runs below are compared with is worth comparing with."""
    states = real_loop(lag=0)
    names = [name for name in states[0] if name.startswith("master.")]
    for before, after in pairwise(states):
        assert [name for name in names if torch.equal(before[name], after[name])] == []


@LAGS
@GENERATORS
def test_toy_in_one_process(tmp_path: Path, generators: int, lag: int) -> None:
    run = make_run(tmp_path / "r", "toy", {"lag": lag, **DELAYS}, flags(TOY, lag), generators=generators)
    assert_equal_bits(final_state(run_here(run), UPDATES), toy_loop(UPDATES, TOY.batch, lag=lag))


@LAGS
@PROCESSES
def test_toy_in_processes(tmp_path: Path, generators: int, lag: int) -> None:
    run = make_run(tmp_path / "r", "toy", {"lag": lag, **DELAYS}, flags(TOY, lag), generators=generators)
    assert_equal_bits(final_state(run_to_end(run), UPDATES), toy_loop(UPDATES, TOY.batch, lag=lag))
    assert [row["lag_max"] for row in rows(run)] == [min(lag, update) for update in range(UPDATES)]


@LAGS
@GENERATORS
def test_aipo_in_one_process(tmp_path: Path, generators: int, lag: int) -> None:
    options = {"lag": lag, "samples": SAMPLES, "lr": LR}
    run = make_run(tmp_path / "r", f"{FAULTS}digits", options, flags(REAL, lag), generators=generators)
    assert_equal_bits(final_state(run_here(run), UPDATES), real_loop(lag)[-1])


@LAGS
@PROCESSES
def test_aipo_in_processes(tmp_path: Path, generators: int, lag: int) -> None:
    options = {"lag": lag, "samples": SAMPLES, "lr": LR}
    run = make_run(tmp_path / "r", f"{FAULTS}digits", options, flags(REAL, lag), generators=generators)
    assert_equal_bits(final_state(run_to_end(run), UPDATES), real_loop(lag)[-1])


def test_the_program_aipo_itself(tmp_path: Path) -> None:
    """With a seed with which the untrained model solves a problem by chance, so that the weights move."""

    def loop(seed: int) -> list[dict[str, Tensor]]:
        context = Context(seed=seed, data="arithmetic", max_tokens=6, batch=4, updates=2, slots=64)
        return aipo_loop(context, math_answer, samples=32, lr=LR)

    loops = ((seed, loop(seed)) for seed in range(30))
    moved = ((seed, s) for seed, s in loops if any(not torch.equal(s[0][name], s[-1][name]) for name in s[0]))
    seed, states = next(moved)
    used = RunOptions(updates=2, batch=4, max_tokens=6, slots=64, seed=seed, data="arithmetic", deadline=60.0)
    run = run_here(make_run(tmp_path / "r", "aipo", {"lag": 0, "samples": 32, "lr": LR}, used))
    assert_equal_bits(final_state(run, 2), states[-1])
