"""Faults of a program: their form, their codes, and where in the user's file they are.

A `Fault` says what is wrong, what was given, what is needed and where it was written. Its `code` is a stable word that
tests and tools match on; the texts may change. docs/check-errors.md lists all codes with cause and cure, and a test
holds that none is missing there. `check` returns faults, everything else raises them in a `GraphError`.
"""

import difflib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `where` is "file:line" of the call, "" for a graph that no file wrote."""

    code: str
    what: str
    given: str
    needed: str
    where: str = ""

    def __str__(self) -> str:
        # With the code, by which the page of errors has the cause and the cure.
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what} [{self.code}]\n    given   {self.given}\n    needed  {self.needed}"


class GraphError(ValueError):
    """The user's program, path or graph cannot work; `faults` says why."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


def fault(code: str, what: str, given: str, needed: str, where: str | None = None) -> GraphError:
    """A `GraphError` of one fault, at the user's line unless `where` is given."""
    return GraphError(Fault(code, what, given, needed, caller() if where is None else where))


_LIBRARY = (f"{__package__}.", "penstock.nodes.")


def caller() -> str:
    """ "file:line" of the program that is being traced: the innermost frame outside this package and the nodes."""
    frame = sys._getframe(1)
    # Nodes of this package call others in their own helpers, which is not where the user has to look.
    while frame.f_globals.get("__name__", "").startswith(_LIBRARY) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def defined(function: object) -> str:
    """ "file:line" of a function's definition; "" if it was not written in Python."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""


def nearest(name: str, names: Iterable[str]) -> str:
    """The names to choose from, the most similar first, as the end of a sentence."""
    known = sorted(set(names))

    def likeness(other: str) -> float:
        # The sorted letters count, too: most slips are two letters that changed places.
        pairs = ((name, other), (sorted(name), sorted(other)))
        return sum(difflib.SequenceMatcher(None, one, two).ratio() for one, two in pairs)

    if close := difflib.get_close_matches(name, known, n=3, cutoff=0.5):
        return f"; the nearest: {', '.join(sorted(close, key=likeness, reverse=True))}"
    return f"; there are: {', '.join(known[:12])}{', …' if len(known) > 12 else ''}" if known else ""
