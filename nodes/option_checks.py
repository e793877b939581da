"""Requirements of nodes and losses on their numeric options, checked before a run starts.

@requires(positive("rho"), not_negative("lr"))
@node(pool="trainer", clock="update")
def my_update(policy: Policy, rollouts: Rollouts, *, rho: float = 4.0, lr: float = 1e-4) -> Policy: ...
"""

import math
from collections.abc import Callable

from penstock.graph.requires import Call

Requirement = Callable[[Call], None]


def positive(*names: str) -> Requirement:
    """More than 0, infinity included."""
    return _numbers("a number above 0", lambda number: number > 0, names)


def not_negative(*names: str) -> Requirement:
    return _numbers("a finite number of at least 0", lambda number: 0 <= number < math.inf, names)


def finite(*names: str) -> Requirement:
    """Any sign."""
    return _numbers("a finite number", math.isfinite, names)


def bound(*names: str) -> Requirement:
    """At least 0; infinity is no bound."""
    return _numbers("a number of at least 0", lambda number: number >= 0, names)


def share(*names: str) -> Requirement:
    """A discount, which may be 1."""
    return _numbers("a number from 0 to 1", lambda number: 0 <= number <= 1, names)


def decay(*names: str) -> Requirement:
    """The share of a moving average that is kept: less than 1."""
    return _numbers("a number from 0 to below 1", lambda number: 0 <= number < 1, names)


def above(least: float, *names: str) -> Requirement:
    return _numbers(f"a number above {least:g}", lambda number: number > least, names)


def count(least: int, *names: str) -> Requirement:
    needed = f"a whole number of at least {least}"
    return _numbers(needed, lambda number: isinstance(number, int) and number >= least, names)


def ordered(least: str, most: str) -> Requirement:
    """Two bounds, of which the lower one is not above the other."""

    def check(call: Call) -> None:
        low, high = call.options.get(least), call.options.get(most)
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            raise call.lack(repr(low), f"at most {most}={high!r}", least, code="out-of-range")

    return check


def _numbers(needed: str, fit: Callable[[float], bool], names: tuple[str, ...]) -> Requirement:
    def check(call: Call) -> None:
        call.numbers(needed, fit, *names)

    return check
