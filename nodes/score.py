"""Rewards by rule: a function of prompt, response and reference answer, applied to every row; and what is done with
rewards before they become advantages: penalties, and which groups are worth learning from.
"""

import math
import re
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from penstock.graph import node, requires
from penstock.graph.errors import Fault, GraphError
from penstock.graph.requires import Call
from penstock.graph.types import Context, Metrics, Rewards, Rollouts
from penstock.nodes.data import FilePrompts
from penstock.nodes.data_files import FINAL
from penstock.nodes.option_checks import count

# (prompt, response, reference answer) → reward.
Rule = Callable[[str, str, str], float]

_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)(?:\.[0-9]++)?+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?+"
# Possessive, so that no part of "12,34" or "1.2.3" is taken for a number. A minus belongs to the number unless it
# follows something to subtract from: "48-24" holds 48 and 24.
_NUMBER = re.compile(
    rf"""(?P<sign>(?:(?<![\w.)−-])[−-]\s?\$?|\$[−-]?)?)
    (?<![0-9.])(?<![0-9][,/eE])
    (?:(?P<whole>[0-9]++)\s++(?=[0-9]++/[0-9]))?+
    (?P<top>{_DIGITS})(?:\s?/\s?(?P<bottom>{_DIGITS}))?+
    (?!\s?/\s?[0-9]|[.,]?[0-9])""",
    re.VERBOSE,
)
# A number with more of them, or a larger exponent, is none: Python refuses to read 4,300 digits.
_MOST_DIGITS = 4_000
# Of rows whose answer cannot be read, so many are named.
MOST_TOLD = 5


class ScoreError(RuntimeError):
    """A reward function did not give a reward: which group and row, and why (`__cause__`)."""


def reference_numbers(call: Call) -> None:
    """What `math_answer` requires of data: a number as the reference answer of each row."""
    faults = []
    for source in call.sources():
        for place, answer in source.answers() if isinstance(source, FilePrompts) else ():
            try:
                reference_number(answer)
            except ValueError as error:
                given, _, needed = str(error).partition(", needed ")
                faults.append(Fault("unreadable-answer", call.what, given.removeprefix("given "), needed, place))
    if faults:
        raise GraphError(*faults[:MOST_TOLD])


@requires(reference_numbers)
def math_answer(prompt: str, response: str, answer: str) -> float:
    """1.0 if the response's final number equals the reference answer's, else 0.0; exact, in fractions.

    The final number is the first one after the last "####", if there is one (GSM8K's way), else the last number of
    the text. Numbers are whole, decimal (1,072.50), fractions (18/2, 1 1/2) or powers of ten (2e-3), with or without
    $. A reference must hold one number only, after "####" if that is there: which of several is meant would be a guess.

    Raises ValueError for any other reference.
    """
    try:
        needed = reference_number(answer)
    except ValueError as error:
        raise ValueError(f"math_answer: {error}") from None
    return float(final_number(response) == needed)


def reference_number(answer: str) -> Fraction:
    """The number of a reference answer (see `math_answer`). Raises ValueError unless there is exactly one."""
    found = _numbers(answer)
    if len(found) != 1:
        given = f"{len(found)} numbers" if found else "no number"
        raise ValueError(f"given the reference answer {answer!r} with {given}, needed one")
    return found[0]


def final_number(text: str) -> Fraction | None:
    """The number that a text ends with (see `math_answer`); None if there is none."""
    found = _numbers(text)
    return None if not found else found[0 if FINAL in text else -1]


def _numbers(text: str) -> list[Fraction]:
    """All numbers after the last "####", or of a text without one."""
    found = (_value(match) for match in _NUMBER.finditer(text.rpartition(FINAL)[2]))
    return [value for value in found if value is not None]


def _value(match: re.Match[str]) -> Fraction | None:
    """None for a division by zero, and for a number that is too large to be written out."""
    parts = [(match[name] or "1").replace(",", "") for name in ("whole", "top", "bottom")]
    for part in parts:
        digits, _, exponent = part.lower().partition("e")
        if len(digits) > _MOST_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > _MOST_DIGITS:
            return None
    whole, top, bottom = map(Fraction, parts)
    if not bottom:
        return None
    value = top / bottom + (whole if match["whole"] else 0)
    return -value if match["sign"].strip("$ ") else value


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
    # Whatever a user's rule raises is told with the row: a traceback alone does not say which response it was.
    try:
        value = float(by(prompt, response, answer))
    except Exception as error:
        raise ScoreError(f"{place} raised {type(error).__name__}: {error} ({shown})") from error
    if not math.isfinite(value):
        raise ScoreError(f"{place} gave {value}, needed a finite number ({shown})")
    return value


def mixed(rollouts: Rollouts, rewards: Rewards) -> bool:
    """Do the rewards of a group differ? Where they are all equal there is nothing to learn from.

    For `keep`: dynamic sampling of DAPO (arXiv 2503.14476), equation 11.
    """
    return bool((rewards.values_N != rewards.values_N[0]).any())


def buffer_fits(call: Call) -> None:
    """What a penalty on length requires: a buffer that ends at the longest length, and is no longer than that."""
    longest, buffer, said = call.options["max_length"], call.options["buffer"], "max_length="
    # Without a run there is no bound on responses to compare with yet.
    if longest is None and call.context is not None:
        longest, said = call.context.max_tokens, "--max-tokens "
    if type(longest) is int and type(buffer) is int and buffer > longest:
        raise call.lack(repr(buffer), f"at most {said}{longest}, where the buffer ends", "buffer", code="out-of-range")


@requires(count(1, "max_length", "buffer"), buffer_fits)
@node(pool="scorer")
def penalize_overlong(
    rewards: Rewards,
    rollouts: Rollouts,
    *,
    buffer: int,
    max_length: int | None = None,
    context: Context | None = None,
) -> Rewards:
    """Rewards less what a response's length costs: 0 up to `max_length` − `buffer` tokens, up a line to 1 at
    `max_length`, then 1.

    `max_length` None is the run's `max_tokens`, where responses are cut. Soft overlong punishment: DAPO
    (arXiv 2503.14476), equation 13, L_max and L_cache. Raises ValueError without either, outside of a run, and for a
    buffer that is longer.
    """
    longest = context.max_tokens if max_length is None and context is not None else max_length
    if longest is None:
        raise ValueError("penalize_overlong: given no max_length outside of a run, needed one")
    if not 0 < buffer <= longest:
        raise ValueError(f"penalize_overlong: given buffer={buffer}, needed 1 to max_length={longest}")
    penalty_N: Tensor = ((longest - buffer - rollouts.response_lengths_N) / buffer).clamp(-1.0, 0.0)
    return rewards + penalty_N
