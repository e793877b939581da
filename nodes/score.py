"""Rewards by rule: a function of prompt, response and reference answer, applied to every row. Also the steps between
rewards and advantages: penalties, and a filter of groups without a signal.
"""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from penstock.graph import node, requires
from penstock.graph.context import Context
from penstock.graph.errors import Fault, GraphError
from penstock.graph.imports import imported, names_function, short
from penstock.graph.protocols import Source
from penstock.graph.requires import Call
from penstock.graph.types import Mean, Metrics, NodeWarning, Rewards, Rollouts
from penstock.nodes.advantage import uniform_groups
from penstock.nodes.data import FilePrompts
from penstock.nodes.final_answer import comparable, equals
from penstock.nodes.learn.batching import of_its_rows
from penstock.nodes.option_checks import count, ordered

# (prompt, response, reference answer) → reward.
Rule = Callable[[str, str, str], float]

# Answers of a source that are read before a run starts: seconds of work. The first `MOST_TOLD` unreadable ones are
# reported.
MOST_READ, MOST_TOLD = 20_000, 5


class ScoreError(RuntimeError):
    """A reward function did not give a reward: which group and row, and why (`__cause__`)."""

    @classmethod
    def on(cls, rule: Callable[..., Any], rollouts: Rollouts, row: int, what: str) -> "ScoreError":
        """The error of a row, with its texts: a traceback alone does not tell which response it was."""
        name = getattr(getattr(rule, "func", rule), "__qualname__", rule)
        prompt, response, answer = rollouts.prompts[row], rollouts.texts[row], rollouts.answers[row]
        shown = f"prompt {prompt!r}, response {response!r}, answer {answer!r}"
        return cls(f"{name} on {rollouts.place(row)}{what} ({shown})")


def reward_of(value: Any) -> float:
    """The result of a reward function as a float. Raises ValueError unless it is a number that is finite in float32;
    a text is none, even "1"."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several numbers
        number = math.nan
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise ValueError(f"given {value!r:.80} ({type(value).__name__}), needed a finite number")
    return number


def answers_that(read: Callable[[str], object]) -> Callable[[Call], None]:
    """Requirement of a rule: reference answers that `read` accepts; for others it raises ValueError, "given …, needed
    …". The first `MOST_READ` answers are checked."""

    def check(call: Call) -> None:
        faults = []
        for source in call.sources():
            for place, answer in islice(_answers(source), MOST_READ):
                try:
                    read(answer)
                except ValueError as error:
                    given, _, needed = str(error).removeprefix("given ").partition(", needed ")
                    faults.append(Fault("unreadable-answer", call.what, given, needed, place))
        if faults:
            raise GraphError(*faults[:MOST_TOLD])

    return check


def _answers(source: Source) -> Iterable[tuple[str, str]]:
    """The reference answers of a source, each with its place: of data that is made up, those of the first group."""
    if isinstance(source, FilePrompts):
        return source.answers()
    first = source.read(0)
    return [(f"group 0, row {row}", answer) for row, answer in enumerate(getattr(first, "answers", ()), 1)]


@requires(answers_that(comparable))
def math_answer(prompt: str, response: str, answer: str) -> float:
    r"""1.0 if the response's final answer equals the reference answer, else 0.0.

    The final answer is in the last `\boxed{…}` (or `\fbox{…}`), else after the last "####", else it is the last number
    of the text. If the reference is a number, so must the answer be, and they are compared exactly, as fractions.
    Numbers are whole, decimal (1,072.50, 1 072.5), fractions (18/2, 1 1/2, `\frac{9}{2}`), powers of ten (2e-3; in a
    box `2 \times 10^{-3}`) or with a word (3 million); currency, percent and units do not count. No numbers are: an
    expression ("3!", "x + 3"), a range, a choice ("3 or 4"), a bound ("over 3", "> 3", not "at least 3"), a box in an
    expression, "about 3", "3 hours 30 minutes", and a text with two readings ("5 200 dollar notes"). But "0.03 or 3%"
    and "180 minutes or 3 hours" are one number, told twice. After a label or a term, "Answer - 3", a dash may be a mark
    or a minus: no number. For a number with a base, `52_8`, digits and base must be the same.

    Any other reference, such as `2\sqrt{3}` or `(0, \frac{\pi}{2})`, is compared by `math-verify` (the extra `math`).
    It gives up after `symbolic_math.DEADLINE_S` seconds: then the answer counts as wrong, and the run warns. A time
    with its half of the day, `3:30 pm`, and a date, `June 3` or `2024-06-03`, are not equal to another one. A choice,
    `C`, is found after "answer is" or "answer:", too. Letters commute, `AB` is `BA`, and `3:10` is a ratio. A range of
    two numbers, `5-10`, is compared by its ends.

    Raises ValueError for a reference that is neither, such as an empty box.
    """
    try:
        equal = equals(response, answer)
    except ValueError as error:
        raise ValueError(f"math_answer: {error}") from None
    if equal is None:
        # A run shows each text once.
        warnings.warn(
            "math_answer: math-verify had no verdict in time; such answers are wrong", NodeWarning, stacklevel=2
        )
    return float(bool(equal))


def exact(prompt: str, response: str, answer: str) -> float:
    """1.0 if the response is the reference answer, else 0.0. Spaces around them do not count."""
    return float(response.strip() == answer.strip())


def patterns(call: Call) -> None:
    """Requirement of `regex`: a pattern that `re` compiles."""
    pattern = call.options.get("pattern", "")  # without one, the call itself is a fault
    try:
        re.compile(str(pattern))
    except re.error as error:
        raise call.lack(repr(pattern), f"a regular expression: {error}", "pattern") from None


@requires(patterns)
def regex(prompt: str, response: str, answer: str, *, pattern: str) -> float:
    r"""1.0 if the pattern (of Python's `re`) is found in the response, else 0.0. If it has a group, the first group of
    the last match must be the reference answer: `partial(regex, pattern=r"Answer: (\w+)")`.
    """
    *_, found = [None, *re.finditer(pattern, response)]
    if found is None:
        return 0.0
    return 1.0 if not found.re.groups else exact(prompt, found[1] or "", answer)


@requires(count(0, "at_least", "at_most"), ordered("at_least", "at_most"))
def length(prompt: str, response: str, answer: str, *, at_most: int, at_least: int = 0) -> float:
    """1.0 for a response of `at_least` to `at_most` characters, else 0.0."""
    return float(at_least <= len(response) <= at_most)


def computes(call: Call) -> None:
    """Requirement of `score`: a rule that is not async. Raises GraphError."""
    by: Any = call.options.get("by")
    if names_function(by) and inspect.iscoroutinefunction(imported(by["path"])):
        raise call.lack(f"{short(by['path'])}, which is async", "a plain function; remote_score awaits others", "by")


@requires(computes)
@node(pool="scorer")
def score(rollouts: Rollouts, *, by: Rule = math_answer) -> tuple[Rewards, Metrics]:
    """The reward of each response by the rule `by`. If the rule raises, the group fails; its reward is never zero."""
    values = [_reward(by, rollouts, row) for row in range(len(rollouts))]
    return Rewards(torch.tensor(values, dtype=torch.float32)), {"finished": Mean.of(rollouts.finished_N.tolist())}


@node(pool="scorer", clock="update")
def accuracy(rewards: Rewards) -> Metrics:
    """The share of full rewards among all responses of an update."""
    return {"accuracy": float((rewards.values_N >= 1).float().mean())}


def _reward(by: Rule, rollouts: Rollouts, row: int) -> float:
    # Report any exception of a user's rule with the row.
    try:
        value = by(rollouts.prompts[row], rollouts.texts[row], rollouts.answers[row])
    except (Exception, SystemExit) as error:
        raise ScoreError.on(by, rollouts, row, f" raised {type(error).__name__}: {error}") from error
    try:
        return reward_of(value)
    except ValueError as error:
        raise ScoreError.on(by, rollouts, row, f": {error}") from error


def mixed(rollouts: Rollouts, rewards: Rewards) -> bool:
    """True if the rewards of a group differ, by more than rounding (`advantage.uniform_groups`). If they are all equal,
    there is nothing to learn.

    For `keep`: dynamic sampling of DAPO (arXiv 2503.14476), equation 11.
    """
    values_N = torch.as_tensor(rewards.values_N, dtype=torch.float32)
    return len(values_N) > 0 and not bool(uniform_groups(values_N, torch.zeros(len(values_N), dtype=torch.long)))


def buffer_fits(call: Call) -> None:
    """Requirement of a penalty on length: a buffer that is no longer than the longest length, where it ends; for
    conversations, the longest length is given."""
    longest, buffer, said = call.options["max_length"], call.options["buffer"], "max_length="
    # The run's bound is for a turn: by it, a response with tool calls could lose a whole reward.
    if longest is None and any(call.view.nodes[name].turns is not None for name in call.behind("rollouts")):
        needed = "the longest conversation: --max-tokens bounds a turn, and a response is all turns with their replies"
        raise call.lack("none, of conversations", needed, "max_length", code="out-of-range")
    # Without a run there is no bound on responses to compare with yet.
    if longest is None and call.context is not None:
        longest, said = call.context.max_tokens, "--max-tokens "
    if type(longest) is int and type(buffer) is int and buffer > longest:
        raise call.lack(repr(buffer), f"at most {said}{longest}, where the buffer ends", "buffer", code="out-of-range")


@requires(of_its_rows, count(1, "max_length", "buffer"), buffer_fits)
@node(pool="scorer")
def penalize_overlong(
    rewards: Rewards,
    rollouts: Rollouts,
    *,
    buffer: int,
    max_length: int | None = None,
    context: Context | None = None,
) -> Rewards:
    """Rewards minus a penalty on a response's length: 0 up to `max_length` − `buffer` tokens, then linear up to 1 at
    `max_length`, and 1 beyond.

    `max_length` None is the run's `max_tokens`, where responses are cut; conversations, whose replies count as well,
    need a `max_length`. Soft overlong punishment: DAPO (arXiv 2503.14476), equation 13, L_max and L_cache. Raises
    ValueError outside of a run without a `max_length`, and for a buffer that is longer than it.
    """
    longest = context.max_tokens if max_length is None and context is not None else max_length
    if longest is None:
        raise ValueError("penalize_overlong: given no max_length outside of a run, needed one")
    if not 0 < buffer <= longest:
        raise ValueError(f"penalize_overlong: given buffer={buffer}, needed 1 to max_length={longest}")
    penalty_N: Tensor = ((longest - buffer - rollouts.response_lengths_N) / buffer).clamp(-1.0, 0.0)
    return rewards + penalty_N
