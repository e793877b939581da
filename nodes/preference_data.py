"""Where pairs of responses come from, one better than the other: made-up arithmetic, or a JSONL file.

Both are pure functions of the ordinal. `context.data` is as in `data`; a file's fields are prompt, chosen and rejected.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock.graph.protocols import Source
from penstock.graph.types import Batchable, Context
from penstock.nodes.arithmetic import Problem, draw_problem
from penstock.nodes.data import ROWS, DataError, Epochs, arithmetic_digits, read_rows


@dataclass
class Pairs(Batchable):
    """Prompts with a response that was preferred to another, one entry per row."""

    texts: tuple[str, ...]
    chosen: tuple[str, ...]
    rejected: tuple[str, ...]

    maker: ClassVar[str] = "penstock.nodes.preference_data:open_pairs"
    pool: ClassVar[str] = "trainer"


def open_pairs(context: Context) -> Source:
    """The pairs that `context.data` names, `ROWS` per ordinal."""
    digits = arithmetic_digits(context.data)
    if digits is None:
        return FilePairs(context, read_rows(Path(context.data), ("prompt", "chosen", "rejected"), _pair))
    return ArithmeticPairs(context, digits)


class ArithmeticPairs:
    """The right answer against a wrong one: the draft alone where that is wrong, or one with a wrong digit."""

    def __init__(self, context: Context, digits: int) -> None:
        self.context, self.digits = context, digits

    def read(self, ordinal: int) -> Pairs:
        problems = [draw_problem(self.context, self.digits, ordinal, row) for row in range(ROWS)]
        wrong = [wrong_answer(p, self.context.key("wrong", ordinal, row)) for row, p in enumerate(problems)]
        chosen = tuple(p.demonstration(sloppy=False) for p in problems)
        return Pairs(tuple(p.text for p in problems), chosen, tuple(wrong))


def wrong_answer(problem: Problem, key: int) -> str:
    """A response whose final number is not the answer, drawn by a key: the draft, or the whole with another digit."""
    key, draft_alone = divmod(key, 2)
    if draft_alone and int(problem.draft) != int(problem.answer):
        return problem.draft
    right = problem.demonstration(sloppy=False)
    key, back = divmod(key, problem.digits + 1)
    place = len(right) - 1 - back
    other = (int(right[place]) + 1 + key % 9) % 10
    return f"{right[:place]}{other}{right[place + 1 :]}"


class FilePairs(Epochs[tuple[str, str, str]]):
    def read(self, ordinal: int) -> Pairs:
        texts, chosen, rejected = zip(*(self.row(ordinal * ROWS + i) for i in range(ROWS)), strict=True)
        return Pairs(texts, chosen, rejected)


def _pair(row: Mapping[str, str], where: str) -> tuple[str, str, str]:
    if row["chosen"] == row["rejected"]:
        raise DataError(f"{where}: given the same text as 'chosen' and 'rejected', needed two that differ")
    return row["prompt"], row["chosen"], row["rejected"]
