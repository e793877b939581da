"""Exact rewards; a reward function that raises stops the group instead of giving zero."""

import pytest
import torch

from penstock.graph.types import Rewards, Rollouts
from penstock.nodes.score import ScoreError, accuracy, math_answer, score


def rollouts(texts: tuple[str, ...], answers: tuple[str, ...]) -> Rollouts:
    n = len(texts)
    tokens = torch.ones(n, 3, dtype=torch.long)
    return Rollouts(
        ordinals=(7,) * n,
        prompts=("1+1=",) * n,
        answers=answers,
        texts=texts,
        tokens_NS=tokens,
        prompt_lengths_N=torch.ones(n, dtype=torch.long),
        response_lengths_N=torch.full((n,), 2),
        logprobs_NT=torch.zeros(n, 2),
        versions_NT=torch.zeros(n, 2, dtype=torch.long),
        finished_N=torch.ones(n, dtype=torch.bool),
    )


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("933", "933"),
        ("0933", "933"),
        ("-7", "-7"),
        ("3.50", "3.5"),
        ("1,072", "1072"),
        ("it costs $1,072.00.", "1,072"),
        ("-$5", "$-5"),
        ("10 - 4 = 6", "6"),
        ("48-24", "24"),
        ("<<48/2=24>>24\n#### 72", "48/2\n#### 72"),
        ("#### 72 apples out of 90", "72"),
        ("#### 1\n#### 2", "2"),
        (".5", "0.50"),
        ("x = -3", "-3"),
        ("99999999999999999999999999999999999991", "99999999999999999999999999999999999991"),
        ("1/2", "1/2"),
        ("#### 1/2", "1/2"),
        ("#### 18/2", "9"),
        ("so 1 1/2 cups", "1.5"),
        ("1.5e3", "1,500"),
        ("1e400", "1e400"),
        ("#### −5", "-5"),
    ],
)
def test_equal_numbers_are_right_however_they_are_written(response: str, answer: str) -> None:
    assert math_answer("", response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("934", "933"),
        ("", "933"),
        ("no number", "0"),
        ("7", "-7"),
        ("9 33", "933"),
        ("72 ####", "72"),
        ("3.5", "35"),
        ("--5", "-5"),
        ("18/2", "18"),
        ("18/2", "2"),
        ("#### 18/2", "18"),
        ("#### 1 1/2", "1"),
        ("1/2/2024", "2024"),
        ("400", "1e400"),
        ("1e400", "400"),
        ("1e999999999", "1"),
        ("1e" + "9" * 5000, "1"),
        ("9" * 5000, "9"),
        ("5/0", "5"),
        ("#### 1,2", "12"),
        ("1.2.3", "3"),
        ("#### −5", "5"),
        ("99999999999999999999999999999999999991", "99999999999999999999999999999999999992"),
    ],
)
def test_everything_else_is_wrong(response: str, answer: str) -> None:
    assert math_answer("", response, answer) == 0.0


@pytest.mark.parametrize("answer", ["none", "3 or 4", "#### 72 of 90", "48-24", "1e999999999", "1/0", "1,2"])
def test_a_reference_answer_must_hold_one_number(answer: str) -> None:
    with pytest.raises(ValueError, match=r"math_answer: given the reference answer .*number.*, needed one"):
        math_answer("", answer, answer)


def test_score_rewards_every_row_in_order() -> None:
    rewards, metrics = score.fn(rollouts(("2", "3", "2"), ("2", "2", "2")))
    assert rewards.values_N.tolist() == [1.0, 0.0, 1.0]
    assert metrics["reward_mean"] == pytest.approx(2 / 3)


def raises(prompt: str, response: str, answer: str) -> float:
    return 1.0 / (len(response) - 3)


def test_a_rule_that_raises_names_the_group_and_the_row() -> None:
    with pytest.raises(ScoreError, match=r"raises on group 7, row 1 raised ZeroDivisionError.*'abc'") as caught:
        score.fn(rollouts(("ok", "abc"), ("1", "1")), by=raises)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_must_be_finite(value: float) -> None:
    with pytest.raises(ScoreError, match="needed a finite number"):
        score.fn(rollouts(("2",), ("2",)), by=lambda *_: value)


def test_a_reward_must_be_a_number() -> None:
    with pytest.raises(ScoreError, match="raised TypeError"):
        score.fn(rollouts(("2",), ("2",)), by=lambda *_: None)


def test_accuracy_is_the_share_of_full_rewards() -> None:
    assert accuracy.fn(Rewards(torch.tensor([1.0, 0.0, 0.5, 1.0]))) == {"accuracy": 0.5}
