"""Where prompts and demonstrations come from: generated arithmetic, or a JSONL file with GSM8K's fields.

Both are pure functions of the ordinal, so a resumed run reads on where it stopped without any saved state.
`context.data` is "arithmetic" (three digits), "arithmetic:DIGITS" with 2 to 6 digits, or the path of a file.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from penstock.graph.protocols import Source
from penstock.graph.types import Batchable, Context, Prompts
from penstock.nodes.arithmetic import draw_problem, held_out, is_sloppy
from penstock.nodes.score import FINAL, reference_number

ROWS = 32
"""Demonstrations in one group, so that an update of 128 takes four groups."""
MAX_HELD_OUT = 500


R = TypeVar("R")


class DataError(ValueError):
    """The data cannot be used as it is: what was given, what is needed, file and line."""


@dataclass
class Demonstrations(Batchable):
    """Prompts with what a teacher wrote after each, one entry per row."""

    texts: tuple[str, ...]
    responses: tuple[str, ...]

    maker: ClassVar[str] = "penstock.nodes.data:open_demonstrations"
    pool: ClassVar[str] = "trainer"


def open_prompts(context: Context) -> Source:
    """The prompts that `context.data` names: one problem per ordinal, from the part that `context.split` names."""
    digits = arithmetic_digits(context.data)
    if digits is None:
        return FilePrompts(context, read_jsonl(Path(context.data)))
    return ArithmeticPrompts(context, digits)


def open_demonstrations(context: Context) -> Source:
    """A teacher's demonstrations, `ROWS` per ordinal."""
    digits = arithmetic_digits(context.data)
    if digits is None:
        return FileDemonstrations(context, read_jsonl(Path(context.data)))
    return ArithmeticDemonstrations(context, digits)


class ArithmeticPrompts:
    """Training problems for ever, or the held-out ones again and again."""

    def __init__(self, context: Context, digits: int) -> None:
        self.context, self.digits = context, digits

    def read(self, ordinal: int) -> Prompts:
        if self.context.split == "evaluate":
            problems = held_out(self.digits)
            problem = problems[ordinal % len(problems)]
        else:
            problem = draw_problem(self.context, self.digits, ordinal)
        return Prompts((ordinal,), (problem.text,), (problem.answer,))


class ArithmeticDemonstrations:
    """A teacher who is mostly sloppy."""

    def __init__(self, context: Context, digits: int) -> None:
        self.context, self.digits = context, digits

    def read(self, ordinal: int) -> Demonstrations:
        problems = [draw_problem(self.context, self.digits, ordinal, row) for row in range(ROWS)]
        responses = [p.demonstration(is_sloppy(self.context, ordinal, row)) for row, p in enumerate(problems)]
        return Demonstrations(tuple(p.text for p in problems), tuple(responses))


@dataclass(frozen=True, slots=True)
class Row:
    """A problem of a file: `answer` is the final number, `solution` the whole text that leads to it, `place` is
    "file:line"."""

    question: str
    answer: str
    solution: str
    place: str


class Epochs(Generic[R]):
    """Rows of a file by ordinal, in another keyed order in each epoch.

    A fixed tenth of the rows, at most 500, is the evaluation's; of a file with fewer than ten rows, all are both.
    """

    def __init__(self, context: Context, rows: Sequence[R]) -> None:
        order = _permutation(len(rows), 0)
        num_held_out = min(MAX_HELD_OUT, len(rows) // 10)
        evaluate = context.split == "evaluate"
        chosen = order[:num_held_out] if evaluate and num_held_out else order[num_held_out:]
        self.rows = [rows[i] for i in chosen]
        self.context = context

    def row(self, index: int) -> R:
        epoch, place = divmod(index, len(self.rows))
        if self.context.split == "evaluate":
            return self.rows[place]
        return self.rows[_permutation(len(self.rows), self.context.key("epoch", epoch))[place]]


class FilePrompts(Epochs[Row]):
    def read(self, ordinal: int) -> Prompts:
        row = self.row(ordinal)
        return Prompts((ordinal,), (row.question,), (row.answer,))

    def texts(self) -> Iterator[tuple[str, str]]:
        """All prompts, each with the place where it is written, as "file:line"."""
        return ((row.place, row.question) for row in self.rows)


class FileDemonstrations(Epochs[Row]):
    def read(self, ordinal: int) -> Demonstrations:
        rows = [self.row(ordinal * ROWS + i) for i in range(ROWS)]
        return Demonstrations(tuple(r.question for r in rows), tuple(r.solution for r in rows))


def read_jsonl(path: Path) -> list[Row]:
    """All problems of a file with one JSON object per line. A faulty row raises `DataError` with file and line."""
    return read_rows(path, ("question", "answer"), _problem)


def read_rows(path: Path, needed: Sequence[str], make: Callable[[Mapping[str, str], str], R]) -> list[R]:
    """`make(row, place)` of each line of a file, which holds a JSON object with texts in the fields `needed`.

    A faulty row raises `DataError` with file and line, which are the `place`.
    """
    fields = " and ".join([", ".join(needed[:-1]), needed[-1]])
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    places = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not places:
        raise DataError(f"{path}: given an empty file, needed a JSON object per line with {fields}")
    return [make(_parse(line, place, needed, fields), place) for place, line in places]


def _parse(line: bytes, where: str, needed: Sequence[str], fields: str) -> Mapping[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: given a line that is not JSON: {error}; needed one object per line") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: given a JSON {type(row).__name__}, needed an object with {fields}")
    for field in needed:
        if field not in row:
            raise DataError(f"{where}: given the fields {sorted(row)}, needed {field!r}")
        if not isinstance(row[field], str) or not row[field].strip():
            raise DataError(f"{where}: given {row[field]!r} as {field!r}, needed a text")
        try:
            row[field].encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: given {error.object[error.start]!r} in {field!r}, which is no character"
            ) from error
    return row


def _problem(row: Mapping[str, str], where: str) -> Row:
    _, mark, final = row["answer"].rpartition(FINAL)
    if not mark:
        raise DataError(f"{where}: given an answer without a final number, needed one after {FINAL!r}")
    try:
        reference_number(final)
    except ValueError as error:
        raise DataError(f"{where}: {error} after {FINAL!r}") from None
    return Row(row["question"], final.strip(), row["answer"], where)


def arithmetic_digits(data: str) -> int | None:
    """The digits that "arithmetic[:DIGITS]" asks for; None for the path of a file that is there."""
    name, _, digits = (data or "arithmetic").partition(":")
    if name == "arithmetic":
        if (digits or "3") not in tuple("23456"):
            raise DataError(f"data: given {data!r}, needed arithmetic:2 to arithmetic:6")
        return int(digits or 3)
    if Path(data).is_file():
        return None
    close = get_close_matches(name, ["arithmetic"])
    hint = " (did you mean 'arithmetic'?)" if close else ""
    raise DataError(f"data: given {data!r}, which is no file; needed 'arithmetic' or a JSONL file{hint}")


@lru_cache(maxsize=4)
def _permutation(size: int, key: int) -> Sequence[int]:
    order = list(range(size))
    random.Random(key).shuffle(order)
    return order
