"""Programs under a type checker: this file is checked with all others, and two user's files by themselves."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, assert_type

import pytest

from penstock.graph import (
    Advantages,
    Metrics,
    Policy,
    Prompts,
    Rewards,
    Rollouts,
    Weights,
    broadcast,
    check,
    node,
    program,
    trace,
)
from tests.graph.programs_for_tests import aipo_update, generate, score


class Figures(NamedTuple):
    rewards: Rewards
    advantage: Advantages


@node
def shorter_is_better(rollouts: Rollouts, rewards: Rewards, *, weight: float = 0.01) -> Rewards:
    return rewards - weight * rollouts.lengths()


@node(pool="scorer")
def both(rewards: Rewards) -> tuple[Rewards, Advantages, Metrics]: ...
@node(pool="scorer")
def named(rewards: Rewards) -> tuple[Figures, Metrics]: ...


@program
def typed(policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 1) -> Policy:
    behaviour = assert_type(broadcast(policy, lag=lag), Weights)
    rollouts = assert_type(generate(prompts, behaviour, samples=samples), Rollouts)
    rewards = assert_type(shorter_is_better(rollouts, score(rollouts), weight=0.1), Rewards)
    rewards, _ = assert_type(both(rewards), tuple[Rewards, Advantages])
    figures = assert_type(named(rewards), Figures)
    return assert_type(aipo_update(policy, rollouts, figures.advantage, rho=2.0), Policy)


WRONG = """
from penstock.graph import *

@node
def score(rollouts: Rollouts, *, weight: float = 1.0) -> tuple[Rewards, Metrics]:
    raise NotImplementedError

@program
def wrong(policy: Policy, rollouts: Rollouts) -> Policy:
    score(policy)
    score(rollouts, weight="a")
    score(rollouts, wieght=1.0)
    score()
    return score(rollouts)
"""


RIGHT = """
from penstock.graph import Metrics, Rewards, Rollouts, node

@node(pool="scorer")
def shorter_is_better(rollouts: Rollouts, rewards: Rewards, *, weight: float = 0.01) -> Rewards:
    return rewards - weight * rollouts.lengths()

@node(pool="scorer")
def price(rollouts: Rollouts, rewards: Rewards, *, each: float = 0.01) -> tuple[Rewards, Metrics]:
    cost = 1 - each * rollouts.lengths() / 2
    return rewards * cost + cost, {"cost": float(cost.mean())}
"""


def mistakes(text: str, folder: Path) -> str:
    """Return what mypy says of a user's file, in strict mode."""
    (folder / "user.py").write_text(text)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(root / ".mypy_cache")]
    command.append(str(folder / "user.py"))
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250).stdout


@pytest.mark.slow
def test_mistyped_calls_are_found_by_the_type_checker(tmp_path: Path) -> None:
    said = mistakes(WRONG, tmp_path)
    errors = [text.split(": ", 2)[0].rpartition(":")[2] for text in said.splitlines() if ": error: " in text]
    assert errors == ["10", "11", "12", "13", "14"], said


@pytest.mark.slow
def test_arithmetic_on_rewards_and_lengths_has_the_type_of_rewards(tmp_path: Path) -> None:
    assert mistakes(RIGHT, tmp_path) == ""


def test_the_program_above_can_be_traced() -> None:
    faults = [fault.what for fault in check(trace(typed))]
    assert faults == ["both: output '1'", "named: output 'rewards'"]
