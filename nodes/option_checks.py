"""What nodes and losses require of the numbers among their options, told before a run starts.

@requires(positive("rho"), not_negative("lr"))
@node(pool="trainer", clock="update")
def my_update(policy: Policy, rollouts: Rollouts, *, rho: float = 4.0, lr: float = 1e-4) -> Policy: ...
"""

import inspect
import math
from collections.abc import Callable

from penstock.graph.imports import imported, names_function, short
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
    """At least 0; infinity is a bound that bounds nothing."""
    return _numbers("a number of at least 0", lambda number: number >= 0, names)


def share(*names: str) -> Requirement:
    """A discount, which may be 1."""
    return _numbers("a number from 0 to 1", lambda number: 0 <= number <= 1, names)


def decay(*names: str) -> Requirement:
    """What is kept of a moving average: not all of it."""
    return _numbers("a number from 0 to below 1", lambda number: 0 <= number < 1, names)


def above(least: float, *names: str) -> Requirement:
    return _numbers(f"a number above {least:g}", lambda number: number > least, names)


def count(least: int, *names: str) -> Requirement:
    needed = f"a whole number of at least {least}"
    return _numbers(needed, lambda number: isinstance(number, int) and number >= least, names)


def learning_rate(call: Call) -> None:
    """Of the option `lr`: a number, or a schedule (see `nodes.learn.schedules`) whose own options are bound."""
    given = call.options.get("lr")
    if given is None or not names_function(given):
        call.numbers("a finite number of at least 0, or a schedule", lambda number: 0 <= number < math.inf, "lr")
        return
    schedule, bound = imported(given["path"]), given.get("options", {})
    parameters = inspect.signature(schedule).parameters.values() if callable(schedule) else ()
    free = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in bound]
    if free:
        name = short(given["path"])
        needed = f"partial({name}, {', '.join(f'{option}=…' for option in free)})"
        raise call.lack(f"{name} without {', '.join(free)}", needed, "lr", code="unbound-schedule")


def betas(call: Call) -> None:
    given = call.options.get("betas")
    fit = isinstance(given, list) and len(given) == 2 and all(type(b) in (int, float) and 0 <= b < 1 for b in given)
    if given is not None and not fit:
        raise call.lack(repr(given), "two numbers from 0 to below 1", "betas", code="out-of-range")


def _numbers(needed: str, fit: Callable[[float], bool], names: tuple[str, ...]) -> Requirement:
    def check(call: Call) -> None:
        call.numbers(needed, fit, *names)

    return check


ADAMW = (learning_rate, not_negative("weight_decay"), positive("clip_norm"), count(1, "micro_tokens"), betas)
"""Of an update that has AdamW's options and a bound of the gradient under their usual names."""
