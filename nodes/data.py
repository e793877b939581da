"""Sources of prompts, demonstrations and pairs: generated arithmetic, or rows of data (`data_files`).

All of them are pure functions of the ordinal, so a resumed run continues where it stopped without any saved state.
`context.data` is "arithmetic" (three digits), "arithmetic:DIGITS" with 2 to 6 digits, or names rows.

Arithmetic costs nothing to make. A problem is "347+586=", its answer "933". The teacher first writes a draft, with each
digit computed alone: "823". The answer with all carries follows: "823:0933". A sloppy teacher stops after the draft, so
that reinforcement learning has something to find: continuing pays. 500 problems, the same for every seed, are held out:
training never shows them.

For a model that can call a calculator a problem has two digits, "37+58=". The teacher mostly answers with the draft,
"85", which is wrong half of the time. Its other demonstrations are conversations with `python_tool`: the call
"<python>37+58</python>" and the end of the turn, the reply "<output>95</output>", and the answer in it, "95". So
calling pays.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from penstock.graph.context import Context, random_key
from penstock.graph.protocols import Source
from penstock.graph.requires import reads_no_data
from penstock.graph.types import Batchable, NodeWarning, Prompts
from penstock.nodes.data_files import (
    DataError,
    DataRow,
    FileProblem,
    Table,
    called,
    is_on_hub,
    open_table,
    read_demonstration,
    read_pair,
    read_problem,
)
from penstock.nodes.tokenizer import EOS

# Held-out problems of arithmetic, and most held-out rows of a file.
HELD_OUT = 500
# The share of demonstrations that stop after the draft, and of those for a calculator that call it.
SLOPPY, CALLS = 0.65, 0.3
CALCULATOR_DIGITS = 2
# Demonstrations in one group, so that an update of 128 takes four groups.
ROWS = 32

R = TypeVar("R")


@dataclass
class Demonstrations(Batchable):
    """Prompts with a teacher's response to each, one entry per row.

    Attributes:
        texts: the prompts, N.
        responses: the teacher's responses, N.
    """

    texts: tuple[str, ...]
    responses: tuple[str, ...]

    maker: ClassVar[str] = "penstock.nodes.data:open_demonstrations"
    pool: ClassVar[str] = "trainer"


@dataclass
class Pairs(Batchable):
    """Prompts with two responses, one preferred to the other, one entry per row.

    Attributes:
        texts: the prompts, N.
        chosen: the preferred responses, N.
        rejected: the others, N.
    """

    texts: tuple[str, ...]
    chosen: tuple[str, ...]
    rejected: tuple[str, ...]

    maker: ClassVar[str] = "penstock.nodes.data:open_pairs"
    pool: ClassVar[str] = "trainer"


class Calculations(Prompts):
    """Problems of two digits without end, or the held-out ones in turn."""

    maker = "penstock.nodes.data:open_calculations"


class ToolDemonstrations(Demonstrations):
    """A teacher's responses, with the tool's replies in them. They are for a model that reads bytes."""

    maker = "penstock.nodes.data:open_tool_demonstrations"


def open_prompts(context: Context) -> Source:
    """The prompts that `context.data` names: one problem per ordinal, from the part that `context.split` names."""
    digits = arithmetic_digits(context)
    if digits is None:
        # Read all rows at the start, so that a faulty row is reported before training.
        table = open_table(context)
        return FilePrompts(context, table.read(read_problem, context), table.data)
    return Made(lambda ordinal: Prompts(*_problem_of(context, digits, ordinal)), size=_size(context))


@reads_no_data
def open_calculations(context: Context) -> Source:
    """Arithmetic problems of two digits, for a model that can call a calculator."""
    return Made(lambda ordinal: Calculations(*_problem_of(context, CALCULATOR_DIGITS, ordinal)), size=_size(context))


def open_demonstrations(context: Context) -> Source:
    """A teacher's demonstrations, `ROWS` per ordinal."""
    digits = arithmetic_digits(context)
    if digits is None:
        table = open_table(context)
        return FileRows(context, table, read_demonstration, Demonstrations)

    def read(ordinal: int) -> Demonstrations:
        problems = _problems(context, digits, ordinal)
        responses = [p.demonstration(is_sloppy(context, ordinal, row)) for row, p in enumerate(problems)]
        return Demonstrations(tuple(p.text for p in problems), tuple(responses))

    return Made(read)


@reads_no_data
def open_tool_demonstrations(context: Context) -> Source:
    """Demonstrations of a teacher with a calculator, `ROWS` per ordinal. Raises DataError for a model whose turns do
    not end with `EOS`."""
    from penstock.nodes.open_model import run_spec  # torch

    tokenizer = run_spec(context).tokenizer
    if tokenizer.encode(EOS) != [tokenizer.end]:
        given = f"{context.model}, whose turns end with {tokenizer.backend.id_to_token(tokenizer.end)!r}"
        needed = f"a new model (--model new), or one whose turns end with {EOS!r}, which stands in the demonstrations"
        raise DataError(f"model: given {given}, needed {needed}")

    def response(problem: Problem, ordinal: int, row: int) -> str:
        # Keyed by the row, so that a resumed run sees the same demonstrations.
        if context.key("calls", ordinal, row) % 10_000 >= CALLS * 10_000:
            return problem.draft
        call = problem.text.removesuffix("=")
        return f"<python>{call}</python>{EOS}<output>{problem.answer}</output>{problem.answer}"

    def read(ordinal: int) -> ToolDemonstrations:
        problems = _problems(context, CALCULATOR_DIGITS, ordinal)
        responses = (response(problem, ordinal, row) for row, problem in enumerate(problems))
        return ToolDemonstrations(tuple(p.text for p in problems), tuple(responses))

    return Made(read)


def open_pairs(context: Context) -> Source:
    """The pairs that `context.data` names, `ROWS` per ordinal.

    Pairs of arithmetic are the right answer and a wrong one: the draft alone if that is wrong, or an answer with a
    wrong digit.
    """
    digits = arithmetic_digits(context)
    if digits is None:
        table = open_table(context)
        return FileRows(context, table, read_pair, Pairs)

    def read(ordinal: int) -> Pairs:
        problems = _problems(context, digits, ordinal)
        rejected = (wrong_answer(p, context.key("wrong", ordinal, row)) for row, p in enumerate(problems))
        chosen = tuple(p.demonstration(sloppy=False) for p in problems)
        return Pairs(tuple(p.text for p in problems), chosen, tuple(rejected))

    return Made(read)


@dataclass(frozen=True)
class Made:
    """A source by a function of the ordinal; `data` and `size` as in `graph.protocols`."""

    read: Callable[[int], Any]
    data: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """a + b, or a − b with a ≥ b; both have `digits` digits."""

    a: int
    b: int
    sign: str
    digits: int

    @staticmethod
    def draw(key: int, digits: int) -> "Problem":
        """The problem of a 63-bit key; every pair of operands and both signs are equally likely."""
        low = 10 ** (digits - 1)
        # The key's digits in a mixed base are independent.
        rest, a = divmod(key, 9 * low)
        rest, b = divmod(rest, 9 * low)
        a, b = a + low, b + low
        return Problem(a, b, "+", digits) if rest % 2 else Problem(max(a, b), min(a, b), "-", digits)

    @property
    def text(self) -> str:
        return f"{self.a}{self.sign}{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b if self.sign == "+" else self.a - self.b)

    @property
    def draft(self) -> str:
        """Each digit's own sum or difference, modulo 10."""
        pairs = zip(str(self.a), str(self.b), strict=True)
        step = 1 if self.sign == "+" else -1
        return "".join(str((int(x) + step * int(y)) % 10) for x, y in pairs)

    def demonstration(self, sloppy: bool) -> str:
        """What the teacher writes. Answers have one digit more than the operands, zeros in front."""
        return self.draft if sloppy else f"{self.draft}:{self.answer.zfill(self.digits + 1)}"


def draw_problem(context: Context, digits: int, *parts: int) -> Problem:
    """The training problem of this key: the first draw that is not held out."""
    # Draw again: if held-out problems were skipped, later ordinals would depend on how many there were.
    draws = (Problem.draw(context.key(*parts, attempt), digits) for attempt in count())
    return next(p for p in draws if p not in _held_out_set(digits))


def _problem_of(context: Context, digits: int, ordinal: int) -> tuple[tuple[int], tuple[str], tuple[str]]:
    """The ordinal, the text and the answer of a training problem, or of the held-out ones in turn."""
    if context.split != "train":
        problem = held_out(digits)[ordinal % HELD_OUT]
    else:
        problem = draw_problem(context, digits, ordinal)
    return (ordinal,), (problem.text,), (problem.answer,)


def _size(context: Context) -> int:
    return 0 if context.split == "train" else HELD_OUT


def _problems(context: Context, digits: int, ordinal: int) -> list[Problem]:
    return [draw_problem(context, digits, ordinal, row) for row in range(ROWS)]


def is_sloppy(context: Context, *parts: int) -> bool:
    """True if the teacher stops this demonstration after the draft."""
    return context.key("sloppy", *parts) % 10_000 < SLOPPY * 10_000


@lru_cache
def held_out(digits: int) -> tuple[Problem, ...]:
    """The problems of the evaluation, which depend only on the number of digits."""
    chosen: dict[Problem, None] = {}
    for index in count():
        chosen[Problem.draw(random_key("held-out", index), digits)] = None
        if len(chosen) == HELD_OUT:
            break
    return tuple(chosen)


_held_out_set = lru_cache(lambda digits: frozenset(held_out(digits)))


def wrong_answer(problem: Problem, key: int) -> str:
    """A response whose final number is wrong, drawn by a key: the draft, or the full one with another digit."""
    key, draft_alone = divmod(key, 2)
    if draft_alone and int(problem.draft) != int(problem.answer):
        return problem.draft
    right = problem.demonstration(sloppy=False)
    # A digit of the answer; nothing checks the draft.
    key, back = divmod(key, problem.digits + 1)
    place = len(right) - 1 - back
    other = (int(right[place]) + 1 + key % 9) % 10
    return f"{right[:place]}{other}{right[place + 1 :]}"


class Epochs(Generic[R]):
    """Rows by ordinal, `each` in a value, in another keyed order in each epoch. `epochs` as in `graph.protocols`.

    If the evaluation has no data of its own, fixed prompts are held out for it, each once, and training uses no row
    with one of them: `context.held_out`, or a tenth, 500 at most. If that is none, both use all rows. Raises DataError
    for prompts to hold out beside data of its own, and for all of them.
    """

    each = 1

    def __init__(self, context: Context, rows: Sequence[R], prompt: Callable[[R], str]) -> None:
        # Not by the run's seed, so that runs with other seeds are measured on the same rows.
        order = _permutation(len(rows), 0)
        first: dict[str, int] = {}
        for i in order:
            first.setdefault(prompt(rows[i]), i)
        own = context.apart or context.split == "whole"
        num_held_out = min(HELD_OUT, len(first) // 10) if context.held_out is None else context.held_out
        if context.held_out and own:
            needed = "one of both: accuracy is measured on that"
            raise DataError(f"--held-out: given {num_held_out} beside --eval-data or --eval-split, needed {needed}")
        if num_held_out >= max(1, len(first)):
            needed = f"fewer than the {len(first)} different prompts of the data"
            raise DataError(f"--held-out: given {num_held_out}, needed {needed}")
        held_out = {} if own else dict(islice(first.items(), num_held_out))
        evaluate = context.split == "evaluate"
        if evaluate and not held_out:
            warnings.warn(
                f"accuracy is measured on the {len(rows)} rows that training learns from: none of {len(first)} prompts "
                "are kept for it (--held-out), and no other data is (--eval-data, --eval-split)",
                NodeWarning,
                stacklevel=2,
            )
        train = [i for i in order if prompt(rows[i]) not in held_out] if held_out else order
        chosen = [*held_out.values()] if evaluate and held_out else train
        self.rows = [rows[i] for i in chosen]
        self.context = context

    def row(self, index: int) -> R:
        epoch, place = divmod(index, len(self.rows))
        if self.context.split != "train":
            return self.rows[place]
        return self.rows[_permutation(len(self.rows), self.context.key("epoch", epoch))[place]]

    def epochs(self, ordinal: int) -> float:
        return round((ordinal + 1) * self.each / len(self.rows), 6)

    def group(self, ordinal: int) -> list[R]:
        """The rows of one value."""
        return [self.row(ordinal * self.each + i) for i in range(self.each)]


class FilePrompts(Epochs[FileProblem]):
    """Prompts of rows; `data` and `size` as in `graph.protocols`."""

    def __init__(self, context: Context, rows: Sequence[FileProblem], data: str) -> None:
        super().__init__(context, rows, lambda row: row.prompt)
        self.data, self.size = data, len(self.rows)

    def read(self, ordinal: int) -> Prompts:
        row = self.row(ordinal)
        return Prompts((ordinal,), (row.prompt,), (row.answer,))

    def texts(self) -> Iterator[tuple[str, str]]:
        """All prompts, each with the place where it is written, as "file:line"."""
        return ((row.place, row.prompt) for row in self.rows)

    def answers(self) -> Iterator[tuple[str, str]]:
        """All reference answers, each with the place where it is written."""
        return ((row.place, row.answer) for row in self.rows)


class FileRows(Epochs[tuple[str, tuple[str, ...]]]):
    """Values of `kind`, each of `ROWS` rows of a table: the prompts, and the one or two responses to each. `data` as in
    `graph.protocols.Pinned`."""

    each = ROWS

    def __init__(
        self,
        context: Context,
        table: Table,
        read: Callable[[DataRow, Context], tuple[str, ...]],
        kind: Callable[..., Demonstrations | Pairs],
    ) -> None:
        rows = table.read(lambda row, context: (row.place, read(row, context)), context)
        super().__init__(context, rows, lambda row: row[1][0])
        self.kind, self.data = kind, table.data

    def read(self, ordinal: int) -> Demonstrations | Pairs:
        return self.kind(*zip(*(texts for _, texts in self.group(ordinal)), strict=True))

    def texts(self) -> Iterator[tuple[str, str, str]]:
        """The place where each row is written, its prompt, and a response."""
        return ((place, texts[0], response) for place, texts in self.rows for response in texts[1:])


def arithmetic_digits(context: Context) -> int | None:
    """The number of digits of generated problems; None for rows. Raises DataError if `context.data` names neither."""
    data = context.data
    name, _, digits = (data or "arithmetic").partition(":")
    if name == "arithmetic":
        if (digits or "3") not in tuple("23456"):
            raise DataError(f"{called(context)}: given {data!r}, needed arithmetic:2 to arithmetic:6")
        for option in ("data_split", "held_out", "prompt_field", "answer_field", "row", "system"):
            if (given := getattr(context, option)) not in ("", None):
                raise DataError(f"--{option.replace('_', '-')}: given {given!r} with arithmetic, needed --data of rows")
        return int(digits or 3)
    if Path(data).exists() or is_on_hub(data):
        return None
    close = get_close_matches(name, ["arithmetic"])
    hint = " (did you mean 'arithmetic'?)" if close else ""
    needed = "'arithmetic', a JSONL or parquet file, a directory, or OWNER/NAME of the Hugging Face Hub"
    raise DataError(f"{called(context)}: given {data!r}, which is no file; needed {needed}{hint}")


@lru_cache(maxsize=4)
def _permutation(size: int, key: int) -> Sequence[int]:
    order = list(range(size))
    random.Random(key).shuffle(order)
    return order
