"""Python's collection of cycles, put off while something makes none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For searches and simulations: they keep much, and to look for cycles in it again and again takes up to a third of
    their time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
