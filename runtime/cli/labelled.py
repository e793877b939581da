"""Lines of a plan or a schedule that begin with a label, as wide as the terminal. Pure."""

from collections.abc import Sequence
from textwrap import wrap

COLUMN = 12
"""Where the words begin, if nothing else is said."""


def labelled(label: str, words: str, width: int, column: int = COLUMN) -> list[str]:
    """The words beside their label; further lines are indented."""
    return wrap(words, width, initial_indent=f"{label:<{column}}", subsequent_indent=" " * column)


def assumed(said: Sequence[str], width: int, column: int = COLUMN) -> list[str]:
    """What the program does not say of its work, a paragraph each; no line of a program that says all of it."""
    labels = ("assumed", *[""] * len(said))
    return [line for label, words in zip(labels, said, strict=False) for line in labelled(label, words, width, column)]
