"""Work in a thread of its own that says once how it ended."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Done = Callable[[T | Exception], None]
"""What a background transfer calls once, in its own thread: with its result, or with the error that ended it."""


def in_background(name: str, work: Callable[[], T], done: Done[T]) -> None:
    """Begin `work`; an exception of it is its result."""

    def run() -> None:
        try:
            result: T | Exception = work()
        except Exception as error:
            result = error
        done(result)

    # A daemon: a peer's deadline must not hold up an interpreter that is told to end.
    threading.Thread(target=run, name=name, daemon=True).start()
