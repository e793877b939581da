"""Rewards by rule: a function of prompt, response and reference answer, applied to every row."""

import math
import re
from collections.abc import Callable
from decimal import Decimal

import torch

from penstock.graph import node
from penstock.graph.types import Metrics, Rewards, Rollouts

Rule = Callable[[str, str, str], float]
"""(prompt, response, reference answer) → reward."""

FINAL = "####"
"""GSM8K writes the final number after this."""
# A minus belongs to the number unless it follows something to subtract from: "48-24" holds 48 and 24.
_NUMBER = re.compile(r"(?:(?<![\w.)-])-\s?\$?|\$-?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")


class ScoreError(RuntimeError):
    """A reward function did not give a reward: which group and row, and why (`__cause__`)."""


def math_answer(prompt: str, response: str, answer: str) -> float:
    """1.0 if the response's final number equals the reference answer's, else 0.0; exact, in decimals.

    The final number is the first one after the last "####", if there is one (GSM8K's way), else the last number of
    the text. Thousands separators, $ and trailing zeros do not count.
    """
    needed = final_number(answer)
    if needed is None:
        raise ValueError(f"math_answer: given the reference answer {answer!r}, needed one with a number")
    return float(final_number(response) == needed)


def final_number(text: str) -> Decimal | None:
    """The number that a text ends with; None if there is none."""
    _, mark, final = text.rpartition(FINAL)
    found = _NUMBER.findall(final)
    if not found:
        return None
    return Decimal(re.sub(r"[,$\s]", "", found[0] if mark else found[-1]))


@node(pool="scorer")
def score(rollouts: Rollouts, *, by: Rule = math_answer) -> tuple[Rewards, Metrics]:
    """The reward of each response by the rule `by`. A rule that raises fails the group: it is never a zero reward."""
    values = [_reward(by, rollouts, row) for row in range(len(rollouts))]
    values_N = torch.tensor(values, dtype=torch.float32)
    metrics = {
        "reward_mean": float(values_N.mean()),
        "finished": float(rollouts.finished_N.float().mean()),
    }
    return Rewards(values_N), metrics


@node(pool="scorer", clock="update")
def accuracy(rewards: Rewards) -> Metrics:
    """The share of full rewards among all responses of an update."""
    return {"accuracy": float((rewards.values_N >= 1).float().mean())}


def _reward(by: Rule, rollouts: Rollouts, row: int) -> float:
    prompt, response, answer = rollouts.prompts[row], rollouts.texts[row], rollouts.answers[row]
    place = f"{getattr(by, '__qualname__', by)} on group {rollouts.ordinals[row]}, row {row}"
    shown = f"prompt {prompt!r}, response {response!r}, answer {answer!r}"
    try:
        value = float(by(prompt, response, answer))
    except Exception as error:
        raise ScoreError(f"{place} raised {type(error).__name__}: {error} ({shown})") from error
    if not math.isfinite(value):
        raise ScoreError(f"{place} gave {value}, needed a finite number ({shown})")
    return value
