"""Short runs of the programs with more than one model, from the demo's base: each improves the figure it is for.

The base differs from processor to processor, as rounding does. Each limit is at most two thirds of the least that four
seeds have reached.
"""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from penstock.runtime.control.run_config import RunOptions
from tests.gates.running import assert_equal_bits, make_run, rows, run_here, status_here, summary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # the first one may have to build the base

Row = dict[str, Any]
# Options of a program that learns in these runs: four samples of each prompt are enough.
FOUR = {"samples": 4, "lr": 3e-4}


def run(path: Path, program: str, options: dict[str, Any], base: str, updates: int, **flags: Any) -> Path:
    """Do a run in this process, with the demo's batch unless `flags` say otherwise."""
    known = {"updates": updates, "model": base, "batch": 32, "slots": 256, **flags}
    return run_here(make_run(path, program, options, RunOptions(**known)))


def gain(figures: Sequence[Row], name: str, last: int = 3) -> float:
    """Return the mean of a figure over the last updates, minus that over the first two."""
    late, early = figures[-last:], figures[:2]
    return float(sum(row[name] for row in late) / last - sum(row[name] for row in early) / 2)


@pytest.fixture(scope="module")
def reward_model(base: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """Do a short run of `reward_model`; return the model's directory and the run's figures."""
    folder = run(tmp_path_factory.mktemp("reward") / "r", "reward_model", {}, base, 20, batch=2)
    return folder / "checkpoints" / "00000020" / "reward_model", rows(folder)


@pytest.fixture(scope="module")
def taught(base: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """Do a short run of `ppo`; return the policy's directory and the run's figures."""
    options = {**FOUR, "critic_lr": 1e-3}
    folder = run(tmp_path_factory.mktemp("ppo") / "r", "ppo", options, base, 14)
    return folder / "checkpoints" / "00000014" / "policy", rows(folder)


def test_ppo_learns_and_its_critic_comes_to_expect_the_reward(taught: tuple[Path, list[Row]]) -> None:
    _, figures = taught
    assert gain(figures, "reward_mean") > 0.18
    assert gain(figures, "critic_loss") < -0.08
    assert figures[0]["value_mean"] == 0.0
    assert figures[-1]["value_mean"] > 0.4


def test_a_reward_model_learns_to_tell_right_from_wrong(reward_model: tuple[Path, list[Row]]) -> None:
    folder, figures = reward_model
    assert figures[0]["accuracy"] == 0.5
    assert sum(row["accuracy"] for row in figures[-10:]) / 10 > 0.6
    assert (folder / "config.json").exists()


def test_rlhf_finds_right_answers_by_the_reward_model_alone(
    tmp_path: Path, base: str, reward_model: tuple[Path, list[Row]]
) -> None:
    options = {"reward_model": str(reward_model[0]), **FOUR, "critic_lr": 1e-3}
    figures = rows(run(tmp_path / "r", "rlhf", options, base, 14, batch=16))
    assert gain(figures, "learned_reward") > 1.0
    assert gain(figures, "accuracy") > 0.08


def test_online_dpo_learns_from_best_and_worst(tmp_path: Path, base: str) -> None:
    figures = rows(run(tmp_path / "r", "online_dpo", {"lr": 3e-4}, base, 14))
    assert gain(figures, "reward_mean") > 0.08
    assert figures[0]["margin"] == 0.0
    assert max(row["margin"] for row in figures) > 0.5


@pytest.mark.parametrize("full", [False, True])
def test_a_student_comes_closer_to_its_teacher(
    tmp_path: Path, base: str, taught: tuple[Path, list[Row]], full: bool
) -> None:
    options = {"teacher_model": str(taught[0]), **FOUR, "full": full}
    figures = rows(run(tmp_path / "r", "distill", options, base, 8))
    assert gain(figures, "teacher_kl") < -0.12


def test_a_reference_is_moved_at_every_fourth_update(tmp_path: Path, base: str) -> None:
    figures = rows(run(tmp_path / "r", "moving_reference", {**FOUR, "every": 4}, base, 12))
    assert gain(figures, "reward_mean") > 0.1
    assert [row["version"] for row in figures if "average_distance" in row] == [4, 8, 12]


def test_an_average_follows_and_is_what_is_evaluated(tmp_path: Path, base: str) -> None:
    config = RunOptions(updates=16, model=base, batch=32, slots=256, eval_groups=100)
    folder = run_here(make_run(tmp_path / "r", "ema", {**FOUR, "decay": 0.8}, config, evaluate=True))
    figures = rows(folder)
    assert gain(figures, "reward_mean") > 0.1
    assert 0 < figures[0]["average_distance"] < figures[5]["average_distance"]
    assert summary(folder)["accuracy_after"] > summary(folder)["accuracy_before"] + 0.2
    assert (folder / "checkpoints" / "00000016" / "average" / "config.json").exists()


def test_replay_learns_from_more_groups_than_are_fresh(tmp_path: Path, base: str) -> None:
    figures = rows(run(tmp_path / "r", "replay", {**FOUR, "take": 16}, base, 16))
    assert gain(figures, "reward_mean") > 0.1
    assert [row["groups"] for row in figures] == [32] * 16
    assert [row["replayed"] for row in figures] == [0] + [16] * 15
    assert all(0 < row["replayed_age"] <= 4 for row in figures[1:])


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a directory of each other model that programs read, one update old, by the name of its option."""
    folder = tmp_path_factory.mktemp("untaught")
    makers = {"reward_model": ("reward_model", "reward_model"), "teacher_model": ("online_dpo", "policy")}
    made = {name: run(folder / name, program, {}, "", 1, **SHORT) for name, (program, _) in makers.items()}
    return {name: str(made[name] / "checkpoints" / "00000001" / part) for name, (_, part) in makers.items()}


SMALL = {"samples": 2, "lr": 1e-3}
SHORT: dict[str, Any] = {"batch": 4, "slots": 16, "max_tokens": 6}
UPDATES = 5


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("ppo", {**SMALL, "minibatches": 2}),
        ("replay", {**SMALL, "lag": 0, "take": 3, "capacity": 9}),
        ("ema", {**SMALL, "lag": 0}),
        ("moving_reference", {**SMALL, "every": 2}),
        ("online_dpo", SMALL),
        ("reward_model", {}),
        ("rlhf", {**SMALL, "reward_model": ...}),
        ("distill", {**SMALL, "teacher_model": ...}),
        ("distill", {**SMALL, "teacher_model": ..., "full": True}),
    ],
)
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, program: str, options: dict[str, Any], untaught: dict[str, str]
) -> None:
    """A checkpoint has all carried values, and the state of the nodes."""
    options = {name: untaught[name] if value is ... else value for name, value in options.items()}
    whole = run(tmp_path / "whole", program, options, "", UPDATES, **SHORT)
    cut = make_run(tmp_path / "cut", program, options, RunOptions(updates=UPDATES, **SHORT))

    def stop(line: Row) -> None:
        if line.get("kind") == "row" and line["row"]["update"] == 2:
            signal.raise_signal(signal.SIGINT)

    assert status_here(cut, stop)[0] == "stopped"
    assert 3 <= len(rows(cut)) < UPDATES
    run_here(cut)
    last = Path("checkpoints") / f"{UPDATES:08d}"
    parts = [path.name for path in (whole / last).glob("*.safetensors")]
    assert parts
    for name in parts:
        assert_equal_bits(load_file(cut / last / name), load_file(whole / last / name))
