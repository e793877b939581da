"""What a maker needs of a run, looked at before any process of it starts."""

from collections.abc import Callable
from typing import Any, TypeVar

from penstock.graph.types import Context

Check = Callable[[Context], object]
"""Raises ValueError, with what was given and what is needed, for a run that lacks what its maker needs."""

M = TypeVar("M", bound=Callable[[Context], Any])


def requires(check: Check) -> Callable[[M], M]:
    """Have `check` called with a maker's context before a run starts, where nothing is lost yet but a second.

    It looks at options, directories and files, and makes nothing: the maker is called later, once in each process.

        @requires(check_teacher)
        def open_teacher(context: Context) -> Carried: ...
    """

    def mark(maker: M) -> M:
        maker.requires = check  # type: ignore[attr-defined]
        return maker

    return mark


def requirement(maker: Callable[..., Any]) -> Check | None:
    """What `requires` was given for a maker; None for one that needs nothing."""
    found: Check | None = getattr(maker, "requires", None)
    return found
